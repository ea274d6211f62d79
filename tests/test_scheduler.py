"""The cron scheduler adds the jobs of each minute exactly once, whatever fails."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from graphile_worker import (
    App,
    ConfigurationError,
    CronItem,
    CrontabError,
    Events,
    JobSpec,
    Middleware,
    WorkerUtils,
    parse_cron_items,
    parse_crontab,
    run,
    run_once,
    task,
)
from graphile_worker._base.logs import ScopedLogger
from graphile_worker._db.connection.connect import Pool
from graphile_worker._db.connection.session import Session
from graphile_worker._db.queries import crontabs
from graphile_worker._db.sql_files import Schema
from graphile_worker._tasks.specs import Specs
from graphile_worker._worker.claiming import clock
from graphile_worker._worker.claiming.clock import Clock
from graphile_worker._worker.maintenance.cron_scheduler import Scheduler
from graphile_worker.events import WorkerPool
from graphile_worker.testing import Databases
from support.waiting import until
from support.workers import EventRecorder, nothing, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

NEW_YEAR = datetime(2021, 1, 1, tzinfo=UTC)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
JOBS = """
  select task.identifier, payload::text, run_at, queue_name, priority, max_attempts, key, job.id
  from graphile_worker._private_jobs as job
  join graphile_worker._private_tasks as task on task.id = job.task_id
  left join graphile_worker._private_job_queues as queue on queue.id = job.job_queue_id
  order by run_at, job.id
"""


class SetClock(Clock):
    """A clock that the test sets, and that never reads the time of the database."""

    def __init__(self, now: datetime) -> None:
        super().__init__(local=True)
        self.time = now

    def now(self) -> datetime:
        return self.time


class SchedulerHarness:
    """Schedulers on one database, whose ticks and clock the test controls."""

    def __init__(self, session: Session, db: asyncpg.Connection) -> None:
        self.session = session
        self.db = db
        self.clock = SetClock(NEW_YEAR)

    def scheduler(
        self,
        crontab: str | list[CronItem],
        *,
        clock: Clock | None = None,
        recorder: EventRecorder | None = None,
        session: Session | None = None,
        middleware: Sequence[Middleware] = (),
    ) -> Scheduler:
        items = parse_crontab(crontab) if isinstance(crontab, str) else crontab
        return Scheduler(
            pool=WorkerPool("w", "graphile_worker", 1, ("t",)),
            items=parse_cron_items(items),
            session=session or self.session,
            utils=WorkerUtils._on_session(
                session or self.session, use_local_time=False, middleware=middleware
            ),
            specs=Specs({}),
            clock=clock or self.clock,
            events=recorder.events if recorder else Events(),
            logger=ScopedLogger(logging.getLogger("graphile_worker"), {}),
        )

    async def register_item(self, identifier: str, *, since: datetime, last: datetime | None = None) -> None:
        await self.db.execute(
            "insert into graphile_worker._private_known_crontabs values ($1, $2, $3)", identifier, since, last
        )

    async def known_items(self) -> dict[str, tuple[datetime, datetime | None]]:
        rows = await self.db.fetch(
            "select * from graphile_worker._private_known_crontabs order by identifier"
        )
        return {row["identifier"]: (row["known_since"], row["last_execution"]) for row in rows}

    async def jobs(self) -> list[asyncpg.Record]:
        return await self.db.fetch(JOBS)

    async def run_times(self) -> list[datetime]:
        return [row["run_at"] for row in await self.jobs()]

    async def tick_at(self, scheduler: Scheduler, moment: datetime) -> None:
        self.clock.time = moment
        await scheduler.tick()


@pytest.fixture
async def session(database: str) -> AsyncIterator[Session]:
    pool = Pool(database, max_size=4)
    yield Session(Schema(), pool, logging.getLogger("graphile_worker"))
    await pool.close()


@pytest.fixture
def harness(session: Session, db: asyncpg.Connection) -> SchedulerHarness:
    return SchedulerHarness(session, db)


class TestTiming:
    async def test_job_is_added_in_its_minute_and_not_before(self, harness: SchedulerHarness) -> None:
        recorder = EventRecorder()
        scheduler = harness.scheduler("0 */4 * * * t", recorder=recorder)
        await harness.tick_at(scheduler, NEW_YEAR + HOUR)
        await harness.tick_at(scheduler, NEW_YEAR + 3 * HOUR + timedelta(seconds=1))
        assert await harness.jobs() == []
        assert "cron:schedule" not in recorder.names

        four = NEW_YEAR + 4 * HOUR
        await harness.tick_at(scheduler, four + timedelta(seconds=1))
        for name in ("cron:schedule", "cron:scheduled"):
            [event] = recorder.named(name)
            [(identifier, job)] = event.jobs_and_identifiers
            assert (event.timestamp, identifier, job.identifier) == (four, "t", "t")
        [job] = await harness.jobs()
        assert (job["identifier"], job["run_at"]) == ("t", four)
        assert json.loads(job["payload"]) == {
            "_cron": {"ts": "2021-01-01T04:00:00.000Z", "backfilled": False}
        }
        assert recorder.names[:2] == ["cron:starting", "cron:started"]

    async def test_clock_going_back_adds_no_job_twice(self, harness: SchedulerHarness) -> None:
        scheduler = harness.scheduler("0 */4 * * * t")
        for hour in (1, 4, 3, 4, 3, 4):
            await harness.tick_at(scheduler, NEW_YEAR + hour * HOUR)
        assert len(await harness.jobs()) == 1

    async def test_clock_set_back_repeatedly_adds_no_job_early(self, harness: SchedulerHarness) -> None:
        recorder = EventRecorder()
        scheduler = harness.scheduler("0 4 * * * t", recorder=recorder)
        before = NEW_YEAR + 3 * HOUR + 59 * MINUTE
        for seconds in (0, 30, 0, 55, 0, 30, 55, 0):
            await harness.tick_at(scheduler, before + timedelta(seconds=seconds))
        assert await harness.jobs() == []
        assert recorder.counts["cron:prematureTimer"] == 2, (
            "one event each time that the timer fired before the minute"
        )
        await harness.tick_at(scheduler, before + timedelta(seconds=61))
        assert len(await harness.jobs()) == 1

    async def test_last_execution_in_the_future_is_logged_with_a_fix(
        self, harness: SchedulerHarness, caplog: pytest.LogCaptureFixture
    ) -> None:
        await harness.register_item("t", since=NEW_YEAR, last=NEW_YEAR + 48 * HOUR)
        await harness.register_item("near", since=NEW_YEAR, last=NEW_YEAR + MINUTE)
        scheduler = harness.scheduler("* * * * * t\n* * * * * near")
        await harness.tick_at(scheduler, NEW_YEAR)
        [warning] = [
            one.getMessage() for one in caplog.records if "Perhaps a clock was wrong" in one.getMessage()
        ]
        assert "already added up to 2021-01-03 00:00 UTC, but it is 2021-01-01 00:00 UTC" in warning
        assert "the cron items t are" in warning
        assert "set last_execution to now()" in warning

        await harness.db.execute(
            "update graphile_worker._private_known_crontabs set last_execution = $1", NEW_YEAR
        )
        await harness.tick_at(scheduler, NEW_YEAR + MINUTE)
        assert await harness.run_times() == [NEW_YEAR + MINUTE] * 2

    async def test_worker_that_waited_for_the_database_logs_no_clock_warning(
        self, harness: SchedulerHarness, caplog: pytest.LogCaptureFixture
    ) -> None:
        await harness.register_item("t", since=NEW_YEAR - DAY, last=NEW_YEAR)
        scheduler = harness.scheduler("* * * * * t")
        scheduler._unavailable_since = monotonic() - 600
        await harness.tick_at(scheduler, NEW_YEAR)
        assert "Perhaps a clock was wrong" not in caplog.text

    async def test_keyed_cron_jobs_replace_each_other(self, harness: SchedulerHarness) -> None:
        scheduler = harness.scheduler("0 */4 * * * t ?jobKey=foo")
        await harness.tick_at(scheduler, NEW_YEAR + HOUR)
        await harness.tick_at(scheduler, NEW_YEAR + 4 * HOUR)
        [first] = await harness.jobs()
        await harness.tick_at(scheduler, NEW_YEAR + 8 * HOUR)
        [second] = await harness.jobs()
        assert (first["id"], first["key"]) == (second["id"], second["key"])
        assert '"ts":"2021-01-01T04:00:00.000Z"' in first["payload"]
        assert '"ts":"2021-01-01T08:00:00.000Z"' in second["payload"]

    async def test_job_has_all_options_of_its_crontab_line(self, harness: SchedulerHarness) -> None:
        scheduler = harness.scheduler("* * * * * t ?id=i&queue=q&priority=-3&max=2&jobKey=k {a: 1, _cron: 2}")
        await harness.tick_at(scheduler, NEW_YEAR)
        [job] = await harness.jobs()
        assert (job["queue_name"], job["priority"], job["max_attempts"], job["key"]) == ("q", -3, 2, "k")
        assert json.loads(job["payload"]) == {
            "a": 1,
            "_cron": {"ts": "2021-01-01T00:00:00.000Z", "backfilled": False},
        }
        assert await harness.known_items() == {"i": (NEW_YEAR, NEW_YEAR)}

    async def test_jobs_of_a_minute_are_added_in_crontab_order(self, harness: SchedulerHarness) -> None:
        names = ["b", "d", "a", "c"]
        keyed = ["", "?jobKey=x", "", "?jobKey=y"]
        lines = [f"* * * * * {name} {key}" for name, key in zip(names, keyed, strict=True)]
        await harness.tick_at(harness.scheduler("\n".join(lines)), NEW_YEAR)
        assert [job["identifier"] for job in await harness.jobs()] == names

    async def test_scheduler_started_within_a_minute_waits_for_the_next(
        self, harness: SchedulerHarness
    ) -> None:
        scheduler = harness.scheduler("* * * * * t")
        harness.clock.time = NEW_YEAR + timedelta(seconds=52)
        delay = await scheduler.tick()
        assert await harness.jobs() == []
        assert delay == pytest.approx(8.001)
        harness.clock.time += timedelta(seconds=8)
        delay = await scheduler.tick()
        assert await harness.run_times() == [NEW_YEAR + MINUTE]
        assert delay == 10, "the delay must be short enough to notice a change of the clock"

    async def test_items_may_have_time_zones_and_functions(self, harness: SchedulerHarness) -> None:
        items = [
            CronItem("t", "0 8 * * *", tz="Europe/Paris"),
            CronItem("t", lambda at: at.minute == 30 and at.hour == 7, identifier="half"),
        ]
        scheduler = harness.scheduler(items)
        await harness.tick_at(scheduler, NEW_YEAR)
        await harness.tick_at(scheduler, NEW_YEAR + DAY)
        assert await harness.run_times() == [NEW_YEAR + 7 * HOUR, NEW_YEAR + 7 * HOUR + 30 * MINUTE]


class TestCatchingUp:
    async def test_late_tick_adds_missed_minutes_without_marking_them_backfilled(
        self, harness: SchedulerHarness
    ) -> None:
        recorder = EventRecorder()
        scheduler = harness.scheduler("*/10 * * * * t\n* * * * * u ?jobKey=u", recorder=recorder)
        await harness.tick_at(scheduler, NEW_YEAR)
        await harness.tick_at(scheduler, NEW_YEAR + HOUR + timedelta(seconds=30))
        jobs = await harness.jobs()
        assert [job["run_at"] for job in jobs if job["identifier"] == "t"] == [
            NEW_YEAR + n * 10 * MINUTE for n in range(7)
        ]
        [kept] = [job for job in jobs if job["identifier"] == "u"]
        assert kept["run_at"] == NEW_YEAR + HOUR
        assert not any('"backfilled":true' in job["payload"] for job in jobs)
        [late] = recorder.named("cron:overdueTimer")
        assert late.expected_timestamp == NEW_YEAR + MINUTE
        assert recorder.counts["cron:schedule"] == 61
        assert recorder.counts["cron:scheduled"] == 8, (
            "a job that the next one would replace must not be added"
        )

    async def test_scheduler_catches_up_after_a_suspend(self, harness: SchedulerHarness) -> None:
        scheduler = harness.scheduler("0 8 * * * t")
        await harness.tick_at(scheduler, NEW_YEAR + 12 * HOUR)
        await harness.tick_at(scheduler, NEW_YEAR + 3 * DAY + 12 * HOUR)
        assert await harness.run_times() == [NEW_YEAR + n * DAY + 8 * HOUR for n in (1, 2, 3)]

    async def test_scheduler_catches_up_after_an_outage(
        self, harness: SchedulerHarness, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        pool = Pool(database, max_size=1)
        session = Session(Schema(), pool, logging.getLogger("graphile_worker"))
        scheduler = harness.scheduler("*/20 * * * * t", session=session)
        await harness.tick_at(scheduler, NEW_YEAR + MINUTE)
        name = await harness.db.fetchval("select current_database()")
        admin = await asyncpg.connect(database, database="postgres")
        try:
            await admin.execute(f'alter database "{name}" allow_connections false')
            await admin.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = $1 and pid <> $2",
                name,
                await harness.db.fetchval("select pg_backend_pid()"),
            )
            for minutes in (20, 40, 60):
                harness.clock.time = NEW_YEAR + minutes * MINUTE
                assert 0 < await scheduler.tick() <= 10
        finally:
            await admin.execute(f'alter database "{name}" allow_connections true')
            await admin.close()
        await scheduler.tick()
        assert await harness.run_times() == [NEW_YEAR + n * MINUTE for n in (20, 40, 60)]
        messages = [record.message for record in caplog.records if "recurring" in record.message]
        assert [message.split(":")[0] for message in messages] == [
            "Cannot add the jobs of recurring tasks",
            "The jobs of recurring tasks are added again",
        ]
        await pool.close()

    async def test_error_during_a_tick_loses_no_minute(self, harness: SchedulerHarness) -> None:
        scheduler = harness.scheduler("* * * * * t\n* * * * * u")
        await harness.tick_at(scheduler, NEW_YEAR)
        await harness.db.execute(
            "alter table graphile_worker._private_jobs add constraint no check (task_id < 0) not valid"
        )
        for n in range(1, 4):
            await harness.tick_at(scheduler, NEW_YEAR + n * MINUTE)
        assert len(await harness.jobs()) == 2
        assert {last for _, last in (await harness.known_items()).values()} == {NEW_YEAR}
        await harness.db.execute("alter table graphile_worker._private_jobs drop constraint no")
        await scheduler.tick()
        assert await harness.run_times() == [NEW_YEAR + n * MINUTE for n in range(4) for _ in "tu"]

    async def test_refused_minutes_are_added_after_an_outage(
        self, harness: SchedulerHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("_CHUNK", "_TURN"):
            monkeypatch.setattr(f"graphile_worker._worker.maintenance.cron_scheduler.{name}", 4)
        scheduler = harness.scheduler("* * * * * t ?id=refused {no: true}\n* * * * * t ?id=good")
        await harness.tick_at(scheduler, NEW_YEAR - HOUR)
        await harness.db.execute(
            """create function fail() returns trigger language plpgsql as $$ begin
              if new.run_at > '2020-12-31T23:02:00Z' then raise disk_full; end if;
              if new.payload::jsonb ? 'no' then raise check_violation; end if;
              return new;
            end $$;
            create trigger fail before insert on graphile_worker._private_jobs
            for each row execute function fail()"""
        )
        await harness.tick_at(scheduler, NEW_YEAR - HOUR + 5 * MINUTE)
        assert await harness.run_times() == [NEW_YEAR - HOUR + n * MINUTE for n in (0, 0, 1, 2)]

        await harness.db.execute("drop function fail cascade")
        await harness.tick_at(scheduler, NEW_YEAR - HOUR + 6 * MINUTE)
        assert await harness.run_times() == [NEW_YEAR - HOUR + n * MINUTE for n in range(7) for _ in range(2)]

    async def test_failing_cron_item_does_not_affect_others(
        self, harness: SchedulerHarness, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(_at: datetime) -> bool:
            raise ValueError("oh no")

        items = [
            CronItem("t", broken, identifier="broken"),
            CronItem("t", "* * * * *", identifier="unstorable", payload={"a": "\ufffe"}),
            CronItem("t", "* * * * *", identifier="good"),
        ]
        await harness.db.execute(
            """alter table graphile_worker._private_jobs
            add constraint no check ((payload ->> 'a') is null or (1 / (length(payload ->> 'a') - 1)) > 0)"""
        )
        scheduler = harness.scheduler(items)
        for n in range(3):
            await harness.tick_at(scheduler, NEW_YEAR + n * MINUTE)
        assert await harness.run_times() == [NEW_YEAR + n * MINUTE for n in range(3)]
        messages = "\n".join(record.message for record in caplog.records)
        assert "The match function of the cron item 'broken' failed" in messages
        assert "Cannot add the jobs of the cron item 'unstorable': The database" in messages

    async def test_deleted_known_crontab_is_registered_again(self, harness: SchedulerHarness) -> None:
        scheduler = harness.scheduler("* * * * * t\n* * * * * u")
        await harness.tick_at(scheduler, NEW_YEAR)
        await harness.db.execute("delete from graphile_worker._private_known_crontabs where identifier = 'u'")
        await harness.tick_at(scheduler, NEW_YEAR + MINUTE)
        assert len(await harness.jobs()) == 4
        assert (await harness.known_items())["u"] == (NEW_YEAR + MINUTE, NEW_YEAR + MINUTE)

    async def test_scheduler_handles_a_thousand_items(self, harness: SchedulerHarness) -> None:
        scheduler = harness.scheduler("\n".join(f"* * * * * t ?id=i{n}" for n in range(1000)))
        for n in range(3):
            await harness.tick_at(scheduler, NEW_YEAR + n * MINUTE)
        assert len(await harness.jobs()) == 3000


class TestBackfilling:
    async def test_new_item_is_registered_without_a_backfill(self, harness: SchedulerHarness) -> None:
        start = NEW_YEAR + timedelta(hours=5, seconds=7)
        await harness.tick_at(harness.scheduler("0 */4 * * * t ?fill=1d"), start)
        assert await harness.known_items() == {"t": (start, None)}
        assert await harness.jobs() == []

    @pytest.mark.parametrize(("hours", "filled"), [(5, [24]), (9, [20, 24]), (25, [4, 8, 12, 16, 20, 24])])
    async def test_backfill_starts_at_the_last_execution_within_its_period(
        self, harness: SchedulerHarness, hours: int, filled: list[int]
    ) -> None:
        start = NEW_YEAR + DAY + HOUR
        await harness.register_item("t", since=NEW_YEAR - 9 * DAY, last=start - hours * HOUR)
        recorder = EventRecorder()
        await harness.tick_at(harness.scheduler("0 */4 * * * t ?fill=1d", recorder=recorder), start)
        jobs = await harness.jobs()
        assert [job["run_at"] for job in jobs] == [NEW_YEAR + hour * HOUR for hour in filled]
        assert all(json.loads(job["payload"])["_cron"]["backfilled"] for job in jobs)
        assert (await harness.known_items())["t"][1] == NEW_YEAR + DAY
        timestamps = [event.timestamp for event in recorder.named("cron:backfill")]
        assert timestamps[-len(filled) :] == [NEW_YEAR + hour * HOUR for hour in filled]

    async def test_backfill_of_an_item_that_never_ran_starts_at_known_since(
        self, harness: SchedulerHarness
    ) -> None:
        await harness.register_item("t", since=NEW_YEAR + 2 * HOUR)
        await harness.tick_at(harness.scheduler("0 * * * * t ?fill=1w"), NEW_YEAR + 4 * HOUR + MINUTE)
        assert await harness.run_times() == [NEW_YEAR + n * HOUR for n in (2, 3, 4)]

    async def test_backfill_periods_are_per_item_and_jobs_are_added_in_time_order(
        self, harness: SchedulerHarness
    ) -> None:
        for name in "abc":
            await harness.register_item(name, since=NEW_YEAR)
        crontab = "0 * * * * a ?fill=3h\n30 * * * * b ?fill=2h\n0 * * * * c"
        await harness.tick_at(harness.scheduler(crontab), NEW_YEAR + 5 * HOUR + MINUTE)
        jobs = sorted(await harness.jobs(), key=lambda job: job["id"])
        assert [(job["identifier"], job["run_at"] - NEW_YEAR) for job in jobs] == [
            *(("a", 3 * HOUR), ("b", 3.5 * HOUR), ("a", 4 * HOUR), ("b", 4.5 * HOUR), ("a", 5 * HOUR)),
        ]

    async def test_minute_of_the_start_is_not_backfilled(self, harness: SchedulerHarness) -> None:
        await harness.register_item("t", since=NEW_YEAR)
        await harness.tick_at(harness.scheduler("* * * * * t ?fill=1h"), NEW_YEAR + 2 * MINUTE)
        jobs = await harness.jobs()
        assert [json.loads(job["payload"])["_cron"]["backfilled"] for job in jobs] == [True, True, False]

    async def test_failing_backfill_does_not_move_the_start(self, harness: SchedulerHarness) -> None:
        await harness.register_item("t", since=NEW_YEAR)
        await harness.db.execute(
            "alter table graphile_worker._private_jobs add constraint no check (task_id < 0)"
        )
        scheduler = harness.scheduler("* * * * * t ?fill=1h\n* * * * * u")
        for n in range(2, 5):
            await harness.tick_at(scheduler, NEW_YEAR + n * MINUTE)
        await harness.db.execute("alter table graphile_worker._private_jobs drop constraint no")
        await scheduler.tick()
        jobs = await harness.jobs()
        assert [job["run_at"] - NEW_YEAR for job in jobs if job["identifier"] == "u"] == [
            n * MINUTE for n in (2, 3, 4)
        ]
        assert [job["run_at"] - NEW_YEAR for job in jobs if job["identifier"] == "t"] == [
            n * MINUTE for n in range(5)
        ]

    async def test_backfill_adds_thousands_of_minutes_in_few_statements(
        self, harness: SchedulerHarness
    ) -> None:
        names = [f"i{n}" for n in range(10)]
        for name in names:
            await harness.register_item(name, since=NEW_YEAR)
        lines = [f"* * * * * t ?id={name}&fill=1w" for name in names]
        await harness.db.execute("""
            create sequence inserts;
            create function count_it() returns trigger language plpgsql as
              $$ begin perform nextval('public.inserts'); return null; end $$;
            create trigger count_it after insert on graphile_worker._private_jobs
              for each statement execute function count_it();
        """)
        await harness.tick_at(harness.scheduler("\n".join(lines)), NEW_YEAR + DAY)
        rows = await harness.db.fetch(
            """select count(*), count(distinct run_at), bool_and(payload::text like '%"backfilled":true%')
            from graphile_worker._private_jobs where run_at < $1""",
            NEW_YEAR + DAY,
        )
        assert [tuple(row) for row in rows] == [(10 * 1440, 1440, True)]
        transactions = "select count(distinct xmin::text) from graphile_worker._private_jobs"
        assert await harness.db.fetchval(transactions) == 4, (
            "three transactions of up to 5,000 jobs, and one for the current minute"
        )
        assert await harness.db.fetchval("select last_value from inserts") <= 8

    @pytest.mark.parametrize(
        ("mode", "run_at"), [("replace", NEW_YEAR + HOUR), ("preserve_run_at", NEW_YEAR)]
    )
    async def test_backfill_with_a_job_key_leaves_one_job(
        self, harness: SchedulerHarness, mode: str, run_at: datetime
    ) -> None:
        await harness.register_item("t", since=NEW_YEAR)
        scheduler = harness.scheduler(f"* * * * * t ?fill=1d&jobKey=k&jobKeyMode={mode}")
        await harness.tick_at(scheduler, NEW_YEAR + HOUR + timedelta(seconds=1))
        [job] = await harness.jobs()
        assert (job["run_at"], json.loads(job["payload"])["_cron"]["ts"]) == (
            run_at,
            "2021-01-01T01:00:00.000Z",
        )

    async def test_backfill_leaves_a_running_job_with_the_same_key_alone(
        self, harness: SchedulerHarness
    ) -> None:
        await harness.register_item("t", since=NEW_YEAR)
        await harness.db.execute("select graphile_worker.add_job('t', '{}', job_key := 'k')")
        await harness.db.execute(
            "update graphile_worker._private_jobs set locked_at = now(), locked_by = 'w'"
        )
        await harness.tick_at(harness.scheduler("* * * * * t ?fill=1d&jobKey=k"), NEW_YEAR + HOUR)
        assert sorted((job["key"] or "", job["payload"][:4]) for job in await harness.jobs()) == [
            ("", "{}"),
            ("k", '{"_c'),
        ]

    async def test_scheduler_stops_during_a_backfill(self, harness: SchedulerHarness) -> None:
        await harness.register_item("t", since=NEW_YEAR)
        scheduler = harness.scheduler("* * * * * t ?fill=1000w")
        harness.clock.time = NEW_YEAR + 90 * DAY
        scheduler.start()
        count = "select count(*) from graphile_worker._private_jobs"
        await until(lambda: harness.db.fetchval(count), "some jobs are added")
        async with asyncio.timeout(10):
            await scheduler.stop()
        [(added, last)] = await harness.db.fetch(
            f"""select ({count}), last_execution from graphile_worker._private_known_crontabs
            where identifier = 't'"""
        )
        assert added < 90 * 1440
        assert last == NEW_YEAR + (added - 1) * MINUTE, "last_execution must match the jobs added"

    async def test_backfill_period_may_be_huge(self, harness: SchedulerHarness) -> None:
        await harness.register_item("t", since=NEW_YEAR)
        await harness.tick_at(
            harness.scheduler("0 * * * * t ?fill=99999999999999w"), NEW_YEAR + HOUR + MINUTE
        )
        assert len(await harness.jobs()) == 2


class TestSeveralSchedulers:
    async def test_concurrent_schedulers_add_each_minute_once(self, harness: SchedulerHarness) -> None:
        crontab = "* * * * * a\n*/2 * * * * b\n* * * * * c ?jobKey=c"
        schedulers = [harness.scheduler(crontab) for _ in range(4)]
        for n in range(5):
            harness.clock.time = NEW_YEAR + n * MINUTE
            await asyncio.gather(*(scheduler.tick() for scheduler in schedulers))
        jobs = await harness.jobs()
        assert sorted((job["identifier"], (job["run_at"] - NEW_YEAR) // MINUTE) for job in jobs) == [
            *(("a", n) for n in range(5)),
            *(("b", n) for n in (0, 2, 4)),
            ("c", 4),
        ]

    async def test_only_the_scheduler_that_added_jobs_emits_scheduled(
        self, harness: SchedulerHarness
    ) -> None:
        recorders = [EventRecorder(), EventRecorder()]
        schedulers = [harness.scheduler("* * * * * t", recorder=recorder) for recorder in recorders]
        for scheduler in schedulers:
            await harness.tick_at(scheduler, NEW_YEAR)
        assert [recorder.counts["cron:schedule"] for recorder in recorders] == [1, 1]
        assert [recorder.counts["cron:scheduled"] for recorder in recorders] == [1, 0]

    async def test_schedulers_with_different_item_orders_do_not_deadlock(
        self, harness: SchedulerHarness
    ) -> None:
        lines = [f"* * * * * t ?id=i{n}" for n in range(50)]
        one, other = harness.scheduler("\n".join(lines)), harness.scheduler("\n".join(reversed(lines)))
        for n in range(5):
            harness.clock.time = NEW_YEAR + n * MINUTE
            await asyncio.gather(one.tick(), other.tick())
            await asyncio.gather(one.tick(), other.tick())  # One of them may have to retry.
        assert len(await harness.jobs()) == 250


class TestOverlap:
    def items(self) -> list[CronItem]:
        return [CronItem("t", "* * * * *", overlap="skip")]

    async def test_overlap_skip_adds_no_job_while_the_previous_one_waits_or_runs(
        self, harness: SchedulerHarness
    ) -> None:
        scheduler = harness.scheduler(self.items())
        await harness.tick_at(scheduler, NEW_YEAR)
        await harness.tick_at(scheduler, NEW_YEAR + MINUTE)
        assert await harness.run_times() == [NEW_YEAR], "the previous job is waiting"
        await harness.db.execute(
            "update graphile_worker._private_jobs set locked_at = now(), locked_by = 'w'"
        )
        await harness.tick_at(scheduler, NEW_YEAR + 2 * MINUTE)
        assert await harness.run_times() == [NEW_YEAR], "the previous job is running"
        await harness.db.execute(
            "update graphile_worker._private_jobs set locked_at = null, locked_by = null, attempts = 1"
        )
        await harness.tick_at(scheduler, NEW_YEAR + 3 * MINUTE)
        assert await harness.run_times() == [NEW_YEAR], "the previous job waits for its second attempt"
        assert (await harness.known_items())["t"][1] == NEW_YEAR + 3 * MINUTE, (
            "skipped minutes must count as done"
        )
        await harness.db.execute("delete from graphile_worker._private_jobs")
        await harness.tick_at(scheduler, NEW_YEAR + 4 * MINUTE)
        assert await harness.run_times() == [NEW_YEAR + 4 * MINUTE]

    async def test_overlap_skip_ignores_permanently_failed_jobs(self, harness: SchedulerHarness) -> None:
        scheduler = harness.scheduler(self.items())
        await harness.tick_at(scheduler, NEW_YEAR)
        await harness.db.execute(
            "update graphile_worker._private_jobs set attempts = max_attempts, last_error = 'oh no'"
        )
        await harness.tick_at(scheduler, NEW_YEAR + MINUTE)
        assert await harness.run_times() == [NEW_YEAR, NEW_YEAR + MINUTE]
        failed = "select last_error from graphile_worker._private_jobs where attempts = max_attempts"
        assert await harness.db.fetchval(failed) == "oh no", "the failed job must stay for inspection"

    async def test_overlap_skip_adds_one_job_when_catching_up(self, harness: SchedulerHarness) -> None:
        scheduler = harness.scheduler([*self.items(), CronItem("u", "* * * * *")])
        await harness.tick_at(scheduler, NEW_YEAR)
        await harness.db.execute("delete from graphile_worker._private_jobs")
        await harness.tick_at(scheduler, NEW_YEAR + 10 * MINUTE)
        jobs = await harness.jobs()
        assert [job["run_at"] for job in jobs if job["identifier"] == "t"] == [NEW_YEAR + MINUTE]
        assert len([job for job in jobs if job["identifier"] == "u"]) == 10

    async def test_overlap_skip_works_with_a_very_long_identifier(self, harness: SchedulerHarness) -> None:
        scheduler = harness.scheduler([CronItem("t", "* * * * *", identifier="i" * 600, overlap="skip")])
        await harness.tick_at(scheduler, NEW_YEAR)
        await harness.tick_at(scheduler, NEW_YEAR + MINUTE)
        assert len(await harness.jobs()) == 1


class TestCronInAWorker:
    async def test_worker_schedules_and_runs_cron_jobs(self, database: str) -> None:
        done = asyncio.Event()

        async def task(_payload: Any, _ctx: Any) -> None:
            done.set()

        recorder, minutes = EventRecorder(), list[datetime]()
        items = [CronItem("task", lambda at: at in minutes)]
        async with running({"task": task}, database, recorder=recorder, cron_items=items) as runner:
            started = await recorder.until("cron:started")
            scheduler = runner._parts._scheduler
            assert scheduler is not None
            # The current minute. If it is over by now, the next minute has no job.
            minutes.append(started.start.replace(second=0, microsecond=0))
            async with asyncio.timeout(20):
                while not done.is_set():  # A tick in progress may overwrite _next.
                    scheduler._next = minutes[0]
                    scheduler.wake()
                    await asyncio.sleep(0.05)
            await recorder.until("cron:scheduled")
        assert recorder.counts["cron:scheduled"] == 1

    async def test_middleware_changes_and_drops_cron_jobs(self, harness: SchedulerHarness) -> None:
        class SetsPriority(Middleware):
            async def enqueue(self, specs: Sequence[JobSpec], proceed: Any) -> Any:
                return await proceed([spec.replace(priority=7) for spec in specs if spec.identifier != "u"])

        scheduler = harness.scheduler("* * * * * t\n* * * * * u\n* * * * * v", middleware=[SetsPriority()])
        await harness.tick_at(scheduler, NEW_YEAR)
        assert [(job["identifier"], job["priority"]) for job in await harness.jobs()] == [("t", 7), ("v", 7)]

    async def test_middleware_of_an_app_applies_to_its_crontab(
        self, harness: SchedulerHarness, database: str
    ) -> None:
        class SetsPriority(Middleware):
            async def enqueue(self, specs: Sequence[JobSpec], proceed: Any) -> Any:
                return await proceed([spec.replace(priority=7) for spec in specs])

        # The worker adds the jobs of missed minutes when it starts.
        past = datetime.now(UTC).replace(second=0, microsecond=0) - 5 * MINUTE
        await harness.register_item("t", since=past - MINUTE, last=past)
        app = App(database, middleware=[SetsPriority()], crontab="* * * * * t ?fill=1h")
        app.task("another")(nothing)
        started = asyncio.Event()
        app.events.on("cron:started", lambda _event: started.set())
        async with asyncio.timeout(60), app, app.running():
            await started.wait()
        jobs = await harness.jobs()
        assert len(jobs) >= 4
        assert {job["priority"] for job in jobs} == {7}

    async def test_item_rejected_by_middleware_is_logged_and_does_not_affect_others(
        self, harness: SchedulerHarness, caplog: pytest.LogCaptureFixture
    ) -> None:
        class RejectsTaskU(Middleware):
            async def enqueue(self, specs: Sequence[JobSpec], proceed: Any) -> Any:
                if any(spec.identifier == "u" for spec in specs):
                    raise RuntimeError("not this one")
                return await proceed()

        scheduler = harness.scheduler("* * * * * t\n* * * * * u\n* * * * * v", middleware=[RejectsTaskU()])
        await harness.tick_at(scheduler, NEW_YEAR)
        assert [job["identifier"] for job in await harness.jobs()] == ["t", "v"]
        assert "Cannot add the jobs of the cron item 'u': not this one" in caplog.text
        await harness.tick_at(scheduler, NEW_YEAR + MINUTE)
        assert len(await harness.jobs()) == 4
        RejectsTaskU.enqueue = Middleware.enqueue  # type: ignore[method-assign]
        await harness.tick_at(scheduler, NEW_YEAR + 2 * MINUTE)
        assert [job["identifier"] for job in await harness.jobs()].count("u") == 3

    async def test_item_refused_by_a_trigger_is_added_later_and_does_not_affect_others(
        self, harness: SchedulerHarness
    ) -> None:
        await harness.db.execute("""
            create function refuse() returns trigger language plpgsql as $$
            begin
              if new.payload ->> 'a' = 'b' then raise exception 'not this one'; end if;
              return new;
            end $$;
            create trigger refuse before insert on graphile_worker._private_jobs
              for each row execute function refuse();
        """)
        scheduler = harness.scheduler("* * * * * t\n* * * * * u {a: 'b'}")
        for n in range(3):
            await harness.tick_at(scheduler, NEW_YEAR + n * MINUTE)
        assert await harness.run_times() == [NEW_YEAR + n * MINUTE for n in range(3)]
        await harness.db.execute("drop trigger refuse on graphile_worker._private_jobs")
        await harness.tick_at(scheduler, NEW_YEAR + 2 * MINUTE)
        assert await harness.run_times() == [NEW_YEAR + n * MINUTE for n in range(3) for _ in "tu"]

    async def test_refused_minutes_are_added_after_the_clock_went_back(
        self, harness: SchedulerHarness
    ) -> None:
        scheduler = harness.scheduler("* * * * * t")
        await harness.db.execute(
            "alter table graphile_worker._private_jobs add constraint no check (task_id < 0)"
        )
        for n in (1, 2):
            await harness.tick_at(scheduler, NEW_YEAR + n * MINUTE)
        await harness.db.execute("alter table graphile_worker._private_jobs drop constraint no")
        for n in (0, 1, 3):
            await harness.tick_at(scheduler, NEW_YEAR + n * MINUTE)
        assert await harness.run_times() == [NEW_YEAR + n * MINUTE for n in (1, 2, 3)]

    async def test_schedule_function_that_fails_once_loses_only_that_minute(
        self, harness: SchedulerHarness
    ) -> None:
        def fails_once(at: datetime) -> bool:
            if at.minute == 2:
                raise ValueError("oh no")
            return True

        scheduler = harness.scheduler([CronItem("t", fails_once)])
        await harness.tick_at(scheduler, NEW_YEAR)
        await harness.tick_at(scheduler, NEW_YEAR + 5 * MINUTE)
        assert await harness.run_times() == [NEW_YEAR + n * MINUTE for n in (0, 1, 3, 4, 5)]

    async def test_schedule_function_that_always_fails_is_logged_once(
        self, harness: SchedulerHarness, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(_at: datetime) -> bool:
            raise ValueError("oh no")

        await harness.register_item("t", since=NEW_YEAR)
        await harness.tick_at(
            harness.scheduler([CronItem("t", broken, backfill="1d")]), NEW_YEAR + DAY + timedelta(seconds=1)
        )
        [warning] = [record.message for record in caplog.records if "match function" in record.message]
        assert "cron item 't'" in warning
        assert "1,440 minutes" in warning
        assert "oh no" in warning

    @pytest.mark.parametrize("local", [False, True])
    async def test_scheduler_uses_the_database_time_unless_use_local_time_is_set(
        self, database: str, monkeypatch: pytest.MonkeyPatch, *, local: bool
    ) -> None:
        class Ahead(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
                return datetime.now(tz) + 3 * DAY

        monkeypatch.setattr(clock, "datetime", Ahead)
        recorder = EventRecorder()
        async with running(
            {"t": nothing}, database, recorder=recorder, crontab="* * * * * t", use_local_time=local
        ):
            started = await recorder.until("cron:started")
        assert abs(started.start - datetime.now(UTC) - (3 * DAY if local else 0 * DAY)) < HOUR

    async def test_step_of_the_local_clock_adds_no_minute_early(
        self, harness: SchedulerHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stepped = timedelta(0)

        class Stepped(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
                return datetime.now(tz) + stepped

        monkeypatch.setattr(clock, "datetime", Stepped)
        scheduler = harness.scheduler("* * * * * t", clock=Clock(local=False))
        await scheduler.tick()
        stepped = HOUR
        await scheduler.tick()
        assert not [at for at in await harness.run_times() if at > datetime.now(UTC)]
        assert scheduler._next is not None
        assert scheduler._next < datetime.now(UTC) + 2 * MINUTE

    async def test_scheduler_checks_the_database_time_before_it_adds_a_minute(
        self, harness: SchedulerHarness
    ) -> None:
        """The clock of the server may be behind, for example after a failover."""
        estimate = Clock(local=False)
        scheduler = harness.scheduler("* * * * * t", clock=estimate)
        await scheduler.tick()
        estimate.observe(datetime.now(UTC) + HOUR)
        assert await scheduler.tick() <= 10
        assert not [at for at in await harness.run_times() if at > datetime.now(UTC)]

    async def test_scheduler_with_local_time_follows_the_local_clock(
        self, harness: SchedulerHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ahead = 3 * DAY

        class Ahead(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
                return datetime.now(tz) + ahead

        monkeypatch.setattr(clock, "datetime", Ahead)
        scheduler = harness.scheduler("* * * * * t", clock=Clock(local=True))
        await scheduler.tick()
        ahead += 2 * MINUTE
        await scheduler.tick()
        times = await harness.run_times()
        assert len(times) >= 2
        assert min(times) > datetime.now(UTC) + 2 * DAY

    async def test_run_once_never_adds_cron_jobs(self, database: str, db: asyncpg.Connection) -> None:
        app = App(database)

        @app.cron("* * * * *")
        @app.task
        async def t() -> None: ...

        await app.run_once()
        await run_once({"t": nothing}, database)
        with pytest.raises(ConfigurationError, match="cron_items"):
            await run_once({"t": nothing}, database, cron_items=[])  # type: ignore[call-arg]
        assert await db.fetchval("select count(*) from graphile_worker._private_known_crontabs") == 0
        await app.close()

    async def test_cron_item_of_an_unknown_task_is_logged(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        lines = ["other", "t", *(f"many ?id=i{number}" for number in range(7))]
        async with running({"t": nothing}, database, crontab="".join(f"* * * * * {one}\n" for one in lines)):
            pass
        many, one = [record.message for record in caplog.records if "cron item" in record.message]
        assert one.count("'other'") == 2, "the item and its task"
        assert re.search("'i0', 'i1', 'i2', 'i3', 'i4' and 2 more .*'many'", many)

    async def test_cron_item_with_an_invalid_payload_is_logged(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        @task
        async def hello(name: str) -> None: ...

        @task(job_key=lambda: str(1 / 0))  # Jobs from a crontab do not get this key.
        async def keyed() -> None: ...

        crontab = '* * * * * hello ?id=bad\n* * * * * hello ?id=good {name: "Ann"}\n* * * * * keyed\n'
        async with running({"hello": hello, "keyed": keyed}, database, crontab=crontab):
            pass
        [warning] = [record.message for record in caplog.records if "cron item" in record.message]
        assert re.search("'bad'.*missing a required argument: 'name'", warning)

    @pytest.mark.parametrize(
        "options",
        [
            {"crontab": "", "crontab_file": "crontab"},
            {"crontab": "", "cron_items": []},
            {"crontab_file": "crontab", "cron_items": []},
        ],
    )
    async def test_crontab_sources_are_mutually_exclusive(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match=r"crontab, crontab_file .*cron_items"):
            await run({"t": nothing}, "postgresql://localhost:1/x", **options)

    async def test_invalid_crontab_options_are_rejected_at_startup(self) -> None:
        with pytest.raises(ConfigurationError, match=r"crontab:1:14: the option 'max' .*from 1 to 32767"):
            await run({"t": nothing}, "postgresql://localhost:1/x", crontab="* * * * * t ?max=0")


class TestCronDecorator:
    def test_cron_decorator_declares_items_with_task_options(self) -> None:
        app = App()

        @app.cron("0 8 * * *", payload={"copies": 2}, backfill="2h", tz="Europe/Paris")
        @app.cron("@hourly", identifier="often", priority=5, overlap="skip")
        @app.task(queue_name="reports", max_attempts=3, flags=["slow"], job_key="report:{copies}")
        async def report(copies: int = 1) -> None: ...

        assert app.cron.items == [
            CronItem(
                *("report", "@hourly", "often", {}),
                queue_name="reports",
                max_attempts=3,
                priority=5,
                overlap="skip",
                flags=["slow"],
            ),
            CronItem(
                *("report", "0 8 * * *", "report", {"copies": 2}, 2 * HOUR),
                queue_name="reports",
                max_attempts=3,
                job_key="report:2",
                flags=["slow"],
                tz="Europe/Paris",
            ),
        ]
        assert report.identifier == "report"

    def test_cron_decorator_rejects_invalid_items(self) -> None:
        app = App()

        @app.task
        async def report(copies: int) -> None: ...

        with pytest.raises(ConfigurationError, match=r"@app\.cron needs a pattern"):
            app.cron(report)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=r"'backfil'.*backfill\?"):
            app.cron("0 8 * * *", backfil="1h")  # type: ignore[call-arg]
        for arguments, message in [
            ({"payload": {"copies": "two"}}, r"'report': Invalid arguments for task 'report': .*copies"),
            ({}, r"'report': Invalid arguments for task 'report': .*copies"),
            ({"payload": {"copies": 1}, "tz": "Mars"}, "'Mars'"),
            ({"payload": {"copies": 1}, "backfill": "soon"}, "'soon'"),
            ({"payload": {"copies": 1}, "run_at": HOUR}, "'run_at'"),
        ]:
            with pytest.raises(ConfigurationError, match=message):
                app.cron("0 8 * * *", **arguments)(report)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=r"above @app\.task"):
            app.cron("0 8 * * *")(print)
        with pytest.raises(ConfigurationError, match="'8 o'"):
            app.cron("8 o", payload={"copies": 1})(report)
        app.cron("0 8 * * *", payload={"copies": 1})(report)
        with pytest.raises(ConfigurationError, match="identifier 'report'"):
            app.cron("0 9 * * *", payload={"copies": 1})(report)

    async def test_workers_of_an_app_schedule_declared_and_given_items(self, database: str) -> None:
        app = App(database, crontab="0 7 * * * report ?id=early")

        @app.cron("0 8 * * *")
        @app.task
        async def report() -> None: ...

        async with app.running(crontab="0 9 * * * report ?id=later"):
            known: dict[str, Any] = {}
            async with asyncio.timeout(20):
                while len(known) < 3:
                    known = await app.utils.known_crontabs()
        assert sorted(known) == ["early", "later", "report"]
        with pytest.raises(ConfigurationError, match="identifier 'report'"):
            await app.run(crontab="0 9 * * * report")
        await app.close()

    def test_app_takes_its_crontab_as_text_file_or_items(self, tmp_path: Path) -> None:
        path = tmp_path / "crontab"
        item = CronItem("report", "0 8 * * *")
        from_file = App(
            crontab_file=path
        )  # Read when needed: a program that only adds jobs need not have it.
        with pytest.raises(ConfigurationError, match="cannot be read"):
            _ = from_file.cron_items
        path.write_text("0 8 * * * report")
        for app in (from_file, App(crontab="0 8 * * * report"), App(cron_items=[item])):
            assert app.cron_items == [item]
            assert app._sets("crontab")
        assert not App()._sets("crontab")
        with pytest.raises(CrontabError, match="minute '60'"):
            App(crontab="60 * * * * report")
        with pytest.raises(ConfigurationError, match="cron_items"):
            App(crontab_file=path, crontab="")
        with pytest.raises(ConfigurationError, match="cron_items"):
            App(crontab_file=path, cron_items=[])


FAULTS = """
  create table fault (kind text);
  insert into fault values ('none');
  create function inject_fault() returns trigger language plpgsql as $$
  declare kind text := (select fault.kind from public.fault);
  begin
    if kind = 'full' and tg_when = 'BEFORE' then raise disk_full; end if;
    if kind = 'refused' and tg_when = 'BEFORE' then raise check_violation; end if;
    if kind = 'lost' and tg_when = 'BEFORE' then perform pg_terminate_backend(pg_backend_pid()); end if;
    if kind = 'commit' and tg_when = 'AFTER' then raise disk_full; end if;
    return new;
  end $$;
  create trigger before_it before insert or update on graphile_worker._private_jobs
    for each row execute function inject_fault();
  create constraint trigger at_commit after insert or update on graphile_worker._private_jobs
    deferrable initially deferred for each row execute function inject_fault();
"""
"""Faults to inject: failing statements, refused jobs, lost connections and failing commits."""
KILL_SESSIONS = """
  select pg_terminate_backend(pid) from pg_stat_activity
  where datname = current_database() and pid <> pg_backend_pid()
"""


async def tick_with_random_faults(
    rng: random.Random, db: asyncpg.Connection, schedulers: list[tuple[Scheduler, SetClock]], now: datetime
) -> None:
    """Tick most of the schedulers at about the same time, and cancel some of the ticks."""
    kind = rng.choice(["none"] * 6 + ["full", "refused", "lost", "commit"])
    await db.execute("update fault set kind = $1", kind)
    ticks = []
    for scheduler, own in schedulers:
        if rng.random() < 0.8:
            own.time = now + timedelta(seconds=rng.randrange(-90, 5))
            ticks.append(asyncio.create_task(scheduler.tick()))
    for tick in ticks:
        if rng.random() < 0.3:
            for _ in range(rng.randrange(30)):
                await asyncio.sleep(0)
            tick.cancel()
    if rng.random() < 0.15:
        await db.execute(KILL_SESSIONS)
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*ticks)
    await asyncio.wait(ticks) if ticks else None


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 15))])
async def test_two_schedulers_add_each_minute_once_under_random_pauses_and_failures(
    databases: Databases, seed: int
) -> None:
    """No minute is added twice and, with fill, none is left out."""
    rng = random.Random(seed)
    async with databases.fresh() as dsn:
        db = await asyncpg.connect(dsn)
        pool = Pool(dsn, max_size=4)
        session = Session(Schema(), pool, logging.getLogger("test"))
        harness = SchedulerHarness(session, db)
        crontab = "* * * * * a ?fill=1d\n*/3 * * * * b ?fill=1d\n1,4 * * * * c ?fill=1d"
        items = parse_crontab(crontab)
        await crontabs.register(db, Schema(), ["a", "b", "c"], NEW_YEAR)
        await db.execute(FAULTS)
        schedulers: list[tuple[Scheduler, SetClock]] = []
        now = NEW_YEAR + 2 * MINUTE
        try:
            for _ in range(25):
                now += timedelta(seconds=rng.randrange(200))
                while len(schedulers) < 2:  # A restarted worker has no state in memory.
                    own = SetClock(now)
                    schedulers.append((harness.scheduler(items, clock=own), own))
                await tick_with_random_faults(rng, db, schedulers, now)
                if rng.random() < 0.2:
                    schedulers.pop(rng.randrange(2))
            await db.execute("update fault set kind = 'none'")
            last = harness.scheduler(items, clock=SetClock(now + timedelta(seconds=10)))
            await last.tick()
            while last._failed_ticks:  # Its connection had been terminated by KILL_SESSIONS.
                await last.tick()
            added = sorted((job["identifier"], job["run_at"]) for job in await harness.jobs())
            begin = NEW_YEAR - MINUTE
            assert added == sorted(
                (item.identifier, at)
                for item in items
                for at in item.occurrences(begin, now + timedelta(seconds=10))
            )
        finally:
            await pool.close()
            await db.close()
