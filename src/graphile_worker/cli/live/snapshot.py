"""A queue at one moment."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphile_worker.client import WorkerUtils
    from graphile_worker.liveness import WorkerInfo
    from graphile_worker.stats import FailedJob, QueueStats, RunningJob, Stats, Writes

_MOST_QUEUES = 200


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What was seen, and how long that took."""

    at: datetime
    took: float
    stats: Stats
    queues: Sequence[QueueStats]
    running: Sequence[RunningJob]
    workers: Sequence[WorkerInfo]
    failures: Sequence[FailedJob]
    writes: Writes
    added: float | None = None
    """How many jobs a second since the one before; None if there was none."""
    removed: float | None = None
    tasks_grow: Mapping[str, float] = field(default_factory=dict)
    """By how many jobs a second each task has grown since then, or shrunk; if that is known."""
    queues_grow: Mapping[str, float] = field(default_factory=dict)

    def held(self) -> Counter[str]:
        """How many jobs each worker runs."""
        return Counter(job.locked_by for job in self.running)


async def look(utils: WorkerUtils, before: Snapshot | None) -> Snapshot:
    """Look at the queue; one statement after the other, so that it is never more than one session's work."""
    began = monotonic()
    stats = await utils.stats()
    queues = await utils.many.queues(limit=_MOST_QUEUES)
    running = await utils.many.running()
    workers = await utils.workers(and_locks=False)
    failures = await utils.many.failures()
    writes = await utils.many.writes()
    seen = Snapshot(
        at=datetime.now(UTC),
        took=monotonic() - began,
        stats=stats,
        queues=queues,
        running=running,
        workers=workers,
        failures=failures,
        writes=writes,
    )
    return seen if before is None or writes.at <= before.writes.at else _compared(seen, before)


def _compared(seen: Snapshot, before: Snapshot) -> Snapshot:
    """With what has happened between the two."""
    passed = seen.writes.at - before.writes.at

    def rates(now: Mapping[str, int], then: Mapping[str, int], *, is_whole: bool) -> dict[str, float]:
        return {
            name: (count - then.get(name, 0)) / passed
            for name, count in now.items()
            if name in then or is_whole
        }

    return replace(
        seen,
        # Less than before: somebody has reset the statistics.
        added=max(0, seen.writes.added - before.writes.added) / passed,
        removed=max(0, seen.writes.removed - before.writes.removed) / passed,
        tasks_grow=rates(_by_task(seen), _by_task(before), is_whole=True),
        queues_grow=rates(_by_queue(seen), _by_queue(before), is_whole=len(before.queues) < _MOST_QUEUES),
    )


def _by_task(seen: Snapshot) -> dict[str, int]:
    return {name: task.total for name, task in seen.stats.tasks.items()}


def _by_queue(seen: Snapshot) -> dict[str, int]:
    return {queue.queue_name: queue.jobs for queue in seen.queues}
