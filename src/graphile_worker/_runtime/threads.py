"""Threads for tasks that are plain functions: as many as are needed at once."""

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

_LONGEST_IDLE = 10.0


class _Call(NamedTuple):
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    context: Context
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


class Threads:
    """Runs functions on threads; a thread that had nothing to do for a while ends.

    The standard library's pool is not used because the interpreter waits for its threads at exit, for ever if
    one hangs. These are daemons: a process that was told to die can.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._closed = False
        self._numbers = itertools.count(1)

    def run(self, context: Context, function: Callable[..., Any], *arguments: object) -> asyncio.Future[Any]:
        """A future with what the function returns or raises."""
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
        """Let threads that have nothing to do end; the others do when they have ended their work."""
        with self._lock:
            self._closed = True
            for _ in range(self._idle):
                self._calls.put(None)
            self._idle = 0

    def _work(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=_LONGEST_IDLE)
            except Empty:
                with self._lock:
                    # Whoever counts on an idle thread has made the count smaller, and put a call.
                    if self._idle:
                        self._idle -= 1
                        return
                continue
            if call is None:
                return
            self._do(call)
            del call  # or it would be kept until the next one
            with self._lock:
                if self._closed:
                    return
                self._idle += 1

    @staticmethod
    def _do(call: _Call) -> None:
        value, error = None, None
        try:
            value = call.context.run(call.function, *call.arguments)
        except BaseException as raised:  # noqa: BLE001 - it belongs to whoever waits
            error = raised
        with suppress(RuntimeError):  # the loop was closed: nobody waits any more
            call.loop.call_soon_threadsafe(_settle, call.future, value, error)


def _settle(future: asyncio.Future[Any], value: object, error: BaseException | None) -> None:
    if future.cancelled():
        return
    # As a value, for a future does not take every exception.
    future.set_result((value, error))
