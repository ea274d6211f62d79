"""How a worker is to run."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from graphile_worker.emitter import Events
from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from typing import TypeAlias

    import asyncpg

    from graphile_worker.logs import AnyLogger

    Duration: TypeAlias = float | timedelta
    FlagsNow: TypeAlias = Iterable[str] | None
    FlagsOption: TypeAlias = FlagsNow | Callable[[], FlagsNow | Awaitable[FlagsNow]]

_DURATIONS = {
    "poll_interval": "more than 0",
    "prefetch_ttl": "more than 0",
    "min_reset_locked_interval": "more than 0",
    "max_reset_locked_interval": "more than 0",
    "interrupted_delay": "0 or more",
    "shutdown_grace": "0 or more",
}
_SWITCHES = ("listen", "use_local_time", "handle_signals", "migrate", "prepared_statements")
_COUNTS = {"concurrency": 1, "prefetch": 0}
_MOST = 100_000


def seconds(name: str, value: object, allowed: str = "0 or more") -> float:
    """A duration as seconds; refuses what is none.

    >>> from datetime import timedelta
    >>> seconds("grace", timedelta(minutes=1))
    60.0
    """
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if (
        not isinstance(number, int | float)
        or isinstance(number, bool)
        or not math.isfinite(number)
        or number < 0
        or (number == 0 and allowed == "more than 0")
    ):
        raise ConfigurationError(f"{name} is {value!r}; it must be seconds or a timedelta, {allowed}.")
    return float(number)


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The arguments of `run` and `run_once` beside the tasks, checked; durations are in seconds."""

    dsn: str | None = None
    pool: asyncpg.Pool | None = None
    schema: str | None = None
    concurrency: int = 1
    max_pool_size: int = 10
    poll_interval: float = 2.0
    listen: bool = True
    listen_dsn: str | None = None
    prefetch: int = 0
    prefetch_ttl: float = 300.0
    forbidden_flags: FlagsOption = None
    use_local_time: bool = False
    interrupted_delay: float = 0.0
    shutdown_grace: float = 5.0
    min_reset_locked_interval: float = 480.0
    max_reset_locked_interval: float = 600.0
    handle_signals: bool = True
    migrate: bool = True
    prepared_statements: bool = True
    events: Events = field(default_factory=Events)
    logger: AnyLogger | None = None
    once: bool = False
    """Whether to end when there is nothing left to run."""

    @classmethod
    def of(cls, **given: Any) -> Self:
        """What the user gave; durations as they come."""
        for name, allowed in _DURATIONS.items():
            if name in given:
                given[name] = seconds(name, given[name], allowed)
        if given.get("events") is None:
            given["events"] = Events()
        return cls(**given)

    def __post_init__(self) -> None:
        if self.dsn is not None and self.pool is not None:
            raise ConfigurationError("Pass dsn or pool, not both.")
        if not self.listen and self.listen_dsn is not None:
            raise ConfigurationError("Pass listen_dsn, or listen=False, not both.")
        if not isinstance(self.events, Events):
            raise ConfigurationError(f"events= takes an Events, not a {type(self.events).__name__}.")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}; it must be True or False.")
        if self.logger is not None and not isinstance(self.logger, logging.Logger | logging.LoggerAdapter):
            raise ConfigurationError(f"logger= takes a logger, not a {type(self.logger).__name__}.")
        for name, least in _COUNTS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
                raise ConfigurationError(
                    f"{name} is {value!r}; it must be an integer from {least} to {_MOST:,}."
                )
        if self.min_reset_locked_interval > self.max_reset_locked_interval:
            raise ConfigurationError(
                f"min_reset_locked_interval ({self.min_reset_locked_interval} s) is longer than "
                f"max_reset_locked_interval ({self.max_reset_locked_interval} s)."
            )

    @property
    def own_connections(self) -> int:
        """How many connections of its pool the worker keeps for itself: to exchange, and to listen."""
        return 2 if self.listen and self.listen_dsn is None else 1
