"""Reconciling: comparing the jobs that a worker knows it has claimed with its locks in the database.

After a lost connection the two may differ. An exchange without an answer may have claimed jobs, and a renewal
may have changed the times of locks. `SpareQueues` releases serial queues that the worker turns out to have
locked without a claimed job.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from datetime import datetime

    from graphile_worker._db.queries.exchange import ClaimedJob, Locked, QueueLock


_SHORTEST_DELAY = 0.05
_LONGEST_DELAY = 30.0


class Reconciled(NamedTuple):
    """The result of a comparison."""

    still_locked: set[ClaimedJob]
    """Jobs that the worker knows and still has locked."""
    adopted: list[ClaimedJob]
    """Jobs that the worker has locked without knowing it."""
    spare_queues: dict[int, datetime]
    """Queues that the worker has locked without a claimed job, with the times of the locks."""


def reconcile(known: Iterable[ClaimedJob], locked: Locked) -> Reconciled:
    """Compare known jobs with the locks in the database, and update the times of known locks."""
    queues: dict[int, QueueLock] = {}
    still_locked: dict[ClaimedJob, ClaimedJob] = {}
    for claimed in known:
        found = _same_claim(claimed, locked.jobs)
        if found is not None:
            still_locked[claimed] = found
            claimed.locked_at = found.locked_at
        if claimed.queue is not None:
            queues[claimed.queue.id] = claimed.queue
    for queue_id, lock in queues.items():
        lock.locked_at = locked.queues.get(queue_id, lock.locked_at)
    matched = set(still_locked.values())
    adopted = [claimed for claimed in locked.jobs if claimed not in matched]
    needed = queues.keys() | {claimed.queue.id for claimed in adopted if claimed.queue is not None}
    spare = {queue_id: at for queue_id, at in locked.queues.items() if queue_id not in needed}
    return Reconciled(set(still_locked), adopted, spare)


def _same_claim(claimed: ClaimedJob, candidates: Iterable[ClaimedJob]) -> ClaimedJob | None:
    for candidate in candidates:
        if candidate.job.id == claimed.job.id and (
            # A renewal changes the time, a takeover the attempts, a new claim both.
            candidate.locked_at == claimed.locked_at or candidate.job.attempts == claimed.job.attempts
        ):
            return candidate
    return None


class SpareQueues:
    """Queues to release, each with the time of its lock, which tells the lock from a later one.

    If another transaction has locked a queue's row, the queue cannot be released at once. No other worker
    may release it while this one is alive, so this worker tries again.
    """

    def __init__(self) -> None:
        self._queues: dict[int, datetime] = {}
        self._tries = 0
        self.again: float | None = None
        """When to try again to release them, on the monotonic clock; None if there are none."""

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def due(self) -> Mapping[int, datetime]:
        """The queues to release now."""
        return self._queues if self.again is not None and self.again <= monotonic() else {}

    def replace(self, queues: Mapping[int, datetime]) -> None:
        """Replace all queues with those just read from the database."""
        self._queues, self._tries = dict(queues), 0
        self.again = monotonic() if queues else None

    def keep(self, still_locked: Collection[int]) -> None:
        """Keep only the queues that could not be released, and try again later."""
        self._queues = {queue_id: at for queue_id, at in self._queues.items() if queue_id in still_locked}
        self.again = (
            monotonic() + min(_SHORTEST_DELAY * 2.0**self._tries, _LONGEST_DELAY) if self._queues else None
        )
        self._tries = min(self._tries + 1, 20)
