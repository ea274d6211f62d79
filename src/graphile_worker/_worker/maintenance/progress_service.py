"""`ProgressService`: stores the progress that running jobs report."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from graphile_worker._db.queries import progress as database
from graphile_worker._db.queries.progress import Report
from graphile_worker._worker.maintenance.write_access import WriteAccess
from graphile_worker._worker.service import Service
from graphile_worker.errors import DatabaseError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from graphile_worker._base.logs import ScopedLogger
    from graphile_worker._db.connection.connect import Connection
    from graphile_worker._db.connection.session import Session
    from graphile_worker._db.queries.exchange import ClaimedJob
    from graphile_worker.job import Job, Progress

FLUSH_INTERVAL = 1.0
"""Seconds between two writes, for all jobs of the worker together."""
_SWEEP_INTERVAL = 60.0
_FLUSH_TIMEOUT = 2.0
_MAX_REPORTS = 1000
"""Reports in one statement."""


class ProgressService(Service):
    """Collects reports, and writes the latest of each job at most once a second. Without reports it sleeps.

    Reports are fenced: one counts only if no other worker has claimed its job since. The rows of jobs that
    are gone are deleted by the next write, so a job that never reports costs nothing.

    Args:
        worker_id: The worker's id, which locks its jobs.
        session: The connection to the database.
        claimed: The worker's claimed jobs.
        logger: The worker's logger.
    """

    name = "progress"

    def __init__(
        self,
        *,
        worker_id: str,
        session: Session,
        claimed: Iterable[ClaimedJob],
        logger: ScopedLogger,
    ) -> None:
        super().__init__(logger)
        self._worker_id = worker_id
        self._session = session
        self._claimed = claimed
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._reports: dict[tuple[int, datetime | None], Progress] = {}
        self._stored: set[int] = set()
        self._access = WriteAccess(
            session, ("progress",), "This worker does not store the progress of jobs", logger
        )
        self._written_at = self._swept_at = -_SWEEP_INTERVAL

    def report(self, job: Job, progress: Progress) -> None:
        """Keep the progress until the next write. May be called from any thread."""
        with self._lock:
            is_first = not self._reports
            self._reports[job.id, job.locked_at] = progress
        if is_first:
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self.wake)

    async def tick(self) -> float | None:
        """Write the reports if the last write is a second ago."""
        if self._reports or self._stored:
            delay = self._written_at + FLUSH_INTERVAL - monotonic()
            if delay > 0:
                return delay
            try:
                await self.flush()
            except DatabaseError as error:  # the worker's loop reports an outage
                self.logger.debug("Cannot store the progress of jobs: %s", error)
                return FLUSH_INTERVAL
            if self._reports or self._stored:
                return FLUSH_INTERVAL
        return None

    async def flush(self) -> None:
        """Write the reports, and delete the rows of jobs that are gone.

        Raises:
            DatabaseError: Not all are written. The next call writes them, unless there are later ones.
        """
        self._written_at = monotonic()
        with self._lock:
            taken, self._reports = self._reports, {}
        try:
            if not await self._access.check():
                return
            await self._write(self._as_stored(taken))
        except BaseException:
            with self._lock:
                self._reports = {**taken, **self._reports}
            raise
        await self._delete_gone()

    def _as_stored(self, taken: dict[tuple[int, datetime | None], Progress]) -> list[Report]:
        # A lock that is renewed has a later time than the job that the task has.
        renewed = {
            (claimed.job.id, claimed.job.locked_at): claimed.locked_at for claimed in tuple(self._claimed)
        }
        reports = []
        for (job_id, locked_at), progress in taken.items():
            current = renewed.get((job_id, locked_at), locked_at)
            if current is not None:
                reports.append(Report(job_id, current, progress))
        # One statement cannot write a row twice, and the worker may have claimed a job again.
        latest = {report.job_id: report for report in sorted(reports, key=lambda report: report.locked_at)}
        return list(latest.values())

    async def _write(self, reports: list[Report]) -> None:
        for start in range(0, len(reports), _MAX_REPORTS):
            part = reports[start : start + _MAX_REPORTS]
            # First, because a call that is cancelled may have stored them.
            self._stored.update(report.job_id for report in part)
            await self._session.call(partial(self._store, part), attempts=1)

    async def _store(self, reports: list[Report], on: Connection) -> None:
        await database.store_progress(on, self._session.schema, self._worker_id, reports)

    async def _delete_gone(self) -> None:
        """Delete the rows of this worker's jobs that are gone, and now and then those of all workers."""
        gone: list[int] | None = list(self._stored - {claimed.job.id for claimed in tuple(self._claimed)})
        forgotten = set(gone or ())
        if monotonic() - self._swept_at >= _SWEEP_INTERVAL:
            self._swept_at, gone = monotonic(), None
        if gone or gone is None:
            schema = self._session.schema
            await self._session.call(lambda on: database.delete_progress(on, schema, gone), attempts=1)
        self._stored -= forgotten

    async def close(self) -> None:
        """Stop, and write what is left, unless the database does not answer soon."""
        await self.stop()
        if not self._reports and not self._stored:
            return
        try:
            async with asyncio.timeout(_FLUSH_TIMEOUT):
                await self.flush()
        except (DatabaseError, TimeoutError) as error:
            self.logger.debug("The last progress of jobs is not stored: %s", error)
