"""Jobs in hand that no slot has begun, and the serial queues they belong to."""

from __future__ import annotations

import heapq
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING

from graphile_worker._db.exchange import Result
from graphile_worker.outcome import Returned

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from graphile_worker._db.exchange import Held, QueueLock
    from graphile_worker.outcome import Outcome

RETURNED = Returned()


class _Run:
    """Consecutive jobs of one queue: one of them may be running, the others wait for it."""

    __slots__ = ("busy", "lock", "waiting")

    def __init__(self, lock: QueueLock) -> None:
        self.lock = lock
        self.waiting: deque[Held] = deque()
        self.busy = False


class Prefetched:
    """Gives out jobs in their order, and of one queue only one at a time.

    Whoever took a job says with `finish` what became of it. The result carries the lock of the queue when no
    other job of it is in hand: only then may the queue be let go.
    """

    def __init__(self) -> None:
        self._ready: list[tuple[tuple[int, datetime, int], Held]] = []
        self._runs: dict[int, _Run] = {}
        self._since: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    @property
    def oldest(self) -> float | None:
        """When (on the monotonic clock) the one that waits longest was claimed."""
        return next(iter(self._since.values()), None)

    def add(self, claimed: Iterable[Held]) -> None:
        """Take jobs in hand, sorted by their order."""
        now = monotonic()
        for held in claimed:
            self._since[held.job.id] = now
            if held.queue is None:
                self._push(held)
                continue
            run = self._runs.setdefault(held.queue.id, _Run(held.queue))
            run.waiting.append(held)
            if not run.busy and len(run.waiting) == 1:
                self._push(held)

    def take(self) -> Held | None:
        """The next job to run, if there is one that may."""
        if not self._ready:
            return None
        _, held = heapq.heappop(self._ready)
        del self._since[held.job.id]
        if held.queue is not None:
            run = self._runs[held.queue.id]
            run.waiting.popleft()
            run.busy = True
        return held

    def finish(self, held: Held, outcome: Outcome) -> Result:
        """The result of a job that was taken. The next one of its queue may be taken now."""
        if held.queue is None:
            return Result(held, outcome, None)
        run = self._runs[held.queue.id]
        run.busy = False
        if run.waiting:
            self._push(run.waiting[0])
            return Result(held, outcome, None)
        del self._runs[held.queue.id]
        return Result(held, outcome, run.lock)

    def give_back(self, *, claimed_until: float | None = None) -> list[Result]:
        """Results for jobs that wait: for those that were claimed up to that moment, or for all."""
        for job_id, since in list(self._since.items()):
            if claimed_until is None or since <= claimed_until:
                del self._since[job_id]
        results = [
            Result(held, RETURNED, None)
            for _, held in self._ready
            if held.queue is None and held.job.id not in self._since
        ]
        for queue_id, run in list(self._runs.items()):
            returned = [held for held in run.waiting if held.job.id not in self._since]
            # Those that stay were claimed later, and come later in the queue.
            run.waiting = deque(held for held in run.waiting if held.job.id in self._since)
            results += [Result(held, RETURNED, None) for held in returned]
            if run.waiting and returned and not run.busy:
                self._push(run.waiting[0])
            elif not run.waiting and not run.busy and returned:
                results[-1] = results[-1]._replace(queue=run.lock)
                del self._runs[queue_id]
        self._ready = [entry for entry in self._ready if entry[1].job.id in self._since]
        heapq.heapify(self._ready)
        return results

    def _push(self, held: Held) -> None:
        heapq.heappush(self._ready, (held.order, held))
