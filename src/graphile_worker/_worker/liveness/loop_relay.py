"""`LoopRelay`: calls functions on the worker's event loop from a background thread."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from graphile_worker._base.user_code import StrayExitError, capture_result

if TYPE_CHECKING:
    from collections.abc import Callable

    _Outcome = tuple[Any, Exception | None]


class LoopRelay:
    """Calls functions on the event loop that created it, with the context variables of that moment.

    If the event loop is blocked, it calls them later. After it was closed, nothing is called.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()

    def call(self, function: Callable[[], object]) -> None:
        """Call the function soon, without waiting for it."""
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(function, context=self._context)

    async def run(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Call the user's function, which may be async, and wait for its result.

        If the caller is cancelled, the function is cancelled too. If it has not started by then, it is not
        called.
        """
        outcome: Future[_Outcome] = Future()
        call: list[asyncio.Task[_Outcome]] = []

        def begin() -> None:
            if outcome.set_running_or_notify_cancel():
                call.append(self._loop.create_task(capture_result(function, *arguments)))
                call[0].add_done_callback(end)

        def end(task: asyncio.Task[_Outcome]) -> None:
            cancelled = (None, StrayExitError(asyncio.CancelledError()))
            outcome.set_result(cancelled if task.cancelled() else task.result())

        self._loop.call_soon_threadsafe(begin, context=self._context.copy())
        try:
            value, error = await asyncio.wrap_future(outcome)
        except asyncio.CancelledError:
            self.call(lambda: call and call[0].cancel())
            raise
        if error is not None:
            raise error
        return value
