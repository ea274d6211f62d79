"""A worker says that it lives as long as it does; and gives up its work before others take it."""

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
from graphile_worker._runtime import heartbeat
from graphile_worker.embedded import EmbeddedPostgres
from graphile_worker.recovery import DIED
from graphile_worker.testing import Databases
from support.jobs import add, count, get
from support.postgres import restart
from support.programs import Program, program
from support.proxy import proxied
from support.waiting import DEADLINE, until
from support.workers import Gate, Heard, locked, nothing, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

VICTIM = Path(__file__).parent / "support" / "victim.py"
SHORT: dict[str, Any] = {"heartbeat_interval": 0.3, "fast_lease": 1.2, "lease": 4.0}
"""As the defaults, but seven times shorter."""
ROOMY: dict[str, Any] = {"heartbeat_interval": 1.0, "fast_lease": 4.0, "lease": 16.0}
"""Half as long as the defaults: for tests in which a machine that pauses a process must not use it up."""


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@asynccontextmanager
async def victim(dsn: str, **options: Any) -> AsyncIterator[Program]:
    """A worker in another process."""
    given = json.dumps({**SHORT, **options})
    async with program(sys.executable, VICTIM, dsn, given, with_errors=True) as found:
        await found.until("ready")
        yield found


async def workers(db: asyncpg.Connection) -> dict[str, dict[str, Any]]:
    rows = await db.fetch("select id, metadata from graphile_worker._private_workers")
    return {row["id"]: json.loads(row["metadata"]) for row in rows}


async def beat(db: asyncpg.Connection, worker: str) -> str | None:
    found: str | None = await db.fetchval(
        "select last_heartbeat_at::text from graphile_worker._private_workers where id = $1", worker
    )
    return found


async def until_it_beats(db: asyncpg.Connection, worker: str, times: int = 1) -> None:
    for _ in range(times):
        before = await beat(db, worker)

        async def beaten(before: str | None = before) -> bool:
            return await beat(db, worker) not in {before, None}

        await until(beaten, f"{worker} beats")


async def is_idle(db: asyncpg.Connection) -> bool:
    return await count(db) == 0 and await locked(db) == []


class TestSayingSo:
    @pytest.fixture(autouse=True)
    def _patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whoever stops says so, however long the machine takes."""
        monkeypatch.setattr(heartbeat, "_GOODBYE", DEADLINE)

    async def test_a_worker_registers_with_what_others_want_to_know(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        async with running({"a": nothing, "b": nothing}, database, concurrency=3, **SHORT) as runner:
            known = (await workers(db))[runner.id]
            assert known["language"] == "python"
            assert known["concurrency"] == 3
            assert known["tasks"] == ["a", "b"]
            assert {"version", "host", "pid"} <= known.keys()
            assert known["lease"].keys() == {"seconds", "fast", "epoch", "tasks"}
            assert (known["lease"]["seconds"], known["lease"]["fast"]) == (4.0, 1.2)
            await until_it_beats(db, runner.id, 2)
        assert await workers(db) == {}

    async def test_also_while_a_task_blocks_the_event_loop(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        async with victim(database, lease=10.0) as worker, running({"other": nothing}, database, **SHORT):
            worker_id = worker.lines[-1].split()[1]
            await add(db, "block_loop", payload=11)  # longer than the lease
            await worker.until("begun")
            await until_it_beats(db, worker_id, 10)
            assert "ended" not in worker.text
            await worker.until("ended")
            await until(lambda: is_idle(db), "the job is recorded")
            assert "Giving up" not in worker.text

    async def test_also_while_shutdown_waits_for_jobs(self, db: asyncpg.Connection, database: str) -> None:
        gate = Gate()
        runner = await run({"task": gate}, database, handle_signals=False, **{**SHORT, "lease": 16.0})
        await add(db)
        await gate.until_begun()
        stopping = asyncio.create_task(runner.stop())
        await until_it_beats(db, runner.id, 5)
        gate.open()
        await stopping
        assert await workers(db) == {}

    async def test_with_a_pool_of_the_callers(self, db: asyncpg.Connection, database: str) -> None:
        async with (
            asyncpg.create_pool(database, min_size=1, max_size=4) as pool,
            running({"task": nothing}, None, pool=pool, **SHORT) as runner,
        ):
            await until_it_beats(db, runner.id)

    async def test_with_a_pool_whose_connections_are_prepared_by_the_caller(
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
                running({"task": nothing}, None, pool=pool, migrate=False, **SHORT) as runner,
            ):
                await until_it_beats(db, runner.id)
        finally:
            await db.execute(f"drop role {role}")

    async def test_a_lock_on_its_row_does_not_pile_up_connections(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        sessions = """select count(distinct pid) from pg_locks
            where locktype = 'advisory' and mode = 'ShareLock'
            and database = (select oid from pg_database where datname = current_database())"""
        heard = Heard()
        async with running({"task": nothing}, database, heard=heard, **SHORT) as runner:
            before = await db.fetchval(sessions)
            other = await asyncpg.connect(database)
            transaction = other.transaction()
            await transaction.start()
            await other.execute("select from graphile_worker._private_workers for update")
            await heard.until("pool:fenced")
            assert await db.fetchval(sessions) <= before + 2, "of those that hold the worker's lock"
            await transaction.rollback()
            await other.close()
            await heard.until("pool:unfenced")
            await until_it_beats(db, runner.id)

    async def test_a_row_that_somebody_removed_is_written_anew(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        heard = Heard()
        async with running({"task": nothing}, database, heard=heard, **SHORT) as runner:
            await db.execute("delete from graphile_worker._private_workers")
            await heard.until("pool:unfenced")
            await until_it_beats(db, runner.id)
            await add(db)
            await until(lambda: is_idle(db), "it claims again")

    async def test_a_worker_whose_event_loop_was_closed_does_not_live_on(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        def forgetful() -> None:
            asyncio.run(start())

        async def start() -> None:
            await run({"task": nothing}, database, handle_signals=False, **SHORT)

        await asyncio.to_thread(forgetful)
        assert await workers(db) == {}
        gc.collect()


class TestDeath:
    async def test_a_killed_workers_jobs_run_elsewhere(self, db: asyncpg.Connection, database: str) -> None:
        heard, gate = Heard(), Gate()
        gate.open()
        async with (
            victim(database, concurrency=5, **ROOMY) as worker,
            running({"other": nothing}, database, heard=heard, **ROOMY),
        ):
            for queue in (None, None, "q"):
                await add(db, "sleep", payload=60, queue_name=queue)
            await worker.until("begun", 3)
            worker.send(signal.SIGKILL)
            event = await heard.until("worker:recovered")
            assert ROOMY["fast_lease"] <= event.recovered.silence < ROOMY["lease"]
            assert len(event.recovered.jobs) == 3
            assert event.recovered.queues == ["q"]
        async with running({"sleep": gate}, database, concurrency=3, **SHORT):
            await gate.until_begun(3)
        assert await locked(db) == []

    async def test_a_job_that_kills_its_worker_each_time_has_failed_after_its_attempts(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        heard = Heard()
        job = await add(db, "die", max_attempts=2)
        async with running({"other": nothing}, database, heard=heard, **SHORT):
            for death in (1, 2):
                async with program(sys.executable, VICTIM, database, json.dumps(SHORT)) as worker:
                    await worker.until("begun")
                    await heard.until("worker:recovered", death)
        row = await get(db, job["id"])
        assert row is not None
        assert (row["attempts"], row["is_available"], row["locked_by"]) == (2, False, None)
        assert row["last_error"].startswith(DIED)

    async def test_a_frozen_workers_jobs_run_elsewhere_and_it_gives_them_up_when_it_wakes(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        heard = Heard()
        async with (
            victim(database) as worker,
            running({"other": nothing}, database, heard=heard, **SHORT),
        ):
            worker_id = worker.lines[-1].split()[1]
            await add(db, "sleep", payload=60)
            await worker.until("begun")
            worker.send(signal.SIGSTOP)
            event = await heard.until("worker:recovered")
            assert event.recovered.worker.id == worker_id
            await db.execute("delete from graphile_worker._private_jobs")
            worker.send(signal.SIGCONT)
            await worker.until("Giving up")
            await worker.until("was interrupted")
            await worker.until("claiming jobs again")
            await add(db, "sleep", payload=0)
            await worker.until("ended")
            assert "died_at" not in (await workers(db))[worker_id]

    async def test_one_that_is_frozen_for_less_keeps_them(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        heard = Heard()
        async with (
            victim(database, lease=16.0) as worker,
            running({"other": nothing}, database, heard=heard, **SHORT),
        ):
            await add(db, "sleep", payload=4)
            await worker.until("begun")
            worker.send(signal.SIGSTOP)
            await asyncio.sleep(2)  # the freeze itself: longer than the fast lease
            worker.send(signal.SIGCONT)
            await worker.until("ended")
            await until(lambda: is_idle(db), "the job is recorded")
        assert "worker:recovered" not in heard.names

    async def test_one_whose_interpreter_is_held_for_less_keeps_them(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        heard = Heard()
        async with (
            victim(database, lease=16.0) as worker,
            running({"other": nothing}, database, heard=heard, **SHORT),
        ):
            await add(db, "hold_gil", payload=2)
            await worker.until("ended")
            await until(lambda: is_idle(db), "the job is recorded")
        assert "worker:recovered" not in heard.names


class TestWakingUp:
    async def test_what_was_not_begun_in_doubt_is_begun_when_a_beat_is_recorded(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """After a long sleep the answer is there before the beat, and the beat before anybody gives up."""
        heard = Heard()
        async with running({"task": nothing}, database, heard=heard, poll_interval=3600, **ROOMY) as runner:
            vitals, in_hand = runner._parts._vitals, runner._worker._in_hand
            known, doubts = vitals.may_work, list[bool]()

            def may_work(task: str | None = None) -> bool:
                if in_hand.prefetched.ready and not doubts:
                    doubts.append(True)
                    return False
                return known(task)

            vitals.may_work = may_work  # type: ignore[method-assign]
            await add(db)
            await heard.until("job:complete")
        assert doubts


class TestGivingUp:
    async def test_cut_off_by_a_proxy_it_gives_up_before_the_fast_lease_is_over(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """A proxy may refuse one worker alone: that is no sign that the server is down."""
        heard, watcher, gate = Heard(), Heard(), Gate()
        async with (
            proxied(database) as (proxy, through),
            running({"task": gate}, through, heard=heard, **ROOMY),
            running({"other": nothing}, database, heard=watcher, **ROOMY),
        ):
            await add(db)
            await gate.until_begun()
            proxy.refusing = True
            proxy.cut_all()
            await heard.until("pool:fenced")
            assert "worker:recovered" not in watcher.names
            await heard.until("job:interrupted")
            assert gate.cancelled
            assert "worker:recovered" not in watcher.names
            await watcher.until("worker:recovered")
            gate.open()
            proxy.refusing = False
            await heard.until("pool:unfenced")
            await heard.until("job:complete")
            await until(lambda: is_idle(db), "it ran again")

    async def test_without_an_answer_it_gives_up_before_the_lease_is_over(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        heard, watcher, gate = Heard(), Heard(), Gate()
        lease = {**SHORT, "fast_lease": 2.0, "lease": 8.0}  # it gives up 2 s before that is over
        async with (
            proxied(database) as (proxy, through),
            running({"task": gate}, through, heard=heard, **lease),
            running({"other": nothing}, database, heard=watcher, **lease),
        ):
            await add(db)
            await gate.until_begun()
            proxy.frozen = True
            fenced = await heard.until("pool:fenced")
            assert 6 <= fenced.silence < 8
            assert "worker:recovered" not in watcher.names
            await watcher.until("worker:recovered")
            proxy.frozen = False
            gate.open()
            await heard.until("pool:unfenced")
            await until(lambda: is_idle(db), "it ran again")

    async def test_a_restart_of_the_server_that_takes_longer_is_no_reason(self, short_folder: Path) -> None:
        heard, gate = Heard(), Gate()
        with EmbeddedPostgres(short_folder) as server:
            dsn = server.dsn()
            async with WorkerUtils(dsn) as utils:
                await utils.migrate()
                await utils.add_job("task")
            async with running({"task": gate}, dsn, heard=heard, **{**ROOMY, "lease": 32.0}):
                await gate.until_begun()
                await asyncio.to_thread(restart, server, "immediate", pause=5.0)
                gate.open()
                await heard.until("job:complete")
        assert "pool:fenced" not in heard.names
        assert gate.cancelled == []

    async def test_sessions_that_are_ended_again_and_again_are_no_reason(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        heard, watcher, gate = Heard(), Heard(), Gate()
        lease = {**SHORT, "fast_lease": 3.0, "lease": 12.0}  # there is time to connect again
        async with (
            running({"task": gate}, database, heard=heard, **lease) as runner,
            running({"other": nothing}, database, heard=watcher, **lease) as other,
        ):
            await add(db)
            await gate.until_begun()
            began = time.monotonic()
            while time.monotonic() - began < lease["fast_lease"] * 1.5:
                await db.execute(
                    """select pg_terminate_backend(pid) from pg_stat_activity
                    where datname = current_database() and pid <> pg_backend_pid()"""
                )
                for worker in (runner, other):
                    await until_it_beats(db, worker.id, 2)
            gate.open()
            await heard.until("job:complete")
        assert not {"pool:fenced", "worker:recovered"} & {*heard.names, *watcher.names}

    async def test_a_job_with_a_longer_lease_goes_on_and_is_recorded(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        heard, watcher = Heard(), Heard()
        charge, other = Gate(), Gate()
        async with (
            proxied(database) as (proxy, through),
            running(
                {"charge": charge, "other": other},
                through,
                heard=heard,
                concurrency=2,
                task_leases={"charge": 60},
                **SHORT,
            ),
            running({"nothing": nothing}, database, heard=watcher, **SHORT),
        ):
            await add(db, "charge", queue_name="money")
            await add(db, "other")
            await charge.until_begun()
            await other.until_begun()
            proxy.refusing = True
            proxy.cut_all()
            await heard.until("pool:fenced")
            recovered = (await watcher.until("worker:recovered")).recovered
            assert [job.task_identifier for job in recovered.jobs] == ["other"]
            assert recovered.queues == []
            charge.open()
            other.open()
            proxy.refusing = False
            await heard.until("pool:unfenced")
            await until(lambda: is_idle(db), "both are recorded")
        assert charge.cancelled == []
        assert len(charge.begun) == 1
        assert len(other.begun) == 2

    async def test_a_worker_that_may_have_claimed_something_does_not_deregister(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """The answer of its last exchange is lost, and it cannot ask again."""
        watcher = Heard()
        async with (
            proxied(database) as (proxy, through),
            running({"other": nothing}, database, heard=watcher, **SHORT),
        ):

            def cut(direction: str, data: bytes) -> bool:
                proxy.refusing = proxy.refusing or (direction == "reply" and b"find me" in data)
                return proxy.refusing

            proxy.cut_when = cut
            runner = await run({"task": nothing}, through, listen_dsn=database, handle_signals=False, **SHORT)
            await add(db, payload="find me")
            await until(lambda: _locked_one(db), "the job is claimed")
            with pytest.raises(ShutdownError):
                await runner.stop()
            [recovered] = [event.recovered for event in [await watcher.until("worker:recovered")]]
            assert recovered.worker.id == runner.id
            assert len(recovered.jobs) == 1

    async def test_a_process_that_is_well_again_in_time_does_not_end(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        async with (
            proxied(database) as (proxy, through),
            victim(through, exit_if_stuck=True, lease=16.0) as worker,  # it gives up 4 s before that is over
        ):
            await add(db, "block_thread", payload=16)
            await worker.until("begun")
            proxy.frozen = True
            await worker.until("Giving up")
            proxy.frozen = False
            await worker.until("claiming jobs again")
            await worker.until("ended")
            await until(lambda: is_idle(db), "the job is recorded")
            assert "So this process ends" not in worker.text

    @pytest.mark.parametrize("task", ["block_thread", "block_loop"])
    async def test_a_process_whose_work_cannot_be_stopped_ends_if_it_may(
        self, db: asyncpg.Connection, database: str, task: str
    ) -> None:
        async with (
            proxied(database) as (proxy, through),
            victim(through, exit_if_stuck=True) as worker,
            running({"other": nothing}, database, **SHORT),
        ):
            await add(db, task, payload=60)
            await worker.until("begun")
            proxy.refusing = True
            proxy.cut_all()
            assert await worker.end() == 1
            assert "So this process ends" in worker.text

    async def test_so_does_one_that_wakes_up_dead(self, db: asyncpg.Connection, database: str) -> None:
        heard = Heard()
        async with (
            victim(database, exit_if_stuck=True) as worker,
            running({"other": nothing}, database, heard=heard, **SHORT),
        ):
            await add(db, "block_thread", payload=60)
            await worker.until("begun")
            worker.send(signal.SIGSTOP)
            await heard.until("worker:recovered")
            worker.send(signal.SIGCONT)
            assert await worker.end() == 1
            assert "So this process ends" in worker.text

    async def test_a_result_that_was_on_its_way_is_lost_if_others_took_the_job(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        heard, watcher, gate = Heard(), Heard(), Gate()
        async with (
            proxied(database) as (proxy, through),
            running({"task": gate}, through, heard=heard, **SHORT),
            running({"other": nothing}, database, heard=watcher, **SHORT),
        ):
            job = await add(db)
            await gate.until_begun()
            proxy.refusing = True
            proxy.cut_when = lambda direction, _data: direction == "query"
            gate.open()
            await heard.until("job:success")
            await watcher.until("worker:recovered")
            proxy.cut_when = lambda _direction, _data: False
            proxy.refusing = False
            await heard.until("job:complete")
            await until(lambda: is_idle(db), "it ran again")
        told = [event.name for event in heard.all if event.name.startswith("job:")]
        assert {event.job.id for event in heard.named("job:start")} == {job["id"]}
        assert told == [
            "job:start", "job:success", "job:lost", "job:start", "job:success", "job:complete",
        ]  # fmt: skip

    async def test_otherwise_a_thread_goes_on_and_its_result_is_not_recorded(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        async with (
            proxied(database) as (proxy, through),
            victim(through) as worker,
            running({"other": nothing}, database, **SHORT),
        ):
            await add(db, "block_thread", payload=3)
            await worker.until("begun")
            proxy.refusing = True
            proxy.cut_all()
            await worker.until("Giving up")
            await until(lambda: _freed(db), "others freed the job")
            proxy.refusing = False
            await worker.until("ended")
            await worker.until("was not ours any more")
            await worker.until("ended", 2)
            await until(lambda: is_idle(db), "it ran again")


async def _locked_one(db: asyncpg.Connection) -> bool:
    return len(await locked(db)) == 1


async def _freed(db: asyncpg.Connection) -> bool:
    return await locked(db) == []
