"""A thread with an event loop of its own, beside a loop that tasks may block, or where there is none."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


class SidecarEndedError(RuntimeError):
    """The thread has ended, so a coroutine cannot run there any more."""


class Sidecar:
    """Runs coroutines on a thread of its own."""

    def __init__(self, name: str = "graphile-worker sidecar") -> None:
        # A daemon: a process that was told to die can.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._stopping = asyncio.Event()
        self._submitted: dict[Future[Any], Coroutine[Any, Any, Any]] = {}
        self._has_ended = False

    def start(self) -> None:
        """Begin."""
        self._thread.start()
        self._loop.result()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run it there; called from any other thread.

        The result is a `SidecarEndedError` if the thread ends before the coroutine begins.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop.result())
        except RuntimeError:  # its loop is closed
            future = Future()
        self._submitted[future] = coroutine
        future.add_done_callback(lambda done: self._submitted.pop(done, None))
        if self._has_ended:
            self._refuse_the_rest()
        return future

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it there, and wait for it here."""
        return await asyncio.wrap_future(self.submit(coroutine))

    def call(self, function: Callable[[], object]) -> None:
        """Call it there, soon."""
        self._loop.result().call_soon_threadsafe(function)

    def end(self) -> None:
        """End; called there."""
        self._stopping.set()

    def end_from_outside(self, timeout: float) -> None:
        """End all that runs there, from a thread without an event loop."""
        if self._thread.is_alive():
            self.call(self.end)
            if threading.current_thread() is not self._thread:  # the collector may call this anywhere
                self._thread.join(timeout)

    async def stop(self) -> None:
        """End all that runs there. May be called again, and before `start`."""
        if self._thread.is_alive():
            self.call(self.end)
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        living = self._live()
        try:
            asyncio.run(living)  # which cancels at the end what was submitted
        except BaseException as error:
            if not self._loop.done():
                living.close()
                self._loop.set_exception(error)  # it did not even begin
            elif not (self._stopping.is_set() and isinstance(error, RuntimeError)):
                raise
            # Otherwise the program is ending too, and asyncio cannot begin the thread that ends others.
        finally:
            self._has_ended = True
            self._refuse_the_rest()

    def _refuse_the_rest(self) -> None:
        """End what was submitted too late to begin: its caller would wait for ever."""
        for future, coroutine in list(self._submitted.items()):
            coroutine.close()
            if future.set_running_or_notify_cancel():
                future.set_exception(SidecarEndedError("The thread has ended."))

    async def _live(self) -> None:
        self._loop.set_result(asyncio.get_running_loop())
        await self._stopping.wait()
