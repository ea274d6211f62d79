"""How the command ends."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

BREAKING_MIGRATION = 57
"""The exit code of a worker that was told of a schema it does not know."""


def end_by(number: int) -> NoReturn:
    """Die of that signal, so that whoever started us can tell."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    # The first process of a container does not die of signals. A shell would say the same of one that does.
    os._exit(128 + number)
