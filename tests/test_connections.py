"""Tasks that hold connections block neither the worker nor `stop`, and leave no session state behind."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.request
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import asyncpg
import pytest

from graphile_worker import ConfigurationError, JobContext, JobSpec, WorkerUtils, run
from graphile_worker._db.connection import array_types, connect
from graphile_worker.doctor import Level, examine
from support.jobs import add, lock
from support.waiting import until
from support.workers import DEADLINE, EventRecorder, nothing, running
from test_recovery import register_worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

SESSIONS = """select count(*) from pg_stat_activity
    where application_name = 'graphile-worker' and datname = current_database()"""


@pytest.fixture
async def role(db: asyncpg.Connection) -> AsyncIterator[str]:
    """Create a role without any rights on the queue."""
    name = f"tenant_{uuid4().hex}"
    await db.execute(f"create role {name}")
    yield name
    await db.execute(f"drop role {name}")


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "_LOAN_LIMIT", 0.2)
    monkeypatch.setattr(connect, "_STATEMENT_LIMIT", 0.2)


class Hog:
    """A task that holds a connection until the test releases it. It may execute a statement first."""

    def __init__(self, statement: str | None = None) -> None:
        self.statement = statement
        self.holding = 0
        self.release = asyncio.Event()
        self._changed = asyncio.Event()

    async def __call__(self, _payload: object, ctx: JobContext) -> None:
        async with ctx.connection() as connection:
            await self.hold(connection)

    async def hold(self, connection: Any) -> None:
        if self.statement is not None:
            await connection.execute(self.statement)
        self.holding += 1
        self._changed.set()
        try:
            await self.release.wait()
        finally:
            self.holding -= 1

    async def until_holding(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE):
            while self.holding < count:
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def held(utils: WorkerUtils, count: int) -> AsyncIterator[None]:
    """Hold that many connections of the pool."""
    async with AsyncExitStack() as stack:
        for _ in range(count):
            await stack.enter_async_context(utils.connection())
        yield


class TestHeldConnections:
    async def test_twelve_jobs_that_hold_a_connection_add_a_job_each(self, database: str) -> None:
        recorder, ten, holding = EventRecorder(), asyncio.Event(), 0

        async def hog(_payload: object, ctx: JobContext) -> None:
            nonlocal holding
            async with ctx.connection():
                holding += 1
                if holding == 10:
                    ten.set()
                await ten.wait()
                await ctx.add_job("task")

        tasks: dict[str, Callable[..., Any]] = {"hog": hog, "task": nothing}
        async with running(tasks, database, recorder=recorder, concurrency=12) as runner:
            await runner.utils.add_jobs([JobSpec("hog")] * 12)
            await recorder.until("job:complete", 24)

    async def test_ten_callers_that_hold_a_connection_add_a_job_each(self, database: str) -> None:
        async with WorkerUtils(database) as utils, asyncio.timeout(DEADLINE):
            all_hold = asyncio.Barrier(10)

            async def hold_and_add() -> None:
                async with utils.connection():
                    await all_hold.wait()
                    await utils.add_job("task")

            await asyncio.gather(*(hold_and_add() for _ in range(10)))
            assert (await utils.stats()).total == 10

    @pytest.mark.parametrize("size", [4, 5, 6, 12])
    async def test_jobs_run_while_tasks_hold_connections_of_a_callers_pool(
        self, database: str, size: int
    ) -> None:
        recorder, hog = EventRecorder(), Hog()
        reserve = 1 if size < 6 else 2
        async with (
            asyncpg.create_pool(database, min_size=0, max_size=size) as pool,
            running(
                {"hog": hog, "task": nothing}, None, pool=pool, recorder=recorder, concurrency=20
            ) as runner,
        ):
            await runner.utils.add_jobs([JobSpec("hog")] * 12)
            await hog.until_holding(size - 2 - reserve)
            async with asyncio.timeout(DEADLINE):
                await runner.add_job("task")
            await recorder.until("job:complete")
            hog.release.set()
            await recorder.until("job:complete", 13)

    async def test_recovery_and_cancellation_work_while_a_task_holds_the_only_connection(
        self, database: str, db: asyncpg.Connection, role: str
    ) -> None:
        """The task has also changed its role, which must not affect other sessions."""
        recorder, hog = EventRecorder(), Hog(f"set role {role}")
        async with running(
            {"hog": hog, "task": nothing},
            database,
            recorder=recorder,
            concurrency=4,
            max_pool_size=1,
            poll_interval=0.1,
            heartbeat_interval=0.2,
            fast_lease=0.4,
            lease=4.0,
        ) as runner:
            first = await runner.add_job("hog")
            waiting = await runner.add_job("hog")
            await hog.until_holding(1)
            async with db.transaction():  # otherwise the worker claims the job
                orphan = await add(db, "task")
                await lock(db, orphan["id"], by="dead")
            await register_worker(db, "dead", seconds=4.0, fast=0.4)
            recovered = await recorder.until("worker:recovered")
            assert [job.id for job in recovered.recovered.jobs] == [orphan["id"]]
            for job in (first, waiting):  # one holds the connection, the other waits for it
                await runner.utils.cancel_job(job.id)
            await recorder.until("job:cancelled", 2)
            await recorder.until("job:complete")

    async def test_cron_adds_jobs_while_tasks_hold_all_connections(
        self, database: str, db: asyncpg.Connection
    ) -> None:
        recorder, hog = EventRecorder(), Hog()
        item = {"task": "task", "match": "* * * * *", "identifier": "each minute", "backfill": 180}
        async with running(
            {"hog": hog, "task": nothing},
            database,
            recorder=recorder,
            concurrency=2,
            max_pool_size=1,
            cron_items=[item],
        ) as runner:
            await recorder.until("cron:started")
            await runner.add_job("hog")
            await hog.until_holding(1)
            await db.execute(
                """update graphile_worker._private_known_crontabs
                set last_execution = now() - interval '3 minutes', known_since = now() - interval '1 hour'"""
            )
            scheduler = runner._parts._make_scheduler()  # as after a start, with this worker's pool
            assert scheduler is not None
            async with asyncio.timeout(DEADLINE):
                await scheduler.tick()
            assert recorder.counts["cron:backfill"] >= 1
            await recorder.until("job:complete")

    async def test_own_statements_use_two_more_connections_and_never_a_held_one(
        self, database: str, db: asyncpg.Connection
    ) -> None:
        async with WorkerUtils(database, max_pool_size=3) as utils:
            for _ in range(2):
                async with held(utils, 3):
                    await asyncio.gather(*(utils.add_job("task") for _ in range(20)))
                    assert await db.fetchval(SESSIONS) == 5
            lent = await db.fetchval(SESSIONS + " and query like '%reset role%'")
            assert lent == 3, "the other two were never held by callers"
            # While no connection is held, own statements may use all, and close those kept for callers.
            await asyncio.gather(*(utils.stats() for _ in range(20)))
            assert await db.fetchval(SESSIONS) <= 5

    async def test_cancelled_waits_lose_no_connection(self, database: str) -> None:
        async with WorkerUtils(database, max_pool_size=1) as utils, asyncio.timeout(DEADLINE):
            for _ in range(20):
                waiting = []
                async with held(utils, 1):
                    waiting = [asyncio.create_task(held(utils, 1).__aenter__()) for _ in range(3)]
                    await asyncio.sleep(0)
                    waiting[0].cancel()
                waiting[1].cancel()
                waiting[2].cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
            async with held(utils, 1):
                await utils.add_job("task")


class TestLongWaits:
    async def test_pool_timeout_error_names_the_code_that_holds_the_connections(self, database: str) -> None:
        from graphile_worker import PoolTimeoutError  # noqa: PLC0415

        async with WorkerUtils(database, max_pool_size=2, pool_timeout=timedelta(seconds=0.05)) as utils:
            async with held(utils, 2):
                with pytest.raises(PoolTimeoutError) as caught:
                    await held(utils, 1).__aenter__()
                await utils.add_job("task")
            message = str(caught.value)
            assert "within 0.1 s (pool_timeout)" in message or "within 0.0 s (pool_timeout)" in message
            assert "by held (test_connections.py:" in message
            assert "max_pool_size" in message
            async with held(utils, 2):
                pass

    async def test_pool_timeout_fails_the_waiting_job_and_names_the_holding_one(self, database: str) -> None:
        recorder, hog = EventRecorder(), Hog()
        async with running(
            {"hog": hog}, database, recorder=recorder, concurrency=2, max_pool_size=1, pool_timeout=1
        ) as runner:
            job = await runner.add_job("hog")
            await hog.until_holding(1)
            await runner.add_job("hog")
            failed = await recorder.until("job:error")
            assert f"by job {job.id} (hog) for " in str(failed.error)
            hog.release.set()
            await recorder.until("job:complete")

    async def test_pool_timeout_applies_to_a_callers_pool_that_other_code_exhausts(
        self, database: str
    ) -> None:
        from graphile_worker import PoolTimeoutError  # noqa: PLC0415

        async with (
            asyncpg.create_pool(database, min_size=0, max_size=1) as pool,
            WorkerUtils(pool=pool, pool_timeout=0.05) as utils,
        ):
            async with pool.acquire():
                with pytest.raises(PoolTimeoutError, match="1 connection"):
                    await utils.add_job("task")
            await utils.add_job("task")

    async def test_pool_timeout_must_be_positive(self, database: str) -> None:
        with pytest.raises(ConfigurationError, match="pool_timeout is 0"):
            WorkerUtils(database, pool_timeout=0)
        with pytest.raises(ConfigurationError, match="pool_timeout is -1"):
            await run({"task": nothing}, database, pool_timeout=-1)

    async def test_long_wait_is_logged_once_and_reported_by_health_and_doctor(
        self,
        database: str,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("graphile_worker._db.connection.pool_usage.LONG_WAIT", 0.1)
        caplog.set_level("INFO", "graphile_worker")
        hog = Hog()
        async with running(
            {"hog": hog}, database, concurrency=4, max_pool_size=1, heartbeat_interval=0.1
        ) as runner:
            holder = await runner.add_job("hog")
            await hog.until_holding(1)
            assert runner.health().connection_wait is None
            await runner.utils.add_jobs([JobSpec("hog")] * 2)
            named = f"by job {holder.id} (hog) for "

            async def seen() -> bool:
                return runner.health().connection_wait is not None

            await until(seen, "health reports the long wait")
            health = runner.health()
            assert health.ready
            assert named in (health.reason or "")

            async def found() -> bool:
                async for finding in examine(database, listen=False):
                    if finding.check == "workers" and finding.level is Level.WARNING:
                        return named in finding.message and runner.id in finding.message
                return False

            await until(found, "the doctor reports the long wait")
            warnings = [record.message for record in caplog.records if "for a connection" in record.message]
            assert len(warnings) == 1
            assert named in warnings[0]
            hog.release.set()

            async def over() -> bool:
                worker = (await runner.utils.workers())[0]
                return runner.health().reason is None and worker.reason is None

            await until(over, "the long wait is over")
            ends = [
                record for record in caplog.records if "waits long for a connection any" in record.message
            ]
            assert len(ends) == 1

    async def test_ready_endpoint_reports_a_long_wait(
        self, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("graphile_worker._db.connection.pool_usage.LONG_WAIT", 0.05)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        hog = Hog()

        def ask() -> dict[str, Any]:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=10) as answer:
                found: dict[str, Any] = json.load(answer)
                return found

        async with running({"hog": hog}, database, concurrency=2, max_pool_size=1, health=port) as runner:
            await runner.utils.add_jobs([JobSpec("hog")] * 2)

            async def reported() -> bool:
                return (await asyncio.to_thread(ask))["connection_wait"] is not None

            await until(reported, "/ready reports the long wait")
            hog.release.set()


class TestStopping:
    @pytest.mark.usefixtures("short_limits")
    async def test_stop_closes_and_logs_a_connection_that_other_code_holds(
        self,
        database: str,
        db: asyncpg.Connection,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        runner = await run({"task": nothing}, database, handle_signals=False)
        hog = Hog()

        async def hold_on() -> None:
            async with runner.utils.connection() as connection:
                await hog.hold(connection)

        holding = asyncio.create_task(hold_on())
        await hog.until_holding(1)
        async with asyncio.timeout(DEADLINE):
            await runner.stop()
        assert "still held by hold_on (test_connections.py:" in caplog.text
        await until(lambda: _none_left(db), "its connections are closed")
        hog.release.set()
        await holding

    @pytest.mark.usefixtures("short_limits")
    async def test_stop_closes_a_connection_held_by_an_abandoned_thread(
        self, database: str, db: asyncpg.Connection, caplog: pytest.LogCaptureFixture
    ) -> None:
        recorder, holding = EventRecorder(), asyncio.Event()
        errors: list[Exception] = []

        async def wait_on(ctx: JobContext) -> None:
            async with ctx.connection() as connection:
                holding.set()
                await connection.execute("select pg_sleep(3600)")

        def task(_payload: object, ctx: JobContext) -> None:
            try:
                ctx.run_sync(wait_on(ctx))
            except Exception as error:  # noqa: BLE001 - the type depends on timing
                errors.append(error)

        runner = await run({"task": task}, database, handle_signals=False, events=recorder.events)
        job = await runner.utils.add_job("task", timeout=0.1)
        await holding.wait()
        await recorder.until("job:error")
        async with asyncio.timeout(DEADLINE):
            await runner.stop()
        assert f"still held by job {job.id} (task) for " in caplog.text
        await until(lambda: _none_left(db), "the connection is closed")

        async def noticed() -> bool:
            return bool(errors)

        await until(noticed, "the thread gets an error")

    @pytest.mark.usefixtures("short_limits")
    async def test_close_ends_held_connections_statements_and_waiting_calls(
        self, database: str, db: asyncpg.Connection, caplog: pytest.LogCaptureFixture
    ) -> None:
        utils, blocker = WorkerUtils(database, max_pool_size=1), await asyncpg.connect(database)
        async with blocker.transaction():
            await blocker.execute("lock table graphile_worker._private_jobs")
            adding = asyncio.create_task(utils.add_job("task"))
            hog = Hog()

            async def hold_on() -> None:
                async with utils.connection() as connection:
                    await hog.hold(connection)

            await until(lambda: _is_blocked(db), "the statement waits for the table lock")
            # The statement uses the only connection, so these calls wait. One may get it after the statement.
            waiting = [asyncio.create_task(hold_on()) for _ in range(2)]
            await asyncio.sleep(0)
            async with asyncio.timeout(DEADLINE):
                await utils.close()
            for task in (adding, *waiting):
                with pytest.raises(Exception, match=r"closed|lost|canceling|refused"):
                    await task
        await blocker.close()
        await until(lambda: _none_left(db), "no sessions are left")
        assert "1 statement has not finished" in caplog.text

    async def test_connection_released_in_time_is_not_closed(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        utils = WorkerUtils(database)
        hog = Hog()

        async def hold_on() -> object:
            async with utils.connection() as connection:
                await hog.hold(connection)
                return await connection.fetchval("select 1")

        holding = asyncio.create_task(hold_on())
        await hog.until_holding(1)
        closing = asyncio.create_task(utils.close())
        await asyncio.sleep(0)
        hog.release.set()
        assert await holding == 1
        await closing
        assert "held" not in caplog.text

    @pytest.mark.usefixtures("short_limits")
    async def test_stop_does_not_wait_forever_for_a_callers_pool(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with asyncpg.create_pool(database, min_size=0, max_size=4) as pool:
            runner = await run({"task": nothing}, pool=pool, handle_signals=False)
            hog = Hog()

            async def hold_on() -> object:
                async with runner.utils.connection() as connection:
                    await hog.hold(connection)
                    return await connection.fetchval("select 1")

            holding = asyncio.create_task(hold_on())
            await hog.until_holding(1)
            async with asyncio.timeout(DEADLINE):
                await runner.stop()
            assert "still held by hold_on" in caplog.text
            hog.release.set()
            assert await holding == 1, "the caller's connection stays open"
            assert await pool.fetchval("select 1") == 1


async def _none_left(db: asyncpg.Connection) -> bool:
    return bool(await db.fetchval(SESSIONS) == 0)


async def _is_blocked(db: asyncpg.Connection) -> bool:
    return bool(await db.fetchval(SESSIONS + " and wait_event_type = 'Lock'"))


SESSION_STATE = {
    "role": ("set role {role}", "select current_user = session_user"),
    "authorization": ("set session authorization {role}", "select session_user <> '{role}'"),
    "temporary table": ("create temporary table mine (a int)", "select to_regclass('pg_temp.mine') is null"),
    "listener": ("listen something", "select count(*) = 0 from pg_listening_channels()"),
    "advisory lock": (
        "select pg_advisory_lock(4711)",
        """select count(*) = 0 from pg_locks
        where locktype = 'advisory' and objid = 4711 and pid = pg_backend_pid()""",
    ),
    "setting": ("set search_path to elsewhere", "select current_setting('search_path') <> 'elsewhere'"),
    "transaction": ("begin; create table mine ()", "select to_regclass('mine') is null"),
    "failed transaction": ("begin; create table mine (); select 1 / 0", "select to_regclass('mine') is null"),
}


class TestSessionState:
    @pytest.mark.sample(4)
    @pytest.mark.parametrize("on_callers_pool", [False, True], ids=["own pool", "caller's pool"])
    @pytest.mark.parametrize("what", SESSION_STATE)
    async def test_session_state_is_reset_before_the_next_task(
        self, database: str, role: str, what: str, on_callers_pool: bool
    ) -> None:
        change_state, is_clean = (text.format(role=role) for text in SESSION_STATE[what])
        async with AsyncExitStack() as stack:
            options: dict[str, Any] = {"dsn": database, "max_pool_size": 1}
            if on_callers_pool:
                pool = await stack.enter_async_context(asyncpg.create_pool(database, min_size=0, max_size=2))
                options = {"pool": pool}
            utils = await stack.enter_async_context(WorkerUtils(**options))
            async with utils.connection() as connection:
                first = connection.get_server_pid()
                with suppress(asyncpg.DivisionByZeroError):
                    await connection.execute(change_state)
            async with utils.connection() as connection:
                assert connection.get_server_pid() == first, "the session is the same"
                assert not connection.is_in_transaction()
                assert await connection.fetchval(is_clean)
                assert await connection.fetchval("select session_user = current_user")
            await utils.add_job("task")

    @pytest.mark.parametrize("by_driver", [False, True])
    async def test_open_transaction_is_rolled_back_and_its_job_logged(
        self, database: str, by_driver: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        recorder = EventRecorder()

        async def task(_payload: object, ctx: JobContext) -> None:
            async with ctx.connection() as connection:
                if by_driver:
                    await connection.transaction().start()
                else:
                    await connection.execute("begin")
                await connection.execute("create table mine ()")

        async with running({"task": task}, database, recorder=recorder) as runner:
            job = await runner.add_job("task")
            await recorder.until("job:complete")
            async with runner.utils.connection() as connection:
                assert await connection.fetchval("select to_regclass('mine') is null")
        assert f"left open on a connection held by job {job.id} (task) for " in caplog.text
        assert [record for record in caplog.records if record.name == "asyncio"] == []

    async def test_connection_that_cannot_be_reset_is_closed(self, database: str) -> None:
        async with WorkerUtils(database, max_pool_size=1) as utils:
            async with utils.connection() as connection:
                first = connection.get_server_pid()
                still_busy = asyncio.create_task(connection.execute("select pg_sleep(3600)"))
                await asyncio.sleep(0.05)
            async with utils.connection() as connection:
                assert connection.get_server_pid() != first
            with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError)):
                await still_busy

    async def test_type_codecs_set_by_a_task_do_not_affect_own_statements(self, database: str) -> None:
        async with WorkerUtils(database, max_pool_size=1) as utils:
            async with utils.connection() as connection:
                await connection.set_type_codec(
                    "int8", schema="pg_catalog", encoder=str, decoder=lambda text: -int(text)
                )
            job = await utils.add_job("task", {"a": 1})
            assert job.id > 0
            assert await utils.get_job(id=job.id) is not None

    async def test_role_set_by_the_callers_pool_is_kept(
        self, database: str, db: asyncpg.Connection, role: str
    ) -> None:
        other = f"{role}_other"
        await db.execute(f"create role {other}")

        async def init(connection: asyncpg.Connection) -> None:
            await connection.execute(f"set role {role}")

        async with (
            asyncpg.create_pool(database, min_size=0, max_size=2, init=init) as pool,
            WorkerUtils(pool=pool) as utils,
        ):
            async with utils.connection() as connection:
                first = connection.get_server_pid()
            async with utils.connection() as connection:
                assert connection.get_server_pid() == first
                assert await connection.fetchval("select current_user") == role
                await connection.execute(f"reset role; set role {other}")
            async with utils.connection() as connection:
                assert connection.get_server_pid() != first, "the connection was closed"
                assert await connection.fetchval("select current_user") == role
        await db.execute(f"drop role {other}")


class TestArrayTypes:
    async def test_own_connections_send_arrays_without_asking_the_server_about_their_types(
        self, database: str
    ) -> None:
        when = datetime(2024, 2, 29, 12, tzinfo=UTC)
        arrays = [[1, None], [2**31 - 1], [2**63 - 1], [0.5], [when, None]]
        sent: list[str] = []
        async with connect.connect(database) as connection:
            with connection.query_logger(lambda record: sent.append(record.query)):
                row = await connection.fetchrow(
                    "select $1::int2[], $2::int4[], $3::int8[], $4::float8[], $5::timestamptz[]", *arrays
                )
        assert list(row or ()) == arrays
        assert len(sent) == 1

    async def test_registered_array_types_are_those_of_the_server(self, db: asyncpg.Connection) -> None:
        rows = await db.fetch(
            """select typarray, typname, oid from pg_type
               where typname in ('int2', 'int4', 'int8', 'float4', 'float8', 'timestamptz')"""
        )
        assert {array: (name, oid) for array, name, oid in rows} == array_types.ELEMENT_TYPES

    async def test_driver_that_registers_types_differently_asks_the_server(
        self, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(array_types, "_describe_types", lambda: [{"oid": 1007}])
        async with connect.connect(database) as connection:
            assert await connection.fetchval("select $1::int4[]", [1]) == [1]
