"""`SlowJobs`: warns about jobs that run for a long time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from graphile_worker._base.durations import format_seconds, seconds
from graphile_worker.middleware.base import Middleware

if TYPE_CHECKING:
    from graphile_worker._base.durations import Duration
    from graphile_worker.context import JobContext
    from graphile_worker.middleware.base import Running


class SlowJobs(Middleware):
    """Middleware that logs a warning while a job runs longer than a threshold.

    If the job blocks the event loop, the warning comes when the job ends.

    Args:
        threshold: How long a job may run without a warning, in seconds or as a timedelta.

    Example:
        >>> from graphile_worker import App
        >>> from graphile_worker.middleware import SlowJobs
        >>> app = App(dsn=dsn, middleware=[SlowJobs(30)])
    """

    def __init__(self, threshold: Duration = 60.0) -> None:
        self._threshold = seconds("threshold", threshold, "more than 0")

    async def execute(self, ctx: JobContext[Any], proceed: Running) -> Any:
        """Run the job with a timer that warns."""
        loop = asyncio.get_running_loop()
        started, warned = loop.time(), False

        def warn() -> None:
            nonlocal warned
            warned = True
            ctx.logger.warning(
                "Job %d (%s) has been running for %s",
                ctx.job.id,
                ctx.job.task_identifier,
                format_seconds(self._threshold),
            )

        timer = loop.call_later(self._threshold, warn)
        try:
            return await proceed()
        finally:
            timer.cancel()
            # If the job blocked the event loop, the timer could not fire.
            if not warned and (took := loop.time() - started) >= self._threshold:
                ctx.logger.warning(
                    "Job %d (%s) ran for %s", ctx.job.id, ctx.job.task_identifier, format_seconds(took)
                )
