"""`Shared`: a value that is expensive to read, and that all viewers share."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, Generic, TypeVar

from graphile_worker.web.errors import QueryTimeoutError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")
_FACTOR = 50
"""The value is kept this many times as long as reading it took: the table is not read all the time."""
_QUICK = 0.05
"""What takes less, in seconds, is read each time."""
_PATIENCE = 0.2
"""What took longer is read in the background, while viewers get the last value."""


class Shared(Generic[T]):
    """The last value, read again when it is too old. Viewers who ask at the same time share one reading.

    Args:
        read: Reads the value.
        min_age: How long a value is kept in any case, in seconds.
        is_small: Whether the table is so small that the value is read each time, even if the machine is slow.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[T]],
        *,
        min_age: float = 0.0,
        is_small: Callable[[], bool] = lambda: False,
    ) -> None:
        self._read = read
        self._is_small = is_small
        self._min_age = min_age
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reading: asyncio.Task[T] | None = None
        self._value: tuple[T] | None = None
        self._read_at = 0.0
        self.seconds = 0.0
        """How long the last reading took."""
        self._is_outdated = False

    async def get(self) -> T:
        """Return the value.

        Raises:
            Exception: It could not be read, and there is no last value.
        """
        self._check_loop()
        if self._value is not None and not self._is_due():
            return self._value[0]
        if self._reading is None:
            self._reading = asyncio.create_task(self._renew())
        if self._value is not None and self.seconds > _PATIENCE and not self._is_small():
            return self._value[0]
        # A viewer who is gone does not end the reading for the others.
        return await asyncio.shield(self._reading)

    def peek(self) -> T | None:
        """Return the last value, if there is one, and begin to read if it is too old."""
        self._check_loop()
        if (self._value is None or self._is_due()) and self._reading is None:
            self._reading = asyncio.create_task(self._renew())
        return None if self._value is None else self._value[0]

    def outdate(self) -> None:
        """Read again when the value is asked for next, because a viewer has changed something."""
        self._is_outdated = True

    async def close(self) -> None:
        """Stop reading."""
        reading, self._reading = self._reading, None
        if reading is not None and self._loop is asyncio.get_running_loop():
            reading.cancel()
            await asyncio.wait([reading])

    def _check_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._reading = loop, None

    def _is_due(self) -> bool:
        kept = 0.0 if self.seconds < _QUICK or self._is_small() else _FACTOR * self.seconds
        return self._is_outdated or monotonic() - self._read_at >= max(self._min_age, kept)

    async def _renew(self) -> T:
        started = monotonic()
        self._is_outdated = False
        me = asyncio.current_task()
        if me is not None:
            me.add_done_callback(_retrieve)
        try:
            value = await self._read()
        except QueryTimeoutError:
            self._read_at, self.seconds = (
                monotonic(),
                monotonic() - started,
            )  # the last value is better than none
            raise
        except BaseException:
            self._value = None  # an outage must show
            raise
        else:
            self._read_at, self.seconds = monotonic(), monotonic() - started
            self._value = (value,)
            return value
        finally:
            if self._reading is me:
                self._reading = None


def _retrieve(task: asyncio.Task[T]) -> None:
    if not task.cancelled():
        task.exception()  # otherwise asyncio logs errors without a reader
