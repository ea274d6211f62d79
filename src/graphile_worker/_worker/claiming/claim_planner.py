"""How many jobs to claim, of which tasks, and when: one decision, made once an exchange.

`ClaimPlanner` is a state machine without I/O. It reads the time from the clock it is given, learns what the
worker can take from the `Capacity` that each call brings, and learns what earlier claims found from their
replies. Middleware may lower what it asks for: see `claim_limits`.
"""

from __future__ import annotations

import random
from collections import Counter
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker._db.queries.exchange import NOTHING, ClaimRequest, Position
from graphile_worker._worker.claiming.prefetch import FixedPrefetch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import datetime

    from graphile_worker._db.queries.exchange import ClaimedJob, ExchangeReply
    from graphile_worker._worker.claiming.claim_limits import ClaimLimiter
    from graphile_worker._worker.claiming.prefetch import Prefetch

_JITTER = 0.2
_SHORTEST_CONTENDED = 0.001
_LONGEST_CONTENDED = 0.5
_FULL_CLAIM_INTERVAL = 0.1
_VISIT_INTERVAL = 0.01
_CHEAP = 0.002
_CHEAP_PER_JOB = 0.000_05
_SLOW_CLAIMS = 3
_WITHHELD_PAUSE = 0.1
_PARTIAL_PAUSE = 0.1
TASK_REFRESH_DELAY = 1.0
"""Seconds after which, at the earliest, a notification without a job makes the worker read task ids again."""


class Capacity(NamedTuple):
    """What the worker can take at this moment."""

    free_slots: int
    queued: int = 0
    """Jobs that are claimed and wait in the local queue."""
    startable: int = 0
    """Those of them that a free slot could start now. The others wait for their serial queue."""
    may_work: bool = True
    """Whether the worker's lease holds."""


class ClaimPlanner:
    """Plans the next claim from the worker's capacity and from what earlier claims found.

    A claim is due at the start, after a notification, after a claim that found all it wanted, when the next
    known job is due, shortly after rows were locked by other transactions, and at the latest after the poll
    interval. An exchange that records results is eager to claim if there may be a job that no notification
    announces: the next one of a serial queue, a retry, a job that limits or flags did not allow before, or
    any job if notifications do not arrive.

    Args:
        poll_interval: Seconds between claims when there is no other reason for one.
        prefetch: Decides how many jobs to claim beyond the free slots; by default none.
        limiter: Limits of this worker.
        has_named_limits: Whether tasks have limits that hold across workers.
        clock: The time in seconds.
    """

    def __init__(
        self,
        *,
        poll_interval: float,
        prefetch: Prefetch | None = None,
        limiter: ClaimLimiter | None = None,
        has_named_limits: bool = False,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._poll_interval = poll_interval
        self._prefetch = prefetch or FixedPrefetch(0)
        self._limiter = limiter
        self._has_named_limits = has_named_limits
        self._clock = clock
        self._stopped = False
        self._prefetch_paused = False
        self._withheld_until = 0.0
        self._was_full = False
        self._partial_until = 0.0
        self._next = clock()
        self._notified = False
        self._notified_jobs: int | None = 0
        self._is_made_due = False
        self._expected: int | None = 0
        self._contended = 0
        self._mark: Position | None = None
        self._last_full_claim = -_FULL_CLAIM_INTERVAL
        self._slow_claims = 0
        self._after_queue = 0
        self._flags_after: Position | None = None
        self._last_visit = -_VISIT_INTERVAL
        self._last_search = -_VISIT_INTERVAL
        self.is_blocked = False
        """Whether the last plan was to claim nothing because middleware allowed nothing."""
        self.missed_notification = False
        """Whether a claim after a notification found no job. Another worker may have been faster, or a
        cleanup removed the task and its jobs have a new task id. The worker resets it."""

    @property
    def is_due(self) -> bool:
        """Whether there is a reason to claim besides results to record."""
        return self._notified or self._is_made_due or self._clock() >= self._next

    @property
    def delay(self) -> float:
        """Seconds until the next claim is due."""
        return 0.0 if self.is_due else self._next - self._clock()

    @property
    def is_slow(self) -> bool:
        """Whether claims take so long that each starts where the last one ended."""
        return self._slow_claims >= _SLOW_CLAIMS

    def notify(self, count: int | None = None) -> None:
        """Record that there may be new jobs: `count` of them, if that is known."""
        self._notified = True
        known = count is not None and self._notified_jobs is not None
        self._notified_jobs = (self._notified_jobs or 0) + (count or 0) if known else None

    def postpone(self) -> None:
        """Make the next claim due after the poll interval."""
        self._notified, self._notified_jobs, self._is_made_due = False, None, False
        self._next = self._clock() + self._jittered_interval()

    def make_due(self) -> None:
        """Make a claim due now. One that is in flight does not count, because it may have begun too early."""
        self._is_made_due, self.is_blocked = True, False

    def stop(self) -> None:
        """Plan no further claims."""
        self._stopped = True

    def pause_prefetch(self) -> None:
        """Claim for free slots only, because jobs claimed ahead have waited too long."""
        self._prefetch_paused = True
        self._prefetch.record_expiry()

    def record_job(self, duration: float) -> None:
        """Learn how long a job took. Its slot is free, so jobs may be claimed ahead again."""
        self._prefetch_paused = False
        self._prefetch.record_job(duration)

    def room(self, capacity: Capacity) -> int:
        """Return how many more jobs the worker has room for."""
        return self._room(capacity, self._ahead)

    def _room(self, capacity: Capacity, ahead: int) -> int:
        if self._stopped or not capacity.may_work:
            return 0
        room = capacity.free_slots + ahead - capacity.queued
        # All queued jobs may be waiting for their serial queues. Then the free slots need other jobs.
        return max(room, capacity.free_slots - capacity.startable)

    @property
    def is_predictable(self) -> bool:
        """Whether the next claim can be planned before the reply to the last one is read."""
        return self._ahead > 0 and not self.has_limits and not self.is_slow

    def wants_jobs(self, capacity: Capacity, *, eager: bool, incoming: int = 0) -> bool:
        """Return whether to claim now."""
        return self.room(capacity) > incoming and (eager or self.is_due)

    @property
    def has_limits(self) -> bool:
        """Whether a job that ends may allow more jobs to be claimed."""
        return bool(self._limiter) or self._has_named_limits

    def plan(
        self,
        capacity: Capacity,
        *,
        has_results: bool,
        eager: bool = False,
        claimed: Iterable[ClaimedJob] = (),
        forbidden_flags: Sequence[str] | None = None,
        as_of: datetime | None = None,
        incoming: int = 0,
    ) -> ClaimRequest:
        """Return what to claim now; `NOTHING` if nothing.

        Args:
            capacity: What the worker can take.
            has_results: Whether the exchange records results.
            eager: Whether to claim even if no claim is due.
            claimed: The jobs that run or wait for a slot, for middleware that counts them.
            forbidden_flags: Flags of jobs not to claim.
            as_of: The time that counts as now; by default the database's.
            incoming: How many claimed jobs the worker is about to receive.
        """
        self.is_blocked = False
        ahead = self._ahead
        wanted = self._room(capacity, ahead) - incoming
        if wanted <= 0 or not (eager or self.is_due):
            return NOTHING
        # Without prefetch a serial queue gives one job at a time, because the next may run elsewhere. The
        # same holds if there is only room in the slots, because all queued jobs wait for their queues.
        for_slots = capacity.free_slots - capacity.startable - incoming
        run_length = self._prefetch.run_length if ahead and wanted > for_slots else 1
        notified = self._notified_jobs or 0
        is_due = self._is_made_due or self._clock() >= self._next
        as_notified = not (eager or incoming or is_due) and 0 < notified <= wanted
        if as_notified:
            wanted = notified  # a larger claim takes longer, and the jobs in it wait for that
        rooms = None
        if self._limiter:
            wanted, rooms = self._limiter.allow(wanted, claimed)
            as_notified = False  # it may allow fewer, or only jobs of some tasks
            self.is_blocked = wanted <= 0
            if self.is_blocked:
                self.postpone()  # a job that ends makes a claim due earlier
                return NOTHING
        return ClaimRequest(
            wanted=wanted,
            as_notified=as_notified,
            is_probably_filled=(as_notified or self._was_full) and self._clock() >= self._partial_until,
            rooms=rooms,
            run_length=min(run_length, wanted),
            startable=max(for_slots, 0) if ahead else None,
            queues_first=has_results and self._clock() - self._last_search < _VISIT_INTERVAL,
            forbidden_flags=forbidden_flags or None,
            as_of=as_of,
            mark=self._begin(),
            after_queue=self._next_queue(has_results=has_results),
            flags_after=self._flags_after if forbidden_flags else None,
        )

    def record(self, sent: float, request: ClaimRequest, reply: ExchangeReply, *, queued: int = 0) -> None:
        """Learn from the reply to a claim.

        Args:
            sent: When the claim was sent.
            request: The claim.
            reply: The reply.
            queued: How many claimed jobs still waited for a slot when the reply came.
        """
        now = self._clock()
        self._record_expected(now, reply)
        if reply.next_queue is not None:
            self._after_queue = reply.next_queue
        self._flags_after = reply.flags_after
        if not request.queues_first or reply.next_queue is not None:
            self._last_search = now
        is_full = len(reply.claimed) >= request.wanted
        self._was_full = is_full and not request.as_notified
        is_limited = is_full or _uses_run_length(request, reply)
        self._prefetch.record_claim(now - sent, is_limited=is_limited, queued=queued, now=now)
        if reply.withheld:
            # Jobs in their last attempt are not claimed ahead. Others behind them could be, but finding
            # them takes longer with each one that is in the way.
            self._withheld_until = now + _WITHHELD_PAUSE
        if request.after_queue is not None and not is_full:
            self._last_visit = now  # a full claim may have left better jobs than those hidden behind queues
        if request.mark is None:
            self._last_full_claim = now
            slow = reply.cost > _CHEAP + _CHEAP_PER_JOB * len(reply.claimed)
            self._slow_claims = self._slow_claims + 1 if slow else 0
        self._mark = None
        if is_full and self.is_slow:
            last = Position(*reply.claimed[-1].order)
            self._mark = last if request.mark is None else max(last, request.mark)
        if is_full:
            self._contended = 0
            if not request.as_notified:
                self._next = now
        elif _may_be_more(request, reply):
            self._next = now
        else:
            self._next = self._next_after_empty(now, sent, request, reply)
            self._contended = min(self._contended + 1, 20) if reply.contended and not reply.claimed else 0

    def _record_expected(self, now: float, reply: ExchangeReply) -> None:
        """Learn whether the jobs that notifications announced are there."""
        is_missing = self._expected != 0 and not reply.claimed
        if not reply.partial:
            self.missed_notification = self.missed_notification or is_missing
            return
        self._partial_until = now + _PARTIAL_PAUSE
        if is_missing:
            self.notify()  # the next reply will tell

    @property
    def _ahead(self) -> int:
        if self._prefetch_paused or self._clock() < self._withheld_until:
            return 0
        return self._prefetch.size

    def _begin(self) -> Position | None:
        """Start a claim. Returns the position that it starts from.

        A transaction that stays open somewhere keeps the index entries of jobs that are long gone, and each
        claim from the beginning walks past them. So while claims are slow they start where the last one
        ended, except one every 0.1 s, which finds jobs that were added before that position.
        """
        self._expected = self._notified_jobs
        self._notified, self._notified_jobs, self._is_made_due = False, 0, False
        return self._mark if self._clock() - self._last_full_claim < _FULL_CLAIM_INTERVAL else None

    def _next_queue(self, *, has_results: bool) -> int | None:
        """Return where to go on visiting queues one by one; None to visit none.

        Where jobs end quickly, visiting them in each exchange would take longer than the jobs.
        """
        is_recent = self._clock() - self._last_visit < _VISIT_INTERVAL
        return None if has_results and is_recent else self._after_queue

    def _next_after_empty(
        self, now: float, sent: float, request: ClaimRequest, reply: ExchangeReply
    ) -> float:
        """Return when the next claim is due after one that left slots free."""
        times = [now + self._jittered_interval()]
        if reply.next_due is not None:
            times.append(sent + (reply.next_due - (request.as_of or reply.now)).total_seconds())
        if reply.next_queue is None:
            since = self._last_search if request.queues_first else self._last_visit
            times.append(since + _VISIT_INTERVAL)
        if reply.contended:
            # A long transaction may hold the locks, so wait longer each time.
            times.append(now + min(_SHORTEST_CONTENDED * 2.0**self._contended, _LONGEST_CONTENDED))
        return min(times)

    def _jittered_interval(self) -> float:
        """Return the poll interval, varied so that workers don't poll in step."""
        return self._poll_interval * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 - no secret


def _may_be_more(request: ClaimRequest, reply: ExchangeReply) -> bool:
    """Return whether there may be more jobs, although fewer than wanted were claimed."""
    return bool(
        reply.partial
        or request.mark is not None
        or request.partial
        or reply.next_queue
        or reply.flags_after is not None
        or reply.withheld
    )


def _uses_run_length(request: ClaimRequest, reply: ExchangeReply) -> bool:
    """Return whether a serial queue may have more jobs than the claim allowed it."""
    counts = Counter(claimed.queue.id for claimed in reply.claimed if claimed.queue is not None)
    return bool(counts) and max(counts.values()) >= request.run_length
