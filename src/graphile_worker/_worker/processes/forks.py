"""`ForkGuard`: ends children that a task forks, so that they run the task's code but not this library's."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable


class ForkGuard:
    """Distinguishes the task process from children that tasks fork.

    Args:
        closers: Functions that close resources that only this process may use. Each forked child calls them
            once.
    """

    def __init__(self, *closers: Callable[[], object]) -> None:
        self._process = os.getpid()
        self._closers = closers
        os.register_at_fork(after_in_child=self._close)

    def end_child(self, error: BaseException | None = None) -> None:
        """End this process if a task forked it, because the task's code has ended.

        Args:
            error: The exception that ended the task's code, if there was one.
        """
        if os.getpid() != self._process:
            _end(error)

    def _close(self) -> None:
        # Only once: in a child of the child, other files may have these numbers.
        closers, self._closers = self._closers, ()
        for close in closers:
            with suppress(OSError):
                close()


def _end(error: BaseException | None) -> NoReturn:
    """Do what the interpreter does at exit, except for atexit functions, which belong to the parent."""
    status = 1
    with suppress(BaseException):
        status = _status(error)
    with suppress(BaseException):
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(status)


def _status(error: BaseException | None) -> int:
    if error is None:
        return 0
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
    return 1
