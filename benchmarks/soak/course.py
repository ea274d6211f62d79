"""What was seen of one scenario, as it is written to JSON and read back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from benchmarks.results import Report  # noqa: TC001 - msgspec reads the annotations

if TYPE_CHECKING:
    from pathlib import Path

FEWEST_TURNS = 3
"""So often autovacuum must come until it can be seen if it keeps up."""
FEW_DEAD = 10_000
"""So few dead rows mean nothing."""


class TableState(msgspec.Struct, frozen=True):
    """One table at one moment."""

    dead: int
    """Row versions that nobody needs any more and that are still there, by the server's count."""
    died: int
    """How many became so up to now."""
    table: int
    """Bytes."""
    indexes: int
    """Bytes."""
    vacuums: int
    """How often autovacuum has finished with it."""

    @property
    def size(self) -> int:
        """Bytes, with indexes."""
        return self.table + self.indexes


class Sample(msgspec.Struct, frozen=True):
    """One moment."""

    seconds: float
    """Since the first job was added."""
    done: int
    waiting: int
    """Jobs that were added and are not done."""
    memory: int
    """Bytes that the worker has."""
    jobs: TableState
    queues: TableState
    latencies: list[float]
    """Milliseconds, of the probes since the last sample."""
    old_transaction: bool = False
    """Whether a transaction is open that keeps dead rows from going."""


class Tally(msgspec.Struct, frozen=True):
    """How often jobs ran, as the worker counted."""

    jobs: int
    never: int
    once: int
    more: int
    runs: int
    """Of all jobs together, with those that failed."""
    failures: int
    """How many jobs were to fail once."""
    recorded: int
    """How many runs the worker called complete, with probes."""
    complaints: list[str]
    """The first warnings and errors that it logged."""


class Left(msgspec.Struct, frozen=True):
    """What the database has at the end, after the worker stopped."""

    jobs: int
    locked_jobs: int
    locked_queues: int
    inserted: int
    """Jobs in all, with probes and those of tomorrow."""
    deleted: int
    hot_queue_updates: float
    """The share of updates of queues that needed no new entries in indexes."""


class Spending(msgspec.Struct, frozen=True):
    """What it took."""

    worker_cpu: float
    """Seconds."""
    server_cpu: float
    """Seconds, with autovacuum."""
    wal: int
    """Bytes."""


class Pair(msgspec.Struct, frozen=True):
    """Milliseconds, of probes that took turns."""

    soaked: list[float]
    """Of the worker and the database of the run."""
    fresh: list[float]
    """Of a worker and a database that are new."""


class Course(msgspec.Struct, frozen=True):
    """One scenario from its beginning to its end."""

    name: str
    settings: list[str]
    """As SQL: what is not as by default."""
    naptime: float
    """Seconds between two turns of autovacuum in a database, as the server is set."""
    judged: bool
    """False: dead rows and latency are shown, and nothing is expected of them."""
    seconds: float
    """From the first job to the last."""
    scheduled: int
    """How many jobs of tomorrow were in the table."""
    probes: int
    """How many there were, of both kinds."""
    samples: list[Sample]
    idle_before: list[float]
    """Milliseconds, of probes to a worker with nothing else to do."""
    idle_after: Pair
    """The same right after the last job."""
    idle_settled: Pair | None
    """And once autovacuum has been there again; None if the run was too short to wait for it."""
    tally: Tally
    left: Left
    spent: Spending

    @property
    def long_enough(self) -> bool:
        """Whether autovacuum came often enough to see if it keeps up."""
        return self.seconds >= FEWEST_TURNS * self.naptime

    @property
    def rate(self) -> float:
        """Jobs per second."""
        return self.tally.jobs / self.seconds


class Soaked(msgspec.Struct, frozen=True):
    """All of a run."""

    report: Report
    """When, where and how."""
    courses: list[Course]

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_bytes(msgspec.json.encode(self) + b"\n")

    @classmethod
    def read(cls, path: Path) -> Soaked:
        """From JSON."""
        return msgspec.json.decode(path.read_bytes(), type=cls)
