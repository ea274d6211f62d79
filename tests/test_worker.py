"""A worker claims jobs, runs them, and records their outcomes."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import os
import threading
import traceback
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from graphile_worker import (
    ConfigurationError,
    DatabaseError,
    Events,
    InvalidJobError,
    Job,
    JobContext,
    JobSpec,
    Middleware,
    RunSummary,
    SchemaMissingError,
    SchemaTooNewError,
    WorkerUtils,
    events as event,
    run,
    run_once,
)
from graphile_worker._db.connection.connect import Pool
from graphile_worker._db.connection.listen import Listener, listening
from graphile_worker._db.schema.migrate import check_revisions
from graphile_worker._worker import lifecycle
from graphile_worker._worker.execution import job_log
from graphile_worker._worker.maintenance import notifier as notifier_module
from graphile_worker.middleware import SlowJobs
from support.jobs import add, count, existing, fetch_one, get, put_in_state
from support.waiting import until
from support.workers import DEADLINE, EventRecorder, Gate, locked, nothing, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

NODE_EVENTS = """pool:create pool:listen:connecting pool:listen:success pool:listen:error
pool:listen:notification pool:listen:release pool:fatalError pool:release pool:gracefulShutdown
pool:gracefulShutdown:error pool:gracefulShutdown:workerError pool:gracefulShutdown:complete
pool:forcefulShutdown pool:forcefulShutdown:error pool:forcefulShutdown:complete
localQueue:init localQueue:setMode localQueue:getJobs:complete localQueue:returnJobs
worker:create worker:release worker:stop worker:getJob:start worker:getJob:error worker:getJob:empty
worker:fatalError job:start job:success job:error job:failed job:complete
cron:starting cron:started cron:backfill cron:prematureTimer cron:overdueTimer cron:schedule cron:scheduled
resetLocked:started resetLocked:success resetLocked:failure gracefulShutdown forcefulShutdown stop"""

once = functools.partial(run_once, handle_signals=False)


async def generator(_payload: Any) -> Any:
    yield 1


class TestRunOnce:
    async def test_run_once_runs_all_runnable_jobs_and_leaves_the_others(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        runnable = [await add(db, task, payload=n) for n, task in enumerate(("a", "b", "c"))]
        stays = [await add(db, "a") for _ in range(3)]
        await put_in_state(db, "locked", stays[0]["id"])
        await put_in_state(db, "failed", stays[1]["id"])
        await put_in_state(db, "retrying", stays[2]["id"])
        stays += [await add(db, "a", run_at=datetime(2100, 1, 1, tzinfo=UTC)), await add(db, "unknown")]
        runnable += [await add(db, task, payload=n) for n, task in enumerate(("c", "b", "a"), 3)]
        ran: list[int] = []

        summary = await once(dict.fromkeys("abc", ran.append), database)

        assert summary == RunSummary(succeeded=6, failed=0)
        assert ran == [0, 1, 2, 3, 4, 5]
        left = await db.fetch("select id from graphile_worker._private_jobs order by id")
        assert [row["id"] for row in left] == [job["id"] for job in stays]

    async def test_run_once_runs_jobs_added_by_jobs(self, db: asyncpg.Connection, database: str) -> None:
        async def countdown(n: int, ctx: JobContext) -> None:
            if n:
                await ctx.add_job("countdown", n - 1, queue_name="q")

        await add(db, "countdown", payload=5)
        assert await once({"countdown": countdown}, database) == RunSummary(6, 0)

    async def test_run_once_counts_a_failed_job_without_raising(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        job = await add(db)

        def task(_payload: object) -> None:
            raise ValueError("not today")

        assert await once({"task": task}, database) == RunSummary(0, 1)
        row = await existing(db, job["id"])
        assert (row["attempts"], row["last_error"], row["locked_at"]) == (1, "not today", None)

    async def test_run_once_runs_a_serial_queue_in_order(self, db: asyncpg.Connection, database: str) -> None:
        for n in range(10):
            await add(db, payload=n, queue_name="q")
        ran: list[int] = []
        assert await once({"task": ran.append}, database) == RunSummary(10, 0)
        assert ran == list(range(10))
        assert await locked(db) == []

    async def test_run_once_installs_the_schema_unless_migrate_is_false(self, empty_database: str) -> None:
        with pytest.raises(SchemaMissingError):
            await once({"task": nothing}, empty_database, migrate=False)
        assert await once({"task": nothing}, empty_database) == RunSummary(0, 0)

    async def test_run_once_removes_stale_locks_first(self, db: asyncpg.Connection, database: str) -> None:
        job = await add(db, queue_name="q")
        await put_in_state(db, "stale", job["id"])
        assert await once({"task": nothing}, database) == RunSummary(1, 0)
        assert await locked(db) == []

    async def test_run_once_uses_the_callers_pool_and_leaves_it_open(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await add(db)
        async with asyncpg.create_pool(database, min_size=0, max_size=3) as pool:
            assert await run_once({"task": nothing}, pool=pool, handle_signals=False) == RunSummary(1, 0)
            assert await pool.fetchval("select 1") == 1

    async def test_cancelling_run_once_interrupts_running_jobs(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        job = await add(db)
        gate = Gate()
        draining = asyncio.create_task(once({"task": gate}, database, shutdown_grace=0))
        await gate.until_started()
        draining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await draining
        assert (await existing(db, job["id"]))["attempts"] == 0
        assert await locked(db) == []


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"tasks": {}}, "[Nn]o tasks"),
            ({"tasks": [nothing]}, "tasks is a list.*mapping"),
            ({"tasks": {"a": generator}}, "'a'.*yield"),
            ({"tasks": {"a": 5}}, "'a'.* 5"),
            ({"tasks": {"a": lambda: None}}, r"\(payload\) or \(payload, ctx\)"),
            ({"tasks": {"a": lambda _a, _b, _c: None}}, r"\(payload\) or \(payload, ctx\)"),
            ({"concurrency": 0}, "concurrency is 0"),
            ({"concurrency": True}, "concurrency is True"),
            ({"prefetch": -1}, "prefetch is -1"),
            ({"poll_interval": 0}, "poll_interval is 0.*more than 0"),
            ({"poll_interval": timedelta(seconds=-1)}, "poll_interval"),
            ({"shutdown_grace": float("nan")}, "shutdown_grace is nan"),
            ({"listen": False, "listen_dsn": "postgresql://x"}, "not both"),
            ({"forbidden_flags": "x"}, "forbidden_flags 'x'"),
            ({"forbidden_flags": [1]}, r"forbidden_flags \[1\]"),
            ({"max_pool_size": 0}, "max_pool_size is 0"),
            ({"events": object()}, "events takes an Events"),
            ({"listen": "no"}, "listen is 'no'.*True or False"),
            ({"logger": 1}, "logger takes a logger"),
            ({"pool": object()}, "pool.*asyncpg"),
            ({"min_reset_locked_interval": 5, "max_reset_locked_interval": 4}, "is longer than"),
        ],
    )
    async def test_invalid_argument_is_rejected(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            await run(**{"tasks": {"task": nothing}, **arguments})

    async def test_invalid_task_name_is_rejected(self) -> None:
        for name in ("", "x" * 129):
            with pytest.raises(InvalidJobError, match="identifier"):
                await run({name: nothing})

    async def test_dsn_and_pool_are_mutually_exclusive(self, database: str) -> None:
        async with asyncpg.create_pool(database, min_size=0) as pool:
            with pytest.raises(ConfigurationError, match="not both"):
                await run({"task": nothing}, database, pool=pool)

    async def test_pool_that_is_too_small_is_rejected(self, database: str) -> None:
        async with asyncpg.create_pool(database, min_size=0, max_size=3) as pool:
            with pytest.raises(ConfigurationError, match=r"max_size is 3.*\b4\b"):
                await run({"task": nothing}, pool=pool)

    async def test_database_url_names_the_database(
        self, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DATABASE_URL", database)
        assert await once({"task": nothing}) == RunSummary(0, 0)

    async def test_missing_database_is_rejected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in os.environ if name.startswith("PG")] + ["DATABASE_URL"]:
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(ConfigurationError, match="DATABASE_URL"):
            await once({"task": nothing})

    async def test_unreachable_database_is_reported_in_one_line(self) -> None:
        with pytest.raises(DatabaseError, match="Cannot reach the database") as raised:
            await run({"task": nothing}, "postgresql://user@127.0.0.1:1/nothing")
        assert "\n" not in str(raised.value)

    async def test_role_without_privileges_gets_a_clear_error(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await db.execute("create role gw_unprivileged login")
        try:
            dsn = database.replace("postgres@", "gw_unprivileged@")
            with pytest.raises(DatabaseError, match="Permission denied"):
                await run({"task": nothing}, dsn, migrate=False)
        finally:
            await db.execute("drop role gw_unprivileged")


class TestRunning:
    async def test_job_starts_as_soon_as_it_is_added(self, database: str) -> None:
        """The poll interval is too long for polling to start the job."""
        recorder = EventRecorder()
        async with running({"task": nothing}, database, recorder=recorder, poll_interval=3600) as runner:
            await recorder.until("worker:getJob:empty")
            job = await runner.add_job("task")
            assert (await recorder.until("job:complete")).job.id == job.id

    async def test_future_job_starts_when_it_is_due(self, database: str) -> None:
        started: list[datetime] = []
        recorder = EventRecorder()

        async def task(_payload: object, ctx: JobContext) -> None:
            # Not ctx.now(): it lags behind by the latency of the answer that brought the database time.
            started.append((await ctx.query("select clock_timestamp()"))[0][0])

        async with running({"task": task}, database, recorder=recorder, poll_interval=3600) as runner:
            for delay in (0.3, 0.6):
                await runner.add_job("task", run_at=timedelta(seconds=delay), queue_name="q")
            await recorder.until("job:complete", 2)
        due = [event.job.run_at for event in recorder.named("job:complete")]
        late = [(start - at).total_seconds() for start, at in zip(started, due, strict=True)]
        assert all(0 <= delay < DEADLINE for delay in late), "a timer must start the jobs, not polling"

    async def test_serial_queue_runs_without_waiting_for_polls(self, database: str) -> None:
        """Graphile Worker waits a poll interval between the jobs of a queue."""
        recorder = EventRecorder()
        async with running(
            {"task": nothing}, database, recorder=recorder, poll_interval=3600, concurrency=4
        ) as runner:
            await runner.utils.add_jobs(JobSpec("task", queue_name="q") for _ in range(12))
            await recorder.until("job:complete", 12)

    async def test_jobs_of_a_queue_never_overlap_while_other_jobs_run(self, database: str) -> None:
        recorder, gate = EventRecorder(), Gate()
        async with running({"task": gate}, database, recorder=recorder, concurrency=5) as runner:
            await runner.utils.add_jobs(JobSpec("task", n, queue_name="q") for n in range(3))
            await runner.utils.add_jobs(JobSpec("task", n) for n in range(10, 13))
            await gate.until_started(4)
            assert gate.started == [0, 10, 11, 12]
            gate.open()
            await recorder.until("job:complete", 6)
        assert [n for n in gate.started if n < 10] == [0, 1, 2]

    async def test_concurrency_limits_running_jobs(self, database: str) -> None:
        recorder, gate = EventRecorder(), Gate()
        async with running({"task": gate}, database, recorder=recorder, concurrency=3) as runner:
            await runner.utils.add_jobs(JobSpec("task", n) for n in range(8))
            await gate.until_started(3)
            await asyncio.sleep(0.05)
            assert len(gate.started) == 3
            gate.open()
            await recorder.until("job:complete", 8)

    async def test_worker_runs_jobs_by_polling_only(self, db: asyncpg.Connection, database: str) -> None:
        recorder = EventRecorder()
        async with running({"task": nothing}, database, recorder=recorder, listen=False, poll_interval=0.05):
            await recorder.until("worker:getJob:empty")
            await db.execute("select graphile_worker.add_job('task')")
            await recorder.until("job:complete")
        assert recorder.counts["pool:listen:connecting"] == 0

    async def test_one_claim_serves_all_slots(self, database: str) -> None:
        """Graphile Worker polls once for each slot."""
        recorder = EventRecorder()
        async with running(
            {"task": nothing}, database, recorder=recorder, concurrency=50, listen=False, poll_interval=3600
        ):
            await recorder.until("worker:getJob:empty")
            await asyncio.sleep(0.1)
        assert recorder.counts["worker:getJob:start"] == 1

    async def test_task_that_holds_all_connections_does_not_starve_the_worker(self, database: str) -> None:
        recorder, release = EventRecorder(), asyncio.Event()

        async def hold_connection(_payload: object, ctx: JobContext) -> None:
            async with ctx.connection():
                await release.wait()

        tasks: dict[str, Callable[..., Any]] = {"hold": hold_connection, "task": nothing}
        async with running(tasks, database, recorder=recorder, concurrency=4, max_pool_size=2) as runner:
            async with WorkerUtils(database) as utils:
                await utils.add_jobs([JobSpec("hold")] * 2)
                await recorder.until("job:start", 2)
                await utils.add_job("task")
            await recorder.until("job:complete")
            release.set()
            await recorder.until("job:complete", 3)
            assert (await runner.utils.stats()).total == 0

    async def test_task_that_holds_connections_of_the_callers_pool_does_not_starve_the_worker(
        self, database: str
    ) -> None:
        recorder, release = EventRecorder(), asyncio.Event()

        async def hold_connection(_payload: object, ctx: JobContext) -> None:
            async with ctx.connection():
                await release.wait()

        async with (
            asyncpg.create_pool(database, min_size=0, max_size=4) as pool,
            WorkerUtils(database) as utils,
            running(
                {"hold": hold_connection, "task": nothing}, None, pool=pool, recorder=recorder, concurrency=4
            ),
        ):
            await utils.add_jobs([JobSpec("hold")] * 2)
            await recorder.until("job:start", 2)
            await utils.add_job("task")
            await recorder.until("job:complete")
            release.set()
            await recorder.until("job:complete", 3)

    async def test_a_thousand_concurrent_jobs_need_few_connections(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        recorder, gate = EventRecorder(), Gate()
        async with running({"task": gate}, database, recorder=recorder, concurrency=1000) as runner:
            await runner.utils.add_jobs(JobSpec("task") for _ in range(1000))
            await gate.until_started(1000)
            used = "select count(*) from pg_stat_activity where application_name = 'graphile-worker'"
            assert await db.fetchval(used) <= 8
            gate.open()
            await recorder.until("job:complete", 1000)

    async def test_worker_runs_in_a_thread_of_another_program(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        job = await add(db)

        def serve() -> None:
            async def main() -> None:
                recorder = EventRecorder()
                async with running({"task": nothing}, database, recorder=recorder, handle_signals=True):
                    await recorder.until("job:complete")

            asyncio.run(main())

        await asyncio.to_thread(serve)
        assert await get(db, job["id"]) is None

    async def test_use_local_time_compares_run_at_with_the_local_clock(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from graphile_worker._worker.claiming import clock  # noqa: PLC0415

        shift = timedelta(hours=-1)

        class Shifted(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
                return datetime.now(tz) + shift

        monkeypatch.setattr(clock, "datetime", Shifted)
        await add(db, run_at=datetime.now(UTC) - timedelta(minutes=30))
        assert await once({"task": nothing}, database, use_local_time=True) == RunSummary(0, 0)
        shift = timedelta(0)
        assert await once({"task": nothing}, database, use_local_time=True) == RunSummary(1, 0)

    async def test_run_at_is_compared_with_the_database_time_by_default(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from graphile_worker._worker.claiming import clock  # noqa: PLC0415

        class Shifted(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
                return datetime.now(tz) - timedelta(hours=1)

        monkeypatch.setattr(clock, "datetime", Shifted)
        await add(db, run_at=datetime.now(UTC) - timedelta(minutes=30))
        assert await once({"task": nothing}, database) == RunSummary(1, 0)

    async def test_worker_finds_a_task_again_that_a_cleanup_removed(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from graphile_worker._worker import loop  # noqa: PLC0415

        monkeypatch.setattr(loop, "_MAINTENANCE_INTERVAL", 0.05)
        recorder = EventRecorder()
        async with running({"task": nothing}, database, recorder=recorder, poll_interval=0.1):
            await db.execute("delete from graphile_worker._private_tasks")
            await db.execute("select graphile_worker.add_job('task')")
            await recorder.until("job:complete")

    async def test_notification_of_a_task_with_a_new_id_is_enough_to_claim_its_job(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from graphile_worker._worker import loop  # noqa: PLC0415

        monkeypatch.setattr(loop, "TASK_REFRESH_DELAY", 0.0)
        recorder = EventRecorder()
        async with running({"task": nothing}, database, recorder=recorder, poll_interval=3600):
            await db.execute("delete from graphile_worker._private_tasks")
            await db.execute("select graphile_worker.add_job('task')")
            await recorder.until("job:complete")


class TestTasks:
    async def call(self, db: asyncpg.Connection, database: str, task: Callable[..., Any]) -> RunSummary:
        await add(db, payload={"a": 1})
        return await once({"task": task}, database)

    async def test_every_kind_of_callable_receives_the_payload(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        seen: list[tuple[str, Any]] = []

        def plain(payload: Any) -> None:
            seen.append(("plain", payload))

        async def with_context(payload: Any, ctx: JobContext) -> None:
            seen.append(("async", (payload, ctx.job.task_identifier)))

        class Callable_:  # noqa: N801
            async def __call__(self, payload: Any) -> None:
                seen.append(("object", payload))

            def method(self, payload: Any, ctx: JobContext) -> None:
                seen.append(("method", (payload, ctx.job.attempts)))

        def returning_awaitable(payload: Any) -> Any:
            return with_context(payload, context[0])

        context: list[JobContext] = []

        async def keep_context(_payload: Any, ctx: JobContext) -> None:
            context.append(ctx)

        for task in (
            plain,
            with_context,
            Callable_(),
            Callable_().method,
            functools.partial(plain),
            lambda payload, *_: seen.append(("lambda", payload)),
            keep_context,
            returning_awaitable,
        ):
            assert await self.call(db, database, task) == RunSummary(1, 0)
        payload = {"a": 1}
        assert seen == [
            ("plain", payload),
            ("async", (payload, "task")),
            ("object", payload),
            ("method", (payload, 1)),
            ("plain", payload),
            ("lambda", payload),
            ("async", (payload, "task")),
        ]

    async def test_plain_function_runs_on_a_thread_and_async_function_on_the_loop(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        threads: list[threading.Thread] = []

        def plain(_payload: Any) -> None:
            threads.append(threading.current_thread())

        async def asynchronous(_payload: Any) -> None:
            threads.append(threading.current_thread())

        await self.call(db, database, plain)
        await self.call(db, database, asynchronous)
        assert threads[0] is not threading.main_thread()
        assert threads[1] is threading.main_thread()

    async def test_threads_run_concurrently_in_all_slots(self, database: str) -> None:
        barrier = threading.Barrier(8, timeout=20)
        recorder = EventRecorder()
        async with running(
            {"task": lambda _: barrier.wait()}, database, recorder=recorder, concurrency=8
        ) as runner:
            await runner.utils.add_jobs([JobSpec("task")] * 8)
            await recorder.until("job:complete", 8)
        assert recorder.counts["job:success"] == 8

    async def test_tasks_see_context_variables_of_the_caller_and_change_only_their_own(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
        seen: list[str] = []

        def plain(_payload: Any) -> None:
            seen.append(variable.get())
            variable.set("changed by plain")

        async def asynchronous(_payload: Any) -> None:
            seen.append(variable.get())
            variable.set("changed by async")

        variable.set("of the caller")
        await add(db, "plain")
        await add(db, "async")
        await add(db, "plain")
        await add(db, "async")
        await once({"plain": plain, "async": asynchronous}, database)
        assert seen == ["of the caller"] * 4
        assert variable.get() == "of the caller"

    @pytest.mark.sample(5)
    @pytest.mark.parametrize("is_async", [True, False])
    @pytest.mark.parametrize(
        ("error", "text"),
        [
            (ValueError("a message"), "a message"),
            (ValueError(), "ValueError"),
            (KeyError("k"), "KeyError: 'k'"),
            (SystemExit(3), "SystemExit: 3"),
            (SystemExit(), "SystemExit"),
            (KeyboardInterrupt(), "KeyboardInterrupt"),
            (asyncio.CancelledError(), "CancelledError"),
            (StopIteration(), "StopIteration|coroutine raised StopIteration"),
            (GeneratorExit(), "GeneratorExit"),
            (BaseExceptionGroup("group", [ValueError("x")]), "group (1 sub-exception)"),
        ],
    )
    async def test_any_exception_fails_only_its_job(
        self, db: asyncpg.Connection, database: str, error: BaseException, text: str, is_async: bool
    ) -> None:
        def plain(_payload: Any) -> None:
            raise error

        async def asynchronous(_payload: Any) -> None:
            raise error

        job = await add(db, "bad")
        await add(db, "good")
        tasks = {"bad": asynchronous if is_async else plain, "good": nothing}
        assert await once(tasks, database) == RunSummary(1, 1)
        assert (await existing(db, job["id"]))["last_error"] in text.split("|")

    async def test_unreadable_payload_fails_only_its_job(self, db: asyncpg.Connection, database: str) -> None:
        await db.execute("select graphile_worker.add_job('task', ('[' || repeat('9', 5000) || ']')::json)")
        await add(db)
        assert await once({"task": nothing}, database) == RunSummary(1, 1)
        assert "payload cannot be decoded" in await db.fetchval(
            "select last_error from graphile_worker._private_jobs"
        )


class TestContext:
    async def test_context_has_the_job_and_adds_jobs(self, db: asyncpg.Connection, database: str) -> None:
        seen: dict[str, Any] = {}

        async def task(_payload: Any, ctx: JobContext) -> None:
            row = await fetch_one(db, "select * from graphile_worker._private_jobs")
            seen.update(
                job=(ctx.job.id, ctx.job.attempts, ctx.job.locked_by),
                row=(row["id"], row["attempts"], row["locked_by"]),
                worker=ctx.worker_id,
                queue=ctx.queue_name,
                schema=ctx.schema,
                stop_requested=bool(ctx.stop_requested),
                skew=abs((ctx.now() - datetime.now(UTC)).total_seconds()) < 60,
                query=[tuple(row) for row in await ctx.query("select 1 + $1::int", 2)],
            )
            async with ctx.connection() as connection, connection.transaction():
                await ctx.add_job("other", connection=connection, job_key="k")
            await ctx.add_jobs([JobSpec("other")] * 2)
            seen["stats"] = (await ctx.utils.stats()).tasks["other"].ready
            assert repr(ctx) == f"JobContext(job={ctx.job.id}, task='task')"

        job = await add(db, queue_name="q")
        assert await once({"task": task}, database) == RunSummary(1, 0)
        assert seen.pop("worker") == seen["job"][2]
        assert seen["job"][2].startswith("python-")
        assert seen == {
            "job": (job["id"], 1, seen["job"][2]),
            "row": (job["id"], 1, seen["job"][2]),
            "queue": "q",
            "schema": "graphile_worker",
            "stop_requested": False,
            "skew": True,
            "query": [(3,)],
            "stats": 3,
        }

    async def test_plain_function_can_run_awaitables_with_run_sync(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        def task(_payload: Any, ctx: JobContext) -> None:
            job: Job = ctx.run_sync(ctx.add_job("next", {"from": ctx.job.id}))
            assert job.task_identifier == "next"

        job = await add(db)
        assert await once({"task": task}, database) == RunSummary(1, 0)
        assert await db.fetchval("select payload->>'from' from graphile_worker._private_jobs") == str(
            job["id"]
        )

    async def test_connection_of_a_task_is_reset_afterwards(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        seen: list[str] = []

        async def task(_payload: Any, ctx: JobContext) -> None:
            async with ctx.connection() as connection:
                seen.append(await connection.fetchval("show application_name"))
                await connection.execute("set application_name = 'mine'")
                await connection.execute("begin")
            raise ValueError

        await add(db)
        await add(db)
        await once({"task": task}, database, max_pool_size=1)
        assert seen == ["graphile-worker"] * 2

    async def test_logger_of_the_context_adds_job_fields(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)

        async def task(_payload: Any, ctx: JobContext) -> None:
            ctx.logger.scope(order=7).info("here", extra={"more": 1})

        job = await add(db, "task")
        await once({"task": task}, database)
        [record] = [record for record in caplog.records if record.message == "here"]
        assert (
            vars(record).items()
            >= {
                "label": "job",
                "task_identifier": "task",
                "job_id": job["id"],
                "order": 7,
                "more": 1,
            }.items()
        )
        assert vars(record)["worker_id"].startswith("python-")


class TestForbiddenFlags:
    forms = pytest.mark.parametrize("form", ["list", "function", "async function"])

    @staticmethod
    def option(form: str, value: Any) -> Any:
        async def asynchronous() -> Any:
            return value

        return {"list": value, "function": lambda: value, "async function": asynchronous}[form]

    @forms
    async def test_jobs_with_a_forbidden_flag_do_not_run(
        self, db: asyncpg.Connection, database: str, form: str
    ) -> None:
        flagged = await add(db, flags=["a", "b"])
        await add(db, flags=["c"])
        await add(db)
        summary = await once({"task": nothing}, database, forbidden_flags=self.option(form, ["b", "z"]))
        assert summary == RunSummary(2, 0)
        assert (await existing(db, flagged["id"]))["attempts"] == 0

    @pytest.mark.sample(3)
    @forms
    @pytest.mark.parametrize("value", [None, [], ["no job has this"]])
    async def test_jobs_without_a_forbidden_flag_run(
        self, db: asyncpg.Connection, database: str, form: str, value: Any
    ) -> None:
        await add(db, flags=["a"])
        await add(db)
        option = self.option(form, value)
        assert await once({"task": nothing}, database, forbidden_flags=option) == RunSummary(2, 0)

    async def test_forbidden_flags_function_is_called_for_every_claim(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        forbidden = ["a"]
        recorder = EventRecorder()
        async with running(
            {"task": nothing},
            database,
            recorder=recorder,
            forbidden_flags=lambda: forbidden,
            poll_interval=0.05,
        ) as runner:
            await runner.add_job("task", flags=["a"])
            await runner.add_job("task")
            await recorder.until("job:complete")
            assert await count(db) == 1
            forbidden.clear()
            await recorder.until("job:complete", 2)

    @pytest.mark.parametrize("form", ["function", "async function"])
    async def test_no_job_runs_while_the_forbidden_flags_function_raises(
        self, database: str, form: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        broken, calls, recorder = True, 0, EventRecorder()

        def flags() -> list[str]:
            nonlocal calls
            calls += 1
            if broken:
                raise ValueError("redis is down")
            return []

        async def asynchronous() -> list[str]:
            return flags()

        option = flags if form == "function" else asynchronous
        async with running(
            {"task": nothing}, database, recorder=recorder, forbidden_flags=option, poll_interval=0.02
        ) as runner:
            await runner.add_job("task", flags=["x"])

            async def called_often() -> bool:
                return calls > 5

            await until(called_often, "the function is called again")
            assert recorder.counts["job:start"] == 0
            broken = False
            await recorder.until("job:complete")
        warnings = [record for record in caplog.records if "forbidden_flags failed" in record.message]
        assert len(warnings) == 1

    async def test_failing_forbidden_flags_function_is_an_error_in_run_once(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        def flags() -> list[str]:
            raise ValueError("redis is down")

        await add(db)
        with pytest.raises(ConfigurationError, match="redis is down"):
            await once({"task": nothing}, database, forbidden_flags=flags)
        assert await locked(db) == []

    async def test_slow_forbidden_flags_function_delays_no_result(self, database: str) -> None:
        answer: asyncio.Future[list[str]] | None = None
        recorder, gate, called = EventRecorder(), Gate(), asyncio.Event()

        async def flags() -> list[str]:
            if answer is None:
                return []
            called.set()
            return await answer

        async with running(
            {"gate": gate, "task": nothing}, database, recorder=recorder, forbidden_flags=flags,
            concurrency=2, poll_interval=0.05, listen=False,
        ) as runner:  # fmt: skip
            await runner.add_job("gate")
            await gate.until_started()
            answer = asyncio.get_running_loop().create_future()
            await called.wait()
            await runner.add_job("task")
            gate.open()
            await recorder.until("job:complete")
            assert recorder.counts["job:start"] == 1
            answer.set_result([])
            await recorder.until("job:complete", 2)

    async def test_forbidden_flags_function_disables_prefetch(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """The local queue of Graphile Worker locks jobs that it may not run, until their TTL expires."""
        recorder, gate = EventRecorder(), Gate()
        async with running(
            {"task": gate}, database, recorder=recorder, forbidden_flags=lambda: ["a"], prefetch=50
        ) as runner:
            await runner.utils.add_jobs([JobSpec("task")] * 5 + [JobSpec("task", flags=["a"])] * 5)
            await gate.until_started()
            await recorder.until("worker:getJob:start", 1)
            assert await db.fetchval("select count(locked_at) from graphile_worker._private_jobs") == 1
            gate.open()
            await recorder.until("job:complete", 5)
            await runner.utils.add_job("task")
            await recorder.until("job:complete", 6)


class TestPrefetch:
    async def test_prefetch_claims_jobs_beyond_the_free_slots(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        recorder, gate = EventRecorder(), Gate()
        async with running({"task": gate}, database, recorder=recorder, prefetch=5, concurrency=2) as runner:
            await runner.utils.add_jobs(JobSpec("task", n) for n in range(20))
            await gate.until_started(2)
            assert await db.fetchval("select count(locked_at) from graphile_worker._private_jobs") == 7
            gate.open()
            await recorder.until("job:complete", 20)
        assert gate.started == list(range(20))
        assert recorder.counts["localQueue:init"] == 1
        assert sum(len(found.jobs) for found in recorder.named("localQueue:getJobs:complete")) == 20

    async def test_single_new_job_starts_at_once_with_prefetch(self, database: str) -> None:
        """In Graphile Worker, such a job waits for the next poll."""
        recorder = EventRecorder()
        async with running(
            {"task": nothing}, database, recorder=recorder, prefetch=10, poll_interval=3600
        ) as runner:
            await recorder.until("worker:getJob:empty")
            for n in range(3):
                await runner.add_job("task")
                await recorder.until("job:complete", n + 1)

    async def test_slot_runs_a_prefetched_serial_queue_in_order(self, database: str) -> None:
        """Graphile Worker fetches one job of a queue per poll."""
        recorder, ran = EventRecorder(), dict[str, list[int]](a=[], b=[], c=[])

        running_queues: set[str] = set()

        async def task(payload: list[Any]) -> None:
            name, n = payload
            assert name not in running_queues, "two jobs of a queue overlap"
            running_queues.add(name)
            await asyncio.sleep(0.001)
            running_queues.remove(name)
            ran[name].append(n)

        async with running(
            {"task": task}, database, recorder=recorder, prefetch=50, concurrency=4, poll_interval=3600
        ) as runner:
            await runner.utils.add_jobs(
                JobSpec("task", [name, n], queue_name=name) for n in range(40) for name in "abc"
            )
            await recorder.until("job:complete", 120)
        assert ran == {name: list(range(40)) for name in "abc"}

    async def test_prefetched_jobs_are_released_after_their_ttl(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        recorder, gate = EventRecorder(), Gate()
        async with running(
            {"task": gate}, database, recorder=recorder, prefetch=3, prefetch_ttl=0.1
        ) as runner:
            await runner.utils.add_jobs(
                JobSpec("task", n, queue_name="q" if n < 2 else None) for n in range(4)
            )
            await gate.until_started()
            returned = await recorder.until("localQueue:returnJobs")
            assert len(returned.jobs) == 3
            held = "select count(locked_at) from graphile_worker._private_jobs"

            async def one_is_held() -> bool:
                return bool(await db.fetchval(held) == 1)

            await until(one_is_held, "the other jobs are released")
            assert await db.fetchval("select sum(attempts) from graphile_worker._private_jobs") == 1
            assert [kind for kind, _ in await locked(db)] == ["job", "queue"]
            gate.open()
            await recorder.until("job:complete", 4)
        assert recorder.named("localQueue:setMode")[0].new_mode == "TTL_EXPIRED"


class TestOtherSessions:
    async def test_transaction_that_locks_a_running_job_delays_only_that_job(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        recorder, gate = EventRecorder(), Gate()
        async with running(
            {"gate": gate, "task": nothing}, database, recorder=recorder, concurrency=2
        ) as runner:
            job = await runner.add_job("gate", job_key="k", queue_name="q")
            await gate.until_started()
            await db.execute("begin")
            await add(db, "gate", job_key="k", queue_name="q", run_at=datetime(2100, 1, 1, tzinfo=UTC))
            gate.open()
            await recorder.until("job:success")
            async with WorkerUtils(database) as utils:
                await utils.add_jobs([JobSpec("task")] * 5)
            await recorder.until("job:complete", 5)
            assert job.id not in [done.job.id for done in recorder.named("job:complete")]
            await db.execute("commit")
            assert (await recorder.until("job:complete", 6)).job.id == job.id
        assert recorder.counts["job:lost"] == 0
        assert await get(db, job.id) is None
        assert await locked(db) == []

    async def test_superseded_job_completes_and_the_new_one_runs(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        recorder, gate = EventRecorder(), Gate()
        async with running({"task": gate}, database, recorder=recorder, concurrency=2) as runner:
            first = await runner.add_job("task", 1, job_key="k")
            await gate.until_started()
            second = await runner.add_job("task", 2, job_key="k")
            assert second.id != first.id
            await gate.until_started(2)
            gate.open()
            await recorder.until("job:complete", 2)
        assert await count(db) == 0

    async def test_job_unlocked_by_another_session_is_reported_and_its_next_run_is_not_deleted(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Graphile Worker deletes the job by its id, even if another worker runs it by now."""
        recorder, gate = EventRecorder(), Gate()
        async with running({"task": gate}, database, recorder=recorder) as runner:
            job = await runner.add_job("task")
            await gate.until_started()
            await runner.utils.force_unlock_workers([runner.id])
            await db.execute("update graphile_worker._private_jobs set locked_by = 'x', locked_at = now()")
            gate.open()
            lost = await recorder.until("job:lost")
        assert lost.job.id == job.id
        assert recorder.counts["job:complete"] == 0
        assert (await existing(db, job.id))["locked_by"] == "x"
        assert any("was no longer locked by this worker" in record.message for record in caplog.records)


class TestRetries:
    async def test_failed_job_is_retried_and_keeps_its_error(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        job = await add(db, queue_name="q", max_attempts=2)
        attempts: list[int] = []

        def task(_payload: Any, ctx: JobContext) -> None:
            attempts.append(ctx.job.attempts)
            raise ValueError(f"try {ctx.job.attempts}")

        recorder = EventRecorder()
        for attempt, delay in ((1, 2.718), (2, 7.389)):
            before = datetime.now(UTC)
            await run_once({"task": task}, database, events=recorder.events, handle_signals=False)
            row = await existing(db, job["id"])
            assert (row["attempts"], row["last_error"]) == (attempt, f"try {attempt}")
            assert before <= row["run_at"] - timedelta(seconds=delay) <= datetime.now(UTC)
            await db.execute("update graphile_worker._private_jobs set run_at = run_at + interval '1 hour'")
            assert await once({"task": task}, database) == RunSummary(0, 0)
            await db.execute("update graphile_worker._private_jobs set run_at = now()")
        assert attempts == [1, 2]
        assert recorder.counts["job:error"] == 2
        assert recorder.counts["job:failed"] == 1
        assert await locked(db) == []


class TestEvents:
    async def test_worker_that_fails_to_start_leaves_no_listener(self, database: str) -> None:
        events = Events()
        with pytest.raises(ConfigurationError):
            await run({"task": nothing}, database, events=events, health="nowhere", handle_signals=False)
        assert not any(events._listeners.values())

    async def test_events_of_a_job_have_a_fixed_order(self, database: str) -> None:
        recorder = EventRecorder()
        async with running({"task": nothing, "bad": len}, database, recorder=recorder) as runner:
            for n, task in enumerate(("task", "bad")):
                await runner.add_job(task, 5, max_attempts=1)
                await recorder.until("job:complete", n + 1)
        names = [name for name in recorder.names if name.startswith("job:")]
        assert names == [
            *("job:start", "job:success", "job:complete"),
            *("job:start", "job:error", "job:failed", "job:complete"),
        ]
        assert recorder.names.index("worker:getJob:start") < recorder.names.index("job:start")
        failure = recorder.named("job:failed")[0]
        assert isinstance(failure.error, TypeError)
        assert recorder.named("job:complete")[1].error is failure.error

    async def test_worker_emits_its_events_from_start_to_stop(self, database: str) -> None:
        recorder = EventRecorder()
        async with running({"task": nothing}, database, recorder=recorder, concurrency=3) as runner:
            assert recorder.counts["pool:create"] == 1
            assert recorder.counts["pool:listen:connecting"] == 1
            assert recorder.counts["pool:listen:success"] == 1
            assert recorder.counts["worker:create"] == 3
            for n in range(5):
                await runner.add_job("task", queue_name="q")
                await recorder.until("job:complete", n + 1)
                assert recorder.counts["job:start"] == recorder.counts["job:success"] == n + 1
            assert not {"stop", "worker:release", "worker:stop", "pool:release"} & set(recorder.names)
            notification = recorder.named("pool:listen:notification")[-1]
            assert notification.channel in {"jobs:insert", f"graphile-worker:{runner.id}"}
        await runner.wait()
        assert recorder.counts["stop"] == 1
        assert recorder.counts["worker:release"] == recorder.counts["worker:stop"] == 3
        assert (
            recorder.counts["pool:gracefulShutdown"] == recorder.counts["pool:gracefulShutdown:complete"] == 1
        )
        assert recorder.counts["pool:listen:release"] == 1
        assert recorder.names[-1] == "pool:release"
        pool = recorder.all[0].worker_pool  # type: ignore[attr-defined]
        assert pool == event.WorkerPool(runner.id, "graphile_worker", 3, ("task",))
        workers = {found.worker.id for found in recorder.named("worker:create")}
        assert {started.worker.id for started in recorder.named("job:start")} <= workers

    async def test_job_complete_is_emitted_after_the_outcome_is_recorded(self, database: str) -> None:
        """Graphile Worker emits the event before it records the outcome."""
        seen: list[bool] = []
        recorder = EventRecorder()
        other = await asyncpg.connect(database)
        checks: list[asyncio.Task[Any]] = []

        async def check_deleted(job_id: int) -> None:
            seen.append(await get(other, job_id) is None)

        @recorder.events.on("job:complete")
        def complete(done: event.JobComplete) -> None:
            checks.append(asyncio.create_task(check_deleted(done.job.id)))

        async with running({"task": nothing}, database, recorder=recorder) as runner:
            for n in range(5):
                await runner.add_job("task")
                await recorder.until("job:complete", n + 1)
                await checks[n]
        assert seen == [True] * 5
        await other.close()

    async def test_failing_listener_is_logged_and_affects_no_job(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        recorder = EventRecorder()

        @recorder.events.on("*")
        def bad(_event: event.Event) -> None:
            raise ValueError("a listener's own problem")

        await add(db)
        summary = await run_once({"task": nothing}, database, events=recorder.events, handle_signals=False)
        assert summary == RunSummary(1, 0)
        assert any("'job:start' failed" in record.message for record in caplog.records)

    async def test_stale_locks_are_removed_periodically(self, db: asyncpg.Connection, database: str) -> None:
        jobs = [await add(db) for _ in range(3)]
        await put_in_state(db, "stale", jobs[0]["id"])
        await put_in_state(db, "locked", jobs[1]["id"])
        await db.execute("update graphile_worker._private_jobs set run_at = '2100-01-01'")
        recorder = EventRecorder()
        async with running(
            {"task": nothing},
            database,
            recorder=recorder,
            min_reset_locked_interval=0.001,
            max_reset_locked_interval=0.002,
        ):
            await recorder.until("resetLocked:success", 2)
        assert await locked(db) == [("job", jobs[1]["id"])]
        assert recorder.counts["resetLocked:started"] >= 2
        assert 0.001 <= recorder.named("resetLocked:success")[0].delay <= 0.002

    async def test_invalid_event_names_and_listeners_are_rejected(self) -> None:
        recorder = EventRecorder()
        with pytest.raises(ConfigurationError, match=r"'job:starts'.*'job:start'\?"):
            recorder.events.on("job:starts", print)
        with pytest.raises(ConfigurationError, match="int"):
            recorder.events.on(int, print)  # type: ignore[type-var]
        with pytest.raises(ConfigurationError, match="Invalid listener 5"):
            recorder.events.on("job:start", 5)  # type: ignore[call-overload]

        async def listener(_event: event.Event) -> None: ...

        with pytest.raises(ConfigurationError, match="plain function"):
            recorder.events.on(event.Stop, listener)
        recorder.events.off("*", recorder._record)
        recorder.events.emit(event.Stop())
        assert recorder.all == []

    async def test_every_event_of_graphile_worker_exists(self) -> None:
        """NODE_EVENTS omits the events of the refetch delay, which this library does not have."""
        node_events = set(NODE_EVENTS.split())
        assert node_events - set(event.EVENTS) == set()
        additional = {
            *("job:cancelled", "job:interrupted", "job:lost", "job:snoozed"),
            *("pool:database:error", "pool:database:recovered", "pool:exchange"),
            *("pool:fenced", "pool:unfenced", "worker:recovered", "dashboard:action"),
        }
        assert set(event.EVENTS) - node_events == additional


class TestLogging:
    async def logged(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture, **options: Any
    ) -> list[logging.LogRecord]:
        caplog.set_level(logging.INFO)

        async def bad(_payload: Any) -> None:
            raise ValueError("oh no")

        await add(db, "good", payload={"secret": "hunter2"})
        await add(db, "bad", payload={"secret": "hunter2"})
        await once({"good": nothing, "bad": bad}, database, **options)
        return caplog.records

    async def test_worker_logs_its_start_and_each_job(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        records = await self.logged(db, database, caplog)
        messages = [record.message for record in records]
        assert any("Worker connected" in message and "good, bad" in message for message in messages)
        [done] = [record for record in records if record.message.startswith("Completed job")]
        [failed] = [record for record in records if "failed" in record.message]
        assert "(good, " in done.message
        assert " ms" in done.message
        assert vars(done)["task_identifier"] == "good"
        assert vars(done)["label"] == "job"
        assert failed.levelno == logging.ERROR
        assert failed.exc_info is not None
        assert failed.exc_info[0] is ValueError
        assert "hunter2" not in caplog.text

    async def test_all_records_and_events_of_a_job_have_one_worker_id(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        recorder, ids = EventRecorder(), []

        async def task(_payload: object, ctx: JobContext) -> None:
            ids.append(ctx.worker_id)
            ctx.logger.info("running")

        await add(db)
        await once({"task": task}, database, events=recorder.events)
        records = [record for record in caplog.records if hasattr(record, "job_id")]
        assert records[0].message == "running"
        ids += [vars(record)["worker_id"] for record in records]
        ids += [event.worker.worker_id for event in recorder.named("job:complete")]
        assert len(ids) == 4
        assert len(set(ids)) == 1

    async def test_traceback_of_a_task_has_no_frames_of_this_library(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        class UserMiddleware(Middleware):
            async def execute(self, _ctx: JobContext, proceed: Callable[[], Awaitable[Any]]) -> Any:
                return await proceed()

        [failed] = [
            record
            for record in await self.logged(db, database, caplog, middleware=[SlowJobs(60), UserMiddleware()])
            if "failed" in record.message
        ]
        assert failed.exc_info is not None
        steps = [step.name for step in traceback.extract_tb(failed.exc_info[2])]
        assert steps == ["execute", "bad"]

    async def test_plain_function_with_a_parameter_like_a_payload_key_is_logged(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def hello(name: str) -> None: ...

        async def fine(payload: str, ctx: JobContext) -> None: ...

        async def odd(data: object) -> None: ...

        odd.__annotations__["data"] = {"any": "annotation"}
        await once({"hello": hello, "fine": fine, "odd": odd}, database)
        assert "'hello' is a plain function" in caplog.text
        assert "'name'" in caplog.text
        assert "'fine'" not in caplog.text

    async def test_no_log_success_silences_completed_jobs(
        self,
        db: asyncpg.Connection,
        database: str,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("NO_LOG_SUCCESS", "1")
        records = await self.logged(db, database, caplog)
        assert not [record for record in records if record.message.startswith("Completed")]
        assert not [record for record in records if record.message.startswith("Worker connected")]

    async def test_completed_jobs_are_summarized_at_high_rates(
        self, database: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(job_log, "monotonic", lambda: 1.0)  # All jobs run within one second.
        caplog.set_level(logging.INFO)
        async with WorkerUtils(database) as utils:
            await utils.add_jobs([JobSpec("task")] * 500)
        assert await once({"task": nothing}, database, concurrency=10) == RunSummary(500, 0)
        lines = [record for record in caplog.records if record.message.startswith("Completed")]
        assert len(lines) == 51
        logged = sum(record.message.startswith("Completed job") for record in lines)
        more = [int(str(record.args[0])) for record in lines if "more jobs" in record.message and record.args]  # type: ignore[index]
        assert logged + sum(more) == 500, "the other jobs must be counted"

    async def test_logger_can_be_replaced(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        adapter = logging.LoggerAdapter(logging.getLogger("mine"), {"service": "shop"})
        records = await self.logged(db, database, caplog, logger=adapter)
        assert {record.name for record in records if record.message.startswith("Completed")} == {"mine"}

    async def test_graphile_logger_debug_enables_debug_logging(
        self, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        logger = logging.getLogger("graphile_worker")
        monkeypatch.setattr(logger, "level", logging.NOTSET)
        monkeypatch.setenv("GRAPHILE_LOGGER_DEBUG", "1")
        await once({"task": nothing}, database)
        assert logger.level == logging.DEBUG


class TestMigrations:
    async def migrate(self, db: asyncpg.Connection, schema: str, revision: int, *, breaking: bool) -> None:
        await db.execute(
            f"insert into {schema}.migrations (id, breaking) values ($1, $2)", revision, breaking
        )
        await db.execute("select pg_notify('worker:migrate', '{\"migrationNumber\":21,\"breaking\":true}')")

    async def test_breaking_migration_of_the_schema_stops_the_worker(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        gate, recorder = Gate(), EventRecorder()
        runner = await run(
            {"task": gate}, database, events=recorder.events, handle_signals=False, shutdown_grace=3600
        )
        job = await runner.add_job("task")
        await gate.until_started()
        await self.migrate(db, "graphile_worker", 21, breaking=True)
        await recorder.until("pool:gracefulShutdown")
        gate.open()
        with pytest.raises(SchemaTooNewError, match="revision 21"):
            await runner.wait()
        await runner.stop()
        assert await get(db, job.id) is None, "the running job must complete"

    async def test_breaking_migration_interrupts_running_jobs_after_the_grace_period(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", "graphile_worker")
        gate, recorder = Gate(), EventRecorder()
        runner = await run(
            {"task": gate}, database, events=recorder.events, handle_signals=False, shutdown_grace=0.2
        )
        job = await runner.add_job("task", queue_name="q")
        await gate.until_started()
        await self.migrate(db, "graphile_worker", 21, breaking=True)
        async with asyncio.timeout(DEADLINE):
            with pytest.raises(SchemaTooNewError, match="revision 21"):
                await runner.wait()
        assert recorder.counts["pool:forcefulShutdown"] == 1
        assert (await existing(db, job.id))["attempts"] == 0, "the attempt must be refunded"
        assert await locked(db) == []
        assert "Breaking migration: stopping; running jobs have 0.2 s" in caplog.text

    async def test_breaking_migration_is_logged_once(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        gate, recorder = Gate(), EventRecorder()
        runner = await run(
            {"task": gate}, database, events=recorder.events, handle_signals=False, shutdown_grace=3600
        )
        await runner.add_job("task")
        await gate.until_started()
        await self.migrate(db, "graphile_worker", 21, breaking=True)
        await recorder.until("pool:gracefulShutdown")
        before = recorder.counts["pool:listen:notification"]
        await self.migrate(db, "graphile_worker", 22, breaking=True)
        await recorder.until("pool:listen:notification", before + 1)
        await runner._check_revisions()  # As the notification and the next sweep make it do.
        gate.open()
        with pytest.raises(SchemaTooNewError, match="revision 21"):
            await runner.wait()
        assert [one.levelname for one in caplog.records].count("ERROR") == 1

    async def test_breaking_migration_notified_during_a_revision_check_stops_the_worker(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read, go_on = asyncio.Event(), asyncio.Event()

        async def check_slowly(*arguments: Any) -> None:
            await check_revisions(*arguments)
            read.set()
            await go_on.wait()

        monkeypatch.setattr(lifecycle, "check_revisions", check_slowly)
        recorder = EventRecorder()
        async with asyncio.timeout(DEADLINE):
            runner = await run({"task": nothing}, database, events=recorder.events, handle_signals=False)
            await read.wait()
            await self.migrate(db, "graphile_worker", 21, breaking=True)
            while not any(
                one.channel == "worker:migrate" for one in recorder.named("pool:listen:notification")
            ):
                await recorder.until(
                    "pool:listen:notification", recorder.counts["pool:listen:notification"] + 1
                )
            go_on.set()
            with pytest.raises(SchemaTooNewError, match="revision 21"):
                await runner.wait()

    async def test_other_migrations_do_not_stop_the_worker(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """Graphile Worker stops when another schema of the same database is installed."""
        recorder = EventRecorder()
        async with running({"task": nothing}, database, recorder=recorder) as runner:
            await self.migrate(db, "graphile_worker", 21, breaking=False)
            async with WorkerUtils(database, schema="another") as another:
                await another.migrate()
            await self.migrate(db, "another", 99, breaking=True)
            await runner.add_job("task")
            await recorder.until("job:complete")
            await asyncio.sleep(0.1)
            assert recorder.counts["pool:gracefulShutdown"] == 0


class TestListening:
    async def test_worker_that_lost_its_listening_connection_reconnects_and_claims_at_once(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Graphile Worker finds the missed jobs only at its next poll."""
        recorder, added = EventRecorder(), asyncio.Event()

        @asynccontextmanager
        async def listen_after_the_job(*arguments: Any) -> AsyncIterator[Listener]:
            await added.wait()
            async with listening(*arguments) as listener:
                yield listener

        async with running({"task": nothing}, database, recorder=recorder, poll_interval=3600):
            await recorder.until("worker:getJob:empty")
            monkeypatch.setattr(notifier_module, "listening", listen_after_the_job)
            client = recorder.named("pool:listen:success")[0].client
            await db.execute("select pg_terminate_backend($1)", client.get_server_pid())
            await recorder.until("pool:listen:error")
            # Without the triggers, this job causes no notification.
            await db.execute("alter table graphile_worker._private_jobs disable trigger user")
            await db.execute(
                """insert into graphile_worker._private_jobs (task_id)
                select id from graphile_worker._private_tasks"""
            )
            added.set()
            await recorder.until("pool:listen:success", 2)
            await recorder.until("job:complete")

    async def test_worker_without_notifications_logs_once_and_polls(
        self, database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(notifier_module, "_PROBE_TIMEOUT", 0.05)
        monkeypatch.setattr(notifier_module, "_SILENT_INTERVAL", 0.05)
        monkeypatch.setattr(notifier_module, "listening", listen_to_nothing)
        recorder = EventRecorder()
        async with running({"task": nothing}, database, recorder=recorder, poll_interval=0.1) as runner:
            await recorder.until("pool:listen:error", 3)
            await runner.add_job("task")
            await recorder.until("job:complete")
        warnings = [record for record in caplog.records if "listen_dsn" in record.message]
        assert len(warnings) == 1

    async def test_listen_dsn_is_used_for_notifications(self, database: str) -> None:
        recorder = EventRecorder()
        async with running(
            {"task": nothing}, database, recorder=recorder, listen_dsn=database, poll_interval=3600
        ) as runner:
            await recorder.until("worker:getJob:empty")
            await runner.add_job("task")
            await recorder.until("job:complete")


def listen_to_nothing(pool: Pool, channels: Sequence[str], recorder: Callable[[str, str], None]) -> Any:
    """Listen to a channel on which no notification ever arrives, like a pooler does."""
    assert channels, recorder
    return listening(pool, ["unused channel"], recorder)


class TestThreads:
    async def test_idle_threads_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from graphile_worker._worker.execution import threads  # noqa: PLC0415

        monkeypatch.setattr(threads, "_MAX_IDLE", 0.02)
        pool = threads.Threads()

        def task_threads() -> list[str]:
            return [thread.name for thread in threading.enumerate() if "graphile-worker task" in thread.name]

        async def have_ended() -> bool:
            return not task_threads()

        await until(have_ended, "the threads of other tests end")
        seen: list[int] = []
        # Counted while all threads are busy, because each may end at any time after that.
        barrier = threading.Barrier(4, lambda: seen.append(len(task_threads())), timeout=20)
        for n in range(1, 6):
            results = await asyncio.gather(
                *(pool.run(contextvars.copy_context(), barrier.wait) for _ in range(4))
            )
            assert [error for _, error in results] == [None] * 4
            assert seen == [4] * n
            await until(have_ended, "the threads end")
