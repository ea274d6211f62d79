"""What the server refuses costs one job, and not the worker.

A constraint or a trigger of the user's may refuse what an exchange does to one job, and then the whole call
fails. The worker repeats it carefully: the server records and claims job by job, and names the jobs that it
refuses. Results that were refused wait in `Results`. Jobs that cannot be claimed are left out of the next
calls, and tried again after a while. Without new refusals calls soon become usual ones again, which are
faster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphile_worker._db.exchange import Refusal, Reply, Wish

_QUIET = 5.0
_SHORTEST = 1.0
_LONGEST = 60.0
_MOST_LEFT_OUT = 1000
_UNLIMITED = 10_000


def retry_delay(tries: int) -> float:
    """Seconds until a job is tried again that the server has refused so many times before."""
    return min(_SHORTEST * 2.0 ** min(tries, 20), _LONGEST)


@dataclass(slots=True)
class _LeftOut:
    tries: int
    until: float


class Refusals:
    """Decides how the next exchange is made, by what the server refused.

    Args:
        clock: The time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._careful_until = 0.0
        self._left_out: dict[int, _LeftOut] = {}
        self._tested: set[int] = set()
        self.limit: int | None = None
        """How many results to send, and jobs to claim, in one call. None unless calls took too long."""

    def __bool__(self) -> bool:
        """Whether what the next call is like depends on the answer to the last one."""
        return bool(self._careful_until or self._left_out or self.limit)

    @property
    def left_out(self) -> int:
        """How many jobs the server has refused to let be claimed."""
        return len(self._left_out)

    def prepare(self, wish: Wish, *, retries: bool) -> tuple[Wish, bool]:
        """Return what to claim in the next call, and whether that call is careful.

        Args:
            wish: What there is room for.
            retries: Whether the call brings results that the server has refused before.
        """
        if not (retries or self):
            return wish, False
        now = self._clock()
        if now >= self._careful_until:
            self._careful_until = 0.0
        careful = retries or bool(self._careful_until)
        self._tested = set()
        if wish.wanted and self._left_out:
            self._tested = {job_id for job_id, one in self._left_out.items() if one.until <= now}
            careful = careful or bool(self._tested)
            wish = replace(wish, left_out=[*(self._left_out.keys() - self._tested)] or None)
        if self.limit is not None and wish.wanted > self.limit:
            wish = replace(wish, wanted=self.limit, partial=True)
        return wish, careful

    def be_careful(self) -> None:
        """Make careful calls for a while."""
        self._careful_until = self._clock() + _QUIET

    def shrink(self, size: int) -> bool:
        """Send less in the next call, because one of that size took too long; False if that cannot be."""
        self.limit = max(1, size // 2)
        return size > 1

    def answered(self, wish: Wish, reply: Reply) -> dict[int, Refusal]:
        """Note the answer to a call. Returns the jobs that are left out from now on, and were not before."""
        if not (self.limit or self._tested or reply.unclaimable):
            return {}
        if self.limit is not None:
            self.limit = self.limit * 2 if self.limit * 2 < _UNLIMITED else None
        tested, self._tested = self._tested, set()
        new: dict[int, Refusal] = {}
        now = self._clock()
        claimed = {held.job.id for held in reply.claimed} if tested else set()
        for job_id in tested - reply.unclaimable.keys():
            if job_id in claimed or len(claimed) < wish.wanted:
                del self._left_out[job_id]  # claimed, or gone
            else:  # there was enough before it, so it was not tried
                known = self._left_out[job_id]
                known.until = now + retry_delay(known.tries)
        for job_id, refusal in reply.unclaimable.items():
            if job_id in self._left_out:
                known = self._left_out[job_id]
                known.tries += 1
                known.until = now + retry_delay(known.tries)
            elif len(self._left_out) < _MOST_LEFT_OUT:
                self._left_out[job_id] = _LeftOut(0, now + retry_delay(0))
                new[job_id] = refusal
        if new:
            self.be_careful()
        return new
