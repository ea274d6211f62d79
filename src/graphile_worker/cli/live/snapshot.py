"""Snapshots of a queue."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphile_worker.client import WorkerUtils
    from graphile_worker.limits import LimitState, Pause
    from graphile_worker.stats import FailedJob, QueueStats, RunningJob, Stats, Writes
    from graphile_worker.workers import WorkerInfo

_MAX_QUEUES = 200


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of a queue at one moment, and how long it took to read it."""

    at: datetime
    duration: float
    stats: Stats
    queues: Sequence[QueueStats]
    running: Sequence[RunningJob]
    workers: Sequence[WorkerInfo]
    failures: Sequence[FailedJob]
    writes: Writes
    pauses: Sequence[Pause] = ()
    limits: Sequence[LimitState] = ()
    added: float | None = None
    """Jobs added per second since the previous snapshot; None for the first."""
    removed: float | None = None
    task_growth: Mapping[str, float] = field(default_factory=dict)
    """Change of the number of jobs per second, for tasks where it is known."""
    queue_growth: Mapping[str, float] = field(default_factory=dict)

    def running_by_worker(self) -> Counter[str]:
        """Return the number of running jobs of each worker."""
        return Counter(job.locked_by for job in self.running)


async def take_snapshot(utils: WorkerUtils, previous: Snapshot | None) -> Snapshot:
    """Read the queue, one statement after the other, so that it never takes more than one session."""
    started = monotonic()
    stats = await utils.stats()
    queues = await utils.many.queues(limit=_MAX_QUEUES)
    running = await utils.many.running()
    workers = await utils.workers(include_locks=False)
    failures = await utils.many.failures()
    writes = await utils.many.writes()
    pauses = await utils.pauses()
    limits = await utils.limits()
    snapshot = Snapshot(
        at=datetime.now(UTC),
        duration=monotonic() - started,
        stats=stats,
        queues=queues,
        running=running,
        workers=workers,
        failures=failures,
        writes=writes,
        pauses=pauses,
        limits=limits,
    )
    if previous is None or writes.at <= previous.writes.at:
        return snapshot
    return _with_rates(snapshot, previous)


def _with_rates(snapshot: Snapshot, previous: Snapshot) -> Snapshot:
    """Return the snapshot with rates of change since the previous one."""
    seconds = snapshot.writes.at - previous.writes.at

    def rates(now: Mapping[str, int], before: Mapping[str, int], *, is_complete: bool) -> dict[str, float]:
        return {
            name: (count - before.get(name, 0)) / seconds
            for name, count in now.items()
            if name in before or is_complete
        }

    return replace(
        snapshot,
        # A counter is lower than before if the statistics were reset.
        added=max(0, snapshot.writes.added - previous.writes.added) / seconds,
        removed=max(0, snapshot.writes.removed - previous.writes.removed) / seconds,
        task_growth=rates(_jobs_by_task(snapshot), _jobs_by_task(previous), is_complete=True),
        queue_growth=rates(
            _jobs_by_queue(snapshot),
            _jobs_by_queue(previous),
            is_complete=len(previous.queues) < _MAX_QUEUES,
        ),
    )


def _jobs_by_task(snapshot: Snapshot) -> dict[str, int]:
    return {name: task.total for name, task in snapshot.stats.tasks.items()}


def _jobs_by_queue(snapshot: Snapshot) -> dict[str, int]:
    return {queue.queue_name: queue.jobs for queue in snapshot.queues}
