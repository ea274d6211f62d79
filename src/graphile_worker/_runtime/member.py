"""A process that runs jobs for this worker, as the worker sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
from contextlib import suppress
from multiprocessing.spawn import get_executable
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker._runtime.wire import CHUNK, Incoming, written
from graphile_worker.errors import TaskProcessError
from graphile_worker.executable import how_it_ended

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphile_worker._runtime.references import Reference
    from graphile_worker._runtime.wire import Message

_TIME_TO_END = 2.0
_PROGRAM = "from graphile_worker.process_member import main; main()"


class Spawned(NamedTuple):
    """A new process."""

    process: subprocess.Popen[bytes]
    end: socket.socket
    """Ours, of the line to it."""
    lifeline: int
    """A file that tells the process, when it is closed, that we are gone."""


def spawn(first: bytes, pulse: int) -> Spawned:
    """Start one that feels that pulse, and tell it that first.

    It has a process group of its own: Ctrl-C reaches it through us alone, and what it starts ends with it.
    """
    end, its_end = socket.socketpair()
    its_lifeline, lifeline = os.pipe()
    # What Python itself was started with, such as -X dev; multiprocessing asks in the same way.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001
    try:
        process = subprocess.Popen(
            [
                get_executable(),
                *flags,
                "-c",
                _PROGRAM,
                str(its_end.fileno()),
                str(its_lifeline),
                str(os.getpid()),
                str(pulse),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=(its_end.fileno(), its_lifeline, pulse),
            process_group=0,
        )
    except BaseException:
        end.close()
        os.close(lifeline)
        raise
    finally:
        its_end.close()
        os.close(its_lifeline)
    with suppress(BrokenPipeError, ConnectionResetError):  # it has ended, which will be noticed
        end.sendall(first)
    end.setblocking(False)
    return Spawned(process, end, lifeline)


class Member:
    """One of the processes.

    Args:
        process: The process.
        end: Our end of the line.
        lifeline: To be kept open while it is to live.
        on_exit: Called when it has ended.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        end: socket.socket,
        lifeline: int,
        *,
        on_exit: Callable[[Member], None],
    ) -> None:
        self._process = process
        self._end = end
        self._lifeline = lifeline
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._incoming = Incoming()
        self._sending = asyncio.Lock()
        self._in_use = False
        self.loaded: set[Reference] = set()
        """Tasks that it has found."""
        self.jobs = 0
        """How many it has run."""
        self.exited = asyncio.Event()
        name = f"graphile-worker process {process.pid}"
        threading.Thread(target=self._watch, name=name, daemon=True).start()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended it."""
        return self._process.returncode == -signal.SIGKILL

    @property
    def in_use(self) -> bool:
        """Whether somebody talks with it."""
        return self._in_use

    @in_use.setter
    def in_use(self, value: bool) -> None:
        self._in_use = value
        if self.exited.is_set() and not value:
            self._end.close()

    async def send(self, message: Message) -> None:
        """Tell it something."""
        data = written(message)
        async with self._sending:
            with suppress(BrokenPipeError, ConnectionResetError):  # whoever listens hears how it ended
                await self._loop.sock_sendall(self._end, data)

    async def receive(self) -> Message:
        """What it says next.

        Raises:
            TaskProcessError: It has ended.
        """
        while (message := self._incoming.take()) is None:
            try:
                data = await self._loop.sock_recv(self._end, CHUNK)
            except ConnectionResetError:
                data = b""
            if not data:
                raise await self._ended()
            self._incoming.add(data)
        return message

    async def _ended(self) -> TaskProcessError:
        await self._until_exited()
        status = self._process.returncode
        if status is None:
            return TaskProcessError("The process that ran it does not answer any more")
        hint = ": it may have used too much memory" if status == -signal.SIGKILL else ""
        return TaskProcessError(f"The process that ran it {how_it_ended(status)} before it was done{hint}")

    def leave(self) -> None:
        """Let it end by itself."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    async def kill(self) -> None:
        """End it and what it has started, whatever they do; returns when that is so."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            await self._until_exited()
        finally:
            self.in_use = False

    async def _until_exited(self) -> None:
        with suppress(TimeoutError):  # one that waits for a disk cannot be killed
            async with asyncio.timeout(_TIME_TO_END):
                await self.exited.wait()

    def _watch(self) -> None:
        self._process.wait()
        os.close(self._lifeline)
        try:
            self._loop.call_soon_threadsafe(self._bury)
        except RuntimeError:  # the loop was closed: nobody talks with it
            self._end.close()

    def _bury(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what it has started
        # What it said last can be read still. That it says no more is known even if something that it has
        # forked is left, and has its end of the line.
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RD)
        self.exited.set()
        self.in_use = self._in_use
        self._on_exit(self)
