"""Signals that stop the workers of this process.

A signal is only delayed. When all workers have stopped, it is sent again to the handler that the process had
before. So a process with nothing else to do is ended by the signal, and a web server shuts down as usual.
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
_KILLING_COUNT = 3
"""The number of the signal that kills the process."""


class _Handlers:
    """The signal handlers of this process, shared by its workers. They are installed while a worker runs."""

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
            # The application may have installed another handler since.
            if signal.getsignal(number) == self.handle:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self.previous.clear()

    def handle(self, number: int, _frame: object) -> None:
        self.count += 1
        self.first = self.first or number
        if self.count >= _KILLING_COUNT:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        for subscriber in tuple(self.subscribers):
            subscriber.notify(signal.Signals(number), self.count)


_handlers = _Handlers()


class SignalSubscriber:
    """A worker's subscription to signals.

    Args:
        on_signal: Called on the event loop with the signal, and the number of signals so far: 1 or 2.
    """

    def __init__(self, on_signal: Callable[[signal.Signals, int], None]) -> None:
        self._on_signal = on_signal
        self._loop = asyncio.get_running_loop()

    def subscribe(self) -> None:
        """Receive signals from now on. Do nothing outside the main thread, where Python has no handlers."""
        if threading.current_thread() is threading.main_thread():
            if not _handlers.subscribers:
                _handlers.install()
            _handlers.subscribers.append(self)
            if _handlers.first is not None:  # the other workers are already stopping
                self.notify(signal.Signals(_handlers.first), _handlers.count)

    def unsubscribe(self) -> None:
        """Receive no more signals. After the last worker, send the first signal to the previous handler."""
        if self not in _handlers.subscribers:
            return
        _handlers.subscribers.remove(self)
        if not _handlers.subscribers:
            _handlers.remove()
            if _handlers.first is not None:
                os.kill(os.getpid(), _handlers.first)

    def notify(self, number: signal.Signals, count: int) -> None:
        """Pass a signal on to the worker's event loop."""
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._on_signal, number, count)
