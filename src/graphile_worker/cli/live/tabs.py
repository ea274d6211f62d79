"""The tables of the live view."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from graphile_worker.cli import times
from graphile_worker.cli.printing import STATES, Column, clean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from graphile_worker.cli.live.snapshot import Snapshot
    from graphile_worker.liveness import WorkerInfo
    from graphile_worker.stats import FailedJob, QueueStats, RunningJob, TaskStats


_SPARE = {"scheduled": 4, "running": 2, "failed": 1}


class TaskRow(NamedTuple):
    """A task, its jobs, and how many more a second there are."""

    name: str
    stats: TaskStats
    grows: float | None


class QueueRow(NamedTuple):
    """A serial queue, and how many more jobs a second there are in it."""

    queue: QueueStats
    grows: float | None


class WorkerRow(NamedTuple):
    """A worker, and how many jobs it runs."""

    worker: WorkerInfo
    runs: int


def _ago(moment: datetime | None) -> str:
    return "" if moment is None else times.from_now(moment).removesuffix(" ago")


def _rate(row: TaskRow | QueueRow) -> str:
    return "" if row.grows is None else f"{row.grows:+,.1f}/s"


def _count(title: str) -> Column[TaskRow]:
    def value(row: TaskRow) -> int:
        found: int = getattr(row.stats, title)
        return found

    return Column(
        title=title.upper(),
        value=value,
        right=True,
        style=lambda row: STATES[title] if value(row) else "dim",
        spare=_SPARE.get(title, 0),
    )


_TASKS: list[Column[TaskRow]] = [
    Column(title="TASK", value=lambda row: row.name, least=12),
    *(_count(state) for state in STATES),
    Column(
        title="OLDEST DUE",
        value=lambda row: row.stats.oldest_due,
        short=lambda row: _ago(row.stats.oldest_due),
    ),
    Column(title="CHANGE", value=lambda row: row.grows, short=_rate, right=True, spare=3),
]
_QUEUES: list[Column[QueueRow]] = [
    Column(title="QUEUE", value=lambda row: row.queue.queue_name, least=12),
    Column(title="JOBS", value=lambda row: row.queue.jobs, right=True),
    Column(title="READY", value=lambda row: row.queue.ready, right=True),
    Column(title="FAILED", value=lambda row: row.queue.failed, right=True, spare=1),
    Column(
        title="OLDEST DUE",
        value=lambda row: row.queue.oldest_due,
        short=lambda row: _ago(row.queue.oldest_due),
    ),
    Column(title="CHANGE", value=lambda row: row.grows, short=_rate, right=True, spare=2),
    Column(title="LOCKED BY", value=lambda row: row.queue.locked_by, least=12, spare=3),
]
_RUNNING: list[Column[RunningJob]] = [
    Column(title="JOB", value=lambda row: row.id, right=True),
    Column(title="TASK", value=lambda row: row.task_identifier, least=12),
    Column(title="FOR", value=lambda row: row.locked_at, short=lambda row: _ago(row.locked_at)),
    Column(title="QUEUE", value=lambda row: row.queue_name, least=8, spare=1),
    Column(title="WORKER", value=lambda row: row.locked_by, least=12, spare=2),
]
_WORKERS: list[Column[WorkerRow]] = [
    Column(title="WORKER", value=lambda row: row.worker.id, least=12),
    Column(title="LANGUAGE", value=lambda row: row.worker.language, spare=2),
    Column(title="HOST", value=lambda row: row.worker.host, least=8, spare=1),
    Column(title="STATE", value=lambda row: row.worker.condition),
    Column(title="RUNS", value=lambda row: row.runs, right=True),
    Column(title="SLOTS", value=lambda row: row.worker.concurrency, right=True),
    Column(
        title="STARTED",
        value=lambda row: row.worker.started_at,
        short=lambda row: _ago(row.worker.started_at),
    ),
]
_FAILURES: list[Column[FailedJob]] = [
    Column(title="JOB", value=lambda row: row.id, right=True),
    Column(title="TASK", value=lambda row: row.task_identifier, least=12),
    Column(
        title="ATTEMPT", value=lambda row: row.attempts,
        short=lambda row: f"{row.attempts}/{row.max_attempts}",
    ),
    Column(
        title="WHEN", value=lambda row: -row.written_before,
        short=lambda row: "" if row.failed_at is None else times.from_now(row.failed_at),
    ),
    Column(
        title="ERROR", value=lambda row: row.last_error, least=10,
        short=lambda row: row.last_error.strip().split("\n")[0],
    ),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Tab:
    """One of the tables."""

    title: str
    columns: list[Column[Any]]
    rows: Callable[[Snapshot], Sequence[Any]]
    sorted_by: int
    descending: bool
    job_id: Callable[[Any], int] | None = None
    """If its rows are jobs."""


TABS = (
    Tab(
        title="Tasks", columns=_TASKS, sorted_by=1, descending=True,
        rows=lambda seen: [
            TaskRow(name, stats, seen.tasks_grow.get(name)) for name, stats in seen.stats.tasks.items()
        ],
    ),
    Tab(
        title="Queues", columns=_QUEUES, sorted_by=2, descending=True,
        rows=lambda seen: [QueueRow(queue, seen.queues_grow.get(queue.queue_name)) for queue in seen.queues],
    ),
    Tab(
        title="Running", columns=_RUNNING, rows=lambda seen: seen.running, sorted_by=2, descending=False,
        job_id=lambda row: row.id,
    ),
    Tab(
        title="Workers", columns=_WORKERS, sorted_by=6, descending=True,
        rows=lambda seen: [WorkerRow(worker, seen.held()[worker.id]) for worker in _known(seen)],
    ),
    Tab(
        title="Failures", columns=_FAILURES, rows=lambda seen: seen.failures, sorted_by=3, descending=True,
        job_id=lambda row: row.id,
    ),
)  # fmt: skip


def _known(seen: Snapshot) -> list[WorkerInfo]:
    """Those with a heartbeat, and those that only hold jobs: Node's."""
    from graphile_worker.liveness import WorkerInfo  # noqa: PLC0415

    known = {worker.id for worker in seen.workers}
    silent = [WorkerInfo(id=name) for name in sorted(seen.held().keys() - known)]
    return [*seen.workers, *silent]


def arranged(tab: Tab, rows: Sequence[Any], *, by: int, descending: bool, having: str) -> list[Any]:
    """Those that have the text somewhere, in order; what has no value comes last."""
    column = tab.columns[by]
    wanted = having.casefold()
    found = [
        row
        for row in rows
        if not wanted or any(wanted in clean((one.short or one.value)(row)).casefold() for one in tab.columns)
    ]
    valued = [row for row in found if column.value(row) is not None]
    valued.sort(key=column.value, reverse=descending)  # type: ignore[arg-type]
    return [*valued, *(row for row in found if column.value(row) is None)]
