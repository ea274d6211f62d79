"""The keyboard and the screen of a terminal, which are left as they were however it ends."""

from __future__ import annotations

import asyncio
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
_NAMES = {
    "\x1b[A": "up", "\x1bOA": "up", "\x1b[B": "down", "\x1bOB": "down", "\x1b[C": "right", "\x1bOC": "right",
    "\x1b[D": "left", "\x1bOD": "left", "\x1b[5~": "page up", "\x1b[6~": "page down", "\x1b[H": "home",
    "\x1bOH": "home", "\x1b[F": "end", "\x1bOF": "end", "\x1b[Z": "left", "\t": "right", "\r": "enter",
    "\n": "enter", "\x1b": "escape", "\x7f": "backspace", "\x08": "backspace",
}  # fmt: skip


def keys_in(text: str) -> list[str]:
    r"""What was pressed: names of keys, and letters as they are.

    >>> keys_in("q\x1b[A\x1b")
    ['q', 'up', 'escape']
    """
    return [_NAMES.get(key, key) for key in _KEYS.findall(text)]


@contextmanager
def keyboard(pressed: Callable[[str], None]) -> Iterator[None]:
    """Call `pressed` for each key, as soon as it is pressed; it is not shown."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()

    def read() -> None:
        got = os.read(descriptor, 1024)
        if not got:  # the terminal is gone
            loop.remove_reader(descriptor)
            os.kill(os.getpid(), signal.SIGHUP)
        for key in keys_in(got.decode(errors="replace")):
            pressed(key)

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
