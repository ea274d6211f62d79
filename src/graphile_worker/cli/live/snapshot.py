"""A queue at one moment."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    took = monotonic() - began
    added = removed = None
    if before is not None and writes.at > before.writes.at:
        # Less than before: somebody has reset the statistics.
        passed = writes.at - before.writes.at
        added = max(0, writes.added - before.writes.added) / passed
        removed = max(0, writes.removed - before.writes.removed) / passed
    return Snapshot(
        at=datetime.now(UTC),
        took=took,
        stats=stats,
        queues=queues,
        running=running,
        workers=workers,
        failures=failures,
        writes=writes,
        added=added,
        removed=removed,
    )
