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


class _Thread:
    """The thread, and how many wait for it."""

    def __init__(self) -> None:
        self.sidecar = Sidecar("graphile-worker blocking calls")
        self.sidecar.start()
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
        """End it when nobody waits for it any more: who does would not know what became of the job."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls == 0, _GOODBYE)
        self.sidecar.end_from_outside(_GOODBYE)


class Blocking:
    """Runs coroutines for threads that have no event loop; the thread that does begins when it is needed.

    A child that was forked off has no such thread, so it begins one of its own.
    """

    _at_exit: weakref.finalize[..., Blocking] | None = None

    def __init__(self) -> None:
        self.forget()
        _ALL.add(self)

    def forget(self) -> None:
        """There is no thread, whatever there was."""
        if self._at_exit is not None:
            self._at_exit.detach()  # or the end of the process would wait for it
        self._lock = threading.Lock()
        self._thread: _Thread | None = None
        self._at_exit = None

    def run(self, work: Coroutine[Any, Any, T] | Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Wait for a coroutine, or for that which a function makes, in a thread without an event loop."""
        try:
            thread = self._enter()
        except BaseException:
            if inspect.iscoroutine(work):
                work.close()  # or Python complains that nobody awaited it
            raise
        try:
            future = thread.sidecar.submit(_done(work))
            try:
                return future.result()
            except BaseException:
                future.cancel()  # whoever was interrupted here does not want it any more
                raise
        finally:
            thread.leave()

    def run_on(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, T] | Callable[[], Coroutine[Any, Any, T]],
    ) -> T:
        """The same on an event loop that somebody else runs, in another thread."""
        try:
            _refuse_event_loop()
        except BaseException:
            if inspect.iscoroutine(work):
                work.close()
            raise
        return asyncio.run_coroutine_threadsafe(_done(work), loop).result()

    def _enter(self) -> _Thread:
        _refuse_event_loop()
        with self._lock:
            if self._thread is None:
                thread = _Thread()
                self._at_exit = weakref.finalize(self, thread.end)
                self._thread = thread
            self._thread.enter()
            return self._thread

    def close(self) -> None:
        """End the thread, and with it the connections that it opened. May be called again, and used again."""
        with self._lock:
            ending, self._thread, self._at_exit = self._at_exit, None, None
        if ending is not None:
            ending()


def _refuse_event_loop() -> None:
    if asyncio._get_running_loop() is not None:  # noqa: SLF001 - the other one raises
        raise ConfigurationError(
            "This thread has an event loop, which would stand still meanwhile. Use the method without "
            "_sync, with await."
        )


_ALL: weakref.WeakSet[Blocking] = weakref.WeakSet()


def _after_a_fork() -> None:
    for blocking in _ALL:
        blocking.forget()


os.register_at_fork(after_in_child=_after_a_fork)


async def _done(work: Coroutine[Any, Any, T] | Callable[[], Coroutine[Any, Any, T]]) -> T:
    return await (work() if callable(work) else work)
