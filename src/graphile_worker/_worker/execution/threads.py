"""`Threads`: runs tasks that are plain functions, with as many threads as are needed at once."""

from __future__ import annotations

import asyncio
import itertools
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextvars import Context

_MAX_IDLE = 10.0


class _Call(NamedTuple):
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    context: Context
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


class Threads:
    """Runs functions on threads. A thread that was idle for 10 seconds ends.

    The standard library's pool is not used, because the interpreter waits for its threads at exit, even if
    one of them hangs. These threads are daemons, so the process can always exit.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._closed = False
        self._numbers = itertools.count(1)

    def run(self, context: Context, function: Callable[..., Any], *arguments: object) -> asyncio.Future[Any]:
        """Run the function on a thread. The future's result is a pair: the returned value, and the error."""
        loop = asyncio.get_running_loop()
        call = _Call(function, arguments, context, loop, loop.create_future())
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                name = f"graphile-worker task {next(self._numbers)}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
            self._calls.put(call)
        return call.future

    def close(self) -> None:
        """Let idle threads end now, and busy threads after their call."""
        with self._lock:
            self._closed = True
            for _ in range(self._idle):
                self._calls.put(None)
            self._idle = 0

    def _work(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=_MAX_IDLE)
            except Empty:
                with self._lock:
                    # If the count is 0, a call for this thread is being put into the queue.
                    if self._idle:
                        self._idle -= 1
                        return
                continue
            if call is None:
                return
            self._run_call(call)
            del call  # otherwise its arguments would be kept until the next call
            with self._lock:
                if self._closed:
                    return
                self._idle += 1

    @staticmethod
    def _run_call(call: _Call) -> None:
        value, error = None, None
        try:
            value = call.context.run(call.function, *call.arguments)
        except BaseException as raised:  # noqa: BLE001 - it is passed to the event loop
            error = raised
        with suppress(RuntimeError):  # the event loop is closed, so nothing waits for the result
            call.loop.call_soon_threadsafe(_settle, call.future, value, error)


def _settle(future: asyncio.Future[Any], value: object, error: BaseException | None) -> None:
    if future.cancelled():
        return
    # The error is part of the result, because a future does not accept every exception.
    future.set_result((value, error))
