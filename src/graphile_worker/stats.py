"""Counts of jobs by state, task and queue, and statistics of what workers did."""

from __future__ import annotations

from enum import StrEnum
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec

from graphile_worker._base.histogram import percentile

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from datetime import datetime

    from graphile_worker.job import Progress


class TaskStats(msgspec.Struct, frozen=True, kw_only=True):
    """The number of jobs of one task, or of all tasks, in each state: see `JobState`."""

    ready: int = 0
    scheduled: int = 0
    running: int = 0
    failed: int = 0
    oldest_due: datetime | None = None
    """The `run_at` of the ready job that has waited longest."""

    @property
    def total(self) -> int:
        """The number of jobs in any state."""
        return self.ready + self.scheduled + self.running + self.failed

    @staticmethod
    def of_tasks(tasks: Collection[TaskStats]) -> TaskStats:
        """Return the sum of the counts of several tasks."""
        return TaskStats(
            ready=sum(task.ready for task in tasks),
            scheduled=sum(task.scheduled for task in tasks),
            running=sum(task.running for task in tasks),
            failed=sum(task.failed for task in tasks),
            oldest_due=min((task.oldest_due for task in tasks if task.oldest_due), default=None),
        )


class Stats(TaskStats, frozen=True, kw_only=True):
    """The number of jobs in each state, in total and by task."""

    tasks: dict[str, TaskStats]
    """The counts by task identifier."""

    @classmethod
    def of_rows(cls, rows: Iterable[Any]) -> Self:
        """Create the counts from database rows, one per task."""
        tasks = {
            row["identifier"] or f"(unknown task {row['task_id']})": TaskStats(
                ready=row["ready"],
                scheduled=row["scheduled"],
                running=row["running"],
                failed=row["failed"],
                oldest_due=row["oldest_due"],
            )
            for row in rows
        }
        return cls(tasks=tasks, **msgspec.structs.asdict(TaskStats.of_tasks(tasks.values())))


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """A serial queue and the number of its jobs."""

    queue_name: str
    locked_by: str | None = None
    locked_at: datetime | None = None
    jobs: int = 0
    """The number of jobs in any state."""
    ready: int = 0
    failed: int = 0
    oldest_due: datetime | None = None
    """The `run_at` of the ready job that has waited longest."""


class RunningJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that a worker has locked, without its payload."""

    id: int
    task_identifier: str
    queue_name: str | None
    locked_by: str
    locked_at: datetime
    progress: Progress | None = None
    """What its task has reported last."""


class FailedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job whose last run failed. It may have attempts left."""

    id: int
    task_identifier: str
    attempts: int
    max_attempts: int
    failed_at: datetime | None
    """When the failure was recorded; None if another program recorded it, for example a Node worker."""
    written_before: int
    """How many transactions ago the job's row was written. A smaller number means a later failure."""
    last_error: str
    """The beginning of the error message."""


class FailureGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of one task whose last attempts failed with the same error: equal except for numbers."""

    task_identifier: str
    fingerprint: str
    """The first line of the error, with ``#`` for numbers, hexadecimal digits and UUIDs."""
    error_type: str | None
    """The exception's type; None if only other programs recorded these failures, for example Node workers."""
    jobs: int
    permanent: int
    """How many of the jobs have no attempts left."""
    last_failed_at: datetime | None
    """The latest recorded failure; None if only other programs recorded these failures."""
    example_id: int
    """The id of one of the jobs, the one that was added last."""


class Writes(msgspec.Struct, frozen=True, kw_only=True):
    """Approximate totals of added and removed jobs, from the server's statistics."""

    added: int
    removed: int
    at: float
    """When the totals were read, in seconds of the server's clock."""


class Metric(StrEnum):
    """What `WorkerUtils.series` can return.

    Python workers count the jobs that they run. Jobs that Node and Rust workers run are not in these counts
    and times. The numbers of jobs (`READY`, `SCHEDULED`, `RUNNING`, `FAILED_JOBS`) are counted in the table,
    and so include the jobs of all workers.
    """

    DONE = "done"
    """Jobs that succeeded."""
    FAILED = "failed"
    """Attempts that failed, whether or not they are retried."""
    SNOOZED = "snoozed"
    """Runs that ended with `Snooze`."""
    CANCELLED = "cancelled"
    """Jobs that were cancelled while they ran."""
    INTERRUPTED = "interrupted"
    """Runs that ended because their worker stopped."""
    RUN_MEAN = "run_mean"
    """Average time that jobs ran, in seconds."""
    RUN_P50 = "run_p50"
    RUN_P95 = "run_p95"
    RUN_P99 = "run_p99"
    WAIT_MEAN = "wait_mean"
    """Average time from when jobs were due until they started, in seconds."""
    WAIT_P50 = "wait_p50"
    WAIT_P95 = "wait_p95"
    WAIT_P99 = "wait_p99"
    READY = "ready"
    """Jobs that were due and waited, on average over the step."""
    SCHEDULED = "scheduled"
    """Jobs whose `run_at` was in the future."""
    RUNNING = "running"
    """Jobs that a worker had locked."""
    FAILED_JOBS = "failed_jobs"
    """Jobs that had no attempts left."""

    @property
    def is_depth(self) -> bool:
        """Whether the metric is a number of jobs in the table."""
        return self in _DEPTHS


_DEPTHS = {
    Metric.READY: "ready",
    Metric.SCHEDULED: "scheduled",
    Metric.RUNNING: "running",
    Metric.FAILED_JOBS: "failed",
}


class Point(NamedTuple):
    """The value of a metric in one step of time."""

    at: datetime
    """The beginning of the step."""
    value: float | None
    """None if nothing is known: no job ran, or no sample was taken."""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """The values of one metric over time, made by `WorkerUtils.series`."""

    metric: Metric
    task: str | None
    """The identifier of the task; None for all tasks."""
    step: int
    """Seconds from one point to the next."""
    points: Sequence[Point]
    """One point for each step, oldest first. The last step is not over yet."""
    estimated: bool = False
    """Whether numbers of jobs were estimated from a part of the table, because it was large."""


class JobCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What Python workers did in a period. Jobs that Node and Rust workers ran are not counted."""

    done: int = 0
    """Jobs that succeeded."""
    failed: int = 0
    """Attempts that failed, whether or not they are retried."""
    snoozed: int = 0
    cancelled: int = 0
    interrupted: int = 0
    run_seconds: float = 0.0
    """The sum of the run times."""
    wait_seconds: float = 0.0
    """The sum of the times from when jobs were due until they started."""
    runs: Sequence[int] = ()
    """A histogram of the run times; docs/guides/statistics.md describes its buckets."""
    waits: Sequence[int] = ()

    def run_time(self, fraction: float) -> float | None:
        """Return a percentile of the run times in seconds: ``run_time(0.95)``; None if no job ran."""
        return percentile(self.runs, fraction)

    def wait_time(self, fraction: float) -> float | None:
        """Return a percentile of the wait times in seconds; None if no job ran."""
        return percentile(self.waits, fraction)

    def value(self, metric: Metric) -> float | None:
        """Return the value of a metric that is not a number of jobs in the table."""
        kind, _, what = metric.partition("_")
        if not what:
            count: int = getattr(self, metric)
            return count
        histogram = self.runs if kind == "run" else self.waits
        if what != "mean":
            return percentile(histogram, int(what.removeprefix("p")) / 100)
        counted = sum(histogram)
        return (self.run_seconds if kind == "run" else self.wait_seconds) / counted if counted else None

    @staticmethod
    def of_many(counts: Collection[JobCounts]) -> JobCounts:
        """Return the sum of several counts."""

        def total(histograms: Iterable[Sequence[int]]) -> list[int]:
            return [sum(bucket) for bucket in zip_longest(*histograms, fillvalue=0)]

        return JobCounts(
            done=sum(one.done for one in counts),
            failed=sum(one.failed for one in counts),
            snoozed=sum(one.snoozed for one in counts),
            cancelled=sum(one.cancelled for one in counts),
            interrupted=sum(one.interrupted for one in counts),
            run_seconds=sum(one.run_seconds for one in counts),
            wait_seconds=sum(one.wait_seconds for one in counts),
            runs=total(one.runs for one in counts),
            waits=total(one.waits for one in counts),
        )


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """What Python workers did over time, made by `WorkerUtils.activity`."""

    step: int
    """Seconds from one step to the next."""
    times: Sequence[datetime]
    """The beginning of each step, oldest first. The last step is not over yet."""
    tasks: Mapping[str, Sequence[JobCounts]]
    """The counts of each step, by task identifier. Tasks without any are left out."""

    @property
    def steps(self) -> Sequence[JobCounts]:
        """The counts of each step, for all tasks together."""
        return [
            JobCounts.of_many([one for one in counts if one is not _NOTHING])
            for counts in zip(*self.tasks.values(), strict=True)
        ] or [_NOTHING] * len(self.times)

    def total(self, task: str | None = None) -> JobCounts:
        """Return the counts of all steps together, of one task or of all tasks."""
        if task is not None:
            return JobCounts.of_many([one for one in self.tasks.get(task, ()) if one is not _NOTHING])
        found = [one for counts in self.tasks.values() for one in counts if one is not _NOTHING]
        return JobCounts.of_many(found)

    @classmethod
    def of_rows(cls, step: int, times: Sequence[datetime], rows: Iterable[Any]) -> Self:
        """Create it from database rows, one per task and step."""
        places = {at: index for index, at in enumerate(times)}
        tasks: dict[str, list[JobCounts]] = {}
        for row in rows:
            fields = dict(row)
            place = places.get(fields.pop("at"))
            if place is not None:
                steps = tasks.setdefault(fields.pop("task"), [_NOTHING] * len(times))
                steps[place] = JobCounts(**fields)
        return cls(step=step, times=times, tasks=tasks)


_NOTHING = JobCounts()


def depth_points(
    metric: Metric, task: str | None, times: Sequence[datetime], rows: Iterable[Any]
) -> Iterable[Point]:
    """Return the average number of jobs in each step, from the sums of the samples."""
    samples: dict[datetime, int] = {}
    sums: dict[datetime, int] = {}
    for row in rows:
        if not row["task"]:
            samples[row["at"]] = row["samples"]
        if row["task"] == (task or ""):
            sums[row["at"]] = row[_DEPTHS[metric]]
    for at in times:
        yield Point(at, sums.get(at, 0) / samples[at] if at in samples else None)
