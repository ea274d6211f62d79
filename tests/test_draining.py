"""`drain` runs due jobs as a worker does, even in a transaction that is never committed."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from graphile_worker import (
    App,
    Cancel,
    ConfigurationError,
    DatabaseError,
    Fail,
    GraphileWorkerError,
    InvalidJobError,
    Job,
    JobContext,
    JobSpec,
    Middleware,
    Retry,
    RunSummary,
    Snooze,
    TaskTimeoutError,
    WorkerUtils,
)
from graphile_worker.testing import Clock, Databases, drain, enqueued, override
from support import computing
from support.jobs import AUTOCOMMITS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture
async def transaction(db: asyncpg.Connection) -> AsyncIterator[asyncpg.Connection]:
    """Yield a connection in a transaction that is rolled back."""
    transaction = db.transaction()
    await transaction.start()
    yield db
    await transaction.rollback()


async def committed_jobs(dsn: str) -> list[Job]:
    async with WorkerUtils(dsn=dsn) as utils:
        return await utils.list_jobs()


def make_app(dsn: str | None = None, *, retry: Any = None, **options: Any) -> tuple[App, list[Any]]:
    """Return an app and the list of its runs. The argument of its task chooses the outcome."""
    app, ran = App(dsn, **options), []

    @app.task(retry=retry)
    async def act(what: str = "done", n: int = 0) -> None:
        ran.append((what, n) if n else what)
        match what:
            case "raise":
                raise ValueError("no")
            case "fail":
                raise Fail("never")
            case "retry":
                raise Retry(after=60)
            case "snooze":
                raise Snooze(300, "not yet")
            case "cancel":
                raise Cancel("not wanted")

    return app, ran


async def test_drain_runs_due_jobs_and_counts_their_outcomes(database: str) -> None:
    app, ran = make_app(database, retry=timedelta(minutes=10))
    act = app.tasks["act"]
    async with app:
        whats = ["done", "raise", "fail", "retry", "snooze", "cancel", "done"]
        await act.enqueue_many([{"what": what} for what in whats])
        await act.using(run_at=timedelta(hours=1)).enqueue("later")
        summary = await drain(app)
        assert summary == RunSummary(succeeded=2, failed=3, snoozed=1, cancelled=1)
        assert [type(error) for error in summary.errors] == [ValueError, Fail, Retry]
        assert ran == whats
        assert await drain(app) == RunSummary()
        states = {job.payload["what"]: (job.state, job.attempts) for job in await app.utils.list_jobs()}
    assert states == {
        "raise": ("scheduled", 1),
        "fail": ("failed", 25),
        "retry": ("scheduled", 1),
        "snooze": ("scheduled", 0),
        "cancel": ("failed", 25),
        "later": ("scheduled", 0),
    }


async def test_drain_raises_if_a_job_closes_the_app(database: str) -> None:
    app = App(database)

    @app.task
    async def closes() -> None:
        await app.close()

    async with app:
        await closes.enqueue()
        with pytest.raises(GraphileWorkerError):
            async with asyncio.timeout(20) as limit:
                await drain(app)
    assert not limit.expired()


async def test_drain_runs_added_jobs_but_not_other_tasks(database: str) -> None:
    ran: list[object] = []

    async def parent(payload: dict[str, int], ctx: JobContext) -> None:
        ran.append(payload["n"])
        if payload["n"]:
            await ctx.add_job("parent", {"n": payload["n"] - 1})
        await ctx.add_jobs([JobSpec("elsewhere")])

    async with WorkerUtils(database) as utils:
        await utils.add_job("parent", {"n": 2})
        assert await drain({"parent": parent}, dsn=database) == RunSummary(succeeded=3)
        assert ran == [2, 1, 0]
        assert len(await enqueued(utils, "elsewhere")) == 3


async def test_drain_orders_jobs_by_priority_then_run_at(database: str) -> None:
    app, ran = make_app(database)
    act = app.tasks["act"]
    async with app:
        job_options: list[dict[str, Any]] = [
            {"queue_name": "q"},
            {"queue_name": "q", "priority": -1},
            {"priority": -2},
        ]
        for n, options in enumerate(job_options, 1):
            await act.using(**options).enqueue("done", n)
        await act.using(queue_name="q", run_at=timedelta(hours=-1)).enqueue("done", 4)
        assert (await drain(app)).succeeded == 4
        assert [n for _, n in ran] == [3, 2, 4, 1]


async def test_drain_with_raise_errors_raises_after_recording(database: str) -> None:
    error = ValueError("the very same")

    async def broken(_payload: object) -> None:
        raise error

    async with WorkerUtils(database) as utils:
        await utils.add_jobs([JobSpec("broken"), JobSpec("broken")])
        with pytest.raises(ValueError, match="the very same") as raised:
            await drain({"broken": broken}, dsn=database, raise_errors=True)
        assert raised.value is error
        first, second = await utils.list_jobs()
    assert (first.last_error, first.attempts, first.locked_by) == ("the very same", 1, None)
    assert (second.last_error, second.attempts, second.locked_by) == (None, 0, None)


async def test_drain_with_raise_errors_ignores_snoozes_and_cancellations(database: str) -> None:
    app, _ = make_app(database)
    async with app:
        await app.tasks["act"].enqueue_many([{"what": "snooze"}, {"what": "cancel"}])
        assert await drain(app, raise_errors=True) == RunSummary(snoozed=1, cancelled=1)


async def test_drain_limit_stops_a_task_that_adds_itself(database: str) -> None:
    app = App(database)
    ran = []

    @app.task
    async def again() -> None:
        ran.append(1)
        await again.enqueue()

    async with app:
        await again.enqueue()
        with pytest.raises(AssertionError, match=r"5 jobs ran, and more are due: .* 'again'"):
            await drain(app, limit=5)
        assert len(ran) == 5
        [left] = await enqueued(again)
        assert (left.attempts, left.locked_by) == (0, None)


async def test_drajob_countsles_threads_timeouts_batches_keys_and_invalid_payloads(database: str) -> None:
    app, later = App(database), timedelta(minutes=10)
    ran: list[Any] = []

    @app.task(retry=later)
    def on_thread(ctx: JobContext, n: int) -> None:
        ran.append((n, threading.current_thread() is threading.main_thread()))
        ctx.run_sync(ctx.add_job("index", [f"from {n}"]))

    @app.task(timeout=0.01, retry=later)
    async def slow() -> None:
        await asyncio.Event().wait()

    @app.task(batch=True, job_key="index", retry=later)
    async def index(words: list[str]) -> list[Exception | None]:
        ran.append(words)
        return [None if word.startswith("from") else ValueError(word) for word in words]

    async with app:
        await on_thread.enqueue(1)
        await on_thread.enqueue(2)
        await index.using(priority=1).enqueue(["bad"])
        await slow.enqueue()
        await app.utils.add_job("on_thread", {"n": "one"})
        summary = await drain(app)
        assert (summary.succeeded, summary.failed) == (2, 3)
        assert sorted(type(error).__name__ for error in summary.errors) == [
            "BatchError",
            "InvalidPayloadError",
            "TaskTimeoutError",
        ]
        assert TaskTimeoutError in map(type, summary.errors)
        assert ran == [(1, False), (2, False), ["bad", "from 1", "from 2"]]
        [left] = await enqueued(index)
        assert left.payload == ["bad"]


async def test_drain_runs_the_lifespan(database: str) -> None:
    ran = []

    @asynccontextmanager
    async def lifespan(_app: App) -> AsyncIterator[str]:
        ran.append("opened")
        yield "state"
        ran.append("closed")

    app = App(database, lifespan=lifespan)

    @app.task
    async def note(ctx: JobContext[str]) -> None:
        ran.append(ctx.state)

    async with app:
        await note.enqueue()
        await drain(app)
    assert ran == ["opened", "state", "closed"]


async def test_drain_emits_the_events_and_logs_of_a_worker(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    app, _ = make_app(database)
    events = []
    app.events.on("*", lambda event: events.append(event.name))
    caplog.set_level(logging.INFO, logger="graphile_worker")
    async with app:
        await app.tasks["act"].enqueue_many([{}, {"what": "fail"}])
        await drain(app)
        await drain(app)
    assert events == [
        "job:start",
        "job:success",
        "job:complete",
        "job:start",
        "job:error",
        "job:failed",
        "job:complete",
    ]
    assert [record.levelname for record in caplog.records] == ["INFO", "ERROR"]


async def test_concurrent_drains_share_the_jobs(database: str) -> None:
    app, ran = make_app(database)
    async with app:
        await app.tasks["act"].enqueue_many([{"n": n} for n in range(1, 41)])
        first, second = await asyncio.gather(drain(app), drain(app))
        assert first.succeeded + second.succeeded == 40
        assert len(set(ran)) == len(ran) == 40
        assert await enqueued(app) == []


async def test_cancelled_drain_interrupts_and_releases_the_job(database: str) -> None:
    app, started = App(database), asyncio.Event()

    @app.task
    async def endless() -> None:
        started.set()
        await asyncio.Event().wait()

    async with app:
        await endless.enqueue()
        draining = asyncio.create_task(drain(app))
        await started.wait()
        draining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await draining
        [job] = await enqueued(endless)
        assert (job.attempts, job.locked_by) == (0, None)


async def test_outcome_that_cannot_be_stored_is_recorded_without_details(database: str) -> None:
    async def odd(_payload: object) -> None:
        raise Retry(at=datetime.max.replace(tzinfo=UTC))

    async with WorkerUtils(database) as utils:
        await utils.add_job("odd")
        assert (await drain({"odd": odd}, dsn=database)).failed == 1
        [job] = await utils.list_jobs()
        assert job.locked_by is None


async def test_drain_raises_if_another_transaction_keeps_the_job_row_locked(
    database: str, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphile_worker.testing.single_job_worker._MAX_RECORD_WAIT", 0.05)
    transaction = db.transaction()

    async def locked(_payload: object) -> None:
        await transaction.start()
        await db.execute("select from graphile_worker._private_jobs for update")

    async with WorkerUtils(database) as utils:
        await utils.add_job("locked")
    with pytest.raises(DatabaseError, match=r"outcome of job 1\b.*another transaction"):
        await drain({"locked": locked}, dsn=database)
    await transaction.rollback()


async def test_drain_works_with_one_connection_in_the_pool(database: str) -> None:
    app = App(database, max_pool_size=1)

    @app.task
    async def busy(ctx: JobContext, n: int) -> None:
        if n:
            await asyncio.gather(busy.enqueue(n - 1), ctx.query("select 1"))

    async with app:
        await busy.enqueue(2)
        assert (await drain(app)).succeeded == 3


async def test_drain_rejects_contradicting_arguments(database: str, db: asyncpg.Connection) -> None:
    app, _ = make_app(database)
    with pytest.raises(ConfigurationError, match="dsn and schema belong to the app"):
        await drain(app, dsn=database)
    with pytest.raises(ConfigurationError, match="dsn or connection"):
        await drain({"act": print}, dsn=database, connection=db)
    with pytest.raises(ConfigurationError, match="dsn or connection"):
        override(app, dsn=database, connection=db)
    with pytest.raises(ConfigurationError, match=r"connection.*\bstr\b"):
        await drain({"act": print}, connection=database)  # type: ignore[arg-type]


class TestCancelling:
    @pytest.mark.parametrize("ending", ["error", "snooze", "return"])
    async def test_job_cancelled_while_running_does_not_run_again(
        self, transaction: asyncpg.Connection, ending: str
    ) -> None:
        app = App()
        reasons: list[str | None] = []
        app.events.on("job:cancelled", lambda event: reasons.append(event.reason))

        @app.task(retry=timedelta(0), max_attempts=3)
        async def unwanted(ctx: JobContext) -> None:
            assert await ctx.utils.cancel_job(ctx.job.id, "not wanted") == "requested"
            match ending:
                case "error":
                    raise LookupError
                case "snooze":
                    raise Snooze(0)

        async with override(app, connection=transaction):
            job = await unwanted.enqueue()
            succeeds = ending == "return"
            assert await drain(app) == RunSummary(succeeded=succeeds, cancelled=not succeeds)
            assert await drain(app) == RunSummary()
            if not succeeds:
                stored = await app.utils.get_job(id=job.id)
                assert stored is not None
                assert (stored.state, stored.last_error) == ("failed", "Cancelled: not wanted")
                assert reasons == ["not wanted"]
        query = "select count(*) from graphile_worker._private_python_cancellations"
        assert await transaction.fetchval(query) == 0

    async def test_job_cancelled_while_its_row_was_locked_does_not_start(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        app, ran = make_app(database)
        query = "select id from graphile_worker._private_jobs for update"
        async with app:
            await app.tasks["act"].enqueue("first")
            async with db.transaction():
                [row] = await db.fetch(query)
                assert await app.cancel_job(row["id"]) == "requested"
            await app.tasks["act"].enqueue("done")
            assert await drain(app) == RunSummary(succeeded=1)
        assert ran == ["done"]


class TestClaimLimit:
    async def test_drain_does_not_claim_tasks_at_their_claim_limit(self, database: str) -> None:
        class Closed(Middleware):
            def claim_limit(self, task: str, claimed: int) -> int | None:  # noqa: ARG002
                return 0 if task in closed else None

        app = App(database, middleware=[Closed()])
        ran: list[str] = []
        closed = {"closed"}
        for name in ("closed", "open"):
            app.task(name)(partial(ran.append, name))
        async with app:
            await app.add_jobs([JobSpec("closed"), JobSpec("open")])
            assert await drain(app) == RunSummary(succeeded=1)
            closed.add("open")
            assert await drain(app) == RunSummary()
            closed.clear()
            assert await drain(app) == RunSummary(succeeded=1)
        assert ran == ["open", "closed"]


class TestTransaction:
    async def test_drain_in_a_transaction_commits_nothing(
        self, transaction: asyncpg.Connection, database: str
    ) -> None:
        app, ran = make_app()
        act = app.tasks["act"].using(connection=transaction)
        for what in ("done", "raise", "snooze", "fail"):
            await act.enqueue(what)
        await app.tasks["act"].using(connection=transaction, queue_name="q").enqueue("done", 2)
        summary = await drain(app, connection=transaction)
        assert summary == RunSummary(succeeded=2, failed=2, snoozed=1)
        assert ran == ["done", "raise", "snooze", "fail", ("done", 2)]
        assert await committed_jobs(database) == []
        assert len(await enqueued(transaction)) == 2
        assert await drain(app, connection=transaction) == RunSummary()

    async def test_drain_in_a_transaction_uses_no_other_connection(
        self, transaction: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        app = App(database)
        seen: list[Any] = []

        @app.task
        async def parent(ctx: JobContext) -> None:
            seen.append((await ctx.query("select count(*) from things"))[0]["count"])
            async with ctx.connection() as connection:
                assert connection is transaction
                # With a pool, this call would use a second connection.
                await ctx.add_job("child", {"way": "inside"})
                await asyncio.gather(*(child.enqueue(f"gathered {n}") for n in range(2)))
            await child.enqueue("enqueue")
            await app.add_jobs([child.spec("spec")])
            await ctx.utils.add_job("child", {"way": "utils"})

        @app.task
        async def child(way: str) -> None:
            seen.append(way)

        @app.task
        def on_thread(ctx: JobContext) -> None:
            ctx.run_sync(ctx.add_job("child", {"way": "blocking"}))
            child.enqueue_sync("enqueue_sync")

        async def reject(*_args: Any, **_kwargs: Any) -> None:
            raise AssertionError("another connection")

        monkeypatch.setattr(asyncpg, "connect", reject)
        await transaction.execute("create table things (); insert into things default values")
        await parent.using(connection=transaction).enqueue()
        await on_thread.using(connection=transaction).enqueue()
        assert await drain(app, connection=transaction, raise_errors=True) == RunSummary(succeeded=10)
        ways = ["inside", "gathered 0", "gathered 1", "enqueue", "spec", "utils", "blocking", "enqueue_sync"]
        assert seen == [1, *ways]

    async def test_drain_keeps_the_order_of_jobs_of_a_new_task(self, transaction: asyncpg.Connection) -> None:
        app = App()
        ran: list[object] = []

        @app.task
        async def parent(n: int) -> None:
            ran.append(n)
            if n == 1:
                await urgent.enqueue()

        @app.task(priority=-1)
        async def urgent() -> None:
            ran.append("urgent")

        async with override(app, connection=transaction):
            await parent.enqueue_many([{"n": 1}, {"n": 2}])
            await drain(app)
        assert ran == [1, "urgent", 2]

    async def test_drain_runs_a_task_in_a_process(
        self, transaction: asyncpg.Connection, tmp_path: Path
    ) -> None:
        app = App()
        app.include(computing.report_process)
        async with override(app, connection=transaction):
            await computing.report_process.enqueue(str(tmp_path / "processes"))
            assert await drain(app, raise_errors=True) == RunSummary(succeeded=1)
        process, parent, _ = (tmp_path / "processes").read_text().split()
        assert int(process) != int(parent) == os.getpid()

    async def test_failed_statements_of_a_task_do_not_abort_the_transaction(
        self, transaction: asyncpg.Connection
    ) -> None:
        async def broken(payload: str, ctx: JobContext) -> None:
            if payload == "query":
                await ctx.query("select 1 / 0")
            elif payload == "connection":
                async with ctx.connection() as connection:
                    await connection.execute("nonsense")
            else:
                await ctx.add_job("", {})

        async with WorkerUtils() as utils:
            for payload in ("query", "connection", "add"):
                await utils.add_job("broken", payload, connection=transaction)
        summary = await drain({"broken": broken}, connection=transaction)
        assert (summary.failed, await transaction.fetchval("select 1")) == (3, 1)

    async def test_timeout_during_a_statement_does_not_abort_the_transaction(
        self, transaction: asyncpg.Connection
    ) -> None:
        app = App()

        @app.task(timeout=0.05)
        async def slow(ctx: JobContext) -> None:
            await ctx.query("select pg_sleep(60)")

        await slow.using(connection=transaction).enqueue()
        summary = await drain(app, connection=transaction)
        assert [type(error) for error in summary.errors] == [TaskTimeoutError]
        assert await transaction.fetchval("select 1") == 1

    async def test_drain_does_not_see_jobs_of_another_transaction(
        self, transaction: asyncpg.Connection, database: str
    ) -> None:
        app, ran = make_app()
        other = await asyncpg.connect(database)
        async with other.transaction():
            await app.tasks["act"].using(connection=transaction).enqueue("done", 1)
            assert await drain({"act": app.tasks["act"]}, connection=other) == RunSummary()
            assert await drain({"act": app.tasks["act"]}, connection=transaction) == RunSummary(succeeded=1)
        await other.close()
        assert ran == [("done", 1)]

    async def test_drain_skips_jobs_locked_by_another_transaction(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        app, ran = make_app(database)
        async with app:
            await app.tasks["act"].enqueue()
        other = await asyncpg.connect(database)
        async with db.transaction():
            async with other.transaction():
                await other.execute("select from graphile_worker._private_jobs for update")
                assert await drain(app, connection=db) == RunSummary()
            assert await drain(app, connection=db) == RunSummary(succeeded=1)
        await other.close()
        assert ran == ["done"]

    @AUTOCOMMITS
    async def test_drain_outside_a_transaction_commits_each_step(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        app, _ = make_app()
        await app.tasks["act"].using(connection=db).enqueue("snooze")
        assert await drain(app, connection=db) == RunSummary(snoozed=1)
        [job] = await committed_jobs(database)
        assert job.last_error == "Snoozed for 300 s: not yet"

    async def test_app_cannot_run_workers_on_an_overridden_connection(
        self, transaction: asyncpg.Connection
    ) -> None:
        app, _ = make_app()
        async with override(app, connection=transaction):
            with pytest.raises(ConfigurationError, match="on one connection"):
                await app.run_once()
            with pytest.raises(ConfigurationError):
                async with app.running():
                    pass


class TestClock:
    async def test_clock_decides_which_jobs_are_due(self, database: str) -> None:
        app, ran = make_app(database)
        clock = Clock()
        async with app, override(app, clock=clock):
            await app.tasks["act"].using(run_at=timedelta(hours=2)).enqueue()
            clock.move(hours=2, seconds=-1)
            assert await drain(app) == RunSummary()
            clock.move(timedelta(seconds=1))
            assert await drain(app) == RunSummary(succeeded=1)
            assert ran == ["done"]

    @pytest.mark.sample(2)
    @pytest.mark.parametrize("years", [-10, 0, 10])
    @pytest.mark.parametrize("in_transaction", [True, False])
    async def test_retries_and_snoozes_are_delayed_from_the_clock(
        self, db: asyncpg.Connection, years: int, in_transaction: bool
    ) -> None:
        app, ran = make_app()
        clock = Clock(datetime.now(UTC) + timedelta(days=365 * years))
        act = app.tasks["act"]
        transaction = db.transaction()
        if in_transaction:
            await transaction.start()
        async with override(app, connection=db, clock=clock):
            for what, wait in (("raise", 2.718282), ("snooze", 300.0), ("retry", 60.0)):
                await act.enqueue(what)
                await drain(app)
                [job] = await enqueued(app)
                due = clock.now() + timedelta(seconds=wait)
                assert abs((job.run_at - due).total_seconds()) < 0.000_01, what
                clock.move_to(job.run_at - timedelta(microseconds=1))
                assert await drain(app) == RunSummary()
                clock.move(timedelta(microseconds=1))
                summary = await drain(app)
                assert (summary.failed or summary.snoozed, len(ran)) == (1, 2)
                if what == "snooze":
                    assert job.last_error == "Snoozed for 300 s: not yet"
                await app.utils.complete_jobs([job.id])
                ran.clear()
        if in_transaction:
            await transaction.rollback()

    @AUTOCOMMITS
    async def test_retry_at_an_absolute_time_follows_the_clock(self, db: asyncpg.Connection) -> None:
        clock, at = Clock(datetime(2040, 1, 1, tzinfo=UTC)), datetime(2040, 1, 2, tzinfo=UTC)

        async def later(_payload: object) -> None:
            if clock.now() < at:
                raise Retry(at=at)

        async with WorkerUtils() as utils:
            await utils.add_job("later", connection=db)
        await drain({"later": later}, connection=db, clock=clock)
        assert [job.run_at for job in await enqueued(db)] == [at]
        clock.move(days=1)
        assert await drain({"later": later}, connection=db, clock=clock) == RunSummary(succeeded=1)

    async def test_tasks_see_the_clock(self, database: str) -> None:
        app, seen = App(database), []
        clock = Clock(datetime(2040, 1, 1, tzinfo=UTC))

        @app.task
        async def observe(ctx: JobContext, n: int = 1) -> None:
            seen.append(ctx.now())
            if n:
                await ctx.utils.reschedule_jobs(
                    [(await ctx.add_job("observe", {"n": 0})).id], run_at=timedelta(hours=1)
                )

        async with app, override(app, clock=clock):
            await observe.enqueue()
            assert (await drain(app)).succeeded == 1
            clock.move(hours=1)
            assert (await drain(app)).succeeded == 1
        assert seen == [datetime(2040, 1, 1, tzinfo=UTC), datetime(2040, 1, 1, 1, tzinfo=UTC)]

    async def test_clock_handles_a_partly_failed_batch_and_a_permanent_failure(self, database: str) -> None:
        app, clock = App(database), Clock()

        @app.task(batch=True)
        async def index(words: list[str]) -> list[Exception | None]:
            return [ValueError(word) if word == "bad" else None for word in words]

        @app.task
        async def fail() -> None:
            raise Fail("never")

        async with app, override(app, clock=clock):
            await index.enqueue(["good", "bad"])
            await fail.enqueue()
            await drain(app)
            [left] = await enqueued(app)
            assert left.payload == ["bad"]
            clock.move(days=1)
            assert await drain(app) == RunSummary(failed=1)

    def test_clock_stands_still_and_needs_a_time_zone(self) -> None:
        clock = Clock(datetime(2030, 1, 1, tzinfo=UTC))
        assert clock.now() == clock.now() == datetime(2030, 1, 1, tzinfo=UTC)
        assert clock.move_to(datetime(2030, 1, 2, tzinfo=UTC)) == clock.now()
        assert repr(clock) == "Clock(2030-01-02 00:00:00+00:00)"
        with pytest.raises(InvalidJobError, match="has no time zone"):
            Clock(datetime(2030, 1, 1))  # noqa: DTZ001
        for wrong in (5, timedelta(hours=1)):
            with pytest.raises(InvalidJobError, match=r"\bat\b.*aware datetime"):
                Clock(wrong)  # type: ignore[arg-type]


async def test_drain_works_with_use_local_time(database: str) -> None:
    app, ran = make_app(database, use_local_time=True)
    async with app:
        await app.tasks["act"].enqueue()
        assert await drain(app) == RunSummary(succeeded=1)
    assert ran == ["done"]
