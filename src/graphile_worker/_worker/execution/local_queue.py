"""`LocalQueue`: claimed jobs that wait for a slot, and the serial queues that they belong to."""

from __future__ import annotations

from bisect import insort
from collections import deque
from operator import attrgetter
from time import monotonic
from typing import TYPE_CHECKING

from graphile_worker import events as event
from graphile_worker._db.queries.exchange import Result
from graphile_worker.outcome import Returned

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphile_worker._db.queries.exchange import ClaimedJob, QueueLock
    from graphile_worker.events import WorkerPool
    from graphile_worker.events.emitter import Events
    from graphile_worker.outcome import Outcome

RETURNED = Returned()
_order = attrgetter("order")


class _SerialQueue:
    """Consecutive jobs of one serial queue: one of them may run, and the others wait for it."""

    __slots__ = ("busy", "lock", "waiting")

    def __init__(self, lock: QueueLock) -> None:
        self.lock = lock
        self.waiting: deque[ClaimedJob] = deque()
        self.busy = False


class LocalQueue:
    """Hands out jobs in their order, and only one at a time of each serial queue.

    The caller of `take` calls `finish` when the job has ended. The result contains the lock of the serial
    queue if this worker has no other claimed job of that queue. Only then may the queue be unlocked.
    """

    def __init__(self, events: Events, pool: WorkerPool) -> None:
        self._events = events
        self._pool = pool
        self.ready_jobs: deque[ClaimedJob] = deque()
        """The jobs that a slot could start now, in their order."""
        self._queues: dict[int, _SerialQueue] = {}
        self._since: dict[ClaimedJob, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def __iter__(self) -> Iterator[ClaimedJob]:
        return iter(self._since)

    def __contains__(self, claimed: ClaimedJob) -> bool:
        return claimed in self._since

    @property
    def ready(self) -> int:
        """The number of jobs that a slot could start now."""
        return len(self.ready_jobs)

    @property
    def oldest(self) -> float | None:
        """When, on the monotonic clock, the job that has waited longest was claimed."""
        return next(iter(self._since.values()), None)

    def add(self, jobs: Sequence[ClaimedJob]) -> None:
        """Add claimed jobs, which are sorted by their order."""
        self._since.update(dict.fromkeys(jobs, monotonic()))
        if not any(claimed.queue for claimed in jobs) and (
            not (jobs and self.ready_jobs) or self.ready_jobs[-1].order <= jobs[0].order
        ):
            self.ready_jobs.extend(jobs)  # the usual case
            return
        for claimed in jobs:
            if claimed.queue is None:
                self._push(claimed)
                continue
            queue = self._queues.setdefault(claimed.queue.id, _SerialQueue(claimed.queue))
            queue.lock = claimed.queue  # a newer lock, if the queue was released and claimed again
            queue.waiting.append(claimed)
            if not queue.busy and len(queue.waiting) == 1:
                self._push(claimed)

    def take(self) -> ClaimedJob:
        """Remove and return the next job. One must be ready."""
        claimed = self.ready_jobs.popleft()
        del self._since[claimed]
        if claimed.queue is not None:
            queue = self._queues[claimed.queue.id]
            queue.waiting.popleft()
            queue.busy = True
        return claimed

    def finish(self, claimed: ClaimedJob, outcome: Outcome) -> Result:
        """Return the result of a job that was taken. The next job of its serial queue may be taken now."""
        if claimed.queue is None:
            return Result(claimed, outcome, None)
        queue = self._queues[claimed.queue.id]
        queue.busy = False
        if queue.waiting:
            self._push(queue.waiting[0])
            return Result(claimed, outcome, None)
        del self._queues[claimed.queue.id]
        return Result(claimed, outcome, queue.lock)

    def withdraw(self, claimed: ClaimedJob, outcome: Outcome) -> Result:
        """Remove a job that waits, and return its result."""
        del self._since[claimed]
        if claimed in self.ready_jobs:
            self.ready_jobs.remove(claimed)
        if claimed.queue is None:
            return Result(claimed, outcome, None)
        queue = self._queues[claimed.queue.id]
        was_next = queue.waiting[0] is claimed
        queue.waiting.remove(claimed)
        if queue.waiting and was_next and not queue.busy:
            self._push(queue.waiting[0])
        if queue.waiting or queue.busy:
            return Result(claimed, outcome, None)
        del self._queues[claimed.queue.id]
        return Result(claimed, outcome, queue.lock)

    def give_back(self, mode: str, *, claimed_until: float | None = None) -> list[Result]:
        """Remove waiting jobs. Returns the results that give them back to the database.

        Args:
            mode: The new mode for the event `LocalQueueSetMode`.
            claimed_until: Remove only jobs that were claimed until then, on the monotonic clock.
        """
        for claimed, since in list(self._since.items()):
            if claimed_until is None or since <= claimed_until:
                del self._since[claimed]
        results = [
            Result(claimed, RETURNED, None)
            for claimed in self.ready_jobs
            if claimed.queue is None and claimed not in self._since
        ]
        for queue_id, queue in list(self._queues.items()):
            returned = [claimed for claimed in queue.waiting if claimed not in self._since]
            # The jobs that stay were claimed later, and come later in the queue.
            queue.waiting = deque(claimed for claimed in queue.waiting if claimed in self._since)
            results += [Result(claimed, RETURNED, None) for claimed in returned]
            if queue.waiting and returned and not queue.busy:
                self._push(queue.waiting[0])
            elif not queue.waiting and not queue.busy and returned:
                results[-1] = Result(results[-1].held, RETURNED, queue.lock)
                del self._queues[queue_id]
        self.ready_jobs = deque(claimed for claimed in self.ready_jobs if claimed in self._since)
        if results:
            jobs = [result.held.job for result in results]
            self._events.emit(event.LocalQueueReturnJobs(worker_pool=self._pool, jobs=jobs))
            self._events.emit(
                event.LocalQueueSetMode(worker_pool=self._pool, old_mode="WAITING", new_mode=mode)
            )
        return results

    def _push(self, claimed: ClaimedJob) -> None:
        if not self.ready_jobs or self.ready_jobs[-1].order <= claimed.order:
            self.ready_jobs.append(claimed)
        else:
            insort(self.ready_jobs, claimed, key=_order)
