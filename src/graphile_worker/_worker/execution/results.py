"""`Results`: outcomes of jobs that are not recorded yet."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker._worker.claiming.refusals import retry_delay
from graphile_worker.outcome import Completed

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from graphile_worker._db.queries.exchange import ClaimedJob, ExchangeReply, Refusal, Result

_SHORTEST_BUSY = 0.005
_LONGEST_BUSY = 1.0


@dataclass(slots=True)
class _Delayed:
    """A result that waits because another transaction has locked the job's row, or the server refused it."""

    result: Result
    tries: int
    again: float
    refused: bool = False
    tried_last: bool = False
    """Whether the server refused it even after `try_refused_once_more`."""


class Sorted(NamedTuple):
    """The results of one exchange, by the server's reply. Those of locked rows stay in `Results`."""

    recorded: Sequence[Result]
    lost: Sequence[Result] = ()
    """Results of jobs that this worker no longer holds."""
    refused: Sequence[tuple[Result, Refusal]] = ()
    """Results that the server refused. The caller passes them to `park` or `send_plain`."""
    late: Sequence[Result] = ()
    """The recorded results that the server had refused before."""


class Results:
    """Keeps each result until the database has confirmed it."""

    def __init__(self) -> None:
        self._waiting: list[Result] = []
        self._delayed: dict[ClaimedJob, _Delayed] = {}
        self._unanswered: set[ClaimedJob] = set()
        self._final_try = False

    def __bool__(self) -> bool:
        """Return whether there is a result to send now."""
        if self._waiting or not self._delayed:
            return bool(self._waiting)
        return any(delayed.again <= monotonic() for delayed in self._delayed.values())

    @property
    def again(self) -> float | None:
        """When, on the monotonic clock, the next delayed result is due."""
        return min((delayed.again for delayed in self._delayed.values()), default=None)

    @property
    def retries(self) -> bool:
        """Whether a result that the server has refused before is due."""
        return bool(self._delayed) and any(
            delayed.refused and delayed.again <= monotonic() for delayed in self._delayed.values()
        )

    @property
    def refused(self) -> int:
        """The number of results that the server refuses. Any thread may read it."""
        return sum(delayed.refused for delayed in tuple(self._delayed.values())) if self._delayed else 0

    @property
    def hopeless(self) -> set[ClaimedJob]:
        """Jobs whose results the server refused even after `try_refused_once_more`."""
        return {claimed for claimed, delayed in self._delayed.items() if delayed.tried_last}

    @property
    def free_jobs(self) -> bool:
        """Whether a result to send now lets a job run: the next one of its queue, or the job itself again."""
        delayed = (delayed.result for delayed in self._delayed.values())
        return any(
            result.queue is not None or type(result.outcome) is not Completed
            for result in chain(self._waiting, delayed)
        )

    def append(self, result: Result) -> None:
        """Add a result to record."""
        self._waiting.append(result)

    def add(self, results: Iterable[Result]) -> None:
        """Add results to record."""
        self._waiting += results

    def take(self, limit: int | None = None) -> list[Result]:
        """Remove and return the results to send now, at most `limit` of them."""
        results, self._waiting = self._waiting, []
        if limit is not None:
            results, self._waiting = results[:limit], results[limit:]
        for delayed in self._delayed.values():
            if limit is not None and len(results) >= limit:
                break
            if delayed.again <= monotonic():
                results.append(delayed.result)
                delayed.again = math.inf  # until the reply
        return results

    def put_back(self, results: list[Result], *, perhaps_recorded: bool) -> None:
        """Keep results that were sent, but not answered.

        Args:
            results: The results.
            perhaps_recorded: Whether the database may have recorded them.
        """
        for result in results:
            if result.held in self._delayed:
                self._delayed[result.held].result = result
                self._delayed[result.held].again = monotonic()
        self._waiting[:0] = [result for result in results if result.held not in self._delayed]
        if perhaps_recorded:
            self._unanswered.update(result.held for result in results)

    def sort_out(self, results: list[Result], reply: ExchangeReply) -> Sorted:
        """Sort sent results by the server's reply, and keep those whose rows are locked."""
        if not (reply.busy or reply.lost or reply.refused or self._delayed or self._unanswered):
            return Sorted(results)
        recorded: list[Result] = []
        lost: list[Result] = []
        refused: list[tuple[Result, Refusal]] = []
        late: list[Result] = []
        for result in results:
            claim = result.held.claim
            if claim in reply.busy:
                self._postpone(result)
            elif claim in reply.refused:
                refused.append((result, reply.refused[claim]))
            else:
                delayed = self._forget(result.held)
                if claim in reply.lost and not result.held.is_recorded:
                    lost.append(result)
                else:
                    recorded.append(result)
                    if delayed is not None and delayed.refused:
                        late.append(result)
        return Sorted(recorded, lost, refused, late)

    def park(self, result: Result) -> bool:
        """Keep a refused result, to send it again later. Return whether it is its first refusal."""
        known = self._delayed.get(result.held)
        tries = known.tries + 1 if known is not None and known.refused else 0
        again = monotonic() + retry_delay(tries)
        self._delayed[result.held] = _Delayed(result, tries, again, refused=True, tried_last=self._final_try)
        return tries == 0

    def send_plain(self, result: Result) -> None:
        """Send this result now, instead of the job's refused one."""
        self._forget(result.held)
        self._waiting.append(result)

    def try_refused_once_more(self) -> None:
        """Send all refused results a last time, because the worker stops. A second call does nothing."""
        if self._final_try or not self.refused:
            return
        self._final_try = True
        for delayed in self._delayed.values():
            if delayed.refused:
                delayed.again = monotonic()

    def confirm(self, still_locked: Container[ClaimedJob]) -> list[Result]:
        """Remove and return unanswered results that were recorded: this worker no longer holds their jobs."""
        recorded = [
            result
            for result in (*self._waiting, *(delayed.result for delayed in self._delayed.values()))
            if result.held in self._unanswered and result.held not in still_locked
        ]
        for result in recorded:
            self._forget(result.held)
        gone = {result.held for result in recorded}
        self._waiting = [result for result in self._waiting if result.held not in gone]
        self._unanswered.clear()
        return recorded

    def _postpone(self, result: Result) -> None:
        known = self._delayed.get(result.held)
        tries = known.tries + 1 if known is not None and not known.refused else 0
        again = monotonic() + min(_SHORTEST_BUSY * 2.0 ** min(tries, 20), _LONGEST_BUSY)
        self._delayed[result.held] = _Delayed(result, tries, again)

    def _forget(self, claimed: ClaimedJob) -> _Delayed | None:
        self._unanswered.discard(claimed)
        return self._delayed.pop(claimed, None)
