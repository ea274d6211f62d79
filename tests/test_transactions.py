"""A task completes its job in a transaction, together with what it writes."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg
import pytest

from graphile_worker import (
    App,
    ConfigurationError,
    Fail,
    JobContext,
    JobLostError,
    Middleware,
    Retry,
    RunSummary,
    Snooze,
    TaskError,
    run_once,
)
from graphile_worker._db.connection.transactions import commit
from graphile_worker._db.queries import completion as completion_queries, exchange as exchange_queries
from graphile_worker._worker.claiming import exchange_client
from graphile_worker._worker.claiming.claim_planner import ClaimPlanner
from graphile_worker._worker.execution import completion
from graphile_worker.testing import context, drain, inline
from support import stacks
from support.jobs import add, count, existing, get
from support.proxy import Proxy, proxied
from support.waiting import DEADLINE, until, until_blocked
from support.workers import EventRecorder, locked, running

if TYPE_CHECKING:
    from collections.abc import Callable

once = functools.partial(run_once, handle_signals=False)


@pytest.fixture
async def db(db: asyncpg.Connection) -> asyncpg.Connection:
    """A connection to a database with a table for the effects of jobs."""
    await db.execute("create table effects (job bigint not null, note text)")
    return db


async def effects(db: asyncpg.Connection) -> list[int]:
    """Return the ids of the jobs that have an effect, once for each effect."""
    return [row["job"] for row in await db.fetch("select job from effects order by job")]


async def write(ctx: JobContext, connection: Any) -> None:
    await connection.execute("insert into effects (job) values ($1)", ctx.job.id)


async def write_and_complete(_payload: object, ctx: JobContext) -> None:
    async with ctx.transaction() as connection:
        await write(ctx, connection)


class TestTransaction:
    async def test_effect_and_completion_commit_together(self, db: asyncpg.Connection, database: str) -> None:
        job = await add(db, "work")
        seen: list[object] = []

        async def work(_payload: object, ctx: JobContext) -> None:
            async with ctx.transaction() as connection:
                await write(ctx, connection)
                seen.append([await effects(db), await count(db)])
            seen.append([await effects(db), await count(db)])

        recorder = EventRecorder()
        assert await once({"work": work}, database, events=recorder.events) == RunSummary(succeeded=1)
        assert seen == [[[], 1], [[job["id"]], 0]]
        assert recorder.counts["job:success"] == recorder.counts["job:complete"] == 1
        assert "job:lost" not in recorder.names

    @pytest.mark.parametrize("prefetch", [0, 10])
    async def test_many_jobs_are_completed_once_each(
        self, db: asyncpg.Connection, database: str, prefetch: int
    ) -> None:
        for number in range(60):
            await add(db, "work", queue_name=[None, "a", "b"][number % 3])
        done = await once({"work": write_and_complete}, database, concurrency=10, prefetch=prefetch)
        assert done == RunSummary(succeeded=60)
        assert len(set(await effects(db))) == len(await effects(db)) == 60
        assert await locked(db) == []

    async def test_run_once_ends_as_soon_as_the_last_job_is_complete(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No result has to be sent, but the worker has to look for further jobs."""
        monkeypatch.setattr(ClaimPlanner, "_jittered_interval", lambda _self: 3600.0)
        for _ in range(3):
            await add(db, "work")
        async with asyncio.timeout(DEADLINE):
            done = await once({"work": write_and_complete}, database, concurrency=10)
        assert done == RunSummary(succeeded=3)

    async def test_run_once_runs_a_job_that_a_transaction_added_after_the_last_claim(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ClaimPlanner, "_jittered_interval", lambda _self: 0.05)
        await add(db, "work")
        recorder = EventRecorder()

        async def work(_payload: object, ctx: JobContext) -> None:
            async with ctx.transaction() as connection:
                await ctx.add_job("next", connection=connection)
                await recorder.until("worker:getJob:empty")

        async def next_(_payload: object) -> None: ...

        tasks: dict[str, Any] = {"work": work, "next": next_}
        done = await once(tasks, database, concurrency=2, events=recorder.events)
        assert done == RunSummary(succeeded=2)

    async def test_exception_in_the_block_rolls_back_and_fails_the_job(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        job = await add(db, "work")

        async def work(_payload: object, ctx: JobContext) -> None:
            async with ctx.transaction() as connection:
                await write(ctx, connection)
                raise ValueError("no")

        assert await once({"work": work}, database) == RunSummary(failed=1)
        row = await existing(db, job["id"])
        assert (row["last_error"], row["attempts"], row["locked_by"]) == ("no", 1, None)
        assert await effects(db) == []

    @pytest.mark.parametrize(
        ("choice", "attempts", "summary"),
        [
            (Snooze(60), 0, RunSummary(snoozed=1)),
            (Retry(after=60), 1, RunSummary(failed=1)),
            (Fail("bad"), 25, RunSummary(failed=1)),
        ],
    )
    async def test_control_flow_in_the_block_rolls_back_and_acts_as_usual(
        self, db: asyncpg.Connection, database: str, choice: Exception, attempts: int, summary: RunSummary
    ) -> None:
        job = await add(db, "work")

        async def work(_payload: object, ctx: JobContext) -> None:
            async with ctx.transaction() as connection:
                await write(ctx, connection)
                raise choice

        assert await once({"work": work}, database) == summary
        assert (await existing(db, job["id"]))["attempts"] == attempts
        assert await effects(db) == []

    async def test_caught_failure_of_the_block_leaves_the_job_to_the_function(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """The block can be tried again; without a further block, the function's return completes the job."""
        await add(db, "work", payload=2)
        await add(db, "work", payload=1)

        async def work(blocks: int, ctx: JobContext) -> None:
            for attempt in range(blocks):
                try:
                    async with ctx.transaction() as connection:
                        await write(ctx, connection)
                        if attempt == 0:
                            await connection.execute("select 1 / 0")
                except asyncpg.DivisionByZeroError:
                    pass

        assert await once({"work": work}, database) == RunSummary(succeeded=2)
        assert len(await effects(db)) == 1
        assert await count(db) == 0

    async def test_rejected_commit_fails_the_job(self, db: asyncpg.Connection, database: str) -> None:
        job = await add(db, "work")
        await db.execute("alter table effects add unique (job) deferrable initially deferred")

        async def work(_payload: object, ctx: JobContext) -> None:
            async with ctx.transaction() as connection:
                await write(ctx, connection)
                await write(ctx, connection)

        assert await once({"work": work}, database) == RunSummary(failed=1)
        assert "duplicate key" in (await existing(db, job["id"]))["last_error"]
        assert await effects(db) == []

    async def test_jobs_added_with_the_connection_commit_with_it(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await add(db, "work", payload={"fails": True}, max_attempts=1)
        await add(db, "work", payload={"fails": False})
        ran: list[Any] = []

        async def work(payload: dict[str, Any], ctx: JobContext) -> None:
            async with ctx.transaction() as connection:
                await ctx.add_job("next", payload, connection=connection)
                if payload["fails"]:
                    raise ValueError("no")

        async def next_(payload: Any) -> None:
            ran.append(payload)

        await once({"work": work, "next": next_}, database)
        assert ran == [{"fails": False}]

    async def test_second_completion_is_rejected(self, db: asyncpg.Connection, database: str) -> None:
        await add(db, "work")
        errors: list[str] = []

        async def work(_payload: object, ctx: JobContext) -> None:
            async with ctx.transaction():
                pass
            try:
                async with ctx.transaction():
                    pass
            except TaskError as error:
                errors.append(str(error))

        assert await once({"work": work}, database) == RunSummary(succeeded=1)
        assert "is already complete" in errors[0]

    async def test_complete_inside_of_the_block_is_rejected_and_rolled_back(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await add(db, "work")

        async def work(_payload: object, ctx: JobContext) -> None:
            async with ctx.transaction() as connection:
                await write(ctx, connection)
                await ctx.complete(connection=connection)

        assert (await once({"work": work}, database)).failed == 1
        error = await db.fetchval("select last_error from graphile_worker._private_jobs")
        assert "is already completed in this transaction" in error
        assert await effects(db) == []

    async def test_middleware_and_task_complete_the_same_job(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        class Complete(Middleware):
            async def execute(self, ctx: JobContext, proceed: Any) -> Any:
                async with ctx.transaction() as connection:
                    await write(ctx, connection)
                    return await proceed({"changed": True})

        job = await add(db, "work")

        async def work(_payload: object) -> None: ...

        assert await once({"work": work}, database, middleware=[Complete()]) == RunSummary(succeeded=1)
        assert await effects(db) == [job["id"]]

    async def test_job_is_not_locked_before_the_end_of_the_block(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await add(db, "work", job_key="k")
        results: list[object] = []

        async def work(_payload: object, ctx: JobContext) -> None:
            async with ctx.transaction() as connection:
                await write(ctx, connection)
                async with db.transaction():
                    results.append(
                        await db.fetchval(
                            "select id from graphile_worker._private_jobs where id = $1 for update nowait",
                            ctx.job.id,
                        )
                    )

        assert await once({"work": work}, database) == RunSummary(succeeded=1)
        assert len(results) == 1

    async def test_frozen_transaction_is_ended_by_the_server_after_the_job_is_deleted(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """The block may be idle for as long as it wants. Only after the deletion the limit holds."""
        await add(db, "work")
        limits: list[str] = []

        async def work(_payload: object, ctx: JobContext) -> None:
            async with ctx.transaction() as connection:
                limits.append(await connection.fetchval("show idle_in_transaction_session_timeout"))
                await connection.execute(
                    """create function pg_temp.note() returns trigger language plpgsql as $$
                    begin
                      insert into effects values (0, current_setting('idle_in_transaction_session_timeout'));
                      return null;
                    end $$"""
                )
                await connection.execute(
                    """create constraint trigger note after insert on effects deferrable initially deferred
                    for each row when (new.job > 0) execute function pg_temp.note()"""
                )
                await write(ctx, connection)

        await once({"work": work}, database)
        assert limits == ["0"]
        assert await db.fetchval("select note from effects where job = 0") == "10s"


class TestSerialQueue:
    async def test_queue_stays_locked_until_the_function_ends(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        for number in range(3):
            await add(db, "work", queue_name="q", payload=number)
        active: list[int] = []
        order: list[int] = []

        async def work(number: int, ctx: JobContext) -> None:
            active.append(number)
            async with ctx.transaction() as connection:
                await write(ctx, connection)
            await asyncio.sleep(0)
            assert active == [number]
            order.append(number)
            active.remove(number)

        recorder = EventRecorder()
        assert await once({"work": work}, database, events=recorder.events) == RunSummary(succeeded=3)
        assert order == [0, 1, 2]
        assert recorder.counts["job:complete"] == 3
        assert "job:lost" not in recorder.names
        assert await locked(db) == []

    async def test_other_jobs_of_the_same_exchange_are_recorded(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """The exchange that releases the queue of a recorded job also completes and fails others."""
        everyone = asyncio.Barrier(4)
        await add(db, "recorded", queue_name="q")
        await add(db, "recorded")
        await add(db, "completed", queue_name="r")
        failing = await add(db, "failing")

        async def recorded(_payload: object, ctx: JobContext) -> None:
            async with ctx.transaction() as connection:
                await write(ctx, connection)
            await everyone.wait()

        async def completed(_payload: object) -> None:
            await everyone.wait()

        async def failing_(_payload: object) -> None:
            await everyone.wait()
            raise ValueError("no")

        tasks: dict[str, Callable[..., Any]] = {
            "recorded": recorded,
            "completed": completed,
            "failing": failing_,
        }
        assert await once(tasks, database, concurrency=4) == RunSummary(succeeded=3, failed=1)
        assert [row["id"] for row in await db.fetch("select id from graphile_worker.jobs")] == [failing["id"]]
        assert await locked(db) == []


class TestAfterCompletion:
    @pytest.mark.parametrize("error", [ValueError("late"), Snooze(60), Retry(after=1), Fail("late")])
    async def test_exception_after_completion_is_logged_and_not_recorded(
        self, db: asyncpg.Connection, database: str, error: Exception, caplog: pytest.LogCaptureFixture
    ) -> None:
        job = await add(db, "work")

        async def work(_payload: object, ctx: JobContext) -> None:
            await write_and_complete(None, ctx)
            raise error

        recorder = EventRecorder()
        assert await once({"work": work}, database, events=recorder.events) == RunSummary(succeeded=1)
        assert await effects(db) == [job["id"]]
        assert await count(db) == 0
        assert "job:error" not in recorder.names
        [record] = [record for record in caplog.records if "is complete" in record.getMessage()]
        assert record.levelname in {"ERROR", "WARNING"}

    async def test_timeout_after_completion_does_not_fail_the_job(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        job = await add(db, "work", flags=["timeout:0.2"])

        async def work(_payload: object, ctx: JobContext) -> None:
            await write_and_complete(None, ctx)
            await asyncio.Event().wait()

        assert await once({"work": work}, database) == RunSummary(succeeded=1)
        assert await effects(db) == [job["id"]]

    async def test_stopped_worker_does_not_repeat_a_completed_job(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        job = await add(db, "work", queue_name="q")

        async def work(_payload: object, ctx: JobContext) -> None:
            await write_and_complete(None, ctx)
            await asyncio.Event().wait()

        recorder = EventRecorder()
        async with running({"work": work}, database, recorder=recorder):

            async def is_complete() -> bool:
                return await count(db) == 0

            await until(is_complete, "the job is complete")
        assert recorder.counts["job:complete"] == 1
        assert "job:interrupted" not in recorder.names
        assert await effects(db) == [job["id"]]
        assert await locked(db) == []


RELEASE = "update graphile_worker._private_jobs set locked_by = 'another', locked_at = now() where id = $1"
"""Give the job to another worker, as a sweeper and a claim do."""


class TestLostJob:
    async def test_transaction_of_a_lost_job_is_rolled_back(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        job = await add(db, "work")
        errors: list[BaseException] = []

        async def work(_payload: object, ctx: JobContext) -> None:
            try:
                async with ctx.transaction() as connection:
                    await write(ctx, connection)
                    await db.execute(RELEASE, ctx.job.id)
            except JobLostError as error:
                errors.append(error)
                raise

        recorder = EventRecorder()
        assert await once({"work": work}, database, events=recorder.events) == RunSummary()
        assert "does not hold it any more" in str(errors[0])
        assert recorder.counts["job:lost"] == 1
        assert await effects(db) == []
        assert (await existing(db, job["id"]))["locked_by"] == "another"

    async def test_removed_job_is_not_completed(self, db: asyncpg.Connection, database: str) -> None:
        await add(db, "work")

        async def work(_payload: object, ctx: JobContext) -> None:
            async with ctx.transaction() as connection:
                await write(ctx, connection)
                await db.execute("delete from graphile_worker._private_jobs")

        assert await once({"work": work}, database) == RunSummary()
        assert await effects(db) == []

    async def test_job_claimed_again_by_the_same_worker_is_not_completed_by_its_first_run(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await add(db, "work")
        runs: list[int] = []
        second_started = asyncio.Event()
        lost = asyncio.Event()

        async def work(_payload: object, ctx: JobContext) -> None:
            runs.append(ctx.job.attempts)
            if len(runs) == 2:
                second_started.set()
                await lost.wait()
                await write_and_complete(None, ctx)
                return
            await db.execute("select graphile_worker.force_unlock_workers(array[$1])", ctx.worker_id)
            await second_started.wait()
            with pytest.raises(JobLostError):
                await write_and_complete(None, ctx)
            lost.set()

        recorder = EventRecorder()
        async with running({"work": work}, database, recorder=recorder, concurrency=2, poll_interval=0.05):
            await recorder.until("job:complete")
        assert len(await effects(db)) == 1

    async def test_completion_after_the_end_of_the_job_is_rejected(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await add(db, "work")
        kept: list[JobContext] = []

        async def work(_payload: object, ctx: JobContext) -> None:
            kept.append(ctx)

        await once({"work": work}, database)
        with pytest.raises(JobLostError, match="has already ended"):
            async with db.transaction():
                await kept[0].complete(connection=db)

    async def test_renewed_lock_is_not_a_lost_job(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The worker renews the lock of a long job while the job is being completed."""
        job = await add(db, "work")
        renewing, completing = asyncio.Event(), asyncio.Event()
        renew, complete = exchange_queries.renew, completion_queries.complete
        answers: list[int | None] = []

        async def renew_slowly(
            connection: Any, schema: Any, worker: Any, jobs: Any, *rest: Any, **more: Any
        ) -> None:
            if renewing.is_set():
                return  # a second renewal could come between the two attempts to complete the job
            before = [held.locked_at for held in jobs]
            await renew(connection, schema, worker, jobs, *rest, **more)
            after = [held.locked_at for held in jobs]
            for held, locked_at in zip(jobs, before, strict=True):
                held.locked_at = locked_at  # the worker has not read the reply yet
            renewing.set()
            await completing.wait()
            for held, locked_at in zip(jobs, after, strict=True):
                held.locked_at = locked_at

        async def complete_meanwhile(*arguments: Any, **options: Any) -> int | None:
            answers.append(await complete(*arguments, **options))
            asyncio.get_running_loop().call_later(0.01, completing.set)
            return answers[-1]

        async def work(_payload: object, ctx: JobContext) -> None:
            async with ctx.transaction() as connection:
                await write(ctx, connection)
                await renewing.wait()

        monkeypatch.setattr(exchange_client, "_RENEW_AFTER", 0.0)
        monkeypatch.setattr("graphile_worker._worker.loop._MAINTENANCE_INTERVAL", 0.02)
        monkeypatch.setattr(exchange_queries, "renew", renew_slowly)
        monkeypatch.setattr(completion_queries, "complete", complete_meanwhile)
        recorder = EventRecorder()
        async with running({"work": work}, database, recorder=recorder):
            await recorder.until("job:complete")
        assert [answer is not None for answer in answers] == [False, True]
        assert "job:error" not in recorder.names
        assert await effects(db) == [job["id"]]


class TestMeanwhile:
    async def test_job_with_the_same_key_added_meanwhile_runs_after_it(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        first = await add(db, "work", job_key="k")

        async def work(_payload: object, ctx: JobContext) -> None:
            async with ctx.transaction() as connection:
                await write(ctx, connection)
                if ctx.job.id == first["id"]:
                    await add(db, "work", job_key="k")

        assert await once({"work": work}, database) == RunSummary(succeeded=2)
        assert len(set(await effects(db))) == 2

    async def test_job_can_add_its_successor_with_its_own_key(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await add(db, "work", job_key="k", payload=3, queue_name="q")

        async def work(left: int, ctx: JobContext) -> None:
            async with ctx.transaction() as connection:
                await write(ctx, connection)
                if left:
                    await ctx.add_job("work", left - 1, job_key="k", queue_name="q", connection=connection)

        assert await once({"work": work}, database) == RunSummary(succeeded=4)
        assert len(set(await effects(db))) == 4

    async def test_open_transaction_that_adds_the_key_delays_the_completion(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        first = await add(db, "work", job_key="k")
        pids: list[int] = []
        may_end = asyncio.Event()

        async def work(_payload: object, ctx: JobContext) -> None:
            async with ctx.transaction() as connection:
                await write(ctx, connection)
                pids.append(connection.get_server_pid())
                await may_end.wait()

        recorder = EventRecorder()
        observer = await asyncpg.connect(database)
        async with running({"work": work}, database, recorder=recorder):
            async with db.transaction():
                await recorder.until("job:start")
                await add(db, "other", job_key="k")
                may_end.set()

                async def begun() -> bool:
                    return bool(pids)

                await until(begun, "the task's transaction has begun")
                await until_blocked(observer, pids[0])
            await recorder.until("job:complete")
        await observer.close()
        assert await effects(db) == [first["id"]]
        assert [row["task_identifier"] for row in await db.fetch("select * from graphile_worker.jobs")] == [
            "other"
        ]

    async def test_cancelled_job_is_rolled_back(self, db: asyncpg.Connection, database: str) -> None:
        job = await add(db, "work")

        async def work(_payload: object, ctx: JobContext) -> None:
            async with ctx.transaction() as connection:
                await write(ctx, connection)
                await ctx.utils.cancel_job(ctx.job.id, "not needed")
                await asyncio.Event().wait()

        recorder = EventRecorder()
        async with running({"work": work}, database, recorder=recorder):
            await recorder.until("job:cancelled")
            await recorder.until("job:complete")
        assert await effects(db) == []
        assert (await existing(db, job["id"]))["last_error"] == "Cancelled: not needed"

    async def test_job_cancelled_after_its_completion_stays_complete(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        job = await add(db, "work")

        async def work(_payload: object, ctx: JobContext) -> None:
            async with ctx.transaction() as connection:
                await write(ctx, connection)
                await ctx.utils.cancel_job(ctx.job.id)

        recorder = EventRecorder()
        async with running({"work": work}, database, recorder=recorder):
            await recorder.until("job:complete")
        done = {"job:success", "job:cancelled"} & set(recorder.names)
        # The cancellation may arrive before or after the commit, but never splits effect and completion.
        assert (done == {"job:success"}) == (await effects(db) == [job["id"]]) == (await count(db) == 0)

    async def test_sweeper_cannot_release_a_job_between_its_deletion_and_the_commit(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A worker that freezes there keeps the row locked, until the server ends the transaction."""
        job = await add(db, "work")
        deleted, frozen = asyncio.Event(), asyncio.Event()

        async def commit_late(*arguments: Any) -> Any:
            deleted.set()
            await frozen.wait()
            return await commit(*arguments)

        monkeypatch.setattr(completion, "commit", commit_late)
        recorder = EventRecorder()
        async with running({"work": write_and_complete}, database, recorder=recorder):
            await deleted.wait()
            free = await db.fetch("select from graphile_worker._private_jobs for update skip locked")
            assert (await count(db), len(free)) == (1, 0)
            frozen.set()
            await recorder.until("job:complete")
        assert await effects(db) == [job["id"]]


def cut_at_commit(proxy: Proxy, *, after: bool = False) -> list[bytes]:
    """Cut the connection of the next COMMIT, before or after it reaches the server."""
    cut: list[bytes] = []

    def decide(direction: str, data: bytes) -> bool | str:
        if direction == "query" and data.startswith(b"Q") and b"COMMIT;" in data and not cut:
            cut.append(data)
            return "after" if after else True
        return False

    proxy.cut_when = decide
    return cut


class TestLostCommit:
    async def test_commit_that_never_arrived_is_rolled_back_and_the_job_runs_again(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        job = await add(db, "work")
        attempts: list[int] = []

        async with proxied(database) as (proxy, dsn):

            async def work(_payload: object, ctx: JobContext) -> None:
                attempts.append(ctx.job.attempts)
                async with ctx.transaction() as connection:
                    await write(ctx, connection)
                    if ctx.job.attempts == 1:
                        cut_at_commit(proxy)

            assert await once({"work": work}, dsn) == RunSummary(failed=1)
            assert "The transaction is rolled back" in (await existing(db, job["id"]))["last_error"]
            assert await effects(db) == []
            await db.execute("update graphile_worker._private_jobs set run_at = now()")
            assert await once({"work": work}, dsn) == RunSummary(succeeded=1)
        assert await effects(db) == [job["id"]]
        assert attempts == [1, 2]

    @pytest.mark.parametrize("queue", [None, "q"])
    async def test_commit_whose_reply_is_lost_completes_the_job(
        self, db: asyncpg.Connection, database: str, queue: str | None
    ) -> None:
        job = await add(db, "work", queue_name=queue)
        continued: list[int] = []

        cuts: list[list[bytes]] = []

        async with proxied(database) as (proxy, dsn):

            async def work(_payload: object, ctx: JobContext) -> None:
                async with ctx.transaction() as connection:
                    await write(ctx, connection)
                    cuts.append(cut_at_commit(proxy, after=True))
                continued.append(ctx.job.id)

            assert await once({"work": work}, dsn) == RunSummary(succeeded=1)
        assert [len(cut) for cut in cuts] == [1]
        assert continued == await effects(db) == [job["id"]]
        assert await count(db) == 0
        assert await locked(db) == []

    async def test_commit_that_is_still_running_is_waited_for(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """The connection is cut while the server checks a deferred constraint, which waits for a lock."""
        job = await add(db, "work")
        await db.execute(
            """create table gate (); create function wait() returns trigger language plpgsql as $$
            begin lock table gate; return null; end $$;
            create constraint trigger wait after insert on effects deferrable initially deferred
            for each row execute function wait()"""
        )
        observer = await asyncpg.connect(database)
        pids: list[int] = []

        async with proxied(database) as (proxy, dsn):

            async def work(_payload: object, ctx: JobContext) -> None:
                async with ctx.transaction() as connection:
                    await write(ctx, connection)
                    cut_at_commit(proxy, after=True)
                    pids.append(connection.get_server_pid())

            async with db.transaction():
                await db.execute("lock table gate")
                recorder = EventRecorder()
                ending = asyncio.create_task(once({"work": work}, dsn, events=recorder.events))
                await recorder.until("job:start")

                async def begun() -> bool:
                    return bool(pids)

                await until(begun, "the task's transaction has begun")
                await until_blocked(observer, pids[0])
            assert await ending == RunSummary(succeeded=1)
        await observer.close()
        assert await effects(db) == [job["id"]]

    async def test_cancellation_during_the_commit_does_not_repeat_the_job(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """The worker stops, and cancels the task, while the server waits in COMMIT."""
        job = await add(db, "work")
        await db.execute(
            """create table gate (); create function wait() returns trigger language plpgsql as $$
            begin lock table gate; return null; end $$;
            create constraint trigger wait after insert on effects deferrable initially deferred
            for each row execute function wait()"""
        )
        observer = await asyncpg.connect(database)
        pids: list[int] = []

        async def work(_payload: object, ctx: JobContext) -> None:
            async with ctx.transaction() as connection:
                await write(ctx, connection)
                pids.append(connection.get_server_pid())

        async def begun() -> bool:
            return bool(pids)

        recorder = EventRecorder()
        holding = db.transaction()
        await holding.start()
        await db.execute("lock table gate")
        async with running({"work": work}, database, recorder=recorder) as runner:
            await until(begun, "the task's transaction has begun")
            await until_blocked(observer, pids[0])
            stopping = asyncio.create_task(runner.stop(grace=0))
            await recorder.until("worker:release")
            await holding.commit()
            await stopping
        await observer.close()
        assert await effects(db) == [job["id"]]
        assert await count(db) == 0
        assert recorder.counts["job:complete"] == 1

    async def test_job_runs_again_if_the_database_is_away_after_the_lost_commit(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If the task cannot find out what happened, the exchange does so later, under the job's fence."""
        monkeypatch.setattr(completion, "_LIMIT", 0.05)
        job = await add(db, "work")
        errors: list[str] = []

        async with proxied(database) as (proxy, dsn):

            async def work(_payload: object, ctx: JobContext) -> None:
                try:
                    async with ctx.transaction() as connection:
                        await write(ctx, connection)
                        proxy.cut_when = decide
                except Exception as error:
                    errors.append(str(error))
                    raise

            def decide(direction: str, data: bytes) -> bool | str:
                if (
                    direction == "query"
                    and data.startswith(b"Q")
                    and b"COMMIT;" in data
                    and not proxy.refusing
                ):
                    proxy.refusing = True
                    proxy.cut_when = lambda _direction, _data: False
                    asyncio.get_running_loop().call_soon(proxy.cut_all)
                    return "after"
                return False

            recorder = EventRecorder()
            async with running({"work": work}, dsn, recorder=recorder):
                await recorder.until("job:error")
                proxy.refusing = False
                await recorder.until("job:lost")
        assert "still unknown" in errors[0]
        assert await effects(db) == [job["id"]]
        assert await get(db, job["id"]) is None


class TestCallerConnection:
    @pytest.mark.sample(3)
    @pytest.mark.parametrize("stack", stacks.ASYNC)
    async def test_effect_and_completion_commit_together_on_an_async_connection(
        self, db: asyncpg.Connection, database: str, stack: str
    ) -> None:
        job = await add(db, "work", queue_name="q")

        async def work(_payload: object, ctx: JobContext) -> None:
            async with stacks.ASYNC[stack](database) as given:
                await given.execute(f"insert into effects (job) values ({ctx.job.id})")
                await ctx.complete(connection=given.connection)
                assert await count(db) == 1
                await given.commit()
                assert await count(db) == 0

        recorder = EventRecorder()
        assert await once({"work": work}, database, events=recorder.events) == RunSummary(succeeded=1)
        assert await effects(db) == [job["id"]]
        assert recorder.counts["job:complete"] == 1
        assert await locked(db) == []

    @pytest.mark.sample(3)
    @pytest.mark.parametrize("stack", stacks.SYNC)
    async def test_effect_and_completion_commit_together_on_a_thread(
        self, db: asyncpg.Connection, database: str, stack: str
    ) -> None:
        if stack.startswith("Django"):
            stacks.skip_old_server_for_django(database)
        job = await add(db, "work", queue_name="q")

        def work(_payload: object, ctx: JobContext) -> None:
            with stacks.SYNC[stack](database) as given:
                given.execute(f"insert into effects (job) values ({ctx.job.id})")
                ctx.complete_sync(connection=given.connection)
                given.commit()

        assert await once({"work": work}, database) == RunSummary(succeeded=1)
        assert await effects(db) == [job["id"]]
        assert await count(db) == 0
        assert await locked(db) == []

    async def test_rollback_after_complete_fails_the_job(self, db: asyncpg.Connection, database: str) -> None:
        """The function returned, but what it wrote is gone. So the job must not be complete."""
        job = await add(db, "work")

        async def work(_payload: object, ctx: JobContext) -> None:
            async with stacks.ASYNC["SQLAlchemy AsyncSession"](database) as given:
                await given.execute(f"insert into effects (job) values ({ctx.job.id})")
                await ctx.complete(connection=given.connection)
                await given.rollback()

        assert await once({"work": work}, database) == RunSummary(failed=1)
        assert "the transaction was not committed" in (await existing(db, job["id"]))["last_error"]
        assert await effects(db) == []

    async def test_exception_after_complete_and_before_the_commit_fails_the_job(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        job = await add(db, "work")

        async def work(_payload: object, ctx: JobContext) -> None:
            connection = await asyncpg.connect(database)
            try:
                async with connection.transaction():
                    await write(ctx, connection)
                    await ctx.complete(connection=connection)
                    raise ValueError("no")
            finally:
                await connection.close()

        assert await once({"work": work}, database) == RunSummary(failed=1)
        assert (await existing(db, job["id"]))["last_error"] == "no"
        assert await effects(db) == []

    async def test_exception_after_the_commit_does_not_repeat_the_job(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        job = await add(db, "work")

        def work(_payload: object, ctx: JobContext) -> None:
            with stacks.SYNC["psycopg"](database) as given:
                given.execute(f"insert into effects (job) values ({ctx.job.id})")
                ctx.complete_sync(connection=given.connection)
                given.commit()
            raise ValueError("late")

        assert await once({"work": work}, database) == RunSummary(succeeded=1)
        assert await effects(db) == [job["id"]]
        assert "its task failed after that: late" in caplog.text

    async def test_job_can_be_completed_after_a_rollback(self, db: asyncpg.Connection, database: str) -> None:
        job = await add(db, "work")

        async def work(_payload: object, ctx: JobContext) -> None:
            async with stacks.ASYNC["psycopg"](database) as given:
                await ctx.complete(connection=given.connection)
                await given.rollback()
                await given.execute(f"insert into effects (job) values ({ctx.job.id})")
                await ctx.complete(connection=given.connection)
                await given.commit()

        assert await once({"work": work}, database) == RunSummary(succeeded=1)
        assert await effects(db) == [job["id"]]

    async def test_second_completion_in_one_transaction_is_rejected(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        job = await add(db, "work")
        errors: list[str] = []

        async def work(_payload: object, ctx: JobContext) -> None:
            async with await psycopg.AsyncConnection.connect(database) as connection:
                await ctx.complete(connection=connection)
                try:
                    await ctx.complete(connection=connection)
                except TaskError as error:
                    errors.append(str(error))
                await connection.execute(f"insert into effects values ({ctx.job.id})")

        assert await once({"work": work}, database) == RunSummary(succeeded=1)
        assert "is already completed in this transaction" in errors[0]
        assert await effects(db) == [job["id"]]

    async def test_second_completion_in_one_transaction_is_rejected_on_a_thread(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await add(db, "work")
        errors: list[str] = []

        def work(_payload: object, ctx: JobContext) -> None:
            with psycopg.connect(database) as connection:
                ctx.complete_sync(connection=connection)
                try:
                    ctx.complete_sync(connection=connection)
                except TaskError as error:
                    errors.append(str(error))

        assert await once({"work": work}, database) == RunSummary(succeeded=1)
        assert "is already completed in this transaction" in errors[0]

    async def test_completion_in_a_second_open_transaction_is_rejected_instead_of_waiting(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await add(db, "work")
        errors: list[str] = []

        async def work(_payload: object, ctx: JobContext) -> None:
            async with (
                await psycopg.AsyncConnection.connect(database) as first,
                await psycopg.AsyncConnection.connect(database) as second,
            ):
                await ctx.complete(connection=first)
                try:
                    await ctx.complete(connection=second)
                except TaskError as error:
                    errors.append(str(error))
                await first.commit()
                try:
                    await ctx.complete(connection=second)
                except TaskError as error:
                    errors.append(str(error))

        assert await once({"work": work}, database) == RunSummary(succeeded=1)
        assert "is already completed in another transaction, which is still open" in errors[0]
        assert "is already complete. A task can complete its job once" in errors[1]

    async def test_rollback_to_a_savepoint_before_complete_fails_the_job(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """The transaction is committed, but without the completion."""
        job = await add(db, "work")

        async def work(_payload: object, ctx: JobContext) -> None:
            async with stacks.ASYNC["psycopg"](database) as given:
                await given.execute("savepoint mine")
                await given.execute(f"insert into effects (job) values ({ctx.job.id})")
                await ctx.complete(connection=given.connection)
                await given.execute("rollback to savepoint mine")
                await given.commit()

        assert await once({"work": work}, database) == RunSummary(failed=1)
        assert "was not committed" in (await existing(db, job["id"]))["last_error"]
        assert await effects(db) == []

    async def test_rolled_back_completion_is_not_confused_with_the_run_of_another_worker(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """The job's row is gone, because another worker has run the job, not because of this transaction."""
        await add(db, "work")

        async def work(_payload: object, ctx: JobContext) -> None:
            async with stacks.ASYNC["psycopg"](database) as given:
                await ctx.complete(connection=given.connection)
                await given.rollback()
            await db.execute("delete from graphile_worker._private_jobs")

        recorder = EventRecorder()
        assert await once({"work": work}, database, events=recorder.events) == RunSummary()
        assert recorder.counts["job:lost"] == 1

    async def test_lost_job_is_reported_on_the_caller_connection(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await add(db, "work")
        errors: list[str] = []

        async def work(_payload: object, ctx: JobContext) -> None:
            await db.execute(RELEASE, ctx.job.id)
            try:
                async with db.transaction():
                    await write(ctx, db)
                    await ctx.complete(connection=db)
            except JobLostError as error:
                errors.append(str(error))

        assert await once({"work": work}, database) == RunSummary()
        assert "Roll back" in errors[0]
        assert await effects(db) == []

    async def test_connection_without_a_transaction_is_rejected(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        job = await add(db, "work", max_attempts=1)

        async def work(_payload: object, ctx: JobContext) -> None:
            with pytest.raises(ConfigurationError, match="not in a transaction"):
                await ctx.complete(connection=db)
            with (
                stacks.psycopg_connection(database, autocommit=True) as given,
                pytest.raises(ConfigurationError, match="not in a transaction"),
            ):
                ctx.complete_sync(connection=given.connection)
            assert await count(db) == 1

        assert await once({"work": work}, database) == RunSummary(succeeded=1)
        assert await get(db, job["id"]) is None

    async def test_connection_of_the_wrong_kind_is_rejected(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await add(db, "work")

        async def work(_payload: object, ctx: JobContext) -> None:
            with pytest.raises(ConfigurationError, match="without _sync"):
                ctx.complete_sync(connection=db)
            with pytest.raises(ConfigurationError, match="connection"):
                await ctx.complete(connection=object())  # type: ignore[arg-type]

        assert await once({"work": work}, database) == RunSummary(succeeded=1)

    async def test_transaction_that_stays_open_delays_the_outcome(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The task returns first. The job is neither repeated nor complete before the transaction ends."""
        monkeypatch.setattr(completion, "_LIMIT", 0.05)
        job = await add(db, "work")
        transaction = db.transaction()

        async def work(_payload: object, ctx: JobContext) -> None:
            await transaction.start()
            await write(ctx, db)
            await ctx.complete(connection=db)

        recorder = EventRecorder()
        async with running({"work": work}, database, recorder=recorder):
            await recorder.until("job:error")
            await transaction.commit()
            await recorder.until("job:lost")
        assert await effects(db) == [job["id"]]
        assert await count(db) == 0


async def test_batch_is_completed_as_a_whole(
    db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = await add(db, "work", payload=[1, 2, 3])

    async def work(items: list[int], ctx: JobContext) -> list[object]:
        await write_and_complete(None, ctx)
        return [None, ValueError("too late"), *items[2:]]

    assert await once({"work": work}, database) == RunSummary(succeeded=1)
    assert await effects(db) == [job["id"]]
    assert "1 of 3 items failed" in caplog.text


class TestTestingKit:
    """`drain`, `inline` and `context` run tasks that complete their jobs."""

    def make_app(self, database: str) -> App:
        app = App(database)

        @app.task(queue_name="q")
        async def pay(ctx: JobContext, order: int) -> None:
            async with ctx.transaction() as connection:
                await connection.execute("insert into effects (job, note) values ($1, 'paid')", order)
                await ctx.add_job("ship", {"order": order}, connection=connection)
                if order < 0:
                    raise Fail("no such order")

        @app.task
        async def ship(ctx: JobContext, order: int) -> None:
            async with ctx.connection() as connection, connection.transaction():
                await connection.execute("insert into effects (job, note) values ($1, 'shipped')", order)
                await ctx.complete(connection=connection)

        return app

    @pytest.mark.parametrize("in_transaction", [True, False])
    async def test_drain_runs_tasks_that_complete_their_jobs(
        self, db: asyncpg.Connection, database: str, *, in_transaction: bool
    ) -> None:
        app = self.make_app(database)
        given: dict[str, Any] = {"connection": db} if in_transaction else {}
        transaction = db.transaction()
        await transaction.start()
        for order in (7, -1):
            await app.add_job("pay", {"order": order}, connection=db)
        if not in_transaction:
            await transaction.commit()
        assert await drain(app, **given) == RunSummary(succeeded=2, failed=1)
        notes = [tuple(row) for row in await db.fetch("select job, note from effects order by note")]
        assert notes == [(7, "paid"), (7, "shipped")]
        assert await count(db) == 1
        if in_transaction:
            assert await db.fetchval("show idle_in_transaction_session_timeout") == "0"
            await transaction.rollback()
            assert await effects(db) == []
        await app.close()

    async def test_inline_runs_tasks_that_complete_their_jobs(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        app = self.make_app(database)
        async with inline(app):
            await app.add_job("pay", {"order": 7})
        assert await effects(db) == [7, 7]
        async with inline(app), db.transaction():
            await app.add_job("pay", {"order": 8}, connection=db)
        assert await effects(db) == [7, 7, 8, 8]
        assert await count(db) == 0
        await app.close()

    async def test_fake_context_tells_whether_the_job_is_complete(self, db: asyncpg.Connection) -> None:
        async with db.transaction():
            ctx = context(connection=db)
            assert not ctx.completed
            with pytest.raises(asyncpg.DivisionByZeroError):
                async with ctx.transaction() as connection:
                    await connection.execute("select 1 / 0")
            assert not ctx.completed
            await write_and_complete(None, ctx)
            assert ctx.completed
            assert await effects(db) == [ctx.job.id]
            with pytest.raises(TaskError, match="already complete"):
                await ctx.complete(connection=db)

    async def test_fake_context_without_a_database_completes_on_any_connection(self) -> None:
        ctx = context()
        with pytest.raises(ConfigurationError, match="no database"):
            async with ctx.transaction():
                pass
        ctx.complete_sync(connection=object())  # type: ignore[arg-type]
        assert ctx.completed
