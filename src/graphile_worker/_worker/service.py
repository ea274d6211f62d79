"""`Service`: the base class of the worker's loop and of the services next to it."""

from __future__ import annotations

import asyncio
import random
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker._base.user_code import is_being_cancelled
from graphile_worker._db.connection.error_mapping import message_of, without_details

if TYPE_CHECKING:
    from graphile_worker._base.logs import ScopedLogger

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 10.0


class ServiceFailure(NamedTuple):
    """A failure of a service that lasts."""

    since: float
    """The time of the first failed tick, on the monotonic clock."""
    reason: str


class Service:
    """Calls `tick` repeatedly. Each tick returns the delay before the next one; `wake` ends the delay.

    An error in a tick is logged, and the next tick follows after a pause. The same holds for a CancelledError
    that the code of a tick raises itself. Only `cancel` and the closing of the event loop end a service.
    """

    name = "service"

    def __init__(self, logger: ScopedLogger) -> None:
        self.logger = logger
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failures = 0
        self._ending = False
        self._tick_failed = False
        self._failing: ServiceFailure | None = None

    async def tick(self) -> float | None:
        """Do one unit of work. Returns the seconds until the next tick, or None to wait for `wake`."""
        raise NotImplementedError

    @property
    def failing(self) -> ServiceFailure | None:
        """The failure of all recent ticks; None if the last tick succeeded. May be read from any thread."""
        return self._failing

    @property
    def has_ended(self) -> bool:
        """Whether the service has ended, although `cancel` was not called. May be read from any thread."""
        return self._task is not None and self._task.done() and not self._ending

    @property
    def is_being_cancelled(self) -> bool:
        """Whether the service's task was cancelled, by `cancel` or by the closing of the event loop."""
        return self._task is not None and self._task.cancelling() > 0

    def start(self) -> None:
        """Start the service."""
        self._ending = False
        self._task = asyncio.create_task(self._run(), name=f"graphile-worker {self.name}")

    def wake(self) -> None:
        """Run the next tick now."""
        self._woken.set()

    def cancel(self) -> None:
        """Cancel the service, even in the middle of a tick, without waiting until it has ended."""
        self._ending = True
        if self._task is not None:
            self._task.cancel()

    async def stop(self) -> None:
        """Cancel the service, even in the middle of a tick, and wait until it has ended."""
        self.cancel()
        if self._task is not None:
            await asyncio.wait([self._task])

    def record_failure(self, error: BaseException) -> None:
        """Record that this tick has failed. A tick that handles its own errors calls this method."""
        self._tick_failed = True
        since = monotonic() if self._failing is None else self._failing.since
        self._failing = ServiceFailure(since, message_of(error))

    async def _run(self) -> None:
        while not self._ending:  # the user's code in a tick may have caught the CancelledError
            self._woken.clear()
            self._tick_failed = False
            try:
                delay = await self.tick()
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
                    raise
                delay = self._handle_error(error)
            else:
                self._failures = 0
            if not self._tick_failed:
                self._failing = None
            if not self._ending:
                await self._sleep(delay)

    def _handle_error(self, error: BaseException) -> float:
        self.record_failure(error)
        self._failures += 1
        delay = pause_after(self._failures)
        without_details(error)  # the details may quote a whole row
        self.logger.error("The %s failed; retrying in %.1f s", self.name, delay, exc_info=error)
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
    """Return the seconds to wait after this many failures in a row.

    The pause grows with each failure, and is random so that workers do not retry in step.
    """
    longest = min(_FIRST_PAUSE * 2.0 ** min(failures - 1, 20), _LONGEST_PAUSE)
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
