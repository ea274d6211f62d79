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

    One that blocks the event loop keeps this from being said until it ends.

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
        loop = asyncio.get_running_loop()
        began, said = loop.time(), False

        def warn() -> None:
            nonlocal said
            said = True
            ctx.logger.warning(
                "Job %d (%s) has been running for %s",
                *(ctx.job.id, ctx.job.task_identifier, shown(self._threshold)),
            )

        timer = loop.call_later(self._threshold, warn)
        try:
            return await proceed()
        finally:
            timer.cancel()
            # The timer of one that blocked the event loop has had no chance.
            if not said and (took := loop.time() - began) >= self._threshold:
                ctx.logger.warning(
                    "Job %d (%s) has run for %s", ctx.job.id, ctx.job.task_identifier, shown(took)
                )
