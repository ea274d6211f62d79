"""For code without an event loop: a thread that has one, and runs there what others wait for."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from graphile_worker._runtime.sidecar import Sidecar
from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")
_GOODBYE = 5.0


async def _done(work: Coroutine[Any, Any, T] | Callable[[], Coroutine[Any, Any, T]]) -> T:
    return await (work() if callable(work) else work)


class Blocking:
    """Runs coroutines for threads that have no event loop; the thread that does begins when it is needed.

    A child that was forked off has no such thread, so it begins one of its own.
    """

    def __init__(self) -> None:
        self.forget()
        known = weakref.ref(self)

        def forget() -> None:
            if (blocking := known()) is not None:
                blocking.forget()

        os.register_at_fork(after_in_child=forget)

    def forget(self) -> None:
        self._lock = threading.Lock()
        self._sidecar: Sidecar | None = None
        self._at_exit: weakref.finalize[..., Blocking] | None = None

    def run(self, work: Coroutine[Any, Any, T] | Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Wait for a coroutine, or for that which a function makes, in a thread without an event loop."""
        if asyncio._get_running_loop() is not None:  # noqa: SLF001 - the other one raises
            if inspect.iscoroutine(work):
                work.close()  # or Python complains that nobody awaited it
            raise ConfigurationError(
                "This thread has an event loop, which would stand still meanwhile. Use the method without "
                "_sync, with await."
            )
        with self._lock:
            sidecar = self._sidecar
            if sidecar is None:
                self._sidecar = sidecar = Sidecar("graphile-worker blocking calls")
                sidecar.start()
                self._at_exit = weakref.finalize(self, sidecar.end_from_outside, _GOODBYE)
            future = sidecar.submit(_done(work))
        try:
            return future.result()
        except BaseException:
            future.cancel()  # whoever was interrupted here does not want it any more
            raise

    def close(self) -> None:
        """End the thread, and with it the connections that it opened. May be called again, and used again."""
        with self._lock:
            if self._at_exit is not None:
                self._at_exit()
            self._sidecar = self._at_exit = None
