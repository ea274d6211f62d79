"""Bugs that the worker once had."""

from __future__ import annotations

import asyncio
import functools
import threading
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import asyncpg
import pytest

from graphile_worker import (
    ConfigurationError,
    JobContext,
    JobSpec,
    RunSummary,
    SchemaMissingError,
    ShutdownError,
    WorkerUtils,
    run,
    run_once,
)
from graphile_worker._db.queries.exchange import ClaimedJob, ExchangeReply, Result
from graphile_worker._worker import lifecycle
from graphile_worker._worker.execution.results import Results
from graphile_worker._worker.maintenance import notifier
from graphile_worker.outcome import Completed, Returned
from graphile_worker.testing import Databases
from support.jobs import add, count, existing, get
from support.proxy import proxied
from support.waiting import until
from support.workers import EventRecorder, Gate, drop_schema, locked, nothing, running

once = functools.partial(run_once, handle_signals=False)


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


async def kill_sessions(db: asyncpg.Connection) -> None:
    await db.execute(
        """select pg_terminate_backend(pid) from pg_stat_activity
        where datname = current_database() and pid <> pg_backend_pid()"""
    )


class TestCallersPool:
    async def test_killed_idle_connections_of_the_callers_pool_are_replaced(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        recorder = EventRecorder()
        async with (
            asyncpg.create_pool(database, min_size=0, max_size=4) as pool,
            running({"task": nothing}, None, pool=pool, recorder=recorder, poll_interval=0.1),
        ):
            await recorder.until("worker:getJob:empty")
            await kill_sessions(db)
            await recorder.until("pool:listen:success", 2)
            await add(db)
            await recorder.until("job:complete")

    async def test_closing_the_callers_pool_ends_the_worker_with_a_clear_error(self, database: str) -> None:
        pool = await asyncpg.create_pool(database, min_size=0, max_size=4)
        runner = await run({"task": nothing}, pool=pool, handle_signals=False, poll_interval=0.05)
        pool.terminate()
        with pytest.raises(ConfigurationError, match="closed while the worker"):
            await runner.wait()
        await runner.stop()

    async def test_command_timeout_of_the_callers_pool_does_not_abort_an_exchange(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        recorder = EventRecorder()
        async with (
            asyncpg.create_pool(database, min_size=0, max_size=4, command_timeout=3) as pool,
            running({"task": nothing}, None, pool=pool, recorder=recorder, poll_interval=0.05, migrate=False),
        ):
            await add(db)
            await recorder.until("job:complete")
            async with db.transaction():
                await db.execute("lock table graphile_worker._private_jobs")
                waits = "select true from pg_locks where relation = $1::regclass and not granted"
                await until(lambda: db.fetchval(waits, "graphile_worker._private_jobs"), "an exchange waits")
                await db.execute("select pg_sleep(3.5)")  # Longer than command_timeout.
            await add(db)
            await recorder.until("job:complete", 2)
        assert recorder.counts["worker:getJob:error"] == 0


async def test_permanently_failing_exchange_at_startup_raises_instead_of_hanging(
    db: asyncpg.Connection, database: str
) -> None:
    await db.execute("drop function graphile_worker._private_python_exchange_v4")
    async with asyncio.timeout(15):
        with pytest.raises(SchemaMissingError):
            await run({"task": nothing}, database, migrate=False, handle_signals=False)


class TestBehindALockedRow:
    @pytest.fixture
    async def first(self, db: asyncpg.Connection, database: str) -> Any:
        """A job that is first in order, and whose row another transaction has locked."""
        job = await add(db, "task", payload="first", queue_name="q0")
        other = await asyncpg.connect(database)
        await other.execute("begin")
        await other.execute("select from graphile_worker._private_jobs for update")
        yield job
        await other.execute("rollback")
        await other.close()

    @pytest.mark.sample(2)
    @pytest.mark.parametrize(
        "arguments",
        [
            {"identifier": "task"},
            {"identifier": "task", "queue_name": "q1"},
            {"identifier": "task", "queue_name": "q0"},
            {"identifier": "other"},
            {"identifier": "other", "queue_name": "q1"},
        ],
    )
    @pytest.mark.usefixtures("first")
    async def test_jobs_behind_a_locked_row_run(
        self, db: asyncpg.Connection, database: str, arguments: dict[str, Any]
    ) -> None:
        recorder = EventRecorder()
        async with running(
            {"task": nothing, "other": nothing}, database, recorder=recorder, poll_interval=0.05
        ):
            await add(db, payload="second", **arguments)
            done = await recorder.until("job:complete")
            assert done.job.payload == "second"


async def test_jobs_waiting_for_their_queue_do_not_keep_slots_idle(database: str) -> None:
    recorder, gate = EventRecorder(), Gate()
    async with running(
        {"slow": gate, "task": nothing}, database, recorder=recorder, concurrency=10, prefetch=10
    ) as runner:
        await runner.utils.add_jobs(JobSpec("slow", queue_name=f"q{n % 2}") for n in range(40))
        await gate.until_started(2)
        await runner.utils.add_jobs(JobSpec("task") for _ in range(5))
        await recorder.until("job:complete", 5)
        gate.open()


async def test_run_once_ends_with_more_queues_than_one_claim_visits(
    db: asyncpg.Connection, database: str
) -> None:
    async with WorkerUtils(database) as utils:
        later = timedelta(hours=1)
        await utils.add_jobs(JobSpec("task", queue_name=f"later {n}", run_at=later) for n in range(1100))
        await utils.add_jobs(JobSpec("task", queue_name="locked") for _ in range(60))
        due = await utils.add_job("task", queue_name="last")
    await db.execute(
        """update graphile_worker._private_job_queues set locked_by = 'x', locked_at = now()
        where queue_name = 'locked'"""
    )
    async with asyncio.timeout(15):
        assert await once({"task": nothing}, database) == RunSummary(1, 0)
    assert await get(db, due.id) is None


async def test_error_text_outside_the_database_encoding_is_recorded(
    graphile_worker_server: str,
) -> None:
    admin = await asyncpg.connect(graphile_worker_server)
    await admin.execute(
        "create database gw_latin encoding 'LATIN1' lc_collate 'C' lc_ctype 'C' template template0"
    )
    dsn = graphile_worker_server.replace("/postgres?", "/gw_latin?")

    def task(_payload: Any) -> None:
        raise ValueError("café ☃")

    try:
        async with WorkerUtils(dsn) as utils:
            await utils.migrate()
            await utils.add_job("task")
            assert await once({"task": task}, dsn) == RunSummary(0, 1)
            [job] = await utils.list_jobs()
            assert job.last_error == "caf\\xe9 \\u2603"
    finally:
        await admin.execute("drop database gw_latin with (force)")
        await admin.close()


async def test_job_unlocked_and_claimed_again_by_the_same_worker_is_two_runs(
    db: asyncpg.Connection, database: str
) -> None:
    recorder, gate = EventRecorder(), Gate()
    async with running(
        {"task": gate}, database, recorder=recorder, concurrency=2, prefetch=1, poll_interval=0.05
    ) as runner:
        await runner.add_job("task", queue_name="q")
        await gate.until_started()
        await runner.utils.force_unlock_workers([runner.id])
        await until(lambda: is_locked(db), "the job is claimed again")
        gate.open()
        await recorder.until("job:lost")
        await recorder.until("job:complete")
        await runner.add_job("task", queue_name="q")
        await recorder.until("job:complete", 2)
    assert await locked(db) == []
    assert await count(db) == 0


async def is_locked(db: asyncpg.Connection) -> bool:
    return bool(await db.fetchval("select count(locked_at) = 1 from graphile_worker._private_jobs"))


async def test_job_interrupted_before_its_first_step_is_released(
    db: asyncpg.Connection, database: str
) -> None:
    recorder = EventRecorder()
    runner = await run({"task": nothing}, database, events=recorder.events, handle_signals=False)

    @recorder.events.on("job:start")
    def start(_event: object) -> None:
        # The worker creates the asyncio task right after this event, and cancels it before its first step.
        asyncio.get_running_loop().call_soon(runner._worker.interrupt)
        runner._worker.begin_stop()

    job = await runner.add_job("task")
    await recorder.until("job:interrupted")
    async with asyncio.timeout(15):
        await runner.stop()
    row = await existing(db, job.id)
    assert (row["attempts"], row["locked_at"]) == (0, None)


async def test_failing_forbidden_flags_function_does_not_lose_results_of_run_once(
    db: asyncpg.Connection, database: str
) -> None:
    calls = 0

    def flags() -> list[str]:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise ValueError("gone")
        return []

    job = await add(db, queue_name="q")
    with pytest.raises(ConfigurationError, match="gone"):
        await once({"task": nothing}, database, forbidden_flags=flags)
    assert await get(db, job["id"]) is None
    assert await locked(db) == []


async def test_cancelled_forbidden_flags_function_counts_as_failed(database: str) -> None:
    recorder, cancel = EventRecorder(), True

    async def flags() -> list[str]:
        if cancel:
            raise asyncio.CancelledError
        return []

    async with running(
        {"task": nothing}, database, recorder=recorder, forbidden_flags=flags, poll_interval=0.05
    ) as runner:
        await runner.add_job("task")
        cancel = False
        await recorder.until("job:complete")


@pytest.mark.slow
async def test_run_once_claims_nothing_after_an_empty_claim(db: asyncpg.Connection, database: str) -> None:
    """The next job may become due at that very moment."""
    for n in range(30):
        await add(db, run_at=datetime.now(UTC) + timedelta(milliseconds=10 + n))
        await once({"task": nothing}, database, migrate=False)
        assert await locked(db) == []


async def test_thread_that_ends_long_after_the_interruption_is_recorded(
    db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "GIVE_UP_AFTER", 0.3)
    recorder, release = EventRecorder(), threading.Event()
    runner = await run(
        {"task": lambda _: release.wait(20)}, database, events=recorder.events, handle_signals=False
    )
    await runner.add_job("task")
    await recorder.until("job:start")
    stopping = asyncio.create_task(runner.stop(grace=0))
    await asyncio.sleep(0.6)
    monkeypatch.setattr(lifecycle, "GIVE_UP_AFTER", 20.0)  # Recording may take longer.
    release.set()
    await stopping
    assert await count(db) == 0


async def test_shutdown_error_after_a_fatal_error_names_the_claimed_jobs(
    db: asyncpg.Connection, database: str
) -> None:
    gate = Gate()
    runner = await run({"task": gate}, database, handle_signals=False, poll_interval=0.05, concurrency=2)
    job = await runner.add_job("task")
    await gate.until_started()
    await drop_schema(db)
    with pytest.raises(SchemaMissingError):
        await runner.wait()
    with pytest.raises(ShutdownError) as raised:
        await runner.stop()
    assert raised.value.jobs == (job.id,)


async def test_jobs_of_a_queue_with_several_tasks_keep_their_order(
    db: asyncpg.Connection, database: str
) -> None:
    for _ in range(200):
        await add(db, "a", queue_name="locked")
    await db.execute("update graphile_worker._private_job_queues set locked_by = 'x', locked_at = now()")
    await add(db, "a", payload="first", queue_name="q")
    await add(db, "b", payload="second", queue_name="q")
    ran: list[str] = []
    await once({"a": ran.append, "b": ran.append}, database)
    assert ran == ["first", "second"]


async def test_prefetch_over_several_priorities_claims_as_many_jobs_as_it_may(
    db: asyncpg.Connection, database: str
) -> None:
    recorder, gate = EventRecorder(), Gate()
    for n in range(25):
        await add(db, queue_name=f"q{n % 3}", priority=n % 5)
    async with running({"task": gate}, database, recorder=recorder, prefetch=10):
        await gate.until_started()
        held = "select count(locked_at) from graphile_worker._private_jobs"
        assert await db.fetchval(held) == 11
        gate.open()
        await recorder.until("job:complete", 25)


async def test_superseded_job_found_by_reconciling_is_not_made_ready(database: str) -> None:
    from graphile_worker._db.queries import exchange  # noqa: PLC0415
    from graphile_worker._db.sql_files import Schema  # noqa: PLC0415

    connection = await asyncpg.connect(database)
    tasks = await exchange.register_tasks(connection, Schema(), ["task"])
    for key in ("k", None):
        await add(connection, job_key=key, max_attempts=1)
    await exchange.exchange(connection, Schema(), "w", [], exchange.ClaimRequest(wanted=2), tasks)
    await connection.execute("select graphile_worker.remove_job('k')")
    found = await exchange.read_locked(connection, Schema(), "w", tasks)
    results = [exchange.Result(held, Returned(), None) for held in found.jobs]
    await exchange.exchange(connection, Schema(), "w", results, exchange.NOTHING, tasks)
    rows = await connection.fetch(
        "select attempts, is_available from graphile_worker._private_jobs order by id"
    )
    assert [tuple(row) for row in rows] == [(1, False), (0, True)]
    await connection.close()


async def test_listening_connection_that_closes_early_does_not_disable_listening(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "_SILENT_INTERVAL", 3600)
    recorder = EventRecorder()
    async with proxied(database) as (proxy, dsn):

        @recorder.events.on("pool:listen:success")
        def cut(_event: object) -> None:
            if recorder.counts["pool:listen:success"] < 3:
                proxy.cut_all()

        async with running({"task": nothing}, dsn, recorder=recorder, poll_interval=0.1):
            await recorder.until("pool:listen:success", 3)


async def test_idle_worker_stops_at_once_when_the_database_is_unreachable(database: str) -> None:
    async with proxied(database) as (proxy, dsn):
        recorder = EventRecorder()
        runner = await run(
            {"task": nothing}, dsn, events=recorder.events, handle_signals=False, poll_interval=3600
        )
        planner = runner._worker._planner

        async def waits_for_the_poll() -> bool:
            sent, answered = recorder.counts["worker:getJob:start"], recorder.counts["worker:getJob:empty"]
            return planner.delay > 100 and sent == answered

        await until(waits_for_the_poll, "no exchange is in progress")
        proxy.refusing = True
        proxy.cut_all()
        await recorder.until("pool:listen:error", 2)
        async with asyncio.timeout(8):
            await runner.stop()


async def test_exchange_function_replaced_with_other_columns_is_prepared_again(
    db: asyncpg.Connection, database: str
) -> None:
    recorder = EventRecorder()
    async with running({"task": nothing}, database, recorder=recorder):
        await recorder.until("worker:getJob:empty")
        text = await db.fetchval(
            "select pg_get_functiondef('graphile_worker._private_python_exchange_v4'::regproc)"
        )
        assert "cost double precision" in text
        async with db.transaction():
            await db.execute("drop function graphile_worker._private_python_exchange_v4")
            await db.execute(text.replace("cost double precision", "cost real").replace(
                "null::double precision", "null::real"
            ))  # fmt: skip
        await add(db)
        await recorder.until("job:complete")


async def test_interrupted_job_emits_no_complete_event(database: str) -> None:
    recorder, gate = EventRecorder(), Gate()
    async with running({"task": gate}, database, recorder=recorder) as runner:
        await runner.add_job("task")
        await gate.until_started()
    assert recorder.counts["job:interrupted"] == 1
    assert recorder.counts["job:complete"] == 0


async def test_worker_runs_with_serializable_as_the_default_isolation(
    db: asyncpg.Connection, database: str
) -> None:
    name = await db.fetchval("select current_database()")
    await db.execute(f'alter database "{name}" set default_transaction_isolation = serializable')
    recorder = EventRecorder()
    async with WorkerUtils(database) as utils:
        await utils.add_jobs(JobSpec("task", queue_name=f"q{n % 5}") for n in range(200))
    async with (
        running({"task": nothing}, database, recorder=recorder, concurrency=4),
        running({"task": nothing}, database, recorder=recorder, concurrency=4),
    ):
        await recorder.until("job:complete", 200)
    assert recorder.counts["worker:getJob:error"] == 0


async def test_run_sync_on_the_event_loop_is_rejected(db: asyncpg.Connection, database: str) -> None:
    async def task(_payload: Any, ctx: JobContext) -> None:
        ctx.run_sync(asyncio.sleep(0))

    job = await add(db)
    assert await once({"task": task}, database) == RunSummary(0, 1)
    row = await existing(db, job["id"])
    assert "await" in row["last_error"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("concurrency", "prefetch"), [(1, 0), (4, 0), (4, 50)])
async def test_queues_hidden_behind_a_locked_queue_run_before_jobs_of_a_lower_priority(
    db: asyncpg.Connection, database: str, concurrency: int, prefetch: int
) -> None:
    async with WorkerUtils(database) as utils:
        await utils.add_jobs([JobSpec("task", "big", queue_name="big")] * 300)
        await utils.add_jobs([JobSpec("task", "hidden", queue_name=f"q{n}") for n in range(100)])
        await utils.add_jobs([JobSpec("task", "worse", priority=5)] * 1000)
    await db.execute(
        "update graphile_worker._private_job_queues set locked_by = 'other', locked_at = now() "
        "where queue_name = 'big'"
    )
    started: list[str] = []
    recorder = EventRecorder()

    async def task(payload: str) -> None:
        started.append(payload)

    async with running(
        {"task": task}, database, recorder=recorder, concurrency=concurrency, prefetch=prefetch, migrate=False
    ):
        await recorder.until("job:complete", 1100)
    assert started[:100] == ["hidden"] * 100


async def test_invalid_flags_fail_only_their_job(db: asyncpg.Connection, database: str) -> None:
    odd = await add(db, "task")
    await db.execute("update graphile_worker._private_jobs set flags = '5'")
    await add(db, "task")
    assert await run_once({"task": nothing}, database) == RunSummary(1, 1)
    assert "flags" in (await existing(db, odd["id"]))["last_error"]


async def test_exchange_with_an_unreadable_answer_is_repeated(
    db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from graphile_worker._db.queries import exchange  # noqa: PLC0415

    read, failures = exchange.Answer.read, 3

    def fails_at_first(self: exchange.Answer) -> exchange.ExchangeReply:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise ZeroDivisionError("not foreseen")
        return read(self)

    monkeypatch.setattr(exchange.Answer, "read", fails_at_first)
    async with WorkerUtils(database) as utils:
        await utils.add_jobs([JobSpec("task")] * 100)
    recorder = EventRecorder()
    async with running(
        {"task": nothing}, database, recorder=recorder, concurrency=4, prefetch=20, migrate=False
    ):
        await recorder.until("job:complete", 100)
    assert await locked(db) == []
    assert await count(db) == 0


async def test_prefetched_jobs_run_during_an_outage(database: str) -> None:
    recorder = EventRecorder()

    async def task(_payload: object) -> None:
        # Twelve of them take longer than prefetch_ttl, which does not count down during an outage.
        await asyncio.sleep(0.15)

    async with WorkerUtils(database) as utils:
        await utils.add_jobs([JobSpec("task")] * 12)
    async with (
        proxied(database) as (proxy, dsn),
        running(
            {"task": task}, dsn, recorder=recorder, prefetch=20, prefetch_ttl=1.0, migrate=False, listen=False
        ),
    ):
        await recorder.until("job:start")
        proxy.refusing = True
        proxy.cut_all()
        await recorder.until("job:success", 12)
        proxy.refusing = False
        await recorder.until("job:complete", 12)
    assert recorder.counts["localQueue:returnJobs"] == 0


def test_busy_result_is_not_sent_again_before_its_answer_arrives() -> None:
    results, held = Results(), ClaimedJob(None, datetime.now(UTC), None)  # type: ignore[arg-type]
    held.job = SimpleNamespace(id=1)  # type: ignore[assignment]
    result = Result(held, Completed(), None)
    results.add([result])
    assert results.take() == [result]
    results.sort_out([result], ExchangeReply(datetime.now(UTC), busy={held.claim}))
    results._delayed[held].again = 0.0
    assert results.take() == [result]
    assert not results
    assert results.take() == []
    results.put_back([result], perhaps_recorded=False)
    assert results.take() == [result], "a result without an answer must be sent again"


@pytest.mark.skipif(not hasattr(asyncio, "eager_task_factory"), reason="new in Python 3.12")
async def test_jobs_may_end_while_they_start(database: str) -> None:
    """With an eager task factory, a job can end before `create_task` returns."""
    asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined,unused-ignore]
    async with WorkerUtils(database) as utils:
        await utils.add_jobs(JobSpec("task") for _ in range(600))
    # Enough jobs to exceed the recursion limit, if each job started the next one.
    done = await run_once({"task": nothing}, database, concurrency=5, prefetch=300, handle_signals=False)
    assert done == RunSummary(600, 0)
