"""The progress that jobs report while a test runs them."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING

from graphile_worker._db.queries.progress import Report, delete_progress, store_progress
from graphile_worker._db.queries.statistics import may_write

if TYPE_CHECKING:
    from datetime import datetime

    from graphile_worker._db.connection.connect import Connection
    from graphile_worker._db.connection.session import Session
    from graphile_worker._db.queries.exchange import ClaimedJob
    from graphile_worker.job import Job, Progress

_MAX_JOBS = 10_000
_REPORTED: OrderedDict[tuple[int, datetime], list[Progress]] = OrderedDict()


def reported_progress(job: Job) -> tuple[Progress, ...]:
    """Return what a job reported with `JobContext.progress` while `drain` or `inline` ran it, in order.

    Example:
        >>> import asyncio
        >>> from graphile_worker import App, JobContext
        >>> from graphile_worker.testing import drain, reported_progress
        >>> app = App(dsn=dsn)
        >>> @app.task
        ... async def load(ctx: JobContext) -> None:
        ...     ctx.progress(0.5, "page 1 of 2")
        >>> async def test():
        ...     await app.migrate()
        ...     job = await load.enqueue()
        ...     await drain(app)
        ...     return [report.message for report in reported_progress(job)]
        >>> asyncio.run(test())
        ['page 1 of 2']
    """
    return tuple(_REPORTED.get((job.id, job.created_at), ()))


class RecordedProgress:
    """Keeps every report for the test, and stores the last one of a job when the job ends.

    Args:
        session: The connection to the database.
        worker_id: The id that locks the jobs.
    """

    def __init__(self, session: Session, worker_id: str) -> None:
        self._session = session
        self._worker_id = worker_id
        self._latest: dict[int, Progress] = {}

    def report(self, job: Job, progress: Progress) -> None:
        """Keep the report."""
        self._latest[job.id] = progress
        _REPORTED.setdefault((job.id, job.created_at), []).append(progress)
        while len(_REPORTED) > _MAX_JOBS:
            _REPORTED.popitem(last=False)

    async def store(self, claimed: ClaimedJob) -> bool:
        """Store the last report of the job, as its worker would. Returns whether there is one."""
        latest = self._latest.pop(claimed.job.id, None)
        if latest is None:
            return False
        report = Report(claimed.job.id, claimed.locked_at, latest)
        return await self._session.call(partial(self._store_on, report))

    async def _store_on(self, report: Report, on: Connection) -> bool:
        if not await may_write(on, self._session.schema, ("progress",)):
            return False
        await store_progress(on, self._session.schema, self._worker_id, [report])
        return True

    async def delete(self, claimed: ClaimedJob) -> None:
        """Delete what is stored, if the job no longer exists."""
        schema = self._session.schema
        await self._session.call(lambda on: delete_progress(on, schema, [claimed.job.id]))
