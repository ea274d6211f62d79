"""Log records that say what they are about, and loggers that never raise.

The library logs through `ScopedLogger` alone. A log server that is away, a broken filter or a closed stderr
costs log records and nothing else: neither jobs nor services depend on being observed.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping

    AnyLogger: TypeAlias = logging.Logger | logging.LoggerAdapter[Any]

_REPORT_INTERVAL = 60.0
_said_at: float | None = None


class ScopedLogger(logging.LoggerAdapter[Any]):
    """A logger whose records carry a scope as attributes.

    The library's own are label, worker_id, task_identifier and job_id. Its methods never raise: if a record
    cannot be logged, that is reported on stderr, once a minute at most.

    >>> import logging
    >>> log = ScopedLogger(logging.getLogger("shop"), {"label": "job"}).scope(order=7)
    >>> dict(log.extra)
    {'label': 'job', 'order': 7}
    """

    def __init__(self, logger: AnyLogger, extra: Mapping[str, object]) -> None:
        super().__init__(logger, extra)
        self.extra: Mapping[str, object] = extra

    def process(
        self, msg: object, kwargs: MutableMapping[str, Any]
    ) -> tuple[object, MutableMapping[str, Any]]:
        """Add the scope to what the call itself says."""
        kwargs["extra"] = {**self.extra, **(kwargs.get("extra") or {})}
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a record, or lose it. All other methods of a logger end here."""
        try:
            # The record is to name the line of the caller, not this one.
            super().log(level, msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})
        except BaseException as error:  # noqa: BLE001 - a handler that calls sys.exit() must not end a worker
            report_lost_record(error)

    def scope(self, **extra: object) -> ScopedLogger:
        """The same logger with more to say in each record."""
        return ScopedLogger(self.logger, {**self.extra, **extra})


class RelayedLogger(ScopedLogger):
    """A `ScopedLogger` for a thread that must never wait for a log: another thread writes its records.

    Args:
        logger: Where the records go.
        extra: What they carry.
        relay: Calls a function on the thread that writes.
    """

    def __init__(
        self, logger: AnyLogger, extra: Mapping[str, object], relay: Callable[[Callable[[], object]], object]
    ) -> None:
        super().__init__(logger, extra)
        self._relay = relay

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Have a record logged soon."""
        if kwargs.get("exc_info") is True:
            kwargs["exc_info"] = sys.exc_info()  # there is none on the thread that writes
        write = super().log
        self._relay(lambda: write(level, msg, *args, **kwargs))

    def scope(self, **extra: object) -> RelayedLogger:
        """The same logger with more to say in each record."""
        return RelayedLogger(self.logger, {**self.extra, **extra}, self._relay)


library_logger = ScopedLogger(logging.getLogger("graphile_worker"), {})
"""For modules that are given no logger."""


def never_raising(logger: AnyLogger) -> ScopedLogger:
    """The logger itself if it never raises, or else one around it."""
    return logger if isinstance(logger, ScopedLogger) else ScopedLogger(logger, {})


def report_lost_record(error: BaseException) -> None:
    """Say on stderr that nothing can be logged; once a minute at most, and not at all if that fails too."""
    global _said_at  # noqa: PLW0603 - a process has one stderr
    if _said_at is not None and monotonic() - _said_at < _REPORT_INTERVAL:
        return
    _said_at = monotonic()
    with suppress(BaseException):
        sys.stderr.write(f"graphile_worker: a log record is lost, because logging failed: {error!r}\n")
