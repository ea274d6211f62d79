"""Timeouts: the deadline of a job."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from graphile_worker._base.durations import format_seconds, seconds
from graphile_worker._base.stop_signals import StopSignal
from graphile_worker.errors import BatchError, TaskProcessError, TaskTimeoutError
from graphile_worker.outcome import ControlFlow, describe_error, unwrap_control_flow

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from graphile_worker._base.durations import Duration

_STOP_GRACE = 1.0
"""Seconds between asking a thread to stop and abandoning it."""


class Deadline:
    """The deadline of one run of a job.

    Args:
        timeout: Seconds from now.
    """

    def __init__(self, timeout: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout = self._length = timeout
        self._scope: asyncio.Timeout | None = None
        self._moving: asyncio.Future[None] | None = None
        self.stop_requested = StopSignal()
        """Set when the deadline has passed. No other job shares it."""
        self._moved = False
        self.expired = False
        """Whether the deadline has passed, and the job was asked to stop."""
        self.begin()

    def begin(self) -> None:
        """Start the timeout now: the time that the job has waited for its process does not count."""
        self._begun = self._loop.time()
        self._when = self._begun + self._length

    def renew(self, stop_requested: StopSignal) -> Deadline:
        """Return a new deadline for another run of the job.

        A thread of the earlier run may still use this one.
        """
        new = Deadline(self._timeout)
        new.stop_requested = stop_requested
        return new

    @property
    def at(self) -> datetime:
        """The time of the deadline, by this machine's clock."""
        return datetime.now(UTC) + timedelta(seconds=self.remaining)

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, or 0 if it has passed."""
        return max(0.0, self._when - self._loop.time())

    def extend(self, duration: Duration) -> None:
        """Replace the deadline with one this long from now. May be called from any thread."""
        self._length = seconds("extend_deadline", duration, "more than 0")
        self._when = self._loop.time() + self._length
        self._moved = True
        self._loop.call_soon_threadsafe(self._move)

    def _move(self) -> None:
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(self._when)
        if self._moving is not None and not self._moving.done():
            self._moving.set_result(None)

    async def watch(self, work: Awaitable[Any]) -> Any:
        """Await the work and return its result. Cancel the work when the deadline passes."""
        raised: Exception | None = None
        try:
            async with asyncio.timeout_at(self._when) as self._scope:
                try:
                    return await work
                except Exception as error:
                    raised = error
                    raise
        except TimeoutError as error:
            if error is raised:
                raise  # raised by the task itself
            raise self.over() from error.__cause__  # its traceback shows where the task was
        finally:
            if self._scope is not None and self._scope.expired():
                self._expire()
            self._scope = None

    async def watch_thread(self, future: asyncio.Future[Any]) -> bool:
        """Return whether the thread ends before the deadline, or within a second after it."""
        while self.remaining:
            self._moving = self._loop.create_future()  # done when the deadline is moved
            await asyncio.wait(
                [future, self._moving], timeout=self.remaining, return_when=asyncio.FIRST_COMPLETED
            )
            if future.done():
                return True
        self._expire()
        await asyncio.wait([future], timeout=_STOP_GRACE)
        return future.done()

    def _expire(self) -> None:
        self.expired = True
        self.stop_requested.set()

    def overrules(self, error: Exception) -> bool:
        """Return whether the timeout takes precedence over the error that the job then failed with.

        An outcome that the task has chosen stands, and so do the errors of a batch's items. If the task's
        process has ended because of the worker, it is not a timeout of the job.
        """
        if isinstance(error, TaskProcessError) and error.interrupted:
            return False
        return self.expired and not isinstance(
            unwrap_control_flow(error), ControlFlow | BatchError | TaskTimeoutError
        )

    def over(self, error: Exception | None = None) -> TaskTimeoutError:
        """Return the error for a missed deadline, with the error that the job then failed with."""
        text = f"The job exceeded its timeout of {format_seconds(self._timeout)}"
        if self._moved:
            whole = self._when - self._begun
            text += f", {'extended' if whole > self._timeout else 'shortened'} to {format_seconds(whole)}"
        if error is not None:
            text += f", and then failed: {describe_error(error)}"
        return TaskTimeoutError(text)
