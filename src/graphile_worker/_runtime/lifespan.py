"""What an application opens for its tasks, and closes after them: connections to others, models, caches."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from graphile_worker.logs import ScopedLogger


class Lifespan:
    """Opens an async context manager, and closes it in the same task: some insist on that.

    Args:
        opens: Makes the context manager, if there is one.
        logger: Where to say that it cannot be closed.
    """

    def __init__(
        self, opens: Callable[[], AbstractAsyncContextManager[Any]] | None, logger: ScopedLogger
    ) -> None:
        self._opens = opens
        self._logger = logger
        self._over = asyncio.Event()
        self._living: asyncio.Task[None] | None = None

    async def open(self) -> Any:
        """What it gives to the tasks."""
        if self._opens is None:
            return None
        opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._living = asyncio.create_task(self._live(self._opens, opened), name="graphile-worker lifespan")
        try:
            await asyncio.wait([opened, self._living], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._living.cancel()
            raise
        if not opened.done():
            living, self._living = self._living, None
            error = living.exception()
            if error is not None:
                error.add_note("This was raised while the lifespan was entered, before the first job.")
                raise error
            raise ConfigurationError("The lifespan ended before the first job: it must yield once.")
        return opened.result()

    async def _live(
        self, opens: Callable[[], AbstractAsyncContextManager[Any]], opened: asyncio.Future[Any]
    ) -> None:
        async with opens() as state:
            opened.set_result(state)
            await self._over.wait()

    async def close(self) -> None:
        """No task runs any more. May be called again, and if it was never opened."""
        self._over.set()
        living, self._living = self._living, None
        if living is None:
            return
        await asyncio.wait([living])
        if not living.cancelled() and (error := living.exception()) is not None:
            self._logger.error("The lifespan could not be closed: %r", error, exc_info=error)
