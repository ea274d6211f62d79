"""Jobs of a dead worker run again, and jobs of a live worker stay locked."""

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
    RecoveredWorker,
    RecoveryAction,
    WorkerInfo,
    WorkerUtils,
    run,
)
from graphile_worker._db.connection.connect import Pool
from graphile_worker._db.connection.session import Session
from graphile_worker._db.queries import workers as database_workers
from graphile_worker._db.schema.databases import drop_database
from graphile_worker._db.sql_files import Schema
from graphile_worker._recovery import sweeper
from graphile_worker._recovery.sweeper import RecoveryPolicy, Sweeper
from graphile_worker.testing import Databases
from support.clock import FakeClock
from support.jobs import add, existing, fetch_one, lock
from support.waiting import until, until_blocked
from support.workers import EventRecorder, Gate, locked, nothing, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LEASE: dict[str, Any] = {"seconds": 38, "fast": 8, "tasks": {}}
STEP = 2.0


async def register_worker(db: asyncpg.Connection, worker: str = "w", **lease: object) -> None:
    """Register a worker that records no further heartbeats.

    It has no session, unless the test holds one.
    """
    advertised = {**LEASE, "epoch": (await database_workers.identify_server(db, Schema())).epoch, **lease}
    metadata = {"language": "python", "host": "web-1", "pid": 7, "lease": advertised}
    await database_workers.register(db, Schema(), worker, metadata)


async def is_session_waiting(database: str) -> bool:
    """Return whether a session waits for an advisory lock."""
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


class TimedSweeper:
    """A sweeper whose clock the test moves."""

    def __init__(self, session: Session, **policy: Any) -> None:
        self.clock = FakeClock()
        self.sweeper = Sweeper(
            session=session, name="sweeper", own_id="me", policy=RecoveryPolicy(**policy), clock=self.clock
        )

    async def run_for(self, seconds: float, step: float = STEP) -> list[RecoveredWorker]:
        """Sweep every `step` for so many seconds, and return the recovered workers."""
        found = await self.sweeper.sweep()
        for _ in range(math.ceil(seconds / step)):
            self.clock.advance(step)
            found += await self.sweeper.sweep()
        return found


@pytest.fixture
async def session(database: str) -> AsyncIterator[Session]:
    pool = Pool(database)
    yield Session(Schema(), pool, logging.getLogger("graphile_worker"))
    await pool.close()


@pytest.fixture
def timed_sweeper(session: Session) -> TimedSweeper:
    return TimedSweeper(session)


async def add_locked_job(db: asyncpg.Connection, worker: str = "w", **job: Any) -> int:
    found = await add(db, **job)
    await lock(db, found["id"], by=worker)
    job_id: int = found["id"]
    return job_id


async def make_sweep_due(db: asyncpg.Connection) -> None:
    """Make the last sweep of the dead workers look a minute old."""
    await db.execute(
        """update graphile_worker._private_workers
        set metadata = metadata || jsonb_build_object('swept_at', now() - interval '1 minute')"""
    )


class TestDeclaringDead:
    async def test_worker_without_a_session_is_dead_after_8_seconds_of_silence(
        self, db: asyncpg.Connection, timed_sweeper: TimedSweeper
    ) -> None:
        await register_worker(db)
        assert await timed_sweeper.run_for(8) == []
        [recovered] = await timed_sweeper.run_for(2)
        assert recovered.worker.id == "w"
        assert recovered.silence >= 8

    async def test_worker_with_a_session_is_dead_after_38_seconds_of_silence(
        self, db: asyncpg.Connection, timed_sweeper: TimedSweeper
    ) -> None:
        await register_worker(db)
        await database_workers.hold_session(db, Schema(), "w")
        assert await timed_sweeper.run_for(36) == []
        assert len(await timed_sweeper.run_for(2)) == 1

    async def test_worker_goes_on_when_another_session_holds_its_lock(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """Any role that can connect can read the key of the lock in pg_locks, and take the lock."""
        recorder = EventRecorder()
        async with running({"task": nothing}, database, recorder=recorder, heartbeat_interval=0.1) as runner:
            lock = "select pg_advisory_lock(hashtextextended('graphile_worker alive ' || $1::text, 0))"
            async with asyncio.TaskGroup() as group:
                group.create_task(db.execute(lock, runner.id))
                await until(lambda: is_session_waiting(database), "the session waits for the lock")
                other = await asyncpg.connect(database)
                await other.execute(
                    "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and granted "
                    "and database = (select oid from pg_database where datname = current_database())"
                )
                await other.close()
            await runner.add_job("task")
            await recorder.until("job:complete")
            before = (await runner.utils.workers())[0].last_heartbeat_at

            async def records_heartbeats() -> bool:
                [worker] = await runner.utils.workers()
                assert worker.lease is not None
                return worker.last_heartbeat_at != before and worker.lease["fast"] is None

            await until(records_heartbeats, "the worker records heartbeats and does not rely on the lock")

    async def test_worker_that_just_lost_its_session_is_dead_8_seconds_later(
        self, db: asyncpg.Connection, timed_sweeper: TimedSweeper
    ) -> None:
        await register_worker(db)
        await database_workers.hold_session(db, Schema(), "w")
        assert await timed_sweeper.run_for(20) == []
        await db.execute("select pg_advisory_unlock_all()")
        assert await timed_sweeper.run_for(6) == []
        assert len(await timed_sweeper.run_for(2)) == 1

    async def test_worker_that_records_heartbeats_is_never_declared_dead(
        self, db: asyncpg.Connection, timed_sweeper: TimedSweeper
    ) -> None:
        await register_worker(db)
        for _ in range(30):
            assert await timed_sweeper.run_for(6) == []
            assert await database_workers.record_heartbeat(db, Schema(), "w", {})

    async def test_sweeper_ignores_the_age_of_heartbeats(
        self, db: asyncpg.Connection, timed_sweeper: TimedSweeper
    ) -> None:
        """After an outage all heartbeats are old. After a clock step they may be in the future."""
        await register_worker(db)
        for age in ("1 year", "-1 year"):
            await db.execute(
                """update graphile_worker._private_workers
                set last_heartbeat_at = now() - $1::text::interval""",
                age,
            )
            assert await timed_sweeper.run_for(6) == []

    async def test_sweeper_that_paused_starts_observing_again(
        self, db: asyncpg.Connection, timed_sweeper: TimedSweeper
    ) -> None:
        await register_worker(db)
        assert await timed_sweeper.run_for(6) == []
        timed_sweeper.clock.advance(60)
        assert await timed_sweeper.run_for(6) == []
        assert len(await timed_sweeper.run_for(4)) == 1

    async def test_missing_session_after_a_server_restart_does_not_shorten_the_lease(
        self, db: asyncpg.Connection, timed_sweeper: TimedSweeper
    ) -> None:
        await register_worker(db, epoch="another start")
        assert await timed_sweeper.run_for(36) == []
        assert len(await timed_sweeper.run_for(2)) == 1

    async def test_missing_session_behind_a_pooler_does_not_shorten_the_lease(
        self, db: asyncpg.Connection, timed_sweeper: TimedSweeper
    ) -> None:
        await register_worker(db, fast=None)
        assert await timed_sweeper.run_for(36) == []
        assert len(await timed_sweeper.run_for(2)) == 1

    async def test_sweeper_ignores_workers_that_advertise_no_python_lease(
        self, db: asyncpg.Connection, timed_sweeper: TimedSweeper
    ) -> None:
        """Node workers have no row. Rust workers have a row without a lease, and other thresholds."""
        await db.execute("select graphile_worker.worker_heartbeat('rust', '{\"pid\": 1}')")
        await db.execute("select graphile_worker.worker_heartbeat('odd', '{\"lease\": \"a word\"}')")
        await db.execute("select graphile_worker.worker_heartbeat('null')")
        jobs = [await add_locked_job(db, worker) for worker in ("rust", "pool-node", "odd", "null")]
        assert await timed_sweeper.run_for(120) == []
        assert [(await existing(db, job))["locked_by"] is None for job in jobs] == [False] * 4

    async def test_a_sweeper_never_declares_itself_dead(
        self, db: asyncpg.Connection, timed_sweeper: TimedSweeper
    ) -> None:
        await register_worker(db, "me")
        assert await timed_sweeper.run_for(60) == []

    async def test_heartbeat_after_the_last_sweep_prevents_a_declaration_of_death(
        self, db: asyncpg.Connection, session: Session
    ) -> None:
        await register_worker(db)
        [found] = await database_workers.read_heartbeats(db, Schema())
        await database_workers.record_heartbeat(db, Schema(), "w", {})
        suspect = database_workers.Suspect("w", found.beat, 40.0)
        taken = await session.call(
            lambda on: database_workers.claim_dead_workers(on, Schema(), [suspect], "me", all_dead=False)
        )
        assert taken == []
        assert await database_workers.record_heartbeat(db, Schema(), "w", {})

    async def test_only_one_sweeper_works_at_a_time(
        self, db: asyncpg.Connection, timed_sweeper: TimedSweeper
    ) -> None:
        await register_worker(db)
        job = await add_locked_job(db)
        async with db.transaction():
            await db.execute("select from graphile_worker._private_python_migrations for update")
            assert await timed_sweeper.run_for(20) == []
        assert [found.id for found in (await timed_sweeper.run_for(2))[0].jobs] == [job]

    async def test_concurrent_sweeps_release_a_job_once(
        self, db: asyncpg.Connection, session: Session
    ) -> None:
        await register_worker(db)
        await add_locked_job(db)
        timed_sweepers = [TimedSweeper(session), TimedSweeper(session)]
        for timed_sweeper in timed_sweepers:
            await timed_sweeper.run_for(8)
            timed_sweeper.clock.advance(2)
        found = await asyncio.gather(*(timed_sweeper.sweeper.sweep() for timed_sweeper in timed_sweepers))
        assert sum(len(recovered.jobs) for sweep in found for recovered in sweep) == 1


class TestJobsOfADeadWorker:
    async def test_job_of_a_dead_worker_is_ready_at_once_with_its_attempt_consumed(
        self, db: asyncpg.Connection, timed_sweeper: TimedSweeper
    ) -> None:
        await register_worker(db)
        job = await add_locked_job(db, queue_name="q", job_key="k", payload={"n": 1}, priority=3)
        before = await existing(db, job)
        [recovered] = await timed_sweeper.run_for(10)
        after = await existing(db, job)

        assert [found.id for found in recovered.jobs] == [job]
        assert recovered.queues == ["q"]
        assert after["attempts"] == before["attempts"] == 1
        assert after["is_available"]
        assert after["run_at"] == before["run_at"], "the job must keep its place in its queue"
        for fact in ("w (pid 7 on web-1)", "no heartbeat for 10 s"):
            assert fact in after["last_error"]
        for column in ("key", "payload", "priority", "max_attempts", "job_queue_id"):
            assert after[column] == before[column]
        assert await locked(db) == []

    async def test_second_consecutive_death_delays_the_job_like_a_failure(
        self, db: asyncpg.Connection, session: Session
    ) -> None:
        await register_worker(db)
        job = await add_locked_job(db)
        await TimedSweeper(session).run_for(10)
        await register_worker(db, "another")
        await lock(db, job, by="another")
        await TimedSweeper(session).run_for(10)
        row = await existing(db, job)
        assert row["attempts"] == 2
        delay = row["run_at"] - datetime.now(UTC)
        assert timedelta(0) < delay <= timedelta(seconds=math.exp(2))

    @pytest.mark.parametrize(
        "change",
        ["last_error = 'failed in a Node worker'", "attempts = attempts + 1"],
        ids=["text", "attempt"],
    )
    async def test_death_after_a_failure_recorded_by_another_program_counts_as_the_first(
        self, db: asyncpg.Connection, session: Session, change: str
    ) -> None:
        await register_worker(db)
        job = await add_locked_job(db)
        await TimedSweeper(session).run_for(10)
        await db.execute(f"update graphile_worker._private_jobs set {change}")
        await register_worker(db, "another")
        await lock(db, job, by="another")
        before = await existing(db, job)
        await TimedSweeper(session).run_for(10)
        assert (await existing(db, job))["run_at"] == before["run_at"]

    async def test_recovery_delay_postpones_recovered_jobs(
        self, db: asyncpg.Connection, session: Session
    ) -> None:
        await register_worker(db)
        job = await add_locked_job(db)
        await TimedSweeper(session, delay=60.0).run_for(10)
        delay = (await existing(db, job))["run_at"] - datetime.now(UTC)
        assert timedelta(seconds=30) < delay <= timedelta(seconds=61)

    async def test_recovery_never_makes_a_job_run_earlier(
        self, db: asyncpg.Connection, timed_sweeper: TimedSweeper
    ) -> None:
        await register_worker(db)
        later = datetime.now(UTC) + timedelta(days=1)
        job = await add_locked_job(db, run_at=later)
        await timed_sweeper.run_for(10)
        assert (await existing(db, job))["run_at"] == later

    async def test_job_at_its_last_attempt_fails_permanently_when_its_worker_dies(
        self, db: asyncpg.Connection, timed_sweeper: TimedSweeper
    ) -> None:
        await register_worker(db)
        job = await add_locked_job(db, max_attempts=1)
        await timed_sweeper.run_for(10)
        after = await existing(db, job)
        assert (after["attempts"], after["is_available"], after["locked_by"]) == (1, False, None)
        assert "w (pid 7 on web-1)" in after["last_error"]

    async def test_recovery_refunds_the_attempt_if_configured(
        self, db: asyncpg.Connection, session: Session
    ) -> None:
        await register_worker(db)
        job = await add_locked_job(db)
        await TimedSweeper(session, refund=True).run_for(10)
        assert (await existing(db, job))["attempts"] == 0

    @pytest.mark.parametrize("way", ["added again", "removed"])
    async def test_recovery_never_refunds_a_job_whose_key_was_taken_while_it_ran(
        self, db: asyncpg.Connection, session: Session, way: str
    ) -> None:
        await register_worker(db)
        job = await add_locked_job(db, job_key="k")
        if way == "removed":
            await db.execute("select graphile_worker.remove_job('k')")
        else:
            await add(db, job_key="k")
        await TimedSweeper(session, refund=True).run_for(10)
        after = await existing(db, job)
        assert after["attempts"] == after["max_attempts"]
        assert not after["is_available"]

    async def test_sweep_releases_a_queue_without_a_locked_job(
        self, db: asyncpg.Connection, timed_sweeper: TimedSweeper
    ) -> None:
        await register_worker(db)
        job = await add_locked_job(db, queue_name="q")
        await db.execute("delete from graphile_worker._private_jobs where id = $1", job)
        [recovered] = await timed_sweeper.run_for(10)
        assert recovered.queues == ["q"]
        assert await locked(db) == []

    async def test_row_locked_by_another_transaction_is_released_later_with_its_queue(
        self, db: asyncpg.Connection, database: str, timed_sweeper: TimedSweeper
    ) -> None:
        await register_worker(db)
        job = await add_locked_job(db, queue_name="q")
        other = await asyncpg.connect(database)
        transaction = other.transaction()
        await transaction.start()
        await other.execute("select from graphile_worker._private_jobs where id = $1 for update", job)
        [first] = await timed_sweeper.run_for(10)
        assert first.jobs == []
        assert len(await locked(db)) == 2
        await transaction.rollback()
        await other.close()
        await make_sweep_due(db)
        [second] = await timed_sweeper.run_for(2)
        assert [found.id for found in second.jobs] == [job]
        assert await locked(db) == []

    async def test_job_with_an_unreadable_payload_is_released_like_others(
        self, db: asyncpg.Connection, timed_sweeper: TimedSweeper
    ) -> None:
        await register_worker(db)
        await add_locked_job(db)
        odd = await add_locked_job(db)
        deep = "[" * 5000 + "]" * 5000
        await db.execute("update graphile_worker._private_jobs set payload = $1 where id = $2", deep, odd)
        [recovered] = await timed_sweeper.run_for(10)
        assert len(recovered.jobs) == 2
        assert await locked(db) == []

    async def test_recovery_notifies_waiting_workers(
        self, db: asyncpg.Connection, database: str, timed_sweeper: TimedSweeper
    ) -> None:
        notifications: asyncio.Queue[str] = asyncio.Queue()
        listener = await asyncpg.connect(database)
        await listener.add_listener("jobs:insert", lambda *arguments: notifications.put_nowait(arguments[-1]))
        await register_worker(db)
        await add_locked_job(db)
        while not notifications.empty():
            notifications.get_nowait()
        await timed_sweeper.run_for(10)
        async with asyncio.timeout(20):
            while json.loads(await notifications.get())["count"] != 1:
                pass
        await listener.close()

    @pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
    async def test_recovery_works_in_databases_with_other_encodings(
        self, databases: Databases, encoding: str
    ) -> None:
        """Stored values are compared unchanged, and new values use only characters that the database has."""
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
        recorder = EventRecorder()
        async with running({"täsk" if key != "key" else "task": nothing}, dsn, recorder=recorder):
            pass
        db, pool = await asyncpg.connect(dsn), Pool(dsn)
        await register_worker(db)
        await add_locked_job(db, job_key=key)
        session = Session(Schema(), pool, logging.getLogger("graphile_worker"))
        action = RecoveryAction("default", None, "日本")
        timed_sweeper = TimedSweeper(session, refund=True, on_recovery=lambda _job, _worker: action)
        [recovered] = await timed_sweeper.run_for(10)
        assert [(job.key, job.attempts) for job in recovered.jobs] == [(key, 1)]
        row = await fetch_one(db, "select last_error, attempts from graphile_worker._private_jobs")
        assert (row["last_error"], row["attempts"]) == ("\\u65e5\\u672c", 0)
        await pool.close()
        await db.close()

    async def test_sweep_recovers_a_thousand_jobs_of_ten_workers(
        self, db: asyncpg.Connection, timed_sweeper: TimedSweeper
    ) -> None:
        for number in range(10):
            await register_worker(db, f"w{number}")
        await db.execute(
            """select graphile_worker.add_job('task', queue_name => 'q' || n % 50)
            from generate_series(1, 1000) as n"""
        )
        for table in ("jobs", "job_queues"):
            await db.execute(
                f"update graphile_worker._private_{table} set locked_at = now(), locked_by = 'w' || id % 10"
            )
        recovered = await timed_sweeper.run_for(10)
        assert sum(len(one.jobs) for one in recovered) == 1000
        assert sum(len(one.queues) for one in recovered) == 50
        assert await locked(db) == []


class TestDeadWorkers:
    async def test_worker_declared_dead_claims_nothing(
        self, db: asyncpg.Connection, timed_sweeper: TimedSweeper
    ) -> None:
        """Its last exchange may reach the server after the sweep."""
        await register_worker(db)
        await timed_sweeper.run_for(10)
        await add(db)
        [task_id] = await db.fetchrow("select id from graphile_worker._private_tasks") or []
        exchange = """select count(*) from graphile_worker._private_python_exchange_v4(
          'w', '{}', '{}', null, null, 0, null, array[$1::integer], 5, null, 1, false, null, now(), $2, $3,
          $4, 0, null, false, null)
          where kind is null"""
        assert await db.fetchval(exchange, task_id, None, None, None) == 0
        long_ago = datetime(2000, 1, 1, tzinfo=UTC)
        assert await db.fetchval(exchange, task_id, 0, long_ago, 0) == 0
        await database_workers.register(db, Schema(), "w", {"lease": LEASE})
        assert await db.fetchval(exchange, task_id, None, None, None) == 1

    async def test_job_locked_by_a_dead_worker_after_its_sweep_is_released_later(
        self, db: asyncpg.Connection, timed_sweeper: TimedSweeper
    ) -> None:
        await register_worker(db)
        await timed_sweeper.run_for(10)
        job = await add_locked_job(db, queue_name="late")
        assert await timed_sweeper.run_for(4) == []
        await make_sweep_due(db)
        [recovered] = await timed_sweeper.run_for(2)
        assert [found.id for found in recovered.jobs] == [job]
        assert await locked(db) == []

    async def test_dead_worker_is_deleted_after_ten_minutes_without_locks(
        self, db: asyncpg.Connection, timed_sweeper: TimedSweeper
    ) -> None:
        await register_worker(db)
        await timed_sweeper.run_for(10)
        age = """update graphile_worker._private_workers set metadata = metadata || jsonb_build_object(
          'died_at', now() - interval '11 minutes', 'swept_at', now() - interval '2 minutes')"""
        job = await add_locked_job(db)
        async with db.transaction():
            await db.execute("select from graphile_worker._private_jobs where id = $1 for update", job)
            await db.execute(age)
        await timed_sweeper.run_for(2)
        await db.execute(age)
        await timed_sweeper.run_for(2)
        assert await db.fetch("select from graphile_worker._private_workers") == []
        assert await db.fetch("select from graphile_worker._private_python_dead_workers") == []

    async def test_dead_worker_is_forgotten_if_its_row_was_removed(
        self, db: asyncpg.Connection, timed_sweeper: TimedSweeper
    ) -> None:
        for name in ("gone", "swept"):
            await register_worker(db, name)
        await timed_sweeper.run_for(10)
        await database_workers.deregister(db, Schema(), "gone")
        forgotten = "select worker_id from graphile_worker._private_python_dead_workers order by 1"
        await database_workers.unlock_stale(db, Schema())
        assert [row[0] for row in await db.fetch(forgotten)] == ["gone", "swept"], "a statement may be late"
        await db.execute(
            "update graphile_worker._private_python_dead_workers set died_at = now() - interval '11 minutes'"
        )
        await database_workers.unlock_stale(db, Schema())
        assert [row[0] for row in await db.fetch(forgotten)] == ["swept"]

    async def test_worker_that_registers_while_it_is_declared_dead_is_alive(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """Registering waits for the sweeper, and then removes what the sweeper has committed."""
        other = await asyncpg.connect(database)
        await register_worker(db)
        [beat] = await database_workers.read_heartbeats(db, Schema())
        suspect = database_workers.Suspect("w", beat.beat, 60.0)
        sweeping = other.transaction()
        await sweeping.start()
        assert await database_workers.claim_dead_workers(other, Schema(), [suspect], "s", all_dead=False)
        registering = asyncio.create_task(database_workers.register(db, Schema(), "w", {"lease": LEASE}))
        await until_blocked(other, db.get_server_pid())
        await sweeping.commit()
        await registering
        [beat] = await database_workers.read_heartbeats(db, Schema())
        assert not beat.dead
        assert await db.fetch("select from graphile_worker._private_python_dead_workers") == []
        await other.close()

    async def test_worker_that_registered_again_keeps_jobs_claimed_since(
        self, db: asyncpg.Connection, session: Session, timed_sweeper: TimedSweeper
    ) -> None:
        await register_worker(db)
        await timed_sweeper.run_for(10)
        await database_workers.register(db, Schema(), "w", {"lease": LEASE})
        job = await add_locked_job(db)
        row = await existing(db, job)
        change = {"id": job, "locked_by": "w", "locked_at": row["locked_at"].isoformat(), "error": "late"}
        released = await session.call(
            lambda on: database_workers.release_locks(on, Schema(), ["w"], [change])
        )
        assert released.jobs == set()
        assert (await existing(db, job))["locked_by"] == "w"


class TestLongerLeases:
    async def test_job_of_a_task_with_a_longer_lease_is_recovered_when_that_lease_ends(
        self, db: asyncpg.Connection, timed_sweeper: TimedSweeper
    ) -> None:
        await register_worker(db, tasks={"charge": 100})
        charge = await add_locked_job(db, identifier="charge", queue_name="money")
        other = await add_locked_job(db)
        [first] = await timed_sweeper.run_for(10)
        assert [job.id for job in first.jobs] == [other]
        assert (await existing(db, charge))["locked_by"] == "w"
        await make_sweep_due(db)
        assert await timed_sweeper.run_for(94) == []
        await make_sweep_due(db)
        [second] = await timed_sweeper.run_for(2)
        assert [job.id for job in second.jobs] == [charge]
        assert second.queues == ["money"]


class TestRecoveryHook:
    async def test_hook_decides_about_each_job(self, db: asyncpg.Connection, session: Session) -> None:
        calls: list[tuple[str, str]] = []

        async def decide(job: Job, worker: WorkerInfo) -> RecoveryAction | None:
            calls.append((job.task_identifier, worker.name))
            return {
                "default": RecoveryAction.default(),
                "nothing": None,
                "later": RecoveryAction.reschedule(timedelta(minutes=5)),
                "never": RecoveryAction.fail("it may have been paid already"),
                "mine": RecoveryAction.leave(),
            }[job.task_identifier]

        await register_worker(db)
        jobs = {
            name: await add_locked_job(db, identifier=name, queue_name=f"queue of {name}")
            for name in ("default", "nothing", "later", "never", "mine")
        }
        timed_sweeper = TimedSweeper(session, on_recovery=decide)
        [recovered] = await timed_sweeper.run_for(10)

        assert {job.task_identifier for job in recovered.jobs} == {"default", "nothing", "later", "never"}
        assert "queue of mine" not in recovered.queues
        rows = {name: await existing(db, job) for name, job in jobs.items()}
        assert rows["default"]["is_available"]
        assert rows["nothing"]["is_available"]
        assert rows["later"]["run_at"] > datetime.now(UTC) + timedelta(minutes=4)
        assert rows["never"]["attempts"] == rows["never"]["max_attempts"]
        assert rows["never"]["last_error"] == "it may have been paid already"
        assert rows["mine"]["locked_by"] == "w"
        assert len(calls) == 5
        assert calls[0][1] == "w (pid 7 on web-1)"

        await make_sweep_due(db)
        assert await timed_sweeper.run_for(2) == []
        assert len(calls) == 5  # The hook is not called again for a job that it left.

    @pytest.mark.parametrize("wrong", ["raises", "returns nonsense"])
    async def test_failing_hook_does_not_keep_the_job_locked(
        self, db: asyncpg.Connection, session: Session, caplog: pytest.LogCaptureFixture, wrong: str
    ) -> None:
        def decide(_job: Job, _worker: WorkerInfo) -> Any:
            if wrong == "raises":
                raise ValueError("oops")
            return "nonsense"

        await register_worker(db)
        job = await add_locked_job(db)
        await TimedSweeper(session, on_recovery=decide).run_for(10)
        assert (await existing(db, job))["is_available"]
        assert f"on_recovery failed for job {job}" in caplog.text

    async def test_hooks_run_concurrently_and_once_per_job(
        self, db: asyncpg.Connection, session: Session
    ) -> None:
        calls: list[int] = []
        all_called = asyncio.Event()

        async def decide(job: Job, _worker: WorkerInfo) -> None:
            calls.append(job.id)
            if len(calls) == 10:
                all_called.set()
            await all_called.wait()

        await register_worker(db)
        jobs = [await add_locked_job(db) for _ in range(10)]
        first, second = TimedSweeper(session, on_recovery=decide), TimedSweeper(session, on_recovery=decide)
        await second.run_for(6)
        async with asyncio.timeout(10):
            [recovered] = await first.run_for(10)
        await second.run_for(4)
        assert sorted(calls) == sorted(jobs)
        assert len(recovered.jobs) == 10

    async def test_hanging_hook_does_not_keep_the_job_locked(
        self, db: asyncpg.Connection, session: Session, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sweeper, "_HOOK_TIMEOUT", 0.1)

        async def decide(_job: Job, _worker: WorkerInfo) -> None:
            await asyncio.Event().wait()

        await register_worker(db)
        job = await add_locked_job(db)
        await TimedSweeper(session, on_recovery=decide).run_for(10)
        assert (await existing(db, job))["is_available"]

    async def test_hook_is_called_outside_any_transaction(
        self, db: asyncpg.Connection, session: Session
    ) -> None:
        async def decide(job: Job, _worker: WorkerInfo) -> RecoveryAction | None:
            await db.execute("update graphile_worker._private_jobs set priority = 5 where id = $1", job.id)
            return None

        await register_worker(db)
        job = await add_locked_job(db)
        await TimedSweeper(session, on_recovery=decide).run_for(10)
        row = await existing(db, job)
        assert (row["priority"], row["is_available"]) == (5, True)


class TestManualSweep:
    async def test_manual_sweep_releases_jobs_of_dead_workers(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await register_worker(db, seconds=4, fast=1)
        await db.execute(
            "update graphile_worker._private_workers set last_heartbeat_at = now() - interval '1 minute'"
        )
        job = await add_locked_job(db)
        async with WorkerUtils(database) as utils:
            [planned] = await utils.sweep(dry_run=True)
            assert [found.id for found in planned.jobs] == [job]
            assert (await existing(db, job))["locked_by"] == "w"
            [done] = await utils.sweep()
            assert [found.id for found in done.jobs] == [job]
            assert await utils.sweep() == []
        assert await locked(db) == []

    async def test_manual_sweep_releases_jobs_of_a_worker_already_declared_dead(
        self, db: asyncpg.Connection, database: str, timed_sweeper: TimedSweeper
    ) -> None:
        await register_worker(db)
        await timed_sweeper.run_for(10)
        job = await add_locked_job(db)
        async with WorkerUtils(database) as utils:
            [done] = await utils.sweep()
        assert [found.id for found in done.jobs] == [job]

    async def test_manual_sweep_waits_for_heartbeats_of_live_workers(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        options: dict[str, Any] = {"heartbeat_interval": 0.3, "fast_lease": 1.2, "lease": 16.0}
        gate = Gate()
        async with running({"task": gate}, database, **options), WorkerUtils(database) as utils:
            await add(db)
            await gate.until_started()
            assert await utils.sweep() == []
            assert len(await locked(db)) == 1
            gate.open()

    async def test_workers_lists_all_kinds_of_workers_with_their_locks(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await register_worker(db, "python-1")
        await db.execute("select graphile_worker.worker_heartbeat('rust-1', '{\"pid\": 12}')")
        await db.execute("select graphile_worker.worker_heartbeat('who', '[1]')")
        await add_locked_job(db, "python-1", queue_name="q")
        await add_locked_job(db, "pool-node")
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
        ("options", "error"),
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
    async def test_invalid_recovery_options_are_rejected(self, options: dict[str, Any], error: str) -> None:
        with pytest.raises(ConfigurationError, match=error):
            await run({"task": print}, "postgresql://nowhere", **options)

    async def test_worker_without_recovery_records_no_heartbeat_and_sweeps_nothing(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await register_worker(db, seconds=0.2, fast=0.1)
        job = await add_locked_job(db, identifier="other")
        async with await run({"task": print}, database, recovery=False, handle_signals=False) as runner:
            await runner.add_job("task")
            await until(lambda: _has_no_job(db, "task"), "the job is deleted")
            rows = await db.fetch("select id from graphile_worker._private_workers")
        assert [row["id"] for row in rows] == ["w"]
        assert (await existing(db, job))["locked_by"] == "w"


async def _has_no_job(db: asyncpg.Connection, task: str) -> bool:
    row = await fetch_one(
        db, "select count(*) as n from graphile_worker.jobs where task_identifier = $1", task
    )
    return bool(row["n"] == 0)
