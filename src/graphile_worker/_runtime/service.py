"""`Service`: a background thing that does one unit of work after another."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from graphile_worker._db.failures import without_details

if TYPE_CHECKING:
    from graphile_worker.logs import ScopedLogger

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 10.0


class Service:
    """Calls `tick` again and again, as long as the returned delay says in between, or until it is woken.

    An error in a tick is logged, and followed by a pause; the loop goes on.
    """

    name = "service"

    def __init__(self, logger: ScopedLogger) -> None:
        self.logger = logger
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failures = 0
        self._ending = False

    async def tick(self) -> float | None:
        """One unit of work. Returns the seconds until the next, or None to wait until woken."""
        raise NotImplementedError

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

    async def _run(self) -> None:
        while not self._ending:  # somebody's code in a tick may have swallowed that it is cancelled
            self._woken.clear()
            try:
                delay = await self.tick()
            except Exception as error:
                self._failures += 1
                delay = pause_after(self._failures)
                without_details(error)  # they may quote a whole row
                self.logger.exception("The %s failed; again in %.1f s", self.name, delay)
            else:
                self._failures = 0
            if not self._ending:
                await self._sleep(delay)

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
