"""The protocol between a supervisor and its worker processes, over two pipes and a socket.

A worker process reports that it is ready. The supervisor can tell it to finish its running jobs and claim no
more. The worker also does so when the supervisor's end is closed, so that it does not outlive a supervisor
that was killed. On the socket, if there is one, the worker serves its health.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

VARIABLE = "GRAPHILE_WORKER_CONTROL"
READY = b"ready\n"
FINISH = b"finish\n"


class Control:
    """The worker's end of the pipes, and the socket to serve its health on."""

    def __init__(self, read: int, write: int, health_socket: int | None = None) -> None:
        self._read = read
        self._write = write
        self.health_socket = None if health_socket is None else socket.socket(fileno=health_socket)

    @classmethod
    def from_environment(cls) -> Control | None:
        """Return the pipes to the supervisor, or None if no supervisor started this process."""
        descriptors = os.environ.pop(VARIABLE, "")  # removed, so that programs that tasks start do not get it
        try:
            read, write, *others = (int(number) for number in descriptors.split(","))
            for number in (read, write, *others):
                os.set_inheritable(number, False)
            return cls(read, write, *others)
        except (ValueError, OSError):
            return None

    def ready(self) -> None:
        """Notify the supervisor that this worker runs jobs."""
        with suppress(OSError):
            os.write(self._write, READY)

    def listen(self, finish: Callable[[], None], orphaned: Callable[[], None]) -> None:
        """Call `finish` when the supervisor asks for it, and `orphaned` when the supervisor is gone."""
        loop = asyncio.get_running_loop()

        def on_readable() -> None:
            message = os.read(self._read, len(FINISH))
            if not message:
                loop.remove_reader(self._read)
            (finish if message else orphaned)()

        loop.add_reader(self._read, on_readable)
