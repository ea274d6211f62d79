"""Exchanges that are under way while the worker goes on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


class Flights:
    """Runs exchanges beside each other.

    Args:
        landed: Called when one has ended.
    """

    def __init__(self, landed: Callable[[], None]) -> None:
        self._under_way: set[asyncio.Task[None]] = set()
        self._landed = landed
        self._error: BaseException | None = None

    def __len__(self) -> int:
        return len(self._under_way)

    async def start(self, exchange: Coroutine[None, None, None]) -> None:
        """Begin one; it has been sent when this returns."""
        task = asyncio.create_task(exchange, name="graphile-worker exchange")
        self._under_way.add(task)
        task.add_done_callback(self._end)
        await asyncio.sleep(0)

    def check(self) -> None:
        """Raise what one ended with, if it was an error."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    async def all_landed(self) -> None:
        """Wait until none is under way."""
        while self._under_way:
            await asyncio.wait(self._under_way)

    def cancel(self) -> None:
        """Do not wait for them: the event loop is closing, or nobody will ask what they came to."""
        for task in self._under_way:
            task.cancel()

    def _end(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            self._error = self._error or task.exception()
        self._landed()
