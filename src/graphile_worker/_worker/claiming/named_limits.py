"""`NamedLimits`: which of the worker's tasks share which named limit, and how many of their jobs it holds."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from graphile_worker._db.queries.limits import LimitCounts
from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from graphile_worker._db.queries.exchange import ClaimedJob
    from graphile_worker.limits import Limit


class NamedLimits:
    """The named limits of the worker's tasks.

    Args:
        by_task: The limit of each task that has one.

    Raises:
        ConfigurationError: Two tasks declare the same limit with different values.
    """

    def __init__(self, by_task: Mapping[str, Limit]) -> None:
        self.by_task = dict(by_task)
        self._names = {task: limit.name for task, limit in by_task.items()}
        self.ids: dict[str, int] = {}
        """The ids of the limits in the database, by name. The exchange's connection sets them."""
        self._shares: Counter[str | None] | None = Counter()
        declared: dict[str, Limit] = {}
        for task, limit in by_task.items():
            other = declared.setdefault(limit.name, limit)
            if other != limit:
                raise ConfigurationError(
                    f"The limit {limit.name!r} has concurrency {limit.concurrency} at the task {task!r}, and "
                    f"{other.concurrency} at another task. Declare it once, and pass the same Limit to both."
                )

    def __bool__(self) -> bool:
        """Whether any task has a limit."""
        return bool(self._names)

    def count(self, held: Iterable[ClaimedJob], recorded: Iterable[ClaimedJob]) -> LimitCounts:
        """Return how many jobs of each limit the worker holds, besides those that are being recorded."""
        names = self._names
        counts = self._count(held)
        counts.subtract(self._count(recorded))
        places = {name: place for place, name in enumerate(self.ids, 1)}
        return LimitCounts(
            ids=list(self.ids.values()),
            job_counts=[max(0, counts[name]) for name in self.ids],
            places={task: places[name] for task, name in names.items() if name in places},
        )

    def record(self, sent: LimitCounts, held: Iterable[ClaimedJob]) -> None:
        """Learn the worker's shares from an exchange.

        Args:
            sent: What the exchange passed.
            held: The jobs that the exchange has claimed, and those that it could not record.
        """
        counts = self._count(held)
        counts.update(dict(zip(self.ids, sent.job_counts, strict=True)))
        self._shares = counts

    def forget(self) -> None:
        """Record that the worker's shares are unknown, because an exchange had no answer."""
        self._shares = None

    def has_spare_share(self, held: Iterable[ClaimedJob]) -> bool:
        """Return whether a share may be larger than the number of jobs that the worker holds."""
        if not self._names:
            return False
        shares = self._shares
        if shares is None:
            return True
        counts = self._count(held)
        return any(counts[name] < shares[name] for name in self.ids)

    def _count(self, jobs: Iterable[ClaimedJob]) -> Counter[str | None]:
        return Counter(self._names.get(claimed.job.task_identifier) for claimed in jobs)
