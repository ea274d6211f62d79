"""The result of one scenario, as it is written to JSON and read back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from benchmarks.results import Report  # noqa: TC001 - msgspec reads the annotations

if TYPE_CHECKING:
    from pathlib import Path

FEWEST_CYCLES = 3
"""The number of autovacuum cycles that a run needs to show whether autovacuum keeps up."""
FEW_DEAD = 10_000
"""A number of dead rows that does not matter."""


class TableState(msgspec.Struct, frozen=True):
    """One table at one moment."""

    dead: int
    """The dead row versions that are still in the table, by the server's count."""
    died: int
    """The total number of row versions that became dead so far."""
    table: int
    """The size of the table in bytes."""
    indexes: int
    """The size of the indexes in bytes."""
    vacuums: int
    """The number of finished autovacuum runs."""

    @property
    def size(self) -> int:
        """The size of table and indexes in bytes."""
        return self.table + self.indexes


class Sample(msgspec.Struct, frozen=True):
    """The state at one moment."""

    seconds: float
    """The seconds since the first job was added."""
    done: int
    waiting: int
    """The jobs that were added and are not done."""
    memory: int
    """The worker's memory in bytes."""
    jobs: TableState
    queues: TableState
    latencies: list[float]
    """The latencies of the probes since the last sample, in milliseconds."""
    old_transaction: bool = False
    """Whether a transaction is open that prevents the removal of dead rows."""


class Tally(msgspec.Struct, frozen=True):
    """How often jobs ran, as counted by the worker."""

    jobs: int
    never: int
    once: int
    more: int
    runs: int
    """The runs of all jobs, including failed runs."""
    failures: int
    """The number of jobs that were meant to fail once."""
    recorded: int
    """The number of runs that the worker reported as complete, including probes."""
    log_messages: list[str]
    """The first warnings and errors that the worker logged."""


class Remaining(msgspec.Struct, frozen=True):
    """The contents of the database at the end, after the worker stopped."""

    jobs: int
    locked_jobs: int
    locked_queues: int
    inserted: int
    """All inserted jobs, including probes and scheduled jobs."""
    deleted: int
    hot_queue_updates: float
    """The share of queue updates that needed no new index entries."""


class Spending(msgspec.Struct, frozen=True):
    """The resources that the run used."""

    worker_cpu: float
    """The worker's CPU time in seconds."""
    server_cpu: float
    """The server's CPU time in seconds, including autovacuum."""
    wal: int
    """The size of the write-ahead log in bytes."""


class Pair(msgspec.Struct, frozen=True):
    """The latencies of alternating probes, in milliseconds."""

    soaked: list[float]
    """The latencies with the worker and the database of the run."""
    fresh: list[float]
    """The latencies with a new worker and a new database."""


class ScenarioResult(msgspec.Struct, frozen=True):
    """The result of one scenario."""

    name: str
    settings: list[str]
    """The settings that differ from the defaults, as SQL."""
    naptime: float
    """The seconds between two autovacuum cycles in a database, by the server's settings."""
    judged: bool
    """Whether dead rows and latency must stay within limits. Otherwise they are only shown."""
    seconds: float
    """The seconds from the first job to the last."""
    scheduled: int
    """The number of jobs in the table that are due in a day."""
    probes: int
    """The number of probes, under load and idle."""
    samples: list[Sample]
    idle_before: list[float]
    """The latencies of probes to an idle worker before the first job, in milliseconds."""
    idle_after: Pair
    """The same right after the last job."""
    idle_settled: Pair | None
    """The same after another autovacuum run, or None if the run was too short to wait for one."""
    tally: Tally
    left: Remaining
    spent: Spending

    @property
    def long_enough(self) -> bool:
        """Whether there were enough autovacuum cycles to show whether autovacuum keeps up."""
        return self.seconds >= FEWEST_CYCLES * self.naptime

    @property
    def rate(self) -> float:
        """The jobs per second."""
        return self.tally.jobs / self.seconds


class SoakResult(msgspec.Struct, frozen=True):
    """The whole run."""

    report: Report
    """When, where and how the run took place."""
    scenarios: list[ScenarioResult]

    def write(self, path: Path) -> None:
        """Write the result as JSON."""
        path.write_bytes(msgspec.json.encode(self) + b"\n")

    @classmethod
    def read(cls, path: Path) -> SoakResult:
        """Read a result from JSON."""
        return msgspec.json.decode(path.read_bytes(), type=cls)
