"""What is ours, by what we know and by what the database says.

After a lost connection the two may differ: an exchange of which no answer came may have claimed jobs, and a
renewal may have changed the times of locks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from graphile_worker._db.exchange import Held, Locked, QueueLock


class Reconciled(NamedTuple):
    """The difference."""

    still_ours: set[Held]
    """In hand, and locked by us."""
    adopted: list[Held]
    """Locked by us, and not in hand until now."""
    spare_queues: dict[int, datetime]
    """Locked by us since then, though no job of theirs is in hand."""


def reconcile(in_hand: Iterable[Held], locked: Locked) -> Reconciled:
    """Compare, and bring the locks of what is in hand up to date."""
    queues: dict[int, QueueLock] = {}
    still_ours: dict[Held, Held] = {}
    for held in in_hand:
        there = _same_claim(held, locked.jobs)
        if there is not None:
            still_ours[held] = there
            held.locked_at = there.locked_at
        if held.queue is not None:
            queues[held.queue.id] = held.queue
    for queue_id, lock in queues.items():
        lock.locked_at = locked.queues.get(queue_id, lock.locked_at)
    matched = set(still_ours.values())
    adopted = [held for held in locked.jobs if held not in matched]
    needed = queues.keys() | {held.queue.id for held in adopted if held.queue is not None}
    spare = {queue_id: at for queue_id, at in locked.queues.items() if queue_id not in needed}
    return Reconciled(set(still_ours), adopted, spare)


def _same_claim(held: Held, found: Iterable[Held]) -> Held | None:
    for there in found:
        if there.job.id == held.job.id and (
            # A renewal changes the time, a takeover the attempts, a new claim both.
            there.locked_at == held.locked_at or there.job.attempts == held.job.attempts
        ):
            return there
    return None
