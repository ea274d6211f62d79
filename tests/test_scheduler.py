"""Jobs of recurring tasks: each minute once, whatever happens."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from contextlib import suppress
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
from graphile_worker._db import crontabs
from graphile_worker._db.connect import Pool
from graphile_worker._db.session import Session
from graphile_worker._db.sql import Schema
from graphile_worker._runtime import clock
from graphile_worker._runtime.clock import Clock
from graphile_worker._runtime.scheduler import Scheduler
from graphile_worker.events import WorkerPool
from graphile_worker.logs import ScopedLogger
from graphile_worker.specs import Specs
from graphile_worker.testing import Databases
from support.waiting import until
from support.workers import Heard, nothing, running

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
    """A clock that a test sets; the database is not asked."""

    def __init__(self, now: datetime) -> None:
        super().__init__(local=True)
        self.time = now

    def now(self) -> datetime:
        return self.time


class Desk:
    """Schedulers on one database, by hand."""

    def __init__(self, session: Session, db: asyncpg.Connection) -> None:
        self.session = session
        self.db = db
        self.clock = SetClock(NEW_YEAR)

    def scheduler(
        self,
        crontab: str | list[CronItem],
        *,
        clock: Clock | None = None,
        heard: Heard | None = None,
        session: Session | None = None,
        middleware: Sequence[Middleware] = (),
    ) -> Scheduler:
        items = parse_crontab(crontab) if isinstance(crontab, str) else crontab
        return Scheduler(
            pool=WorkerPool("w", "graphile_worker", 1, ("t",)),
            items=parse_cron_items(items),
            session=session or self.session,
            utils=WorkerUtils.on_session(
                session or self.session, use_local_time=False, middleware=middleware
            ),
            specs=Specs({}),
            clock=clock or self.clock,
            events=heard.events if heard else Events(),
            logger=ScopedLogger(logging.getLogger("graphile_worker"), {}),
        )

    async def know(self, identifier: str, *, since: datetime, last: datetime | None = None) -> None:
        await self.db.execute(
            "insert into graphile_worker._private_known_crontabs values ($1, $2, $3)", identifier, since, last
        )

    async def known(self) -> dict[str, tuple[datetime, datetime | None]]:
        rows = await self.db.fetch(
            "select * from graphile_worker._private_known_crontabs order by identifier"
        )
        return {row["identifier"]: (row["known_since"], row["last_execution"]) for row in rows}

    async def jobs(self) -> list[asyncpg.Record]:
        return await self.db.fetch(JOBS)

    async def times(self) -> list[datetime]:
        return [row["run_at"] for row in await self.jobs()]

    async def at(self, scheduler: Scheduler, moment: datetime) -> None:
        self.clock.time = moment
        await scheduler.tick()


@pytest.fixture
async def session(database: str) -> AsyncIterator[Session]:
    pool = Pool(database, max_size=4)
    yield Session(Schema(), pool, logging.getLogger("graphile_worker"))
    await pool.close()


@pytest.fixture
def desk(session: Session, db: asyncpg.Connection) -> Desk:
    return Desk(session, db)


class TestOnTime:
    async def test_nothing_before_the_minute_and_one_job_in_it(self, desk: Desk) -> None:
        heard = Heard()
        scheduler = desk.scheduler("0 */4 * * * t", heard=heard)
        await desk.at(scheduler, NEW_YEAR + HOUR)
        await desk.at(scheduler, NEW_YEAR + 3 * HOUR + timedelta(seconds=1))
        assert await desk.jobs() == []
        assert "cron:schedule" not in heard.names

        four = NEW_YEAR + 4 * HOUR
        await desk.at(scheduler, four + timedelta(seconds=1))
        for name in ("cron:schedule", "cron:scheduled"):
            [told] = heard.named(name)
            [(identifier, job)] = told.jobs_and_identifiers
            assert (told.timestamp, identifier, job.identifier) == (four, "t", "t")
        [job] = await desk.jobs()
        assert (job["identifier"], job["run_at"]) == ("t", four)
        assert json.loads(job["payload"]) == {
            "_cron": {"ts": "2021-01-01T04:00:00.000Z", "backfilled": False}
        }
        assert heard.names[:2] == ["cron:starting", "cron:started"]

    async def test_the_clock_goes_back_and_nothing_is_added_again(self, desk: Desk) -> None:
        scheduler = desk.scheduler("0 */4 * * * t")
        for hour in (1, 4, 3, 4, 3, 4):
            await desk.at(scheduler, NEW_YEAR + hour * HOUR)
        assert len(await desk.jobs()) == 1

    async def test_a_clock_that_is_set_back_again_and_again_does_not_hasten_it(self, desk: Desk) -> None:
        heard = Heard()
        scheduler = desk.scheduler("0 4 * * * t", heard=heard)
        before = NEW_YEAR + 3 * HOUR + 59 * MINUTE
        for seconds in (0, 30, 0, 55, 0, 30, 55, 0):
            await desk.at(scheduler, before + timedelta(seconds=seconds))
        assert await desk.jobs() == []
        assert heard.counts["cron:prematureTimer"] == 2, "each time that it had waited for the very minute"
        await desk.at(scheduler, before + timedelta(seconds=61))
        assert len(await desk.jobs()) == 1

    async def test_a_clock_that_ran_ahead_once_is_told_of_with_what_to_do(
        self, desk: Desk, caplog: pytest.LogCaptureFixture
    ) -> None:
        await desk.know("t", since=NEW_YEAR, last=NEW_YEAR + 48 * HOUR)
        await desk.know("near", since=NEW_YEAR, last=NEW_YEAR + MINUTE)
        scheduler = desk.scheduler("* * * * * t\n* * * * * near")
        await desk.at(scheduler, NEW_YEAR)
        [said] = [one.getMessage() for one in caplog.records if "was a clock wrong?" in one.getMessage()]
        assert "added up to 2021-01-03 00:00 UTC already, and it is 2021-01-01 00:00 UTC" in said
        assert "Until then none is added of t. To have them from now on, set last_execution to now()" in said

        await desk.db.execute(
            "update graphile_worker._private_known_crontabs set last_execution = $1", NEW_YEAR
        )
        await desk.at(scheduler, NEW_YEAR + MINUTE)
        assert await desk.times() == [NEW_YEAR + MINUTE] * 2

    async def test_a_worker_that_waited_for_the_database_takes_nobody_for_ahead(
        self, desk: Desk, caplog: pytest.LogCaptureFixture
    ) -> None:
        await desk.know("t", since=NEW_YEAR - DAY, last=NEW_YEAR)
        scheduler = desk.scheduler("* * * * * t")
        scheduler._waits_since = monotonic() - 600
        await desk.at(scheduler, NEW_YEAR)
        assert "was a clock wrong?" not in caplog.text

    async def test_jobs_with_a_key_replace_each_other(self, desk: Desk) -> None:
        scheduler = desk.scheduler("0 */4 * * * t ?jobKey=foo")
        await desk.at(scheduler, NEW_YEAR + HOUR)
        await desk.at(scheduler, NEW_YEAR + 4 * HOUR)
        [first] = await desk.jobs()
        await desk.at(scheduler, NEW_YEAR + 8 * HOUR)
        [second] = await desk.jobs()
        assert (first["id"], first["key"]) == (second["id"], second["key"])
        assert '"ts":"2021-01-01T04:00:00.000Z"' in first["payload"]
        assert '"ts":"2021-01-01T08:00:00.000Z"' in second["payload"]

    async def test_all_that_is_said_of_a_job(self, desk: Desk) -> None:
        scheduler = desk.scheduler("* * * * * t ?id=i&queue=q&priority=-3&max=2&jobKey=k {a: 1, _cron: 2}")
        await desk.at(scheduler, NEW_YEAR)
        [job] = await desk.jobs()
        assert (job["queue_name"], job["priority"], job["max_attempts"], job["key"]) == ("q", -3, 2, "k")
        assert json.loads(job["payload"]) == {
            "a": 1,
            "_cron": {"ts": "2021-01-01T00:00:00.000Z", "backfilled": False},
        }
        assert await desk.known() == {"i": (NEW_YEAR, NEW_YEAR)}

    async def test_jobs_of_one_minute_are_added_in_the_order_of_the_crontab(self, desk: Desk) -> None:
        names = ["b", "d", "a", "c"]
        keyed = ["", "?jobKey=x", "", "?jobKey=y"]
        lines = [f"* * * * * {name} {key}" for name, key in zip(names, keyed, strict=True)]
        await desk.at(desk.scheduler("\n".join(lines)), NEW_YEAR)
        assert [job["identifier"] for job in await desk.jobs()] == names

    async def test_a_start_within_a_minute_waits_for_the_next(self, desk: Desk) -> None:
        scheduler = desk.scheduler("* * * * * t")
        desk.clock.time = NEW_YEAR + timedelta(seconds=52)
        delay = await scheduler.tick()
        assert await desk.jobs() == []
        assert delay == pytest.approx(8.001)
        desk.clock.time += timedelta(seconds=8)
        delay = await scheduler.tick()
        assert await desk.times() == [NEW_YEAR + MINUTE]
        assert delay == 10, "so that a change of the clock is noticed"

    async def test_time_zones_and_functions(self, desk: Desk) -> None:
        items = [
            CronItem("t", "0 8 * * *", tz="Europe/Paris"),
            CronItem("t", lambda at: at.minute == 30 and at.hour == 7, identifier="half"),
        ]
        scheduler = desk.scheduler(items)
        await desk.at(scheduler, NEW_YEAR)
        await desk.at(scheduler, NEW_YEAR + DAY)
        assert await desk.times() == [NEW_YEAR + 7 * HOUR, NEW_YEAR + 7 * HOUR + 30 * MINUTE]


class TestCatchingUp:
    async def test_a_late_wake_up_misses_nothing_and_is_no_backfill(self, desk: Desk) -> None:
        heard = Heard()
        scheduler = desk.scheduler("*/10 * * * * t\n* * * * * u ?jobKey=u", heard=heard)
        await desk.at(scheduler, NEW_YEAR)
        await desk.at(scheduler, NEW_YEAR + HOUR + timedelta(seconds=30))
        jobs = await desk.jobs()
        assert [job["run_at"] for job in jobs if job["identifier"] == "t"] == [
            NEW_YEAR + n * 10 * MINUTE for n in range(7)
        ]
        [kept] = [job for job in jobs if job["identifier"] == "u"]
        assert kept["run_at"] == NEW_YEAR + HOUR
        assert not any('"backfilled":true' in job["payload"] for job in jobs)
        [late] = heard.named("cron:overdueTimer")
        assert late.expected_timestamp == NEW_YEAR + MINUTE
        assert heard.counts["cron:schedule"] == 61
        assert heard.counts["cron:scheduled"] == 8, "what is replaced at once is not even added"

    async def test_a_suspended_laptop(self, desk: Desk) -> None:
        scheduler = desk.scheduler("0 8 * * * t")
        await desk.at(scheduler, NEW_YEAR + 12 * HOUR)
        await desk.at(scheduler, NEW_YEAR + 3 * DAY + 12 * HOUR)
        assert await desk.times() == [NEW_YEAR + n * DAY + 8 * HOUR for n in (1, 2, 3)]

    async def test_an_outage_of_an_hour(
        self, desk: Desk, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        pool = Pool(database, max_size=1)
        session = Session(Schema(), pool, logging.getLogger("graphile_worker"))
        scheduler = desk.scheduler("*/20 * * * * t", session=session)
        await desk.at(scheduler, NEW_YEAR + MINUTE)
        name = await desk.db.fetchval("select current_database()")
        admin = await asyncpg.connect(database, database="postgres")
        try:
            await admin.execute(f'alter database "{name}" allow_connections false')
            await admin.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = $1 and pid <> $2",
                name,
                await desk.db.fetchval("select pg_backend_pid()"),
            )
            for minutes in (20, 40, 60):
                desk.clock.time = NEW_YEAR + minutes * MINUTE
                assert 0 < await scheduler.tick() <= 10
        finally:
            await admin.execute(f'alter database "{name}" allow_connections true')
            await admin.close()
        await scheduler.tick()
        assert await desk.times() == [NEW_YEAR + n * MINUTE for n in (20, 40, 60)]
        said = [record.message for record in caplog.records if "recurring" in record.message]
        assert [message.split(":")[0] for message in said] == [
            "Jobs of recurring tasks cannot be added, but will be later",
            "Jobs of recurring tasks are added again",
        ]
        await pool.close()

    async def test_an_error_in_the_middle_of_a_tick_loses_no_minute(self, desk: Desk) -> None:
        scheduler = desk.scheduler("* * * * * t\n* * * * * u")
        await desk.at(scheduler, NEW_YEAR)
        await desk.db.execute(
            "alter table graphile_worker._private_jobs add constraint no check (task_id < 0) not valid"
        )
        for n in range(1, 4):
            await desk.at(scheduler, NEW_YEAR + n * MINUTE)
        assert len(await desk.jobs()) == 2
        assert {last for _, last in (await desk.known()).values()} == {NEW_YEAR}
        await desk.db.execute("alter table graphile_worker._private_jobs drop constraint no")
        await scheduler.tick()
        assert await desk.times() == [NEW_YEAR + n * MINUTE for n in range(4) for _ in "tu"]

    async def test_an_outage_does_not_make_it_forget_what_was_refused(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("_CHUNK", "_TURN"):
            monkeypatch.setattr(f"graphile_worker._runtime.scheduler.{name}", 4)
        scheduler = desk.scheduler("* * * * * t ?id=refused {no: true}\n* * * * * t ?id=good")
        await desk.at(scheduler, NEW_YEAR - HOUR)
        await desk.db.execute(
            """create function fail() returns trigger language plpgsql as $$ begin
              if new.run_at > '2020-12-31T23:02:00Z' then raise disk_full; end if;
              if new.payload::jsonb ? 'no' then raise check_violation; end if;
              return new;
            end $$;
            create trigger fail before insert on graphile_worker._private_jobs
            for each row execute function fail()"""
        )
        await desk.at(scheduler, NEW_YEAR - HOUR + 5 * MINUTE)
        assert await desk.times() == [NEW_YEAR - HOUR + n * MINUTE for n in (0, 0, 1, 2)]

        await desk.db.execute("drop function fail cascade")
        await desk.at(scheduler, NEW_YEAR - HOUR + 6 * MINUTE)
        assert await desk.times() == [NEW_YEAR - HOUR + n * MINUTE for n in range(7) for _ in range(2)]

    async def test_what_one_item_does_wrong_is_not_for_the_others_to_suffer(
        self, desk: Desk, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(_at: datetime) -> bool:
            raise ValueError("oh no")

        items = [
            CronItem("t", broken, identifier="broken"),
            CronItem("t", "* * * * *", identifier="unstorable", payload={"a": "\ufffe"}),
            CronItem("t", "* * * * *", identifier="good"),
        ]
        await desk.db.execute(
            """alter table graphile_worker._private_jobs
            add constraint no check ((payload ->> 'a') is null or (1 / (length(payload ->> 'a') - 1)) > 0)"""
        )
        scheduler = desk.scheduler(items)
        for n in range(3):
            await desk.at(scheduler, NEW_YEAR + n * MINUTE)
        assert await desk.times() == [NEW_YEAR + n * MINUTE for n in range(3)]
        messages = "\n".join(record.message for record in caplog.records)
        assert "The cron item 'broken' cannot say when it is due" in messages
        assert "No job of the cron item 'unstorable' is added, but will be later: The database" in messages

    async def test_a_schedule_that_was_deleted_is_known_again(self, desk: Desk) -> None:
        scheduler = desk.scheduler("* * * * * t\n* * * * * u")
        await desk.at(scheduler, NEW_YEAR)
        await desk.db.execute("delete from graphile_worker._private_known_crontabs where identifier = 'u'")
        await desk.at(scheduler, NEW_YEAR + MINUTE)
        assert len(await desk.jobs()) == 4
        assert (await desk.known())["u"] == (NEW_YEAR + MINUTE, NEW_YEAR + MINUTE)

    async def test_a_thousand_items(self, desk: Desk) -> None:
        scheduler = desk.scheduler("\n".join(f"* * * * * t ?id=i{n}" for n in range(1000)))
        for n in range(3):
            await desk.at(scheduler, NEW_YEAR + n * MINUTE)
        assert len(await desk.jobs()) == 3000


class TestBackfilling:
    async def test_a_new_schedule_is_written_down_and_not_filled(self, desk: Desk) -> None:
        start = NEW_YEAR + timedelta(hours=5, seconds=7)
        await desk.at(desk.scheduler("0 */4 * * * t ?fill=1d"), start)
        assert await desk.known() == {"t": (start, None)}
        assert await desk.jobs() == []

    @pytest.mark.parametrize(("hours", "filled"), [(5, [24]), (9, [20, 24]), (25, [4, 8, 12, 16, 20, 24])])
    async def test_from_the_last_run_but_no_longer_than_asked_for(
        self, desk: Desk, hours: int, filled: list[int]
    ) -> None:
        start = NEW_YEAR + DAY + HOUR
        await desk.know("t", since=NEW_YEAR - 9 * DAY, last=start - hours * HOUR)
        heard = Heard()
        await desk.at(desk.scheduler("0 */4 * * * t ?fill=1d", heard=heard), start)
        jobs = await desk.jobs()
        assert [job["run_at"] for job in jobs] == [NEW_YEAR + hour * HOUR for hour in filled]
        assert all(json.loads(job["payload"])["_cron"]["backfilled"] for job in jobs)
        assert (await desk.known())["t"][1] == NEW_YEAR + DAY
        told = [event.timestamp for event in heard.named("cron:backfill")]
        assert told[-len(filled) :] == [NEW_YEAR + hour * HOUR for hour in filled]

    async def test_from_when_it_was_known_if_it_never_ran(self, desk: Desk) -> None:
        await desk.know("t", since=NEW_YEAR + 2 * HOUR)
        await desk.at(desk.scheduler("0 * * * * t ?fill=1w"), NEW_YEAR + 4 * HOUR + MINUTE)
        assert await desk.times() == [NEW_YEAR + n * HOUR for n in (2, 3, 4)]

    async def test_each_item_has_its_own_window_and_all_go_in_the_order_of_time(self, desk: Desk) -> None:
        for name in "abc":
            await desk.know(name, since=NEW_YEAR)
        crontab = "0 * * * * a ?fill=3h\n30 * * * * b ?fill=2h\n0 * * * * c"
        await desk.at(desk.scheduler(crontab), NEW_YEAR + 5 * HOUR + MINUTE)
        jobs = sorted(await desk.jobs(), key=lambda job: job["id"])
        assert [(job["identifier"], job["run_at"] - NEW_YEAR) for job in jobs] == [
            *(("a", 3 * HOUR), ("b", 3.5 * HOUR), ("a", 4 * HOUR), ("b", 4.5 * HOUR), ("a", 5 * HOUR)),
        ]

    async def test_the_minute_of_the_start_belongs_to_the_ticks(self, desk: Desk) -> None:
        await desk.know("t", since=NEW_YEAR)
        await desk.at(desk.scheduler("* * * * * t ?fill=1h"), NEW_YEAR + 2 * MINUTE)
        jobs = await desk.jobs()
        assert [json.loads(job["payload"])["_cron"]["backfilled"] for job in jobs] == [True, True, False]

    async def test_if_it_fails_the_start_is_not_later_for_it(self, desk: Desk) -> None:
        await desk.know("t", since=NEW_YEAR)
        await desk.db.execute(
            "alter table graphile_worker._private_jobs add constraint no check (task_id < 0)"
        )
        scheduler = desk.scheduler("* * * * * t ?fill=1h\n* * * * * u")
        for n in range(2, 5):
            await desk.at(scheduler, NEW_YEAR + n * MINUTE)
        await desk.db.execute("alter table graphile_worker._private_jobs drop constraint no")
        await scheduler.tick()
        jobs = await desk.jobs()
        assert [job["run_at"] - NEW_YEAR for job in jobs if job["identifier"] == "u"] == [
            n * MINUTE for n in (2, 3, 4)
        ]
        assert [job["run_at"] - NEW_YEAR for job in jobs if job["identifier"] == "t"] == [
            n * MINUTE for n in range(5)
        ]

    async def test_thousands_of_minutes_in_few_statements(self, desk: Desk) -> None:
        names = [f"i{n}" for n in range(10)]
        for name in names:
            await desk.know(name, since=NEW_YEAR)
        lines = [f"* * * * * t ?id={name}&fill=1w" for name in names]
        await desk.db.execute("""
            create sequence inserts;
            create function count_it() returns trigger language plpgsql as
              $$ begin perform nextval('public.inserts'); return null; end $$;
            create trigger count_it after insert on graphile_worker._private_jobs
              for each statement execute function count_it();
        """)
        await desk.at(desk.scheduler("\n".join(lines)), NEW_YEAR + DAY)
        rows = await desk.db.fetch(
            """select count(*), count(distinct run_at), bool_and(payload::text like '%"backfilled":true%')
            from graphile_worker._private_jobs where run_at < $1""",
            NEW_YEAR + DAY,
        )
        assert [tuple(row) for row in rows] == [(10 * 1440, 1440, True)]
        transactions = "select count(distinct xmin::text) from graphile_worker._private_jobs"
        assert await desk.db.fetchval(transactions) == 4, "three of up to 5,000 jobs, and the minute's own"
        assert await desk.db.fetchval("select last_value from inserts") <= 8

    @pytest.mark.parametrize(
        ("mode", "run_at"), [("replace", NEW_YEAR + HOUR), ("preserve_run_at", NEW_YEAR)]
    )
    async def test_of_jobs_with_a_key_one_is_left(self, desk: Desk, mode: str, run_at: datetime) -> None:
        await desk.know("t", since=NEW_YEAR)
        scheduler = desk.scheduler(f"* * * * * t ?fill=1d&jobKey=k&jobKeyMode={mode}")
        await desk.at(scheduler, NEW_YEAR + HOUR + timedelta(seconds=1))
        [job] = await desk.jobs()
        assert (job["run_at"], json.loads(job["payload"])["_cron"]["ts"]) == (
            run_at,
            "2021-01-01T01:00:00.000Z",
        )

    async def test_a_job_with_a_key_that_runs_meanwhile_is_left_alone(self, desk: Desk) -> None:
        await desk.know("t", since=NEW_YEAR)
        await desk.db.execute("select graphile_worker.add_job('t', '{}', job_key := 'k')")
        await desk.db.execute("update graphile_worker._private_jobs set locked_at = now(), locked_by = 'w'")
        await desk.at(desk.scheduler("* * * * * t ?fill=1d&jobKey=k"), NEW_YEAR + HOUR)
        assert sorted((job["key"] or "", job["payload"][:4]) for job in await desk.jobs()) == [
            ("", "{}"),
            ("k", '{"_c'),
        ]

    async def test_it_can_be_stopped(self, desk: Desk) -> None:
        await desk.know("t", since=NEW_YEAR)
        scheduler = desk.scheduler("* * * * * t ?fill=1000w")
        desk.clock.time = NEW_YEAR + 90 * DAY
        scheduler.start()
        count = "select count(*) from graphile_worker._private_jobs"
        await until(lambda: desk.db.fetchval(count), "some are added")
        async with asyncio.timeout(10):
            await scheduler.stop()
        [(added, last)] = await desk.db.fetch(
            f"""select ({count}), last_execution from graphile_worker._private_known_crontabs
            where identifier = 't'"""
        )
        assert added < 90 * 1440
        assert last == NEW_YEAR + (added - 1) * MINUTE, "what was added is what is known"

    async def test_a_fill_without_end(self, desk: Desk) -> None:
        await desk.know("t", since=NEW_YEAR)
        await desk.at(desk.scheduler("0 * * * * t ?fill=99999999999999w"), NEW_YEAR + HOUR + MINUTE)
        assert len(await desk.jobs()) == 2


class TestSeveralSchedulers:
    async def test_each_minute_once(self, desk: Desk) -> None:
        crontab = "* * * * * a\n*/2 * * * * b\n* * * * * c ?jobKey=c"
        schedulers = [desk.scheduler(crontab) for _ in range(4)]
        for n in range(5):
            desk.clock.time = NEW_YEAR + n * MINUTE
            await asyncio.gather(*(scheduler.tick() for scheduler in schedulers))
        jobs = await desk.jobs()
        assert sorted((job["identifier"], (job["run_at"] - NEW_YEAR) // MINUTE) for job in jobs) == [
            *(("a", n) for n in range(5)),
            *(("b", n) for n in (0, 2, 4)),
            ("c", 4),
        ]

    async def test_only_who_added_the_jobs_says_so(self, desk: Desk) -> None:
        heard = [Heard(), Heard()]
        schedulers = [desk.scheduler("* * * * * t", heard=one) for one in heard]
        for scheduler in schedulers:
            await desk.at(scheduler, NEW_YEAR)
        assert [one.counts["cron:schedule"] for one in heard] == [1, 1]
        assert [one.counts["cron:scheduled"] for one in heard] == [1, 0]

    async def test_different_orders_do_not_wait_for_each_other_for_ever(self, desk: Desk) -> None:
        lines = [f"* * * * * t ?id=i{n}" for n in range(50)]
        one, other = desk.scheduler("\n".join(lines)), desk.scheduler("\n".join(reversed(lines)))
        for n in range(5):
            desk.clock.time = NEW_YEAR + n * MINUTE
            await asyncio.gather(one.tick(), other.tick())
            await asyncio.gather(one.tick(), other.tick())  # one may have been told to try again
        assert len(await desk.jobs()) == 250


class TestOverlap:
    def items(self) -> list[CronItem]:
        return [CronItem("t", "* * * * *", overlap="skip")]

    async def test_no_job_while_the_one_before_waits_or_runs(self, desk: Desk) -> None:
        scheduler = desk.scheduler(self.items())
        await desk.at(scheduler, NEW_YEAR)
        await desk.at(scheduler, NEW_YEAR + MINUTE)
        assert await desk.times() == [NEW_YEAR], "it waits"
        await desk.db.execute("update graphile_worker._private_jobs set locked_at = now(), locked_by = 'w'")
        await desk.at(scheduler, NEW_YEAR + 2 * MINUTE)
        assert await desk.times() == [NEW_YEAR], "it runs"
        await desk.db.execute(
            "update graphile_worker._private_jobs set locked_at = null, locked_by = null, attempts = 1"
        )
        await desk.at(scheduler, NEW_YEAR + 3 * MINUTE)
        assert await desk.times() == [NEW_YEAR], "it waits for its second attempt"
        assert (await desk.known())["t"][1] == NEW_YEAR + 3 * MINUTE, "what was skipped is not owed"
        await desk.db.execute("delete from graphile_worker._private_jobs")
        await desk.at(scheduler, NEW_YEAR + 4 * MINUTE)
        assert await desk.times() == [NEW_YEAR + 4 * MINUTE]

    async def test_one_that_failed_for_good_is_not_in_the_way(self, desk: Desk) -> None:
        scheduler = desk.scheduler(self.items())
        await desk.at(scheduler, NEW_YEAR)
        await desk.db.execute(
            "update graphile_worker._private_jobs set attempts = max_attempts, last_error = 'oh no'"
        )
        await desk.at(scheduler, NEW_YEAR + MINUTE)
        assert await desk.times() == [NEW_YEAR, NEW_YEAR + MINUTE]
        failed = "select last_error from graphile_worker._private_jobs where attempts = max_attempts"
        assert await desk.db.fetchval(failed) == "oh no", "it stays to be looked at"

    async def test_of_what_is_caught_up_with_there_is_one(self, desk: Desk) -> None:
        scheduler = desk.scheduler([*self.items(), CronItem("u", "* * * * *")])
        await desk.at(scheduler, NEW_YEAR)
        await desk.db.execute("delete from graphile_worker._private_jobs")
        await desk.at(scheduler, NEW_YEAR + 10 * MINUTE)
        jobs = await desk.jobs()
        assert [job["run_at"] for job in jobs if job["identifier"] == "t"] == [NEW_YEAR + MINUTE]
        assert len([job for job in jobs if job["identifier"] == "u"]) == 10

    async def test_a_very_long_identifier_has_a_key_too(self, desk: Desk) -> None:
        scheduler = desk.scheduler([CronItem("t", "* * * * *", identifier="i" * 600, overlap="skip")])
        await desk.at(scheduler, NEW_YEAR)
        await desk.at(scheduler, NEW_YEAR + MINUTE)
        assert len(await desk.jobs()) == 1


class TestUnderAWorker:
    async def test_a_worker_schedules_and_runs(self, database: str) -> None:
        done = asyncio.Event()

        async def task(_payload: Any, _ctx: Any) -> None:
            done.set()

        heard, minutes = Heard(), list[datetime]()
        items = [CronItem("task", lambda at: at in minutes)]
        async with running({"task": task}, database, heard=heard, cron_items=items) as runner:
            started = await heard.until("cron:started")
            scheduler = runner._parts._scheduler
            assert scheduler is not None
            # The minute that is not over; or is, by now, and then the next one has no job.
            minutes.append(started.start.replace(second=0, microsecond=0))
            async with asyncio.timeout(20):
                while not done.is_set():  # a tick that is under way says what is next, too
                    scheduler._next = minutes[0]
                    scheduler.wake()
                    await asyncio.sleep(0.05)
            await heard.until("cron:scheduled")
        assert heard.counts["cron:scheduled"] == 1

    async def test_middleware_stands_around_the_adding(self, desk: Desk) -> None:
        class Marks(Middleware):
            async def enqueue(self, specs: Sequence[JobSpec], proceed: Any) -> Any:
                return await proceed([spec.replace(priority=7) for spec in specs if spec.identifier != "u"])

        scheduler = desk.scheduler("* * * * * t\n* * * * * u\n* * * * * v", middleware=[Marks()])
        await desk.at(scheduler, NEW_YEAR)
        assert [(job["identifier"], job["priority"]) for job in await desk.jobs()] == [("t", 7), ("v", 7)]

    async def test_an_apps_middleware_stands_around_the_adding_of_its_crontab(
        self, desk: Desk, database: str
    ) -> None:
        class Marks(Middleware):
            async def enqueue(self, specs: Sequence[JobSpec], proceed: Any) -> Any:
                return await proceed([spec.replace(priority=7) for spec in specs])

        # What was missed is added at the start.
        past = datetime.now(UTC).replace(second=0, microsecond=0) - 5 * MINUTE
        await desk.know("t", since=past - MINUTE, last=past)
        app = App(database, middleware=[Marks()], crontab="* * * * * t ?fill=1h")
        app.task("another")(nothing)
        started = asyncio.Event()
        app.events.on("cron:started", lambda _event: started.set())
        async with asyncio.timeout(60), app, app.running():
            await started.wait()
        jobs = await desk.jobs()
        assert len(jobs) >= 4
        assert {job["priority"] for job in jobs} == {7}

    async def test_what_middleware_refuses_is_logged_and_the_other_items_go_on(
        self, desk: Desk, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Refuses(Middleware):
            async def enqueue(self, specs: Sequence[JobSpec], proceed: Any) -> Any:
                if any(spec.identifier == "u" for spec in specs):
                    raise RuntimeError("not this one")
                return await proceed()

        scheduler = desk.scheduler("* * * * * t\n* * * * * u\n* * * * * v", middleware=[Refuses()])
        await desk.at(scheduler, NEW_YEAR)
        assert [job["identifier"] for job in await desk.jobs()] == ["t", "v"]
        assert "No job of the cron item 'u' is added, but will be later: not this one" in caplog.text
        await desk.at(scheduler, NEW_YEAR + MINUTE)
        assert len(await desk.jobs()) == 4
        Refuses.enqueue = Middleware.enqueue  # type: ignore[method-assign]
        await desk.at(scheduler, NEW_YEAR + 2 * MINUTE)
        assert [job["identifier"] for job in await desk.jobs()].count("u") == 3

    async def test_a_trigger_that_refuses_one_item_does_not_stop_the_others_and_nothing_is_lost(
        self, desk: Desk
    ) -> None:
        await desk.db.execute("""
            create function refuse() returns trigger language plpgsql as $$
            begin
              if new.payload ->> 'a' = 'b' then raise exception 'not this one'; end if;
              return new;
            end $$;
            create trigger refuse before insert on graphile_worker._private_jobs
              for each row execute function refuse();
        """)
        scheduler = desk.scheduler("* * * * * t\n* * * * * u {a: 'b'}")
        for n in range(3):
            await desk.at(scheduler, NEW_YEAR + n * MINUTE)
        assert await desk.times() == [NEW_YEAR + n * MINUTE for n in range(3)]
        await desk.db.execute("drop trigger refuse on graphile_worker._private_jobs")
        await desk.at(scheduler, NEW_YEAR + 2 * MINUTE)
        assert await desk.times() == [NEW_YEAR + n * MINUTE for n in range(3) for _ in "tu"]

    async def test_a_clock_that_goes_back_does_not_make_it_forget_what_was_refused(self, desk: Desk) -> None:
        scheduler = desk.scheduler("* * * * * t")
        await desk.db.execute(
            "alter table graphile_worker._private_jobs add constraint no check (task_id < 0)"
        )
        for n in (1, 2):
            await desk.at(scheduler, NEW_YEAR + n * MINUTE)
        await desk.db.execute("alter table graphile_worker._private_jobs drop constraint no")
        for n in (0, 1, 3):
            await desk.at(scheduler, NEW_YEAR + n * MINUTE)
        assert await desk.times() == [NEW_YEAR + n * MINUTE for n in (1, 2, 3)]

    async def test_a_function_that_fails_once_loses_no_other_minute(self, desk: Desk) -> None:
        def fails_once(at: datetime) -> bool:
            if at.minute == 2:
                raise ValueError("oh no")
            return True

        scheduler = desk.scheduler([CronItem("t", fails_once)])
        await desk.at(scheduler, NEW_YEAR)
        await desk.at(scheduler, NEW_YEAR + 5 * MINUTE)
        assert await desk.times() == [NEW_YEAR + n * MINUTE for n in (0, 1, 3, 4, 5)]

    async def test_a_function_that_always_fails_is_told_of_once_however_many_minutes_there_are(
        self, desk: Desk, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(_at: datetime) -> bool:
            raise ValueError("oh no")

        await desk.know("t", since=NEW_YEAR)
        await desk.at(
            desk.scheduler([CronItem("t", broken, fill="1d")]), NEW_YEAR + DAY + timedelta(seconds=1)
        )
        [said] = [record.message for record in caplog.records if "cannot say" in record.message]
        assert said == "The cron item 't' cannot say when it is due, so of 1,440 minutes it has no job: oh no"

    @pytest.mark.parametrize("local", [False, True])
    async def test_the_time_is_the_databases_unless_told_otherwise(
        self, database: str, monkeypatch: pytest.MonkeyPatch, *, local: bool
    ) -> None:
        class Ahead(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
                return datetime.now(tz) + 3 * DAY

        monkeypatch.setattr(clock, "datetime", Ahead)
        heard = Heard()
        async with running(
            {"t": nothing}, database, heard=heard, crontab="* * * * * t", use_local_time=local
        ):
            started = await heard.until("cron:started")
        assert abs(started.start - datetime.now(UTC) - (3 * DAY if local else 0 * DAY)) < HOUR

    async def test_a_step_of_the_machines_clock_adds_no_minute_before_its_time(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stepped = timedelta(0)

        class Stepped(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
                return datetime.now(tz) + stepped

        monkeypatch.setattr(clock, "datetime", Stepped)
        scheduler = desk.scheduler("* * * * * t", clock=Clock(local=False))
        await scheduler.tick()
        stepped = HOUR
        await scheduler.tick()
        assert not [at for at in await desk.times() if at > datetime.now(UTC)]
        assert scheduler._next is not None
        assert scheduler._next < datetime.now(UTC) + 2 * MINUTE

    async def test_the_database_is_asked_for_the_time_before_a_minute_is_had(self, desk: Desk) -> None:
        """After a failover, say, to a server whose clock is behind."""
        estimate = Clock(local=False)
        scheduler = desk.scheduler("* * * * * t", clock=estimate)
        await scheduler.tick()
        estimate.observe(datetime.now(UTC) + HOUR)
        assert await scheduler.tick() <= 10
        assert not [at for at in await desk.times() if at > datetime.now(UTC)]

    async def test_with_the_machines_time_its_clock_counts(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ahead = 3 * DAY

        class Ahead(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
                return datetime.now(tz) + ahead

        monkeypatch.setattr(clock, "datetime", Ahead)
        scheduler = desk.scheduler("* * * * * t", clock=Clock(local=True))
        await scheduler.tick()
        ahead += 2 * MINUTE
        await scheduler.tick()
        times = await desk.times()
        assert len(times) >= 2
        assert min(times) > datetime.now(UTC) + 2 * DAY

    async def test_never_under_run_once(self, database: str, db: asyncpg.Connection) -> None:
        app = App(database)

        @app.cron("* * * * *")
        @app.task
        async def t() -> None: ...

        await app.run_once()
        await run_once({"t": nothing}, database)
        with pytest.raises(TypeError, match="cron_items"):
            await run_once({"t": nothing}, database, cron_items=[])  # type: ignore[call-arg]
        assert await db.fetchval("select count(*) from graphile_worker._private_known_crontabs") == 0
        await app.close()

    async def test_an_item_whose_task_this_worker_does_not_have(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        lines = ["other", "t", *(f"many ?id=i{number}" for number in range(7))]
        async with running({"t": nothing}, database, crontab="".join(f"* * * * * {one}\n" for one in lines)):
            pass
        many, one = [record.message for record in caplog.records if "does not have" in record.message]
        assert "The cron item 'other' adds jobs of the task 'other', which this worker does not have" in one
        assert "The cron items 'i0', 'i1', 'i2', 'i3', 'i4' and 2 more add jobs of the task 'many'" in many

    async def test_an_item_whose_payload_its_task_does_not_take(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        @task
        async def hello(name: str) -> None: ...

        @task(job_key=lambda: str(1 / 0))  # which jobs of a crontab do not have
        async def keyed() -> None: ...

        crontab = '* * * * * hello ?id=bad\n* * * * * hello ?id=good {name: "Ann"}\n* * * * * keyed\n'
        async with running({"hello": hello, "keyed": keyed}, database, crontab=crontab):
            pass
        [warned] = [record.message for record in caplog.records if "will fail" in record.message]
        assert "The cron item 'bad' adds jobs that will fail" in warned
        assert "missing a required argument: 'name'" in warned

    @pytest.mark.parametrize(
        "options",
        [
            {"crontab": "", "crontab_file": "crontab"},
            {"crontab": "", "cron_items": []},
            {"crontab_file": "crontab", "cron_items": []},
        ],
    )
    async def test_there_is_one_source_of_items(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match="crontab, crontab_file or cron_items: one of the three"):
            await run({"t": nothing}, "postgresql://localhost:1/x", **options)

    async def test_items_that_the_database_would_refuse_are_refused_at_the_start(self) -> None:
        with pytest.raises(ConfigurationError, match=r"crontab:1:14: the option 'max' .*from 1 to 32767"):
            await run({"t": nothing}, "postgresql://localhost:1/x", crontab="* * * * * t ?max=0")


class TestDeclaring:
    def test_a_task_says_when_it_is_due(self) -> None:
        app = App()

        @app.cron("0 8 * * *", payload={"copies": 2}, fill="2h", tz="Europe/Paris")
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

    def test_mistakes_are_told_at_import(self) -> None:
        app = App()

        @app.task
        async def report(copies: int) -> None: ...

        with pytest.raises(ConfigurationError, match=r"@app\.cron needs a pattern"):
            app.cron(report)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=r"A cron item takes no 'fil'\. Did you mean fill\?"):
            app.cron("0 8 * * *", fil="1h")  # type: ignore[call-arg]
        for arguments, message in [
            ({"payload": {"copies": "two"}}, r"'report': The task 'report' cannot be given that: .*copies"),
            ({}, r"'report': The task 'report' cannot be called like that: .*copies"),
            ({"payload": {"copies": 1}, "tz": "Mars"}, "There is no time zone 'Mars'"),
            ({"payload": {"copies": 1}, "fill": "soon"}, "A backfill of 'soon' is not understood"),
            ({"payload": {"copies": 1}, "run_at": HOUR}, "no 'run_at'"),
        ]:
            with pytest.raises(ConfigurationError, match=message):
                app.cron("0 8 * * *", **arguments)(report)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=r"Put @app.cron\(…\) above @app.task"):
            app.cron("0 8 * * *")(print)
        with pytest.raises(ConfigurationError, match="The pattern '8 o' is wrong"):
            app.cron("8 o", payload={"copies": 1})(report)
        app.cron("0 8 * * *", payload={"copies": 1})(report)
        with pytest.raises(ConfigurationError, match="two cron items with the identifier 'report'"):
            app.cron("0 9 * * *", payload={"copies": 1})(report)

    async def test_its_workers_have_these_items_and_those_given(self, database: str) -> None:
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
        with pytest.raises(ConfigurationError, match="two cron items with the identifier 'report'"):
            await app.run(crontab="0 9 * * * report")
        await app.close()

    def test_an_app_has_one_crontab_as_text_as_a_file_or_as_items(self, tmp_path: Path) -> None:
        path = tmp_path / "crontab"
        item = CronItem("report", "0 8 * * *")
        of_file = App(crontab_file=path)  # read when it is needed: who only adds jobs need not have it
        with pytest.raises(ConfigurationError, match="cannot be read"):
            _ = of_file.cron_items
        path.write_text("0 8 * * * report")
        for app in (of_file, App(crontab="0 8 * * * report"), App(cron_items=[item])):
            assert app.cron_items == [item]
            assert app.sets("crontab")
        assert not App().sets("crontab")
        with pytest.raises(CrontabError, match="the minute '60' is too large"):
            App(crontab="60 * * * * report")
        with pytest.raises(ConfigurationError, match="one of the three"):
            App(crontab_file=path, crontab="")
        with pytest.raises(ConfigurationError, match="one of the three"):
            App(crontab_file=path, cron_items=[])


WEATHER = """
  create table weather (kind text);
  insert into weather values ('good');
  create function strike() returns trigger language plpgsql as $$
  declare kind text := (select weather.kind from public.weather);
  begin
    if kind = 'full' and tg_when = 'BEFORE' then raise disk_full; end if;
    if kind = 'refused' and tg_when = 'BEFORE' then raise check_violation; end if;
    if kind = 'lost' and tg_when = 'BEFORE' then perform pg_terminate_backend(pg_backend_pid()); end if;
    if kind = 'commit' and tg_when = 'AFTER' then raise disk_full; end if;
    return new;
  end $$;
  create trigger before_it before insert or update on graphile_worker._private_jobs
    for each row execute function strike();
  create constraint trigger at_commit after insert or update on graphile_worker._private_jobs
    deferrable initially deferred for each row execute function strike();
"""
"""Statements that fail, jobs that are refused, connections that are lost, and commits that fail."""
KILL = """
  select pg_terminate_backend(pid) from pg_stat_activity
  where datname = current_database() and pid <> pg_backend_pid()
"""


async def tick_in_some_weather(
    some: random.Random, db: asyncpg.Connection, schedulers: list[tuple[Scheduler, SetClock]], now: datetime
) -> None:
    """Most of them, at about the same time; and some of that is cut short."""
    kind = some.choice(["good"] * 6 + ["full", "refused", "lost", "commit"])
    await db.execute("update weather set kind = $1", kind)
    ticks = []
    for scheduler, own in schedulers:
        if some.random() < 0.8:
            own.time = now + timedelta(seconds=some.randrange(-90, 5))
            ticks.append(asyncio.create_task(scheduler.tick()))
    for tick in ticks:
        if some.random() < 0.3:
            for _ in range(some.randrange(30)):
                await asyncio.sleep(0)
            tick.cancel()
    if some.random() < 0.15:
        await db.execute(KILL)
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*ticks)
    await asyncio.wait(ticks) if ticks else None


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(seed=st.integers(0, 2**32))
async def test_two_schedulers_under_random_pauses_and_failures(databases: Databases, seed: int) -> None:
    """They never have a minute twice nor, with fill, leave one out."""
    some = random.Random(seed)
    async with databases.fresh() as dsn:
        db = await asyncpg.connect(dsn)
        pool = Pool(dsn, max_size=4)
        session = Session(Schema(), pool, logging.getLogger("test"))
        desk = Desk(session, db)
        crontab = "* * * * * a ?fill=1d\n*/3 * * * * b ?fill=1d\n1,4 * * * * c ?fill=1d"
        items = parse_crontab(crontab)
        await crontabs.register(db, Schema(), ["a", "b", "c"], NEW_YEAR)
        await db.execute(WEATHER)
        schedulers: list[tuple[Scheduler, SetClock]] = []
        now = NEW_YEAR + 2 * MINUTE
        try:
            for _ in range(25):
                now += timedelta(seconds=some.randrange(200))
                while len(schedulers) < 2:  # a worker that starts again has forgotten everything
                    own = SetClock(now)
                    schedulers.append((desk.scheduler(items, clock=own), own))
                await tick_in_some_weather(some, db, schedulers, now)
                if some.random() < 0.2:
                    schedulers.pop(some.randrange(2))
            await db.execute("update weather set kind = 'good'")
            last = desk.scheduler(items, clock=SetClock(now + timedelta(seconds=10)))
            await last.tick()
            while last._in_vain:  # it was given a connection that somebody had ended
                await last.tick()
            got = sorted((job["identifier"], job["run_at"]) for job in await desk.jobs())
            begin = NEW_YEAR - MINUTE
            assert got == sorted(
                (item.identifier, at)
                for item in items
                for at in item.occurrences(begin, now + timedelta(seconds=10))
            )
        finally:
            await pool.close()
            await db.close()
