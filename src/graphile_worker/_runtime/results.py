"""Results on their way into the database."""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker._runtime.refusals import retry_delay

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from graphile_worker._db.exchange import Held, Refusal, Reply, Result

_SHORTEST_BUSY = 0.005
_LONGEST_BUSY = 1.0


@dataclass(slots=True)
class _Delayed:
    """A result that waits: for another transaction on the job's row, or because the server refused it."""

    result: Result
    tries: int
    again: float
    refused: bool = False
    tried_at_last: bool = False
    """Whether it was refused even after `try_all_again`."""


class Sorted(NamedTuple):
    """Results by what the database did with them. The busy ones stay in `Results`."""

    recorded: Sequence[Result]
    lost: Sequence[Result] = ()
    """Not ours any more."""
    refused: Sequence[tuple[Result, Refusal]] = ()
    """To be postponed by `park`, or sent otherwise."""
    late: Sequence[Result] = ()
    """Of the recorded ones, those that were refused before."""


class Results:
    """Keeps each result until the database has confirmed it."""

    def __init__(self) -> None:
        self._waiting: list[Result] = []
        self._delayed: dict[Held, _Delayed] = {}
        self._sent_in_vain: set[Held] = set()
        self._at_last = False

    def __bool__(self) -> bool:
        """Whether something is to be sent now."""
        if self._waiting or not self._delayed:
            return bool(self._waiting)
        return any(delayed.again <= monotonic() for delayed in self._delayed.values())

    @property
    def again(self) -> float | None:
        """When (on the monotonic clock) the next delayed one is to be sent again."""
        return min((delayed.again for delayed in self._delayed.values()), default=None)

    @property
    def retries(self) -> bool:
        """Whether one is to be sent now that the server has refused before."""
        return bool(self._delayed) and any(
            delayed.refused and delayed.again <= monotonic() for delayed in self._delayed.values()
        )

    @property
    def refused(self) -> int:
        """How many the server has refused, and has not recorded since. May be asked from another thread."""
        return sum(delayed.refused for delayed in tuple(self._delayed.values())) if self._delayed else 0

    @property
    def hopeless(self) -> set[Held]:
        """Those that the server refused even after `try_all_again`."""
        return {held for held, delayed in self._delayed.items() if delayed.tried_at_last}

    def append(self, result: Result) -> None:
        """This is to be recorded."""
        self._waiting.append(result)

    def add(self, results: Iterable[Result]) -> None:
        """These are to be recorded."""
        self._waiting += results

    def take(self, limit: int | None = None) -> list[Result]:
        """What is to be sent now, and no more than the limit says."""
        results, self._waiting = self._waiting, []
        if limit is not None:
            results, self._waiting = results[:limit], results[limit:]
        for delayed in self._delayed.values():
            if limit is not None and len(results) >= limit:
                break
            if delayed.again <= monotonic():
                results.append(delayed.result)
                delayed.again = math.inf  # until the reply tells its outcome
        return results

    def put_back(self, results: list[Result], *, perhaps_recorded: bool) -> None:
        """They were sent, and no answer came."""
        for result in results:
            if result.held in self._delayed:
                self._delayed[result.held].result = result
                self._delayed[result.held].again = monotonic()
        self._waiting[:0] = [result for result in results if result.held not in self._delayed]
        if perhaps_recorded:
            self._sent_in_vain.update(result.held for result in results)

    def sort_out(self, results: list[Result], reply: Reply) -> Sorted:
        """Tell apart what was recorded, what was not ours any more, and what was refused."""
        if not (reply.busy or reply.lost or reply.refused or self._delayed or self._sent_in_vain):
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
                if claim in reply.lost:
                    lost.append(result)
                else:
                    recorded.append(result)
                    if delayed is not None and delayed.refused:
                        late.append(result)
        return Sorted(recorded, lost, refused, late)

    def park(self, result: Result) -> bool:
        """Keep a result that was refused, and send it again after a while; whether it is the first time."""
        known = self._delayed.get(result.held)
        tries = known.tries + 1 if known is not None and known.refused else 0
        again = monotonic() + retry_delay(tries)
        self._delayed[result.held] = _Delayed(result, tries, again, refused=True, tried_at_last=self._at_last)
        return tries == 0

    def send_plain(self, result: Result) -> None:
        """Send this at once, instead of what was refused."""
        self._forget(result.held)
        self._waiting.append(result)

    def try_all_again(self) -> None:
        """Send all that were refused once more, because the worker stops."""
        self._at_last = True
        for delayed in self._delayed.values():
            if delayed.refused:
                delayed.again = monotonic()

    def confirm(self, still_ours: Container[Held]) -> list[Result]:
        """Those that were sent in vain and are recorded all the same: their jobs are not ours any more."""
        found = [
            result
            for result in (*self._waiting, *(delayed.result for delayed in self._delayed.values()))
            if result.held in self._sent_in_vain and result.held not in still_ours
        ]
        for result in found:
            self._forget(result.held)
        gone = {result.held for result in found}
        self._waiting = [result for result in self._waiting if result.held not in gone]
        self._sent_in_vain.clear()
        return found

    def _postpone(self, result: Result) -> None:
        busy = self._delayed.get(result.held)
        tries = busy.tries + 1 if busy is not None and not busy.refused else 0
        again = monotonic() + min(_SHORTEST_BUSY * 2.0 ** min(tries, 20), _LONGEST_BUSY)
        self._delayed[result.held] = _Delayed(result, tries, again)

    def _forget(self, held: Held) -> _Delayed | None:
        self._sent_in_vain.discard(held)
        return self._delayed.pop(held, None)
