"""Loggers that add a scope to their records, and that never raise.

The library logs only through `ScopedLogger`. If the log server is unavailable, a filter is broken or stderr
is closed, only log records are lost: jobs and services do not depend on logging.
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
_last_report_at: float | None = None


class ScopedLogger(logging.LoggerAdapter[Any]):
    """A logger whose records carry a scope as attributes.

    The library itself uses label, worker_id, task_identifier and job_id. The methods never raise. If a record
    cannot be logged, that is reported on stderr, at most once a minute.

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
        """Add the scope to the `extra` of the call, which takes precedence."""
        kwargs["extra"] = {**self.extra, **(kwargs.get("extra") or {})}
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a record, or lose it if logging fails. All other methods call this one."""
        try:
            # So that the record names the caller's line, not this one.
            super().log(level, msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})
        except BaseException as error:  # noqa: BLE001 - a handler that calls sys.exit() must not end a worker
            report_lost_record(error)

    def scope(self, **extra: object) -> ScopedLogger:
        """Return the same logger with more fields in each record."""
        return ScopedLogger(self.logger, {**self.extra, **extra})


class RelayedLogger(ScopedLogger):
    """A `ScopedLogger` for a thread that must never wait for logging: another thread writes its records.

    Args:
        logger: The logger that writes the records.
        extra: The scope of the records.
        relay: Calls a function on the thread that writes the records.
    """

    def __init__(
        self, logger: AnyLogger, extra: Mapping[str, object], relay: Callable[[Callable[[], object]], object]
    ) -> None:
        super().__init__(logger, extra)
        self._relay = relay

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a record soon, on the other thread."""
        if kwargs.get("exc_info") is True:
            kwargs["exc_info"] = sys.exc_info()  # the other thread handles no exception
        write = super().log
        self._relay(lambda: write(level, msg, *args, **kwargs))

    def scope(self, **extra: object) -> RelayedLogger:
        """Return the same logger with more fields in each record."""
        return RelayedLogger(self.logger, {**self.extra, **extra}, self._relay)


library_logger = ScopedLogger(logging.getLogger("graphile_worker"), {})
"""The logger of modules that are not given one."""


def never_raising(logger: AnyLogger) -> ScopedLogger:
    """Return the logger, wrapped in a `ScopedLogger` unless it is one."""
    return logger if isinstance(logger, ScopedLogger) else ScopedLogger(logger, {})


def report_lost_record(error: BaseException) -> None:
    """Report on stderr that a record is lost, at most once a minute. Ignore errors of stderr."""
    global _last_report_at  # noqa: PLW0603 - a process has one stderr
    if _last_report_at is not None and monotonic() - _last_report_at < _REPORT_INTERVAL:
        return
    _last_report_at = monotonic()
    with suppress(BaseException):
        sys.stderr.write(f"graphile_worker: a log record is lost, because logging failed: {error!r}\n")
