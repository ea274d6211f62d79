"""The keyboard and the signals of a terminal, whose modes are restored at the end."""

from __future__ import annotations

import asyncio
import codecs
import os
import re
import signal
import sys
import termios
import tty
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CONTROL_CHARACTERS = 6
_KEYS = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Z]|.", re.DOTALL)
_UNFINISHED = re.compile(r"\x1b(?:\[[0-9;]*|O)?\Z")
_ESCAPE_TIMEOUT = 0.1
"""Seconds after which an Escape is the key itself, and not the start of another key's sequence."""
_NAMES = {
    "\x1b[A": "up", "\x1bOA": "up", "\x1b[B": "down", "\x1bOB": "down", "\x1b[C": "right", "\x1bOC": "right",
    "\x1b[D": "left", "\x1bOD": "left", "\x1b[5~": "page up", "\x1b[6~": "page down", "\x1b[H": "home",
    "\x1bOH": "home", "\x1b[1~": "home", "\x1b[7~": "home", "\x1b[F": "end", "\x1bOF": "end",
    "\x1b[4~": "end", "\x1b[8~": "end", "\x1b[Z": "left", "\t": "right", "\r": "enter", "\n": "enter",
    "\x1b": "escape", "\x7f": "backspace", "\x08": "backspace",
}  # fmt: skip


def keys_in(text: str) -> list[str]:
    r"""Return the pressed keys: names of special keys, and other characters unchanged.

    >>> keys_in("q\x1b[A\x1b")
    ['q', 'up', 'escape']
    """
    return [_NAMES.get(key, key) for key in _KEYS.findall(text)]


class Keys:
    r"""Decodes pressed keys from input that arrives in pieces.

    >>> keys = Keys()
    >>> keys.feed(b"\xc3"), keys.feed(b"\xa9\x1b["), keys.feed(b"A\x1b"), keys.end()
    ([], ['é'], ['up'], ['escape'])
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    @property
    def has_incomplete(self) -> bool:
        """Whether there is input that may be the start of a sequence."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[str]:
        """Return the complete keys, and keep input that may be incomplete."""
        text = self._rest + self._decoder.decode(data)
        unfinished = _UNFINISHED.search(text)
        end = len(text) if unfinished is None else unfinished.start()
        self._rest = text[end:]
        return keys_in(text[:end])

    def end(self) -> list[str]:
        """Return the keys in the kept input, because no more follows."""
        rest, self._rest = self._rest, ""
        return keys_in(rest)


@contextmanager
def keyboard(on_key: Callable[[str], None]) -> Iterator[None]:
    """Call `on_key` for each pressed key; the terminal does not echo it."""
    descriptor = sys.stdin.fileno()
    original = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()
    keys = Keys()
    timer: asyncio.TimerHandle | None = None

    def report(pressed: list[str]) -> None:
        for key in pressed:
            on_key(key)

    def read() -> None:
        nonlocal timer
        data = os.read(descriptor, 1024)
        if not data:  # the terminal is gone
            loop.remove_reader(descriptor)
            os.kill(os.getpid(), signal.SIGHUP)
        if timer is not None:
            timer.cancel()
        report(keys.feed(data))
        timer = loop.call_later(_ESCAPE_TIMEOUT, lambda: report(keys.end())) if keys.has_incomplete else None

    try:
        tty.setcbreak(descriptor)
        modes = termios.tcgetattr(descriptor)
        # Disable Ctrl-Z: the shell would get the terminal back in these modes.
        modes[_CONTROL_CHARACTERS][termios.VSUSP] = b"\0"
        termios.tcsetattr(descriptor, termios.TCSANOW, modes)
        loop.add_reader(descriptor, read)
        yield
    finally:
        loop.remove_reader(descriptor)
        if timer is not None:
            timer.cancel()
        termios.tcsetattr(descriptor, termios.TCSADRAIN, original)


@contextmanager
def signals(on_end: Callable[[int], None], on_resize: Callable[[], None]) -> Iterator[None]:
    """Call `on_end` for signals that end the view, and `on_resize` when the terminal's size changes."""
    loop = asyncio.get_running_loop()
    for number in _END_SIGNALS:
        loop.add_signal_handler(number, on_end, number)
    loop.add_signal_handler(signal.SIGWINCH, on_resize)
    try:
        yield
    finally:
        for number in (*_END_SIGNALS, signal.SIGWINCH):
            loop.remove_signal_handler(number)
