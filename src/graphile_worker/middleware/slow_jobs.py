"""Says so when a job takes long."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from graphile_worker.durations import seconds, shown
from graphile_worker.middleware.base import Middleware

if TYPE_CHECKING:
    from graphile_worker.context import JobContext
    from graphile_worker.durations import Duration
    from graphile_worker.middleware.base import Running


class SlowJobs(Middleware):
    """Warns, while it still runs, of a job that takes longer than that.

    Args:
        threshold: How long a job may take.

    Example:
        >>> from graphile_worker import App
        >>> from graphile_worker.middleware import SlowJobs
        >>> app = App(dsn=dsn, middleware=[SlowJobs(30)])
    """

    def __init__(self, threshold: Duration = 60.0) -> None:
        self._threshold = seconds("threshold", threshold, "more than 0")

    async def execute(self, ctx: JobContext[Any], proceed: Running) -> Any:
        """Set a timer."""
        timer = asyncio.get_running_loop().call_later(self._threshold, self._warn, ctx)
        try:
            return await proceed()
        finally:
            timer.cancel()

    def _warn(self, ctx: JobContext[Any]) -> None:
        ctx.logger.warning(
            "Job %d (%s) has been running for %s",
            *(ctx.job.id, ctx.job.task_identifier, shown(self._threshold)),
        )
