"""What a worker process and the one that started it tell each other, over two pipes.

The worker says that it has begun. It is told to finish what it runs and claim nothing more. It does so too
when the other end is closed, so that nothing goes on working when its parent was killed.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

VARIABLE = "GRAPHILE_WORKER_CONTROL"
READY = b"ready\n"
FINISH = b"finish\n"


class Control:
    """The worker's end of it."""

    def __init__(self, read: int, write: int) -> None:
        self._read = read
        self._write = write

    @classmethod
    def of_parent(cls) -> Control | None:
        """That of a process which a supervisor has started."""
        given = os.environ.pop(VARIABLE, "")  # not for what the tasks start
        try:
            read, write = (int(number) for number in given.split(","))
            for number in (read, write):
                os.set_inheritable(number, False)
        except (ValueError, OSError):
            return None
        return cls(read, write)

    def ready(self) -> None:
        """Tell that jobs are being taken."""
        with suppress(OSError):
            os.write(self._write, READY)

    def listen(self, finish: Callable[[], None], orphaned: Callable[[], None]) -> None:
        """Call one of these when the time has come."""
        loop = asyncio.get_running_loop()

        def heard() -> None:
            message = os.read(self._read, len(FINISH))
            if not message:
                loop.remove_reader(self._read)
            (finish if message else orphaned)()

        loop.add_reader(self._read, heard)
