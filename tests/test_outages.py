"""A worker survives any loss of its connections, and loses no job."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING

import asyncpg
import pytest
from asyncpg.pool import PoolConnectionProxy

from graphile_worker import DatabaseError, JobSpec, RunSummary, WorkerUtils, run_once
from graphile_worker._db.connection.error_mapping import server_is_down
from graphile_worker._worker.loop import Worker
from graphile_worker.embedded import EmbeddedPostgres
from graphile_worker.testing import Databases
from support.jobs import add, count
from support.postgres import restart
from support.proxy import Proxy, proxied
from support.waiting import until
from support.workers import EventRecorder, Gate, locked, nothing, running

if TYPE_CHECKING:
    from pathlib import Path

    from graphile_worker._db.queries.exchange import Answer

CUT_POINTS = ("the query is lost", "the reply is lost", "half the reply is lost", "after the query")


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


class Cutter:
    """Cuts the connection of one worker at one point of some of its exchanges."""

    def __init__(self, proxy: Proxy, cut_point: str, generator: random.Random, probability: float) -> None:
        self._cut_point = cut_point
        self._random = generator
        self._probability = probability
        self._query_chosen = False
        self.worker_id = b"\xff"
        self.cuts = 0
        proxy.cut_when = self.decide

    def decide(self, direction: str, data: bytes) -> bool | str:
        if direction == "query" and self.worker_id in data and b"graphile-worker:" not in data:
            # Only the exchange, and the query that reads back its effects, contain the worker id.
            # If another query follows before the reply, the first one is still cut.
            self._query_chosen = self._random.random() < self._probability or self._query_chosen
            if self._query_chosen and self._cut_point == "the query is lost":
                return self._cut()
            if self._query_chosen and self._cut_point == "after the query":
                self._cut()
                return "after"
        elif direction == "reply" and self._query_chosen and self._cut_point.endswith("reply is lost"):
            return self._cut() if self._cut_point == "the reply is lost" or len(data) > 1 else False
        return False

    def _cut(self) -> bool:
        self._query_chosen = False
        self.cuts += 1
        return True


@pytest.mark.sample(2)
@pytest.mark.parametrize("cut_point", CUT_POINTS)
@pytest.mark.parametrize("prefetch", [0, 20])
async def test_interrupted_exchange_loses_no_job_and_repeats_none(
    db: asyncpg.Connection, database: str, cut_point: str, prefetch: int
) -> None:
    ran: list[int] = []
    recorder = EventRecorder()

    async def task(n: int) -> None:
        ran.append(n)
        if n % 7 == 0:
            raise ValueError("some fail")

    async with WorkerUtils(database) as utils:
        await utils.add_jobs(
            JobSpec("task", n, queue_name=[None, "a", "b"][n % 3], max_attempts=1) for n in range(60)
        )
    async with (
        proxied(database) as (proxy, dsn),
        running(
            {"task": task}, dsn, recorder=recorder, concurrency=4, prefetch=prefetch, migrate=False,
            listen=False, poll_interval=0.05,
        ) as runner,
    ):  # fmt: skip
        cutter = Cutter(proxy, cut_point, random.Random(1), 0.2)
        cutter.worker_id = runner.id.encode()
        await recorder.until("job:complete", 60)
        proxy.cut_when = lambda _direction, _data: False
    # With prefetch there are few exchanges. Their number depends on their speed, and the first is cut.
    assert cutter.cuts > (0 if prefetch else 1)
    assert sorted(ran) == list(range(60)), "each job must run once"
    assert recorder.counts["job:lost"] == 0
    assert recorder.counts["job:complete"] == 60
    assert await locked(db) == []
    assert await count(db) == 9


@pytest.mark.sample(1)
@pytest.mark.parametrize("cut_point", CUT_POINTS)
async def test_interrupted_exchange_sent_ahead_loses_no_job_and_repeats_none(
    db: asyncpg.Connection, database: str, cut_point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    recorder, sent_ahead = EventRecorder(), 0
    send_ahead = Worker._send_ahead

    async def count_calls(self: Worker, answer: Answer) -> None:
        nonlocal sent_ahead
        sent_ahead += 1
        await send_ahead(self, answer)

    async def task(n: int) -> None:
        ran.append(n)

    monkeypatch.setattr(Worker, "_send_ahead", count_calls)
    async with WorkerUtils(database) as utils:
        await utils.add_jobs(JobSpec("task", n) for n in range(2000))
    async with (
        proxied(database) as (proxy, dsn),
        running(
            {"task": task}, dsn, recorder=recorder, concurrency=4, prefetch=50, migrate=False, listen=False,
            poll_interval=0.05,
        ) as runner,
    ):  # fmt: skip
        cutter = Cutter(proxy, cut_point, random.Random(1), 0.1)
        cutter.worker_id = runner.id.encode()
        await recorder.until("job:complete", 2000)
        proxy.cut_when = lambda _direction, _data: False
    assert cutter.cuts > 1
    assert sent_ahead > 10
    assert sorted(ran) == list(range(2000)), "each job must run once"
    assert recorder.counts["job:lost"] == 0
    assert await locked(db) == []
    assert await count(db) == 0


@pytest.mark.slow
async def test_repeatedly_terminated_sessions_lose_no_job(db: asyncpg.Connection, database: str) -> None:
    ran: list[int] = []
    recorder = EventRecorder()

    async def task(n: int) -> None:
        await asyncio.sleep(0.001)
        ran.append(n)

    async with WorkerUtils(database) as utils:
        await utils.add_jobs(JobSpec("task", n, queue_name=[None, "q"][n % 2]) for n in range(200))
    async with running({"task": task}, database, recorder=recorder, concurrency=8, poll_interval=0.05):
        while recorder.counts["job:complete"] < 200:
            await db.execute(
                """select pg_terminate_backend(pid) from pg_stat_activity
                where application_name = 'graphile-worker' and datname = current_database()
                order by random() limit 1"""
            )
            await asyncio.sleep(0.1)
    assert sorted(ran) == list(range(200))
    assert await locked(db) == []


async def test_jobs_continue_and_results_are_kept_during_an_outage(
    db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    recorder, gate = EventRecorder(), Gate()
    async with (
        proxied(database) as (proxy, dsn),
        running({"task": gate}, dsn, recorder=recorder, concurrency=5) as runner,
    ):
        await runner.utils.add_jobs(JobSpec("task", n, queue_name=f"q{n}") for n in range(5))
        await gate.until_started(5)
        proxy.refusing = True
        proxy.cut_all()
        await recorder.until("pool:listen:error")
        gate.open()
        await recorder.until("job:success", 5)

        async def is_logged() -> bool:
            return any("database is unavailable" in record.message for record in caplog.records)

        await until(is_logged, "the worker logs the outage")
        assert recorder.counts["job:complete"] == 0
        proxy.refusing = False
        await recorder.until("job:complete", 5)
        await recorder.until("pool:listen:success", 2)
        assert await count(db) == 0
        await runner.add_job("task", 6)
        await recorder.until("job:complete", 6)
    about = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("database is unavailable" in message for message in about) == 1, (
        "the outage must be logged once"
    )
    assert any("is back after" in record.message for record in caplog.records)
    assert recorder.counts["job:lost"] == 0


async def test_each_failed_claim_during_an_outage_is_an_event(database: str) -> None:
    recorder = EventRecorder()
    async with (
        proxied(database) as (proxy, dsn),
        running({"task": nothing}, dsn, recorder=recorder) as runner,
    ):
        await recorder.until("worker:getJob:empty")
        proxy.refusing = True
        proxy.cut_all()
        failed = await recorder.until("worker:getJob:error", 4)
        assert isinstance(failed.error, DatabaseError)
        assert (failed.worker.number, failed.worker.worker_id) == (1, runner.id)
        first, second = (
            await recorder.until("pool:listen:error"),
            await recorder.until("pool:listen:error", 2),
        )
        assert isinstance(first.client, asyncpg.Connection | PoolConnectionProxy)
        assert second.client is None, "the listener could not connect"
        proxy.refusing = False
        await recorder.until("worker:getJob:empty", recorder.counts["worker:getJob:empty"] + 1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_worker_survives_a_restart_of_the_server(short_folder: Path, mode: str) -> None:
    ran: list[int] = []
    recorder = EventRecorder()

    async def task(n: int) -> None:
        await asyncio.sleep(0.002)
        ran.append(n)

    with EmbeddedPostgres(short_folder, remove=True) as server:
        dsn = server.dsn()
        async with WorkerUtils(dsn) as utils:
            await utils.migrate()
            await utils.add_jobs(JobSpec("task", n, queue_name=[None, "q"][n % 2]) for n in range(300))
        async with running({"task": task}, dsn, recorder=recorder, concurrency=5, poll_interval=0.1):
            await recorder.until("job:complete", 20)
            await asyncio.to_thread(restart, server, mode)
            await recorder.until("job:complete", 300)
        async with WorkerUtils(dsn) as utils:
            assert (await utils.stats()).total == 0
    assert sorted(set(ran)) == list(range(300))


async def test_run_once_survives_lost_connections(database: str) -> None:
    async with WorkerUtils(database) as utils:
        await utils.add_jobs(JobSpec("task", n) for n in range(50))
    async with proxied(database) as (proxy, dsn):
        cuts = 0

        async def task(n: int) -> None:
            nonlocal cuts
            if n in {10, 30}:
                cuts += 1
                proxy.cut_all()

        drained = await run_once({"task": task}, dsn, handle_signals=False, concurrency=3)
    assert drained == RunSummary(50, 0)
    assert cuts == 2


async def test_worker_waits_while_its_role_is_at_the_connection_limit(
    db: asyncpg.Connection, database: str
) -> None:
    await db.execute("create role gw_limited login connection limit 3")
    await db.execute("alter schema graphile_worker owner to gw_limited")
    for kind, name in await db.fetch(
        """select case relkind when 'r' then 'table' when 'v' then 'view' end as kind, relname
        from pg_class where relnamespace = 'graphile_worker'::regnamespace and relkind in ('r', 'v')"""
    ):
        await db.execute(f"alter {kind} graphile_worker.{name} owner to gw_limited")
    dsn = database.replace("postgres@", "gw_limited@")
    recorder = EventRecorder()
    async with running({"task": nothing}, dsn, recorder=recorder, migrate=False, poll_interval=0.1):
        await recorder.until("worker:getJob:empty")
        await db.execute("alter role gw_limited connection limit 0")
        await db.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where usename = 'gw_limited'"
        )
        await recorder.until("pool:listen:error", 3)
        await add(db)
        await db.execute("alter role gw_limited connection limit 5")
        await recorder.until("job:complete")
    await db.execute("reassign owned by gw_limited to postgres")
    await db.execute("drop role gw_limited")


async def test_renewal_with_a_lost_reply_is_read_back(
    db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from graphile_worker._worker import loop  # noqa: PLC0415

    recorder, gate = EventRecorder(), Gate()
    async with running({"task": gate}, database, recorder=recorder) as runner:
        job = await runner.add_job("task", queue_name="q")
        await gate.until_started()
        # Imitate a renewal whose reply was lost.
        for table in ("jobs", "job_queues"):
            await db.execute(f"update graphile_worker._private_{table} set locked_at = now()")
        await db.execute(
            """select pg_terminate_backend(pid) from pg_stat_activity
            where query like '%_private_python_exchange%' and pid <> pg_backend_pid()"""
        )
        monkeypatch.setattr(loop, "_MAINTENANCE_INTERVAL", 0.0)
        gate.open()
        await recorder.until("job:complete")
    assert recorder.counts["job:lost"] == 0
    assert job.id
    assert await locked(db) == []


async def test_locks_of_long_jobs_are_renewed(
    db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without renewal, a job of more than four hours would run twice, as it does in Node."""
    from graphile_worker._worker import loop  # noqa: PLC0415
    from graphile_worker._worker.claiming import exchange_client  # noqa: PLC0415

    monkeypatch.setattr(loop, "_MAINTENANCE_INTERVAL", 0.02)
    monkeypatch.setattr(exchange_client, "_RENEW_AFTER", 0.02)
    recorder, gate = EventRecorder(), Gate()
    locks = """select job.locked_at, queue.locked_at from graphile_worker._private_jobs as job
        join graphile_worker._private_job_queues as queue on queue.id = job.job_queue_id"""
    async with running({"task": gate}, database, recorder=recorder) as runner:
        await runner.add_job("task", queue_name="q")
        await gate.until_started()
        before = await db.fetchrow(locks)
        assert before is not None

        async def renewed() -> bool:
            now = await db.fetchrow(locks)
            return now is not None and now[0] > before[0] and now[1] > before[1]

        await until(renewed, "the locks of job and queue are renewed")
        gate.open()
        await recorder.until("job:complete")
    assert recorder.counts["job:lost"] == 0
    assert await locked(db) == []


async def test_locked_queue_without_a_job_is_released_after_a_reconnect(
    db: asyncpg.Connection, database: str
) -> None:
    recorder = EventRecorder()
    async with running({"task": nothing}, database, recorder=recorder, poll_interval=0.05) as runner:
        await runner.add_job("task", queue_name="q")
        await recorder.until("job:complete")
        await db.execute(
            "update graphile_worker._private_job_queues set locked_by = $1, locked_at = now()", runner.id
        )
        await db.execute(
            """select pg_terminate_backend(pid) from pg_stat_activity
            where application_name = 'graphile-worker' and datname = current_database()"""
        )

        async def free() -> bool:
            return not await locked(db)

        await until(free, "the queue is released")


@pytest.mark.parametrize(
    ("error", "direct", "by_proxy"),
    [
        (asyncpg.CannotConnectNowError("the database system is starting up"), True, True),
        (asyncpg.CannotConnectNowError("the database system is in recovery mode"), True, True),
        # Existing sessions may continue for hours, and other workers notice the missing heartbeats.
        (asyncpg.CannotConnectNowError("the database system is shutting down"), False, False),
        (asyncpg.CannotConnectNowError("das Datenbanksystem startet"), False, False),
        (ConnectionRefusedError(111, "refused"), True, False),
        (FileNotFoundError(2, "no socket"), True, False),
        (OSError("Multiple exceptions: [Errno 111] refused, [Errno 111] refused"), True, False),
        (OSError("Multiple exceptions: [Errno 111] refused, [Errno 110] timed out"), False, False),
        (TimeoutError(), False, False),
        (asyncpg.TooManyConnectionsError("sorry, too many clients already"), False, False),
    ],
)
def test_only_some_errors_prove_that_the_server_is_down(
    error: Exception, direct: bool, by_proxy: bool
) -> None:
    assert server_is_down(error, is_direct=True) is direct
    assert server_is_down(error, is_direct=False) is by_proxy
