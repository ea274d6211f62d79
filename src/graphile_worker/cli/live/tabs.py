"""The tables of the live view."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from graphile_worker.cli import times
from graphile_worker.cli.printing import STATES, Column, describe_progress, escape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from graphile_worker.cli.live.snapshot import Snapshot
    from graphile_worker.stats import FailedJob, QueueStats, RunningJob, TaskStats
    from graphile_worker.workers import WorkerInfo


_DROP_ORDER = {"scheduled": 4, "running": 2, "failed": 1}


class TaskRow(NamedTuple):
    """A task, its statistics, and the change of its jobs per second."""

    name: str
    stats: TaskStats
    growth: float | None


class QueueRow(NamedTuple):
    """A serial queue, and the change of its jobs per second."""

    queue: QueueStats
    growth: float | None


class WorkerRow(NamedTuple):
    """A worker, and the number of its running jobs."""

    worker: WorkerInfo
    running: int


def _age(moment: datetime | None) -> str:
    return "" if moment is None else times.format_relative(moment).removesuffix(" ago")


def _rate(row: TaskRow | QueueRow) -> str:
    return "" if row.growth is None else f"{row.growth:+,.1f}/s"


def _count(title: str) -> Column[TaskRow]:
    def value(row: TaskRow) -> int:
        found: int = getattr(row.stats, title)
        return found

    return Column(
        title=title.upper(),
        value=value,
        align_right=True,
        style=lambda row: STATES[title] if value(row) else "dim",
        drop_order=_DROP_ORDER.get(title, 0),
    )


_TASKS: list[Column[TaskRow]] = [
    Column(title="TASK", value=lambda row: row.name, min_width=12),
    *(_count(state) for state in STATES),
    Column(
        title="OLDEST DUE",
        value=lambda row: row.stats.oldest_due,
        terminal_value=lambda row: _age(row.stats.oldest_due),
    ),
    Column(
        title="CHANGE", value=lambda row: row.growth, terminal_value=_rate, align_right=True, drop_order=3
    ),
]
_QUEUES: list[Column[QueueRow]] = [
    Column(title="QUEUE", value=lambda row: row.queue.queue_name, min_width=12),
    Column(title="JOBS", value=lambda row: row.queue.jobs, align_right=True),
    Column(title="READY", value=lambda row: row.queue.ready, align_right=True),
    Column(title="FAILED", value=lambda row: row.queue.failed, align_right=True, drop_order=1),
    Column(
        title="OLDEST DUE",
        value=lambda row: row.queue.oldest_due,
        terminal_value=lambda row: _age(row.queue.oldest_due),
    ),
    Column(
        title="CHANGE", value=lambda row: row.growth, terminal_value=_rate, align_right=True, drop_order=2
    ),
    Column(title="LOCKED BY", value=lambda row: row.queue.locked_by, min_width=12, drop_order=3),
]
_RUNNING: list[Column[RunningJob]] = [
    Column(title="JOB", value=lambda row: row.id, align_right=True),
    Column(title="TASK", value=lambda row: row.task_identifier, min_width=12),
    Column(title="FOR", value=lambda row: row.locked_at, terminal_value=lambda row: _age(row.locked_at)),
    Column(
        title="PROGRESS",
        value=lambda row: None if row.progress is None else row.progress.value or 0.0,
        terminal_value=lambda row: "" if row.progress is None else describe_progress(row.progress),
        min_width=8,
        drop_order=1,
    ),
    Column(title="QUEUE", value=lambda row: row.queue_name, min_width=8, drop_order=2),
    Column(title="WORKER", value=lambda row: row.locked_by, min_width=12, drop_order=3),
]
_WORKERS: list[Column[WorkerRow]] = [
    Column(title="WORKER", value=lambda row: row.worker.id, min_width=12),
    Column(title="LANGUAGE", value=lambda row: row.worker.language, drop_order=2),
    Column(title="HOST", value=lambda row: row.worker.host, min_width=8, drop_order=1),
    Column(title="STATE", value=lambda row: row.worker.status),
    Column(title="RUNS", value=lambda row: row.running, align_right=True),
    Column(title="SLOTS", value=lambda row: row.worker.concurrency, align_right=True),
    Column(
        title="STARTED",
        value=lambda row: row.worker.started_at,
        terminal_value=lambda row: _age(row.worker.started_at),
    ),
]
_FAILURES: list[Column[FailedJob]] = [
    Column(title="JOB", value=lambda row: row.id, align_right=True),
    Column(title="TASK", value=lambda row: row.task_identifier, min_width=12),
    Column(
        title="ATTEMPT", value=lambda row: row.attempts,
        terminal_value=lambda row: f"{row.attempts}/{row.max_attempts}",
    ),
    Column(
        title="WHEN", value=lambda row: -row.written_before,
        terminal_value=lambda row: "" if row.failed_at is None else times.format_relative(row.failed_at),
    ),
    Column(
        title="ERROR", value=lambda row: row.last_error, min_width=10,
        terminal_value=lambda row: row.last_error.strip().split("\n")[0],
    ),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Tab:
    """A table of the view."""

    title: str
    columns: list[Column[Any]]
    rows: Callable[[Snapshot], Sequence[Any]]
    sorted_by: int
    descending: bool
    job_id: Callable[[Any], int] | None = None
    """Returns the job id of a row; None if the rows are not jobs."""


def _task_rows(snapshot: Snapshot) -> list[TaskRow]:
    return [
        TaskRow(name, stats, snapshot.task_growth.get(name)) for name, stats in snapshot.stats.tasks.items()
    ]


def _queue_rows(snapshot: Snapshot) -> list[QueueRow]:
    return [QueueRow(queue, snapshot.queue_growth.get(queue.queue_name)) for queue in snapshot.queues]


def _worker_rows(snapshot: Snapshot) -> list[WorkerRow]:
    """Return a row for each worker with a heartbeat, and for those that only hold locks, such as Node's."""
    from graphile_worker.workers import WorkerInfo  # noqa: PLC0415

    running = snapshot.running_by_worker()
    known = {worker.id for worker in snapshot.workers}
    silent = [WorkerInfo(id=name) for name in sorted(running.keys() - known)]
    return [WorkerRow(worker, running[worker.id]) for worker in [*snapshot.workers, *silent]]


TABS = (
    Tab(title="Tasks", columns=_TASKS, rows=_task_rows, sorted_by=1, descending=True),
    Tab(title="Queues", columns=_QUEUES, rows=_queue_rows, sorted_by=2, descending=True),
    Tab(
        title="Running",
        columns=_RUNNING,
        rows=lambda snapshot: snapshot.running,
        sorted_by=2,
        descending=False,
        job_id=lambda row: row.id,
    ),
    Tab(title="Workers", columns=_WORKERS, rows=_worker_rows, sorted_by=6, descending=True),
    Tab(
        title="Failures",
        columns=_FAILURES,
        rows=lambda snapshot: snapshot.failures,
        sorted_by=3,
        descending=True,
        job_id=lambda row: row.id,
    ),
)


def filter_and_sort(
    tab: Tab, rows: Sequence[Any], *, column_index: int, descending: bool, search: str
) -> list[Any]:
    """Return the rows that contain the text, in order; rows without a value come last."""
    column = tab.columns[column_index]
    wanted = search.casefold()

    def contains_text(row: Any) -> bool:
        shown = (column.terminal_value or column.value for column in tab.columns)
        return any(wanted in escape(value(row)).casefold() for value in shown)

    found = [row for row in rows if not wanted or contains_text(row)]
    with_value = [row for row in found if column.value(row) is not None]
    with_value.sort(key=column.value, reverse=descending)  # type: ignore[arg-type]
    return [*with_value, *(row for row in found if column.value(row) is None)]
