"""`ClaimLimiter`: how many jobs of each task may be claimed, by pauses, limits and abandoned threads."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker.middleware import ConcurrencyLimits
from graphile_worker.middleware.base import overriding

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from graphile_worker._base.logs import ScopedLogger
    from graphile_worker._db.queries.exchange import ClaimedJob
    from graphile_worker._worker.execution.abandoned_threads import AbandonedThreads
    from graphile_worker.middleware import Middleware


class ClaimAllowance(NamedTuple):
    """What may be claimed now."""

    wanted: int
    rooms: Mapping[str, int] | None = None
    """How many jobs of limited tasks; None if no task is limited."""


class ClaimLimiter:
    """Limits claims by middleware and by the limits of tasks for each worker.

    It claims no jobs of a task that is paused or has too many abandoned threads.
    """

    def __init__(
        self,
        middleware: Iterable[Middleware],
        tasks: Sequence[str],
        logger: ScopedLogger,
        abandoned: AbandonedThreads,
        worker_limits: Mapping[str, int] | None = None,
    ) -> None:
        self._middleware = overriding(middleware, "claim_limit")
        self._abandoned = abandoned
        self._worker_limits = worker_limits or {}
        self._tasks = tasks
        self._logger = logger
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
        return bool(self._middleware or self._worker_limits or self.paused or self._abandoned.exhausted)

    def allow(self, wanted: int, claimed: Iterable[ClaimedJob]) -> ClaimAllowance:
        """Return how many of `wanted` jobs may be claimed, and how many of each task."""
        counts = Counter(job.job.task_identifier for job in claimed)
        exhausted = self.paused.union(self._abandoned.exhausted)
        limits = {
            task: 0 if task in exhausted else self._limit(task, counts[task], wanted) for task in self._tasks
        }
        rooms = {task: limit for task, limit in limits.items() if limit < wanted}
        if not rooms:
            return ClaimAllowance(wanted)
        if len(rooms) == len(limits):
            wanted = min(wanted, sum(rooms.values()))
        return ClaimAllowance(wanted, rooms)

    def _limit(self, task: str, count: int, wanted: int) -> int:
        if task in self._worker_limits:
            wanted = min(wanted, max(0, self._worker_limits[task] - count))
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
