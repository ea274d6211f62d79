"""What a dead worker held runs again, and what a live one holds is left alone."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import asyncpg
import pytest

from graphile_worker import (
    ConfigurationError,
    Job,
    Recovered,
    Recovery,
    WorkerInfo,
    WorkerUtils,
    recovery,
    run,
)
from graphile_worker._db import workers as database_workers
from graphile_worker._db.connect import Pool
from graphile_worker._db.databases import drop_database
from graphile_worker._db.session import Session
from graphile_worker._db.sql import Schema
from graphile_worker.recovery import DIED, Policy, Sweeper
from graphile_worker.testing import Databases
from support.clock import FakeClock
from support.jobs import add, existing, lock, one
from support.waiting import until
from support.workers import Gate, Heard, locked, nothing, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LEASE: dict[str, Any] = {"seconds": 38, "fast": 8, "tasks": {}}
STEP = 2.0


async def enroll(db: asyncpg.Connection, worker: str = "w", **lease: object) -> None:
    """Register a worker that then says nothing more. Its sessions are gone, unless the test holds one."""
    terms = {**LEASE, "epoch": (await database_workers.meet(db, Schema())).epoch, **lease}
    metadata = {"language": "python", "host": "web-1", "pid": 7, "lease": terms}
    await database_workers.register(db, Schema(), worker, metadata)


async def waits(database: str) -> bool:
    """Whether a session waits for an advisory lock."""
    connection = await asyncpg.connect(database)
    try:
        return bool(
            await connection.fetchval(
                "select exists (select from pg_locks where locktype = 'advisory' and not granted "
                "and database = (select oid from pg_database where datname = current_database()))"
            )
        )
    finally:
        await connection.close()


class Watch:
    """A sweeper whose clock the test moves."""

    def __init__(self, session: Session, **policy: Any) -> None:
        self.clock = FakeClock()
        self.sweeper = Sweeper(
            session=session, name="sweeper", own_id="me", policy=Policy(**policy), clock=self.clock
        )

    async def over(self, seconds: float, step: float = STEP) -> list[Recovered]:
        """Look again and again for so long; what was recovered."""
        found = await self.sweeper.look()
        for _ in range(math.ceil(seconds / step)):
            self.clock.advance(step)
            found += await self.sweeper.look()
        return found


@pytest.fixture
async def session(database: str) -> AsyncIterator[Session]:
    pool = Pool(database)
    yield Session(Schema(), pool, logging.getLogger("graphile_worker"))
    await pool.close()


@pytest.fixture
def watch(session: Session) -> Watch:
    return Watch(session)


async def held_job(db: asyncpg.Connection, worker: str = "w", **job: Any) -> int:
    found = await add(db, **job)
    await lock(db, found["id"], by=worker)
    job_id: int = found["id"]
    return job_id


async def make_due(db: asyncpg.Connection) -> None:
    """As if the dead were last swept a while ago."""
    await db.execute(
        """update graphile_worker._private_workers
        set metadata = metadata || jsonb_build_object('swept_at', now() - interval '1 minute')"""
    )


class TestWhoIsDead:
    async def test_a_worker_whose_sessions_are_gone_after_8_seconds(
        self, db: asyncpg.Connection, watch: Watch
    ) -> None:
        await enroll(db)
        assert await watch.over(8) == []
        [recovered] = await watch.over(2)
        assert recovered.worker.id == "w"
        assert recovered.silence >= 8

    async def test_one_with_a_session_after_38_seconds(self, db: asyncpg.Connection, watch: Watch) -> None:
        await enroll(db)
        await database_workers.hold_session(db, Schema(), "w")
        assert await watch.over(36) == []
        assert len(await watch.over(2)) == 1

    async def test_another_session_with_the_lock_of_a_worker_does_not_stall_it(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """Any role that can connect finds the key in pg_locks."""
        heard = Heard()
        async with running({"task": nothing}, database, heard=heard, heartbeat_interval=0.1) as runner:
            lock = "select pg_advisory_lock(hashtextextended('graphile_worker alive ' || $1::text, 0))"
            async with asyncio.TaskGroup() as group:
                group.create_task(db.execute(lock, runner.id))
                await until(lambda: waits(database), "it waits")
                other = await asyncpg.connect(database)
                await other.execute(
                    "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and granted "
                    "and database = (select oid from pg_database where datname = current_database())"
                )
                await other.close()
            await runner.add_job("task")
            await heard.until("job:complete")
            before = (await runner.utils.workers())[0].last_heartbeat_at

            async def beats() -> bool:
                [worker] = await runner.utils.workers()
                assert worker.lease is not None
                return worker.last_heartbeat_at != before and worker.lease["fast"] is None

            await until(beats, "it beats, and does not rely on the lock")

    async def test_one_whose_session_is_gone_only_now_lives_for_another_8_seconds(
        self, db: asyncpg.Connection, watch: Watch
    ) -> None:
        await enroll(db)
        await database_workers.hold_session(db, Schema(), "w")
        assert await watch.over(20) == []
        await db.execute("select pg_advisory_unlock_all()")
        assert await watch.over(6) == []
        assert len(await watch.over(2)) == 1

    async def test_one_that_beats_never(self, db: asyncpg.Connection, watch: Watch) -> None:
        await enroll(db)
        for _ in range(30):
            assert await watch.over(6) == []
            assert await database_workers.beat(db, Schema(), "w", {})

    async def test_not_by_the_age_of_its_beat(self, db: asyncpg.Connection, watch: Watch) -> None:
        """After an outage all beats are old; after a step of the clock they are from the future."""
        await enroll(db)
        for age in ("1 year", "-1 year"):
            await db.execute(
                """update graphile_worker._private_workers
                set last_heartbeat_at = now() - $1::text::interval""",
                age,
            )
            assert await watch.over(6) == []

    async def test_who_was_away_observes_anew(self, db: asyncpg.Connection, watch: Watch) -> None:
        await enroll(db)
        assert await watch.over(6) == []
        watch.clock.advance(60)
        assert await watch.over(6) == []
        assert len(await watch.over(4)) == 1

    async def test_after_a_restart_of_the_server_missing_sessions_mean_nothing(
        self, db: asyncpg.Connection, watch: Watch
    ) -> None:
        await enroll(db, epoch="another start")
        assert await watch.over(36) == []
        assert len(await watch.over(2)) == 1

    async def test_behind_a_pooler_sessions_mean_nothing(self, db: asyncpg.Connection, watch: Watch) -> None:
        await enroll(db, fast=None)
        assert await watch.over(36) == []
        assert len(await watch.over(2)) == 1

    async def test_only_those_who_advertise_our_lease(self, db: asyncpg.Connection, watch: Watch) -> None:
        """Node's workers have no row; Rust's say nothing of a lease, and have thresholds of their own."""
        await db.execute("select graphile_worker.worker_heartbeat('rust', '{\"pid\": 1}')")
        await db.execute("select graphile_worker.worker_heartbeat('odd', '{\"lease\": \"a word\"}')")
        await db.execute("select graphile_worker.worker_heartbeat('null')")
        jobs = [await held_job(db, worker) for worker in ("rust", "pool-node", "odd", "null")]
        assert await watch.over(120) == []
        assert [(await existing(db, job))["locked_by"] is None for job in jobs] == [False] * 4

    async def test_a_sweeper_never_declares_itself_dead(self, db: asyncpg.Connection, watch: Watch) -> None:
        await enroll(db, "me")
        assert await watch.over(60) == []

    async def test_not_if_it_beats_between_the_last_look_and_the_sentence(
        self, db: asyncpg.Connection, session: Session
    ) -> None:
        await enroll(db)
        [found] = await database_workers.read_beats(db, Schema())
        await database_workers.beat(db, Schema(), "w", {})
        suspect = database_workers.Suspect("w", found.beat, 40.0)
        taken = await session.call(
            lambda on: database_workers.take_dead(on, Schema(), [suspect], "me", all_dead=False)
        )
        assert taken == []
        assert await database_workers.beat(db, Schema(), "w", {})

    async def test_one_sweeper_at_a_time(self, db: asyncpg.Connection, watch: Watch) -> None:
        await enroll(db)
        job = await held_job(db)
        async with db.transaction():
            await db.execute("select from graphile_worker._private_python_migrations for update")
            assert await watch.over(20) == []
        assert [found.id for found in (await watch.over(2))[0].jobs] == [job]

    async def test_two_sweeps_at_once_free_a_job_once(self, db: asyncpg.Connection, session: Session) -> None:
        await enroll(db)
        await held_job(db)
        watches = [Watch(session), Watch(session)]
        for watch in watches:
            await watch.over(8)
            watch.clock.advance(2)
        found = await asyncio.gather(*(watch.sweeper.look() for watch in watches))
        assert sum(len(one.jobs) for looks in found for one in looks) == 1


class TestWhatBecomesOfItsJobs:
    async def test_they_run_again_at_once_with_the_attempt_consumed(
        self, db: asyncpg.Connection, watch: Watch
    ) -> None:
        await enroll(db)
        job = await held_job(db, queue_name="q", job_key="k", payload={"n": 1}, priority=3)
        before = await existing(db, job)
        [recovered] = await watch.over(10)
        after = await existing(db, job)

        assert [found.id for found in recovered.jobs] == [job]
        assert recovered.queues == ["q"]
        assert after["attempts"] == before["attempts"] == 1
        assert after["is_available"]
        assert after["run_at"] == before["run_at"], "it keeps its place in its queue"
        assert after["last_error"] == f"{DIED}w (pid 7 on web-1), not heard from for 10 s"
        for column in ("key", "payload", "priority", "max_attempts", "job_queue_id"):
            assert after[column] == before[column]
        assert await locked(db) == []

    async def test_the_second_time_in_a_row_with_the_usual_delay(
        self, db: asyncpg.Connection, watch: Watch
    ) -> None:
        await enroll(db)
        job = await held_job(db)
        await db.execute("update graphile_worker._private_jobs set last_error = $1", f"{DIED}another")
        await db.execute("update graphile_worker._private_jobs set attempts = 3")
        await watch.over(10)
        delay = await db.fetchval(
            "select extract(epoch from run_at - now()) from graphile_worker._private_jobs where id = $1", job
        )
        assert math.exp(3) - 10 < delay <= math.exp(3), "what is left of it"

    async def test_after_the_delay_that_was_asked_for(self, db: asyncpg.Connection, session: Session) -> None:
        await enroll(db)
        job = await held_job(db)
        await Watch(session, delay=60.0).over(10)
        delay = (await existing(db, job))["run_at"] - datetime.now(UTC)
        assert timedelta(seconds=30) < delay <= timedelta(seconds=61)

    async def test_one_that_runs_later_is_not_made_earlier(
        self, db: asyncpg.Connection, watch: Watch
    ) -> None:
        await enroll(db)
        later = datetime.now(UTC) + timedelta(days=1)
        job = await held_job(db, run_at=later)
        await watch.over(10)
        assert (await existing(db, job))["run_at"] == later

    async def test_at_its_last_attempt_it_has_failed_for_good(
        self, db: asyncpg.Connection, watch: Watch
    ) -> None:
        await enroll(db)
        job = await held_job(db, max_attempts=1)
        await watch.over(10)
        after = await existing(db, job)
        assert (after["attempts"], after["is_available"], after["locked_by"]) == (1, False, None)
        assert after["last_error"].startswith(DIED)

    async def test_the_attempt_is_given_back_if_asked_for(
        self, db: asyncpg.Connection, session: Session
    ) -> None:
        await enroll(db)
        job = await held_job(db)
        await Watch(session, refund=True).over(10)
        assert (await existing(db, job))["attempts"] == 0

    @pytest.mark.parametrize("way", ["added anew", "removed"])
    async def test_but_never_to_a_job_whose_key_was_taken_while_it_ran(
        self, db: asyncpg.Connection, session: Session, way: str
    ) -> None:
        await enroll(db)
        job = await held_job(db, job_key="k")
        if way == "removed":
            await db.execute("select graphile_worker.remove_job('k')")
        else:
            await add(db, job_key="k")
        await Watch(session, refund=True).over(10)
        after = await existing(db, job)
        assert after["attempts"] == after["max_attempts"]
        assert not after["is_available"]

    async def test_a_queue_without_a_locked_job_is_freed_too(
        self, db: asyncpg.Connection, watch: Watch
    ) -> None:
        await enroll(db)
        job = await held_job(db, queue_name="q")
        await db.execute("delete from graphile_worker._private_jobs where id = $1", job)
        [recovered] = await watch.over(10)
        assert recovered.queues == ["q"]
        assert await locked(db) == []

    async def test_a_row_that_somebody_has_locked_is_freed_later_and_its_queue_with_it(
        self, db: asyncpg.Connection, database: str, watch: Watch
    ) -> None:
        await enroll(db)
        job = await held_job(db, queue_name="q")
        other = await asyncpg.connect(database)
        transaction = other.transaction()
        await transaction.start()
        await other.execute("select from graphile_worker._private_jobs where id = $1 for update", job)
        [first] = await watch.over(10)
        assert first.jobs == []
        assert len(await locked(db)) == 2
        await transaction.rollback()
        await other.close()
        await make_due(db)
        [second] = await watch.over(2)
        assert [found.id for found in second.jobs] == [job]
        assert await locked(db) == []

    async def test_one_whose_payload_nobody_can_read_is_freed_like_the_others(
        self, db: asyncpg.Connection, watch: Watch
    ) -> None:
        await enroll(db)
        await held_job(db)
        odd = await held_job(db)
        deep = "[" * 5000 + "]" * 5000
        await db.execute("update graphile_worker._private_jobs set payload = $1 where id = $2", deep, odd)
        [recovered] = await watch.over(10)
        assert len(recovered.jobs) == 2
        assert await locked(db) == []

    async def test_whoever_waits_for_jobs_is_told(
        self, db: asyncpg.Connection, database: str, watch: Watch
    ) -> None:
        told: asyncio.Queue[str] = asyncio.Queue()
        ear = await asyncpg.connect(database)
        await ear.add_listener("jobs:insert", lambda *arguments: told.put_nowait(arguments[-1]))
        await enroll(db)
        await held_job(db)
        while not told.empty():
            told.get_nowait()
        await watch.over(10)
        async with asyncio.timeout(20):
            while json.loads(await told.get())["count"] != 1:
                pass
        await ear.close()

    @pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
    async def test_in_a_database_that_does_not_have_every_character(
        self, databases: Databases, encoding: str
    ) -> None:
        """What the database has is compared as it is; what we add is written in what it has."""
        async with databases.fresh(empty=True) as any_database:
            admin = await asyncpg.connect(any_database)
            name = f"gw_{encoding.lower()}_{uuid4().hex[:8]}"
            await admin.execute(
                f"""create database {name} template template0 encoding '{encoding}'
                lc_collate 'C' lc_ctype 'C'"""
            )
            dsn = any_database.replace(any_database.partition("?")[0].rpartition("/")[2], name)
            try:
                await self._recover_in(dsn, key="clé" if encoding == "LATIN1" else "key")
            finally:
                await drop_database(admin, name)
                await admin.close()

    async def _recover_in(self, dsn: str, key: str) -> None:
        heard = Heard()
        async with running({"täsk" if key != "key" else "task": nothing}, dsn, heard=heard):
            pass
        db, pool = await asyncpg.connect(dsn), Pool(dsn)
        await enroll(db)
        await held_job(db, job_key=key)
        session = Session(Schema(), pool, logging.getLogger("graphile_worker"))
        asked = Recovery("default", None, "日本")
        watch = Watch(session, refund=True, on_recovery=lambda _job, _worker: asked)
        [recovered] = await watch.over(10)
        assert [(job.key, job.attempts) for job in recovered.jobs] == [(key, 1)]
        row = await one(db, "select last_error, attempts from graphile_worker._private_jobs")
        assert (row["last_error"], row["attempts"]) == ("\\u65e5\\u672c", 0)
        await pool.close()
        await db.close()

    async def test_a_thousand_jobs_of_ten_workers_at_once(self, db: asyncpg.Connection, watch: Watch) -> None:
        for number in range(10):
            await enroll(db, f"w{number}")
        await db.execute(
            """select graphile_worker.add_job('task', queue_name => 'q' || n % 50)
            from generate_series(1, 1000) as n"""
        )
        for table in ("jobs", "job_queues"):
            await db.execute(
                f"update graphile_worker._private_{table} set locked_at = now(), locked_by = 'w' || id % 10"
            )
        recovered = await watch.over(10)
        assert sum(len(one.jobs) for one in recovered) == 1000
        assert sum(len(one.queues) for one in recovered) == 50
        assert await locked(db) == []


class TestTombstones:
    async def test_a_dead_worker_claims_nothing(self, db: asyncpg.Connection, watch: Watch) -> None:
        """Its statement may arrive later than the sweep."""
        await enroll(db)
        await watch.over(10)
        await add(db)
        [task_id] = await db.fetchrow("select id from graphile_worker._private_tasks") or []
        exchange = """select count(*) from graphile_worker._private_python_exchange_v2(
          'w', '{}', '{}', null, null, null, array[$1::integer], 5, 1, null, now(), $2, $3, $4, 0,
          null, false, null)
          where kind is null"""
        assert await db.fetchval(exchange, task_id, None, None, None) == 0
        long_ago = datetime(2000, 1, 1, tzinfo=UTC)
        assert await db.fetchval(exchange, task_id, 0, long_ago, 0) == 0
        await database_workers.register(db, Schema(), "w", {"lease": LEASE})
        assert await db.fetchval(exchange, task_id, None, None, None) == 1

    async def test_what_is_locked_under_its_name_later_is_freed_later(
        self, db: asyncpg.Connection, watch: Watch
    ) -> None:
        await enroll(db)
        await watch.over(10)
        job = await held_job(db, queue_name="late")
        assert await watch.over(4) == []
        await make_due(db)
        [recovered] = await watch.over(2)
        assert [found.id for found in recovered.jobs] == [job]
        assert await locked(db) == []

    async def test_it_is_forgotten_when_it_holds_nothing_for_ten_minutes(
        self, db: asyncpg.Connection, watch: Watch
    ) -> None:
        await enroll(db)
        await watch.over(10)
        age = """update graphile_worker._private_workers set metadata = metadata || jsonb_build_object(
          'died_at', now() - interval '11 minutes', 'swept_at', now() - interval '2 minutes')"""
        job = await held_job(db)
        async with db.transaction():
            await db.execute("select from graphile_worker._private_jobs where id = $1 for update", job)
            await db.execute(age)
        await watch.over(2)
        await db.execute(age)
        await watch.over(2)
        assert await db.fetch("select from graphile_worker._private_workers") == []

    async def test_one_that_came_back_to_life_keeps_what_it_claimed_since(
        self, db: asyncpg.Connection, session: Session, watch: Watch
    ) -> None:
        await enroll(db)
        await watch.over(10)
        await database_workers.register(db, Schema(), "w", {"lease": LEASE})
        job = await held_job(db)
        row = await existing(db, job)
        change = {"id": job, "locked_by": "w", "locked_at": row["locked_at"].isoformat(), "error": "late"}
        freed = await session.call(lambda on: database_workers.free(on, Schema(), ["w"], [change]))
        assert freed.jobs == set()
        assert (await existing(db, job))["locked_by"] == "w"


class TestLongerLeases:
    async def test_a_job_of_such_a_task_is_taken_only_when_its_own_lease_is_over(
        self, db: asyncpg.Connection, watch: Watch
    ) -> None:
        await enroll(db, tasks={"charge": 100})
        charge = await held_job(db, identifier="charge", queue_name="money")
        other = await held_job(db)
        [first] = await watch.over(10)
        assert [job.id for job in first.jobs] == [other]
        assert (await existing(db, charge))["locked_by"] == "w"
        await make_due(db)
        assert await watch.over(94) == []
        await make_due(db)
        [second] = await watch.over(2)
        assert [job.id for job in second.jobs] == [charge]
        assert second.queues == ["money"]


class TestTheHook:
    async def test_decides_for_each_job(self, db: asyncpg.Connection, session: Session) -> None:
        asked: list[tuple[str, str]] = []

        async def decide(job: Job, worker: WorkerInfo) -> Recovery | None:
            asked.append((job.task_identifier, worker.name))
            return {
                "default": Recovery.default(),
                "nothing": None,
                "later": Recovery.reschedule(timedelta(minutes=5)),
                "never": Recovery.fail("it may have been paid already"),
                "mine": Recovery.leave(),
            }[job.task_identifier]

        await enroll(db)
        jobs = {
            name: await held_job(db, identifier=name, queue_name=f"queue of {name}")
            for name in ("default", "nothing", "later", "never", "mine")
        }
        watch = Watch(session, on_recovery=decide)
        [recovered] = await watch.over(10)

        assert {job.task_identifier for job in recovered.jobs} == {"default", "nothing", "later", "never"}
        assert "queue of mine" not in recovered.queues
        rows = {name: await existing(db, job) for name, job in jobs.items()}
        assert rows["default"]["is_available"]
        assert rows["nothing"]["is_available"]
        assert rows["later"]["run_at"] > datetime.now(UTC) + timedelta(minutes=4)
        assert rows["never"]["attempts"] == rows["never"]["max_attempts"]
        assert rows["never"]["last_error"] == "it may have been paid already"
        assert rows["mine"]["locked_by"] == "w"
        assert len(asked) == 5
        assert asked[0][1] == "w (pid 7 on web-1)"

        await make_due(db)
        assert await watch.over(2) == []
        assert len(asked) == 5  # what it left it is not asked about again

    @pytest.mark.parametrize("wrong", ["raises", "returns nonsense"])
    async def test_that_fails_does_not_keep_the_job_locked(
        self, db: asyncpg.Connection, session: Session, caplog: pytest.LogCaptureFixture, wrong: str
    ) -> None:
        def decide(_job: Job, _worker: WorkerInfo) -> Any:
            if wrong == "raises":
                raise ValueError("oops")
            return "nonsense"

        await enroll(db)
        job = await held_job(db)
        await Watch(session, on_recovery=decide).over(10)
        assert (await existing(db, job))["is_available"]
        assert f"on_recovery failed for job {job}" in caplog.text

    async def test_slow_ones_are_asked_at_once_and_once(
        self, db: asyncpg.Connection, session: Session
    ) -> None:
        asked: list[int] = []
        all_asked = asyncio.Event()

        async def decide(job: Job, _worker: WorkerInfo) -> None:
            asked.append(job.id)
            if len(asked) == 10:
                all_asked.set()
            await all_asked.wait()

        await enroll(db)
        jobs = [await held_job(db) for _ in range(10)]
        first, second = Watch(session, on_recovery=decide), Watch(session, on_recovery=decide)
        await second.over(6)
        async with asyncio.timeout(10):
            [recovered] = await first.over(10)
        await second.over(4)
        assert sorted(asked) == sorted(jobs)
        assert len(recovered.jobs) == 10

    async def test_that_never_answers_does_not_keep_the_job_locked(
        self, db: asyncpg.Connection, session: Session, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(recovery, "_HOOK_PATIENCE", 0.1)

        async def decide(_job: Job, _worker: WorkerInfo) -> None:
            await asyncio.Event().wait()

        await enroll(db)
        job = await held_job(db)
        await Watch(session, on_recovery=decide).over(10)
        assert (await existing(db, job))["is_available"]

    async def test_is_called_outside_of_any_transaction(
        self, db: asyncpg.Connection, session: Session
    ) -> None:
        async def decide(job: Job, _worker: WorkerInfo) -> Recovery | None:
            await db.execute("update graphile_worker._private_jobs set priority = 5 where id = $1", job.id)
            return None

        await enroll(db)
        job = await held_job(db)
        await Watch(session, on_recovery=decide).over(10)
        row = await existing(db, job)
        assert (row["priority"], row["is_available"]) == (5, True)


class TestByHand:
    async def test_a_sweep_frees_what_dead_workers_hold(self, db: asyncpg.Connection, database: str) -> None:
        await enroll(db, seconds=4, fast=1)
        await db.execute(
            "update graphile_worker._private_workers set last_heartbeat_at = now() - interval '1 minute'"
        )
        job = await held_job(db)
        async with WorkerUtils(database) as utils:
            [planned] = await utils.sweep(dry_run=True)
            assert [found.id for found in planned.jobs] == [job]
            assert (await existing(db, job))["locked_by"] == "w"
            [done] = await utils.sweep()
            assert [found.id for found in done.jobs] == [job]
            assert await utils.sweep() == []
        assert await locked(db) == []

    async def test_it_also_frees_at_once_what_a_worker_holds_that_is_dead_already(
        self, db: asyncpg.Connection, database: str, watch: Watch
    ) -> None:
        await enroll(db)
        await watch.over(10)
        job = await held_job(db)
        async with WorkerUtils(database) as utils:
            [done] = await utils.sweep()
        assert [found.id for found in done.jobs] == [job]

    async def test_it_waits_until_all_who_live_were_heard_from(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        options: dict[str, Any] = {"heartbeat_interval": 0.3, "fast_lease": 1.2, "lease": 16.0}
        gate = Gate()
        async with running({"task": gate}, database, **options), WorkerUtils(database) as utils:
            await add(db)
            await gate.until_begun()
            assert await utils.sweep() == []
            assert len(await locked(db)) == 1
            gate.open()

    async def test_workers_of_all_kinds_are_listed_with_what_they_hold(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await enroll(db, "python-1")
        await db.execute("select graphile_worker.worker_heartbeat('rust-1', '{\"pid\": 12}')")
        await db.execute("select graphile_worker.worker_heartbeat('who', '[1]')")
        await held_job(db, "python-1", queue_name="q")
        await held_job(db, "pool-node")
        async with WorkerUtils(database) as utils:
            found = {worker.id: worker for worker in await utils.workers()}
        assert {name: worker.language for name, worker in found.items()} == {
            "python-1": "python",
            "rust-1": "rust",
            "who": None,
            "pool-node": "node",
        }
        assert (found["python-1"].jobs, found["python-1"].queues) == (1, 1)
        assert (found["python-1"].host, found["python-1"].pid) == ("web-1", 7)
        assert found["rust-1"].pid == 12
        assert found["pool-node"].jobs == 1
        assert found["pool-node"].last_heartbeat_at is None


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"heartbeat_interval": 5.0}, "Each must be at least twice"),
            ({"fast_lease": 20.0}, "Each must be at least twice"),
            ({"lease": 0}, "lease is 0"),
            ({"task_leases": {"a": 1}}, "The lease of the task 'a' is 1 s; it must be from 38 s"),
            ({"task_leases": {"a": 20_000}}, "to 10800 s"),
            ({"task_leases": {"a": 600}}, "tasks that this worker does not have: a"),
            ({"task_leases": ["a"]}, "it must be a mapping"),
            ({"task_leases": {"a": "long"}}, "task_leases\\['a'\\] is 'long'"),
            ({"recovery": None}, "recovery is None"),
            ({"on_recovery": 7}, "on_recovery is 7"),
            ({"recovery_delay": -1}, "recovery_delay is -1"),
        ],
    )
    async def test_that_cannot_be_are_refused(self, options: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigurationError, match=said):
            await run({"task": print}, "postgresql://nowhere", **options)

    async def test_without_recovery_nobody_says_anything(self, db: asyncpg.Connection, database: str) -> None:
        await enroll(db, seconds=0.2, fast=0.1)
        job = await held_job(db, identifier="other")
        async with await run({"task": print}, database, recovery=False, handle_signals=False) as runner:
            await runner.add_job("task")
            await until(lambda: _gone(db, "task"), "the job is done")
            rows = await db.fetch("select id from graphile_worker._private_workers")
        assert [row["id"] for row in rows] == ["w"]
        assert (await existing(db, job))["locked_by"] == "w"


async def _gone(db: asyncpg.Connection, task: str) -> bool:
    row = await one(db, "select count(*) as n from graphile_worker.jobs where task_identifier = $1", task)
    return bool(row["n"] == 0)
