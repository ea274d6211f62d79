"""Limits how many jobs of a task run at once in a worker."""

from __future__ import annotations

from collections.abc import Mapping

from graphile_worker.errors import ConfigurationError
from graphile_worker.middleware.base import Middleware


class ConcurrencyLimits(Middleware):
    """At most so many jobs of a task at once in each worker. At its limit a task's jobs are left to others.

    What is claimed ahead (`prefetch`) counts too.

    Args:
        limits: By the tasks' identifiers.

    Example:
        >>> from graphile_worker import App
        >>> from graphile_worker.middleware import ConcurrencyLimits
        >>> app = App(dsn=dsn, middleware=[ConcurrencyLimits({"resize": 2, "call_partner": 5})])
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        if not isinstance(limits, Mapping):
            raise ConfigurationError(f"The limits are {limits!r}; pass a mapping such as {{'resize': 2}}.")
        for task, limit in limits.items():
            if type(limit) is not int or limit < 1:
                raise ConfigurationError(f"The limit of {task!r} is {limit!r}; it must be 1 or more.")
        self.limits = dict(limits)

    def room(self, task: str, in_hand: int) -> int | None:
        """What is missing to its limit."""
        limit = self.limits.get(task)
        return None if limit is None else max(0, limit - in_hand)
