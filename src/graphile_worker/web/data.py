"""`QueueData`: what pages and the API show of one queue, read within limits of time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphile_worker.web.auth import Access
    from graphile_worker.web.filters import Filter
    from graphile_worker.web.models import (
        CronPage,
        DoctorReport,
        FailurePage,
        JobDetail,
        JobPage,
        Overview,
        QueuePage,
        Scaling,
        Series,
        StateCounts,
        TaskDetail,
        TaskPage,
        WorkerPage,
    )


class QueueData:
    """Reads one queue. Each method raises a `DatabaseError` if the database cannot be reached."""

    schema: str

    async def counts(self) -> StateCounts:
        """Return the jobs by state, from the shared look."""
        raise NotImplementedError

    async def overview(self) -> Overview:
        """Return the state of the queue on one page."""
        raise NotImplementedError

    async def jobs(
        self, selected: Filter, access: Access, *, cursor: str | None = None, limit: int = 50, sort: str = "newest"
    ) -> JobPage:
        """Return a page of jobs, newest first.

        Raises:
            FilterError: The cursor is invalid, or the viewer may not search in payloads.
        """
        raise NotImplementedError

    async def job(self, job_id: str, access: Access) -> JobDetail | None:
        """Return everything about a job; None if nothing is known about it."""
        raise NotImplementedError

    async def failures(self, window: str = "all", *, task: str | None = None) -> FailurePage:
        """Return failures by task and error. `window` is ``1h``, ``3h``, ``24h``, ``3d``, ``7d`` or ``all``."""
        raise NotImplementedError

    async def queues(self, search: str = "", *, limit: int = 100) -> QueuePage:
        """Return the serial queues with the most jobs, or those whose names contain a text."""
        raise NotImplementedError

    async def tasks(self) -> TaskPage:
        """Return all tasks."""
        raise NotImplementedError

    async def task(self, identifier: str) -> TaskDetail | None:
        """Return one task; None if nothing is known about it."""
        raise NotImplementedError

    async def cron(self) -> CronPage:
        """Return all recurring tasks."""
        raise NotImplementedError

    async def workers(self) -> WorkerPage:
        """Return all known workers."""
        raise NotImplementedError

    async def doctor(self) -> DoctorReport:
        """Return what the doctor finds. The checks take some seconds, so viewers share a report for a minute."""
        raise NotImplementedError

    async def series(self, metric: str, *, task: str | None = None, since: float = 3600.0, step: float | None = None) -> Series:
        """Return a metric over time: see `graphile_worker.stats.Metric`. `since` is in seconds before now."""
        raise NotImplementedError

    async def scaling(self) -> Scaling:
        """Return how much work there is, for autoscalers."""
        raise NotImplementedError
