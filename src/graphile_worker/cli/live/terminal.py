"""The keyboard and the screen of a terminal, which are left as they were however it ends."""

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

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CONTROL_CHARACTERS = 6
_KEYS = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Z]|.", re.DOTALL)
_UNFINISHED = re.compile(r"\x1b(?:\[[0-9;]*|O)?\Z")
_PATIENCE = 0.1
"""Seconds after which an Escape is the key, and not the beginning of another one's sequence."""
_NAMES = {
    "\x1b[A": "up", "\x1bOA": "up", "\x1b[B": "down", "\x1bOB": "down", "\x1b[C": "right", "\x1bOC": "right",
    "\x1b[D": "left", "\x1bOD": "left", "\x1b[5~": "page up", "\x1b[6~": "page down", "\x1b[H": "home",
    "\x1bOH": "home", "\x1b[1~": "home", "\x1b[7~": "home", "\x1b[F": "end", "\x1bOF": "end",
    "\x1b[4~": "end", "\x1b[8~": "end", "\x1b[Z": "left", "\t": "right", "\r": "enter", "\n": "enter",
    "\x1b": "escape", "\x7f": "backspace", "\x08": "backspace",
}  # fmt: skip


def keys_in(text: str) -> list[str]:
    r"""What was pressed: names of keys, and letters as they are.

    >>> keys_in("q\x1b[A\x1b")
    ['q', 'up', 'escape']
    """
    return [_NAMES.get(key, key) for key in _KEYS.findall(text)]


class Keys:
    r"""What was pressed, from what arrives piece by piece.

    >>> keys = Keys()
    >>> keys.feed(b"\xc3"), keys.feed(b"\xa9\x1b["), keys.feed(b"A\x1b"), keys.end()
    ([], ['é'], ['up'], ['escape'])
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    @property
    def waits(self) -> bool:
        """Whether there is something that may be the beginning of a sequence."""
        return bool(self._rest)

    def feed(self, got: bytes) -> list[str]:
        """The keys that are known now; what may go on is kept."""
        text = self._rest + self._decoder.decode(got)
        unfinished = _UNFINISHED.search(text)
        end = len(text) if unfinished is None else unfinished.start()
        self._rest = text[end:]
        return keys_in(text[:end])

    def end(self) -> list[str]:
        """What was kept, because nothing more comes."""
        rest, self._rest = self._rest, ""
        return keys_in(rest)


@contextmanager
def keyboard(pressed: Callable[[str], None]) -> Iterator[None]:
    """Call `pressed` for each key, as soon as it is pressed; it is not shown."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()
    keys = Keys()
    timer: asyncio.TimerHandle | None = None

    def tell(found: list[str]) -> None:
        for key in found:
            pressed(key)

    def read() -> None:
        nonlocal timer
        got = os.read(descriptor, 1024)
        if not got:  # the terminal is gone
            loop.remove_reader(descriptor)
            os.kill(os.getpid(), signal.SIGHUP)
        if timer is not None:
            timer.cancel()
        tell(keys.feed(got))
        timer = loop.call_later(_PATIENCE, lambda: tell(keys.end())) if keys.waits else None

    try:
        tty.setcbreak(descriptor)
        now = termios.tcgetattr(descriptor)
        # A shell would get the terminal back as it is in the middle of this.
        now[_CONTROL_CHARACTERS][termios.VSUSP] = b"\0"
        termios.tcsetattr(descriptor, termios.TCSANOW, now)
        loop.add_reader(descriptor, read)
        yield
    finally:
        loop.remove_reader(descriptor)
        if timer is not None:
            timer.cancel()
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextmanager
def signals(ended: Callable[[int], None], resized: Callable[[], None]) -> Iterator[None]:
    """Call these when somebody wants it to end, or has changed the size of the terminal."""
    loop = asyncio.get_running_loop()
    for number in _ENDING:
        loop.add_signal_handler(number, ended, number)
    loop.add_signal_handler(signal.SIGWINCH, resized)
    try:
        yield
    finally:
        for number in (*_ENDING, signal.SIGWINCH):
            loop.remove_signal_handler(number)
