"""`ClaimLimiter`: how many jobs of each task may be claimed, by pauses, middleware and abandoned threads."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker.middleware import ConcurrencyLimits
from graphile_worker.middleware.base import overriding

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from graphile_worker._base.logs import ScopedLogger
    from graphile_worker._db.queries.exchange import ClaimedJob
    from graphile_worker._worker.execution.abandoned_threads import AbandonedThreads
    from graphile_worker.middleware import Middleware


class ClaimAllowance(NamedTuple):
    """What may be claimed now."""

    wanted: int
    tasks: Collection[str] | None = None
    """None for all tasks."""
    partial: bool = False
    """Whether some tasks are left for the next claim."""


class ClaimLimiter:
    """Limits claims by middleware.

    It claims no jobs of a task that is paused or has too many abandoned threads.

    A claim has one limit for all its tasks. So if a task is limited to fewer jobs than the worker has room
    for, claims alternate. One claims jobs of all tasks, with the smallest of their limits, and keeps the
    order of all jobs. The other claims jobs of unlimited tasks only, so that a limited task does not slow
    them down.
    """

    def __init__(
        self,
        middleware: Iterable[Middleware],
        tasks: Sequence[str],
        logger: ScopedLogger,
        abandoned: AbandonedThreads,
    ) -> None:
        self._middleware = overriding(middleware, "claim_limit")
        self._abandoned = abandoned
        self._tasks = tasks
        self._logger = logger
        self._unlimited_turn = False
        self.paused: frozenset[str] = frozenset()
        """Tasks of which no jobs may be claimed for now."""
        self._failed: set[Middleware] = set()
        for layer in self._middleware:
            if isinstance(layer, ConcurrencyLimits) and (unknown := layer.limits.keys() - set(tasks)):
                logger.warning(
                    "ConcurrencyLimits names tasks that this worker does not have: %s",
                    ", ".join(sorted(unknown)),
                )

    def __bool__(self) -> bool:
        """Whether any limit may be in effect."""
        return bool(self._middleware or self.paused or self._abandoned.exhausted)

    def allow(self, wanted: int, claimed: Iterable[ClaimedJob]) -> ClaimAllowance:
        """Return how many of `wanted` jobs may be claimed, and of which tasks."""
        counts = Counter(job.job.task_identifier for job in claimed)
        exhausted = self.paused.union(self._abandoned.exhausted)
        limits = {
            task: 0 if task in exhausted else self._limit(task, counts[task], wanted) for task in self._tasks
        }
        allowed = [task for task, limit in limits.items() if limit > 0]
        unlimited = [task for task in allowed if limits[task] >= wanted]
        if len(unlimited) == len(self._tasks):
            return ClaimAllowance(wanted)
        if len(allowed) == len(unlimited):
            return ClaimAllowance(wanted if allowed else 0, frozenset(allowed))
        self._unlimited_turn = not self._unlimited_turn and bool(unlimited)
        if self._unlimited_turn:
            return ClaimAllowance(wanted, frozenset(unlimited), partial=True)
        return ClaimAllowance(min(limits[task] for task in allowed), frozenset(allowed))

    def _limit(self, task: str, count: int, wanted: int) -> int:
        for layer in self._middleware:
            try:
                limit = layer.claim_limit(task, count)
                wanted = wanted if limit is None else min(wanted, limit)
            except BaseException:
                # Claiming without this limit is better than never claiming again.
                if layer not in self._failed:
                    self._failed.add(layer)
                    self._logger.exception(
                        "%s.claim_limit failed for task %r; claiming without its limit",
                        type(layer).__name__,
                        task,
                    )
        return wanted
