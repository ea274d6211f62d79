"""What happened, line by line: every process of a run writes it down, the audit reads it.

Moments are seconds of CLOCK_MONOTONIC, which all processes of a machine share, Node's too, and which no
change of the wall clock touches.
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
NODE_FREED = "node's locks freed"
"""Among the faults stands also what was freed that a dead npm worker would have held for four hours."""
PAUSED = "pause"
"""And that a worker did not run for a while, which it notes itself: the machine had no time for it."""


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """A run of a job began."""

    at: float
    run: str
    """Names the run among all."""
    job: int
    token: str
    """Names what was asked for. A job that replaces another by its key may have the other's id."""
    attempt: int
    task: str
    queue: str | None
    worker: str
    """As in the column locked_by."""
    pid: int


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """A run ended, and how. One that was killed has no such line."""

    at: float
    run: str
    outcome: str


class Told(msgspec.Struct, frozen=True, kw_only=True, tag="event"):
    """A worker told something: what became of a job, or that it or another lost its jobs."""

    at: float
    name: str
    worker: str
    pid: int
    job: int = 0
    attempt: int = 0
    about: str = ""
    """The other worker."""
    jobs: list[int] = []


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """A worker takes jobs from now on."""

    at: float
    slot: int
    worker: str
    pid: int


class Exited(msgspec.Struct, frozen=True, kw_only=True, tag="exit"):
    """A worker's process is gone."""

    at: float
    slot: int
    pid: int
    program: str
    status: int
    wanted: bool
    """Whether it was our doing."""


class Asked(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    """A job is about to be added."""

    at: float
    token: str
    task: str
    queue: str | None = None
    key: str | None = None
    fails: int = 0
    """It raises in so many first attempts."""
    max_attempts: int = 25
    seconds: float = 0.0
    in_sql: bool = False
    """Whether by a statement, as somebody adds it who has no library."""

    @property
    def doomed(self) -> bool:
        """Whether it is meant to fail for good."""
        return self.fails >= self.max_attempts


class Answered(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """What became of adding it: with an id it is surely there, without one nobody knows."""

    at: float
    token: str
    job: int | None = None
    problem: str | None = None


class Removing(msgspec.Struct, frozen=True, kw_only=True, tag="remove"):
    """The job of a key is about to be removed."""

    at: float
    token: str
    key: str


class Removed(msgspec.Struct, frozen=True, kw_only=True, tag="removed"):
    """What was surely removed; without such a line nobody knows."""

    at: float
    token: str
    job: int | None = None
    """None if no job had the key."""
    running: bool = False
    """Then it goes on, but is not tried again."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, tag="fault"):
    """Something was broken."""

    at: float
    until: float
    kind: str
    pids: list[int]
    """The workers that it hit; none means that it hit the server, and so everybody."""
    slots: list[int] = []
    locks: dict[str, list[int]] = {}
    """Which worker held which jobs right after it was hit."""
    note: str = ""

    @property
    def seconds(self) -> float:
        """For how long."""
        return self.until - self.at


class Phase(msgspec.Struct, frozen=True, kw_only=True, tag="phase"):
    """A part of the run began."""

    at: float
    name: str


class LeftJob(msgspec.Struct, frozen=True, kw_only=True, tag="left"):
    """A job that is in the database at the end."""

    job: int
    token: str
    attempts: int
    max_attempts: int
    locked_by: str | None
    last_error: str | None


class LeftLock(msgspec.Struct, frozen=True, kw_only=True, tag="locked queue"):
    """A serial queue that is locked at the end."""

    queue: str
    locked_by: str


Line: TypeAlias = (
    Begun
    | Ended
    | Told
    | Ready
    | Exited
    | Asked
    | Answered
    | Removing
    | Removed
    | Fault
    | Phase
    | LeftJob
    | LeftLock
)

_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def now() -> float:
    """The moment, for a ledger."""
    return time.monotonic()


class Ledger:
    """A file to which lines are added, each by one write: what was written survives a kill."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._runs = count(1)

    def write(self, line: Line) -> None:
        """Add a line."""
        os.write(self._descriptor, text_of(line).encode() + b"\n")

    def next_run(self) -> str:
        """A name for a run in this process."""
        return f"{os.getpid()}-{next(self._runs)}"

    def __enter__(self) -> Self:
        """Close it at the end."""
        return self

    def __exit__(self, *_exception: object) -> None:
        """No more lines."""
        os.close(self._descriptor)


def text_of(line: Line) -> str:
    """The line as it stands in the file."""
    return _ENCODER.encode(line).decode()


def read_folder(folder: Path) -> list[Line]:
    """All lines of all ledgers in the folder, in no order between files."""
    return [line for path in sorted(folder.glob("*.ledger")) for line in read_file(path)]


def read_file(path: Path) -> list[Line]:
    """The lines of one; half a line at the end, of a process that was killed, is none."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [_DECODER.decode(line) for line in lines if line.endswith(b"\n")]
