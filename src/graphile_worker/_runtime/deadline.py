"""How long a job may run."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from graphile_worker.context import Stopping
from graphile_worker.durations import seconds, shown
from graphile_worker.errors import TaskTimeoutError

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
        self._timeout = timeout
        self._when = self._loop.time() + timeout
        self._scope: asyncio.Timeout | None = None
        self.stopping = Stopping()
        """Set when it is over; for this job alone."""

    def begin(self) -> None:
        """Count from now on: until now it had to wait for something that is not of its own doing.

        Or it ran already, and is to run again.
        """
        self._when = self._loop.time() + self._timeout

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
        self._timeout = seconds("extend_deadline", duration, "more than 0")
        self._when = self._loop.time() + self._timeout
        self._loop.call_soon_threadsafe(self._move)

    def _move(self) -> None:
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(self._when)

    async def watch(self, work: Awaitable[Any]) -> Any:
        """What it comes to, if that is in time; otherwise it is cancelled."""
        try:
            async with asyncio.timeout_at(self._when) as self._scope:
                return await work
        except TimeoutError as error:
            if self._scope is None or not self._scope.expired():
                raise  # the task's own
            # The cancellation, which says where it was; unless the task has made something else of it.
            raise self.over() from error.__cause__ or error
        finally:
            self._scope = None

    async def watch_thread(self, future: asyncio.Future[Any]) -> bool:
        """Whether it ends in time, or soon after it was told that its time is over."""
        while self.remaining:
            if await _ends(future, self.remaining):
                return True
        self.stopping.set()
        return await _ends(future, _LAST_CHANCE)

    def over(self) -> TaskTimeoutError:
        """That it was not."""
        return TaskTimeoutError(f"It took longer than its timeout of {shown(self._timeout)}")


async def _ends(future: asyncio.Future[Any], within: float) -> bool:
    await asyncio.wait([future], timeout=within)
    return future.done()
