"""`Scheduler`: adds the jobs of recurring tasks, minute by minute."""

from __future__ import annotations

import asyncio
import heapq
import logging
import textwrap
from contextlib import aclosing
from datetime import datetime, timedelta
from itertools import groupby, islice
from operator import attrgetter
from time import monotonic
from typing import TYPE_CHECKING

from graphile_worker import events as event
from graphile_worker._base.text import join_truncated, pluralize, without_end
from graphile_worker._db.connection.error_mapping import is_about_content, without_details
from graphile_worker._db.queries import crontabs as database
from graphile_worker._db.queries.crontabs import DueJob
from graphile_worker._worker.maintenance.cron_jobs import add_through_middleware
from graphile_worker._worker.service import Service, ServiceFailure, pause_after
from graphile_worker.errors import DatabaseError, GraphileWorkerError, InvalidJobError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence

    from graphile_worker._base.logs import ScopedLogger
    from graphile_worker._db.connection.session import Session
    from graphile_worker._db.queries.crontabs import KnownCrontab
    from graphile_worker._tasks.specs import Specs
    from graphile_worker._worker.claiming.clock import Clock
    from graphile_worker._worker.claiming.outage import OutageLog
    from graphile_worker._worker.maintenance.cron_jobs import EnqueueMiddleware
    from graphile_worker.client import WorkerUtils
    from graphile_worker.cron import CronItem
    from graphile_worker.events import WorkerPool
    from graphile_worker.events.emitter import Events

_MINUTE = timedelta(minutes=1)
_JUST_AFTER = 0.001
_CLOCK_TOLERANCE = timedelta(seconds=1)
"""A timer that is early by less is not reported, because the database's time is estimated between replies."""
_CHUNK = 5000
"""Number of jobs that are added at once while catching up."""
_TURN = 200
"""Number of jobs that are made before other code on the event loop runs, such as the code that adds a chunk.

A user's function that rarely matches is still called for many minutes in one turn.
"""
_TURN_PAUSE = 0.001
"""Seconds for the other code: enough for the connection to send a chunk to the server."""
_MAX_LISTED_CHARACTERS = 500
_SHORT = timedelta(hours=1)
_MAX_OVERDUE = timedelta(days=1)
"""How far back to add refused jobs of an item. Without a limit, there would be more with each minute."""
_LONGEST_PAUSE = 1.0
"""Seconds between two attempts while the database is unavailable.

Another worker may start as soon as the database is back, and would not add the minutes before its start.
"""
_LONGEST_SLEEP = 10.0
"""Seconds. A timer does not notice that the clock was changed, or that the machine was suspended."""


class Scheduler(Service):
    """Adds the jobs of each minute when the minute begins.

    The database records which minutes have been added, for all workers. The scheduler only remembers the next
    minute, until its jobs are added by this worker or another. So no error, outage or suspension loses a job
    while the process lives.

    Args:
        pool: The worker's identity.
        items: The schedules, as `parse_cron_items` returns them; at least one.
        session: The connection to the database.
        utils: Has the middleware around adding jobs.
        specs: Checks payloads against the parameters of this worker's tasks.
        clock: The current time.
        events: The event emitter.
        logger: The worker's logger.
        outage_log: Logs outages of the database; failures during one need no line of their own.
    """

    name = "scheduler"

    def __init__(
        self,
        *,
        pool: WorkerPool,
        items: Sequence[CronItem],
        session: Session,
        utils: WorkerUtils,
        specs: Specs,
        clock: Clock,
        events: Events,
        logger: ScopedLogger,
        outage_log: OutageLog | None = None,
    ) -> None:
        super().__init__(logger)
        self._outage_log = outage_log
        self._is_outage = False
        self._pool = pool
        self._items = items
        self._session = session
        self._middleware = utils._through_middleware if utils.middleware else None
        self._specs = specs
        self._clock = clock
        self._events = events
        self._start: datetime | None = None
        self._next: datetime | None = None
        self._expected: datetime | None = None
        self._failed_ticks = 0
        # By the places of items whose jobs are refused: the first minute without a job.
        self._overdue: dict[int, datetime] = {}
        self._refused: dict[int, datetime] = {}  # the same, for the current tick
        self._unavailable_since: float | None = None
        self._middleware_since: float | None = None

    def announce(self) -> None:
        """Log the items, those whose task this worker does not have, and those whose jobs will fail."""
        identifiers = ", ".join(item.identifier for item in self._items)
        self.logger.info(
            "Recurring tasks: %s", textwrap.shorten(identifiers, _MAX_LISTED_CHARACTERS, placeholder=" …")
        )
        for task, items in groupby(sorted(self._items, key=attrgetter("task")), attrgetter("task")):
            if task not in self._pool.tasks:
                names = [repr(item.identifier) for item in items]
                who = f"item {names[0]} adds" if len(names) == 1 else f"items {join_truncated(names)} add"
                self.logger.warning(
                    "The cron %s jobs of the task %r, which this worker does not have. They wait for a "
                    "worker that has it",
                    who,
                    task,
                )
        for item in self._items:
            try:
                self._specs.build(item.task, item.payload, {"job_key": None})  # a cron item sets its own key
            except InvalidJobError as error:
                self.logger.warning("The cron item %r adds jobs that will fail: %s", item.identifier, error)

    async def tick(self) -> float:
        """Add the jobs that are due. Returns the seconds until the next minute."""
        try:
            if self._next is None:
                self._next = await self._begin()
            await self._catch_up(self._next)
        except DatabaseError as error:
            self.record_failure(error)
            self._failed_ticks += 1
            self._unavailable_since = self._unavailable_since or monotonic()
            if self._failed_ticks == 1:
                self._is_outage = self._outage_log is not None and self._outage_log.is_logged
                self.logger.log(
                    logging.DEBUG if self._is_outage else logging.WARNING,
                    "Cannot add the jobs of recurring tasks: %s. Retrying until it succeeds",
                    without_end(str(error)),
                )
            return min(pause_after(self._failed_ticks), _LONGEST_PAUSE)
        if self._failed_ticks:
            level = logging.DEBUG if self._is_outage else logging.INFO
            self.logger.log(level, "The jobs of recurring tasks are added again")
            self._failed_ticks = 0
        return self._until_next()

    async def _begin(self) -> datetime:
        """Register new items, and add the jobs that were missed. Returns the first minute to wait for."""
        identifiers = [item.identifier for item in self._items]
        now, known = await self._session.call(
            lambda on: database.read_schedules(on, self._session.schema, identifiers), attempts=1
        )
        self._clock.observe(now)
        if self._start is None:  # set once: if the rest fails and is repeated, no minute since then is lost
            outage = 0.0 if self._unavailable_since is None else monotonic() - self._unavailable_since
            self._start = self._clock.now() - timedelta(seconds=outage)
            self._warn_about_future(known)
            self._events.emit(event.CronStarting(worker_pool=self._pool, start=self._start))
        start = self._start
        if new := [identifier for identifier in identifiers if identifier not in known]:
            await self._session.call(
                lambda on: database.register(on, self._session.schema, new, start), attempts=1
            )
        self._refused.clear()
        async with aclosing(_chunks(self._missed(known, start))) as chunks:
            async for chunk in chunks:
                if wanted := self._not_refused(chunk):
                    self._emit(event.CronBackfill, wanted)
                    await self._add(wanted)
        self._overdue = dict(self._refused)
        self._events.emit(event.CronStarted(worker_pool=self._pool, start=start))
        return _next_minute(start)

    def _warn_about_future(self, known: Mapping[str, KnownCrontab]) -> None:
        now = self._clock.now()
        latest = {identifier: one.last_execution or now for identifier, one in known.items()}
        ahead = [identifier for identifier, last in latest.items() if last - now > _MINUTE]
        if ahead:
            self.logger.warning(
                "The jobs of the cron items %s are already added up to %s, but it is %s. Perhaps a clock was "
                "wrong. No more are added until then. To add them from now on, set last_execution to now() "
                "in %s",
                join_truncated(ahead),
                f"{max(latest.values()):%Y-%m-%d %H:%M %Z}",
                f"{now:%Y-%m-%d %H:%M %Z}",
                f"{self._session.schema.quoted}._private_known_crontabs",
            )

    def _missed(self, known: Mapping[str, KnownCrontab], start: datetime) -> Iterator[DueJob]:
        """Return the jobs of minutes before the start that no worker has added, within backfill periods."""
        missed = []
        for place, item in enumerate(self._items):
            if item.identifier in known and item.backfill_period:
                since = known[item.identifier].last_execution or known[item.identifier].known_since
                first = max(_next_minute(_subtract(start, item.backfill_period)), _next_minute(since))
                missed.append(self._due(place, first, _next_minute(start) - _MINUTE))
        return heapq.merge(*missed)

    async def _catch_up(self, first: datetime) -> None:
        """Add the jobs of all minutes from `first` until now. Usually it is one minute."""
        now = self._clock.now()
        if now >= first:
            now = await self._read_now()
        last = now.replace(second=0, microsecond=0)
        if now < first:
            if self._expected == first and first - now > _CLOCK_TOLERANCE:
                self._events.emit(
                    event.CronPrematureTimer(
                        worker_pool=self._pool, current_timestamp=now, expected_timestamp=first
                    )
                )
            if (
                not self._overdue or last < first - _MINUTE
            ):  # if the clock was set back, overdue jobs wait too
                return
        if last > first:
            self._events.emit(
                event.CronOverdueTimer(
                    worker_pool=self._pool, current_timestamp=now, expected_timestamp=first
                )
            )
        self._refused.clear()
        due = heapq.merge(
            *(self._due(place, self._since(place, first, last), last) for place in range(len(self._items)))
        )
        async with aclosing(_chunks(due)) as chunks:
            async for chunk in chunks:
                if wanted := self._not_refused(chunk):
                    self._emit(event.CronSchedule, wanted)
                    self._emit(event.CronScheduled, await self._add(wanted))
                self._overdue |= self._refused  # remembered even if the next chunk fails
                self._next = max(first, chunk[-1].minute)  # the next chunk may have jobs of the same minute
        self._overdue = dict(self._refused)
        self._next = max(first, last + _MINUTE)

    async def _read_now(self) -> datetime:
        """Return the current time, read from the database and not estimated.

        A minute whose jobs were added too early would be skipped when it begins.
        """
        if not self._clock.local:
            schema = self._session.schema
            self._clock.observe(
                await self._session.call(lambda on: database.read_time(on, schema), attempts=1)
            )
        return self._clock.now()

    def _since(self, place: int, first: datetime, last: datetime) -> datetime:
        """Return the first minute for which to add jobs of an item."""
        return max(self._overdue[place], last - _MAX_OVERDUE) if place in self._overdue else first

    def _due(self, place: int, first: datetime, last: datetime) -> Iterator[DueJob]:
        """Yield the jobs of one item, from the first minute to the last."""
        item = self._items[place]
        for minute in self._minutes(item, first, last):
            spec = item.job_at(minute, backfilled=self._start is not None and minute < self._start)
            yield DueJob(minute, place, item.identifier, spec, item.overlap == "skip")

    def _minutes(self, item: CronItem, first: datetime, last: datetime) -> Iterator[datetime]:
        if isinstance(item.match, str) and last - first > _SHORT:
            yield from item.occurrences(first - _MINUTE, last)
            return
        failures = 0
        reason: BaseException | None = None
        while first <= last:  # usually one minute, or a few, and then checking each is faster
            try:
                is_due = item.matches(first)
            except BaseException as error:  # noqa: BLE001 - the user's function must not affect other items
                failures, reason = failures + 1, reason or error
            else:
                if is_due:
                    yield first
            first += _MINUTE
        if failures:
            self.logger.error(
                "The match function of the cron item %r failed for %s, which get no job: %s",
                item.identifier,
                pluralize(failures, "minute"),
                reason,
                exc_info=reason,
            )

    def _not_refused(self, chunk: list[DueJob]) -> list[DueJob]:
        return [due for due in chunk if due.position not in self._refused]

    async def _add(self, chunk: list[DueJob]) -> list[DueJob]:
        schema = self._session.schema
        try:
            if self._middleware is not None:
                return await self._add_through_middleware(self._middleware, chunk)
            return await self._session.call(lambda on: database.schedule(on, schema, chunk), attempts=1)
        except Exception as error:
            if isinstance(error, DatabaseError) and not is_about_content(error.__cause__):
                raise
            # Middleware or a trigger may refuse the jobs of one item. The jobs of the others are added.
            by_item = _by_item(chunk)
            if len(by_item) == 1:
                self._postpone(chunk[0], error)
                return []
        return [due for jobs in by_item for due in await self._add(jobs)]

    async def _add_through_middleware(
        self, middleware: EnqueueMiddleware, chunk: list[DueJob]
    ) -> list[DueJob]:
        self._middleware_since = monotonic()
        try:
            return await add_through_middleware(middleware, self._session, chunk, self.logger)
        finally:
            self._middleware_since = None

    @property
    def failing(self) -> ServiceFailure | None:
        """The failure of recent ticks, or a middleware that does not return. May be read from any thread."""
        since = self._middleware_since
        waiting = None if since is None else ServiceFailure(since, "A middleware's enqueue has not returned.")
        return super().failing or waiting

    def _postpone(self, due: DueJob, error: Exception) -> None:
        """Add this job of an item, and the later ones, together with the jobs of the next minute."""
        self.record_failure(error)
        self._refused[due.position] = due.minute
        without_details(error)  # the details may quote a whole row
        self.logger.error(
            "Cannot add the jobs of the cron item %r: %s. Retrying in the next minute",
            due.identifier,
            without_end(str(error)),
            exc_info=None if isinstance(error, GraphileWorkerError) else error,
        )

    def _emit(
        self,
        kind: type[event.CronBackfill | event.CronSchedule | event.CronScheduled],
        chunk: Iterable[DueJob],
    ) -> None:
        if not self._events.wants(kind):
            return
        for minute, of_minute in groupby(chunk, attrgetter("minute")):
            jobs = [event.CronJob(due.identifier, due.spec) for due in of_minute]
            name = "items_to_backfill" if kind is event.CronBackfill else "jobs_and_identifiers"
            self._events.emit(kind(worker_pool=self._pool, timestamp=minute, **{name: jobs}))

    def _until_next(self) -> float:
        assert self._next is not None  # noqa: S101 - set by the first tick
        delay = (self._next - self._clock.now()).total_seconds() + _JUST_AFTER
        self._expected = self._next if delay <= _LONGEST_SLEEP else None
        return max(0.0, min(delay, _LONGEST_SLEEP))


async def _chunks(due: Iterator[DueJob]) -> AsyncGenerator[list[DueJob]]:
    """Yield chunks of jobs. While the caller adds one chunk, the next is made."""
    chunk = await _chunk(due)
    while chunk:
        following = asyncio.create_task(_chunk(due), name="graphile-worker cron")
        try:
            yield chunk
            chunk = await following
        finally:
            following.cancel()  # if it has failed, this also keeps asyncio from logging its error


async def _chunk(due: Iterator[DueJob]) -> list[DueJob]:
    chunk: list[DueJob] = []
    while len(chunk) < _CHUNK and (more := list(islice(due, _TURN))):
        chunk += more
        if len(more) == _TURN:
            await asyncio.sleep(_TURN_PAUSE)
    return chunk


def _by_item(chunk: list[DueJob]) -> list[list[DueJob]]:
    found: dict[str, list[DueJob]] = {}
    for due in chunk:
        found.setdefault(due.identifier, []).append(due)
    return list(found.values())


def _next_minute(moment: datetime) -> datetime:
    minute = moment.replace(second=0, microsecond=0)
    return minute if minute == moment else minute + _MINUTE


def _subtract(moment: datetime, period: timedelta) -> datetime:
    try:
        return moment - period
    except OverflowError:  # before the first date
        return datetime.min.replace(tzinfo=moment.tzinfo)
