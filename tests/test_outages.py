"""Whatever happens to the connections, a worker goes on by itself and loses nothing."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING

import asyncpg
import pytest
from asyncpg.pool import PoolConnectionProxy

from graphile_worker import DatabaseError, Drained, JobSpec, WorkerUtils, run_once
from graphile_worker._db.failures import server_is_down
from graphile_worker._runtime.worker import Worker
from graphile_worker.embedded import EmbeddedPostgres
from graphile_worker.testing import Databases
from support.jobs import add, count
from support.postgres import restart
from support.proxy import Proxy, proxied
from support.waiting import until
from support.workers import Gate, Heard, locked, nothing, running

if TYPE_CHECKING:
    from pathlib import Path

    from graphile_worker._db.exchange import Answer

WHERE = ("the question is lost", "the answer is lost", "half the answer is lost", "after the question")


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


class Cutter:
    """Cuts exchanges of one worker in one place, some of them."""

    def __init__(self, proxy: Proxy, where: str, chance: random.Random, often: float) -> None:
        self._where = where
        self._chance = chance
        self._often = often
        self._asked = False
        self.worker_id = b"\xff"
        self.cuts = 0
        proxy.cut_when = self.decide

    def decide(self, direction: str, data: bytes) -> bool | str:
        if direction == "query" and self.worker_id in data and b"graphile-worker:" not in data:
            # Only the exchange, and what reads back what it did, name the worker.
            # A question between another and its answer does not save that one.
            self._asked = self._chance.random() < self._often or self._asked
            if self._asked and self._where == "the question is lost":
                return self._cut()
            if self._asked and self._where == "after the question":
                self._cut()
                return "after"
        elif direction == "reply" and self._asked and self._where.endswith("answer is lost"):
            return self._cut() if self._where == "the answer is lost" or len(data) > 1 else False
        return False

    def _cut(self) -> bool:
        self._asked = False
        self.cuts += 1
        return True


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("prefetch", [0, 20])
async def test_an_exchange_that_is_cut_anywhere_strands_nothing_and_repeats_nothing(
    db: asyncpg.Connection, database: str, where: str, prefetch: int
) -> None:
    ran: list[int] = []
    heard = Heard()

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
            {"task": task}, dsn, heard=heard, concurrency=4, prefetch=prefetch, migrate=False, listen=False,
            poll_interval=0.05,
        ) as runner,
    ):  # fmt: skip
        cutter = Cutter(proxy, where, random.Random(1), 0.2)
        cutter.worker_id = runner.id.encode()
        await heard.until("job:complete", 60)
        proxy.cut_when = lambda _direction, _data: False
    # With prefetch there are few exchanges, and how many depends on how fast they are; the first is cut.
    assert cutter.cuts > (0 if prefetch else 1)
    assert sorted(ran) == list(range(60)), "each once"
    assert heard.counts["job:lost"] == 0
    assert heard.counts["job:complete"] == 60
    assert await locked(db) == []
    assert await count(db) == 9


@pytest.mark.parametrize("where", WHERE)
async def test_nor_does_one_that_was_sent_before_the_last_answer_was_read(
    db: asyncpg.Connection, database: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    heard, sent_ahead = Heard(), 0
    send_ahead = Worker._send_ahead

    async def counted(self: Worker, answer: Answer) -> None:
        nonlocal sent_ahead
        sent_ahead += 1
        await send_ahead(self, answer)

    async def task(n: int) -> None:
        ran.append(n)

    monkeypatch.setattr(Worker, "_send_ahead", counted)
    async with WorkerUtils(database) as utils:
        await utils.add_jobs(JobSpec("task", n, max_attempts=1) for n in range(2000))
    async with (
        proxied(database) as (proxy, dsn),
        running(
            {"task": task}, dsn, heard=heard, concurrency=4, prefetch=50, migrate=False, listen=False,
            poll_interval=0.05,
        ) as runner,
    ):  # fmt: skip
        cutter = Cutter(proxy, where, random.Random(1), 0.1)
        cutter.worker_id = runner.id.encode()
        await heard.until("job:complete", 2000)
        proxy.cut_when = lambda _direction, _data: False
    assert cutter.cuts > 1
    assert sent_ahead > 10
    assert sorted(ran) == list(range(2000)), "each once"
    assert heard.counts["job:lost"] == 0
    assert await locked(db) == []
    assert await count(db) == 0


async def test_sessions_that_are_killed_again_and_again_lose_nothing(
    db: asyncpg.Connection, database: str
) -> None:
    ran: list[int] = []
    heard = Heard()

    async def task(n: int) -> None:
        await asyncio.sleep(0.001)
        ran.append(n)

    async with WorkerUtils(database) as utils:
        await utils.add_jobs(JobSpec("task", n, queue_name=[None, "q"][n % 2]) for n in range(200))
    async with running({"task": task}, database, heard=heard, concurrency=8, poll_interval=0.05):
        while heard.counts["job:complete"] < 200:
            await db.execute(
                """select pg_terminate_backend(pid) from pg_stat_activity
                where application_name = 'graphile-worker' and datname = current_database()
                order by random() limit 1"""
            )
            await asyncio.sleep(0.1)
    assert sorted(ran) == list(range(200))
    assert await locked(db) == []


async def test_while_the_database_is_away_jobs_go_on_and_their_results_are_kept(
    db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    heard, gate = Heard(), Gate()
    async with (
        proxied(database) as (proxy, dsn),
        running({"task": gate}, dsn, heard=heard, concurrency=5) as runner,
    ):
        await runner.utils.add_jobs(JobSpec("task", n, queue_name=f"q{n}") for n in range(5))
        await gate.until_begun(5)
        proxy.refusing = True
        proxy.cut_all()
        await heard.until("pool:listen:error")
        gate.open()
        await heard.until("job:success", 5)

        async def complained() -> bool:
            return any("cannot be used" in record.message for record in caplog.records)

        await until(complained, "the worker says so")
        assert heard.counts["job:complete"] == 0
        proxy.refusing = False
        await heard.until("job:complete", 5)
        await heard.until("pool:listen:success", 2)
        assert await count(db) == 0
        await runner.add_job("task", 6)
        await heard.until("job:complete", 6)
    about = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("cannot be used" in message for message in about) == 1, "once"
    assert any("is back after" in record.message for record in caplog.records)
    assert heard.counts["job:lost"] == 0


async def test_each_failed_try_to_claim_is_an_event_while_the_database_is_away(database: str) -> None:
    heard = Heard()
    async with proxied(database) as (proxy, dsn), running({"task": nothing}, dsn, heard=heard) as runner:
        await heard.until("worker:getJob:empty")
        proxy.refusing = True
        proxy.cut_all()
        failed = await heard.until("worker:getJob:error", 4)
        assert isinstance(failed.error, DatabaseError)
        assert (failed.worker.number, failed.worker.worker_id) == (1, runner.id)
        first, second = await heard.until("pool:listen:error"), await heard.until("pool:listen:error", 2)
        assert isinstance(first.client, asyncpg.Connection | PoolConnectionProxy)
        assert second.client is None, "it could not connect"
        proxy.refusing = False
        await heard.until("worker:getJob:empty", heard.counts["worker:getJob:empty"] + 1)


@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_a_restart_of_the_server_is_weather(short_folder: Path, mode: str) -> None:
    ran: list[int] = []
    heard = Heard()

    async def task(n: int) -> None:
        await asyncio.sleep(0.002)
        ran.append(n)

    with EmbeddedPostgres(short_folder, remove=True) as server:
        dsn = server.dsn()
        async with WorkerUtils(dsn) as utils:
            await utils.migrate()
            await utils.add_jobs(JobSpec("task", n, queue_name=[None, "q"][n % 2]) for n in range(300))
        async with running({"task": task}, dsn, heard=heard, concurrency=5, poll_interval=0.1):
            await heard.until("job:complete", 20)
            await asyncio.to_thread(restart, server, mode)
            await heard.until("job:complete", 300)
        async with WorkerUtils(dsn) as utils:
            assert (await utils.stats()).total == 0
    assert sorted(set(ran)) == list(range(300))


async def test_run_once_survives_a_cut_too(database: str) -> None:
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
    assert drained == Drained(50, 0)
    assert cuts == 2


async def test_a_role_at_its_limit_of_connections_waits_for_its_turn(
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
    heard = Heard()
    async with running({"task": nothing}, dsn, heard=heard, migrate=False, poll_interval=0.1):
        await heard.until("worker:getJob:empty")
        await db.execute("alter role gw_limited connection limit 0")
        await db.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where usename = 'gw_limited'"
        )
        await heard.until("pool:listen:error", 3)
        await add(db)
        await db.execute("alter role gw_limited connection limit 5")
        await heard.until("job:complete")
    await db.execute("reassign owned by gw_limited to postgres")
    await db.execute("drop role gw_limited")


async def test_a_lost_result_of_a_renewal_is_read_back(
    db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from graphile_worker._runtime import worker  # noqa: PLC0415

    heard, gate = Heard(), Gate()
    async with running({"task": gate}, database, heard=heard) as runner:
        job = await runner.add_job("task", queue_name="q")
        await gate.until_begun()
        # As if it had been renewed by a call of which no answer came.
        for table in ("jobs", "job_queues"):
            await db.execute(f"update graphile_worker._private_{table} set locked_at = now()")
        await db.execute(
            """select pg_terminate_backend(pid) from pg_stat_activity
            where query like '%_private_python_exchange%' and pid <> pg_backend_pid()"""
        )
        monkeypatch.setattr(worker, "_HOUSEKEEPING", 0.0)
        gate.open()
        await heard.until("job:complete")
    assert heard.counts["job:lost"] == 0
    assert job.id
    assert await locked(db) == []


async def test_what_is_held_for_long_is_renewed_before_anybody_takes_it(
    db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphile Worker runs a job of more than four hours twice."""
    from graphile_worker._runtime import exchanger, worker  # noqa: PLC0415

    monkeypatch.setattr(worker, "_HOUSEKEEPING", 0.02)
    monkeypatch.setattr(exchanger, "_RENEW_AFTER", 0.02)
    heard, gate = Heard(), Gate()
    locks = """select job.locked_at, queue.locked_at from graphile_worker._private_jobs as job
        join graphile_worker._private_job_queues as queue on queue.id = job.job_queue_id"""
    async with running({"task": gate}, database, heard=heard) as runner:
        await runner.add_job("task", queue_name="q")
        await gate.until_begun()
        before = await db.fetchrow(locks)
        assert before is not None

        async def renewed() -> bool:
            now = await db.fetchrow(locks)
            return now is not None and now[0] > before[0] and now[1] > before[1]

        await until(renewed, "job and queue are locked anew")
        gate.open()
        await heard.until("job:complete")
    assert heard.counts["job:lost"] == 0
    assert await locked(db) == []


async def test_a_queue_of_ours_without_a_job_is_let_go_after_a_reconnect(
    db: asyncpg.Connection, database: str
) -> None:
    heard = Heard()
    async with running({"task": nothing}, database, heard=heard, poll_interval=0.05) as runner:
        await runner.add_job("task", queue_name="q")
        await heard.until("job:complete")
        await db.execute(
            "update graphile_worker._private_job_queues set locked_by = $1, locked_at = now()", runner.id
        )
        await db.execute(
            """select pg_terminate_backend(pid) from pg_stat_activity
            where application_name = 'graphile-worker' and datname = current_database()"""
        )

        async def free() -> bool:
            return not await locked(db)

        await until(free, "the queue is free")


@pytest.mark.parametrize(
    ("error", "direct", "by_proxy"),
    [
        (asyncpg.CannotConnectNowError("the database system is starting up"), True, True),
        (asyncpg.CannotConnectNowError("the database system is in recovery mode"), True, True),
        # Then sessions that are there may go on for hours, and others see that ours are not.
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
