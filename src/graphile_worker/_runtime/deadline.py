"""How long a job may run."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from graphile_worker.context import Stopping
from graphile_worker.durations import seconds, shown
from graphile_worker.errors import BatchError, TaskProcessError, TaskTimeoutError
from graphile_worker.outcome import ControlFlow, describe_error, unwrapped

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from graphile_worker.durations import Duration

_LAST_CHANCE = 1.0
"""Seconds between telling a thread that its time is over and going on without it."""


class Deadline:
    """When a job has to be done.

    Args:
        timeout: Seconds from now.
    """

    def __init__(self, timeout: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout = self._length = timeout
        self._scope: asyncio.Timeout | None = None
        self._moving: asyncio.Future[None] | None = None
        self.stopping = Stopping()
        """Set when it is over; for this job alone."""
        self._moved = False
        self.expired = False
        """Whether the job was told that its time is over."""
        self.begin()

    def begin(self) -> None:
        """Count from now on: until now it had to wait for something that is not of its own doing."""
        self._begun = self._loop.time()
        self._when = self._begun + self._length

    def anew(self, stopping: Stopping) -> Deadline:
        """For the same job, which is to run again: a thread of its first run may have this one still."""
        new = Deadline(self._timeout)
        new.stopping = stopping
        return new

    @property
    def at(self) -> datetime:
        """The moment, by this machine's clock."""
        return datetime.now(UTC) + timedelta(seconds=self.remaining)

    @property
    def remaining(self) -> float:
        """Seconds until then; none if it is over."""
        return max(0.0, self._when - self._loop.time())

    def extend(self, duration: Duration) -> None:
        """So long from now, whatever it was. May be called from any thread."""
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
        """What it comes to; if that is not in time it is cancelled."""
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
                raise  # the task's own
            raise self.over() from error.__cause__  # the cancellation, which says where it was
        finally:
            if self._scope is not None and self._scope.expired():
                self._expire()
            self._scope = None

    async def watch_thread(self, future: asyncio.Future[Any]) -> bool:
        """Whether it ends in time, or soon after it was told that its time is over."""
        while self.remaining:
            self._moving = self._loop.create_future()  # or nobody would hear that it has less time now
            await asyncio.wait(
                [future, self._moving], timeout=self.remaining, return_when=asyncio.FIRST_COMPLETED
            )
            if future.done():
                return True
        self._expire()
        await asyncio.wait([future], timeout=_LAST_CHANCE)
        return future.done()

    def _expire(self) -> None:
        self.expired = True
        self.stopping.set()

    def overrules(self, error: Exception) -> bool:
        """Whether it counts more that the time is over than that the job then failed like that.

        What the task has chosen stands, and so does what it says of the items of a batch. If its process has
        ended because of the worker, the time that was over is the worker's.
        """
        if isinstance(error, TaskProcessError) and error.interrupted:
            return False
        return self.expired and not isinstance(unwrapped(error), ControlFlow | BatchError | TaskTimeoutError)

    def over(self, error: Exception | None = None) -> TaskTimeoutError:
        """That it was not in time; and what it failed with when it was told so."""
        text = f"It took longer than its timeout of {shown(self._timeout)}"
        if self._moved:
            whole = self._when - self._begun
            text += f", {'extended' if whole > self._timeout else 'shortened'} to {shown(whole)}"
        if error is not None:
            text += f", and then failed: {describe_error(error)}"
        return TaskTimeoutError(text)
