"""The messages between a worker and its task processes.

Messages are pickled, because both ends are the same program. Payloads and results are JSON inside of them.
Objects that cannot always be pickled, or whose classes the other end may not know, are pickled separately.
"""

from __future__ import annotations

import os
import pickle
import struct
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from graphile_worker.errors import TaskError

if TYPE_CHECKING:
    import socket
    from datetime import datetime

    from graphile_worker._base.context_carrier import Captured
    from graphile_worker._tasks.task_reference import Program, Reference
    from graphile_worker._worker.processes.remote_errors import RemoteError
    from graphile_worker.job import Job, Progress

_LENGTH = struct.Struct("!Q")
CHUNK = 256 * 1024


class Setup(NamedTuple):
    """To a process, once: what all of its jobs share."""

    program: Program
    worker_id: str
    schema: str
    logger: str
    levels: dict[str, int]
    """The levels of loggers, so that records below them are not sent."""
    on_invalid_payload: str
    state: bytes | None
    state_error: str
    """Why the worker's state cannot be sent; empty if it was sent or there is none."""


class Request(NamedTuple):
    """The identity of a request. The reply repeats it, so that a reply to another request is detected."""

    process: int
    """The id of the process that gets the request; in a reply, of the process that replies."""
    number: int
    """Different for each request."""
    job_id: int
    attempt: int


class Load(NamedTuple):
    """To a process: import the task, and reply with `Done` or `Raised`."""

    request: Request
    task: Reference


class Run(NamedTuple):
    """To a process: run the job, and reply with `Done` or `Raised`."""

    request: Request
    task: Reference
    job: Job
    """The job without its payload."""
    payload: bytes
    timeout: float | None
    now: datetime
    """The time of the queue's clock."""
    max_silence: float | None = None
    """Seconds after the worker's last heartbeat when the process has to end itself; None for never."""
    context: Captured | None = None
    """The context that integrations carry into the process; None if there is none."""


class Stop(NamedTuple):
    """To a process: ask the job to stop."""


class MethodResult(NamedTuple):
    """To a process: the result of a `MethodCall`, or its error."""

    number: int
    value: Any
    error: RemoteError | None


class Done(NamedTuple):
    """From a process: the task has returned this value, as JSON."""

    request: Request
    value: bytes | None = None


class Raised(NamedTuple):
    """From a process: the task has raised this error."""

    request: Request
    error: RemoteError


class Logged(NamedTuple):
    """From a process: a log record, pickled."""

    record: bytes


class Extended(NamedTuple):
    """From a process: the job's deadline is this many seconds from now."""

    seconds: float


class Progressed(NamedTuple):
    """From a process: the job has reported this progress."""

    job_id: int
    attempt: int
    progress: Progress


class MethodCall(NamedTuple):
    """From a process: call a method that adds jobs, and reply with `MethodResult`."""

    number: int
    method: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    context: Captured | None = None
    """The context that integrations carry back to the worker."""


Message: TypeAlias = (
    Setup | Load | Run | Stop | MethodResult | Done | Raised | Logged | Extended | Progressed | MethodCall
)


def encode_message(message: Message) -> bytes:
    """Return the bytes of the message: its length, then its pickle."""
    data = pickle.dumps(message)
    return _LENGTH.pack(len(data)) + data


class MessageBuffer:
    """Splits received bytes into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._data += data

    def next_message(self) -> Message | None:
        """Return the next message, or None if it has not arrived completely."""
        start = _LENGTH.size
        if len(self._data) < start:
            return None
        end = start + _LENGTH.unpack_from(self._data)[0]
        if len(self._data) < end:
            return None
        message: Message = pickle.loads(memoryview(self._data)[start:end].tobytes())  # noqa: S301 - from the worker's own processes
        del self._data[:end]
        return message


class Channel:
    """The connection of a task process to its worker. Any thread may send, and one receives.

    Args:
        connection: The process's socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._process = os.getpid()
        self._sending = threading.Lock()
        self._received = MessageBuffer()

    def send(self, message: Message) -> None:
        """Send a message to the worker."""
        self.refuse_in_fork()
        data = encode_message(message)
        with self._sending:
            self._socket.sendall(data)

    def refuse_in_fork(self) -> None:
        """Raise an error in a child that a task forked: the worker could not tell its messages apart."""
        if os.getpid() != self._process:
            raise TaskError(
                "A process that a task forks cannot use the worker's connection. Add jobs, report "
                "progress and extend the deadline in the process of the task, or open a WorkerUtils in the "
                "fork."
            )

    def close(self) -> None:
        """Close this process's end of the socket."""
        self._socket.close()

    def receive(self) -> Message | None:
        """Return the worker's next message, or None if the worker has closed the connection."""
        while (message := self._received.next_message()) is None:
            data = self._socket.recv(CHUNK)
            if not data:
                return None
            self._received.feed(data)
        return message
