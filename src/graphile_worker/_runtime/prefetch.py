"""Jobs in hand that no slot has begun, and the serial queues they belong to."""

from __future__ import annotations

from bisect import insort
from collections import deque
from operator import attrgetter
from time import monotonic
from typing import TYPE_CHECKING

from graphile_worker import events as event
from graphile_worker._db.exchange import Result
from graphile_worker.outcome import Returned

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphile_worker._db.exchange import Held, QueueLock
    from graphile_worker.emitter import Events
    from graphile_worker.events import WorkerPool
    from graphile_worker.outcome import Outcome

RETURNED = Returned()
_order = attrgetter("order")


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

    def __init__(self, events: Events, pool: WorkerPool) -> None:
        self._events = events
        self._pool = pool
        self._ready: deque[Held] = deque()
        self._runs: dict[int, _Run] = {}
        self._since: dict[Held, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def __iter__(self) -> Iterator[Held]:
        return iter(self._since)

    def __contains__(self, held: Held) -> bool:
        return held in self._since

    @property
    def ready(self) -> int:
        """How many of them a slot could begin now."""
        return len(self._ready)

    @property
    def oldest(self) -> float | None:
        """When (on the monotonic clock) the one that waits longest was claimed."""
        return next(iter(self._since.values()), None)

    def add(self, claimed: Sequence[Held]) -> None:
        """Take jobs in hand, sorted by their order."""
        self._since.update(dict.fromkeys(claimed, monotonic()))
        if not self._ready and not any(held.queue for held in claimed):
            self._ready.extend(claimed)  # as a rule
            return
        for held in claimed:
            if held.queue is None:
                self._push(held)
                continue
            run = self._runs.setdefault(held.queue.id, _Run(held.queue))
            run.lock = held.queue  # newer, if somebody freed the queue and we claimed it again
            run.waiting.append(held)
            if not run.busy and len(run.waiting) == 1:
                self._push(held)

    def take(self) -> Held:
        """The next job to run; there must be one that is ready."""
        held = self._ready.popleft()
        del self._since[held]
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

    def withdraw(self, held: Held, outcome: Outcome) -> Result:
        """The result of a job that waits, and is not to be begun."""
        del self._since[held]
        if held in self._ready:
            self._ready.remove(held)
        if held.queue is None:
            return Result(held, outcome, None)
        run = self._runs[held.queue.id]
        was_next = run.waiting[0] is held
        run.waiting.remove(held)
        if run.waiting and was_next and not run.busy:
            self._push(run.waiting[0])
        if run.waiting or run.busy:
            return Result(held, outcome, None)
        del self._runs[held.queue.id]
        return Result(held, outcome, run.lock)

    def give_back(self, why: str, *, claimed_until: float | None = None) -> list[Result]:
        """Results for jobs that wait: for those that were claimed up to that moment, or for all."""
        for held, since in list(self._since.items()):
            if claimed_until is None or since <= claimed_until:
                del self._since[held]
        results = [
            Result(held, RETURNED, None)
            for held in self._ready
            if held.queue is None and held not in self._since
        ]
        for queue_id, run in list(self._runs.items()):
            returned = [held for held in run.waiting if held not in self._since]
            # Those that stay were claimed later, and come later in the queue.
            run.waiting = deque(held for held in run.waiting if held in self._since)
            results += [Result(held, RETURNED, None) for held in returned]
            if run.waiting and returned and not run.busy:
                self._push(run.waiting[0])
            elif not run.waiting and not run.busy and returned:
                results[-1] = Result(results[-1].held, RETURNED, run.lock)
                del self._runs[queue_id]
        self._ready = deque(held for held in self._ready if held in self._since)
        if results:
            jobs = [result.held.job for result in results]
            self._events.emit(event.LocalQueueReturnJobs(worker_pool=self._pool, jobs=jobs))
            mode = event.LocalQueueSetMode(worker_pool=self._pool, old_mode="WAITING", new_mode=why)
            self._events.emit(mode)
        return results

    def _push(self, held: Held) -> None:
        if not self._ready or self._ready[-1].order <= held.order:
            self._ready.append(held)
        else:
            insort(self._ready, held, key=_order)
