"""A worker claims jobs, runs them, and records what became of them."""

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
    Drained,
    Events,
    InvalidJobError,
    Job,
    JobContext,
    JobSpec,
    Middleware,
    SchemaMissingError,
    SchemaTooNewError,
    WorkerUtils,
    run,
    run_once,
)
from graphile_worker import events as event
from graphile_worker._db.connect import Pool
from graphile_worker._db.listen import Ear, listening
from graphile_worker._db.migrate import check_revisions
from graphile_worker._runtime import job_log, lifecycle
from graphile_worker._runtime import notifier as notifier_module
from graphile_worker.middleware import SlowJobs
from support.jobs import add, bring_to, count, existing, get, one
from support.waiting import until
from support.workers import DEADLINE, Gate, Heard, locked, nothing, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

THEIR_EVENTS = """pool:create pool:listen:connecting pool:listen:success pool:listen:error
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
    async def test_all_that_can_run_runs_and_what_cannot_stays(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        runnable = [await add(db, task, payload=n) for n, task in enumerate(("a", "b", "c"))]
        stays = [await add(db, "a") for _ in range(3)]
        await bring_to(db, "locked", stays[0]["id"])
        await bring_to(db, "failed", stays[1]["id"])
        await bring_to(db, "retrying", stays[2]["id"])
        stays += [await add(db, "a", run_at=datetime(2100, 1, 1, tzinfo=UTC)), await add(db, "unknown")]
        runnable += [await add(db, task, payload=n) for n, task in enumerate(("c", "b", "a"), 3)]
        ran: list[int] = []

        drained = await once(dict.fromkeys("abc", ran.append), database)

        assert drained == Drained(done=6, failed=0)
        assert ran == [0, 1, 2, 3, 4, 5]
        left = await db.fetch("select id from graphile_worker._private_jobs order by id")
        assert [row["id"] for row in left] == [job["id"] for job in stays]

    async def test_jobs_that_jobs_add_run_too(self, db: asyncpg.Connection, database: str) -> None:
        async def countdown(n: int, ctx: JobContext) -> None:
            if n:
                await ctx.add_job("countdown", n - 1, queue_name="q")

        await add(db, "countdown", payload=5)
        assert await once({"countdown": countdown}, database) == Drained(6, 0)

    async def test_a_failed_job_is_counted_and_does_not_raise(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        job = await add(db)

        def task(_payload: object) -> None:
            raise ValueError("not today")

        assert await once({"task": task}, database) == Drained(0, 1)
        row = await existing(db, job["id"])
        assert (row["attempts"], row["last_error"], row["locked_at"]) == (1, "not today", None)

    async def test_one_slot_drains_a_serial_queue_in_order(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        for n in range(10):
            await add(db, payload=n, queue_name="q")
        ran: list[int] = []
        assert await once({"task": ran.append}, database) == Drained(10, 0)
        assert ran == list(range(10))
        assert await locked(db) == []

    async def test_it_installs_the_schema_unless_told_not_to(self, empty_database: str) -> None:
        with pytest.raises(SchemaMissingError):
            await once({"task": nothing}, empty_database, migrate=False)
        assert await once({"task": nothing}, empty_database) == Drained(0, 0)

    async def test_stale_locks_are_freed_first(self, db: asyncpg.Connection, database: str) -> None:
        job = await add(db, queue_name="q")
        await bring_to(db, "stale", job["id"])
        assert await once({"task": nothing}, database) == Drained(1, 0)
        assert await locked(db) == []

    async def test_a_pool_of_the_callers_is_used_and_stays_open(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await add(db)
        async with asyncpg.create_pool(database, min_size=0, max_size=3) as pool:
            assert await run_once({"task": nothing}, pool=pool, handle_signals=False) == Drained(1, 0)
            assert await pool.fetchval("select 1") == 1

    async def test_cancelling_it_interrupts_what_runs(self, db: asyncpg.Connection, database: str) -> None:
        job = await add(db)
        gate = Gate()
        draining = asyncio.create_task(once({"task": gate}, database, shutdown_grace=0))
        await gate.until_begun()
        draining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await draining
        assert (await existing(db, job["id"]))["attempts"] == 0
        assert await locked(db) == []


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"tasks": {}}, "no tasks"),
            ({"tasks": [nothing]}, "tasks is a list; it must be a mapping"),
            ({"tasks": {"a": generator}}, "yields"),
            ({"tasks": {"a": 5}}, "'a' is 5, which is no function"),
            ({"tasks": {"a": lambda: None}}, r"\(payload\) or \(payload, ctx\)"),
            ({"tasks": {"a": lambda _a, _b, _c: None}}, r"\(payload\) or \(payload, ctx\)"),
            ({"concurrency": 0}, "concurrency is 0"),
            ({"concurrency": True}, "concurrency is True"),
            ({"prefetch": -1}, "prefetch is -1"),
            ({"poll_interval": 0}, "poll_interval is 0; .* more than 0"),
            ({"poll_interval": timedelta(seconds=-1)}, "poll_interval"),
            ({"shutdown_grace": float("nan")}, "shutdown_grace is nan"),
            ({"listen": False, "listen_dsn": "postgresql://x"}, "not both"),
            ({"forbidden_flags": "x"}, "forbidden_flags is 'x'"),
            ({"forbidden_flags": [1]}, r"forbidden_flags is \[1\]"),
            ({"max_pool_size": 0}, "max_pool_size is 0"),
            ({"events": object()}, "events= takes an Events"),
            ({"listen": "no"}, "listen is 'no'; it must be True or False"),
            ({"logger": 1}, "logger= takes a logger"),
            ({"pool": object()}, "pool= takes a pool of asyncpg's"),
            ({"min_reset_locked_interval": 5, "max_reset_locked_interval": 4}, "is longer than"),
        ],
    )
    async def test_a_wrong_one_is_refused_in_one_sentence(
        self, arguments: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigurationError, match=message):
            await run(**{"tasks": {"task": nothing}, **arguments})

    async def test_a_task_needs_a_name_that_can_be_stored(self) -> None:
        for name in ("", "x" * 129):
            with pytest.raises(InvalidJobError, match="identifier"):
                await run({name: nothing})

    async def test_dsn_or_pool_but_not_both(self, database: str) -> None:
        async with asyncpg.create_pool(database, min_size=0) as pool:
            with pytest.raises(ConfigurationError, match="not both"):
                await run({"task": nothing}, database, pool=pool)

    async def test_a_pool_that_is_too_small_is_refused(self, database: str) -> None:
        async with asyncpg.create_pool(database, min_size=0, max_size=3) as pool:
            with pytest.raises(ConfigurationError, match="give it at least 4"):
                await run({"task": nothing}, pool=pool)

    async def test_the_environment_can_name_the_database(
        self, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DATABASE_URL", database)
        assert await once({"task": nothing}) == Drained(0, 0)

    async def test_no_database_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in os.environ if name.startswith("PG")] + ["DATABASE_URL"]:
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(ConfigurationError, match="DATABASE_URL"):
            await once({"task": nothing})

    async def test_a_database_that_cannot_be_reached_is_one_sentence(self) -> None:
        with pytest.raises(DatabaseError, match="Cannot reach the database") as raised:
            await run({"task": nothing}, "postgresql://nobody@127.0.0.1:1/nothing")
        assert "\n" not in str(raised.value)

    async def test_a_role_without_rights_is_told_so(self, db: asyncpg.Connection, database: str) -> None:
        await db.execute("create role gw_nobody login")
        try:
            dsn = database.replace("postgres@", "gw_nobody@")
            with pytest.raises(DatabaseError, match="Permission denied"):
                await run({"task": nothing}, dsn, migrate=False)
        finally:
            await db.execute("drop role gw_nobody")


class TestRunning:
    async def test_a_job_starts_as_soon_as_it_is_added(self, database: str) -> None:
        """With a poll interval that nobody would wait for."""
        heard = Heard()
        async with running({"task": nothing}, database, heard=heard, poll_interval=3600) as runner:
            await heard.until("worker:getJob:empty")
            job = await runner.add_job("task")
            assert (await heard.until("job:complete")).job.id == job.id

    async def test_a_future_job_starts_when_it_is_due(self, database: str) -> None:
        started: list[datetime] = []
        heard = Heard()

        async def task(_payload: object, ctx: JobContext) -> None:
            # Not ctx.now(), which is late by as long as the answer was that brought the database's time.
            started.append((await ctx.query("select clock_timestamp()"))[0][0])

        async with running({"task": task}, database, heard=heard, poll_interval=3600) as runner:
            for delay in (0.3, 0.6):
                await runner.add_job("task", run_at=timedelta(seconds=delay), queue_name="q")
            await heard.until("job:complete", 2)
        due = [event.job.run_at for event in heard.named("job:complete")]
        late = [(start - at).total_seconds() for start, at in zip(started, due, strict=True)]
        assert all(0 <= delay < DEADLINE for delay in late), "by a timer, and not by polling"

    async def test_the_serial_queue_runs_at_the_speed_of_its_jobs(self, database: str) -> None:
        """Graphile Worker waits a poll interval between the jobs of a queue."""
        heard = Heard()
        async with running(
            {"task": nothing}, database, heard=heard, poll_interval=3600, concurrency=4
        ) as runner:
            await runner.utils.add_jobs(JobSpec("task", queue_name="q") for _ in range(12))
            await heard.until("job:complete", 12)

    async def test_jobs_of_a_queue_never_overlap_and_others_run_beside_them(self, database: str) -> None:
        heard, gate = Heard(), Gate()
        async with running({"task": gate}, database, heard=heard, concurrency=5) as runner:
            await runner.utils.add_jobs(JobSpec("task", n, queue_name="q") for n in range(3))
            await runner.utils.add_jobs(JobSpec("task", n) for n in range(10, 13))
            await gate.until_begun(4)
            assert gate.begun == [0, 10, 11, 12]
            gate.open()
            await heard.until("job:complete", 6)
        assert [n for n in gate.begun if n < 10] == [0, 1, 2]

    async def test_no_more_jobs_run_than_there_are_slots(self, database: str) -> None:
        heard, gate = Heard(), Gate()
        async with running({"task": gate}, database, heard=heard, concurrency=3) as runner:
            await runner.utils.add_jobs(JobSpec("task", n) for n in range(8))
            await gate.until_begun(3)
            await asyncio.sleep(0.05)
            assert len(gate.begun) == 3
            gate.open()
            await heard.until("job:complete", 8)

    async def test_polling_alone_is_enough(self, db: asyncpg.Connection, database: str) -> None:
        heard = Heard()
        async with running({"task": nothing}, database, heard=heard, listen=False, poll_interval=0.05):
            await heard.until("worker:getJob:empty")
            await db.execute("select graphile_worker.add_job('task')")
            await heard.until("job:complete")
        assert heard.counts["pool:listen:connecting"] == 0

    async def test_one_question_asks_for_all_slots(self, database: str) -> None:
        """Graphile Worker polls once for each slot."""
        heard = Heard()
        async with running(
            {"task": nothing}, database, heard=heard, concurrency=50, listen=False, poll_interval=3600
        ):
            await heard.until("worker:getJob:empty")
            await asyncio.sleep(0.1)
        assert heard.counts["worker:getJob:start"] == 1

    async def test_polls_are_not_all_at_the_same_time(self) -> None:
        from graphile_worker._runtime.looks import Looks  # noqa: PLC0415

        delays = {round(Looks(2.0).poll_delay(), 6) for _ in range(50)}
        assert len(delays) > 40
        assert 1.6 <= min(delays) < max(delays) <= 2.4

    async def test_a_task_that_holds_all_connections_does_not_starve_the_worker(self, database: str) -> None:
        heard, release = Heard(), asyncio.Event()

        async def hog(_payload: object, ctx: JobContext) -> None:
            async with ctx.connection():
                await release.wait()

        tasks: dict[str, Callable[..., Any]] = {"hog": hog, "task": nothing}
        async with running(tasks, database, heard=heard, concurrency=4, max_pool_size=2) as runner:
            async with WorkerUtils(database) as utils:
                await utils.add_jobs([JobSpec("hog")] * 2)
                await heard.until("job:start", 2)
                await utils.add_job("task")
            await heard.until("job:complete")
            release.set()
            await heard.until("job:complete", 3)
            assert (await runner.utils.stats()).total == 0

    async def test_so_with_a_pool_of_the_callers(self, database: str) -> None:
        heard, release = Heard(), asyncio.Event()

        async def hog(_payload: object, ctx: JobContext) -> None:
            async with ctx.connection():
                await release.wait()

        async with (
            asyncpg.create_pool(database, min_size=0, max_size=4) as pool,
            WorkerUtils(database) as utils,
            running({"hog": hog, "task": nothing}, None, pool=pool, heard=heard, concurrency=4),
        ):
            await utils.add_jobs([JobSpec("hog")] * 2)
            await heard.until("job:start", 2)
            await utils.add_job("task")
            await heard.until("job:complete")
            release.set()
            await heard.until("job:complete", 3)

    async def test_a_thousand_jobs_at_once_need_a_handful_of_connections(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        heard, gate = Heard(), Gate()
        async with running({"task": gate}, database, heard=heard, concurrency=1000) as runner:
            await runner.utils.add_jobs(JobSpec("task") for _ in range(1000))
            await gate.until_begun(1000)
            used = "select count(*) from pg_stat_activity where application_name = 'graphile-worker'"
            assert await db.fetchval(used) <= 8
            gate.open()
            await heard.until("job:complete", 1000)

    async def test_it_works_in_a_thread_beside_something_else(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        job = await add(db)

        def serve() -> None:
            async def main() -> None:
                heard = Heard()
                async with running({"task": nothing}, database, heard=heard, handle_signals=True):
                    await heard.until("job:complete")

            asyncio.run(main())

        await asyncio.to_thread(serve)
        assert await get(db, job["id"]) is None

    async def test_time_can_be_that_of_this_machine(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from graphile_worker._runtime import clock  # noqa: PLC0415

        shift = timedelta(hours=-1)

        class Shifted(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
                return datetime.now(tz) + shift

        monkeypatch.setattr(clock, "datetime", Shifted)
        await add(db, run_at=datetime.now(UTC) - timedelta(minutes=30))
        assert await once({"task": nothing}, database, use_local_time=True) == Drained(0, 0)
        shift = timedelta(0)
        assert await once({"task": nothing}, database, use_local_time=True) == Drained(1, 0)

    async def test_and_is_that_of_the_database_otherwise(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from graphile_worker._runtime import clock  # noqa: PLC0415

        class Shifted(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
                return datetime.now(tz) - timedelta(hours=1)

        monkeypatch.setattr(clock, "datetime", Shifted)
        await add(db, run_at=datetime.now(UTC) - timedelta(minutes=30))
        assert await once({"task": nothing}, database) == Drained(1, 0)

    async def test_a_task_that_a_cleanup_removed_is_found_again(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from graphile_worker._runtime import worker  # noqa: PLC0415

        monkeypatch.setattr(worker, "_HOUSEKEEPING", 0.05)
        heard = Heard()
        async with running({"task": nothing}, database, heard=heard, poll_interval=0.1):
            await db.execute("delete from graphile_worker._private_tasks")
            await db.execute("select graphile_worker.add_job('task')")
            await heard.until("job:complete")


class TestTasks:
    async def call(self, db: asyncpg.Connection, database: str, task: Callable[..., Any]) -> Drained:
        await add(db, payload={"a": 1})
        return await once({"task": task}, database)

    async def test_every_kind_of_function_is_called_with_the_payload(
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
            assert await self.call(db, database, task) == Drained(1, 0)
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

    async def test_a_plain_function_runs_on_a_thread_and_an_async_one_on_the_loop(
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

    async def test_threads_run_at_once_as_many_as_there_are_slots(self, database: str) -> None:
        barrier = threading.Barrier(8, timeout=20)
        heard = Heard()
        async with running(
            {"task": lambda _: barrier.wait()}, database, heard=heard, concurrency=8
        ) as runner:
            await runner.utils.add_jobs([JobSpec("task")] * 8)
            await heard.until("job:complete", 8)
        assert heard.counts["job:success"] == 8

    async def test_context_variables_of_the_caller_are_seen_and_not_changed(
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
    async def test_whatever_it_raises_fails_that_job_alone(
        self, db: asyncpg.Connection, database: str, error: BaseException, text: str, is_async: bool
    ) -> None:
        def plain(_payload: Any) -> None:
            raise error

        async def asynchronous(_payload: Any) -> None:
            raise error

        job = await add(db, "bad")
        await add(db, "good")
        tasks = {"bad": asynchronous if is_async else plain, "good": nothing}
        assert await once(tasks, database) == Drained(1, 1)
        assert (await existing(db, job["id"]))["last_error"] in text.split("|")

    async def test_a_payload_that_cannot_be_read_fails_that_job_alone(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await db.execute("select graphile_worker.add_job('task', ('[' || repeat('9', 5000) || ']')::json)")
        await add(db)
        assert await once({"task": nothing}, database) == Drained(1, 1)
        assert "payload cannot be decoded" in await db.fetchval(
            "select last_error from graphile_worker._private_jobs"
        )


class TestContext:
    async def test_it_knows_and_does_what_it_should(self, db: asyncpg.Connection, database: str) -> None:
        seen: dict[str, Any] = {}

        async def task(_payload: Any, ctx: JobContext) -> None:
            row = await one(db, "select * from graphile_worker._private_jobs")
            seen.update(
                job=(ctx.job.id, ctx.job.attempts, ctx.job.locked_by),
                row=(row["id"], row["attempts"], row["locked_by"]),
                worker=ctx.worker_id,
                queue=ctx.queue_name,
                schema=ctx.schema,
                stopping=bool(ctx.stopping),
                skew=abs((ctx.now() - datetime.now(UTC)).total_seconds()) < 60,
                query=[tuple(row) for row in await ctx.query("select 1 + $1::int", 2)],
            )
            async with ctx.connection() as connection, connection.transaction():
                await ctx.add_job("other", connection=connection, job_key="k")
            await ctx.add_jobs([JobSpec("other")] * 2)
            seen["stats"] = (await ctx.utils.stats()).tasks["other"].ready
            assert repr(ctx) == f"JobContext(job={ctx.job.id}, task='task')"

        job = await add(db, queue_name="q")
        assert await once({"task": task}, database) == Drained(1, 0)
        assert seen.pop("worker") == seen["job"][2]
        assert seen["job"][2].startswith("python-")
        assert seen == {
            "job": (job["id"], 1, seen["job"][2]),
            "row": (job["id"], 1, seen["job"][2]),
            "queue": "q",
            "schema": "graphile_worker",
            "stopping": False,
            "skew": True,
            "query": [(3,)],
            "stats": 3,
        }

    async def test_a_plain_function_can_wait_for_what_is_awaitable(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        def task(_payload: Any, ctx: JobContext) -> None:
            job: Job = ctx.blocking(ctx.add_job("next", {"from": ctx.job.id}))
            assert job.task_identifier == "next"

        job = await add(db)
        assert await once({"task": task}, database) == Drained(1, 0)
        assert await db.fetchval("select payload->>'from' from graphile_worker._private_jobs") == str(
            job["id"]
        )

    async def test_a_connection_comes_back_clean(self, db: asyncpg.Connection, database: str) -> None:
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

    async def test_its_logger_names_the_job_and_takes_more(
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
    async def test_jobs_with_a_forbidden_flag_are_left_alone(
        self, db: asyncpg.Connection, database: str, form: str
    ) -> None:
        flagged = await add(db, flags=["a", "b"])
        await add(db, flags=["c"])
        await add(db)
        drained = await once({"task": nothing}, database, forbidden_flags=self.option(form, ["b", "z"]))
        assert drained == Drained(2, 0)
        assert (await existing(db, flagged["id"]))["attempts"] == 0

    @forms
    @pytest.mark.parametrize("value", [None, [], ["nobody has this"]])
    async def test_otherwise_all_run(
        self, db: asyncpg.Connection, database: str, form: str, value: Any
    ) -> None:
        await add(db, flags=["a"])
        await add(db)
        option = self.option(form, value)
        assert await once({"task": nothing}, database, forbidden_flags=option) == Drained(2, 0)

    async def test_a_function_is_asked_for_every_claim(self, db: asyncpg.Connection, database: str) -> None:
        forbidden = ["a"]
        heard = Heard()
        async with running(
            {"task": nothing}, database, heard=heard, forbidden_flags=lambda: forbidden, poll_interval=0.05
        ) as runner:
            await runner.add_job("task", flags=["a"])
            await runner.add_job("task")
            await heard.until("job:complete")
            assert await count(db) == 1
            forbidden.clear()
            await heard.until("job:complete", 2)

    @pytest.mark.parametrize("form", ["function", "async function"])
    async def test_while_it_raises_nothing_runs_and_then_everything(
        self, database: str, form: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        broken, asked, heard = True, 0, Heard()

        def flags() -> list[str]:
            nonlocal asked
            asked += 1
            if broken:
                raise ValueError("redis is down")
            return []

        async def asynchronous() -> list[str]:
            return flags()

        option = flags if form == "function" else asynchronous
        async with running(
            {"task": nothing}, database, heard=heard, forbidden_flags=option, poll_interval=0.02
        ) as runner:
            await runner.add_job("task", flags=["x"])

            async def asked_often() -> bool:
                return asked > 5

            await until(asked_often, "the function was asked again")
            assert heard.counts["job:start"] == 0
            broken = False
            await heard.until("job:complete")
        warnings = [record for record in caplog.records if "forbidden_flags failed" in record.message]
        assert len(warnings) == 1

    async def test_in_run_once_it_is_an_error(self, db: asyncpg.Connection, database: str) -> None:
        def flags() -> list[str]:
            raise ValueError("redis is down")

        await add(db)
        with pytest.raises(ConfigurationError, match="redis is down"):
            await once({"task": nothing}, database, forbidden_flags=flags)
        assert await locked(db) == []

    async def test_a_slow_answer_holds_up_no_result(self, database: str) -> None:
        answer: asyncio.Future[list[str]] | None = None
        heard, gate, asked = Heard(), Gate(), asyncio.Event()

        async def flags() -> list[str]:
            if answer is None:
                return []
            asked.set()
            return await answer

        async with running(
            {"gate": gate, "task": nothing}, database, heard=heard, forbidden_flags=flags, concurrency=2,
            poll_interval=0.05, listen=False,
        ) as runner:  # fmt: skip
            await runner.add_job("gate")
            await gate.until_begun()
            answer = asyncio.get_running_loop().create_future()
            await asked.wait()
            await runner.add_job("task")
            gate.open()
            await heard.until("job:complete")
            assert heard.counts["job:start"] == 1
            answer.set_result([])
            await heard.until("job:complete", 2)

    async def test_nothing_is_claimed_ahead_of_an_answer(self, db: asyncpg.Connection, database: str) -> None:
        """Graphile Worker locks what it may not run, until its time to live is over."""
        heard, gate = Heard(), Gate()
        async with running(
            {"task": gate}, database, heard=heard, forbidden_flags=lambda: ["a"], prefetch=50
        ) as runner:
            await runner.utils.add_jobs([JobSpec("task")] * 5 + [JobSpec("task", flags=["a"])] * 5)
            await gate.until_begun()
            await heard.until("worker:getJob:start", 1)
            assert await db.fetchval("select count(locked_at) from graphile_worker._private_jobs") == 1
            gate.open()
            await heard.until("job:complete", 5)
            await runner.utils.add_job("task")
            await heard.until("job:complete", 6)


class TestPrefetch:
    async def test_jobs_are_claimed_beyond_the_free_slots(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        heard, gate = Heard(), Gate()
        async with running({"task": gate}, database, heard=heard, prefetch=5, concurrency=2) as runner:
            await runner.utils.add_jobs(JobSpec("task", n) for n in range(20))
            await gate.until_begun(2)
            assert await db.fetchval("select count(locked_at) from graphile_worker._private_jobs") == 7
            gate.open()
            await heard.until("job:complete", 20)
        assert gate.begun == list(range(20))
        assert heard.counts["localQueue:init"] == 1
        assert sum(len(found.jobs) for found in heard.named("localQueue:getJobs:complete")) == 20

    async def test_a_single_new_job_starts_at_once(self, database: str) -> None:
        """Graphile Worker lets it wait for the poll interval."""
        heard = Heard()
        async with running(
            {"task": nothing}, database, heard=heard, prefetch=10, poll_interval=3600
        ) as runner:
            await heard.until("worker:getJob:empty")
            for n in range(3):
                await runner.add_job("task")
                await heard.until("job:complete", n + 1)

    async def test_a_slot_works_through_a_serial_queue_in_order(self, database: str) -> None:
        """Graphile Worker fetches one job of a queue each poll interval."""
        heard, ran = Heard(), dict[str, list[int]](a=[], b=[], c=[])

        at_work: set[str] = set()

        async def task(payload: list[Any]) -> None:
            name, n = payload
            assert name not in at_work, "two at once"
            at_work.add(name)
            await asyncio.sleep(0.001)
            at_work.remove(name)
            ran[name].append(n)

        async with running(
            {"task": task}, database, heard=heard, prefetch=50, concurrency=4, poll_interval=3600
        ) as runner:
            await runner.utils.add_jobs(
                JobSpec("task", [name, n], queue_name=name) for n in range(40) for name in "abc"
            )
            await heard.until("job:complete", 120)
        assert ran == {name: list(range(40)) for name in "abc"}

    async def test_what_no_slot_took_in_time_is_given_back(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        heard, gate = Heard(), Gate()
        async with running({"task": gate}, database, heard=heard, prefetch=3, prefetch_ttl=0.1) as runner:
            await runner.utils.add_jobs(
                JobSpec("task", n, queue_name="q" if n < 2 else None) for n in range(4)
            )
            await gate.until_begun()
            returned = await heard.until("localQueue:returnJobs")
            assert len(returned.jobs) == 3
            held = "select count(locked_at) from graphile_worker._private_jobs"

            async def one_is_held() -> bool:
                return bool(await db.fetchval(held) == 1)

            await until(one_is_held, "the others are given back")
            assert await db.fetchval("select sum(attempts) from graphile_worker._private_jobs") == 1
            assert [kind for kind, _ in await locked(db)] == ["job", "queue"]
            gate.open()
            await heard.until("job:complete", 4)
        assert heard.named("localQueue:setMode")[0].new_mode == "TTL_EXPIRED"


class TestOtherPeople:
    async def test_a_transaction_on_a_running_jobs_key_delays_that_job_and_nothing_else(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        heard, gate = Heard(), Gate()
        async with running({"gate": gate, "task": nothing}, database, heard=heard, concurrency=2) as runner:
            job = await runner.add_job("gate", job_key="k", queue_name="q")
            await gate.until_begun()
            await db.execute("begin")
            await add(db, "gate", job_key="k", queue_name="q", run_at=datetime(2100, 1, 1, tzinfo=UTC))
            gate.open()
            await heard.until("job:success")
            async with WorkerUtils(database) as utils:
                await utils.add_jobs([JobSpec("task")] * 5)
            await heard.until("job:complete", 5)
            assert job.id not in [done.job.id for done in heard.named("job:complete")]
            await db.execute("commit")
            assert (await heard.until("job:complete", 6)).job.id == job.id
        assert heard.counts["job:lost"] == 0
        assert await get(db, job.id) is None
        assert await locked(db) == []

    async def test_a_superseded_job_completes_and_the_new_one_runs(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        heard, gate = Heard(), Gate()
        async with running({"task": gate}, database, heard=heard, concurrency=2) as runner:
            first = await runner.add_job("task", 1, job_key="k")
            await gate.until_begun()
            second = await runner.add_job("task", 2, job_key="k")
            assert second.id != first.id
            await gate.until_begun(2)
            gate.open()
            await heard.until("job:complete", 2)
        assert await count(db) == 0

    async def test_a_job_that_somebody_freed_is_reported_and_its_new_run_is_not_deleted(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Graphile Worker deletes it by its id, whoever runs it now."""
        heard, gate = Heard(), Gate()
        async with running({"task": gate}, database, heard=heard) as runner:
            job = await runner.add_job("task")
            await gate.until_begun()
            await runner.utils.force_unlock_workers([runner.id])
            await db.execute("update graphile_worker._private_jobs set locked_by = 'x', locked_at = now()")
            gate.open()
            lost = await heard.until("job:lost")
        assert lost.job.id == job.id
        assert heard.counts["job:complete"] == 0
        assert (await existing(db, job.id))["locked_by"] == "x"
        assert any("was not ours any more" in record.message for record in caplog.records)


class TestRetries:
    async def test_a_failed_job_is_tried_again_and_its_row_says_why(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        job = await add(db, queue_name="q", max_attempts=2)
        tries: list[int] = []

        def task(_payload: Any, ctx: JobContext) -> None:
            tries.append(ctx.job.attempts)
            raise ValueError(f"try {ctx.job.attempts}")

        heard = Heard()
        for attempt, delay in ((1, 2.718), (2, 7.389)):
            before = datetime.now(UTC)
            await run_once({"task": task}, database, events=heard.events, handle_signals=False)
            row = await existing(db, job["id"])
            assert (row["attempts"], row["last_error"]) == (attempt, f"try {attempt}")
            assert before <= row["run_at"] - timedelta(seconds=delay) <= datetime.now(UTC)
            await db.execute("update graphile_worker._private_jobs set run_at = run_at + interval '1 hour'")
            assert await once({"task": task}, database) == Drained(0, 0)
            await db.execute("update graphile_worker._private_jobs set run_at = now()")
        assert tries == [1, 2]
        assert heard.counts["job:error"] == 2
        assert heard.counts["job:failed"] == 1
        assert await locked(db) == []


class TestEvents:
    async def test_a_worker_that_cannot_be_made_leaves_no_listener(self, database: str) -> None:
        events = Events()
        with pytest.raises(ConfigurationError):
            await run({"task": nothing}, database, events=events, health="nowhere", handle_signals=False)
        assert not any(events._listeners.values())

    async def test_their_order_for_one_job(self, database: str) -> None:
        heard = Heard()
        async with running({"task": nothing, "bad": len}, database, heard=heard) as runner:
            for n, task in enumerate(("task", "bad")):
                await runner.add_job(task, 5, max_attempts=1)
                await heard.until("job:complete", n + 1)
        names = [name for name in heard.names if name.startswith("job:")]
        assert names == [
            *("job:start", "job:success", "job:complete"),
            *("job:start", "job:error", "job:failed", "job:complete"),
        ]
        assert heard.names.index("worker:getJob:start") < heard.names.index("job:start")
        failure = heard.named("job:failed")[0]
        assert isinstance(failure.error, TypeError)
        assert heard.named("job:complete")[1].error is failure.error

    async def test_all_that_a_worker_tells_from_start_to_stop(self, database: str) -> None:
        heard = Heard()
        async with running({"task": nothing}, database, heard=heard, concurrency=3) as runner:
            assert heard.counts["pool:create"] == 1
            assert heard.counts["pool:listen:connecting"] == 1
            assert heard.counts["pool:listen:success"] == 1
            assert heard.counts["worker:create"] == 3
            for n in range(5):
                await runner.add_job("task", queue_name="q")
                await heard.until("job:complete", n + 1)
                assert heard.counts["job:start"] == heard.counts["job:success"] == n + 1
            assert not {"stop", "worker:release", "worker:stop", "pool:release"} & set(heard.names)
            notification = heard.named("pool:listen:notification")[-1]
            assert notification.channel in {"jobs:insert", f"graphile-worker:{runner.id}"}
        await runner.wait()
        assert heard.counts["stop"] == 1
        assert heard.counts["worker:release"] == heard.counts["worker:stop"] == 3
        assert heard.counts["pool:gracefulShutdown"] == heard.counts["pool:gracefulShutdown:complete"] == 1
        assert heard.counts["pool:listen:release"] == 1
        assert heard.names[-1] == "pool:release"
        pool = heard.all[0].worker_pool  # type: ignore[attr-defined]
        assert pool == event.WorkerPool(runner.id, "graphile_worker", 3, ("task",))
        workers = {found.worker.id for found in heard.named("worker:create")}
        assert {started.worker.id for started in heard.named("job:start")} <= workers

    async def test_a_job_is_complete_only_when_it_is_recorded(self, database: str) -> None:
        """Graphile Worker says so before it has told the database."""
        seen: list[bool] = []
        heard = Heard()
        other = await asyncpg.connect(database)
        looking: list[asyncio.Task[Any]] = []

        async def look(job_id: int) -> None:
            seen.append(await get(other, job_id) is None)

        @heard.events.on("job:complete")
        def complete(done: event.JobComplete) -> None:
            looking.append(asyncio.create_task(look(done.job.id)))

        async with running({"task": nothing}, database, heard=heard) as runner:
            for n in range(5):
                await runner.add_job("task")
                await heard.until("job:complete", n + 1)
                await looking[n]
        assert seen == [True] * 5
        await other.close()

    async def test_a_listener_that_raises_is_logged_and_harms_nobody(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        heard = Heard()

        @heard.events.on("*")
        def bad(_event: event.Event) -> None:
            raise ValueError("a listener's own problem")

        await add(db)
        drained = await run_once({"task": nothing}, database, events=heard.events, handle_signals=False)
        assert drained == Drained(1, 0)
        assert any("A listener of 'job:start' failed" in record.message for record in caplog.records)

    async def test_stale_locks_are_freed_now_and_then(self, db: asyncpg.Connection, database: str) -> None:
        jobs = [await add(db) for _ in range(3)]
        await bring_to(db, "stale", jobs[0]["id"])
        await bring_to(db, "locked", jobs[1]["id"])
        await db.execute("update graphile_worker._private_jobs set run_at = '2100-01-01'")
        heard = Heard()
        async with running(
            {"task": nothing},
            database,
            heard=heard,
            min_reset_locked_interval=0.001,
            max_reset_locked_interval=0.002,
        ):
            await heard.until("resetLocked:success", 2)
        assert await locked(db) == [("job", jobs[1]["id"])]
        assert heard.counts["resetLocked:started"] >= 2
        assert 0.001 <= heard.named("resetLocked:success")[0].delay <= 0.002

    async def test_names_and_listeners_are_checked(self) -> None:
        heard = Heard()
        with pytest.raises(ConfigurationError, match=r"no event 'job:starts'. Did you mean 'job:start'\?"):
            heard.events.on("job:starts", print)
        with pytest.raises(ConfigurationError, match="no event"):
            heard.events.on(int, print)  # type: ignore[type-var]
        with pytest.raises(ConfigurationError, match="A listener is a function, not 5"):
            heard.events.on("job:start", 5)  # type: ignore[call-overload]

        async def listener(_event: event.Event) -> None: ...

        with pytest.raises(ConfigurationError, match="plain function"):
            heard.events.on(event.Stop, listener)
        heard.events.off("*", heard._hear)
        heard.events.emit(event.Stop())
        assert heard.all == []

    async def test_every_event_of_graphile_worker_exists(self) -> None:
        """But for those of the delay that we do not have."""
        theirs = THEIR_EVENTS.split()
        assert set(theirs) - set(event.EVENTS) == set()
        ours = {
            *("job:cancelled", "job:interrupted", "job:lost", "job:snoozed"),
            *("pool:fenced", "pool:unfenced", "worker:recovered"),
        }
        assert set(event.EVENTS) - set(theirs) == ours


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

    async def test_a_line_at_the_start_and_one_for_each_job(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        records = await self.logged(db, database, caplog)
        messages = [record.message for record in records]
        assert any("Worker connected, and looking for jobs of: good, bad" in message for message in messages)
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
        heard, ids = Heard(), []

        async def task(_payload: object, ctx: JobContext) -> None:
            ids.append(ctx.worker_id)
            ctx.logger.info("it runs")

        await add(db)
        await once({"task": task}, database, events=heard.events)
        records = [record for record in caplog.records if hasattr(record, "job_id")]
        assert records[0].message == "it runs"
        ids += [vars(record)["worker_id"] for record in records]
        ids += [event.worker.worker_id for event in heard.named("job:complete")]
        assert len(ids) == 4
        assert len(set(ids)) == 1

    async def test_a_traceback_has_no_steps_of_this_library(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Theirs(Middleware):
            async def execute(self, _ctx: JobContext, proceed: Callable[[], Awaitable[Any]]) -> Any:
                return await proceed()

        [failed] = [
            record
            for record in await self.logged(db, database, caplog, middleware=[SlowJobs(60), Theirs()])
            if "failed" in record.message
        ]
        assert failed.exc_info is not None
        steps = [step.name for step in traceback.extract_tb(failed.exc_info[2])]
        assert steps == ["execute", "bad"]

    async def test_a_plain_function_that_seems_to_want_a_key_is_warned_about(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def hello(name: str) -> None: ...

        async def fine(payload: str, ctx: JobContext) -> None: ...

        async def odd(data: object) -> None: ...

        odd.__annotations__["data"] = {"any": "annotation"}
        await once({"hello": hello, "fine": fine, "odd": odd}, database)
        assert "The task 'hello' is a plain function" in caplog.text
        assert "not with its key 'name'" in caplog.text
        assert "'fine'" not in caplog.text

    async def test_success_can_be_silent(
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

    async def test_at_high_rates_not_every_success_has_a_line(
        self, database: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(job_log, "monotonic", lambda: 1.0)  # all within one second
        caplog.set_level(logging.INFO)
        async with WorkerUtils(database) as utils:
            await utils.add_jobs([JobSpec("task")] * 500)
        assert await once({"task": nothing}, database, concurrency=10) == Drained(500, 0)
        lines = [record for record in caplog.records if record.message.startswith("Completed")]
        assert len(lines) == 51
        said = sum(record.message.startswith("Completed job") for record in lines)
        more = [int(str(record.args[0])) for record in lines if "more jobs" in record.message and record.args]  # type: ignore[index]
        assert said + sum(more) == 500, "the rest is counted"

    async def test_any_logger_can_be_given(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        adapter = logging.LoggerAdapter(logging.getLogger("mine"), {"service": "shop"})
        records = await self.logged(db, database, caplog, logger=adapter)
        assert {record.name for record in records if record.message.startswith("Completed")} == {"mine"}

    async def test_debug_is_switched_on_by_the_environment(
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

    async def test_a_breaking_one_of_our_schema_stops_the_worker(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        gate, heard = Gate(), Heard()
        runner = await run(
            {"task": gate}, database, events=heard.events, handle_signals=False, shutdown_grace=3600
        )
        job = await runner.add_job("task")
        await gate.until_begun()
        await self.migrate(db, "graphile_worker", 21, breaking=True)
        await heard.until("pool:gracefulShutdown")
        gate.open()
        with pytest.raises(SchemaTooNewError, match="revision 21"):
            await runner.wait()
        await runner.stop()
        assert await get(db, job.id) is None, "what ran was finished"

    async def test_what_runs_has_the_grace_of_a_signal_and_is_interrupted_then(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", "graphile_worker")
        gate, heard = Gate(), Heard()
        runner = await run(
            {"task": gate}, database, events=heard.events, handle_signals=False, shutdown_grace=0.2
        )
        job = await runner.add_job("task", queue_name="q")
        await gate.until_begun()
        await self.migrate(db, "graphile_worker", 21, breaking=True)
        async with asyncio.timeout(DEADLINE):
            with pytest.raises(SchemaTooNewError, match="revision 21"):
                await runner.wait()
        assert heard.counts["pool:forcefulShutdown"] == 1
        assert (await existing(db, job.id))["attempts"] == 0, "it will run again, with its attempt"
        assert await locked(db) == []
        assert "Breaking migration: stopping; running jobs have 0.2 s" in caplog.text

    async def test_it_is_told_once_however_often_it_is_announced(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        gate, heard = Gate(), Heard()
        runner = await run(
            {"task": gate}, database, events=heard.events, handle_signals=False, shutdown_grace=3600
        )
        await runner.add_job("task")
        await gate.until_begun()
        await self.migrate(db, "graphile_worker", 21, breaking=True)
        await heard.until("pool:gracefulShutdown")
        before = heard.counts["pool:listen:notification"]
        await self.migrate(db, "graphile_worker", 22, breaking=True)
        await heard.until("pool:listen:notification", before + 1)
        await runner._check_revisions()  # as what was announced makes it do, and so does the next sweep
        gate.open()
        with pytest.raises(SchemaTooNewError, match="revision 21"):
            await runner.wait()
        assert [one.levelname for one in caplog.records].count("ERROR") == 1

    async def test_also_one_that_is_told_while_the_revision_is_being_read(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read, go_on = asyncio.Event(), asyncio.Event()

        async def slowly(*arguments: Any) -> None:
            await check_revisions(*arguments)
            read.set()
            await go_on.wait()

        monkeypatch.setattr(lifecycle, "check_revisions", slowly)
        heard = Heard()
        async with asyncio.timeout(DEADLINE):
            runner = await run({"task": nothing}, database, events=heard.events, handle_signals=False)
            await read.wait()
            await self.migrate(db, "graphile_worker", 21, breaking=True)
            while not any(one.channel == "worker:migrate" for one in heard.named("pool:listen:notification")):
                await heard.until("pool:listen:notification", heard.counts["pool:listen:notification"] + 1)
            go_on.set()
            with pytest.raises(SchemaTooNewError, match="revision 21"):
                await runner.wait()

    async def test_others_do_not(self, db: asyncpg.Connection, database: str) -> None:
        """Graphile Worker stops when another schema of the same database is installed."""
        heard = Heard()
        async with running({"task": nothing}, database, heard=heard) as runner:
            await self.migrate(db, "graphile_worker", 21, breaking=False)
            async with WorkerUtils(database, schema="another") as another:
                await another.migrate()
            await self.migrate(db, "another", 99, breaking=True)
            await runner.add_job("task")
            await heard.until("job:complete")
            await asyncio.sleep(0.1)
            assert heard.counts["pool:gracefulShutdown"] == 0


class TestListening:
    async def test_after_the_connection_is_lost_it_listens_again_and_looks_at_once(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Graphile Worker does not look, and finds what it missed when it polls."""
        heard, added = Heard(), asyncio.Event()

        @asynccontextmanager
        async def listening_after_that(*arguments: Any) -> AsyncIterator[Ear]:
            await added.wait()
            async with listening(*arguments) as ear:
                yield ear

        async with running({"task": nothing}, database, heard=heard, poll_interval=3600):
            await heard.until("worker:getJob:empty")
            monkeypatch.setattr(notifier_module, "listening", listening_after_that)
            client = heard.named("pool:listen:success")[0].client
            await db.execute("select pg_terminate_backend($1)", client.get_server_pid())
            await heard.until("pool:listen:error")
            # Nobody is told of this one.
            await db.execute("alter table graphile_worker._private_jobs disable trigger user")
            await db.execute(
                """insert into graphile_worker._private_jobs (task_id)
                select id from graphile_worker._private_tasks"""
            )
            added.set()
            await heard.until("pool:listen:success", 2)
            await heard.until("job:complete")

    async def test_a_worker_that_hears_nothing_says_so_once_and_polls(
        self, database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(notifier_module, "_PROBE_TIMEOUT", 0.05)
        monkeypatch.setattr(notifier_module, "_DEAF_INTERVAL", 0.05)
        monkeypatch.setattr(notifier_module, "listening", deaf)
        heard = Heard()
        async with running({"task": nothing}, database, heard=heard, poll_interval=0.1) as runner:
            await heard.until("pool:listen:error", 3)
            await runner.add_job("task")
            await heard.until("job:complete")
        warnings = [record for record in caplog.records if "Notifications" in record.message]
        assert len(warnings) == 1
        assert "listen_dsn" in warnings[0].message

    async def test_it_can_listen_somewhere_else(self, database: str) -> None:
        heard = Heard()
        async with running(
            {"task": nothing}, database, heard=heard, listen_dsn=database, poll_interval=3600
        ) as runner:
            await heard.until("worker:getJob:empty")
            await runner.add_job("task")
            await heard.until("job:complete")


def deaf(pool: Pool, channels: Sequence[str], heard: Callable[[str, str], None]) -> Any:
    """Listening through something that swallows notifications."""
    assert channels, heard
    return listening(pool, ["nobody sends this"], heard)


class TestThreads:
    async def test_threads_that_have_nothing_to_do_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from graphile_worker._runtime import threads  # noqa: PLC0415

        monkeypatch.setattr(threads, "_LONGEST_IDLE", 0.02)
        pool = threads.Threads()

        def named() -> list[str]:
            return [thread.name for thread in threading.enumerate() if "graphile-worker task" in thread.name]

        async def gone() -> bool:
            return not named()

        await until(gone, "those of other tests end")
        seen: list[int] = []
        # Counted while all of them are busy: each may end at any time after that.
        barrier = threading.Barrier(4, lambda: seen.append(len(named())), timeout=20)
        for n in range(1, 6):
            results = await asyncio.gather(
                *(pool.run(contextvars.copy_context(), barrier.wait) for _ in range(4))
            )
            assert [error for _, error in results] == [None] * 4
            assert seen == [4] * n
            await until(gone, "the threads end")
