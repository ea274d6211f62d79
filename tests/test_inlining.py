"""`inline` runs each job where it is added; `override` changes an app's database and clock."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from graphile_worker import App, ConfigurationError, JobContext, JobSpec, RunSummary, WorkerUtils
from graphile_worker.middleware import Middleware
from graphile_worker.testing import Clock, Databases, assert_enqueued, drain, enqueued, inline, override
from support.jobs import AUTOCOMMITS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


def make_app(dsn: str | None = None, **options: Any) -> tuple[App, list[Any]]:
    """Return an app and the list to which its tasks append."""
    app, ran = App(dsn, **options), []

    @app.task
    async def hello(name: str) -> None:
        ran.append(name)
        if name == "unknown":
            raise LookupError(name)

    @app.task(queue_name="serial")
    async def parent(ctx: JobContext) -> None:
        await child.enqueue()
        await ctx.add_job("hello", {"name": "by context"})
        await app.add_jobs([hello.spec("by app")])
        ran.append("parent")

    @app.task(queue_name="serial")
    async def child() -> None:
        ran.append("child")

    return app, ran


class TestInline:
    async def test_inline_runs_a_job_where_it_is_added(self, database: str) -> None:
        app, ran = make_app(database)
        hello = app.tasks["hello"]
        async with app, inline(app):
            job = await hello.enqueue("Ann")
            assert (ran, job.payload) == (["Ann"], {"name": "Ann"})
            await hello.enqueue_many([{"name": "Bob"}, {"name": "Cleo"}])
            await app.add_job("hello", {"name": "Dan"})
            await app.utils.add_job("hello", {"name": "Eve"})
            assert ran == ["Ann", "Bob", "Cleo", "Dan", "Eve"]
            assert await app.utils.list_jobs() == []
        async with app:
            await hello.enqueue("Fay")
            assert len(ran) == 5

    async def test_jobs_added_by_an_inline_job_run_after_it(self, database: str) -> None:
        app, ran = make_app(database)
        async with app, inline(app):
            await app.tasks["parent"].enqueue()
        assert ran == ["parent", "child", "by context", "by app"]

    async def test_inline_raises_and_records_the_error_of_the_task(self, database: str) -> None:
        app, _ = make_app(database)
        async with app, inline(app):
            with pytest.raises(LookupError, match="unknown"):
                await app.tasks["hello"].enqueue("unknown")
            [job] = await enqueued(app)
            assert (job.last_error, job.attempts) == ("unknown", 1)

    async def test_inline_without_raise_errors_only_records(self, database: str) -> None:
        app, _ = make_app(database)
        async with app, inline(app, raise_errors=False):
            await app.tasks["hello"].enqueue("unknown")
            await assert_enqueued(app.tasks["hello"], name="unknown")

    async def test_inline_leaves_scheduled_jobs(self, database: str) -> None:
        app, ran = make_app(database)
        clock = Clock()
        async with app, inline(app, clock=clock):
            await app.tasks["hello"].using(run_at=timedelta(days=1)).enqueue("tomorrow")
            await app.tasks["hello"].enqueue("today")
            assert ran == ["today"]
            clock.move(days=1)
            assert await drain(app) == RunSummary(succeeded=1)

    async def test_inline_works_in_a_transaction(self, db: asyncpg.Connection) -> None:
        app, ran = make_app()
        transaction = db.transaction()
        await transaction.start()
        async with inline(app, connection=db):
            await app.tasks["parent"].enqueue()
            with pytest.raises(LookupError):
                await app.tasks["hello"].enqueue("unknown")
            assert len(await enqueued(db)) == 1
        await transaction.rollback()
        assert ran == ["parent", "child", "by context", "by app", "unknown"]
        assert await enqueued(db) == []

    async def test_inline_runs_on_the_connection_that_added_the_job(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        app, ran = make_app(database)
        transaction = db.transaction()
        async with app, inline(app):
            await drain(app)  # registers the tasks, so that their names are committed
            await transaction.start()
            await app.tasks["parent"].using(connection=db).enqueue()
            assert ran == ["parent", "child", "by context", "by app"]
            await app.tasks["hello"].enqueue("elsewhere")
        await transaction.rollback()
        assert ran[-1] == "elsewhere"

    async def test_inline_serves_concurrent_callers(self, database: str) -> None:
        app, ran = make_app(database)
        async with app, inline(app):
            await asyncio.gather(*(app.tasks["hello"].enqueue(str(n)) for n in range(5)))
            assert sorted(ran) == ["0", "1", "2", "3", "4"]

    async def test_inline_runs_jobs_added_by_a_thread(self, database: str) -> None:
        app, ran = make_app()
        async with inline(app, dsn=database):
            job = await asyncio.to_thread(app.tasks["hello"].enqueue_sync, "from a thread")
        assert (ran, job.task_identifier) == (["from a thread"], "hello")

    @pytest.mark.parametrize("way", ["executor", "pool"])
    async def test_inline_job_waits_for_threads_that_add_jobs(self, database: str, way: str) -> None:
        """Executor threads do not inherit the context variables of the job."""
        app, ran = make_app(database)
        add = partial(app.tasks["hello"].enqueue_sync, "from its thread")

        @app.task
        async def executor() -> None:
            await asyncio.get_running_loop().run_in_executor(None, add)
            ran.append("executor")

        @app.task
        def pool() -> None:
            with ThreadPoolExecutor() as threads:
                threads.submit(add).result()
            ran.append("pool")

        async with app, asyncio.timeout(60), inline(app):
            await app.tasks[way].enqueue()
            assert ran == [way, "from its thread"]

    async def test_second_inline_caller_waits_for_its_own_job(self, database: str) -> None:
        app, ran = make_app(database)
        started, finish = asyncio.Event(), asyncio.Event()

        @app.task
        async def long() -> None:
            started.set()
            await finish.wait()

        async with app, inline(app):
            first = asyncio.create_task(long.enqueue())
            await started.wait()
            second = asyncio.create_task(app.tasks["hello"].enqueue("Ann"))
            async with asyncio.timeout(60):
                while not await enqueued(app):
                    await asyncio.sleep(0.001)
            assert not second.done()
            finish.set()
            await second
            assert ran == ["Ann"]
            await first

    async def test_inline_opens_the_lifespan_once(self, database: str) -> None:
        calls = []

        @asynccontextmanager
        async def lifespan(_app: App) -> AsyncIterator[None]:
            calls.append("opened")
            yield
            calls.append("closed")

        app, _ = make_app(database, lifespan=lifespan)
        async with app, inline(app):
            await app.tasks["hello"].enqueue("Ann")
            await app.tasks["hello"].enqueue("Bob")
        assert calls == ["opened", "closed"]


async def test_middleware_wraps_enqueue_and_execute_in_drain_and_inline(db: asyncpg.Connection) -> None:
    calls: list[Any] = []

    class Recording(Middleware):
        async def enqueue(self, specs: Sequence[JobSpec], proceed: Any) -> Any:
            calls.extend(f"added {spec.payload['name']} {spec.run_at}" for spec in specs)
            return await proceed()

        async def execute(self, ctx: JobContext[Any], proceed: Any) -> Any:
            calls.append(f"runs {ctx.job.payload['name']}")
            return await proceed()

    app, ran = make_app(middleware=[Recording()])
    async with override(app, connection=db, clock=Clock()):
        await app.tasks["hello"].enqueue("Ann")
        assert await drain(app) == RunSummary(succeeded=1)
        async with inline(app):
            await app.tasks["hello"].enqueue("Bob")
    assert calls == ["added Ann None", "runs Ann", "added Bob None", "runs Bob"]
    assert ran == ["Ann", "Bob"]


class TestOverride:
    async def test_override_changes_the_database(self, databases: Databases, database: str) -> None:
        app, ran = make_app(database)
        async with app, databases.fresh() as other:
            async with override(app, dsn=other) as same:
                assert same is app
                await app.tasks["hello"].enqueue("there")
                assert await app.run_once() == RunSummary(1, 0)
                async with app.running() as runner:
                    assert runner.health().ready
                async with app:  # as the program under test may do
                    pass
                await asyncio.to_thread(app.tasks["hello"].enqueue_sync, "from a thread")
                assert len(await enqueued(app)) == 1
            assert await enqueued(app) == []
            await app.tasks["hello"].enqueue("here")
            assert await drain(app) == RunSummary(succeeded=1)
        assert ran == ["there", "here"]

    async def test_clock_override_works_inside_a_connection_override(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        app, _ = make_app(database)
        clock = Clock(datetime(2040, 1, 1, tzinfo=UTC))
        async with override(app, connection=db), override(app, clock=clock):
            job = await app.tasks["hello"].using(run_at=timedelta(days=1)).enqueue("Ann")
            assert job.run_at == datetime(2040, 1, 2, tzinfo=UTC)
        assert len(await enqueued(db)) == 1

    async def test_failed_override_does_not_change_the_clock(self, db: asyncpg.Connection) -> None:
        app, _ = make_app()
        clock = Clock(datetime(2040, 1, 1, tzinfo=UTC))
        with pytest.raises(ConfigurationError, match="asyncpg"):
            async with override(app, connection="no connection", clock=clock):  # type: ignore[arg-type]
                pass
        async with override(app, connection=db):
            assert (await app.tasks["hello"].enqueue("Ann")).run_at < clock.now()

    @AUTOCOMMITS
    async def test_inner_overrides_keep_the_clock(self, db: asyncpg.Connection, database: str) -> None:
        app, ran = make_app(database)
        clock = Clock(datetime(2040, 1, 1, tzinfo=UTC))
        hello = app.tasks["hello"].using(run_at=datetime(2040, 1, 1, tzinfo=UTC))
        async with app, override(app, clock=clock):
            await hello.using(connection=db).enqueue("drained")
            assert await drain(app, connection=db) == RunSummary(succeeded=1)
            async with inline(app):
                await hello.using(connection=db).enqueue("inline")
        await hello.using(connection=db).enqueue("later")
        assert await drain(app, connection=db) == RunSummary()
        assert ran == ["drained", "inline"]

    async def test_override_uses_the_connection_of_the_caller(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        app, _ = make_app()
        async with db.transaction(), override(app, connection=db):
            await app.tasks["hello"].enqueue("Ann")
            assert (await app.utils.stats()).ready == 1
            async with WorkerUtils(database) as outside:
                assert (await outside.stats()).total == 0

    async def test_override_keeps_the_schema_of_the_app(self, databases: Databases) -> None:
        async with databases.fresh(empty=True) as dsn:
            app, ran = make_app(schema="mine")
            async with override(app, dsn=dsn):
                await app.migrate()
                await app.tasks["hello"].enqueue("Ann")
                assert app.utils.schema == "mine"
            connection = await asyncpg.connect(dsn)
            assert await drain(app, connection=connection) == RunSummary(succeeded=1)
            await connection.close()
            assert ran == ["Ann"]

    def test_sync_override_changes_the_dsn(self, graphile_worker_dsn: str) -> None:
        app, ran = make_app()
        with override(app, dsn=graphile_worker_dsn):
            app.tasks["hello"].enqueue_sync("Ann")
            app.run_sync(lambda: assert_enqueued(app.tasks["hello"], name="Ann"))
            assert app.run_sync(lambda: drain(app)) == RunSummary(succeeded=1)
            app.add_job_sync("hello", {"name": "Bob"}, run_at=timedelta(hours=1))
            clock = Clock(datetime.now(UTC) + timedelta(hours=2))
            assert app.run_sync(lambda: drain(app, clock=clock)) == RunSummary(succeeded=1)
        assert ran == ["Ann", "Bob"]

    def test_sync_override_rejects_a_clock(self) -> None:
        with (
            pytest.raises(ConfigurationError, match="belongs to an event loop"),
            override(App(), clock=Clock()),
        ):
            pass
