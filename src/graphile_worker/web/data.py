"""`QueueData`: what pages and the API show of one queue, read within limits of time."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from graphile_worker._db.queries import web_reads
from graphile_worker.doctor import examine
from graphile_worker.errors import ConfigurationError
from graphile_worker.history import OUTCOMES
from graphile_worker.stats import Activity, JobCounts, Metric
from graphile_worker.web.errors import InvalidRequestError, QueryTimeoutError
from graphile_worker.web.job_data import JobReader
from graphile_worker.web.models import (
    CronPage,
    CronRun,
    DoctorFinding,
    DoctorReport,
    FailedJobRow,
    FailureGroup,
    FailurePage,
    Overview,
    QueuePage,
    QueueRow,
    Rates,
    Scaling,
    Series,
    SeriesPoint,
    TaskDetail,
    TaskPage,
    WorkerJob,
    WorkerPage,
)
from graphile_worker.web.rows import (
    FAILURE_WINDOWS,
    cron_row,
    failure_group,
    find_deploys,
    find_oldest,
    find_served,
    sum_window,
    task_row,
    unknown_worker,
    worker_row,
)

if TYPE_CHECKING:
    from graphile_worker.client import WorkerUtils
    from graphile_worker.cron import CronItem
    from graphile_worker.stats import Writes
    from graphile_worker.web.shared import Shared
    from graphile_worker.workers import WorkerInfo

WINDOWS = {"1h": 3600.0, "24h": 86_400.0, "7d": 7 * 86_400.0}
_WINDOW_STEPS = {"1h": 60.0, "24h": 3600.0, "7d": 86_400.0}
"""Long steps, because only the sums of the longer windows are shown."""
_MAX_FAILED = 100_000
"""How many of the newest failed jobs are grouped."""
_FEW_FAILED = 20_000
"""How many are grouped if that took too long."""
_MAX_GROUPS = 300
_MAX_NAMES = 100_000
_MAX_QUEUES = 500
_RECENT = 300
"""Seconds over which rates are averaged."""
_SAMPLES = 60
_MIN_APART = 2.0
_DOCTOR_AGE = 300.0
_DOCTOR_SECONDS = 60.0
_ACTIVITY_AGE = 2.0
_AGE_PART = 3600.0
"""Statistics of a week may be older than those of an hour: by this part of the period."""
_LAST_FAILED = 2000
_CRON_RUNS = 20
_LEVELS = ("error", "warning", "note", "ok")
_MAX_AGE = 90 * 86_400.0


class QueueData(JobReader):
    """Reads one queue. Each method raises a `DatabaseError` if the database cannot be reached."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._writes: deque[Writes] = deque(maxlen=_SAMPLES)
        self._grouped = _MAX_FAILED

    async def overview(self) -> Overview:
        """Return the state of the queue on one page."""
        notices: list[str] = []
        nothing: list[Any] = []
        activities = asyncio.gather(*(self._window_activity(name, notices) for name in WINDOWS))
        look, (hour, day, week), workers, failures, writes = await asyncio.gather(
            self.look(),
            activities,
            self._optional("The workers", self._read_workers(), nothing, notices),
            self._optional("The last failures", self._last_failures(), nothing, notices),
            self._optional("The rates", self._ask(lambda utils: utils.many.writes()), None, notices),
        )
        report = self._doctor.peek()
        windows = [
            sum_window(name, activity.total())
            for name, activity in zip(WINDOWS, (hour, day, week), strict=True)
            if activity is not None
        ]
        return Overview(
            schema=self.schema,
            now=look.look.at,
            counts=look.total,
            look=look.look,
            oldest=find_oldest(look),
            rates=self._rates(writes, hour),
            windows=windows,
            has_statistics=week is not None and bool(week.tasks),
            other_languages=sorted({one.language or "node" for one in workers if not one.is_ours}),
            workers_alive=sum(one.is_alive for one in workers),
            workers_known=len(workers),
            failures=failures,
            findings=[one for one in report.findings if one.level in _LEVELS[:2]] if report else [],
            deploys=list(find_deploys(workers)),
            notices=list(dict.fromkeys(notices)),
        )

    async def failures(self, window: str = "all", *, task: str | None = None) -> FailurePage:
        """Return failures by task and error, the largest groups first.

        Args:
            window: ``1h``, ``3h``, ``24h``, ``3d``, ``7d`` or ``all``: only groups that failed in it.
            task: Only failures of this task.
        """
        if window not in FAILURE_WINDOWS:
            raise InvalidRequestError(
                f"Unknown window {window[:20]!r}: it must be one of {', '.join(FAILURE_WINDOWS)}."
            )
        look, page = await asyncio.gather(self.look(), self._failure_groups.get())
        groups, timed = page
        chosen = [group for group in groups if group.windows[window] and (task is None or group.task == task)]
        chosen.sort(key=lambda group: -group.windows[window])
        notices = []
        if sum(group.jobs for group in groups) >= self._grouped:
            notices.append(f"Only the newest {self._grouped:,} failed jobs are grouped.")
        return FailurePage(
            window=window,
            groups=chosen,
            look=look.look,
            truncated=len(groups) >= _MAX_GROUPS,
            timed=timed,
            notices=notices,
        )

    async def queues(self, search: str = "", *, limit: int = 100) -> QueuePage:
        """Return the largest serial queues, locked ones first; or those whose names contain a text."""
        limit = max(1, min(limit, _MAX_QUEUES))
        if len(search) > 128 or "\0" in search:  # noqa: PLR2004 - no name is longer
            raise InvalidRequestError(
                "The name of a queue has at most 128 characters, without null characters."
            )
        if search:
            rows = await self._query(partial(web_reads.list_queues, limit=limit, search=search))
        else:
            rows = await self._share(
                ("queues", limit),
                partial(self._query, partial(web_reads.list_queues, limit=limit, search="")),
            ).get()
        names = self._share(
            "names",
            partial(self._query, partial(web_reads.count_up_to, what="queue_names", limit=_MAX_NAMES)),
        )
        total = await names.get()
        return QueuePage(
            items=[QueueRow(**dict(row)) for row in rows],
            total=total,
            total_is_exact=total < _MAX_NAMES,
            look=(await self.look()).look,
        )

    async def tasks(self) -> TaskPage:
        """Return all tasks that have jobs, statistics or workers."""
        notices: list[str] = []
        nothing: list[Any] = []
        no_errors: dict[str, str] = {}
        look, activity, workers, errors = await asyncio.gather(
            self.look(),
            self._window_activity("1h", notices),
            self._optional("The workers", self._read_workers(), nothing, notices),
            self._optional("The last errors", self._last_errors.get(), no_errors, notices),
        )
        served = find_served(workers)
        counted = {} if activity is None else activity.tasks
        names = sorted({*look.tasks, *counted, *served})
        unknown = any(one.is_alive and one.tasks is None for one in workers)
        rows = [
            task_row(name, look, activity, served.get(name, []), errors.get(name), unknown=unknown)
            for name in names
        ]
        return TaskPage(items=rows, look=look.look, notices=list(dict.fromkeys(notices)))

    async def task(self, identifier: str) -> TaskDetail | None:
        """Return one task; None if nothing is known about it."""
        page = await self.tasks()
        row = next((one for one in page.items if one.task == identifier), None)
        if row is None:
            return None
        notices = list(page.notices)
        found = await asyncio.gather(
            *(self._window_activity(name, notices) for name in WINDOWS),
        )
        failures = await self.failures(task=identifier)
        windows = [
            sum_window(name, activity.total(identifier))
            for name, activity in zip(WINDOWS, found, strict=True)
            if activity is not None
        ]
        return TaskDetail(
            row=row, windows=windows, failures=failures.groups, notices=list(dict.fromkeys(notices))
        )

    async def cron(self) -> CronPage:
        """Return all recurring tasks: those of the app, and those that the database knows from elsewhere."""
        notices: list[str] = []
        known, keeps = await asyncio.gather(
            self._ask(lambda utils: utils.known_crontabs()),
            self._optional(
                "The history", self._ask(lambda utils: utils.has_history()), default=False, notices=notices
            ),
        )
        now = (await self.look()).look.at
        try:
            is_of_app = self._queue.utils.schema == self._app.utils.schema
            declared = {item.identifier: item for item in self._app.cron_items} if is_of_app else {}
        except (ConfigurationError, OSError) as error:
            declared = {}
            notices.append(f"The app's crontab cannot be read: {error}")
        items = []
        for identifier in sorted({*declared, *known}):
            item, stored = declared.get(identifier), known.get(identifier)
            since = None if stored is None else stored.known_since
            last = None if stored is None else stored.last_execution
            runs, lateness = (
                await self._cron_runs(item, notices) if item is not None and keeps else ([], None)
            )
            items.append(cron_row(identifier, item, since, last, now, runs, lateness))
        return CronPage(items=items, now=now, notices=list(dict.fromkeys(notices)))

    async def workers(self) -> WorkerPage:
        """Return all known workers, and what they run."""
        notices: list[str] = []
        nothing: list[Any] = []
        no_queues: dict[str, int] = {}
        look = await self.look()
        known, running, queues = await asyncio.gather(
            self._optional("The workers", self._read_workers(), nothing, notices),
            self._optional(
                "The running jobs",
                self._query(partial(web_reads.list_running, ids=look.running)),
                nothing,
                notices,
            ),
            self._optional("Locked queues", self._query(web_reads.count_queue_locks), no_queues, notices),
        )
        by_worker: dict[str, list[WorkerJob]] = defaultdict(list)
        for row in running:
            by_worker[row["worker"]].append(
                WorkerJob(id=str(row["id"]), task=row["task"] or "", seconds=max(0.0, row["seconds"]))
            )
        rows = [worker_row(one, by_worker.pop(one.id, []), queues.get(one.id, 0)) for one in known]
        # Node workers send no heartbeats. They are known while they hold locks.
        rows += [unknown_worker(name, jobs, queues.get(name, 0)) for name, jobs in by_worker.items()]
        rows.sort(key=lambda row: (not row.is_alive and row.status != "unknown", -row.jobs, row.id))
        return WorkerPage(items=rows, look=look.look, notices=notices)

    async def fingerprint(self) -> object:
        """Return a value that is another one after the queue has changed, if viewers watch."""
        writes = await self._ask(lambda utils: utils.many.writes())
        look = await self.look()
        return writes.added, writes.removed, look.total, len(look.running)

    async def doctor(self) -> DoctorReport:
        """Return what the doctor finds. Viewers share a report for minutes, because the checks take time."""
        return await self._doctor.get()

    async def series(
        self, metric: str, *, task: str | None = None, since: float = 3600.0, step: float | None = None
    ) -> Series:
        """Return a metric over time: see `graphile_worker.stats.Metric`.

        Args:
            metric: What to return.
            task: Identifier of a task; by default all tasks together.
            since: How far to go back, in seconds.
            step: Seconds from one point to the next, a multiple of a minute.
        """
        if metric not in set(Metric):
            raise InvalidRequestError(
                f"Unknown metric {metric[:40]!r}: it must be one of {', '.join(Metric)}."
            )
        if not 1 <= since <= _MAX_AGE or (step is not None and not 60 <= step <= _MAX_AGE):  # noqa: PLR2004
            raise InvalidRequestError("since must be from 1 s to 90 days, and step from 60 s to 90 days.")
        wanted = Metric(metric)
        if wanted.is_depth:
            return await self._depths(wanted, task, since, step)
        activity = await self._activity_or_none(task, since, [], step)
        if activity is None:
            return Series(metric=metric, task=task, step=int(step or 60), points=[], source="python")
        points = [
            SeriesPoint(at=at, value=counts.value(wanted))
            for at, counts in zip(activity.times, activity.steps, strict=True)
        ]
        return Series(metric=metric, task=task, step=activity.step, points=points, source="python")

    async def scaling(self) -> Scaling:
        """Return how much work there is, for autoscalers."""
        shared = self._share("scaling", self._read_scaling)
        return await shared.get()

    @property
    def _doctor(self) -> Shared[DoctorReport]:
        return self._share("doctor", self._examine, min_age=_DOCTOR_AGE)

    @property
    def _last_errors(self) -> Shared[dict[str, str]]:
        return self._share(
            "errors", partial(self._query, partial(web_reads.list_last_errors, newest=_LAST_FAILED))
        )

    @property
    def _failure_groups(self) -> Shared[tuple[list[FailureGroup], bool]]:
        return self._share("failures", self._group_failures)

    async def _group_failures(self) -> tuple[list[FailureGroup], bool]:
        read = partial(web_reads.group_failures, groups_limit=_MAX_GROUPS)
        try:
            rows, timed = await self._query(partial(read, jobs_limit=self._grouped))
        except QueryTimeoutError:
            if self._grouped <= _FEW_FAILED:
                raise
            self._grouped = _FEW_FAILED
            rows, timed = await self._query(partial(read, jobs_limit=self._grouped))
        return [failure_group(dict(row), timed=timed) for row in rows], timed

    async def _last_failures(self) -> list[FailedJobRow]:
        rows = await self._share(
            "failed", partial(self._query, partial(web_reads.list_failed, newest=_LAST_FAILED, limit=10))
        ).get()
        return [
            FailedJobRow(
                id=str(row["id"]),
                task=row["task"],
                attempts=row["attempts"],
                max_attempts=row["max_attempts"],
                error=(row["error"].strip().splitlines() or [""])[0][:300],
                failed_at=row["failed_at"],
            )
            for row in rows
        ]

    async def _read_workers(self) -> list[WorkerInfo]:
        shared = self._share("workers", partial(self._ask, lambda utils: utils.workers(include_locks=False)))
        return await shared.get()

    async def _window_activity(self, name: str, notices: list[str]) -> Activity | None:
        return await self._activity_or_none(None, WINDOWS[name], notices, _WINDOW_STEPS[name])

    async def _activity_or_none(
        self, task: str | None, since: float, notices: list[str], step: float | None = None
    ) -> Activity | None:
        """Return what Python workers did; None if there are no statistics."""

        async def read(utils: WorkerUtils) -> Activity:
            return await utils.activity(task=task, since=since, step=step)

        shared = self._share(
            ("activity", task, since, step),
            partial(self._ask, read),
            min_age=max(_ACTIVITY_AGE, since / _AGE_PART),
        )
        try:
            return await self._optional("The statistics", shared.get(), None, notices)
        except ConfigurationError as error:  # the step does not suit the age
            raise InvalidRequestError(str(error)) from error

    async def _depths(self, metric: Metric, task: str | None, since: float, step: float | None) -> Series:
        async def read(utils: WorkerUtils) -> Any:
            return await utils.series(metric, task=task, since=since, step=step)

        shared = self._share(
            ("depths", metric, task, since, step), partial(self._ask, read), min_age=_ACTIVITY_AGE
        )
        try:
            found = await self._optional("The statistics", shared.get(), None, [])
        except ConfigurationError as error:
            raise InvalidRequestError(str(error)) from error
        points = [] if found is None else [SeriesPoint(at=one.at, value=one.value) for one in found.points]
        return Series(
            metric=metric,
            task=task,
            step=int(step or 60) if found is None else found.step,
            points=points,
            estimated=found is not None and found.estimated,
            source="table",
        )

    def _rates(self, writes: Writes | None, hour: Activity | None) -> Rates:
        added = removed = None
        if writes is not None:
            if self._writes and writes.added < self._writes[-1].added:
                self._writes.clear()  # the server's statistics were reset
            if not self._writes or writes.at - self._writes[-1].at >= 1:
                self._writes.append(writes)
            first = self._writes[0]
            if (apart := writes.at - first.at) >= _MIN_APART:
                added = (writes.added - first.added) / apart
                removed = (writes.removed - first.removed) / apart
        if hour is None or not hour.tasks:
            return Rates(added=added, removed=removed)
        steps = _RECENT // hour.step
        recent = JobCounts.of_many(hour.steps[-steps - 1 : -1])
        return Rates(
            added=added,
            removed=removed,
            done=recent.done / (steps * hour.step),
            failed=recent.failed / (steps * hour.step),
        )

    async def _cron_runs(self, item: CronItem, notices: list[str]) -> tuple[list[CronRun], float | None]:
        nothing: list[Any] = []
        rows = await self._optional(
            "The runs of recurring tasks",
            self._query(partial(web_reads.list_cron_runs, task=item.task, limit=_CRON_RUNS)),
            nothing,
            notices,
        )
        runs = [
            CronRun(
                at=row["at"],
                outcome=str(OUTCOMES.get(row["outcome"], "unknown")),
                job_id=str(row["job_id"]),
                duration=row["duration"],
            )
            for row in rows
        ]
        late = next((row["lateness"] for row in rows if row["lateness"] is not None), None)
        return runs, None if late is None else max(0.0, late)

    async def _examine(self) -> DoctorReport:
        settings = self._app.settings
        found = []
        if settings["pool"] is not None:
            found.append(
                DoctorFinding(
                    check="connection",
                    level="note",
                    message="The doctor cannot use the app's pool.",
                    advice="Run graphile-worker doctor, or give the app a dsn instead of a pool.",
                )
            )
        else:
            prepares = settings["prepared_statements"]
            checks = examine(settings["dsn"], schema=self.schema, prepared_statements=prepares)
            try:
                async with asyncio.timeout(_DOCTOR_SECONDS):
                    found += [
                        DoctorFinding(
                            check=one.check, level=one.level.value, message=one.message, advice=one.advice
                        )
                        async for one in checks
                    ]
            except TimeoutError:
                raise QueryTimeoutError(
                    f"The doctor was stopped after {_DOCTOR_SECONDS:g} s. Run graphile-worker doctor."
                ) from None
        found.sort(key=lambda finding: _LEVELS.index(finding.level))
        return DoctorReport(at=datetime.now(UTC), findings=found)

    async def _read_scaling(self) -> Scaling:
        look, queued, free = await asyncio.gather(
            self.look(),
            self._query(partial(web_reads.count_up_to, what="queued_ready", limit=_MAX_NAMES)),
            self._query(partial(web_reads.count_up_to, what="claimable_queues", limit=_MAX_NAMES)),
        )
        claimable = max(0, look.total.ready - queued) + free
        return Scaling(
            ready=look.total.ready,
            running=look.total.running,
            blocked=look.total.blocked,
            claimable=claimable,
            desired=claimable + look.total.running,
            oldest_ready_seconds=max((one.seconds for one in find_oldest(look)), default=0.0),
            at=look.look.at,
            exact=look.look.exact and queued < _MAX_NAMES and free < _MAX_NAMES,
        )
