"""From a background thread to the worker's event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from graphile_worker.user_code import StrayExitError, outcome_of

if TYPE_CHECKING:
    from collections.abc import Callable

    _Outcome = tuple[Any, Exception | None]


class Relay:
    """Has functions called on the event loop on which it was made, with the context variables of that moment.

    The loop may be blocked: then it calls them later. After it is closed nothing is called any more.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()

    def call(self, function: Callable[[], object]) -> None:
        """Call the function there, soon."""
        with suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(function, context=self._context)

    async def run(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Call user code there, which may be async, and wait for it here.

        If this is cancelled, the function is cancelled too; or it is not called at all, if the loop had no
        time for it until then.
        """
        outcome: Future[_Outcome] = Future()
        call: list[asyncio.Task[_Outcome]] = []

        def begin() -> None:
            if outcome.set_running_or_notify_cancel():
                call.append(self._loop.create_task(outcome_of(function, *arguments)))
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
