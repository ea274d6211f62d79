"""How a worker is to run."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypedDict

from graphile_worker.cron import parse_cron_items
from graphile_worker.durations import seconds
from graphile_worker.emitter import Events
from graphile_worker.errors import ConfigurationError
from graphile_worker.liveness import Lease
from graphile_worker.middleware.base import check_middleware
from graphile_worker.payload import MAX_PAYLOAD_SIZE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from contextlib import AbstractAsyncContextManager
    from os import PathLike
    from typing import TypeAlias

    import asyncpg

    from graphile_worker.cron import CronItem
    from graphile_worker.durations import Duration
    from graphile_worker.liveness import OnRecovery
    from graphile_worker.logs import AnyLogger
    from graphile_worker.middleware import Middleware

    CronItems: TypeAlias = Iterable[CronItem | Mapping[str, Any]]
    FlagsNow: TypeAlias = Iterable[str] | None
    FlagsOption: TypeAlias = FlagsNow | Callable[[], FlagsNow | Awaitable[FlagsNow]]

_DURATIONS = {
    "heartbeat_interval": "more than 0",
    "lease": "more than 0",
    "fast_lease": "more than 0",
    "recovery_delay": "0 or more",
    "poll_interval": "more than 0",
    "prefetch_ttl": "more than 0",
    "min_reset_locked_interval": "more than 0",
    "max_reset_locked_interval": "more than 0",
    "interrupted_delay": "0 or more",
    "shutdown_grace": "0 or more",
}
_SWITCHES = (
    "listen",
    "use_local_time",
    "handle_signals",
    "migrate",
    "prepared_statements",
    "recovery",
    "refund_attempt_on_recovery",
    "exit_if_stuck",
)
_COUNTS = {"concurrency": 1, "prefetch": 0}
_COUNTS_OR_NONE = ("max_task_processes", "max_jobs_per_task_process")
_MOST = 100_000
_LONGEST_LEASE = 10_800.0
"""Graphile Worker takes what was locked for four hours from anybody, and we lock anew every hour."""


class OnceOptions(TypedDict, total=False):
    """What `App.run_once` takes: of the arguments of `run_once` those that an app does not have itself."""

    concurrency: int
    max_task_processes: int | None
    max_jobs_per_task_process: int | None
    prefetch: int
    prefetch_ttl: Duration
    forbidden_flags: FlagsOption
    interrupted_delay: Duration
    shutdown_grace: Duration
    recovery: bool
    heartbeat_interval: Duration
    lease: Duration
    fast_lease: Duration
    task_leases: Mapping[str, Duration] | None
    recovery_delay: Duration
    refund_attempt_on_recovery: bool
    on_recovery: OnRecovery | None
    exit_if_stuck: bool
    handle_signals: bool
    migrate: bool


class RunOptions(OnceOptions, total=False):
    """What `App.run` and `App.running` take, in the same way."""

    poll_interval: Duration
    listen: bool
    listen_dsn: str | None
    min_reset_locked_interval: Duration
    max_reset_locked_interval: Duration
    crontab: str | None
    crontab_file: str | PathLike[str] | None
    cron_items: CronItems | None
    health: str | int | None


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The arguments of `run` and `run_once` beside the tasks, checked; durations are in seconds."""

    dsn: str | None = None
    pool: asyncpg.Pool | None = None
    schema: str | None = None
    concurrency: int = 1
    max_task_processes: int | None = None
    max_jobs_per_task_process: int | None = None
    max_pool_size: int = 10
    pool_timeout: float | None = None
    poll_interval: float = 2.0
    listen: bool = True
    listen_dsn: str | None = None
    prefetch: int = 0
    prefetch_ttl: float = 300.0
    forbidden_flags: FlagsOption = None
    use_local_time: bool = False
    max_payload_size: int = MAX_PAYLOAD_SIZE
    interrupted_delay: float = 0.0
    shutdown_grace: float = 5.0
    min_reset_locked_interval: float = 480.0
    max_reset_locked_interval: float = 600.0
    recovery: bool = True
    heartbeat_interval: float = 3.0
    lease: float = 38.0
    fast_lease: float = 8.0
    task_leases: Mapping[str, float] = field(default_factory=dict)
    recovery_delay: float = 0.0
    refund_attempt_on_recovery: bool = False
    on_recovery: OnRecovery | None = None
    exit_if_stuck: bool = False
    on_invalid_payload: str = "retry"
    lifespan: Callable[[], AbstractAsyncContextManager[Any]] | None = None
    middleware: Sequence[Middleware] = ()
    cron_items: Sequence[CronItem] = ()
    health: str | int | None = None
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
        if given.get("pool_timeout") is not None:
            given["pool_timeout"] = seconds("pool_timeout", given["pool_timeout"], "more than 0")
        leases = given.get("task_leases") or {}
        if not isinstance(leases, Mapping):
            raise ConfigurationError(f"task_leases is {leases!r}; it must be a mapping of tasks to seconds.")
        given["task_leases"] = {
            task: seconds(f"task_leases[{task!r}]", value) for task, value in leases.items()
        }
        given["middleware"] = check_middleware(given.get("middleware"))
        given["cron_items"] = parse_cron_items(given.get("cron_items") or ())
        if given.get("events") is None:
            given["events"] = Events()
        return cls(**given)

    def __post_init__(self) -> None:
        if self.dsn is not None and self.pool is not None:
            raise ConfigurationError("Pass dsn or pool, not both.")
        if not self.listen and self.listen_dsn is not None:
            raise ConfigurationError("Pass listen_dsn, or listen=False, not both.")
        self._check_types()
        for name, least in _COUNTS.items():
            self._check_count(name, least)
        for name in _COUNTS_OR_NONE:
            if getattr(self, name) is not None:
                self._check_count(name, 1)
        self._check_leases()
        if self.min_reset_locked_interval > self.max_reset_locked_interval:
            raise ConfigurationError(
                f"min_reset_locked_interval ({self.min_reset_locked_interval} s) is longer than "
                f"max_reset_locked_interval ({self.max_reset_locked_interval} s)."
            )

    def _check_count(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
            raise ConfigurationError(f"{name} is {value!r}; it must be an integer from {least} to {_MOST:,}.")

    def _check_types(self) -> None:
        if not isinstance(self.events, Events):
            raise ConfigurationError(f"events= takes an Events, not a {type(self.events).__name__}.")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}; it must be True or False.")
        if self.logger is not None and not isinstance(self.logger, logging.Logger | logging.LoggerAdapter):
            raise ConfigurationError(f"logger= takes a logger, not a {type(self.logger).__name__}.")
        if self.on_invalid_payload not in {"retry", "fail"}:
            raise ConfigurationError(
                f"on_invalid_payload is {self.on_invalid_payload!r}; it must be 'retry' or 'fail'."
            )
        function = self.lifespan.func if isinstance(self.lifespan, partial) else self.lifespan
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            raise ConfigurationError(f"Put @asynccontextmanager above {function.__name__}, the lifespan.")
        if self.lifespan is not None and not callable(self.lifespan):
            raise ConfigurationError(
                f"lifespan is {self.lifespan!r}; it must be a function that makes an async context manager."
            )
        if self.on_recovery is not None and not callable(self.on_recovery):
            raise ConfigurationError(f"on_recovery is {self.on_recovery!r}, which is no function.")

    def _check_leases(self) -> None:
        if self.lease > _LONGEST_LEASE:
            raise ConfigurationError(f"lease is {self.lease:g} s; it must be at most {_LONGEST_LEASE:g} s.")
        if not 2 * self.heartbeat_interval <= self.fast_lease <= self.lease / 2:
            raise ConfigurationError(
                f"heartbeat_interval is {self.heartbeat_interval:g} s, fast_lease {self.fast_lease:g} s, and "
                f"lease {self.lease:g} s. Each must be at least twice the one before it, or a worker that is "
                "only slow would be taken for dead."
            )
        for task, value in self.task_leases.items():
            if not self.lease <= value <= _LONGEST_LEASE:
                raise ConfigurationError(
                    f"The lease of the task {task!r} is {value:g} s; it must be from {self.lease:g} s, the "
                    f"lease of all tasks, to {_LONGEST_LEASE:g} s."
                )

    @property
    def terms(self) -> Lease | None:
        """What the worker promises and asks for; None if it takes no part in that."""
        if not self.recovery:
            return None
        return Lease(
            interval=self.heartbeat_interval,
            seconds=self.lease,
            fast=self.fast_lease,
            tasks=dict(self.task_leases),
        )

    @property
    def own_connections(self) -> int:
        """How many connections of its pool the worker keeps for itself: to exchange, and to listen."""
        return 2 if self.listen and self.listen_dsn is None else 1
