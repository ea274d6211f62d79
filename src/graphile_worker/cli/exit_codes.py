"""Exit codes of the command, and exit by signal."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

BREAKING_MIGRATION = 57
"""The exit code of a worker that found a schema newer than it supports."""


def exit_by_signal(number: int) -> NoReturn:
    """End this process with a signal, so that its parent sees the signal as the cause."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    # Signals with their default action don't end process 1 of a container. Exit with the code that a shell
    # reports for the signal.
    os._exit(128 + number)
