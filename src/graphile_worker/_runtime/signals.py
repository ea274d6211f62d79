"""Signals that tell the workers of this process to stop.

They are only delayed: when all workers have stopped, the signal goes to whoever would have had it without us.
So a process with nothing else to do dies of it, and a web server shuts down as it always does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR2")
_DEADLY = 3


class _Handlers:
    """Those of this process: one for all workers, for as long as there are any."""

    def __init__(self) -> None:
        self.subscribers: list[SignalSubscriber] = []
        self.previous: dict[int, Any] = {}
        self.count = 0
        self.first: int | None = None

    def install(self) -> None:
        self.count, self.first = 0, None
        for name in _SIGNALS:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                self.previous[number] = signal.signal(number, self.handle)

    def remove(self) -> None:
        for number, handler in self.previous.items():
            # Somebody may have installed theirs over ours since.
            if signal.getsignal(number) == self.handle:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self.previous.clear()

    def handle(self, number: int, _frame: object) -> None:
        self.count += 1
        self.first = self.first or number
        if self.count >= _DEADLY:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        for subscriber in tuple(self.subscribers):
            subscriber.tell(signal.Signals(number), self.count)


_handlers = _Handlers()


class SignalSubscriber:
    """One worker's interest in signals.

    Args:
        received: Called on the event loop with the signal, and with how many there were: 1, or 2.
    """

    def __init__(self, received: Callable[[signal.Signals, int], None]) -> None:
        self._received = received
        self._loop = asyncio.get_running_loop()

    def subscribe(self) -> None:
        """Begin; only in the main thread signals can be handled."""
        if threading.current_thread() is threading.main_thread():
            if not _handlers.subscribers:
                _handlers.install()
            _handlers.subscribers.append(self)
            if _handlers.first is not None:  # the others are stopping already
                self.tell(signal.Signals(_handlers.first), _handlers.count)

    def unsubscribe(self) -> None:
        """End. After the last worker's end the signal goes to whoever handles it now."""
        if self not in _handlers.subscribers:
            return
        _handlers.subscribers.remove(self)
        if not _handlers.subscribers:
            _handlers.remove()
            if _handlers.first is not None:
                os.kill(os.getpid(), _handlers.first)

    def tell(self, number: signal.Signals, count: int) -> None:
        """A signal arrived."""
        with suppress(RuntimeError):  # its loop was closed
            self._loop.call_soon_threadsafe(self._received, number, count)
