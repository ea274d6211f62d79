"""What a worker and its processes say to each other, and how.

A message is pickled, for both ends are the same program; payloads and results are JSON inside of it. What may
not survive pickling, or not be there at the other end, is pickled apart.
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

    from graphile_worker._runtime.carried import CarriedError
    from graphile_worker._runtime.references import Program, Reference
    from graphile_worker.job import Job

_LENGTH = struct.Struct("!Q")
CHUNK = 256 * 1024


class Setup(NamedTuple):
    """To a process, once: what all of its jobs share."""

    program: Program
    worker_id: str
    schema: str
    logger: str
    levels: dict[str, int]
    """Of loggers, so that what nobody wants to read does not cross."""
    on_invalid_payload: str
    state: bytes | None
    stateless: str
    """Why there is no state, though the worker has one."""


class Request(NamedTuple):
    """Identifies a request. The reply repeats it, so that no other reply is taken for it."""

    process: int
    """The id of the process that is asked; in a reply, of the process that replies."""
    number: int
    """Different for each request."""
    job_id: int
    attempt: int


class Load(NamedTuple):
    """To a process: find that task, and say `Done`."""

    request: Request
    task: Reference


class Run(NamedTuple):
    """To a process: run that job, and say `Done` or `Raised`."""

    request: Request
    task: Reference
    job: Job
    """Without its payload."""
    payload: bytes
    timeout: float | None
    now: datetime
    """The time as the queue sees it."""
    patience: float | None = None
    """For how many seconds the worker may be silent before others may take the job."""


class Stop(NamedTuple):
    """To a process: the job is to stop."""


class Answer(NamedTuple):
    """To a process: what came of what it asked for."""

    number: int
    value: Any
    error: CarriedError | None


class Done(NamedTuple):
    """From a process: it returned that, as JSON."""

    request: Request
    value: bytes | None = None


class Raised(NamedTuple):
    """From a process: it raised that."""

    request: Request
    error: CarriedError


class Logged(NamedTuple):
    """From a process: a record for the log, pickled."""

    record: bytes


class Extended(NamedTuple):
    """From a process: the job has so many seconds from now on."""

    seconds: float


class Asked(NamedTuple):
    """From a process: add jobs, and give an `Answer`."""

    number: int
    method: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]


Message: TypeAlias = Setup | Load | Run | Stop | Answer | Done | Raised | Logged | Extended | Asked


def written(message: Message) -> bytes:
    """The message as it is sent."""
    data = pickle.dumps(message)
    return _LENGTH.pack(len(data)) + data


class Incoming:
    """Makes messages out of what arrives."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        """That has arrived."""
        self._data += data

    def take(self) -> Message | None:
        """The next message, if all of it is there."""
        start = _LENGTH.size
        if len(self._data) < start:
            return None
        end = start + _LENGTH.unpack_from(self._data)[0]
        if len(self._data) < end:
            return None
        message: Message = pickle.loads(memoryview(self._data)[start:end].tobytes())  # noqa: S301 - our own
        del self._data[:end]
        return message


class Line:
    """The end of a process: any of its threads may send, and one reads.

    Args:
        end: Its socket.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._process = os.getpid()
        self._sending = threading.Lock()
        self._incoming = Incoming()

    def send(self, message: Message) -> None:
        """Tell the worker."""
        self.refuse_in_fork()
        data = written(message)
        with self._sending:
            self._end.sendall(data)

    def refuse_in_fork(self) -> None:
        """Raise an error in a child that a task forked: the worker would take its messages for the task's."""
        if os.getpid() != self._process:
            raise TaskError(
                "A process that a task forks cannot use the worker's connection. Add jobs and extend the "
                "deadline in the process of the task, or open a WorkerUtils in the fork."
            )

    def close(self) -> None:
        """Close this process's end of the socket."""
        self._end.close()

    def receive(self) -> Message | None:
        """What the worker says next; None if it says nothing any more."""
        while (message := self._incoming.take()) is None:
            data = self._end.recv(CHUNK)
            if not data:
                return None
            self._incoming.add(data)
        return message
