"""Adding the jobs of recurring tasks, minute by minute."""

from __future__ import annotations

import asyncio
import heapq
import textwrap
from contextlib import aclosing
from datetime import datetime, timedelta
from itertools import groupby, islice
from operator import attrgetter
from time import monotonic
from typing import TYPE_CHECKING

from graphile_worker import events as event
from graphile_worker._db import crontabs as database
from graphile_worker._db.crontabs import Due
from graphile_worker._db.failures import is_about_content, without_details
from graphile_worker._runtime.cron_adding import add_through
from graphile_worker._runtime.service import Failing, Service, pause_after
from graphile_worker.errors import DatabaseError, GraphileWorkerError, InvalidJobError
from graphile_worker.wording import counted, some

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence

    from graphile_worker._db.crontabs import KnownCrontab
    from graphile_worker._db.session import Session
    from graphile_worker._runtime.clock import Clock
    from graphile_worker._runtime.cron_adding import Around
    from graphile_worker.client import WorkerUtils
    from graphile_worker.cron import CronItem
    from graphile_worker.emitter import Events
    from graphile_worker.events import WorkerPool
    from graphile_worker.logs import ScopedLogger
    from graphile_worker.specs import Specs

_MINUTE = timedelta(minutes=1)
_JUST_AFTER = 0.001
_HARDLY_EARLY = timedelta(seconds=1)
"""What the database's time is between its answers is an estimate."""
_CHUNK = 5000
"""How many jobs are added at once, while catching up."""
_TURN = 200
"""How many of them are made before others on the event loop have their turn, such as who adds those before.

A function of the user's that is rarely true is asked for many minutes in one turn, all the same.
"""
_PAUSE = 0.001
"""And how long that is: long enough for the connection, which has steps to go before the server works."""
_MOST_SAID = 500
_SHORT = timedelta(hours=1)
_LONGEST_OWED = timedelta(days=1)
"""How far to look back for an item whose jobs something refuses: for ever would be more each minute."""
_LONGEST_PAUSE = 1.0
"""Another worker may begin when the database is back, and for what is before that nobody asks then."""
_LONGEST_SLEEP = 10.0
"""A timer does not notice that the clock was changed, or that the machine slept."""


class Scheduler(Service):
    """Adds the jobs of each minute, in the minute.

    The database keeps count of what was added, for all workers; here we only remember which minute is next.
    It stays the next until its jobs are added, or were by others: so no error, outage or sleep loses one
    while the process lives.

    Args:
        items: The schedules, as `parse_cron_items` returns them; one at least.
        specs: Knows what the tasks of this worker take.
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
    ) -> None:
        super().__init__(logger)
        self._pool = pool
        self._items = items
        self._session = session
        self._around = utils.through_middleware if utils.middleware else None
        self._specs = specs
        self._clock = clock
        self._events = events
        self._start: datetime | None = None
        self._next: datetime | None = None
        self._awaited: datetime | None = None
        self._in_vain = 0
        self._owed: dict[int, datetime] = {}  # since when, by the places of items that were refused
        self._refused: dict[int, datetime] = {}  # the same, in this tick
        self._waits_since: float | None = None
        self._asks_since: float | None = None

    def announce(self) -> None:
        """Say what there is, which items this worker cannot run itself, and which ones nobody can."""
        identifiers = ", ".join(item.identifier for item in self._items)
        self.logger.info("Recurring tasks: %s", textwrap.shorten(identifiers, _MOST_SAID, placeholder=" …"))
        for task, items in groupby(sorted(self._items, key=attrgetter("task")), attrgetter("task")):
            if task not in self._pool.tasks:
                names = [repr(item.identifier) for item in items]
                who = f"item {names[0]} adds" if len(names) == 1 else f"items {some(names)} add"
                self.logger.warning(
                    "The cron %s jobs of the task %r, which this worker does not have: they wait for one "
                    "that has it",
                    *(who, task),
                )
        for item in self._items:
            try:
                self._specs.of(item.task, item.payload, {"job_key": None})  # the crontab says which, if any
            except InvalidJobError as error:
                self.logger.warning("The cron item %r adds jobs that will fail: %s", item.identifier, error)

    async def tick(self) -> float:
        """Add what is due; seconds until the next minute."""
        try:
            if self._next is None:
                self._next = await self._begin()
            await self._catch_up(self._next)
        except DatabaseError as error:
            self.complain(error)
            self._in_vain += 1
            self._waits_since = self._waits_since or monotonic()
            if self._in_vain == 1:
                self.logger.warning("Jobs of recurring tasks cannot be added, but will be later: %s", error)
            return min(pause_after(self._in_vain), _LONGEST_PAUSE)
        if self._in_vain:
            self.logger.info("Jobs of recurring tasks are added again")
            self._in_vain = 0
        return self._until_next()

    async def _begin(self) -> datetime:
        """Register what is new, make up for what was missed; the first minute to wait for."""
        identifiers = [item.identifier for item in self._items]
        now, known = await self._session.call(
            lambda on: database.read_schedules(on, self._session.schema, identifiers), attempts=1
        )
        self._clock.observe(now)
        if self._start is None:  # if the rest fails, that is the time since when nothing may be missed
            waited = 0.0 if self._waits_since is None else monotonic() - self._waits_since
            self._start = self._clock.now() - timedelta(seconds=waited)
            self._warn_of_the_future(known)
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
                    self._tell(event.CronBackfill, wanted)
                    await self._add(wanted)
        self._owed = dict(self._refused)
        self._events.emit(event.CronStarted(worker_pool=self._pool, start=start))
        return _ceil(start)

    def _warn_of_the_future(self, known: Mapping[str, KnownCrontab]) -> None:
        now = self._clock.now()
        latest = {identifier: one.last_execution or now for identifier, one in known.items()}
        ahead = [identifier for identifier, last in latest.items() if last - now > _MINUTE]
        if ahead:
            self.logger.warning(
                "Jobs of cron items are added up to %s already, and it is %s: was a clock wrong? Until then "
                "none is added of %s. To have them from now on, set last_execution to now() in %s",
                f"{max(latest.values()):%Y-%m-%d %H:%M %Z}",
                f"{now:%Y-%m-%d %H:%M %Z}",
                some(ahead),
                f"{self._session.schema.quoted}._private_known_crontabs",
            )

    def _missed(self, known: Mapping[str, KnownCrontab], start: datetime) -> Iterator[Due]:
        """What nobody has added before the start, as far back as each item wants to have it."""
        owed = []
        for place, item in enumerate(self._items):
            if item.identifier in known and item.backfill:
                since = known[item.identifier].last_execution or known[item.identifier].known_since
                first = max(_ceil(_back(start, item.backfill)), _ceil(since))
                owed.append(self._due(place, first, _ceil(start) - _MINUTE))
        return heapq.merge(*owed)

    async def _catch_up(self, first: datetime) -> None:
        """Add the jobs of all minutes that have come; most of the time of one."""
        now = self._clock.now()
        if now >= first:
            now = await self._asked_now()
        last = now.replace(second=0, microsecond=0)
        if now < first:
            if self._awaited == first and first - now > _HARDLY_EARLY:
                self._events.emit(
                    event.CronPrematureTimer(
                        worker_pool=self._pool, current_timestamp=now, expected_timestamp=first
                    )
                )
            if not self._owed or last < first - _MINUTE:  # if the clock went back, what is owed has to wait
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
                    self._tell(event.CronSchedule, wanted)
                    self._tell(event.CronScheduled, await self._add(wanted))
                self._owed |= self._refused  # if the next one fails, that is not forgotten
                self._next = max(first, chunk[-1].minute)  # some items of it may be in the next chunk
        self._owed = dict(self._refused)
        self._next = max(first, last + _MINUTE)

    async def _asked_now(self) -> datetime:
        """What time it is, and no estimate: a minute that was had too early is gone when it comes."""
        if not self._clock.local:
            schema = self._session.schema
            self._clock.observe(
                await self._session.call(lambda on: database.read_time(on, schema), attempts=1)
            )
        return self._clock.now()

    def _since(self, place: int, first: datetime, last: datetime) -> datetime:
        """The first minute that an item is to have."""
        return max(self._owed[place], last - _LONGEST_OWED) if place in self._owed else first

    def _due(self, place: int, first: datetime, last: datetime) -> Iterator[Due]:
        """The jobs of one item, from the first minute to the last."""
        item = self._items[place]
        for minute in self._minutes(item, first, last):
            spec = item.job_at(minute, backfilled=self._start is not None and minute < self._start)
            yield Due(minute, place, item.identifier, spec, item.overlap == "skip")

    def _minutes(self, item: CronItem, first: datetime, last: datetime) -> Iterator[datetime]:
        if isinstance(item.match, str) and last - first > _SHORT:
            yield from item.occurrences(first - _MINUTE, last)
            return
        failures = 0
        why: BaseException | None = None
        while first <= last:  # as a rule it is one minute, or a few, and then to ask for each is faster
            try:
                is_due = item.matches(first)
            except BaseException as error:  # noqa: BLE001 - a function of the user's: others are not to suffer
                failures, why = failures + 1, why or error
            else:
                if is_due:
                    yield first
            first += _MINUTE
        if failures:
            self.logger.error(
                "The cron item %r cannot say when it is due, so of %s it has no job: %s",
                *(item.identifier, counted(failures, "minute"), why),
                exc_info=why,
            )

    def _not_refused(self, chunk: list[Due]) -> list[Due]:
        return [due for due in chunk if due.place not in self._refused]

    async def _add(self, chunk: list[Due]) -> list[Due]:
        schema = self._session.schema
        try:
            if self._around is not None:
                return await self._add_through(self._around, chunk)
            return await self._session.call(lambda on: database.schedule(on, schema, chunk), attempts=1)
        except Exception as error:
            if isinstance(error, DatabaseError) and not is_about_content(error.__cause__):
                raise
            apart = _by_item(chunk)
            if len(apart) == 1:  # perhaps middleware, or a trigger: the other items are not to suffer from it
                self._owe(chunk[0], error)
                return []
        return [due for one in apart for due in await self._add(one)]

    async def _add_through(self, middleware: Around, chunk: list[Due]) -> list[Due]:
        self._asks_since = monotonic()
        try:
            return await add_through(middleware, self._session, chunk, self.logger)
        finally:
            self._asks_since = None

    @property
    def failing(self) -> Failing | None:
        """Also if middleware does not return."""
        since = self._asks_since
        waiting = None if since is None else Failing(since, "A middleware's enqueue does not return.")
        return super().failing or waiting

    def _owe(self, due: Due, error: Exception) -> None:
        """That one, and all after it, are to be added with those of the next minute."""
        self.complain(error)
        self._refused[due.place] = due.minute
        without_details(error)  # they may quote a whole row
        self.logger.error(
            "No job of the cron item %r is added, but will be later: %s",
            *(due.identifier, error),
            exc_info=None if isinstance(error, GraphileWorkerError) else error,
        )

    def _tell(
        self,
        kind: type[event.CronBackfill | event.CronSchedule | event.CronScheduled],
        chunk: Iterable[Due],
    ) -> None:
        if not self._events.wants(kind):
            return
        for minute, of_minute in groupby(chunk, attrgetter("minute")):
            jobs = [event.CronJob(due.identifier, due.spec) for due in of_minute]
            name = "items_to_backfill" if kind is event.CronBackfill else "jobs_and_identifiers"
            self._events.emit(kind(worker_pool=self._pool, timestamp=minute, **{name: jobs}))

    def _until_next(self) -> float:
        assert self._next is not None  # noqa: S101 - it has begun
        delay = (self._next - self._clock.now()).total_seconds() + _JUST_AFTER
        self._awaited = self._next if delay <= _LONGEST_SLEEP else None
        return max(0.0, min(delay, _LONGEST_SLEEP))


async def _chunks(due: Iterator[Due]) -> AsyncGenerator[list[Due]]:
    """While the server works on one, the next is made."""
    chunk = await _chunk(due)
    while chunk:
        following = asyncio.create_task(_chunk(due), name="graphile-worker cron")
        try:
            yield chunk
            chunk = await following
        finally:
            following.cancel()  # also so that nobody misses what it may have raised


async def _chunk(due: Iterator[Due]) -> list[Due]:
    chunk: list[Due] = []
    while len(chunk) < _CHUNK and (more := list(islice(due, _TURN))):
        chunk += more
        if len(more) == _TURN:
            await asyncio.sleep(_PAUSE)
    return chunk


def _by_item(chunk: list[Due]) -> list[list[Due]]:
    found: dict[str, list[Due]] = {}
    for due in chunk:
        found.setdefault(due.identifier, []).append(due)
    return list(found.values())


def _ceil(moment: datetime) -> datetime:
    minute = moment.replace(second=0, microsecond=0)
    return minute if minute == moment else minute + _MINUTE


def _back(moment: datetime, period: timedelta) -> datetime:
    try:
        return moment - period
    except OverflowError:  # before all dates
        return datetime.min.replace(tzinfo=moment.tzinfo)
