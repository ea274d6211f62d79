"""`Refusals`: how to repeat an exchange that the server refused, so that one job does not stop the worker.

A user's constraint or trigger may refuse what an exchange does to one job. Then the whole exchange fails, and
the worker repeats it carefully: the server records and claims job by job, and names the jobs that it refuses.
Refused results wait in `Results`. Jobs that cannot be claimed are left out of the next exchanges, and tried
again after a delay. Without new refusals the worker soon returns to normal exchanges, which are faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphile_worker._db.queries.exchange import ClaimRequest, ExchangeReply, Refusal

_QUIET = 5.0
_SHORTEST = 1.0
_LONGEST = 60.0
_MAX_LEFT_OUT = 1000
_UNLIMITED = 10_000


def retry_delay(tries: int) -> float:
    """Return the seconds until a job that the server refused `tries` times before is tried again."""
    return min(_SHORTEST * 2.0 ** min(tries, 20), _LONGEST)


@dataclass(slots=True)
class _LeftOut:
    tries: int
    until: float


class Refusals:
    """Decides how the next exchange is made, from what the server refused.

    Args:
        clock: The time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._careful_until = 0.0
        self._left_out: dict[int, _LeftOut] = {}
        self._tested: set[int] = set()
        self.limit: int | None = None
        """How many results to send, and jobs to claim, in one exchange; None unless one took too long."""

    def __bool__(self) -> bool:
        """Whether the next exchange depends on the answer to the last one."""
        return bool(self._careful_until or self._left_out or self.limit)

    @property
    def left_out(self) -> int:
        """Number of jobs that the server refuses to let the worker claim."""
        return len(self._left_out)

    def prepare(self, request: ClaimRequest, *, retries: bool) -> tuple[ClaimRequest, bool]:
        """Return what to claim in the next exchange, and whether that exchange is careful.

        Args:
            request: What the worker has room for.
            retries: Whether the exchange sends results that the server has refused before.
        """
        if not (retries or self):
            return request, False
        now = self._clock()
        if now >= self._careful_until:
            self._careful_until = 0.0
        careful = retries or bool(self._careful_until)
        self._tested = set()
        if request.wanted and self._left_out:
            self._tested = {job_id for job_id, one in self._left_out.items() if one.until <= now}
            careful = careful or bool(self._tested)
            request = replace(request, left_out=[*(self._left_out.keys() - self._tested)] or None)
        if self.limit is not None and request.wanted > self.limit:
            request = replace(request, wanted=self.limit, partial=True)
        return request, careful

    def be_careful(self) -> None:
        """Make careful exchanges for a few seconds."""
        self._careful_until = self._clock() + _QUIET

    def shrink(self, size: int) -> bool:
        """Halve the next exchange, because one of that size took too long. Returns whether it could."""
        self.limit = max(1, size // 2)
        return size > 1

    def record_answer(self, request: ClaimRequest, reply: ExchangeReply) -> dict[int, Refusal]:
        """Record the answer to an exchange. Returns the refused jobs that are left out from now on."""
        if not (self.limit or self._tested or reply.unclaimable):
            return {}
        if self.limit is not None:
            self.limit = self.limit * 2 if self.limit * 2 < _UNLIMITED else None
        tested, self._tested = self._tested, set()
        new: dict[int, Refusal] = {}
        now = self._clock()
        claimed = {claimed.job.id for claimed in reply.claimed} if tested else set()
        for job_id in tested - reply.unclaimable.keys():
            if job_id in claimed or len(claimed) < request.wanted:
                del self._left_out[job_id]  # claimed, or deleted
            else:  # enough jobs came before it, so it was not tried
                known = self._left_out[job_id]
                known.until = now + retry_delay(known.tries)
        for job_id, refusal in reply.unclaimable.items():
            if job_id in self._left_out:
                known = self._left_out[job_id]
                known.tries += 1
                known.until = now + retry_delay(known.tries)
            elif len(self._left_out) < _MAX_LEFT_OUT:
                self._left_out[job_id] = _LeftOut(0, now + retry_delay(0))
                new[job_id] = refusal
        if new:
            self.be_careful()
        return new
