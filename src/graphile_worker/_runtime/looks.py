"""When to look for jobs, and from where on."""

from __future__ import annotations

import random
from time import monotonic
from typing import TYPE_CHECKING

from graphile_worker._db.exchange import Position

if TYPE_CHECKING:
    from graphile_worker._db.exchange import Reply, Wish

_JITTER = 0.2
_SHORTEST_CONTENDED = 0.001
_LONGEST_CONTENDED = 0.5
_FULL_LOOK_INTERVAL = 0.1
_VISIT_INTERVAL = 0.01
_CHEAP = 0.002
_CHEAP_PER_JOB = 0.000_05
_SLOW_LOOKS = 3
AFTER_A_VAIN_LOOK = 1.0
"""Seconds after which, at the earliest, the ids of the tasks are read again."""


class Looks:
    """Decides by what earlier looks came to.

    There is something to look for: at the start, when somebody says so, when the next job is due, when rows
    were locked by others a moment ago, and at the latest after the poll interval.
    """

    def __init__(self, poll_interval: float) -> None:
        self._poll_interval = poll_interval
        self._next = 0.0
        self._woken = False
        self._told: int | None = 0
        self._contended = 0
        self._mark: Position | None = None
        self._full_look = 0.0
        self._slow_looks = 0
        self._after_queue = 0
        self._visited = -_VISIT_INTERVAL
        self._expected: int | None = 0
        self.in_vain = False
        """Whether a look because of new jobs found none, until somebody sees to it. Others may have been
        faster; or a cleanup has removed the name of a task, and these are its jobs under a new number."""

    def wake(self, count: int | None = None) -> None:
        """There may be something new: so many jobs, if that is known."""
        self._woken = True
        self._told = None if count is None or self._told is None else self._told + count

    @property
    def told(self) -> int | None:
        """For how many jobs to look; None for all that there is room for.

        To look for more than there are takes longer, and those that are there wait for it. What else there
        may be is seen by the next look, which follows at once.
        """
        return None if monotonic() >= self._next else self._told

    def due(self) -> bool:
        """Whether to look now."""
        return self._woken or monotonic() >= self._next

    @property
    def delay(self) -> float:
        """Seconds until the next look."""
        return 0.0 if self._woken else max(0.0, self._next - monotonic())

    @property
    def slow(self) -> bool:
        """Whether looks take so long that they begin where the last one ended."""
        return self._slow_looks >= _SLOW_LOOKS

    def postpone(self) -> None:
        """Not now, but in a while."""
        self._woken, self._told = False, None
        self._next = monotonic() + self.poll_delay()

    def poll_delay(self) -> float:
        """The poll interval, not the same for all workers."""
        return self._poll_interval * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 - no secret

    def begin(self) -> Position | None:
        """A look begins: from which position on.

        A transaction that stays open somewhere keeps the index entries of jobs that are long gone, and each
        look from the beginning walks past them. So while looks are slow they begin where the last one ended,
        but for one every 0.1 s, which finds what came in before that position.
        """
        self._expected = self._told
        self._woken, self._told = False, 0
        if monotonic() - self._full_look < _FULL_LOOK_INTERVAL:
            return self._mark
        return None

    def after_queue(self, *, has_results: bool) -> int | None:
        """Where to go on visiting queues.

        Where jobs end quickly, to visit them all each time would take longer than the jobs.
        """
        return None if has_results and monotonic() - self._visited < _VISIT_INTERVAL else self._after_queue

    def end(self, sent: float, wish: Wish, reply: Reply) -> None:
        """It came to this."""
        now = monotonic()
        self.in_vain = self.in_vain or (self._expected != 0 and not reply.claimed)
        if reply.next_queue is not None:
            self._after_queue = reply.next_queue
        if wish.after_queue is not None and len(reply.claimed) < wish.wanted:
            self._visited = now  # after a full one there may be more, and better than what is not hidden
        if wish.mark is None:
            self._full_look = now
            slow = reply.cost > _CHEAP + _CHEAP_PER_JOB * len(reply.claimed)
            self._slow_looks = self._slow_looks + 1 if slow else 0
        full = len(reply.claimed) >= wish.wanted
        self._mark = None
        if full and self.slow:
            last = reply.claimed[-1]
            self._mark = max(Position(*last.order), wish.mark or Position(*last.order))
        if full:
            self._contended = 0
            self._next = now
        elif wish.mark is not None or wish.partial or reply.next_queue:
            self._next = now  # not everything was looked at
        else:
            self._next = now + self.poll_delay()
            if reply.next_due is not None:
                due_in = (reply.next_due - (wish.as_of or reply.now)).total_seconds()
                self._next = min(self._next, sent + due_in)
            if reply.next_queue is None:
                self._next = min(self._next, self._visited + _VISIT_INTERVAL)
            if reply.contended:
                # More slowly if it stays so: it may be somebody's transaction that takes its time.
                pause = min(_SHORTEST_CONTENDED * 2.0**self._contended, _LONGEST_CONTENDED)
                self._next = min(self._next, now + pause)
            self._contended = min(self._contended + 1, 20) if reply.contended and not reply.claimed else 0
