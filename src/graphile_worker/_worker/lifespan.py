"""`Lifespan`: the application's context manager, which holds what its tasks share, such as HTTP clients."""

from __future__ import annotations

import asyncio
import contextlib
import os
import traceback
from functools import partial
from inspect import unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphile_worker._base.text import relative_path
from graphile_worker.errors import ConfigurationError, GraphileWorkerError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from graphile_worker._base.logs import ScopedLogger

LIBRARY_FILES = (str(Path(__file__).parents[1]) + os.sep, contextlib.__file__)
"""Prefixes of files that are not the user's code."""
_MIN_CLOSE_TIME = 1.0
"""Seconds that a lifespan always has to close, and again after it was cancelled."""


class Lifespan:
    """Enters an async context manager, and exits it in the same task, because some of them require that.

    Args:
        factory: Returns the context manager; None if the application has none.
        logger: The worker's logger.
    """

    def __init__(
        self, factory: Callable[[], AbstractAsyncContextManager[Any]] | None, logger: ScopedLogger
    ) -> None:
        self._factory = factory
        self._logger = logger
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.ended_early: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        """Done if the lifespan ends before `close`, with the error as its result."""

    async def open(self) -> Any:
        """Enter the context manager, and return the state that it yields.

        Raises:
            ConfigurationError: The lifespan ended without yielding.
        """
        if self._factory is None:
            return None
        opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(self._factory, opened), name="graphile-worker lifespan")
        try:
            await asyncio.wait([opened, self._task], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        if not opened.done():
            task, self._task = self._task, None
            error = task.exception()
            if error is not None:
                error.add_note(
                    f"The lifespan failed before the first job{location_of(error, self._factory)}."
                )
                raise error
            raise ConfigurationError(
                "The lifespan ended before the first job: it must yield once"
                f"{location_of(None, self._factory)}."
            )
        self._task.add_done_callback(self._on_end)
        return opened.result()

    async def _run(
        self, factory: Callable[[], AbstractAsyncContextManager[Any]], opened: asyncio.Future[Any]
    ) -> None:
        async with factory() as state:
            opened.set_result(state)
            await self._closing.wait()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if self._closing.is_set():
            return
        self._task = None
        error = None if task.cancelled() else task.exception()
        if error is None:
            error = GraphileWorkerError(
                f"The lifespan ended while the worker ran, so tasks have no state"
                f"{location_of(None, self._factory)}."
            )
        else:
            error.add_note(f"The lifespan failed while the worker ran{location_of(error, self._factory)}.")
        self.ended_early.set_result(error)

    async def close(self, out_of_time: asyncio.Event | None = None) -> None:
        """Exit the context manager, if it was entered. May be called again.

        Args:
            out_of_time: Set when the time to close is over. Then the lifespan is cancelled. If it still does
                not end, it is left running.
        """
        self._closing.set()
        task, self._task = self._task, None
        if task is None:
            return
        await asyncio.wait([task], timeout=None if out_of_time is None else _MIN_CLOSE_TIME)
        if out_of_time is not None and not task.done():
            await self._cancel_when_late(task, out_of_time)
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            self._logger.error("The lifespan failed while it was closed: %r", error, exc_info=error)

    async def _cancel_when_late(self, task: asyncio.Task[None], out_of_time: asyncio.Event) -> None:
        waiting = asyncio.ensure_future(out_of_time.wait())
        try:
            await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if not task.done():
            self._logger.error("The lifespan takes too long to close. Cancelling it")
            task.cancel()
            await asyncio.wait([task], timeout=_MIN_CLOSE_TIME)
        if not task.done():
            self._logger.error(
                "The lifespan does not end, although it was cancelled. Not waiting for it any longer"
            )


def location_of(error: BaseException | None, factory: object) -> str:
    """Return the file and line where the user's lifespan failed; without an error, where it is declared."""
    for frame in traceback.extract_tb(None if error is None else error.__traceback__):
        if not frame.filename.startswith(LIBRARY_FILES):
            return f", in {frame.name} ({relative_path(frame.filename)}, line {frame.lineno})"
    function = unwrap(factory.func if isinstance(factory, partial) else factory)  # type: ignore[arg-type]
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    return f", in {code.co_name} ({relative_path(code.co_filename)}, line {code.co_firstlineno})"
