"""A task process, as the worker uses it."""

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

from graphile_worker._tasks.executable import describe_exit
from graphile_worker._worker.processes.protocol import CHUNK, MessageBuffer, encode_message
from graphile_worker.errors import TaskProcessError

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphile_worker._tasks.task_reference import Reference
    from graphile_worker._worker.processes.protocol import Message

_TIME_TO_END = 2.0
_PROGRAM = "from graphile_worker._task_process import main; main()"


class Spawned(NamedTuple):
    """A new process."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    """The worker's end of the connection to it."""
    life_pipe: int
    """The worker's end of a pipe. When it is closed, the process knows that the worker has ended."""


def spawn(setup: bytes, heartbeat_file: int) -> Spawned:
    """Start a process in its own process group.

    So Ctrl-C reaches the process only through the worker, and programs that it starts can be ended with it.

    Args:
        setup: The first message for the process.
        heartbeat_file: The file of the `SharedHeartbeat`.
    """
    connection, child_connection = socket.socketpair()
    child_life_pipe, life_pipe = os.pipe()
    # The options that Python itself was started with, such as -X dev. multiprocessing does the same.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001
    try:
        process = subprocess.Popen(
            [
                get_executable(),
                *flags,
                "-c",
                _PROGRAM,
                str(child_connection.fileno()),
                str(child_life_pipe),
                str(os.getpid()),
                str(heartbeat_file),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=(child_connection.fileno(), child_life_pipe, heartbeat_file),
            process_group=0,
        )
    except BaseException:
        connection.close()
        os.close(life_pipe)
        raise
    finally:
        child_connection.close()
        os.close(child_life_pipe)
    with suppress(BrokenPipeError, ConnectionResetError):  # it has ended, which `receive` will report
        connection.sendall(setup)
    connection.setblocking(False)
    return Spawned(process, connection, life_pipe)


class ChildProcess:
    """A task process.

    Args:
        process: The process.
        connection: The worker's end of the connection to the process.
        life_pipe: The worker's end of a pipe that is open as long as the worker lives.
        on_exit: Called when the process has ended.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        connection: socket.socket,
        life_pipe: int,
        *,
        on_exit: Callable[[ChildProcess], None],
    ) -> None:
        self._process = process
        self._socket = connection
        self._life_pipe = life_pipe
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._received = MessageBuffer()
        self._sending = asyncio.Lock()
        self._in_use = False
        self.loaded: set[Reference] = set()
        """The tasks that the process has imported."""
        self.jobs = 0
        """The number of jobs that the process has run."""
        self.exited = asyncio.Event()
        name = f"graphile-worker process {process.pid}"
        threading.Thread(target=self._watch, name=name, daemon=True).start()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL has ended the process."""
        return self._process.returncode == -signal.SIGKILL

    @property
    def in_use(self) -> bool:
        """Whether the process runs a job or imports a task. Its socket stays open for that long."""
        return self._in_use

    @in_use.setter
    def in_use(self, value: bool) -> None:
        self._in_use = value
        if self.exited.is_set() and not value:
            self._socket.close()

    async def send(self, message: Message) -> None:
        """Send a message to the process."""
        data = encode_message(message)
        async with self._sending:
            with suppress(BrokenPipeError, ConnectionResetError):  # `receive` reports how it ended
                await self._loop.sock_sendall(self._socket, data)

    async def receive(self) -> Message:
        """Return the next message of the process.

        Raises:
            TaskProcessError: The process has ended.
        """
        while (message := self._received.next_message()) is None:
            try:
                data = await self._loop.sock_recv(self._socket, CHUNK)
            except ConnectionResetError:
                data = b""
            if not data:
                raise await self._exit_error()
            self._received.feed(data)
        return message

    async def _exit_error(self) -> TaskProcessError:
        await self._wait_until_exited()
        status = self._process.returncode
        if status is None:
            return TaskProcessError("The job's process no longer responds")
        hint = ": it may have used too much memory" if status == -signal.SIGKILL else ""
        return TaskProcessError(f"The job's process {describe_exit(status)} before the job ended{hint}")

    def leave(self) -> None:
        """Let the process exit after its current job."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    async def kill(self) -> None:
        """Kill the process and the programs that it has started, and wait until it has ended."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            await self._wait_until_exited()
        finally:
            self.in_use = False

    async def _wait_until_exited(self) -> None:
        with suppress(TimeoutError):  # a process that waits for a disk cannot be killed
            async with asyncio.timeout(_TIME_TO_END):
                await self.exited.wait()

    def _watch(self) -> None:
        self._process.wait()
        os.close(self._life_pipe)
        try:
            self._loop.call_soon_threadsafe(self._handle_exit)
        except RuntimeError:  # the event loop is closed, so nothing uses the socket
            self._socket.close()

    def _handle_exit(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # programs that it has started
        # The last messages can still be read. After them the socket reports the end, even if a program that
        # the process has forked still has the other end open.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)
        self.exited.set()
        self.in_use = self._in_use
        self._on_exit(self)
