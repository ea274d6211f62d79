"""What the server refuses, because of a user's constraint or trigger, costs one job and not the worker."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, TypeAlias

import asyncpg
import pytest

from graphile_worker import Drained, JobSpec, ShutdownError, WorkerUtils, run, run_once
from graphile_worker._db import exchange as database_exchange
from graphile_worker._db.cancellations import cancel, settle
from graphile_worker._db.exchange import Held, Refusal, Reply, Result, Wish
from graphile_worker._db.failures import is_given_up, message_of, without_details
from graphile_worker._db.sql import Schema, read_script
from graphile_worker._db.workers import unlock_stale
from graphile_worker._runtime import refusals as refusals_module
from graphile_worker._runtime import results as results_module
from graphile_worker._runtime import worker as worker_module
from graphile_worker._runtime.refusals import Refusals
from graphile_worker._runtime.results import Results
from graphile_worker._runtime.service import Service
from graphile_worker._runtime.spare_queues import SpareQueues
from graphile_worker.doctor import Level, examine
from graphile_worker.logs import ScopedLogger
from graphile_worker.outcome import Completed, Failed, Returned
from support.clock import FakeClock
from support.jobs import add, count, existing, get
from support.waiting import until
from support.workers import Gate, Heard, locked, nothing, running
from test_exchange import Client, done, ids, numbers
from test_recovery import Watch, enroll, held_job, make_due, session, watch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

__all__ = ["session", "watch"]

SECRET = "my-secret-payload"
SCHEMA = Schema()

FOREIGN_KEY = """
    create table orders (job_id bigint references graphile_worker._private_jobs (id) {});
    insert into orders select {} from graphile_worker._private_jobs as job where job.payload::text = '"bad"'
"""
TRIGGER = """
    create function refuse() returns trigger language plpgsql as $$
    begin
      if {condition} then
        raise exception 'not this one' using detail = 'Failing row contains my-secret-payload';
      end if;
      return coalesce(new, old);
    end $$;
    create trigger refuse before {event} on graphile_worker._private_{table}
      for each row execute procedure refuse()
"""
DEFERRED_TRIGGER = """
    create function refuse() returns trigger language plpgsql as $$
    begin
      if {condition} then
        raise exception 'not this one' using detail = 'Failing row contains my-secret-payload';
      end if;
      return null;
    end $$;
    create constraint trigger refuse after {event} on graphile_worker._private_{table}
      deferrable initially deferred for each row execute procedure refuse()
"""
IS_BAD = "old.payload::text = '\"bad\"'"

REFUSED_WHEN_DELETED = {
    "foreign key": FOREIGN_KEY.format("", "job.id"),
    "deferred foreign key": FOREIGN_KEY.format("deferrable initially deferred", "job.id"),
    "trigger": TRIGGER.format(condition=IS_BAD, event="delete", table="jobs"),
    "deferred trigger": DEFERRED_TRIGGER.format(condition=IS_BAD, event="delete", table="jobs"),
    "broken trigger": TRIGGER.format(condition=IS_BAD, event="delete", table="jobs").replace(
        "raise exception", "perform from no_such_table; raise exception"
    ),
    **{
        f"trigger that raises {code}": TRIGGER.format(condition=IS_BAD, event="delete", table="jobs").replace(
            "using ", f"using errcode = '{code}', "
        )
        for code in ("42501", "08001")  # no rights on another table, no connection of dblink
    },
}
ALLOW = "drop table if exists orders cascade; drop function if exists refuse cascade"


@pytest.fixture
async def worker(database: str) -> AsyncIterator[Client]:
    connection = await asyncpg.connect(database)
    yield Client(connection, "worker")
    await connection.close()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was refused is tried again at once, and again."""
    monkeypatch.setattr(refusals_module, "_SHORTEST", 0.02)
    monkeypatch.setattr(refusals_module, "_LONGEST", 0.05)


def said(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


def assert_no_payload(caplog: pytest.LogCaptureFixture) -> None:
    formatter = logging.Formatter()
    texts = [formatter.format(record) for record in caplog.records]
    assert not [text for text in texts if "DETAIL" in text or SECRET in text]


class TestResults:
    @pytest.mark.usefixtures("soon")
    @pytest.mark.parametrize("obstacle", REFUSED_WHEN_DELETED)
    async def test_one_refused_result_costs_its_job_alone(
        self,
        db: asyncpg.Connection,
        database: str,
        obstacle: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level(logging.DEBUG)
        heard, ran = Heard(), []

        async def task(payload: str) -> None:
            ran.append(payload)

        async with WorkerUtils(database) as utils:
            await utils.add_jobs(JobSpec("task", str(n)) for n in range(15))
            bad = await utils.add_job("task", "bad", queue_name="q")
            await utils.add_jobs(JobSpec("task", str(n)) for n in range(15, 30))
        await db.execute(REFUSED_WHEN_DELETED[obstacle])
        async with running({"task": task}, database, heard=heard, concurrency=4) as runner:
            await heard.until("job:complete", 30)
            await runner.add_job("task", "later")
            await heard.until("job:complete", 31)
            assert runner.health().state == "ready"
            assert await locked(db) == [("job", bad.id), ("queue", bad.job_queue_id)]
            await db.execute(ALLOW)
            await heard.until("job:complete", 32)
        assert sorted(ran) == sorted([*map(str, range(30)), "bad", "later"]), "each once"
        assert await count(db) == 0
        assert await locked(db) == []
        [warning] = said(caplog)
        assert f"outcome of job {bad.id} (task)" in warning
        assert any("recorded after all" in text for text in said(caplog, logging.INFO))
        assert not any("cannot be used" in text for text in said(caplog))
        assert_no_payload(caplog)

    @pytest.mark.usefixtures("soon")
    async def test_a_check_that_refuses_an_error_costs_its_job_alone(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        heard = Heard()

        async def task(payload: str) -> None:
            if payload == SECRET:
                raise ValueError("forbidden words")

        await db.execute(
            "alter table graphile_worker._private_jobs add constraint mine check (last_error !~ 'forbidden')"
        )
        async with running({"task": task}, database, heard=heard, concurrency=4) as runner:
            bad = await runner.add_job("task", SECRET)
            await runner.utils.add_jobs(JobSpec("task", "good") for _ in range(10))
            await heard.until("job:complete", 10)
            assert (await existing(db, bad.id))["last_error"] is None
            await db.execute("alter table graphile_worker._private_jobs drop constraint mine")
            await heard.until("job:complete", 11)
        assert "forbidden words" in (await existing(db, bad.id))["last_error"]
        assert 'violates check constraint "mine"' in said(caplog)[-1]
        assert not [text for text in said(caplog) if "Failing row" in text]

    @pytest.mark.usefixtures("soon")
    async def test_a_trigger_that_finds_something_locked_each_time_costs_its_job_alone(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        heard = Heard()
        bad = await add(db, payload="bad")
        await db.execute(
            REFUSED_WHEN_DELETED["trigger"].replace("using", "using errcode = 'lock_not_available',")
        )
        async with running({"task": nothing}, database, heard=heard, concurrency=4) as runner:
            await runner.utils.add_jobs(JobSpec("task", "good") for _ in range(10))
            await heard.until("job:complete", 10)
            assert await locked(db) == [("job", bad["id"])]
            await db.execute(ALLOW)
            await heard.until("job:complete", 11)
        assert f"outcome of job {bad['id']} (task)" in said(caplog)[-1]

    async def test_a_worker_that_stops_tries_once_more_and_names_what_is_refused(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        heard = Heard()
        bad = await add(db, payload="bad")
        await db.execute(REFUSED_WHEN_DELETED["trigger"])
        runner = await run({"task": nothing}, database, events=heard.events, handle_signals=False)
        await runner.add_job("task", "good")
        await heard.until("job:complete")
        async with asyncio.timeout(10):
            with pytest.raises(ShutdownError, match=str(bad["id"])) as raised:
                await runner.stop()
        assert raised.value.jobs == (bad["id"],)
        workers = "select count(*) from graphile_worker._private_workers"
        assert await db.fetchval(workers) == 1, "or no worker would free the job"

    async def test_a_worker_that_stops_records_what_is_accepted_by_then(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        heard = Heard()
        await add(db, payload="bad")
        await db.execute(REFUSED_WHEN_DELETED["trigger"])
        async with running({"task": nothing}, database, heard=heard) as runner:
            await runner.add_job("task", "good")
            await heard.until("job:complete")
            await db.execute(ALLOW)
        assert heard.counts["job:complete"] == 2
        assert await count(db) == 0

    async def test_run_once_ends_though_a_result_is_refused(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        bad = await add(db, payload="bad")
        await add(db, payload="good")
        await db.execute(REFUSED_WHEN_DELETED["trigger"])
        async with asyncio.timeout(10):
            with pytest.raises(ShutdownError, match=str(bad["id"])):
                await run_once({"task": nothing}, database, handle_signals=False)
        assert await count(db) == 1

    async def test_health_and_doctor_tell_of_refused_jobs(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await add(db, payload="bad")
        await db.execute(REFUSED_WHEN_DELETED["foreign key"])
        reason = "The database refuses to record the outcomes of 1 job; the log names them."
        async with running({"task": nothing}, database, heartbeat_interval=0.1) as runner:

            async def told() -> bool:
                [worker] = await runner.utils.workers()
                return worker.reason == reason

            await until(told, "its heartbeat says so")
            assert (runner.health().ready, runner.health().reason) == (True, reason)
            found = [one async for one in examine(database, listen=False) if one.check == "workers"]
            assert [(one.level, reason in one.says) for one in found] == [(Level.WARNING, True)]
            await db.execute(ALLOW)

            async def forgotten() -> bool:
                [worker] = await runner.utils.workers()
                return worker.reason is None and runner.health().reason is None

            await until(forgotten, "nothing is refused any more")
            found = [one async for one in examine(database, listen=False) if one.check == "workers"]
            assert [one.level for one in found] == [Level.OK]

    @pytest.mark.usefixtures("soon")
    async def test_too_many_refused_results_stop_the_claims(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker_module, "_MOST_REFUSED", 5)
        heard = Heard()
        for _ in range(20):
            await add(db, payload="bad")
        await db.execute(REFUSED_WHEN_DELETED["trigger"])
        options = {"concurrency": 2, "poll_interval": 0.02, "heartbeat_interval": 0.1}
        async with running({"task": nothing}, database, heard=heard, **options) as runner:
            await heard.until("job:success", 5)

            async def settled() -> bool:
                held = await db.fetchval(
                    "select count(*) from graphile_worker._private_jobs where locked_by is not null"
                )
                return bool(held >= 5)

            await until(settled, "five are held")
            looks = heard.counts["worker:getJob:start"]
            await heard.until("worker:getJob:start", looks)
            assert heard.counts["job:success"] < 20
            health = runner.health()
            assert (health.state, health.ready, health.live) == ("refused", False, True)

            async def troubled() -> bool:
                found = [one async for one in examine(database, listen=False) if one.check == "workers"]
                return [one.level for one in found] == [Level.TROUBLE]

            await until(troubled, "the doctor says so")
            await db.execute(ALLOW)
            await heard.until("job:complete", 20)

    async def test_a_result_that_takes_too_long_is_sent_with_fewer_others(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """A role may have a statement_timeout, and more and more results gather while none is recorded."""
        heard, gate = Heard(), Gate()
        async with running({"task": gate}, database, heard=heard, concurrency=16) as runner:
            await runner.utils.add_jobs(JobSpec("task", n) for n in range(16))
            await gate.until_begun(16)
            await db.execute("""
                create function dawdle() returns trigger language plpgsql as $$
                begin
                  perform pg_sleep(0.02);
                  return old;
                end $$;
                create trigger dawdle before delete on graphile_worker._private_jobs
                  for each row execute procedure dawdle()
            """)
            connection = runner._parts.worker._exchanger._connection
            assert connection is not None
            await connection.execute("set statement_timeout = 200")
            gate.open()
            await heard.until("job:complete", 16)
        assert await count(db) == 0

    async def test_run_once_ends_though_the_server_refuses_every_result(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker_module, "_MOST_REFUSED", 5)
        for _ in range(20):
            await add(db, payload="bad")
        await db.execute(REFUSED_WHEN_DELETED["trigger"])
        async with asyncio.timeout(10):
            with pytest.raises(ShutdownError):
                await run_once({"task": nothing}, database, handle_signals=False)
        assert await count(db) == 20


class TestClaims:
    @pytest.mark.usefixtures("soon")
    @pytest.mark.parametrize("queue", [None, "q"])
    @pytest.mark.parametrize("kind", ["at once", "deferred"])
    async def test_a_job_that_cannot_be_claimed_is_left_out(
        self,
        db: asyncpg.Connection,
        database: str,
        queue: str | None,
        kind: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level(logging.DEBUG)
        heard, ran = Heard(), []

        async def task(payload: str) -> None:
            ran.append(payload)

        for n in range(3):
            await add(db, payload=str(n))
        bad = await add(db, payload="bad", queue_name=queue, priority=-1)
        for n in range(3, 10):
            await add(db, payload=str(n), queue_name=queue)
        trigger = TRIGGER if kind == "at once" else DEFERRED_TRIGGER
        condition = f"{IS_BAD} and new.locked_by is not null"
        await db.execute(trigger.format(condition=condition, event="update", table="jobs"))
        async with running(
            {"task": task}, database, heard=heard, concurrency=3, poll_interval=0.05
        ) as runner:
            await heard.until("job:complete", 10)
            assert runner.health().state == "ready"
            row = await existing(db, bad["id"])
            assert (row["locked_by"], row["attempts"]) == (None, 0)
            await db.execute(ALLOW)
            await heard.until("job:complete", 11)
        assert sorted(ran) == sorted([*map(str, range(10)), "bad"]), "each once"
        assert await locked(db) == []
        [warning] = said(caplog)
        assert f"job {bad['id']} (task)" in warning
        assert "not this one" in warning
        assert_no_payload(caplog)

    @pytest.mark.usefixtures("soon")
    async def test_a_queue_that_cannot_be_locked_costs_its_jobs_alone(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        heard = Heard()
        bad = [await add(db, queue_name="bad") for _ in range(3)]
        for n in range(6):
            await add(db, queue_name=f"good {n % 2}")
        condition = "old.queue_name = 'bad' and new.locked_by is not null"
        await db.execute(TRIGGER.format(condition=condition, event="update", table="job_queues"))
        async with running({"task": nothing}, database, heard=heard, concurrency=3, poll_interval=0.05):
            await heard.until("job:complete", 6)
            assert await count(db) == len(bad)
            await db.execute(ALLOW)
            await heard.until("job:complete", 9)
        assert await locked(db) == []

    async def test_run_once_leaves_it_and_ends(self, db: asyncpg.Connection, database: str) -> None:
        await add(db, payload="bad")
        for _ in range(10):
            await add(db, payload="good")
        await db.execute(TRIGGER.format(condition=IS_BAD, event="update", table="jobs"))
        async with asyncio.timeout(10):
            drained = await run_once({"task": nothing}, database, handle_signals=False)
        assert drained == Drained(10, 0)
        assert await count(db) == 1

    async def test_run_once_ends_though_a_trigger_finds_something_locked_each_time(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        bad = await add(db, payload="bad")
        await add(db, payload="good")
        condition = f"{IS_BAD} and new.locked_by is not null"
        trigger = TRIGGER.format(condition=condition, event="update", table="jobs")
        await db.execute(trigger.replace("using", "using errcode = 'lock_not_available',"))
        async with asyncio.timeout(10):
            assert await run_once({"task": nothing}, database) == Drained(1, 0)
        assert f"job {bad['id']} (task)" in said(caplog)[-1]

    @pytest.mark.usefixtures("soon")
    async def test_a_job_that_stays_unclaimable_is_told_of_once_though_exchanges_are_sent_ahead(
        self,
        db: asyncpg.Connection,
        database: str,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(refusals_module, "_QUIET", 0.02)
        heard = Heard()
        condition = f"{IS_BAD} and new.locked_by is not null"
        await db.execute(TRIGGER.format(condition=condition, event="update", table="jobs"))
        async with WorkerUtils(database) as utils:
            bad = await utils.add_job("task", "bad")
            await utils.add_jobs(JobSpec("task", n) for n in range(4000))
        async with running({"task": nothing}, database, heard=heard, concurrency=4, prefetch=50):
            await heard.until("job:complete", 4000)
        [warning] = said(caplog)
        assert f"job {bad.id} (task)" in warning


class TestCarefulExchange:
    async def test_every_job_is_recorded_but_the_refused_one(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        jobs = [await add(db, payload=payload, queue_name="q" + payload) for payload in ("a", "bad", "c")]
        claimed = await worker.claim()
        await db.execute(REFUSED_WHEN_DELETED["trigger"])
        results = [done(held) for held in claimed]
        with pytest.raises(asyncpg.RaiseError):
            await worker.exchange(results)
        worker.careful = True
        reply = await worker.exchange(results)
        assert [(claim.job_id, refusal) for claim, refusal in reply.refused.items()] == [
            (jobs[1]["id"], Refusal("not this one", "P0001"))
        ]
        assert await locked(db) == [("job", jobs[1]["id"]), ("queue", jobs[1]["job_queue_id"])]
        assert await count(db) == 1

    async def test_all_outcomes_are_recorded_as_usual(self, db: asyncpg.Connection, worker: Client) -> None:
        for queue in (None, None, None, "q"):
            await add(db, queue_name=queue)
        claimed = await worker.claim()
        worker.careful = True
        outcomes = [Completed(), Failed(ValueError("no"), delay=60), Returned(), Completed()]
        reply = await worker.exchange([done(*pair) for pair in zip(claimed, outcomes, strict=True)], 0)
        assert (reply.busy, reply.lost, reply.refused) == (set(), set(), {})
        assert await get(db, claimed[0].job.id) is None
        assert (await existing(db, claimed[1].job.id))["last_error"] == "no"
        assert (await existing(db, claimed[2].job.id))["attempts"] == 0
        assert await locked(db) == []

    async def test_busy_and_lost_results_are_told_apart(self, db: asyncpg.Connection, worker: Client) -> None:
        jobs = [await add(db) for _ in range(3)]
        claimed = await worker.claim()
        await db.execute("delete from graphile_worker._private_jobs where id = $1", jobs[0]["id"])
        worker.careful = True
        async with db.transaction():
            await db.execute(
                "select from graphile_worker._private_jobs where id = $1 for update", jobs[1]["id"]
            )
            reply = await worker.exchange([done(held) for held in claimed], 0)
        assert (numbers(reply.lost), numbers(reply.busy)) == ({jobs[0]["id"]}, {jobs[1]["id"]})
        assert reply.refused == {}

    async def test_claimed_and_refused_jobs_are_told_apart(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        good = [(await add(db, payload="good", priority=n, queue_name=f"q{n}"))["id"] for n in range(3)]
        bad = await add(db, payload="bad", priority=1, queue_name="other")
        await db.execute(TRIGGER.format(condition=IS_BAD, event="update", table="jobs"))
        worker.careful = True
        reply = await worker.exchange()
        assert ids(reply.claimed) == good
        assert reply.unclaimable == {bad["id"]: Refusal("not this one", "P0001", "task")}
        assert [kind for kind, _ in await locked(db)] == ["job"] * 3 + ["queue"] * 3

    async def test_jobs_that_are_left_out_hide_no_others_and_count_as_none(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        jobs = [await add(db, queue_name=queue) for queue in (None, "a", None, "a")]
        skipped = [jobs[0]["id"], jobs[1]["id"]]
        reply = await worker.exchange((), 10, left_out=skipped)
        assert ids(reply.claimed) == [jobs[2]["id"], jobs[3]["id"]]
        assert not reply.contended
        results = [done(held) for held in reply.claimed]
        reply = await worker.exchange(results, 10, left_out=skipped)
        assert (reply.claimed, reply.contended) == ([], False)
        assert ids(await worker.claim()) == skipped

    async def test_a_full_disk_is_not_taken_for_a_refusal(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        with pytest.raises(asyncpg.DiskFullError):
            await record_on_a_full_disk(db, worker)


async def record_on_a_full_disk(db: asyncpg.Connection, worker: Client) -> bool:
    await add(db)
    [held] = await worker.claim()
    await db.execute("""
        create function refuse() returns trigger language plpgsql as $$
        begin
          raise exception 'no space' using errcode = 'disk_full';
        end $$;
        create trigger refuse before delete on graphile_worker._private_jobs
          for each row execute procedure refuse()
    """)
    worker.careful = True
    return not (await worker.exchange([done(held)])).refused


async def connect(worker: Client) -> int:
    """Begin a new generation; returns it."""
    tasks = await database_exchange.register_tasks(worker.connection, SCHEMA, worker.identifiers)
    return (await database_exchange.read_locked(worker.connection, SCHEMA, worker.name, tasks)).generation


async def gives_up(worker: Client) -> bool:
    try:
        await worker.exchange()
    except asyncpg.PostgresError as error:
        return is_given_up(error) or isinstance(error, asyncpg.LockNotAvailableError)
    return False


async def a_late_call_does_nothing(db: asyncpg.Connection, worker: Client) -> bool:
    await add(db)
    worker.generation = await connect(worker)
    await connect(worker)
    return await gives_up(worker) and await locked(db) == []


async def a_call_under_way_is_waited_for(db: asyncpg.Connection, worker: Client) -> bool:
    worker.generation = await connect(worker)
    async with worker.connection.transaction():
        await worker.exchange()
        try:
            await connect(Client(db, "worker"))
        except asyncpg.LockNotAvailableError:
            return True
    return False


async def a_call_waits_for_no_generation(db: asyncpg.Connection, worker: Client) -> bool:
    worker.generation = await connect(worker)
    await worker.connection.execute("set statement_timeout = 300")
    async with db.transaction():
        await db.execute("select from graphile_worker._private_python_sessions for update")
        return await gives_up(worker)


async def a_deferred_constraint_is_found(db: asyncpg.Connection, worker: Client) -> bool:
    await add(db, payload="bad")
    claimed = await worker.claim()
    await db.execute(REFUSED_WHEN_DELETED["deferred trigger"])
    worker.careful = True
    return len((await worker.exchange([done(held) for held in claimed])).refused) == 1


async def a_full_disk_is_an_error(db: asyncpg.Connection, worker: Client) -> bool:
    try:
        return await record_on_a_full_disk(db, worker)
    except asyncpg.DiskFullError:
        return True


async def a_queue_of_a_refused_job_stays_free(db: asyncpg.Connection, worker: Client) -> bool:
    await add(db, payload="bad", queue_name="q")
    await db.execute(TRIGGER.format(condition=IS_BAD, event="update", table="jobs"))
    worker.careful = True
    await worker.exchange()
    return await locked(db) == []


async def a_run_of_a_queue_has_its_queue(db: asyncpg.Connection, worker: Client) -> bool:
    for payload in ("good", "bad", "good"):
        await add(db, payload=payload, queue_name="q")
    await db.execute(TRIGGER.format(condition=IS_BAD, event="update", table="jobs"))
    worker.careful = True
    try:
        return all(held.queue is not None for held in await worker.claim(run_length=3))
    except KeyError:  # a job without the lock of its queue
        return False


async def a_refused_job_hides_no_other(db: asyncpg.Connection, worker: Client) -> bool:
    worker.identifiers = ("task", "other")
    await add(db, payload="bad")
    good = await add(db, payload="good")
    await add(db, "other", payload="good")
    await db.execute(TRIGGER.format(condition=IS_BAD, event="update", table="jobs"))
    worker.careful = True
    return ids(await worker.claim(1)) == [good["id"]]


Promise: TypeAlias = "Callable[[asyncpg.Connection, Client], Awaitable[bool]]"
GUARDS: dict[Promise, tuple[str, str]] = {
    a_late_call_does_nothing: (" and latest.generation = session", ""),
    a_call_under_way_is_waited_for: ("for share nowait;", ";"),
    a_call_waits_for_no_generation: ("for share nowait;", "for share;"),
    a_deferred_constraint_is_found: ("set constraints all immediate;", ""),
    a_full_disk_is_an_error: ("raise;  -- the server", "-- the server"),
    a_queue_of_a_refused_job_stays_free: ("claimed_queues := array_remove(", "obtained := array_remove("),
    a_run_of_a_queue_has_its_queue: ("    run_length := 1;\n", ""),
    a_refused_job_hides_no_other: ("left_out := left_out || candidate;", ""),
}


class TestGuards:
    """Each guard of the exchange against refusals and late calls keeps a promise, and is needed for it."""

    @pytest.fixture(autouse=True)
    def _short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(database_exchange, "_LONGEST_WAIT", 0.3)

    @pytest.mark.parametrize("promise", GUARDS, ids=lambda promise: promise.__name__)
    async def test_the_promise_is_kept(
        self, db: asyncpg.Connection, worker: Client, promise: Promise
    ) -> None:
        assert await promise(db, worker)

    @pytest.mark.parametrize("promise", GUARDS, ids=lambda promise: promise.__name__)
    async def test_without_its_guard_it_is_broken(
        self, db: asyncpg.Connection, worker: Client, promise: Promise
    ) -> None:
        text = read_script("own/005_exchange.sql")
        before, after = GUARDS[promise]
        assert text.count(before) == 1, "the guard looks different now"
        await db.execute(SCHEMA.render(text.replace(before, after)))
        try:
            kept = await promise(db, worker)
        except asyncpg.RaiseError:  # the whole call is refused
            kept = False
        assert not kept


class TestSweeps:
    @pytest.mark.parametrize("trigger", [TRIGGER, DEFERRED_TRIGGER], ids=["at once", "deferred"])
    async def test_a_job_that_cannot_be_freed_keeps_no_other_of_its_dead_worker_locked(
        self, db: asyncpg.Connection, watch: Watch, trigger: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        await enroll(db)
        jobs = [
            await held_job(db, payload=payload, queue_name="q" + payload)
            for payload in ("a", "b", "bad", "c", "d")
        ]
        condition = f"{IS_BAD} and new.locked_by is null"
        await db.execute(trigger.format(condition=condition, event="update", table="jobs"))
        [recovered] = await watch.over(10)
        assert sorted(job.id for job in recovered.jobs) == sorted({*jobs} - {jobs[2]})
        assert len(recovered.queues) == 4
        assert [number for kind, number in await locked(db) if kind == "job"] == [jobs[2]]
        await make_due(db)
        await watch.over(2)
        [warning] = said(caplog)
        assert f"job {jobs[2]} (task)" in warning
        assert "not this one" in warning
        assert_no_payload(caplog)
        await db.execute(ALLOW)
        await make_due(db)
        [recovered] = await watch.over(2)
        assert [job.id for job in recovered.jobs] == [jobs[2]]
        assert await locked(db) == []

    async def test_a_queue_that_cannot_be_freed_keeps_no_other_locked(
        self, db: asyncpg.Connection, watch: Watch, caplog: pytest.LogCaptureFixture
    ) -> None:
        await enroll(db)
        for name in ("a", "bad", "c"):
            await held_job(db, queue_name=name)
        condition = "old.queue_name = 'bad' and new.locked_by is null"
        await db.execute(TRIGGER.format(condition=condition, event="update", table="job_queues"))
        [recovered] = await watch.over(10)
        assert len(recovered.jobs) == 3
        assert [kind for kind, _ in await locked(db)] == ["queue"]
        assert "queue 'bad'" in said(caplog)[0]

    async def test_a_stale_lock_that_cannot_be_removed_keeps_no_other(self, db: asyncpg.Connection) -> None:
        jobs = [await add(db, payload=payload) for payload in ("a", "bad", "c")]
        await db.execute(
            "update graphile_worker._private_jobs set locked_by = 'x', locked_at = now() - interval '5 hours'"
        )
        await db.execute(TRIGGER.format(condition=IS_BAD, event="update", table="jobs"))
        freed = await unlock_stale(db, SCHEMA)
        assert freed.jobs == {jobs[0]["id"], jobs[2]["id"]}
        assert freed.refused_jobs == {jobs[1]["id"]: "not this one"}
        assert await locked(db) == [("job", jobs[1]["id"])]

    async def test_a_cancellation_that_is_refused_keeps_no_other_from_being_settled(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        jobs = [await add(db, payload=payload) for payload in ("a", "bad", "c")]
        await worker.claim()
        for job in jobs:
            assert await cancel(db, SCHEMA, job["id"], "why") == "requested"
        await db.execute("select graphile_worker.force_unlock_workers(array['worker'])")
        await db.execute(TRIGGER.format(condition=IS_BAD, event="update", table="jobs"))
        await settle(db, SCHEMA)
        errors = [(await existing(db, job["id"]))["last_error"] for job in jobs]
        assert errors == ["Cancelled: why", None, "Cancelled: why"]

    async def test_a_renewal_that_is_refused_keeps_no_other_from_being_renewed(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        for payload in ("a", "bad", "c"):
            await add(db, payload=payload)
        claimed = await worker.claim()
        before = [held.locked_at for held in claimed]
        await db.execute(TRIGGER.format(condition=IS_BAD, event="update", table="jobs"))
        await database_exchange.renew(worker.connection, SCHEMA, "worker", claimed, [])
        changed = [held.locked_at > was for held, was in zip(claimed, before, strict=True)]
        assert changed == [True, False, True]


class TestSessions:
    async def test_an_exchange_that_was_given_up_leads_to_another_session(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        heard = Heard()
        async with running({"task": nothing}, database, heard=heard):
            await heard.until("worker:getJob:empty")
            await db.execute("delete from graphile_worker._private_python_sessions")
            looks = heard.counts["worker:getJob:empty"]
            await add(db)
            await heard.until("job:complete")
            await heard.until("worker:getJob:empty", looks + 1)  # no exchange is under way: it would say so
            await db.execute(
                "update graphile_worker._private_python_sessions set generation = generation + 1"
            )
            await add(db)
            await heard.until("job:complete", 2)
        assert said(caplog) == []

    async def test_a_worker_that_ends_leaves_no_session(self, db: asyncpg.Connection, database: str) -> None:
        sessions = "select count(*) from graphile_worker._private_python_sessions"
        async with running({"task": nothing}, database):
            assert await db.fetchval(sessions) == 1
        assert await db.fetchval(sessions) == 0

    async def test_sessions_of_dead_workers_are_forgotten_with_them(
        self, db: asyncpg.Connection, worker: Client, watch: Watch
    ) -> None:
        worker.name = "w"
        await connect(worker)
        await enroll(db)
        await watch.over(10)
        await db.execute(
            """update graphile_worker._private_workers set metadata = metadata || jsonb_build_object(
            'died_at', now() - interval '11 minutes', 'swept_at', now() - interval '2 minutes')"""
        )
        await watch.over(2)
        assert await db.fetch("select from graphile_worker._private_python_sessions") == []

    async def test_old_sessions_without_a_heartbeat_are_forgotten(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        age = "update graphile_worker._private_python_sessions set connected_at = now() - interval '8 days'"
        await enroll(db, "alive")
        for name in ("crashed", "alive"):
            worker.name = name
            await connect(worker)
        await db.execute(age)
        worker.name = "new"
        await connect(worker)
        await unlock_stale(db, SCHEMA)
        rows = await db.fetch("select worker_id from graphile_worker._private_python_sessions order by 1")
        assert [row["worker_id"] for row in rows] == ["alive", "new"]


async def test_a_spare_queue_that_another_session_has_locked_is_released_later(
    db: asyncpg.Connection, database: str
) -> None:
    heard = Heard()
    other = await asyncpg.connect(database)
    async with running({"task": nothing}, database, heard=heard, poll_interval=0.05) as runner:
        await runner.add_job("task", queue_name="q")
        await heard.until("job:complete")
        await db.execute(
            "update graphile_worker._private_job_queues set locked_by = $1, locked_at = now()", runner.id
        )
        looks = heard.counts["worker:getJob:empty"]
        async with other.transaction():
            await other.execute("select from graphile_worker._private_job_queues for update")
            await db.execute(
                """select pg_terminate_backend(pid) from pg_stat_activity
                where query like '%_private_python_exchange%' and pid <> pg_backend_pid()"""
            )
            await heard.until("worker:getJob:empty", looks + 1)
            assert [kind for kind, _ in await locked(db)] == ["queue"]

        async def free() -> bool:
            return not await locked(db)

        await until(free, "the queue is free")
        await runner.add_job("task", queue_name="q")
        await heard.until("job:complete", 2)
    await other.close()


def held_for(number: int) -> Held:
    held = Held(None, datetime.now(UTC), None)  # type: ignore[arg-type]
    held.job = SimpleNamespace(id=number, task_identifier="task")  # type: ignore[assignment]
    return held


class TestState:
    """What the worker keeps in mind, without a database."""

    clock: FakeClock
    refusals: Refusals

    @pytest.fixture(autouse=True)
    def _begin(self) -> None:
        self.clock = FakeClock()
        self.refusals = Refusals(self.clock)

    def reply(self, *unclaimable: int) -> Reply:
        refusal = Refusal("no", "P0001", "task")
        return Reply(datetime.now(UTC), unclaimable=dict.fromkeys(unclaimable, refusal))

    def answer(self, *unclaimable: int, wanted: int = 10, claimed: int = 0) -> dict[int, Refusal]:
        reply = self.reply(*unclaimable)
        reply.claimed = [held_for(1000 + n) for n in range(claimed)]
        return self.refusals.answered(Wish(wanted=wanted), reply)

    def plan(self, wanted: int = 10, *, retries: bool = False) -> tuple[set[int], bool]:
        wish, careful = self.refusals.prepare(Wish(wanted=wanted), retries=retries)
        return set(wish.left_out or ()), careful

    def test_usual_calls_are_not_careful(self) -> None:
        wish = Wish(wanted=3)
        assert self.refusals.prepare(wish, retries=False) == (wish, False)

    def test_calls_are_careful_for_a_while_after_a_refusal(self) -> None:
        self.refusals.be_careful()
        assert self.plan() == (set(), True)
        self.clock.advance(4)
        assert self.plan() == (set(), True)
        self.clock.advance(2)
        assert self.plan() == (set(), False)

    def test_refused_results_are_sent_by_careful_calls(self) -> None:
        assert self.plan(retries=True) == (set(), True)
        assert self.plan() == (set(), False)

    def test_an_unclaimable_job_is_left_out_for_longer_and_longer(self) -> None:
        assert list(self.answer(7)) == [7]
        assert self.plan() == ({7}, True)
        for delay in (1, 2, 4, 8, 16, 32, 60, 60):
            self.clock.advance(delay - 0.1)
            assert 7 in self.plan()[0]
            self.clock.advance(0.2)
            assert self.plan() == (set(), True), "tried again, carefully"
            assert self.answer(7) == {}, "it was told before"
        assert self.plan() == ({7}, False), "meanwhile calls are usual ones"

    def test_a_job_that_is_claimed_in_the_end_is_not_left_out_any_more(self) -> None:
        self.answer(7)
        self.clock.advance(100)
        assert self.plan(wanted=0) == (set(), False), "nothing is tried where nothing is claimed"
        assert self.plan() == (set(), True)
        self.answer()
        assert self.plan() == (set(), False)

    def test_a_job_that_was_not_reached_is_left_out_as_before(self) -> None:
        self.answer(7)
        self.clock.advance(100)
        assert self.plan(wanted=3) == (set(), True)
        assert self.answer(wanted=3, claimed=3) == {}
        assert self.plan() == ({7}, False)
        self.clock.advance(100)
        assert self.plan() == (set(), True)
        assert self.answer(7) == {}, "it was told before"

    def test_no_more_than_a_thousand_jobs_are_left_out(self) -> None:
        assert len(self.answer(*range(1500))) == 1000
        assert len(self.plan()[0]) == 1000

    def test_a_call_that_took_too_long_is_followed_by_smaller_ones(self) -> None:
        assert self.refusals.shrink(100)
        wish, _ = self.refusals.prepare(Wish(wanted=80), retries=False)
        assert (wish.wanted, self.refusals.limit) == (50, 50)
        assert self.refusals.shrink(2)
        assert not self.refusals.shrink(1)
        for _ in range(14):
            self.answer()
        assert self.refusals.limit is None

    def test_a_refused_result_waits_and_is_told_to_be_new_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = 100.0
        monkeypatch.setattr(results_module, "monotonic", lambda: now)
        results, held = Results(), held_for(1)
        result = Result(held, Completed(), None)
        refused = Reply(datetime.now(UTC), refused={held.claim: Refusal("no", "23503")})
        assert results.sort_out([result], refused).refused == [(result, Refusal("no", "23503"))]
        assert results.park(result)
        assert not results
        assert (results.again, results.refused) == (101.0, 1)
        now = 101.0
        assert results.retries
        assert results.take() == [result]
        assert not results.retries, "it is on its way"
        assert not results.park(result)
        assert results.again == 103.0
        results.try_all_again()
        assert results.take() == [result]
        assert results.hopeless == set()
        results.park(result)
        assert results.hopeless == {held}
        found = results.sort_out([result], Reply(datetime.now(UTC)))
        assert (found.recorded, found.late) == ([result], [result])
        assert (results.refused, results.hopeless) == (0, set())

    def test_a_refused_result_that_was_recorded_by_a_lost_call_is_confirmed(self) -> None:
        results, held = Results(), held_for(1)
        result = Result(held, Completed(), None)
        results.park(result)
        results.put_back([result], perhaps_recorded=True)
        assert results.confirm(set()) == [result]
        assert results.refused == 0

    def test_a_limit_leaves_results_for_the_next_call(self) -> None:
        results = Results()
        all_of_them = [Result(held_for(n), Completed(), None) for n in range(5)]
        results.add(all_of_them)
        assert [results.take(2), results.take(2), results.take(2), results.take(2)] == [
            *(all_of_them[:2], all_of_them[2:4], all_of_them[4:], [])
        ]

    def test_a_limit_also_holds_for_results_that_are_sent_again(self) -> None:
        results = Results()
        parked = [Result(held_for(n), Completed(), None) for n in range(4)]
        for result in parked:
            results.park(result)
        results.try_all_again()
        assert [results.take(3), results.take(3), results.take(3)] == [parked[:3], parked[3:], []]

    def test_spare_queues_are_kept_until_they_are_released(self) -> None:
        queues, at = SpareQueues(), datetime.now(UTC)
        assert (bool(queues), queues.due, queues.again) == (False, {}, None)
        queues.replace({1: at, 2: at})
        assert queues.due == {1: at, 2: at}
        queues.keep({2})
        assert (bool(queues), queues.due) == (True, {})
        assert queues.again is not None
        queues.keep(set())
        assert not queues
        assert queues.again is None


class Failing(Service):
    name = "failing service"

    async def tick(self) -> float:
        error = asyncpg.CheckViolationError("no")
        error.detail = f"Failing row contains {SECRET}"
        self.cancel()
        raise RuntimeError("outer") from error


async def test_a_service_that_fails_logs_no_payload(caplog: pytest.LogCaptureFixture) -> None:
    service = Failing(ScopedLogger(logging.getLogger("graphile_worker"), {}))
    service.start()
    assert service._task is not None
    await asyncio.wait([service._task])
    assert "failing service failed" in said(caplog)[0]
    assert_no_payload(caplog)


def test_details_are_removed_from_all_errors_of_a_chain() -> None:
    inner = asyncpg.UniqueViolationError("duplicate")
    inner.detail = SECRET
    outer = ValueError("outer")
    outer.__cause__ = inner
    group = ExceptionGroup("several", [outer])
    without_details(group)
    assert str(inner) == "duplicate"
    assert message_of(inner) == "duplicate"
