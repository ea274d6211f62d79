"""Results on their way into the database."""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from graphile_worker._db.exchange import Held, Reply, Result

_SHORTEST_BUSY = 0.005
_LONGEST_BUSY = 1.0


@dataclass(slots=True)
class _Busy:
    """A result that waits for somebody's transaction on the job's row."""

    result: Result
    tries: int
    again: float


class Results:
    """Keeps each result until the database has confirmed it."""

    def __init__(self) -> None:
        self._waiting: list[Result] = []
        self._busy: dict[Held, _Busy] = {}
        self._sent_in_vain: set[Held] = set()

    def __bool__(self) -> bool:
        """Whether something is to be sent now."""
        if self._waiting or not self._busy:
            return bool(self._waiting)
        return any(busy.again <= monotonic() for busy in self._busy.values())

    @property
    def again(self) -> float | None:
        """When (on the monotonic clock) the next busy one is to be sent again."""
        return min((busy.again for busy in self._busy.values()), default=None)

    def append(self, result: Result) -> None:
        """This is to be recorded."""
        self._waiting.append(result)

    def add(self, results: Iterable[Result]) -> None:
        """These are to be recorded."""
        self._waiting += results

    def take(self) -> list[Result]:
        """What is to be sent now."""
        results, self._waiting = self._waiting, []
        for busy in self._busy.values():
            if busy.again <= monotonic():
                results.append(busy.result)
                busy.again = math.inf  # until we are told what became of it
        return results

    def put_back(self, results: list[Result], *, perhaps_recorded: bool) -> None:
        """They were sent, and no answer came."""
        for result in results:
            if result.held in self._busy:
                self._busy[result.held].again = monotonic()
        self._waiting[:0] = [result for result in results if result.held not in self._busy]
        if perhaps_recorded:
            self._sent_in_vain.update(result.held for result in results)

    def sort_out(self, results: list[Result], reply: Reply) -> tuple[list[Result], list[Result]]:
        """What was recorded, and what was not ours any more; the busy ones stay here."""
        if not (reply.busy or reply.lost or self._busy or self._sent_in_vain):
            return results, []
        recorded: list[Result] = []
        lost: list[Result] = []
        for result in results:
            if result.held.claim in reply.busy:
                self._postpone(result)
                continue
            (lost if result.held.claim in reply.lost else recorded).append(result)
            self._forget(result.held)
        return recorded, lost

    def confirm(self, still_ours: Container[Held]) -> list[Result]:
        """Those that were sent in vain and are recorded all the same: their jobs are not ours any more."""
        found = [
            result
            for result in (*self._waiting, *(busy.result for busy in self._busy.values()))
            if result.held in self._sent_in_vain and result.held not in still_ours
        ]
        for result in found:
            self._forget(result.held)
        gone = {result.held for result in found}
        self._waiting = [result for result in self._waiting if result.held not in gone]
        self._sent_in_vain.clear()
        return found

    def _postpone(self, result: Result) -> None:
        busy = self._busy.get(result.held)
        tries = busy.tries + 1 if busy else 0
        again = monotonic() + min(_SHORTEST_BUSY * 2.0 ** min(tries, 20), _LONGEST_BUSY)
        self._busy[result.held] = _Busy(result, tries, again)

    def _forget(self, held: Held) -> None:
        self._busy.pop(held, None)
        self._sent_in_vain.discard(held)
