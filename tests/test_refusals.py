"""A statement that a user's constraint or trigger refuses affects one job, not the worker."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, TypeAlias

import asyncpg
import pytest

from graphile_worker import JobSpec, RunSummary, ShutdownError, WorkerUtils, run, run_once
from graphile_worker._base.logs import ScopedLogger
from graphile_worker._db.connection.error_mapping import is_stale_session, message_of, without_details
from graphile_worker._db.queries import exchange as database_exchange
from graphile_worker._db.queries.cancellations import cancel_many, settle
from graphile_worker._db.queries.exchange import ClaimedJob, ClaimRequest, ExchangeReply, Refusal, Result
from graphile_worker._db.queries.workers import unlock_stale
from graphile_worker._db.sql_files import Schema, read_script
from graphile_worker._worker import loop as worker_module
from graphile_worker._worker.claiming import refusals as refusals_module
from graphile_worker._worker.claiming.reconcile import SpareQueues
from graphile_worker._worker.claiming.refusals import Refusals
from graphile_worker._worker.execution import results as results_module
from graphile_worker._worker.execution.results import Results
from graphile_worker._worker.service import Service
from graphile_worker.doctor import Level, examine
from graphile_worker.outcome import Completed, Failed, Returned
from support.clock import FakeClock
from support.jobs import add, count, existing, get
from support.waiting import until
from support.workers import EventRecorder, Gate, locked, nothing, running
from test_exchange import ExchangeWorker, claim_ids, ids, result_of
from test_recovery import (
    TimedSweeper,
    add_locked_job,
    make_sweep_due,
    register_worker,
    session,
    timed_sweeper,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

__all__ = ["session", "timed_sweeper"]

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
        for code in ("42501", "08001")  # No privileges on another table; no dblink connection.
    },
}
ALLOW = "drop table if exists orders cascade; drop function if exists refuse cascade"


@pytest.fixture
async def worker(database: str) -> AsyncIterator[ExchangeWorker]:
    connection = await asyncpg.connect(database)
    yield ExchangeWorker(connection, "worker")
    await connection.close()


@pytest.fixture
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry refused results and claims almost at once."""
    monkeypatch.setattr(refusals_module, "_SHORTEST", 0.02)
    monkeypatch.setattr(refusals_module, "_LONGEST", 0.05)


def logged(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


def assert_no_payload(caplog: pytest.LogCaptureFixture) -> None:
    formatter = logging.Formatter()
    texts = [formatter.format(record) for record in caplog.records]
    assert not [text for text in texts if "DETAIL" in text or SECRET in text]


class TestResults:
    @pytest.mark.sample(3)
    @pytest.mark.usefixtures("short_delays")
    @pytest.mark.parametrize("obstacle", REFUSED_WHEN_DELETED)
    async def test_refused_result_affects_only_its_job(
        self,
        db: asyncpg.Connection,
        database: str,
        obstacle: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level(logging.DEBUG)
        recorder, ran = EventRecorder(), []

        async def task(payload: str) -> None:
            ran.append(payload)

        async with WorkerUtils(database) as utils:
            await utils.add_jobs(JobSpec("task", str(n)) for n in range(15))
            bad = await utils.add_job("task", "bad", queue_name="q")
            await utils.add_jobs(JobSpec("task", str(n)) for n in range(15, 30))
        await db.execute(REFUSED_WHEN_DELETED[obstacle])
        async with running({"task": task}, database, recorder=recorder, concurrency=4) as runner:
            await recorder.until("job:complete", 30)
            await runner.add_job("task", "later")
            await recorder.until("job:complete", 31)
            assert runner.health().state == "ready"
            assert await locked(db) == [("job", bad.id), ("queue", bad.job_queue_id)]
            await db.execute(ALLOW)
            await recorder.until("job:complete", 32)
        assert sorted(ran) == sorted([*map(str, range(30)), "bad", "later"]), "each job must run once"
        assert await count(db) == 0
        assert await locked(db) == []
        [warning] = logged(caplog)
        assert f"outcome of job {bad.id} (task)" in warning
        assert any("now recorded" in text for text in logged(caplog, logging.INFO))
        assert not any("is unavailable" in text for text in logged(caplog))
        assert_no_payload(caplog)

    @pytest.mark.usefixtures("short_delays")
    async def test_check_constraint_that_refuses_an_error_affects_only_its_job(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        recorder = EventRecorder()

        async def task(payload: str) -> None:
            if payload == SECRET:
                raise ValueError("forbidden words")

        await db.execute(
            "alter table graphile_worker._private_jobs add constraint mine check (last_error !~ 'forbidden')"
        )
        async with running({"task": task}, database, recorder=recorder, concurrency=4) as runner:
            bad = await runner.add_job("task", SECRET)
            await runner.utils.add_jobs(JobSpec("task", "good") for _ in range(10))
            await recorder.until("job:complete", 10)
            assert (await existing(db, bad.id))["last_error"] is None
            await db.execute("alter table graphile_worker._private_jobs drop constraint mine")
            await recorder.until("job:complete", 11)
        assert "forbidden words" in (await existing(db, bad.id))["last_error"]
        assert 'violates check constraint "mine"' in logged(caplog)[-1]
        assert not [text for text in logged(caplog) if "Failing row" in text]

    @pytest.mark.usefixtures("short_delays")
    async def test_trigger_that_always_finds_a_lock_affects_only_its_job(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        recorder = EventRecorder()
        bad = await add(db, payload="bad")
        await db.execute(
            REFUSED_WHEN_DELETED["trigger"].replace("using", "using errcode = 'lock_not_available',")
        )
        async with running({"task": nothing}, database, recorder=recorder, concurrency=4) as runner:
            await runner.utils.add_jobs(JobSpec("task", "good") for _ in range(10))
            await recorder.until("job:complete", 10)
            assert await locked(db) == [("job", bad["id"])]
            await db.execute(ALLOW)
            await recorder.until("job:complete", 11)
        assert f"outcome of job {bad['id']} (task)" in logged(caplog)[-1]

    async def test_stopping_worker_retries_refused_results_once_and_names_them(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        recorder = EventRecorder()
        bad = await add(db, payload="bad")
        await db.execute(REFUSED_WHEN_DELETED["trigger"])
        runner = await run({"task": nothing}, database, events=recorder.events, handle_signals=False)
        await runner.add_job("task", "good")
        await recorder.until("job:complete")
        async with asyncio.timeout(10):
            with pytest.raises(ShutdownError, match=str(bad["id"])) as raised:
                await runner.stop()
        assert raised.value.jobs == (bad["id"],)
        workers = "select count(*) from graphile_worker._private_workers"
        assert await db.fetchval(workers) == 1, "without its row, no worker would release the job"

    async def test_stopping_worker_records_refused_results_that_are_accepted_by_then(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        recorder = EventRecorder()
        await add(db, payload="bad")
        await db.execute(REFUSED_WHEN_DELETED["trigger"])
        async with running({"task": nothing}, database, recorder=recorder) as runner:
            await runner.add_job("task", "good")
            await recorder.until("job:complete")
            await db.execute(ALLOW)
        assert recorder.counts["job:complete"] == 2
        assert await count(db) == 0

    async def test_run_once_ends_when_a_result_is_refused(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        bad = await add(db, payload="bad")
        await add(db, payload="good")
        await db.execute(REFUSED_WHEN_DELETED["trigger"])
        async with asyncio.timeout(10):
            with pytest.raises(ShutdownError, match=str(bad["id"])):
                await run_once({"task": nothing}, database, handle_signals=False)
        assert await count(db) == 1

    async def test_health_and_doctor_report_refused_results(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await add(db, payload="bad")
        await db.execute(REFUSED_WHEN_DELETED["foreign key"])
        reason = "The database refuses to record the outcomes of 1 job; the log names them."
        async with running({"task": nothing}, database, heartbeat_interval=0.1) as runner:

            async def is_reported() -> bool:
                [worker] = await runner.utils.workers()
                return worker.reason == reason

            await until(is_reported, "the heartbeat reports it")
            assert (runner.health().ready, runner.health().reason) == (True, reason)
            found = [one async for one in examine(database, listen=False) if one.check == "workers"]
            assert [(one.level, reason in one.message) for one in found] == [(Level.WARNING, True)]
            await db.execute(ALLOW)

            async def is_resolved() -> bool:
                [worker] = await runner.utils.workers()
                return worker.reason is None and runner.health().reason is None

            await until(is_resolved, "no outcome is refused any longer")
            found = [one async for one in examine(database, listen=False) if one.check == "workers"]
            assert [one.level for one in found] == [Level.OK]

    @pytest.mark.usefixtures("short_delays")
    async def test_too_many_refused_results_stop_claiming(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker_module, "_MAX_REFUSED", 5)
        recorder = EventRecorder()
        for _ in range(20):
            await add(db, payload="bad")
        await db.execute(REFUSED_WHEN_DELETED["trigger"])
        options = {"concurrency": 2, "prefetch": 0, "poll_interval": 0.02, "heartbeat_interval": 0.1}
        async with running({"task": nothing}, database, recorder=recorder, **options) as runner:

            async def is_refused() -> bool:
                health = runner.health()
                return (health.state, health.ready, health.live) == ("refused", False, True)

            await until(is_refused, "the worker is not ready")
            assert 5 <= recorder.counts["job:success"] < 20

            async def doctor_reports_error() -> bool:
                found = [one async for one in examine(database, listen=False) if one.check == "workers"]
                return [one.level for one in found] == [Level.ERROR]

            await until(doctor_reports_error, "the doctor reports an error")
            await db.execute(ALLOW)
            await recorder.until("job:complete", 20)

    async def test_results_that_time_out_are_sent_in_smaller_calls(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """A role may have a statement_timeout.

        More and more results would accumulate while none is recorded.
        """
        recorder, gate = EventRecorder(), Gate()
        async with running({"task": gate}, database, recorder=recorder, concurrency=16) as runner:
            await runner.utils.add_jobs(JobSpec("task", n) for n in range(16))
            await gate.until_started(16)
            await db.execute("""
                create function slow_down() returns trigger language plpgsql as $$
                begin
                  perform pg_sleep(0.02);
                  return old;
                end $$;
                create trigger slow_down before delete on graphile_worker._private_jobs
                  for each row execute procedure slow_down()
            """)
            connection = runner._parts.worker._exchange_client._connection
            assert connection is not None
            await connection.execute("set statement_timeout = 200")
            gate.open()
            await recorder.until("job:complete", 16)
        assert await count(db) == 0

    async def test_run_once_ends_when_every_result_is_refused(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker_module, "_MAX_REFUSED", 5)
        for _ in range(20):
            await add(db, payload="bad")
        await db.execute(REFUSED_WHEN_DELETED["trigger"])
        async with asyncio.timeout(10):
            with pytest.raises(ShutdownError):
                await run_once({"task": nothing}, database, handle_signals=False)
        assert await count(db) == 20


class TestClaims:
    @pytest.mark.usefixtures("short_delays")
    @pytest.mark.parametrize("queue", [None, "q"])
    @pytest.mark.parametrize("kind", ["at once", "deferred"])
    async def test_unclaimable_job_is_left_out_until_it_can_be_claimed(
        self,
        db: asyncpg.Connection,
        database: str,
        queue: str | None,
        kind: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level(logging.DEBUG)
        recorder, ran = EventRecorder(), []

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
            {"task": task}, database, recorder=recorder, concurrency=3, poll_interval=0.05
        ) as runner:
            await recorder.until("job:complete", 10)
            assert runner.health().state == "ready"
            row = await existing(db, bad["id"])
            assert (row["locked_by"], row["attempts"]) == (None, 0)
            await db.execute(ALLOW)
            await recorder.until("job:complete", 11)
        assert sorted(ran) == sorted([*map(str, range(10)), "bad"]), "each job must run once"
        assert await locked(db) == []
        [warning] = logged(caplog)
        assert f"job {bad['id']} (task)" in warning
        assert "not this one" in warning
        assert_no_payload(caplog)

    @pytest.mark.usefixtures("short_delays")
    async def test_unlockable_queue_affects_only_its_jobs(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        recorder = EventRecorder()
        bad = [await add(db, queue_name="bad") for _ in range(3)]
        for n in range(6):
            await add(db, queue_name=f"good {n % 2}")
        condition = "old.queue_name = 'bad' and new.locked_by is not null"
        await db.execute(TRIGGER.format(condition=condition, event="update", table="job_queues"))
        async with running({"task": nothing}, database, recorder=recorder, concurrency=3, poll_interval=0.05):
            await recorder.until("job:complete", 6)
            assert await count(db) == len(bad)
            await db.execute(ALLOW)
            await recorder.until("job:complete", 9)
        assert await locked(db) == []

    async def test_run_once_leaves_an_unclaimable_job_and_ends(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await add(db, payload="bad")
        for _ in range(10):
            await add(db, payload="good")
        await db.execute(TRIGGER.format(condition=IS_BAD, event="update", table="jobs"))
        async with asyncio.timeout(10):
            drained = await run_once({"task": nothing}, database, handle_signals=False)
        assert drained == RunSummary(10, 0)
        assert await count(db) == 1

    async def test_run_once_ends_when_a_trigger_always_finds_a_lock(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        bad = await add(db, payload="bad")
        await add(db, payload="good")
        condition = f"{IS_BAD} and new.locked_by is not null"
        trigger = TRIGGER.format(condition=condition, event="update", table="jobs")
        await db.execute(trigger.replace("using", "using errcode = 'lock_not_available',"))
        async with asyncio.timeout(10):
            assert await run_once({"task": nothing}, database) == RunSummary(1, 0)
        assert f"job {bad['id']} (task)" in logged(caplog)[-1]

    @pytest.mark.slow
    @pytest.mark.usefixtures("short_delays")
    async def test_unclaimable_job_is_logged_once_when_exchanges_are_sent_ahead(
        self,
        db: asyncpg.Connection,
        database: str,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(refusals_module, "_QUIET", 0.02)
        recorder = EventRecorder()
        condition = f"{IS_BAD} and new.locked_by is not null"
        await db.execute(TRIGGER.format(condition=condition, event="update", table="jobs"))
        async with WorkerUtils(database) as utils:
            bad = await utils.add_job("task", "bad")
            await utils.add_jobs(JobSpec("task", n) for n in range(4000))
        async with running({"task": nothing}, database, recorder=recorder, concurrency=4, prefetch=50):
            await recorder.until("job:complete", 4000)
        [warning] = logged(caplog)
        assert f"job {bad.id} (task)" in warning


class TestCarefulExchange:
    async def test_careful_exchange_records_all_results_except_the_refused_one(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        jobs = [await add(db, payload=payload, queue_name="q" + payload) for payload in ("a", "bad", "c")]
        claimed = await worker.claim()
        await db.execute(REFUSED_WHEN_DELETED["trigger"])
        results = [result_of(held) for held in claimed]
        with pytest.raises(asyncpg.RaiseError):
            await worker.exchange(results)
        worker.careful = True
        reply = await worker.exchange(results)
        assert [(claim.job_id, refusal) for claim, refusal in reply.refused.items()] == [
            (jobs[1]["id"], Refusal("not this one", "P0001"))
        ]
        assert await locked(db) == [("job", jobs[1]["id"]), ("queue", jobs[1]["job_queue_id"])]
        assert await count(db) == 1

    async def test_careful_exchange_records_all_outcomes(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        for queue in (None, None, None, "q"):
            await add(db, queue_name=queue)
        claimed = await worker.claim()
        worker.careful = True
        outcomes = [Completed(), Failed(ValueError("no"), delay=60), Returned(), Completed()]
        reply = await worker.exchange([result_of(*pair) for pair in zip(claimed, outcomes, strict=True)], 0)
        assert (reply.busy, reply.lost, reply.refused) == (set(), set(), {})
        assert await get(db, claimed[0].job.id) is None
        assert (await existing(db, claimed[1].job.id))["last_error"] == "no"
        assert (await existing(db, claimed[2].job.id))["attempts"] == 0
        assert await locked(db) == []

    async def test_careful_exchange_distinguishes_busy_and_lost_results(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        jobs = [await add(db) for _ in range(3)]
        claimed = await worker.claim()
        await db.execute("delete from graphile_worker._private_jobs where id = $1", jobs[0]["id"])
        worker.careful = True
        async with db.transaction():
            await db.execute(
                "select from graphile_worker._private_jobs where id = $1 for update", jobs[1]["id"]
            )
            reply = await worker.exchange([result_of(held) for held in claimed], 0)
        assert (claim_ids(reply.lost), claim_ids(reply.busy)) == ({jobs[0]["id"]}, {jobs[1]["id"]})
        assert reply.refused == {}

    async def test_careful_exchange_distinguishes_claimed_and_refused_jobs(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        good = [(await add(db, payload="good", priority=n, queue_name=f"q{n}"))["id"] for n in range(3)]
        bad = await add(db, payload="bad", priority=1, queue_name="other")
        await db.execute(TRIGGER.format(condition=IS_BAD, event="update", table="jobs"))
        worker.careful = True
        reply = await worker.exchange()
        assert ids(reply.claimed) == good
        assert reply.unclaimable == {bad["id"]: Refusal("not this one", "P0001", "task")}
        assert [kind for kind, _ in await locked(db)] == ["job"] * 3 + ["queue"] * 3

    async def test_left_out_jobs_hide_no_others_and_are_not_contended(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        jobs = [await add(db, queue_name=queue) for queue in (None, "a", None, "a")]
        skipped = [jobs[0]["id"], jobs[1]["id"]]
        reply = await worker.exchange((), 10, left_out=skipped)
        assert ids(reply.claimed) == [jobs[2]["id"], jobs[3]["id"]]
        assert not reply.contended
        results = [result_of(held) for held in reply.claimed]
        reply = await worker.exchange(results, 10, left_out=skipped)
        assert (reply.claimed, reply.contended) == ([], False)
        assert ids(await worker.claim()) == skipped

    async def test_full_disk_is_an_error_and_not_a_refusal(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        with pytest.raises(asyncpg.DiskFullError):
            await record_on_a_full_disk(db, worker)


async def record_on_a_full_disk(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
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
    return not (await worker.exchange([result_of(held)])).refused


async def connect(worker: ExchangeWorker) -> int:
    """Begin a new generation and return it."""
    tasks = await database_exchange.register_tasks(worker.connection, SCHEMA, worker.identifiers)
    return (await database_exchange.read_locked(worker.connection, SCHEMA, worker.name, tasks)).generation


async def gives_up(worker: ExchangeWorker) -> bool:
    try:
        await worker.exchange()
    except asyncpg.PostgresError as error:
        return is_stale_session(error) or isinstance(error, asyncpg.LockNotAvailableError)
    return False


async def call_with_a_stale_generation_does_nothing(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    await add(db)
    worker.generation = await connect(worker)
    await connect(worker)
    return await gives_up(worker) and await locked(db) == []


async def new_generation_waits_for_a_call_in_progress(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    worker.generation = await connect(worker)
    async with worker.connection.transaction():
        await worker.exchange()
        try:
            await connect(ExchangeWorker(db, "worker"))
        except asyncpg.LockNotAvailableError:
            return True
    return False


async def call_never_waits_for_a_new_generation(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    worker.generation = await connect(worker)
    await worker.connection.execute("set statement_timeout = 300")
    async with db.transaction():
        await db.execute("select from graphile_worker._private_python_sessions for update")
        return await gives_up(worker)


async def deferred_constraint_is_checked(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    await add(db, payload="bad")
    claimed = await worker.claim()
    await db.execute(REFUSED_WHEN_DELETED["deferred trigger"])
    worker.careful = True
    return len((await worker.exchange([result_of(held) for held in claimed])).refused) == 1


async def full_disk_is_an_error(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    try:
        return await record_on_a_full_disk(db, worker)
    except asyncpg.DiskFullError:
        return True


async def queue_of_a_refused_job_stays_unlocked(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    await add(db, payload="bad", queue_name="q")
    await db.execute(TRIGGER.format(condition=IS_BAD, event="update", table="jobs"))
    worker.careful = True
    await worker.exchange()
    return await locked(db) == []


async def every_job_of_a_queue_run_has_its_queue(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    for payload in ("good", "bad", "good"):
        await add(db, payload=payload, queue_name="q")
    await db.execute(TRIGGER.format(condition=IS_BAD, event="update", table="jobs"))
    worker.careful = True
    try:
        return all(held.queue is not None for held in await worker.claim(run_length=3))
    except KeyError:  # The worker got a job without the lock of its queue.
        return False


async def refused_job_hides_no_other(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    worker.identifiers = ("task", "other")
    await add(db, payload="bad")
    good = await add(db, payload="good")
    await add(db, "other", payload="good")
    await db.execute(TRIGGER.format(condition=IS_BAD, event="update", table="jobs"))
    worker.careful = True
    return ids(await worker.claim(1)) == [good["id"]]


Promise: TypeAlias = "Callable[[asyncpg.Connection, ExchangeWorker], Awaitable[bool]]"
GUARDS: dict[Promise, tuple[str, str]] = {
    call_with_a_stale_generation_does_nothing: (" and latest.generation = session", ""),
    new_generation_waits_for_a_call_in_progress: ("for share nowait;", ";"),
    call_never_waits_for_a_new_generation: ("for share nowait;", "for share;"),
    deferred_constraint_is_checked: ("set constraints all immediate;", ""),
    full_disk_is_an_error: ("raise;  -- the server", "-- the server"),
    queue_of_a_refused_job_stays_unlocked: ("claimed_queues := array_remove(", "obtained := array_remove("),
    every_job_of_a_queue_run_has_its_queue: ("all immediate;\n    run_length := 1;\n", "all immediate;\n"),
    refused_job_hides_no_other: ("left_out := left_out || candidate;", ""),
}


class TestGuards:
    """Each guard in the exchange against refusals and late calls keeps a promise that fails without it."""

    @pytest.fixture(autouse=True)
    def _short_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(database_exchange, "_LONGEST_WAIT", 0.3)

    @pytest.mark.parametrize("promise", GUARDS, ids=lambda promise: promise.__name__)
    async def test_guard_keeps_its_promise(
        self, db: asyncpg.Connection, worker: ExchangeWorker, promise: Promise
    ) -> None:
        assert await promise(db, worker)

    @pytest.mark.parametrize("promise", GUARDS, ids=lambda promise: promise.__name__)
    async def test_promise_fails_without_its_guard(
        self, db: asyncpg.Connection, worker: ExchangeWorker, promise: Promise
    ) -> None:
        text = read_script("own/012_exchange.sql")
        before, after = GUARDS[promise]
        assert text.count(before) == 1, "update GUARDS: the guard has changed"
        await db.execute(SCHEMA.render(text.replace(before, after)))
        try:
            kept = await promise(db, worker)
        except asyncpg.RaiseError:  # The server refused the whole call.
            kept = False
        assert not kept


class TestSweeps:
    @pytest.mark.parametrize("trigger", [TRIGGER, DEFERRED_TRIGGER], ids=["at once", "deferred"])
    async def test_sweep_releases_other_jobs_when_one_is_refused(
        self,
        db: asyncpg.Connection,
        timed_sweeper: TimedSweeper,
        trigger: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        await register_worker(db)
        jobs = [
            await add_locked_job(db, payload=payload, queue_name="q" + payload)
            for payload in ("a", "b", "bad", "c", "d")
        ]
        condition = f"{IS_BAD} and new.locked_by is null"
        await db.execute(trigger.format(condition=condition, event="update", table="jobs"))
        [recovered] = await timed_sweeper.run_for(10)
        assert sorted(job.id for job in recovered.jobs) == sorted({*jobs} - {jobs[2]})
        assert len(recovered.queues) == 4
        assert [number for kind, number in await locked(db) if kind == "job"] == [jobs[2]]
        await make_sweep_due(db)
        await timed_sweeper.run_for(2)
        [warning] = logged(caplog)
        assert f"job {jobs[2]} (task)" in warning
        assert "not this one" in warning
        assert_no_payload(caplog)
        await db.execute(ALLOW)
        await make_sweep_due(db)
        [recovered] = await timed_sweeper.run_for(2)
        assert [job.id for job in recovered.jobs] == [jobs[2]]
        assert await locked(db) == []

    async def test_sweep_releases_other_queues_when_one_is_refused(
        self, db: asyncpg.Connection, timed_sweeper: TimedSweeper, caplog: pytest.LogCaptureFixture
    ) -> None:
        await register_worker(db)
        for name in ("a", "bad", "c"):
            await add_locked_job(db, queue_name=name)
        condition = "old.queue_name = 'bad' and new.locked_by is null"
        await db.execute(TRIGGER.format(condition=condition, event="update", table="job_queues"))
        [recovered] = await timed_sweeper.run_for(10)
        assert len(recovered.jobs) == 3
        assert [kind for kind, _ in await locked(db)] == ["queue"]
        assert "queue 'bad'" in logged(caplog)[0]

    async def test_unlock_stale_removes_other_locks_when_one_is_refused(self, db: asyncpg.Connection) -> None:
        jobs = [await add(db, payload=payload) for payload in ("a", "bad", "c")]
        await db.execute(
            "update graphile_worker._private_jobs set locked_by = 'x', locked_at = now() - interval '5 hours'"
        )
        await db.execute(TRIGGER.format(condition=IS_BAD, event="update", table="jobs"))
        unlocked = await unlock_stale(db, SCHEMA)
        assert unlocked.jobs == {jobs[0]["id"], jobs[2]["id"]}
        assert unlocked.refused_jobs == {jobs[1]["id"]: "not this one"}
        assert await locked(db) == [("job", jobs[1]["id"])]

    async def test_settle_applies_other_cancellations_when_one_is_refused(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        jobs = [await add(db, payload=payload) for payload in ("a", "bad", "c")]
        await worker.claim()
        for job in jobs:
            results = await cancel_many(db, SCHEMA, [job["id"]], "why")
            assert results[job["id"]].answer == "requested"
        await db.execute("select graphile_worker.force_unlock_workers(array['worker'])")
        await db.execute(TRIGGER.format(condition=IS_BAD, event="update", table="jobs"))
        await settle(db, SCHEMA)
        errors = [(await existing(db, job["id"]))["last_error"] for job in jobs]
        assert errors == ["Cancelled: why", None, "Cancelled: why"]

    async def test_renew_extends_other_locks_when_one_is_refused(
        self, db: asyncpg.Connection, worker: ExchangeWorker
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
    async def test_worker_starts_a_new_session_after_a_stale_generation(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        recorder = EventRecorder()
        # Without polls, no exchange finds the session's row locked by the statements below, and logs that.
        async with running({"task": nothing}, database, recorder=recorder, poll_interval=3600):
            await recorder.until("worker:getJob:empty")
            await db.execute("delete from graphile_worker._private_python_sessions")
            empty = recorder.counts["worker:getJob:empty"]
            await add(db)
            await recorder.until("job:complete")
            await recorder.until("worker:getJob:empty", empty + 1)
            await db.execute(
                "update graphile_worker._private_python_sessions set generation = generation + 1"
            )
            await add(db)
            await recorder.until("job:complete", 2)
        assert logged(caplog) == []

    async def test_stopped_worker_leaves_no_session(self, db: asyncpg.Connection, database: str) -> None:
        sessions = "select count(*) from graphile_worker._private_python_sessions"
        async with running({"task": nothing}, database):
            assert await db.fetchval(sessions) == 1
        assert await db.fetchval(sessions) == 0

    async def test_sessions_of_dead_workers_are_deleted_with_them(
        self, db: asyncpg.Connection, worker: ExchangeWorker, timed_sweeper: TimedSweeper
    ) -> None:
        worker.name = "w"
        await connect(worker)
        await register_worker(db)
        await timed_sweeper.run_for(10)
        await db.execute(
            """update graphile_worker._private_workers set metadata = metadata || jsonb_build_object(
            'died_at', now() - interval '11 minutes', 'swept_at', now() - interval '2 minutes')"""
        )
        await timed_sweeper.run_for(2)
        assert await db.fetch("select from graphile_worker._private_python_sessions") == []

    async def test_old_sessions_without_a_heartbeat_are_deleted(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        age = "update graphile_worker._private_python_sessions set connected_at = now() - interval '8 days'"
        await register_worker(db, "alive")
        for name in ("crashed", "alive"):
            worker.name = name
            await connect(worker)
        await db.execute(age)
        worker.name = "new"
        await connect(worker)
        await unlock_stale(db, SCHEMA)
        rows = await db.fetch("select worker_id from graphile_worker._private_python_sessions order by 1")
        assert [row["worker_id"] for row in rows] == ["alive", "new"]


async def test_spare_queue_locked_by_another_session_is_released_later(
    db: asyncpg.Connection, database: str
) -> None:
    recorder = EventRecorder()
    other = await asyncpg.connect(database)
    async with running({"task": nothing}, database, recorder=recorder, poll_interval=0.05) as runner:
        await runner.add_job("task", queue_name="q")
        await recorder.until("job:complete")
        await db.execute(
            "update graphile_worker._private_job_queues set locked_by = $1, locked_at = now()", runner.id
        )
        polls = recorder.counts["worker:getJob:empty"]
        async with other.transaction():
            await other.execute("select from graphile_worker._private_job_queues for update")
            await db.execute(
                """select pg_terminate_backend(pid) from pg_stat_activity
                where query like '%_private_python_exchange%' and pid <> pg_backend_pid()"""
            )
            await recorder.until("worker:getJob:empty", polls + 1)
            assert [kind for kind, _ in await locked(db)] == ["queue"]

        async def is_released() -> bool:
            return not await locked(db)

        await until(is_released, "the queue is released")
        await runner.add_job("task", queue_name="q")
        await recorder.until("job:complete", 2)
    await other.close()


def claimed_job(number: int) -> ClaimedJob:
    held = ClaimedJob(None, datetime.now(UTC), None)  # type: ignore[arg-type]
    held.job = SimpleNamespace(id=number, task_identifier="task")  # type: ignore[assignment]
    return held


class TestState:
    """The state that the worker keeps about refusals, without a database."""

    clock: FakeClock
    refusals: Refusals

    @pytest.fixture(autouse=True)
    def _create_refusals(self) -> None:
        self.clock = FakeClock()
        self.refusals = Refusals(self.clock)

    def reply(self, *unclaimable: int) -> ExchangeReply:
        refusal = Refusal("no", "P0001", "task")
        return ExchangeReply(datetime.now(UTC), unclaimable=dict.fromkeys(unclaimable, refusal))

    def answer(self, *unclaimable: int, wanted: int = 10, claimed: int = 0) -> dict[int, Refusal]:
        reply = self.reply(*unclaimable)
        reply.claimed = [claimed_job(1000 + n) for n in range(claimed)]
        return self.refusals.record_answer(ClaimRequest(wanted=wanted), reply)

    def plan(self, wanted: int = 10, *, retries: bool = False) -> tuple[set[int], bool]:
        request, careful = self.refusals.prepare(ClaimRequest(wanted=wanted), retries=retries)
        return set(request.left_out or ()), careful

    def test_calls_are_not_careful_by_default(self) -> None:
        request = ClaimRequest(wanted=3)
        assert self.refusals.prepare(request, retries=False) == (request, False)

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

    def test_unclaimable_job_is_left_out_for_increasing_delays(self) -> None:
        assert list(self.answer(7)) == [7]
        assert self.plan() == ({7}, True)
        for delay in (1, 2, 4, 8, 16, 32, 60, 60):
            self.clock.advance(delay - 0.1)
            assert 7 in self.plan()[0]
            self.clock.advance(0.2)
            assert self.plan() == (set(), True), "the job must be tried again, by a careful call"
            assert self.answer(7) == {}, "the refusal was reported before"
        assert self.plan() == ({7}, False), "calls that leave the job out need not be careful"

    def test_job_that_could_be_claimed_is_no_longer_left_out(self) -> None:
        self.answer(7)
        self.clock.advance(100)
        assert self.plan(wanted=0) == (set(), False), "a call that claims nothing tries nothing"
        assert self.plan() == (set(), True)
        self.answer()
        assert self.plan() == (set(), False)

    def test_job_that_was_not_tried_stays_left_out(self) -> None:
        self.answer(7)
        self.clock.advance(100)
        assert self.plan(wanted=3) == (set(), True)
        assert self.answer(wanted=3, claimed=3) == {}
        assert self.plan() == ({7}, False)
        self.clock.advance(100)
        assert self.plan() == (set(), True)
        assert self.answer(7) == {}, "the refusal was reported before"

    def test_at_most_a_thousand_jobs_are_left_out(self) -> None:
        assert len(self.answer(*range(1500))) == 1000
        assert len(self.plan()[0]) == 1000

    def test_calls_become_smaller_after_a_timeout(self) -> None:
        assert self.refusals.shrink(100)
        request, _ = self.refusals.prepare(ClaimRequest(wanted=80), retries=False)
        assert (request.wanted, self.refusals.limit) == (50, 50)
        assert self.refusals.shrink(2)
        assert not self.refusals.shrink(1)
        for _ in range(14):
            self.answer()
        assert self.refusals.limit is None

    def test_refused_result_is_delayed_and_reported_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = 100.0
        monkeypatch.setattr(results_module, "monotonic", lambda: now)
        results, held = Results(), claimed_job(1)
        result = Result(held, Completed(), None)
        refused = ExchangeReply(datetime.now(UTC), refused={held.claim: Refusal("no", "23503")})
        assert results.sort_out([result], refused).refused == [(result, Refusal("no", "23503"))]
        assert results.park(result)
        assert not results
        assert (results.again, results.refused) == (101.0, 1)
        now = 101.0
        assert results.retries
        assert results.take() == [result]
        assert not results.retries, "the result has been sent"
        assert not results.park(result)
        assert results.again == 103.0
        results.try_refused_once_more()
        assert results.take() == [result]
        assert results.hopeless == set()
        results.park(result)
        assert results.hopeless == {held}
        found = results.sort_out([result], ExchangeReply(datetime.now(UTC)))
        assert (found.recorded, found.late) == ([result], [result])
        assert (results.refused, results.hopeless) == (0, set())

    def test_refused_result_recorded_by_a_lost_call_is_confirmed(self) -> None:
        results, held = Results(), claimed_job(1)
        result = Result(held, Completed(), None)
        results.park(result)
        results.put_back([result], perhaps_recorded=True)
        assert results.confirm(set()) == [result]
        assert results.refused == 0

    def test_limit_leaves_results_for_the_next_call(self) -> None:
        results = Results()
        all_results = [Result(claimed_job(n), Completed(), None) for n in range(5)]
        results.add(all_results)
        assert [results.take(2), results.take(2), results.take(2), results.take(2)] == [
            *(all_results[:2], all_results[2:4], all_results[4:], [])
        ]

    def test_limit_applies_to_results_that_are_sent_again(self) -> None:
        results = Results()
        parked = [Result(claimed_job(n), Completed(), None) for n in range(4)]
        for result in parked:
            results.park(result)
        results.try_refused_once_more()
        assert [results.take(3), results.take(3), results.take(3)] == [parked[:3], parked[3:], []]

    def test_spare_queues_are_kept_until_released(self) -> None:
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


class FailingService(Service):
    name = "failing service"

    async def tick(self) -> float:
        error = asyncpg.CheckViolationError("no")
        error.detail = f"Failing row contains {SECRET}"
        self.cancel()
        raise RuntimeError("outer") from error


async def test_failing_service_logs_no_payload(caplog: pytest.LogCaptureFixture) -> None:
    service = FailingService(ScopedLogger(logging.getLogger("graphile_worker"), {}))
    service.start()
    assert service._task is not None
    await asyncio.wait([service._task])
    assert "failing service" in logged(caplog)[0]
    assert_no_payload(caplog)


def test_without_details_cleans_every_error_in_a_chain() -> None:
    inner = asyncpg.UniqueViolationError("duplicate")
    inner.detail = SECRET
    outer = ValueError("outer")
    outer.__cause__ = inner
    group = ExceptionGroup("several", [outer])
    without_details(group)
    assert str(inner) == "duplicate"
    assert message_of(inner) == "duplicate"
