"""Rows of tables and parts of pages, made from what the database has."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

from graphile_worker.stats import Activity, JobCounts
from graphile_worker.web.english import describe
from graphile_worker.web.models import (
    ActivityWindow,
    CronRow,
    CronRun,
    DeployMark,
    FailureGroup,
    StateCounts,
    TaskAge,
    TaskRow,
    WorkerJob,
    WorkerRow,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from graphile_worker.cron import CronItem
    from graphile_worker.web.reading import QueueLook
    from graphile_worker.workers import WorkerInfo

FAILURE_WINDOWS = ("1h", "3h", "24h", "3d", "7d", "all")
_OVERDUE = 120.0
_RUNNING_SHOWN = 20


def sum_window(name: str, counts: JobCounts) -> ActivityWindow:
    """Return what Python workers did in a period."""
    return ActivityWindow(
        window=name,
        done=counts.done,
        failed=counts.failed,
        run_p50=counts.run_time(0.5),
        run_p95=counts.run_time(0.95),
        wait_p50=counts.wait_time(0.5),
        wait_p95=counts.wait_time(0.95),
    )


def find_oldest(look: QueueLook) -> list[TaskAge]:
    """Return the tasks whose ready jobs have waited longest."""
    ages = [
        TaskAge(
            task=task, seconds=max(0.0, (look.look.at - due).total_seconds()), ready=look.tasks[task].ready
        )
        for task, due in look.oldest.items()
    ]
    return sorted(ages, key=lambda age: -age.seconds)[:10]


def find_deploys(workers: Sequence[WorkerInfo]) -> Iterator[DeployMark]:
    """Yield when the first worker of each version started."""
    versions: dict[tuple[str | None, str], list[datetime]] = defaultdict(list)
    for one in workers:
        if one.version and one.started_at:
            versions[one.language, one.version].append(one.started_at)
    for (language, version), starts in sorted(versions.items(), key=lambda item: min(item[1])):
        yield DeployMark(at=min(starts), version=version, language=language, workers=len(starts))


def find_served(workers: Sequence[WorkerInfo]) -> Mapping[str, list[str]]:
    """Return the live workers of each task."""
    served: dict[str, list[str]] = defaultdict(list)
    for one in workers:
        if one.is_alive:
            for task in one.tasks or ():
                served[task].append(one.id)
    return served


def task_row(
    name: str,
    look: QueueLook,
    activity: Activity | None,
    served: list[str],
    error: str | None,
    *,
    unknown: bool,
) -> TaskRow:
    """Return a task for the list."""
    counts = look.tasks.get(name, StateCounts())
    done = JobCounts() if activity is None else activity.total(name)
    ended = done.done + done.failed
    due = look.oldest.get(name)
    return TaskRow(
        task=name,
        counts=counts,
        oldest_seconds=None if due is None else max(0.0, (look.look.at - due).total_seconds()),
        done=done.done,
        failed=done.failed,
        failure_ratio=done.failed / ended if ended else None,
        run_p50=done.run_time(0.5),
        run_p95=done.run_time(0.95),
        wait_p95=done.wait_time(0.95),
        last_error=None if error is None else (error.strip().splitlines() or [""])[0][:300],
        served_by=served,
        is_served=True if served else None if unknown else False,
    )


def failure_group(row: Mapping[str, Any], *, timed: bool) -> FailureGroup:
    """Return a group of failures."""
    names = FAILURE_WINDOWS[:-1]
    windows = {name: row[name] if timed else row["jobs"] for name in names}
    return FailureGroup(
        task=row["task"],
        error_type=row["error_type"],
        fingerprint=row["fingerprint"],
        jobs=row["jobs"],
        permanent=row["permanent"],
        windows={**windows, "all": row["jobs"]},
        last_failed_at=row["last_failed_at"],
        example_id=str(row["example_id"]),
    )


def cron_row(
    identifier: str,
    item: CronItem | None,
    since: datetime | None,
    last: datetime | None,
    now: datetime,
    runs: list[CronRun],
    lateness: float | None,
) -> CronRow:
    """Return a recurring task for the list."""
    if item is None:
        return CronRow(
            id=identifier,
            task=None,
            expression=None,
            english=None,
            zone=None,
            last_run=last,
            known_since=since,
        )
    expression = item.match if isinstance(item.match, str) else None
    # A function is called for each minute, so it is not asked for three runs.
    following = (
        list(islice(item.occurrences(now), 3))
        if expression
        else [one for one in [item.next_after(now)] if one]
    )
    due = item.next_after(last or since) if (last or since) is not None and expression else None  # type: ignore[arg-type]
    return CronRow(
        id=identifier,
        task=item.task,
        expression=expression,
        english=describe(expression) if expression else "at minutes that a function chooses",
        zone=str(item.tz or "UTC"),
        next_runs=following,
        last_run=last,
        known_since=since,
        lateness=lateness,
        runs=runs,
        can_run=True,
        is_overdue=due is not None and now - due > timedelta(seconds=_OVERDUE),
    )


def worker_row(one: WorkerInfo, running: list[WorkerJob], queues: int) -> WorkerRow:
    """Return a worker for the list."""
    return WorkerRow(
        id=one.id,
        language=one.language,
        host=one.host,
        pid=one.pid,
        version=one.version,
        status=one.status,
        is_alive=one.is_alive,
        slots=one.concurrency,
        jobs=len(running),
        queues=queues,
        running=running[:_RUNNING_SHOWN],
        started_at=one.started_at,
        heartbeat_seconds=one.seconds_since_heartbeat,
        tasks=None if one.tasks is None else list(one.tasks),
        reason=one.reason,
    )


def unknown_worker(name: str, running: list[WorkerJob], queues: int) -> WorkerRow:
    """Return a worker of which only the locks are known."""
    return WorkerRow(
        id=name,
        language=None,
        host=None,
        pid=None,
        version=None,
        status="unknown",
        is_alive=False,
        slots=None,
        jobs=len(running),
        queues=queues,
        running=running[:_RUNNING_SHOWN],
        started_at=None,
        heartbeat_seconds=None,
    )
