"""`Service`: a background thing that does one unit of work after another."""

from __future__ import annotations

import asyncio
import random
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker._db.failures import message_of, without_details
from graphile_worker.user_code import is_being_cancelled

if TYPE_CHECKING:
    from graphile_worker.logs import ScopedLogger

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 10.0


class Failing(NamedTuple):
    """Since when a service fails, and why."""

    since: float
    """On the monotonic clock."""
    why: str


class Service:
    """Calls `tick` again and again, as long as the returned delay says in between, or until it is woken.

    An error in a tick is logged, and followed by a pause; the loop goes on. It also survives a CancelledError
    that code in a tick raised by itself: only `cancel` and the closing of the event loop end a service.
    """

    name = "service"

    def __init__(self, logger: ScopedLogger) -> None:
        self.logger = logger
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failures = 0
        self._ending = False
        self._tick_failed = False
        self._failing: Failing | None = None

    async def tick(self) -> float | None:
        """One unit of work. Returns the seconds until the next, or None to wait until woken."""
        raise NotImplementedError

    @property
    def failing(self) -> Failing | None:
        """Since when all ticks have failed; None if the last one did not. May be read from any thread."""
        return self._failing

    @property
    def has_ended(self) -> bool:
        """Whether it does nothing any more, although it was not told to stop. May be read from any thread."""
        return self._task is not None and self._task.done() and not self._ending

    @property
    def is_being_cancelled(self) -> bool:
        """Whether its task was told to end, by us or by the closing of the event loop."""
        return self._task is not None and self._task.cancelling() > 0

    def start(self) -> None:
        """Begin."""
        self._ending = False
        self._task = asyncio.create_task(self._run(), name=f"graphile-worker {self.name}")

    def wake(self) -> None:
        """Do not wait any longer for the next tick."""
        self._woken.set()

    def cancel(self) -> None:
        """Begin to end, in the middle of a tick too."""
        self._ending = True
        if self._task is not None:
            self._task.cancel()

    async def stop(self) -> None:
        """End, in the middle of a tick too."""
        self.cancel()
        if self._task is not None:
            await asyncio.wait([self._task])

    def complain(self, error: BaseException) -> None:
        """Record that this tick has failed. A tick that handles its errors calls it before it returns."""
        self._tick_failed = True
        since = monotonic() if self._failing is None else self._failing.since
        self._failing = Failing(since, message_of(error))

    async def _run(self) -> None:
        while not self._ending:  # somebody's code in a tick may have swallowed that it is cancelled
            self._woken.clear()
            self._tick_failed = False
            try:
                delay = await self.tick()
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
                    raise
                delay = self._after_failure(error)
            else:
                self._failures = 0
            if not self._tick_failed:
                self._failing = None
            if not self._ending:
                await self._sleep(delay)

    def _after_failure(self, error: BaseException) -> float:
        self.complain(error)
        self._failures += 1
        delay = pause_after(self._failures)
        without_details(error)  # they may quote a whole row
        self.logger.error("The %s failed; again in %.1f s", self.name, delay, exc_info=error)
        return delay

    async def _sleep(self, delay: float | None) -> None:
        if delay is None:
            await self._woken.wait()
        elif delay > 0:
            timer = asyncio.get_running_loop().call_later(delay, self._woken.set)
            try:
                await self._woken.wait()
            finally:
                timer.cancel()


def pause_after(failures: int) -> float:
    """Seconds to wait after so many failures in a row: more each time, and not the same for all workers."""
    longest = min(_FIRST_PAUSE * 2.0 ** min(failures - 1, 20), _LONGEST_PAUSE)
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
