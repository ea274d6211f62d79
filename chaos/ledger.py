"""The ledgers: every process of a run writes one, line by line, and the audit reads them.

Times are seconds of CLOCK_MONOTONIC. All processes of a machine share this clock, including Node processes,
and changes of the wall clock do not affect it.
"""

from __future__ import annotations

import os
import time
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

import msgspec

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

OK, RAISED, CANCELLED = "ok", "raised", "cancelled"
NODE_LOCKS_RELEASED = "node locks released"
"""A kind of fault: the harness released the locks that a dead Node worker would have held for four hours."""
PAUSED = "pause"
"""A kind of fault that a worker records itself: the machine was too busy to run the worker for a while."""


class RunStarted(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """The start of a run."""

    at: float
    run: str
    """The id of the run, unique in the campaign."""
    job: int
    token: str
    """The id of the request. A job that replaces another by its key may have the other's job id."""
    attempt: int
    task: str
    queue: str | None
    worker: str
    """The worker's id, as in the column `locked_by`."""
    pid: int


class RunEnded(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """The end of a run, and its outcome. A killed run has no such line."""

    at: float
    run: str
    outcome: str


class WorkerEvent(msgspec.Struct, frozen=True, kw_only=True, tag="event"):
    """An event that a worker emitted: the outcome of a job, or that it or another worker lost its jobs."""

    at: float
    name: str
    worker: str
    pid: int
    job: int = 0
    attempt: int = 0
    about: str = ""
    """The id of the other worker."""
    jobs: list[int] = []


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """A worker that claims jobs from now on."""

    at: float
    slot: int
    worker: str
    pid: int


class ProcessExited(msgspec.Struct, frozen=True, kw_only=True, tag="exit"):
    """The exit of a worker process."""

    at: float
    slot: int
    pid: int
    program: str
    status: int
    intended: bool
    """Whether the harness ended the process."""


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    """A job that is about to be added."""

    at: float
    token: str
    task: str
    queue: str | None = None
    key: str | None = None
    fails: int = 0
    """The number of first attempts that raise."""
    max_attempts: int = 25
    seconds: float = 0.0
    in_sql: bool = False
    """Whether a plain SQL statement adds the job, without the library."""

    @property
    def doomed(self) -> bool:
        """Whether the job is meant to fail permanently."""
        return self.fails >= self.max_attempts


class AddResult(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """The result of adding a job. With an id it was added for certain, without an id that is unknown."""

    at: float
    token: str
    job: int | None = None
    problem: str | None = None


class RemoveRequest(msgspec.Struct, frozen=True, kw_only=True, tag="remove"):
    """A key whose job is about to be removed."""

    at: float
    token: str
    key: str


class JobRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="removed"):
    """A removal that happened for certain. Without such a line the outcome is unknown."""

    at: float
    token: str
    job: int | None = None
    """None if no job had the key."""
    running: bool = False
    """Whether the job was running. Then the run continues, but is not retried."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, tag="fault"):
    """A fault that was injected or recorded."""

    at: float
    until: float
    kind: str
    pids: list[int]
    """The worker processes that the fault hit. An empty list means the server, and so all workers."""
    slots: list[int] = []
    locks: dict[str, list[int]] = {}
    """The jobs that each worker held right after the fault started."""
    note: str = ""

    @property
    def seconds(self) -> float:
        """The duration of the fault."""
        return self.until - self.at


class Phase(msgspec.Struct, frozen=True, kw_only=True, tag="phase"):
    """The start of a phase of the campaign."""

    at: float
    name: str


class RemainingJob(msgspec.Struct, frozen=True, kw_only=True, tag="left"):
    """A job that is still in the database at the end."""

    job: int
    token: str
    attempts: int
    max_attempts: int
    locked_by: str | None
    last_error: str | None


class LockedQueue(msgspec.Struct, frozen=True, kw_only=True, tag="locked queue"):
    """A serial queue that is locked at the end."""

    queue: str
    locked_by: str


class KeptAttempt(msgspec.Struct, frozen=True, kw_only=True, tag="kept"):
    """An attempt in the history at the end."""

    job: int
    attempt: int
    outcome: str
    worker: str


class HistoryRead(msgspec.Struct, frozen=True, kw_only=True, tag="history read"):
    """The workers kept history, and all of it is in the ledgers."""

    attempts: int


Line: TypeAlias = (
    RunStarted
    | RunEnded
    | WorkerEvent
    | WorkerReady
    | ProcessExited
    | AddRequest
    | AddResult
    | RemoveRequest
    | JobRemoved
    | Fault
    | Phase
    | RemainingJob
    | LockedQueue
    | KeptAttempt
    | HistoryRead
)

_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def now() -> float:
    """Return the current time, for a ledger."""
    return time.monotonic()


class Ledger:
    """A file to which lines are appended, each with one write, so that they survive a SIGKILL."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._runs = count(1)

    def write(self, line: Line) -> None:
        """Add a line."""
        os.write(self._descriptor, encode_line(line).encode() + b"\n")

    def next_run(self) -> str:
        """Return an id for the next run in this process."""
        return f"{os.getpid()}-{next(self._runs)}"

    def __enter__(self) -> Self:
        """Return the ledger, which is closed at the end of the block."""
        return self

    def __exit__(self, *_exception: object) -> None:
        """Close the file."""
        os.close(self._descriptor)


def encode_line(line: Line) -> str:
    """Return the text of a line, as in the file."""
    return _ENCODER.encode(line).decode()


def read_folder(folder: Path) -> list[Line]:
    """Read all ledgers in the folder. Lines of different files are in no particular order."""
    return [line for path in sorted(folder.glob("*.ledger")) for line in read_file(path)]


def read_file(path: Path) -> list[Line]:
    """Read one ledger. Ignore an incomplete last line, which a killed process may leave."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [_DECODER.decode(line) for line in lines if line.endswith(b"\n")]
