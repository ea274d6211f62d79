"""Track which code holds the connections of a pool, and how long other calls wait for one."""

from __future__ import annotations

import asyncio
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import PurePath
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from graphile_worker._base.durations import format_duration
from graphile_worker._base.text import pluralize
from graphile_worker.errors import PoolTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType

    from graphile_worker._base.logs import AnyLogger
    from graphile_worker.job import Job

CURRENT_JOB: ContextVar[Job | None] = ContextVar("graphile_worker_current_job", default=None)
"""The job that the current code runs for. Also set on the job's thread, and in asyncio tasks it starts."""
LONG_WAIT = 10.0
"""Seconds of waiting after which a warning is logged."""
_MAX_NAMED_HOLDERS = 5
_ADVICE = "Hold connections for a shorter time, or raise max_pool_size."
_INTERNAL_PACKAGES = ("graphile_worker", "contextlib", "asyncio")


class Loan:
    """A connection that user code holds. The holder is described only when a message needs it."""

    __slots__ = ("_code", "_job", "_line", "connection", "since")

    def __init__(self) -> None:
        self._job = CURRENT_JOB.get()
        self._code, self._line = (None, 0) if self._job is not None else _calling_code()
        self.since = monotonic()
        self.connection: Any = None
        """The connection; None until it is open."""

    def __str__(self) -> str:
        return f"{self._holder()} for {format_duration(monotonic() - self.since)}"

    def _holder(self) -> str:
        if self._job is not None:
            return f"job {self._job.id} ({self._job.task_identifier})"
        if self._code is not None:
            return f"{self._code.co_name} ({PurePath(self._code.co_filename).name}:{self._line})"
        return "code outside a task"


class Congestion(NamedTuple):
    """Calls that have waited too long for a connection."""

    calls: int
    """How many calls wait."""
    seconds: float
    """How long the first of them has waited."""
    holders: str
    """Which code holds connections, and for how long."""

    def __str__(self) -> str:
        calls = pluralize(self.calls, "call is", "calls are")
        waited = format_duration(self.seconds)
        return f"{calls} waiting for a connection, the first for {waited}. {self.holders}. {_ADVICE}"


class PoolUsage:
    """The loans of a pool and the calls that wait. Only `congestion` may be called from any thread.

    Args:
        size: How many connections the pool has for user code and own statements.
        logger: Where to warn about long waits.
    """

    def __init__(self, size: int, logger: AnyLogger) -> None:
        self._size = size
        self._logger = logger
        self._waiting: dict[object, float] = {}
        self._warned_at: float | None = None
        self.loans: dict[Loan, None] = {}

    def lend(self) -> Loan:
        """Record that the calling code holds a connection."""
        loan = Loan()
        self.loans[loan] = None
        return loan

    def end(self, loan: Loan) -> None:
        """Record that the connection was returned."""
        self.loans.pop(loan, None)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Record that a call waits for a connection, and warn if that takes long."""
        call = object()
        self._waiting[call] = monotonic()
        timer = asyncio.get_running_loop().call_later(LONG_WAIT, self._warn)
        try:
            yield
        finally:
            timer.cancel()
            del self._waiting[call]
            if self._warned_at is not None and self.congestion() is None:
                waited = format_duration(monotonic() - self._warned_at + LONG_WAIT)
                self._logger.info("No call waits long for a connection any more, after %s", waited)
                self._warned_at = None

    def congestion(self) -> Congestion | None:
        """Describe the calls that have waited too long; None if there are none."""
        since = list(self._waiting.values())
        if not since or (longest := monotonic() - since[0]) < LONG_WAIT:
            return None
        return Congestion(len(since), longest, self._holders())

    def timeout_error(self, timeout: float) -> PoolTimeoutError:
        """Return the error for a call that has waited for the whole timeout."""
        return PoolTimeoutError(
            f"No connection was free within {format_duration(timeout)} (pool_timeout). "
            f"{self._holders()}. {_ADVICE}"
        )

    def _holders(self) -> str:
        loans = sorted(list(self.loans), key=lambda loan: loan.since)  # noqa: C414 - copied in one step
        if not loans:
            return f"No task holds any of the {self._size} connections"
        named = ", ".join(map(str, loans[:_MAX_NAMED_HOLDERS]))
        if len(loans) > _MAX_NAMED_HOLDERS:
            named += f" and {len(loans) - _MAX_NAMED_HOLDERS} more"
        return f"{len(loans)} of {self._size} connections are held: by {named}"

    def _warn(self) -> None:
        congestion = self.congestion()
        if congestion is not None and self._warned_at is None:
            self._warned_at = monotonic()
            self._logger.warning("%s", congestion)


def _calling_code() -> tuple[CodeType | None, int]:
    """Return the user's code, and its line, that requests the connection."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - inspect.stack reads every frame
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _INTERNAL_PACKAGES:
        frame = frame.f_back
    return (None, 0) if frame is None else (frame.f_code, frame.f_lineno)
