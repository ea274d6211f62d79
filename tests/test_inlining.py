"""`inline` runs jobs where they are added; `using` says where that is."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from graphile_worker import App, ConfigurationError, JobContext, JobSpec, WorkerUtils
from graphile_worker.middleware import Middleware
from graphile_worker.testing import (
    Clock,
    Databases,
    Summary,
    assert_enqueued,
    drain,
    enqueued,
    inline,
    using,
)
from support.jobs import AUTOCOMMITS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


def make_app(dsn: str | None = None, **options: Any) -> tuple[App, list[Any]]:
    app, said = App(dsn, **options), []

    @app.task
    async def hello(name: str) -> None:
        said.append(name)
        if name == "nobody":
            raise LookupError(name)

    @app.task(queue_name="serial")
    async def parent(ctx: JobContext) -> None:
        await parents_child.enqueue()
        await ctx.add_job("hello", {"name": "by context"})
        await app.add_jobs([hello.spec("by app")])
        said.append("parent")

    @app.task(queue_name="serial")
    async def parents_child() -> None:
        said.append("child")

    return app, said


class TestInline:
    async def test_a_job_runs_where_it_is_added(self, database: str) -> None:
        app, said = make_app(database)
        hello = app.tasks["hello"]
        async with app, inline(app):
            job = await hello.enqueue("Ann")
            assert (said, job.payload) == (["Ann"], {"name": "Ann"})
            await hello.enqueue_many([{"name": "Bob"}, {"name": "Cleo"}])
            await app.add_job("hello", {"name": "Dan"})
            await app.utils.add_job("hello", {"name": "Eve"})
            assert said == ["Ann", "Bob", "Cleo", "Dan", "Eve"]
            assert await app.utils.list_jobs() == []
        async with app:
            await hello.enqueue("Fay")
            assert len(said) == 5

    async def test_jobs_that_it_adds_run_after_it(self, database: str) -> None:
        app, said = make_app(database)
        async with app, inline(app):
            await app.tasks["parent"].enqueue()
        assert said == ["parent", "child", "by context", "by app"]

    async def test_what_the_task_raises_is_raised_and_recorded(self, database: str) -> None:
        app, _ = make_app(database)
        async with app, inline(app):
            with pytest.raises(LookupError, match="nobody"):
                await app.tasks["hello"].enqueue("nobody")
            [job] = await enqueued(app)
            assert (job.last_error, job.attempts) == ("nobody", 1)

    async def test_unless_that_is_not_wanted(self, database: str) -> None:
        app, _ = make_app(database)
        async with app, inline(app, raise_errors=False):
            await app.tasks["hello"].enqueue("nobody")
            await assert_enqueued(app.tasks["hello"], name="nobody")

    async def test_what_is_for_later_stays(self, database: str) -> None:
        app, said = make_app(database)
        clock = Clock()
        async with app, inline(app, clock=clock):
            await app.tasks["hello"].using(run_at=timedelta(days=1)).enqueue("tomorrow")
            await app.tasks["hello"].enqueue("today")
            assert said == ["today"]
            clock.move(days=1)
            assert await drain(app) == Summary(done=1)

    async def test_in_a_transaction(self, db: asyncpg.Connection) -> None:
        app, said = make_app()
        transaction = db.transaction()
        await transaction.start()
        async with inline(app, connection=db):
            await app.tasks["parent"].enqueue()
            with pytest.raises(LookupError):
                await app.tasks["hello"].enqueue("nobody")
            assert len(await enqueued(db)) == 1
        await transaction.rollback()
        assert said == ["parent", "child", "by context", "by app", "nobody"]
        assert await enqueued(db) == []

    async def test_on_the_connection_that_a_job_is_added_with(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        app, said = make_app(database)
        transaction = db.transaction()
        async with app, inline(app):
            await drain(
                app
            )  # now the names of the tasks are there, and nobody waits for their being committed
            await transaction.start()
            await app.tasks["parent"].using(connection=db).enqueue()
            assert said == ["parent", "child", "by context", "by app"]
            await app.tasks["hello"].enqueue("elsewhere")
        await transaction.rollback()
        assert said[-1] == "elsewhere"

    async def test_several_at_once(self, database: str) -> None:
        app, said = make_app(database)
        async with app, inline(app):
            await asyncio.gather(*(app.tasks["hello"].enqueue(str(n)) for n in range(5)))
            assert sorted(said) == ["0", "1", "2", "3", "4"]

    async def test_from_threads(self, database: str) -> None:
        app, said = make_app()
        async with inline(app, dsn=database):
            job = await asyncio.to_thread(app.tasks["hello"].enqueue_sync, "from a thread")
        assert (said, job.task_identifier) == (["from a thread"], "hello")

    @pytest.mark.parametrize("way", ["executor", "pool"])
    async def test_from_threads_of_a_job_that_waits_for_them(self, database: str, way: str) -> None:
        """They do not inherit the job's context variables."""
        app, said = make_app(database)
        add = partial(app.tasks["hello"].enqueue_sync, "from its thread")

        @app.task
        async def executor() -> None:
            await asyncio.get_running_loop().run_in_executor(None, add)
            said.append("executor")

        @app.task
        def pool() -> None:
            with ThreadPoolExecutor() as threads:
                threads.submit(add).result()
            said.append("pool")

        async with app, asyncio.timeout(60), inline(app):
            await app.tasks[way].enqueue()
            assert said == [way, "from its thread"]

    async def test_others_wait_for_their_own_jobs_while_jobs_run(self, database: str) -> None:
        app, said = make_app(database)
        begun, go_on = asyncio.Event(), asyncio.Event()

        @app.task
        async def long() -> None:
            begun.set()
            await go_on.wait()

        async with app, inline(app):
            first = asyncio.create_task(long.enqueue())
            await begun.wait()
            second = asyncio.create_task(app.tasks["hello"].enqueue("Ann"))
            async with asyncio.timeout(60):
                while not await enqueued(app):
                    await asyncio.sleep(0.001)
            assert not second.done()
            go_on.set()
            await second
            assert said == ["Ann"]
            await first

    async def test_the_lifespan_is_opened_once(self, database: str) -> None:
        opened = []

        @asynccontextmanager
        async def lifespan(_app: App) -> AsyncIterator[None]:
            opened.append("opened")
            yield
            opened.append("closed")

        app, _ = make_app(database, lifespan=lifespan)
        async with app, inline(app):
            await app.tasks["hello"].enqueue("Ann")
            await app.tasks["hello"].enqueue("Bob")
        assert opened == ["opened", "closed"]


async def test_middleware_stands_around_adding_and_running(db: asyncpg.Connection) -> None:
    heard: list[Any] = []

    class Listening(Middleware):
        async def enqueue(self, specs: Sequence[JobSpec], proceed: Any) -> Any:
            heard.extend(f"added {spec.payload['name']} {spec.run_at}" for spec in specs)
            return await proceed()

        async def execute(self, ctx: JobContext[Any], proceed: Any) -> Any:
            heard.append(f"runs {ctx.job.payload['name']}")
            return await proceed()

    app, said = make_app(middleware=[Listening()])
    async with using(app, connection=db, clock=Clock()):
        await app.tasks["hello"].enqueue("Ann")
        assert await drain(app) == Summary(done=1)
        async with inline(app):
            await app.tasks["hello"].enqueue("Bob")
    assert heard == ["added Ann None", "runs Ann", "added Bob None", "runs Bob"]
    assert said == ["Ann", "Bob"]


class TestUsing:
    async def test_another_database_for_a_while(self, databases: Databases, database: str) -> None:
        app, said = make_app(database)
        async with app, databases.fresh() as other:
            async with using(app, dsn=other) as same:
                assert same is app
                await app.tasks["hello"].enqueue("there")
                assert await app.run_once() == (1, 0)
                async with app.running() as runner:
                    assert runner.health().ready
                async with app:  # as the program under test may do
                    pass
                await asyncio.to_thread(app.tasks["hello"].enqueue_sync, "from a thread")
                assert len(await enqueued(app)) == 1
            assert await enqueued(app) == []
            await app.tasks["hello"].enqueue("here")
            assert await drain(app) == Summary(done=1)
        assert said == ["there", "here"]

    async def test_a_connection_inside_of_a_clock(self, db: asyncpg.Connection, database: str) -> None:
        app, _ = make_app(database)
        clock = Clock(datetime(2040, 1, 1, tzinfo=UTC))
        async with using(app, connection=db), using(app, clock=clock):
            job = await app.tasks["hello"].using(run_at=timedelta(days=1)).enqueue("Ann")
            assert job.run_at == datetime(2040, 1, 2, tzinfo=UTC)
        assert len(await enqueued(db)) == 1

    async def test_what_cannot_begin_leaves_no_clock_behind(self, db: asyncpg.Connection) -> None:
        app, _ = make_app()
        clock = Clock(datetime(2040, 1, 1, tzinfo=UTC))
        with pytest.raises(ConfigurationError, match="takes a connection of asyncpg's"):
            async with using(app, connection="no connection", clock=clock):  # type: ignore[arg-type]
                pass
        async with using(app, connection=db):
            assert (await app.tasks["hello"].enqueue("Ann")).run_at < clock.now()

    @AUTOCOMMITS
    async def test_the_clock_goes_along(self, db: asyncpg.Connection, database: str) -> None:
        app, said = make_app(database)
        clock = Clock(datetime(2040, 1, 1, tzinfo=UTC))
        hello = app.tasks["hello"].using(run_at=datetime(2040, 1, 1, tzinfo=UTC))
        async with app, using(app, clock=clock):
            await hello.using(connection=db).enqueue("drained")
            assert await drain(app, connection=db) == Summary(done=1)
            async with inline(app):
                await hello.using(connection=db).enqueue("inline")
        await hello.using(connection=db).enqueue("later")
        assert await drain(app, connection=db) == Summary()
        assert said == ["drained", "inline"]

    async def test_everything_on_a_connection_of_the_callers(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        app, _ = make_app()
        async with db.transaction(), using(app, connection=db):
            await app.tasks["hello"].enqueue("Ann")
            assert (await app.utils.stats()).ready == 1
            async with WorkerUtils(database) as others:
                assert (await others.stats()).total == 0

    async def test_the_name_of_the_schema_is_the_apps(self, databases: Databases) -> None:
        async with databases.fresh(empty=True) as dsn:
            app, said = make_app(schema="mine")
            async with using(app, dsn=dsn):
                await app.migrate()
                await app.tasks["hello"].enqueue("Ann")
                assert app.utils.schema == "mine"
            connection = await asyncpg.connect(dsn)
            assert await drain(app, connection=connection) == Summary(done=1)
            await connection.close()
            assert said == ["Ann"]

    def test_without_an_event_loop(self, graphile_worker_dsn: str) -> None:
        app, said = make_app()
        with using(app, dsn=graphile_worker_dsn):
            app.tasks["hello"].enqueue_sync("Ann")
            app.blocking(lambda: assert_enqueued(app.tasks["hello"], name="Ann"))
            assert app.blocking(lambda: drain(app)) == Summary(done=1)
            app.add_job_sync("hello", {"name": "Bob"}, run_at=timedelta(hours=1))
            clock = Clock(datetime.now(UTC) + timedelta(hours=2))
            assert app.blocking(lambda: drain(app, clock=clock)) == Summary(done=1)
        assert said == ["Ann", "Bob"]

    def test_without_an_event_loop_only_a_dsn(self) -> None:
        with pytest.raises(ConfigurationError, match="belongs to an event loop"), using(App(), clock=Clock()):
            pass
