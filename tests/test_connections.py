"""Tasks that hold connections stop neither the worker nor `stop`, and leave nothing on them."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.request
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import asyncpg
import pytest

from graphile_worker import ConfigurationError, JobContext, JobSpec, WorkerUtils, run
from graphile_worker._db import connect
from graphile_worker.doctor import Level, examine
from support.jobs import add, lock
from support.waiting import until
from support.workers import DEADLINE, Heard, nothing, running
from test_recovery import enroll

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

SESSIONS = """select count(*) from pg_stat_activity
    where application_name = 'graphile-worker' and datname = current_database()"""


@pytest.fixture
async def role(db: asyncpg.Connection) -> AsyncIterator[str]:
    """A role that may do nothing with the queue."""
    name = f"tenant_{uuid4().hex}"
    await db.execute(f"create role {name}")
    yield name
    await db.execute(f"drop role {name}")


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "_LOAN_LIMIT", 0.2)
    monkeypatch.setattr(connect, "_STATEMENT_LIMIT", 0.2)


class Hog:
    """A task that holds a connection until it is let go, and may do something first."""

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
    """So many connections of the pool are lent to this test."""
    async with AsyncExitStack() as stack:
        for _ in range(count):
            await stack.enter_async_context(utils.lend_connection())
        yield


class TestConnectionsThatAreHeld:
    async def test_twelve_jobs_that_hold_a_connection_add_a_job_each(self, database: str) -> None:
        heard, ten, holding = Heard(), asyncio.Event(), 0

        async def hog(_payload: object, ctx: JobContext) -> None:
            nonlocal holding
            async with ctx.connection():
                holding += 1
                if holding == 10:
                    ten.set()
                await ten.wait()
                await ctx.add_job("task")

        tasks: dict[str, Callable[..., Any]] = {"hog": hog, "task": nothing}
        async with running(tasks, database, heard=heard, concurrency=12) as runner:
            await runner.utils.add_jobs([JobSpec("hog")] * 12)
            await heard.until("job:complete", 24)

    async def test_ten_calls_outside_of_workers_do_so_too(self, database: str) -> None:
        async with WorkerUtils(database) as utils, asyncio.timeout(DEADLINE):
            everybody_holds = asyncio.Barrier(10)

            async def hold_and_add() -> None:
                async with utils.lend_connection():
                    await everybody_holds.wait()
                    await utils.add_job("task")

            await asyncio.gather(*(hold_and_add() for _ in range(10)))
            assert (await utils.stats()).total == 10

    @pytest.mark.parametrize("size", [4, 5, 6, 12])
    async def test_tasks_on_a_callers_pool_do_so_too(self, database: str, size: int) -> None:
        heard, hog = Heard(), Hog()
        reserve = 1 if size < 6 else 2
        async with (
            asyncpg.create_pool(database, min_size=0, max_size=size) as pool,
            running({"hog": hog, "task": nothing}, None, pool=pool, heard=heard, concurrency=20) as runner,
        ):
            await runner.utils.add_jobs([JobSpec("hog")] * 12)
            await hog.until_holding(size - 2 - reserve)
            async with asyncio.timeout(DEADLINE):
                await runner.add_job("task")
            await heard.until("job:complete")
            hog.release.set()
            await heard.until("job:complete", 13)

    async def test_recovery_and_cancelling_go_on_while_a_task_holds_the_only_connection(
        self, database: str, db: asyncpg.Connection, role: str
    ) -> None:
        """The task has also changed its role, which must not matter to any other session."""
        heard, hog = Heard(), Hog(f"set role {role}")
        async with running(
            {"hog": hog, "task": nothing},
            database,
            heard=heard,
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
            async with db.transaction():  # or the worker claims it
                orphan = await add(db, "task")
                await lock(db, orphan["id"], by="dead")
            await enroll(db, "dead", seconds=4.0, fast=0.4)
            recovered = await heard.until("worker:recovered")
            assert [job.id for job in recovered.recovered.jobs] == [orphan["id"]]
            for job in (first, waiting):  # the one that holds the connection, and the one that waits for it
                await runner.utils.cancel_job(job.id)
            await heard.until("job:cancelled", 2)
            await heard.until("job:complete")

    async def test_cron_adds_jobs_while_tasks_hold_all_connections(
        self, database: str, db: asyncpg.Connection
    ) -> None:
        heard, hog = Heard(), Hog()
        item = {"task": "task", "match": "* * * * *", "identifier": "each minute", "backfill": 180}
        async with running(
            {"hog": hog, "task": nothing},
            database,
            heard=heard,
            concurrency=2,
            max_pool_size=1,
            cron_items=[item],
        ) as runner:
            await heard.until("cron:started")
            await runner.add_job("hog")
            await hog.until_holding(1)
            await db.execute(
                """update graphile_worker._private_known_crontabs
                set last_execution = now() - interval '3 minutes', known_since = now() - interval '1 hour'"""
            )
            scheduler = runner._parts._make_scheduler()  # as after a start, on the connections of this worker
            assert scheduler is not None
            async with asyncio.timeout(DEADLINE):
                await scheduler.tick()
            assert heard.counts["cron:backfill"] >= 1
            await heard.until("job:complete")

    async def test_own_statements_use_two_more_connections_and_never_one_that_was_lent(
        self, database: str, db: asyncpg.Connection
    ) -> None:
        async with WorkerUtils(database, max_pool_size=3) as utils:
            for _ in range(2):
                async with held(utils, 3):
                    await asyncio.gather(*(utils.add_job("task") for _ in range(20)))
                    assert await db.fetchval(SESSIONS) == 5
            lent = await db.fetchval(SESSIONS + " and query like '%reset role%'")
            assert lent == 3, "others were never lent"
            # Without loans own statements may use all, and close what the other lane has kept.
            await asyncio.gather(*(utils.stats() for _ in range(20)))
            assert await db.fetchval(SESSIONS) <= 5

    async def test_calls_that_give_up_waiting_lose_no_connection(self, database: str) -> None:
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
    async def test_pool_timeout_says_which_code_holds_the_connections(self, database: str) -> None:
        from graphile_worker import PoolTimeoutError  # noqa: PLC0415

        async with WorkerUtils(database, max_pool_size=2, pool_timeout=timedelta(seconds=0.05)) as utils:
            async with held(utils, 2):
                with pytest.raises(PoolTimeoutError) as caught:
                    await held(utils, 1).__aenter__()
                await utils.add_job("task")
            message = str(caught.value)
            assert "within 0.1 s (pool_timeout)" in message or "within 0.0 s (pool_timeout)" in message
            assert "Of 2 connections 2 are held: by held (test_connections.py:" in message
            assert message.endswith("Hold connections for a shorter time, or raise max_pool_size.")
            async with held(utils, 2):
                pass

    async def test_pool_timeout_fails_a_job_and_names_the_job_that_holds(self, database: str) -> None:
        heard, hog = Heard(), Hog()
        async with running(
            {"hog": hog}, database, heard=heard, concurrency=2, max_pool_size=1, pool_timeout=0.05
        ) as runner:
            job = await runner.add_job("hog")
            await hog.until_holding(1)
            await runner.add_job("hog")
            failed = await heard.until("job:error")
            assert f"by job {job.id} (hog) for " in str(failed.error)
            hog.release.set()
            await heard.until("job:complete")

    async def test_pool_timeout_holds_for_a_callers_pool_that_other_code_uses_up(self, database: str) -> None:
        from graphile_worker import PoolTimeoutError  # noqa: PLC0415

        async with (
            asyncpg.create_pool(database, min_size=0, max_size=1) as pool,
            WorkerUtils(pool=pool, pool_timeout=0.05) as utils,
        ):
            async with pool.acquire():
                with pytest.raises(PoolTimeoutError, match="None of the 1 connections is held by a task"):
                    await utils.add_job("task")
            await utils.add_job("task")

    async def test_pool_timeout_must_be_more_than_0(self, database: str) -> None:
        with pytest.raises(ConfigurationError, match="pool_timeout is 0"):
            WorkerUtils(database, pool_timeout=0)
        with pytest.raises(ConfigurationError, match="pool_timeout is -1"):
            await run({"task": nothing}, database, pool_timeout=-1)

    async def test_a_long_wait_is_logged_once_and_seen_by_health_and_doctor(
        self,
        database: str,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("graphile_worker._db.pool_usage.LONG_WAIT", 0.1)
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

            await until(seen, "a call waits for long")
            health = runner.health()
            assert health.ready
            assert named in (health.reason or "")

            async def found() -> bool:
                async for finding in examine(database, listen=False):
                    if finding.check == "workers" and finding.level is Level.WARNING:
                        return named in finding.says and runner.id in finding.says
                return False

            await until(found, "the doctor says so")
            warnings = [record.message for record in caplog.records if "for a connection" in record.message]
            assert len(warnings) == 1
            assert named in warnings[0]
            hog.release.set()

            async def over() -> bool:
                worker = (await runner.utils.workers())[0]
                return runner.health().reason is None and worker.reason is None

            await until(over, "it is over")

    async def test_ready_tells_of_a_long_wait_over_http(
        self, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("graphile_worker._db.pool_usage.LONG_WAIT", 0.05)
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

            async def told() -> bool:
                return (await asyncio.to_thread(ask))["connection_wait"] is not None

            await until(told, "it is told")
            hog.release.set()


class TestStopping:
    @pytest.mark.usefixtures("short_limits")
    async def test_stop_ends_a_connection_that_other_code_holds_and_says_so(
        self,
        database: str,
        db: asyncpg.Connection,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        runner = await run({"task": nothing}, database, handle_signals=False)
        hog = Hog()

        async def hold_on() -> None:
            async with runner.utils.lend_connection() as connection:
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
    async def test_stop_ends_what_an_abandoned_thread_holds(
        self, database: str, db: asyncpg.Connection, caplog: pytest.LogCaptureFixture
    ) -> None:
        heard, holding = Heard(), asyncio.Event()
        errors: list[Exception] = []

        async def wait_on(ctx: JobContext) -> None:
            async with ctx.connection() as connection:
                holding.set()
                await connection.execute("select pg_sleep(3600)")

        def task(_payload: object, ctx: JobContext) -> None:
            try:
                ctx.blocking(wait_on(ctx))
            except Exception as error:  # noqa: BLE001 - whatever it is
                errors.append(error)

        runner = await run({"task": task}, database, handle_signals=False, events=heard.events)
        job = await runner.utils.add_job("task", timeout=0.1)
        await holding.wait()
        await heard.until("job:error")
        async with asyncio.timeout(DEADLINE):
            await runner.stop()
        assert f"still held by job {job.id} (task) for " in caplog.text
        await until(lambda: _none_left(db), "its statement is cancelled")

        async def noticed() -> bool:
            return bool(errors)

        await until(noticed, "the thread learns of it")

    @pytest.mark.usefixtures("short_limits")
    async def test_closing_utils_ends_loans_statements_and_calls_that_wait(
        self, database: str, db: asyncpg.Connection, caplog: pytest.LogCaptureFixture
    ) -> None:
        utils, blocker = WorkerUtils(database, max_pool_size=1), await asyncpg.connect(database)
        async with blocker.transaction():
            await blocker.execute("lock table graphile_worker._private_jobs")
            adding = asyncio.create_task(utils.add_job("task"))
            hog = Hog()

            async def hold_on() -> None:
                async with utils.lend_connection() as connection:
                    await hog.hold(connection)

            await until(lambda: _is_blocked(db), "it waits for the table")
            # The statement has the only place, so these wait; one may get it when the statement is ended.
            waiting = [asyncio.create_task(hold_on()) for _ in range(2)]
            await asyncio.sleep(0)
            async with asyncio.timeout(DEADLINE):
                await utils.close()
            for task in (adding, *waiting):
                with pytest.raises(Exception, match=r"closed|lost|canceling|refused"):
                    await task
        await blocker.close()
        await until(lambda: _none_left(db), "nothing is left")
        assert "1 statement has not ended" in caplog.text

    async def test_what_comes_back_in_time_is_not_ended(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        utils = WorkerUtils(database)
        hog = Hog()

        async def hold_on() -> object:
            async with utils.lend_connection() as connection:
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
    async def test_stop_does_not_wait_for_ever_for_a_callers_pool(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with asyncpg.create_pool(database, min_size=0, max_size=4) as pool:
            runner = await run({"task": nothing}, pool=pool, handle_signals=False)
            hog = Hog()

            async def hold_on() -> object:
                async with runner.utils.lend_connection() as connection:
                    await hog.hold(connection)
                    return await connection.fetchval("select 1")

            holding = asyncio.create_task(hold_on())
            await hog.until_holding(1)
            async with asyncio.timeout(DEADLINE):
                await runner.stop()
            assert "still held by hold_on" in caplog.text
            hog.release.set()
            assert await holding == 1, "the connection is the caller's"
            assert await pool.fetchval("select 1") == 1


async def _none_left(db: asyncpg.Connection) -> bool:
    return bool(await db.fetchval(SESSIONS) == 0)


async def _is_blocked(db: asyncpg.Connection) -> bool:
    return bool(await db.fetchval(SESSIONS + " and wait_event_type = 'Lock'"))


LEFT = {
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


class TestWhatIsLeftOnConnections:
    @pytest.mark.parametrize("on_callers_pool", [False, True], ids=["ours", "given"])
    @pytest.mark.parametrize("what", LEFT)
    async def test_the_next_task_finds_nothing_of_it(
        self, database: str, role: str, what: str, on_callers_pool: bool
    ) -> None:
        leave, is_clean = (text.format(role=role) for text in LEFT[what])
        async with AsyncExitStack() as stack:
            given: dict[str, Any] = {"dsn": database, "max_pool_size": 1}
            if on_callers_pool:
                pool = await stack.enter_async_context(asyncpg.create_pool(database, min_size=0, max_size=2))
                given = {"pool": pool}
            utils = await stack.enter_async_context(WorkerUtils(**given))
            async with utils.lend_connection() as connection:
                first = connection.get_server_pid()
                with suppress(asyncpg.DivisionByZeroError):
                    await connection.execute(leave)
            async with utils.lend_connection() as connection:
                assert connection.get_server_pid() == first, "it is the same session"
                assert not connection.is_in_transaction()
                assert await connection.fetchval(is_clean)
                assert await connection.fetchval("select session_user = current_user")
            await utils.add_job("task")

    @pytest.mark.parametrize("by_driver", [False, True])
    async def test_an_open_transaction_is_rolled_back_and_its_task_named(
        self, database: str, by_driver: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        heard = Heard()

        async def task(_payload: object, ctx: JobContext) -> None:
            async with ctx.connection() as connection:
                if by_driver:
                    await connection.transaction().start()
                else:
                    await connection.execute("begin")
                await connection.execute("create table mine ()")

        async with running({"task": task}, database, heard=heard) as runner:
            job = await runner.add_job("task")
            await heard.until("job:complete")
            async with runner.utils.lend_connection() as connection:
                assert await connection.fetchval("select to_regclass('mine') is null")
        assert f"left open on a connection held by job {job.id} (task) for " in caplog.text
        assert [record for record in caplog.records if record.name == "asyncio"] == []

    async def test_a_connection_that_cannot_be_cleaned_is_closed(self, database: str) -> None:
        async with WorkerUtils(database, max_pool_size=1) as utils:
            async with utils.lend_connection() as connection:
                first = connection.get_server_pid()
                still_busy = asyncio.create_task(connection.execute("select pg_sleep(3600)"))
                await asyncio.sleep(0.05)
            async with utils.lend_connection() as connection:
                assert connection.get_server_pid() != first
            with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError)):
                await still_busy

    async def test_what_a_driver_was_told_about_types_does_not_reach_own_statements(
        self, database: str
    ) -> None:
        async with WorkerUtils(database, max_pool_size=1) as utils:
            async with utils.lend_connection() as connection:
                await connection.set_type_codec(
                    "int8", schema="pg_catalog", encoder=str, decoder=lambda text: -int(text)
                )
            job = await utils.add_job("task", {"a": 1})
            assert job.id > 0
            assert await utils.get_job(id=job.id) is not None

    async def test_a_role_that_the_callers_pool_sets_itself_is_kept(
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
            async with utils.lend_connection() as connection:
                first = connection.get_server_pid()
            async with utils.lend_connection() as connection:
                assert connection.get_server_pid() == first
                assert await connection.fetchval("select current_user") == role
                await connection.execute(f"reset role; set role {other}")
            async with utils.lend_connection() as connection:
                assert connection.get_server_pid() != first, "it was closed"
                assert await connection.fetchval("select current_user") == role
        await db.execute(f"drop role {other}")
