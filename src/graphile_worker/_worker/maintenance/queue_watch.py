"""`QueueWatch`: warns about due jobs that no worker runs, and about tasks whose jobs pile up."""

from __future__ import annotations

import difflib
import random
from collections import deque
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker._base.durations import format_duration
from graphile_worker._base.text import pluralize
from graphile_worker._db.queries import statistics as database
from graphile_worker._db.queries.workers import list_workers
from graphile_worker._worker.maintenance.statistics_service import SAMPLE_INTERVAL
from graphile_worker._worker.service import Service
from graphile_worker.errors import GraphileWorkerError
from graphile_worker.workers import MAX_TASK_NAMES_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    from graphile_worker._base.logs import ScopedLogger
    from graphile_worker._db.connection.session import Session
    from graphile_worker.events import WorkerPool
    from graphile_worker.workers import WorkerInfo

MIN_BACKLOG = 100
"""The number of due jobs of a task from which they pile up, if they do not become fewer."""
READS_UNTIL_BACKLOG = 4
READS_UNTIL_UNSERVED = 2
_OVER = 0.9
"""Jobs do not pile up any more when there are fewer of them than this share of those at the warning."""
_PAUSE = 3600.0
"""Seconds after a warning about a task in which it is not repeated."""
_READ_SINCE = timedelta(minutes=2)
_LONGEST_NAME = 128


class _Read(NamedTuple):
    """The number of due jobs of a task, and when it was read."""

    at: float
    ready: int
    running: int


class QueueWatch(Service):
    """Reads the samples that the statistics take every 15 seconds, so it counts no jobs itself.

    Each worker watches. Only the one with the lowest id logs, so that a problem is logged once and not by
    each worker.

    Args:
        pool: The worker's identity.
        session: The connection to the database.
        now: Returns the database's time.
        logger: The worker's logger.
    """

    name = "queue watch"

    def __init__(
        self, *, pool: WorkerPool, session: Session, now: Callable[[], datetime], logger: ScopedLogger
    ) -> None:
        super().__init__(logger)
        self._pool = pool
        self._session = session
        self._now = now
        self._started = False
        self._last_sums: tuple[datetime, Mapping[str, tuple[int, int, int]]] | None = None
        self._reads: dict[str, deque[_Read]] = {}
        """The last reads of each task that has due jobs."""
        self._unserved: set[str] = set()
        """The tasks about which a warning was logged, because no worker has them."""
        self._backlogs: dict[str, int] = {}
        """The number of due jobs at the warning, by task."""
        self._warned_at: dict[str, float] = {}

    async def tick(self) -> float:
        """Read the latest sample. The first tick waits, because many workers may start together."""
        if not self._started:
            self._started = True
            return random.uniform(0.0, SAMPLE_INTERVAL)  # noqa: S311 - no secret
        try:
            await self.check()
        except GraphileWorkerError as error:  # the worker's loop reports an outage
            self.logger.debug("Cannot read how many jobs wait: %s", error)
        return SAMPLE_INTERVAL

    async def check(self) -> None:
        """Read the latest sample, and log what has changed."""
        if not await self._read_sample():
            return
        unserved = {task for task in self._reads if self._looks_unserved(task)}
        backlogs = {task for task in self._reads if self._looks_piled_up(task)}
        if not (unserved or backlogs or self._unserved or self._backlogs):
            return
        schema = self._session.schema
        found = await self._session.call(lambda on: list_workers(on, schema, include_locks=False))
        live = [worker for worker in found if worker.is_alive]
        if any(worker.is_ours and worker.id < self._pool.id for worker in live):
            self._unserved.clear()  # that worker logs
            self._backlogs.clear()
            return
        # Node workers do not publish their tasks, and a Python worker publishes only so many.
        served = {task for worker in live for task in worker.tasks or ()} | set(self._pool.tasks)
        if any(worker.is_ours and _may_be_truncated(worker) for worker in live):
            unserved.clear()
        self._log_unserved(unserved - served, served)
        self._log_backlogs(backlogs & served, live)

    async def _read_sample(self) -> bool:
        """Read the due jobs by task. Returns False if there is no newer sample."""
        schema, since = self._session.schema, self._now() - _READ_SINCE
        rows = await self._session.call(lambda on: database.read_depths(on, schema, since, 60, None))
        if not rows:
            return False
        # A row has the sums of a minute, so the latest sample is the difference to what was read before.
        at = rows[-1]["at"]
        sums = {
            row["task"]: (row["samples"], row["ready"], row["running"]) for row in rows if row["at"] == at
        }
        before = self._last_sums[1] if self._last_sums is not None and self._last_sums[0] == at else {}
        taken = sums.get("", (0, 0, 0))[0] - before.get("", (0, 0, 0))[0]
        if taken <= 0:
            return False
        self._last_sums, now = (at, sums), monotonic()
        for task, (_, ready, running) in sums.items():
            _, ready_before, running_before = before.get(task, (0, 0, 0))
            read = _Read(now, (ready - ready_before) // taken, (running - running_before) // taken)
            if task and read.ready > 0:
                self._reads.setdefault(task, deque(maxlen=READS_UNTIL_BACKLOG)).append(read)
        for task in [task for task, reads in self._reads.items() if reads[-1].at != now]:
            del self._reads[task]
        return True

    def _looks_unserved(self, task: str) -> bool:
        """Return whether jobs of a task wait and none runs, unlike those that a Node worker runs."""
        reads = list(self._reads[task])[-READS_UNTIL_UNSERVED:]
        return (
            task not in self._pool.tasks
            and len(reads) == READS_UNTIL_UNSERVED
            and reads[-1].ready >= reads[0].ready
            and not any(read.running for read in reads)
        )

    def _looks_piled_up(self, task: str) -> bool:
        """Return whether there were never fewer jobs: not many that were added at once and are being run."""
        counts = [read.ready for read in self._reads[task]]
        return (
            len(counts) == READS_UNTIL_BACKLOG
            and min(counts) == counts[0] >= MIN_BACKLOG
            and max(counts) == counts[-1]
        )

    def _log_unserved(self, unserved: set[str], served: set[str]) -> None:
        for task in sorted(self._unserved - self._reads.keys() | self._unserved & served):
            self._unserved.discard(task)
            self.logger.info("The jobs of the task %r, which no worker had, have gone or have a worker", task)
        for task in sorted(unserved - self._unserved):
            if self._may_warn(task):
                self._unserved.add(task)
                near = difflib.get_close_matches(task, served, n=1)
                self.logger.warning(
                    "%s due, but no Python worker has the task %r.%s Add the task to a worker, or remove its "
                    "jobs",
                    pluralize(self._reads[task][-1].ready, "job is", "jobs are"),
                    task,
                    f" Did you mean {near[0]!r}?" if near else "",
                )

    def _log_backlogs(self, backlogs: set[str], live: Sequence[WorkerInfo]) -> None:
        for task, at_warning in list(self._backlogs.items()):
            ready = self._reads[task][-1].ready if task in self._reads else 0
            if ready < at_warning * _OVER:
                del self._backlogs[task]
                due = pluralize(ready, "job is", "jobs are")
                self.logger.info("The jobs of the task %r become fewer again: %s due", task, due)
        slots = sum(worker.concurrency or 0 for worker in live) or self._pool.concurrency
        for task in sorted(backlogs - self._backlogs.keys()):
            if self._may_warn(task):
                first, last = self._reads[task][0], self._reads[task][-1]
                self._backlogs[task] = last.ready
                self.logger.warning(
                    "The jobs of the task %r do not become fewer: %s due, %s more than %s ago. The workers "
                    "have %s. Add workers, raise the concurrency, or look for slow jobs",
                    task,
                    pluralize(last.ready, "job is", "jobs are"),
                    f"{last.ready - first.ready:,}",
                    format_duration(last.at - first.at),
                    pluralize(slots, "slot"),
                )

    def _may_warn(self, task: str) -> bool:
        """Return whether a warning about the task is due. It may come and go, and is logged once an hour."""
        now = monotonic()
        if now - self._warned_at.get(task, -_PAUSE) < _PAUSE:
            return False
        self._warned_at[task] = now
        return True


def _may_be_truncated(worker: WorkerInfo) -> bool:
    """Return whether the published list of tasks may have been cut off."""
    return sum(len(task.encode()) for task in worker.tasks or ()) > MAX_TASK_NAMES_BYTES - _LONGEST_NAME
