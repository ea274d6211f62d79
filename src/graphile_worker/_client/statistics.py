"""The part of `WorkerUtils` that reads statistics and progress."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from graphile_worker._base.durations import seconds
from graphile_worker._client.sync_twins import sync_twin
from graphile_worker._db.queries import statistics as database
from graphile_worker._db.queries.jobs import read_now
from graphile_worker._db.queries.progress import read_progress
from graphile_worker.errors import ConfigurationError
from graphile_worker.job import as_utc, check_integer
from graphile_worker.stats import Activity, Metric, Point, Series, depth_points

if TYPE_CHECKING:
    from graphile_worker._base.durations import Duration
    from graphile_worker._db.connection.connect import Connection
    from graphile_worker._db.connection.session import Session
    from graphile_worker.job import Progress

_HOUR = 3600
_RESOLUTIONS = tuple(
    (kept - _HOUR if period < _HOUR else kept, period) for period, kept in database.KEPT.items()
)
"""Up to which age, in seconds, statistics are kept in which period."""
_MINUTE = 60


class StatisticsReader:
    """The part of `WorkerUtils` that reads statistics and progress."""

    _session: Session

    async def progress(self, job_id: int, *, connection: Connection | None = None) -> Progress | None:
        """Return what a job has reported last with `JobContext.progress`.

        Args:
            job_id: Id of the job.
            connection: The caller's asyncpg connection.

        Returns:
            The progress; None if the job has reported none, or does not exist.
        """
        check_integer("job_id", job_id, range(2**63))
        schema = self._session.schema
        found = await self._session.call(lambda on: read_progress(on, schema, [job_id]), connection)
        return found.get(job_id)

    async def series(
        self,
        metric: Metric | str,
        *,
        task: str | None = None,
        since: Duration | datetime = 3600.0,
        step: Duration | None = None,
        connection: Connection | None = None,
    ) -> Series:
        """Return a metric over time, for a chart.

        Counts and times are those of Python workers. Jobs that Node and Rust workers run are counted only in
        the numbers of jobs: ready, scheduled, running and failed_jobs.

        Args:
            metric: What to return: see `Metric`.
            task: Identifier of a task; by default all tasks together.
            since: How far to go back, up to 90 days: seconds, a timedelta, or an aware datetime.
            step: Time from one point to the next, in whole minutes. By default one minute; 5 minutes if
                `since` is more than a day ago, and an hour if it is more than a week ago, because older
                statistics are kept only in such steps.
            connection: The caller's asyncpg connection.

        Raises:
            ConfigurationError: An argument is invalid.

        Example:
            >>> import asyncio
            >>> from graphile_worker import WorkerUtils
            >>> async def main():
            ...     async with WorkerUtils(dsn=dsn) as utils:
            ...         await utils.migrate()
            ...         return await utils.series("done", task="greet", since=600)
            >>> series = asyncio.run(main())
            >>> series.step, len(series.points)
            (60, 11)
        """
        if metric not in set(Metric):
            raise ConfigurationError(f"Unknown metric {metric!r}: it must be one of {', '.join(Metric)}.")
        wanted = Metric(metric)
        if not wanted.is_depth:
            found = await self.activity(task=task, since=since, step=step, connection=connection)
            points = [
                Point(at, counts.value(wanted)) for at, counts in zip(found.times, found.steps, strict=True)
            ]
            return Series(metric=wanted, task=task, step=found.step, points=points)
        times, period = await self._times(since, step, connection)
        schema = self._session.schema
        rows = await self._session.call(
            lambda on: database.read_depths(on, schema, times[0], period, task), connection
        )
        return Series(
            metric=wanted,
            task=task,
            step=period,
            points=list(depth_points(wanted, task, times, rows)),
            estimated=any(row["estimated"] for row in rows),
        )

    async def activity(
        self,
        *,
        task: str | None = None,
        since: Duration | datetime = 3600.0,
        step: Duration | None = None,
        connection: Connection | None = None,
    ) -> Activity:
        """Return what Python workers did over time, by task: counts, and times with percentiles.

        Jobs that Node and Rust workers run are not counted. The arguments are those of `series`.

        Example:
            >>> import asyncio
            >>> from graphile_worker import WorkerUtils
            >>> async def main():
            ...     async with WorkerUtils(dsn=dsn) as utils:
            ...         await utils.migrate()
            ...         return await utils.activity(since=3600)
            >>> activity = asyncio.run(main())
            >>> activity.total().done, activity.total().run_time(0.95)
            (0, None)
        """
        times, period = await self._times(since, step, connection)
        schema = self._session.schema
        rows = await self._session.call(
            lambda on: database.read_counts(on, schema, times[0], period, task), connection
        )
        return Activity.of_rows(period, times, rows)

    async def _times(
        self, since: Duration | datetime, step: Duration | None, connection: Connection | None
    ) -> tuple[list[datetime], int]:
        """Return the beginnings of all steps, and their length in seconds."""
        schema = self._session.schema
        now = await self._session.call(lambda on: read_now(on, schema), connection)
        if isinstance(since, datetime):
            age = max(0.0, (now - as_utc("since", since)).total_seconds())
        else:
            age = seconds("since", since, "more than 0")
        period = _choose_step(age, step)
        first = int((now.timestamp() - age) // period * period)
        last = int(now.timestamp() // period * period)
        return [datetime.fromtimestamp(at, UTC) for at in range(first, last + 1, period)], period

    progress_sync = sync_twin(progress)
    series_sync = sync_twin(series)
    activity_sync = sync_twin(activity)


def _choose_step(age: float, step: Duration | None) -> int:
    """Return the length of a step in seconds, for statistics of this age."""
    resolution = next((period for kept, period in _RESOLUTIONS if age <= kept), None)
    if resolution is None:
        days = _RESOLUTIONS[-1][0] // 86_400
        raise ConfigurationError(
            f"since is {age / 86_400:,.0f} days ago; statistics are kept for {days} days."
        )
    if step is None:
        return resolution
    length = seconds("step", step, "more than 0")
    if length % _MINUTE or length % resolution:
        raise ConfigurationError(
            f"step is {length:g} s; it must be a multiple of {resolution} s, because statistics "
            "that are as old as since are kept in such steps."
        )
    return int(length)
