"""A thread with its own event loop, next to a loop that tasks may block, or in code without a loop."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


class BackgroundThreadEndedError(RuntimeError):
    """The thread has ended, so it runs no more coroutines."""


class BackgroundThread:
    """A thread that runs coroutines on its own event loop."""

    def __init__(self, name: str = "graphile-worker background") -> None:
        # A daemon thread cannot prevent the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._stopping = asyncio.Event()
        self._submitted: dict[Future[Any], Coroutine[Any, Any, Any]] = {}
        self._has_ended = False

    def start(self) -> None:
        """Start the thread, and wait until its event loop runs."""
        self._thread.start()
        self._loop.result()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the thread. May be called from any other thread.

        The future fails with a `BackgroundThreadEndedError` if the thread ends before the coroutine starts.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop.result())
        except RuntimeError:  # the thread's event loop is closed
            future = Future()
        self._submitted[future] = coroutine
        future.add_done_callback(lambda done: self._submitted.pop(done, None))
        if self._has_ended:
            self._fail_unstarted()
        return future

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the thread, and await its result on the caller's event loop."""
        return await asyncio.wrap_future(self.submit(coroutine))

    def call(self, function: Callable[[], object]) -> None:
        """Call a function on the thread soon."""
        self._loop.result().call_soon_threadsafe(function)

    def end(self) -> None:
        """End the thread. Must be called on the thread."""
        self._stopping.set()

    def stop_sync(self, timeout: float) -> None:
        """Cancel all coroutines and end the thread, from a thread without an event loop."""
        if self._thread.is_alive():
            self.call(self.end)
            # The garbage collector may call this on the thread itself.
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout)

    async def stop(self) -> None:
        """Cancel all coroutines and end the thread. May be called again, and before `start`."""
        if self._thread.is_alive():
            self.call(self.end)
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        serving = self._serve()
        try:
            asyncio.run(serving)  # cancels submitted coroutines at its end
        except BaseException as error:
            if not self._loop.done():
                serving.close()
                self._loop.set_exception(error)  # the event loop could not start
            elif not (self._stopping.is_set() and isinstance(error, RuntimeError)):
                raise
            # Otherwise the program is ending, and asyncio cannot start the thread that joins its executor.
        finally:
            self._has_ended = True
            self._fail_unstarted()

    def _fail_unstarted(self) -> None:
        """Fail coroutines that were submitted too late to start. Their callers would wait forever."""
        for future, coroutine in list(self._submitted.items()):
            coroutine.close()
            if future.set_running_or_notify_cancel():
                future.set_exception(BackgroundThreadEndedError("The thread has ended."))

    async def _serve(self) -> None:
        self._loop.set_result(asyncio.get_running_loop())
        await self._stopping.wait()
