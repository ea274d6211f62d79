"""A worker sends heartbeats as long as it runs, and gives up its jobs before another worker recovers them."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import asyncpg
import pytest

from graphile_worker import ShutdownError, WorkerUtils, run
from graphile_worker._db.sql_files import Schema
from graphile_worker._worker.liveness import heartbeat
from graphile_worker._worker.liveness.lease_state import LeaseState
from graphile_worker.embedded import EmbeddedPostgres
from graphile_worker.testing import Databases
from graphile_worker.workers import Health, Lease
from support.clock import FakeClock
from support.jobs import add, count, get
from support.postgres import restart
from support.programs import Program, program
from support.proxy import proxied
from support.waiting import DEADLINE, until
from support.workers import EventRecorder, Gate, locked, nothing, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

VICTIM = Path(__file__).parent / "support" / "victim.py"
SHORT_LEASES: dict[str, Any] = {"heartbeat_interval": 0.3, "fast_lease": 1.2, "lease": 4.0}
"""A seventh of the defaults."""
LONG_LEASES: dict[str, Any] = {"heartbeat_interval": 1.0, "fast_lease": 4.0, "lease": 16.0}
"""Half of the defaults, for tests in which a pause of the machine must not exceed a lease."""


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@asynccontextmanager
async def victim(dsn: str, **options: Any) -> AsyncIterator[Program]:
    """Run a worker in another process."""
    given = json.dumps({**SHORT_LEASES, **options})
    async with program(sys.executable, VICTIM, dsn, given, with_errors=True) as found:
        await found.until("ready")
        yield found


async def workers(db: asyncpg.Connection) -> dict[str, dict[str, Any]]:
    rows = await db.fetch("select id, metadata from graphile_worker._private_workers")
    return {row["id"]: json.loads(row["metadata"]) for row in rows}


async def read_heartbeat(db: asyncpg.Connection, worker: str) -> str | None:
    found: str | None = await db.fetchval(
        "select last_heartbeat_at::text from graphile_worker._private_workers where id = $1", worker
    )
    return found


async def until_heartbeat(db: asyncpg.Connection, worker: str, times: int = 1) -> None:
    for _ in range(times):
        before = await read_heartbeat(db, worker)

        async def is_newer(before: str | None = before) -> bool:
            return await read_heartbeat(db, worker) not in {before, None}

        await until(is_newer, f"{worker} sends a heartbeat")


async def is_idle(db: asyncpg.Connection) -> bool:
    return await count(db) == 0 and await locked(db) == []


class TestHeartbeat:
    @pytest.fixture(autouse=True)
    def _long_timeout(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let a worker deregister even on a slow machine."""
        monkeypatch.setattr(heartbeat, "_DEREGISTER_TIMEOUT", DEADLINE)

    async def test_worker_registers_with_its_metadata(self, db: asyncpg.Connection, database: str) -> None:
        async with running({"a": nothing, "b": nothing}, database, concurrency=3, **SHORT_LEASES) as runner:
            known = (await workers(db))[runner.id]
            assert known["language"] == "python"
            assert known["concurrency"] == 3
            assert known["tasks"] == ["a", "b"]
            assert {"version", "host", "pid"} <= known.keys()
            assert known["lease"].keys() == {"seconds", "fast", "epoch", "tasks"}
            assert (known["lease"]["seconds"], known["lease"]["fast"]) == (4.0, 1.2)
            await until_heartbeat(db, runner.id, 2)
        assert await workers(db) == {}

    async def test_worker_sends_heartbeats_while_a_task_blocks_the_event_loop(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        async with (
            victim(database, lease=10.0) as worker,
            running({"other": nothing}, database, **SHORT_LEASES),
        ):
            worker_id = worker.lines[-1].split()[1]
            await add(db, "block_loop", payload=11)  # longer than the lease
            await worker.until("begun")
            await until_heartbeat(db, worker_id, 10)
            assert "ended" not in worker.text
            await worker.until("ended")
            await until(lambda: is_idle(db), "the job is recorded")
            assert "Giving up" not in worker.text

    async def test_worker_sends_heartbeats_while_shutdown_waits_for_jobs(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        gate = Gate()
        runner = await run({"task": gate}, database, handle_signals=False, **{**SHORT_LEASES, "lease": 16.0})
        await add(db)
        await gate.until_started()
        stop_requested = asyncio.create_task(runner.stop())
        await until_heartbeat(db, runner.id, 5)
        gate.open()
        await stop_requested
        assert await workers(db) == {}

    async def test_worker_sends_heartbeats_with_a_pool_from_the_caller(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        async with (
            asyncpg.create_pool(database, min_size=1, max_size=4) as pool,
            running({"task": nothing}, None, pool=pool, **SHORT_LEASES) as runner,
        ):
            await until_heartbeat(db, runner.id)

    async def test_worker_sends_heartbeats_with_a_pool_that_sets_a_role(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        role = f"worker_{uuid4().hex[:8]}"
        await db.execute(f"create role {role}")
        owner = await db.fetchval("select current_user")
        await db.execute(f'grant "{owner}" to {role}')

        async def become(connection: Any) -> None:
            await connection.execute(f'set role "{owner}"')

        dsn = database.replace(f"{owner}@", f"{role}@")
        await db.execute(f"alter role {role} login")
        try:
            async with (
                asyncpg.create_pool(dsn, min_size=1, max_size=4, init=become, setup=become) as pool,
                running({"task": nothing}, None, pool=pool, migrate=False, **SHORT_LEASES) as runner,
            ):
                await until_heartbeat(db, runner.id)
        finally:
            await db.execute(f"drop role {role}")

    async def test_lock_on_the_worker_row_does_not_accumulate_connections(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        sessions = """select count(distinct pid) from pg_locks
            where locktype = 'advisory' and mode = 'ShareLock'
            and database = (select oid from pg_database where datname = current_database())"""
        recorder = EventRecorder()
        async with running({"task": nothing}, database, recorder=recorder, **SHORT_LEASES) as runner:
            before = await db.fetchval(sessions)
            other = await asyncpg.connect(database)
            transaction = other.transaction()
            await transaction.start()
            await other.execute("select from graphile_worker._private_workers for update")
            await recorder.until("pool:fenced")
            assert await db.fetchval(sessions) <= before + 2, (
                "only two more sessions may hold the advisory lock of the worker"
            )
            await transaction.rollback()
            await other.close()
            await recorder.until("pool:unfenced")
            await until_heartbeat(db, runner.id)

    async def test_deleted_worker_row_is_inserted_again(self, db: asyncpg.Connection, database: str) -> None:
        recorder = EventRecorder()
        async with running({"task": nothing}, database, recorder=recorder, **SHORT_LEASES) as runner:
            await db.execute("delete from graphile_worker._private_workers")
            await recorder.until("pool:unfenced")
            await until_heartbeat(db, runner.id)
            await add(db)
            await until(lambda: is_idle(db), "the worker claims again")

    async def test_worker_ends_when_its_event_loop_is_closed(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        def run_without_stopping() -> None:
            asyncio.run(start())

        async def start() -> None:
            await run({"task": nothing}, database, handle_signals=False, **SHORT_LEASES)

        await asyncio.to_thread(run_without_stopping)
        assert await workers(db) == {}
        gc.collect()


class TestDeadWorkers:
    async def test_jobs_of_a_killed_worker_run_in_another_worker(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        recorder, gate = EventRecorder(), Gate()
        gate.open()
        async with (
            victim(database, concurrency=5, **LONG_LEASES) as worker,
            running({"other": nothing}, database, recorder=recorder, **LONG_LEASES),
        ):
            for queue in (None, None, "q"):
                await add(db, "sleep", payload=60, queue_name=queue)
            await worker.until("begun", 3)
            worker.send(signal.SIGKILL)
            event = await recorder.until("worker:recovered")
            assert LONG_LEASES["fast_lease"] <= event.recovered.silence < LONG_LEASES["lease"]
            assert len(event.recovered.jobs) == 3
            assert event.recovered.queues == ["q"]
        async with running({"sleep": gate}, database, concurrency=3, **SHORT_LEASES):
            await gate.until_started(3)
        assert await locked(db) == []

    @pytest.mark.slow
    async def test_job_that_kills_its_workers_fails_after_its_last_attempt(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        recorder = EventRecorder()
        job = await add(db, "die", max_attempts=2)
        async with running({"other": nothing}, database, recorder=recorder, **SHORT_LEASES):
            for death in (1, 2):
                async with program(sys.executable, VICTIM, database, json.dumps(SHORT_LEASES)) as worker:
                    await worker.until("begun")
                    await recorder.until("worker:recovered", death)
        row = await get(db, job["id"])
        assert row is not None
        assert (row["attempts"], row["is_available"], row["locked_by"]) == (2, False, None)
        assert row["last_error"].startswith("The worker that ran this job died: ")

    async def test_frozen_worker_loses_its_jobs_and_gives_them_up_when_resumed(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        recorder = EventRecorder()
        async with (
            victim(database) as worker,
            running({"other": nothing}, database, recorder=recorder, **SHORT_LEASES),
        ):
            worker_id = worker.lines[-1].split()[1]
            await add(db, "sleep", payload=60)
            await worker.until("begun")
            worker.send(signal.SIGSTOP)
            event = await recorder.until("worker:recovered")
            assert event.recovered.worker.id == worker_id
            await db.execute("delete from graphile_worker._private_jobs")
            worker.send(signal.SIGCONT)
            await worker.until("Giving up")
            await worker.until("was interrupted")
            await worker.until("claiming jobs")
            await add(db, "sleep", payload=0)
            await worker.until("ended")
            assert "died_at" not in (await workers(db))[worker_id]

    async def test_worker_frozen_for_less_than_its_lease_keeps_its_jobs(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        recorder = EventRecorder()
        async with (
            victim(database, lease=16.0) as worker,
            running({"other": nothing}, database, recorder=recorder, **SHORT_LEASES),
        ):
            await add(db, "sleep", payload=4)
            await worker.until("begun")
            worker.send(signal.SIGSTOP)
            await asyncio.sleep(2)  # the freeze itself: longer than the fast lease
            worker.send(signal.SIGCONT)
            await worker.until("ended")
            await until(lambda: is_idle(db), "the job is recorded")
        assert "worker:recovered" not in recorder.names

    async def test_worker_with_the_gil_held_for_less_than_its_lease_keeps_its_jobs(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        recorder = EventRecorder()
        async with (
            victim(database, lease=16.0) as worker,
            running({"other": nothing}, database, recorder=recorder, **SHORT_LEASES),
        ):
            await add(db, "hold_gil", payload=2)
            await worker.until("ended")
            await until(lambda: is_idle(db), "the job is recorded")
        assert "worker:recovered" not in recorder.names


class TestLateAnswers:
    """A heartbeat on a connection that freezes for longer than the lease, and then resumes."""

    @asynccontextmanager
    async def resumed(self, database: str) -> AsyncIterator[list[tuple[float, bool]]]:
        """Yield the confirmed heartbeats: when each was sent, and whether the worker may work then.

        The first is sent at 1000, the second at 1010 on the frozen connection, which resumes at 1050.
        """
        clock, confirmed = FakeClock(), list[tuple[float, bool]]()
        unanswered = asyncio.Event()
        health = Health(
            worker_id="w",
            state="ready",
            live=True,
            ready=True,
            running=0,
            concurrency=1,
            last_exchange=None,
            last_heartbeat=None,
            listening=True,
        )
        lease_state = LeaseState(Lease(interval=0.2), clock)
        async with proxied(database) as (proxy, through):
            beating = heartbeat.Heartbeat(
                dial=lambda: asyncpg.connect(through),
                in_transactions=lambda: False,
                one_host=True,
                schema=Schema(),
                worker_id="w",
                metadata={},
                health=lambda: health,
                lease_state=lease_state,
                on_death=lambda: None,
                on_beat=lambda: confirmed.append((lease_state.confirmed or 0.0, lease_state.may_work())),
                on_loss=lambda: None,
                on_failure=lambda _: unanswered.set(),
                on_recovery=lambda: None,
            )
            await beating.begin()
            proxy.frozen = True
            clock.advance(10)
            beats = asyncio.create_task(beating.run())
            try:
                await unanswered.wait()
                clock.advance(40)
                proxy.frozen = False
                yield confirmed
            finally:
                beats.cancel()
                await asyncio.wait([beats])
                await beating.end(deregister=True)

    @staticmethod
    async def until_confirmed(confirmed: list[tuple[float, bool]], count: int) -> None:
        async def is_confirmed() -> bool:
            return len(confirmed) >= count

        await until(is_confirmed, f"{count} heartbeats are confirmed")

    async def test_late_answer_counts_from_when_its_heartbeat_was_sent(self, database: str) -> None:
        async with self.resumed(database) as confirmed:
            await self.until_confirmed(confirmed, 2)
            assert confirmed[:2] == [(1000.0, True), (1010.0, False)]

    async def test_next_heartbeat_follows_a_late_answer_at_once(
        self, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Otherwise a lease that the late answer has renewed may end again before the next heartbeat."""
        monkeypatch.setattr(heartbeat, "_FIRST_PAUSE", 3600.0)
        monkeypatch.setattr(heartbeat, "_LONGEST_PAUSE", 3600.0)
        async with self.resumed(database) as confirmed:
            await self.until_confirmed(confirmed, 3)
            assert confirmed[2] == (1050.0, True)


class TestExpiredLease:
    async def test_job_not_started_without_a_valid_lease_starts_after_the_next_heartbeat(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """After a long sleep, the reply with the job may arrive before the heartbeat is recorded.

        The heartbeat in turn may be recorded before the worker gives up.
        """
        recorder = EventRecorder()
        async with running(
            {"task": nothing}, database, recorder=recorder, poll_interval=3600, **LONG_LEASES
        ) as runner:
            lease_state, claimed_jobs = runner._parts._lease_state, runner._worker._claimed
            known, doubts = lease_state.may_work, list[bool]()

            def may_work(task: str | None = None) -> bool:
                if claimed_jobs.local_queue.ready and not doubts:
                    doubts.append(True)
                    return False
                return known(task)

            lease_state.may_work = may_work  # type: ignore[method-assign]
            await add(db)
            await recorder.until("job:complete")
        assert doubts


class TestFencing:
    @pytest.mark.slow
    async def test_worker_refused_by_a_proxy_gives_up_before_the_fast_lease_ends(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """A proxy may refuse one worker only, so a refusal does not prove that the server is down."""
        recorder, watcher, gate = EventRecorder(), EventRecorder(), Gate()
        async with (
            proxied(database) as (proxy, through),
            running({"task": gate}, through, recorder=recorder, **LONG_LEASES),
            running({"other": nothing}, database, recorder=watcher, **LONG_LEASES),
        ):
            await add(db)
            await gate.until_started()
            proxy.refusing = True
            proxy.cut_all()
            await recorder.until("pool:fenced")
            assert "worker:recovered" not in watcher.names
            await recorder.until("job:interrupted")
            assert gate.cancelled
            assert "worker:recovered" not in watcher.names
            await watcher.until("worker:recovered")
            gate.open()
            proxy.refusing = False
            await recorder.until("pool:unfenced")
            await recorder.until("job:complete")
            await until(lambda: is_idle(db), "the job ran again")

    async def test_worker_without_replies_gives_up_before_the_lease_ends(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        recorder, watcher, gate = EventRecorder(), EventRecorder(), Gate()
        # The worker gives up 2 s before its lease ends.
        lease = {**SHORT_LEASES, "fast_lease": 2.0, "lease": 8.0}
        async with (
            proxied(database) as (proxy, through),
            running({"task": gate}, through, recorder=recorder, **lease),
            running({"other": nothing}, database, recorder=watcher, **lease),
        ):
            await add(db)
            await gate.until_started()
            proxy.frozen = True
            fenced = await recorder.until("pool:fenced")
            assert 6 <= fenced.silence < 8
            assert "worker:recovered" not in watcher.names
            await watcher.until("worker:recovered")
            proxy.frozen = False
            gate.open()
            await recorder.until("pool:unfenced")
            await until(lambda: is_idle(db), "the job ran again")

    @pytest.mark.slow
    async def test_worker_does_not_give_up_during_a_long_server_restart(self, short_folder: Path) -> None:
        recorder, gate = EventRecorder(), Gate()
        with EmbeddedPostgres(short_folder) as server:
            dsn = server.dsn()
            async with WorkerUtils(dsn) as utils:
                await utils.migrate()
                await utils.add_job("task")
            async with running({"task": gate}, dsn, recorder=recorder, **{**LONG_LEASES, "lease": 32.0}):
                await gate.until_started()
                await asyncio.to_thread(restart, server, "immediate", pause=5.0)
                gate.open()
                await recorder.until("job:complete")
        assert "pool:fenced" not in recorder.names
        assert gate.cancelled == []

    @pytest.mark.slow
    async def test_worker_does_not_give_up_when_its_sessions_are_terminated(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        recorder, watcher, gate = EventRecorder(), EventRecorder(), Gate()
        lease = {**SHORT_LEASES, "fast_lease": 3.0, "lease": 12.0}  # long enough to connect again
        async with (
            running({"task": gate}, database, recorder=recorder, **lease) as runner,
            running({"other": nothing}, database, recorder=watcher, **lease) as other,
        ):
            await add(db)
            await gate.until_started()
            began = time.monotonic()
            while time.monotonic() - began < lease["fast_lease"] * 1.5:
                await db.execute(
                    """select pg_terminate_backend(pid) from pg_stat_activity
                    where datname = current_database() and pid <> pg_backend_pid()"""
                )
                for worker in (runner, other):
                    await until_heartbeat(db, worker.id, 2)
            gate.open()
            await recorder.until("job:complete")
        assert not {"pool:fenced", "worker:recovered"} & {*recorder.names, *watcher.names}

    async def test_job_with_a_longer_lease_continues_and_is_recorded(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        recorder, watcher = EventRecorder(), EventRecorder()
        charge, other = Gate(), Gate()
        async with (
            proxied(database) as (proxy, through),
            running(
                {"charge": charge, "other": other},
                through,
                recorder=recorder,
                concurrency=2,
                task_leases={"charge": 60},
                **SHORT_LEASES,
            ),
            running({"nothing": nothing}, database, recorder=watcher, **SHORT_LEASES),
        ):
            await add(db, "charge", queue_name="money")
            await add(db, "other")
            await charge.until_started()
            await other.until_started()
            proxy.refusing = True
            proxy.cut_all()
            await recorder.until("pool:fenced")
            recovered = (await watcher.until("worker:recovered")).recovered
            assert [job.task_identifier for job in recovered.jobs] == ["other"]
            assert recovered.queues == []
            charge.open()
            other.open()
            proxy.refusing = False
            await recorder.until("pool:unfenced")
            await until(lambda: is_idle(db), "both jobs are recorded")
        assert charge.cancelled == []
        assert len(charge.started) == 1
        assert len(other.started) == 2

    @pytest.mark.slow
    async def test_worker_with_an_unknown_claim_does_not_deregister(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """The reply to its last exchange is lost, and the worker cannot repeat the exchange."""
        watcher = EventRecorder()
        async with (
            proxied(database) as (proxy, through),
            running({"other": nothing}, database, recorder=watcher, **SHORT_LEASES),
        ):

            def cut(direction: str, data: bytes) -> bool:
                proxy.refusing = proxy.refusing or (direction == "reply" and b"find me" in data)
                return proxy.refusing

            proxy.cut_when = cut
            runner = await run(
                {"task": nothing}, through, listen_dsn=database, handle_signals=False, **SHORT_LEASES
            )
            await add(db, payload="find me")
            await until(lambda: _locked_one(db), "the job is claimed")
            with pytest.raises(ShutdownError):
                await runner.stop()
            [recovered] = [event.recovered for event in [await watcher.until("worker:recovered")]]
            assert recovered.worker.id == runner.id
            assert len(recovered.jobs) == 1

    @pytest.mark.slow
    async def test_stuck_process_does_not_exit_if_the_database_answers_in_time(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        async with (
            proxied(database) as (proxy, through),
            victim(through, exit_if_stuck=True, lease=16.0) as worker,  # gives up 4 s before its lease ends
        ):
            await add(db, "block_thread", payload=16)
            await worker.until("begun")
            proxy.frozen = True
            await worker.until("Giving up")
            proxy.frozen = False
            await worker.until("claiming jobs")
            await worker.until("ended")
            await until(lambda: is_idle(db), "the job is recorded")
            assert "Exiting the process" not in worker.text

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("task", ["block_thread", "block_loop"])
    async def test_process_with_a_blocked_task_exits_if_exit_if_stuck_is_set(
        self, db: asyncpg.Connection, database: str, task: str
    ) -> None:
        async with (
            proxied(database) as (proxy, through),
            victim(through, exit_if_stuck=True) as worker,
            running({"other": nothing}, database, **SHORT_LEASES),
        ):
            await add(db, task, payload=60)
            await worker.until("begun")
            proxy.refusing = True
            proxy.cut_all()
            assert await worker.end() == 1
            assert "Exiting the process" in worker.text

    async def test_process_resumed_after_it_was_declared_dead_exits_if_stuck(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        recorder = EventRecorder()
        async with (
            victim(database, exit_if_stuck=True) as worker,
            running({"other": nothing}, database, recorder=recorder, **SHORT_LEASES),
        ):
            await add(db, "block_thread", payload=60)
            await worker.until("begun")
            worker.send(signal.SIGSTOP)
            await recorder.until("worker:recovered")
            worker.send(signal.SIGCONT)
            assert await worker.end() == 1
            assert "Exiting the process" in worker.text

    async def test_unrecorded_result_is_lost_if_another_worker_recovered_the_job(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        recorder, watcher, gate = EventRecorder(), EventRecorder(), Gate()
        async with (
            proxied(database) as (proxy, through),
            running({"task": gate}, through, recorder=recorder, **SHORT_LEASES),
            running({"other": nothing}, database, recorder=watcher, **SHORT_LEASES),
        ):
            job = await add(db)
            await gate.until_started()
            proxy.refusing = True
            proxy.cut_when = lambda direction, _data: direction == "query"
            gate.open()
            await recorder.until("job:success")
            await watcher.until("worker:recovered")
            proxy.cut_when = lambda _direction, _data: False
            proxy.refusing = False
            await recorder.until("job:complete")
            await until(lambda: is_idle(db), "the job ran again")
        job_events = [event.name for event in recorder.all if event.name.startswith("job:")]
        assert {event.job.id for event in recorder.named("job:start")} == {job["id"]}
        assert job_events == [
            "job:start", "job:success", "job:lost", "job:start", "job:success", "job:complete",
        ]  # fmt: skip

    async def test_thread_of_a_fenced_worker_continues_and_its_result_is_not_recorded(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        async with (
            proxied(database) as (proxy, through),
            victim(through) as worker,
            running({"other": nothing}, database, **SHORT_LEASES),
        ):
            await add(db, "block_thread", payload=3)
            await worker.until("begun")
            proxy.refusing = True
            proxy.cut_all()
            await worker.until("Giving up")
            await until(lambda: _nothing_locked(db), "another worker released the job")
            proxy.refusing = False
            await worker.until("ended")
            await worker.until("was no longer locked by this worker")
            await worker.until("ended", 2)
            await until(lambda: is_idle(db), "the job ran again")


async def _locked_one(db: asyncpg.Connection) -> bool:
    return len(await locked(db)) == 1


async def _nothing_locked(db: asyncpg.Connection) -> bool:
    return await locked(db) == []
