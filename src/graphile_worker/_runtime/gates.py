"""Which tasks to claim jobs of, if middleware has a say in that."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker.middleware import ConcurrencyLimits
from graphile_worker.middleware.base import overriding

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from graphile_worker._db.exchange import Held
    from graphile_worker._runtime.abandoned import AbandonedThreads
    from graphile_worker.logs import ScopedLogger
    from graphile_worker.middleware import Middleware


class Passage(NamedTuple):
    """What may be claimed now."""

    wanted: int
    tasks: Collection[str] | None = None
    """None for all."""
    partial: bool = False
    """Whether others could be claimed too, by another look."""


class Gates:
    """Asks middleware how many jobs of each task may be claimed.

    Of a task that has too many abandoned threads there may be none.

    A look has one limit for all its tasks. So where a task may have fewer jobs than there is room for, looks
    take turns: one for all tasks, with the smallest of their limits, and one for those that may have as many
    as there is room for. The first keeps the order of all jobs; the second keeps a limited task from slowing
    the others down.
    """

    def __init__(
        self,
        middleware: Iterable[Middleware],
        tasks: Sequence[str],
        logger: ScopedLogger,
        abandoned: AbandonedThreads,
    ) -> None:
        self._middleware = overriding(middleware, "room")
        self._abandoned = abandoned
        self._tasks = tasks
        self._logger = logger
        self._without_limited = False
        self._failed: set[Middleware] = set()
        for one in self._middleware:
            if isinstance(one, ConcurrencyLimits) and (unknown := one.limits.keys() - set(tasks)):
                logger.warning(
                    "There are limits for tasks that this worker does not have: %s",
                    ", ".join(sorted(unknown)),
                )

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._middleware or self._abandoned.exhausted)

    def pass_through(self, wanted: int, in_hand: Iterable[Held]) -> Passage:
        """What of that many may be claimed."""
        counts = Counter(held.job.task_identifier for held in in_hand)
        exhausted = self._abandoned.exhausted
        rooms = {
            task: 0 if task in exhausted else self._room(task, counts[task], wanted) for task in self._tasks
        }
        open_ones = [task for task, room in rooms.items() if room > 0]
        unlimited = [task for task in open_ones if rooms[task] >= wanted]
        if len(unlimited) == len(self._tasks):
            return Passage(wanted)
        if len(open_ones) == len(unlimited):
            return Passage(wanted if open_ones else 0, frozenset(open_ones))
        self._without_limited = not self._without_limited and bool(unlimited)
        if self._without_limited:
            return Passage(wanted, frozenset(unlimited), partial=True)
        return Passage(min(rooms[task] for task in open_ones), frozenset(open_ones))

    def _room(self, task: str, count: int, wanted: int) -> int:
        for one in self._middleware:
            try:
                room = one.room(task, count)
                wanted = wanted if room is None else min(wanted, room)
            except BaseException:
                # To go on claiming is better than to stop for ever.
                if one not in self._failed:
                    self._failed.add(one)
                    self._logger.exception(
                        "%s cannot say how many jobs of %r may be claimed, so all may",
                        type(one).__name__,
                        task,
                    )
        return wanted
