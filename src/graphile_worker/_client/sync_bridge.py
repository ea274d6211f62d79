"""Async calls from code without an event loop: a thread with a loop runs them while the caller waits."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from graphile_worker._base.background_thread import BackgroundThread
from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")
_STOP_TIMEOUT = 5.0


class _BridgeThread:
    """The thread with the event loop, and the number of callers that wait for it."""

    def __init__(self) -> None:
        self.background_thread = BackgroundThread("graphile-worker blocking calls")
        self.background_thread.start()
        self._calls = 0
        self._changed = threading.Condition()

    def enter(self) -> None:
        with self._changed:
            self._calls += 1

    def leave(self) -> None:
        with self._changed:
            self._calls -= 1
            self._changed.notify_all()

    def end(self) -> None:
        """End the thread once no caller waits. An interrupted caller would not know if its job was added."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls == 0, _STOP_TIMEOUT)
        self.background_thread.stop_sync(_STOP_TIMEOUT)


class SyncBridge:
    """Runs coroutines for threads without an event loop, on a thread that it starts when needed.

    A forked child process does not inherit the thread, so it starts its own.
    """

    _at_exit: weakref.finalize[..., SyncBridge] | None = None

    def __init__(self) -> None:
        self.reset()
        _BRIDGES.add(self)

    def reset(self) -> None:
        """Forget the thread, because a forked process does not have it."""
        if self._at_exit is not None:
            self._at_exit.detach()  # otherwise the process would wait for the thread at its end
        self._lock = threading.Lock()
        self._thread: _BridgeThread | None = None
        self._at_exit = None

    def run(self, work: Coroutine[Any, Any, T] | Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine, or the coroutine that a function returns, and wait for its result.

        Raises:
            ConfigurationError: This thread has a running event loop.
        """
        try:
            thread = self._enter()
        except BaseException:
            if inspect.iscoroutine(work):
                work.close()  # otherwise Python warns that it was never awaited
            raise
        try:
            future = thread.background_thread.submit(_run_work(work))
            try:
                return future.result()
            except BaseException:
                future.cancel()  # the caller was interrupted and does not wait any more
                raise
        finally:
            thread.leave()

    def run_on(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, T] | Callable[[], Coroutine[Any, Any, T]],
    ) -> T:
        """Run a coroutine on an existing event loop of another thread, and wait for its result."""
        try:
            _reject_event_loop()
        except BaseException:
            if inspect.iscoroutine(work):
                work.close()
            raise
        return asyncio.run_coroutine_threadsafe(_run_work(work), loop).result()

    def _enter(self) -> _BridgeThread:
        _reject_event_loop()
        with self._lock:
            if self._thread is None:
                thread = _BridgeThread()
                self._at_exit = weakref.finalize(self, thread.end)
                self._thread = thread
            self._thread.enter()
            return self._thread

    def close(self, before: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """End the thread and close its connections. The next call of `run` starts a new thread.

        Args:
            before: Called on the thread first, to end calls that wait for long.
        """
        with self._lock:
            thread, ending, self._thread, self._at_exit = self._thread, self._at_exit, None, None
        if thread is not None and before is not None:
            with suppress(Exception):  # the thread has ended, or takes too long
                thread.background_thread.submit(before()).result(_STOP_TIMEOUT)
        if ending is not None:
            ending()


def _reject_event_loop() -> None:
    if asyncio._get_running_loop() is not None:  # noqa: SLF001 - asyncio.get_running_loop raises
        raise ConfigurationError(
            "This thread has a running event loop, which the call would block. Use the method without _sync, "
            "with await."
        )


_BRIDGES: weakref.WeakSet[SyncBridge] = weakref.WeakSet()


def _reset_after_fork() -> None:
    for bridge in _BRIDGES:
        bridge.reset()


os.register_at_fork(after_in_child=_reset_after_fork)


async def _run_work(work: Coroutine[Any, Any, T] | Callable[[], Coroutine[Any, Any, T]]) -> T:
    return await (work() if callable(work) else work)
