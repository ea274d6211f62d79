"""What an application opens for its tasks, and closes after them: connections to others, models, caches."""

from __future__ import annotations

import asyncio
import contextlib
import os
import traceback
from functools import partial
from inspect import unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphile_worker.errors import ConfigurationError, GraphileWorkerError
from graphile_worker.wording import relative_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from graphile_worker.logs import ScopedLogger

NOT_THEIRS = (str(Path(__file__).parents[1]) + os.sep, contextlib.__file__)
_AT_LEAST = 1.0
"""Seconds that it has to close, however urgent it is; and again once it is cancelled."""


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
        self.lost: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        """Done if it ends before it is closed; with the reason."""

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
                error.add_note(f"The lifespan failed before the first job{place_of(error, self._opens)}.")
                raise error
            raise ConfigurationError(
                f"The lifespan ended before the first job: it must yield once{place_of(None, self._opens)}."
            )
        self._living.add_done_callback(self._ended)
        return opened.result()

    async def _live(
        self, opens: Callable[[], AbstractAsyncContextManager[Any]], opened: asyncio.Future[Any]
    ) -> None:
        async with opens() as state:
            opened.set_result(state)
            await self._over.wait()

    def _ended(self, living: asyncio.Task[None]) -> None:
        if self._over.is_set():
            return
        self._living = None
        error = None if living.cancelled() else living.exception()
        if error is None:
            error = GraphileWorkerError(
                f"The lifespan ended while the worker ran, so its tasks have no state"
                f"{place_of(None, self._opens)}."
            )
        else:
            error.add_note(f"The lifespan failed while the worker ran{place_of(error, self._opens)}.")
        self.lost.set_result(error)

    async def close(self, hurry: asyncio.Event | None = None) -> None:
        """No task runs any more. May be called again, and if it was never opened.

        Args:
            hurry: Set when it has had enough time. Then it is cancelled and, if that does not help, left
                alone.
        """
        self._over.set()
        living, self._living = self._living, None
        if living is None:
            return
        await asyncio.wait([living], timeout=None if hurry is None else _AT_LEAST)
        if hurry is not None and not living.done():
            await self._hasten(living, hurry)
        if living.done() and not living.cancelled() and (error := living.exception()) is not None:
            self._logger.error("The lifespan could not be closed: %r", error, exc_info=error)

    async def _hasten(self, living: asyncio.Task[None], hurry: asyncio.Event) -> None:
        hurrying = asyncio.ensure_future(hurry.wait())
        try:
            await asyncio.wait([living, hurrying], return_when=asyncio.FIRST_COMPLETED)
        finally:
            hurrying.cancel()
        if not living.done():
            self._logger.error("The lifespan takes too long to close: it is cancelled")
            living.cancel()
            await asyncio.wait([living], timeout=_AT_LEAST)
        if not living.done():
            self._logger.error("The lifespan does not close, although it was cancelled: going on without it")


def place_of(error: BaseException | None, opens: object) -> str:
    """Return where in the user's code a lifespan failed, or else where it is declared: file and line."""
    for frame in traceback.extract_tb(None if error is None else error.__traceback__):
        if not frame.filename.startswith(NOT_THEIRS):
            return f", in {frame.name} ({relative_path(frame.filename)}, line {frame.lineno})"
    function = unwrap(opens.func if isinstance(opens, partial) else opens)  # type: ignore[arg-type]
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    return f", in {code.co_name} ({relative_path(code.co_filename)}, line {code.co_firstlineno})"
