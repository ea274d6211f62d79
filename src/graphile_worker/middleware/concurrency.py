"""`ConcurrencyLimits`: limits how many jobs of a task run at once in a worker."""

from __future__ import annotations

from collections.abc import Mapping

from graphile_worker.errors import ConfigurationError
from graphile_worker.middleware.base import Middleware


class ConcurrencyLimits(Middleware):
    """Middleware that limits how many jobs of a task run at once in each worker.

    A worker at its limit claims no more jobs of the task, so other workers can claim them. Prefetched jobs
    count too.

    Args:
        limits: Maximum number of jobs by task identifier.

    Example:
        >>> from graphile_worker import App
        >>> from graphile_worker.middleware import ConcurrencyLimits
        >>> app = App(dsn=dsn, middleware=[ConcurrencyLimits({"resize": 2, "call_partner": 5})])
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        if not isinstance(limits, Mapping):
            raise ConfigurationError(
                f"limits is {limits!r}; it must be a mapping of task identifiers, such as {{'resize': 2}}."
            )
        for task, limit in limits.items():
            if type(limit) is not int or limit < 1:
                raise ConfigurationError(f"limits[{task!r}] is {limit!r}; it must be an integer, 1 or more.")
        self.limits = dict(limits)

    def claim_limit(self, task: str, claimed: int) -> int | None:
        """Return how many more jobs the task may have; None if it has no limit."""
        limit = self.limits.get(task)
        return None if limit is None else max(0, limit - claimed)
