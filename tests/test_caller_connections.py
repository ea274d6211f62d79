"""What else callers pass as connection=: the wrong kind, autocommit, pipelines, several databases."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import asyncpg
import psycopg
import psycopg2
import psycopg_pool
import pytest
import sqlalchemy
from asgiref.sync import sync_to_async
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from graphile_worker import (
    App,
    ConfigurationError,
    DatabaseError,
    JobContext,
    JobSpec,
    Middleware,
    WorkerUtils,
    quick_add_job,
    quick_add_job_sync,
    run_migrations,
)
from graphile_worker._db.connection.any_connection import fetch_text_sync
from graphile_worker._db.sql_files import OneTextStatement, Schema
from graphile_worker.errors import AutocommitWarning
from support import stacks
from support.jobs import AUTOCOMMITS

NOWHERE = "postgresql://ann@127.0.0.1:1/none"


@pytest.fixture
def app() -> App:
    """An app that cannot reach a database by itself."""
    return App(NOWHERE)


async def count(dsn: str) -> int:
    connection = await asyncpg.connect(dsn)
    number = await connection.fetchval("select count(*) from graphile_worker.jobs")
    await connection.close()
    return int(number)


class TestWrongKind:
    async def test_error_for_an_awaited_sync_connection_names_the_sync_method(
        self, app: App, database: str
    ) -> None:
        with (
            psycopg.connect(database) as connection,
            pytest.raises(ConfigurationError, match=r"A psycopg Connection blocks.*enqueue_sync"),
        ):
            await app.add_job("t", connection=connection)
        with (
            Session(sqlalchemy.create_engine("postgresql+psycopg://")) as session,
            pytest.raises(ConfigurationError, match=r"A sqlalchemy Session blocks.*enqueue_sync"),
        ):
            await app.add_job("t", connection=session)

    def test_error_for_a_blocking_use_of_an_async_connection_names_the_async_method(self, app: App) -> None:
        session = AsyncSession(create_async_engine("postgresql+asyncpg://"))
        with pytest.raises(ConfigurationError, match=r"An? sqlalchemy AsyncSession .*await task.using"):
            app.add_job_sync("t", connection=session)

    @pytest.mark.parametrize(
        ("make", "hint"),
        [
            (lambda: sqlalchemy.create_engine("postgresql+psycopg://"), "with engine.begin"),
            (lambda: create_async_engine("postgresql+asyncpg://"), "async with engine.begin"),
            (sessionmaker, "with Session"),
            (async_sessionmaker, "async with Session"),
            (lambda: psycopg_pool.ConnectionPool(NOWHERE, open=False), "with pool.connection"),
            (lambda: stacks.configure_django(NOWHERE).connections, "connections"),
            (object, "connection= must be a connection from"),
            (lambda: "no-such-alias", "alias|Django"),
        ],
    )
    def test_error_for_other_things_says_what_to_pass(self, app: App, make: Any, hint: str) -> None:
        with pytest.raises(ConfigurationError, match=hint):
            app.add_job_sync("t", connection=make())

    async def test_error_for_an_asyncpg_pool_says_what_to_pass(self, app: App, database: str) -> None:
        async with asyncpg.create_pool(database, min_size=1) as pool:
            with pytest.raises(ConfigurationError, match=r"pool.acquire"):
                await app.add_job("t", connection=pool)  # type: ignore[arg-type]

    async def test_closed_connection_is_refused(self, app: App, database: str) -> None:
        sync = psycopg.connect(database)
        sync.close()
        with pytest.raises(ConfigurationError, match="is closed"):
            app.add_job_sync("t", connection=sync)
        connection = await asyncpg.connect(database)
        await connection.close()
        with pytest.raises(ConfigurationError, match="is closed"):
            await app.add_job("t", connection=connection)

    def test_another_database_is_refused(self, app: App) -> None:
        engine = sqlalchemy.create_engine("sqlite://")
        with Session(engine) as session, pytest.raises(ConfigurationError, match="connected to sqlite"):
            app.add_job_sync("t", connection=session)
        engine.dispose()


class TestAutocommit:
    def autocommitting(self, database: str) -> Any:
        return psycopg.connect(database, autocommit=True)

    async def test_job_on_an_autocommit_connection_is_committed_with_a_warning(
        self, app: App, database: str
    ) -> None:
        with self.autocommitting(database) as connection:
            with pytest.warns(AutocommitWarning, match="committed immediately") as caught:
                app.add_job_sync("t", connection=connection)
            assert caught[0].filename == __file__
            with pytest.warns(AutocommitWarning):
                app.add_jobs_sync([JobSpec("t")] * 2500, connection=connection)
            assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        assert await count(database) == 2501

    async def test_jobs_refused_on_an_autocommit_connection_leave_nothing(
        self, app: App, database: str, db: asyncpg.Connection
    ) -> None:
        await db.execute(
            "alter table graphile_worker._private_jobs add constraint small check (priority < 100)"
        )
        specs = [JobSpec("t") for _ in range(1500)] + [JobSpec("t", priority=100)]
        with self.autocommitting(database) as connection:
            with pytest.warns(AutocommitWarning), pytest.raises(Exception, match="refused"):
                app.add_jobs_sync(specs, connection=connection)
            assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        assert await count(database) == 0

    def test_warning_is_shown_once_for_each_line(self, app: App, database: str) -> None:
        with self.autocommitting(database) as connection, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(3):
                app.add_job_sync("t", connection=connection)
            app.add_job_sync("t", connection=connection)
        assert len(caught) == 2

    async def test_explicit_transaction_of_an_autocommit_connection_counts(
        self, app: App, database: str
    ) -> None:
        with (
            self.autocommitting(database) as connection,
            connection.transaction(force_rollback=True),
            connection.transaction(),
        ):
            app.add_job_sync("t", connection=connection)
        assert await count(database) == 0

    async def test_sqlalchemy_engine_with_autocommit_is_noticed(self, app: App, database: str) -> None:
        engine = stacks.sync_engine(database, isolation_level="AUTOCOMMIT")
        with Session(engine) as session:
            with pytest.warns(AutocommitWarning):
                app.add_job_sync("t", connection=session)
            with pytest.raises(ConfigurationError, match="require_transaction"):
                app.bind(session, require_transaction=True).add_job_sync("t")
        engine.dispose()
        assert await count(database) == 1

    async def test_require_transaction_refuses_autocommit(self, database: str) -> None:
        app = App(NOWHERE, require_transaction=True)

        @app.task
        def send() -> None: ...

        utils = WorkerUtils(NOWHERE, require_transaction=True)
        with self.autocommitting(database) as connection:
            for call in (
                lambda: app.add_job_sync("t", connection=connection),
                lambda: send.using(connection=connection).enqueue_sync(),
                lambda: utils.add_jobs_sync([JobSpec("t")], connection=connection),
                lambda: utils.remove_job_sync("k", connection=connection),
            ):
                with pytest.raises(ConfigurationError, match="require_transaction"):
                    call()
            with connection.transaction():
                send.using(connection=connection).enqueue_sync()
        assert await count(database) == 1

    async def test_one_call_can_require_a_transaction(self, app: App, database: str) -> None:
        utils = WorkerUtils(NOWHERE)
        strict: Any = {"require_transaction": True}

        def calls(connection: Any) -> list[Callable[[], object]]:
            on = {"connection": connection, **strict}
            return [
                lambda: app.add_job_sync("t", **on),
                lambda: app.add_jobs_sync([JobSpec("t")], **on),
                lambda: utils.add_job_sync("t", **on),
                lambda: utils.add_jobs_sync([JobSpec("t")], **on),
                lambda: utils.add_batch_job_sync("t", [1], **on),
                lambda: quick_add_job_sync("t", dsn=NOWHERE, **on),
            ]

        with self.autocommitting(database) as connection:
            for call in calls(connection):
                with pytest.raises(ConfigurationError, match="is not in a transaction"):
                    call()
            with connection.transaction():
                for call in calls(connection):
                    call()
        for call in calls(None):
            with pytest.raises(ConfigurationError, match="require_transaction=True needs connection="):
                await asyncio.to_thread(call)
        connection = await asyncpg.connect(database)
        for add in (app.add_job, utils.add_job, partial(quick_add_job, dsn=NOWHERE)):
            with pytest.raises(ConfigurationError, match="is not in a transaction"):
                await add("t", connection=connection, **strict)
        with pytest.raises(ConfigurationError, match="is not in a transaction"):
            await app.add_jobs([JobSpec("t")], connection=connection, **strict)
        await connection.close()
        assert await count(database) == 6

    async def test_task_can_require_a_transaction_for_one_call(self, database: str) -> None:
        app = App(database)
        errors: list[str] = []

        @app.task
        async def work(ctx: JobContext) -> None:
            for adding in (
                ctx.add_job("t", require_transaction=True),
                ctx.add_jobs([JobSpec("t")], require_transaction=True),
            ):
                try:
                    await adding
                except ConfigurationError as error:
                    errors.append(str(error))
            async with ctx.connection() as connection, connection.transaction():
                await ctx.add_job("kept", connection=connection, require_transaction=True)

        @app.task
        def on_thread(ctx: JobContext) -> None:
            try:
                ctx.add_job_sync("t", require_transaction=True)
            except ConfigurationError as error:
                errors.append(str(error))

        await work.enqueue()
        await on_thread.enqueue()
        assert (await app.run_once()).succeeded == 2
        assert len(errors) == 3
        assert [job.task_identifier for job in await app.utils.list_jobs()] == ["kept"]
        await app.close()

    async def test_required_transaction_is_not_forgotten_by_another_using(
        self, app: App, database: str
    ) -> None:
        @app.task
        def send() -> None: ...

        strict = send.using(require_transaction=True)
        with pytest.raises(ConfigurationError, match="needs connection="):
            strict.enqueue_sync()
        with (
            self.autocommitting(database) as connection,
            pytest.raises(ConfigurationError, match="is not in a transaction"),
        ):
            strict.using(connection=connection).enqueue_many_sync([{}])

    async def test_using_can_require_a_transaction(self, app: App, database: str) -> None:
        @app.task
        async def send() -> None: ...

        connection = await asyncpg.connect(database)
        strict = send.using(connection=connection, require_transaction=True)
        with pytest.raises(ConfigurationError, match="require_transaction"):
            await strict.enqueue()
        async with connection.transaction():
            await strict.enqueue()
        await connection.close()
        assert await count(database) == 1


class TestPipelines:
    async def test_jobs_are_added_in_psycopgs_pipeline_mode(self, app: App, database: str) -> None:
        with psycopg.connect(database) as connection, connection.pipeline():
            connection.execute("create table mine ()")
            app.add_job_sync("t", connection=connection)
            with pytest.raises(Exception, match="Division by zero"):
                self.fail(connection)
            app.add_jobs_sync([JobSpec("t")] * 3, connection=connection)
            connection.execute("drop table mine")
        assert await count(database) == 4

    async def test_jobs_are_added_in_an_async_pipeline(self, app: App, database: str) -> None:
        async with await psycopg.AsyncConnection.connect(database) as connection, connection.pipeline():
            await connection.execute("create table mine ()")
            await app.add_job("t", connection=connection)
            await connection.execute("drop table mine")
        assert await count(database) == 1

    def fail(self, connection: Any) -> None:
        statement = OneTextStatement("select (1 / length(", "::text))::text")
        fetch_text_sync(connection, Schema(), statement, "")


class TestSqlAlchemy:
    async def test_job_added_before_the_first_statement_is_rolled_back(self, app: App, database: str) -> None:
        engine = stacks.async_engine(database)
        async with AsyncSession(engine) as session:
            await app.add_job("t", connection=session)
            await session.rollback()
        await engine.dispose()
        assert await count(database) == 0

    async def test_nested_transactions_of_a_session(self, app: App, database: str) -> None:
        engine = stacks.sync_engine(database)
        with Session(engine) as session:
            with session.begin_nested():
                app.add_job_sync("kept", connection=session)
            undone = session.begin_nested()
            app.add_job_sync("undone", connection=session)
            undone.rollback()
            session.commit()
        engine.dispose()
        assert await count(database) == 1

    async def test_session_with_binds_takes_its_connection(self, app: App, database: str) -> None:
        class Base(sqlalchemy.orm.DeclarativeBase): ...

        class Order(Base):
            __tablename__ = "orders"
            id: sqlalchemy.orm.Mapped[int] = sqlalchemy.orm.mapped_column(primary_key=True)

        engine = stacks.sync_engine(database)
        Base.metadata.create_all(engine)
        with Session(binds={Order: engine}) as session:
            session.add(Order(id=1))
            with pytest.raises(ConfigurationError, match="bind_arguments"):
                app.add_job_sync("t", connection=session)
            app.add_job_sync("t", connection=session.connection(bind_arguments={"mapper": Order}))
            session.commit()
        engine.dispose()
        assert await count(database) == 1

    async def test_streaming_connection_adds_the_job(self, app: App, database: str) -> None:
        engine = stacks.sync_engine(database, execution_options={"stream_results": True})
        with engine.begin() as connection:
            app.add_job_sync("t", connection=connection)
        engine.dispose()
        assert await count(database) == 1


class TestDjango:
    async def test_atomic_block_rolls_back_its_jobs(self, app: App, database: str) -> None:
        def work() -> None:
            db = stacks.configure_django(database)
            with db.transaction.atomic():
                app.add_job_sync("kept", connection=db.connection)
                with db.transaction.atomic():
                    app.add_job_sync("undone", connection="default")
                    db.transaction.set_rollback(True)
            db.connection.close()

        await asyncio.to_thread(work)
        assert await count(database) == 1

    async def test_connection_is_used_on_djangos_thread_in_a_coroutine(self, app: App, database: str) -> None:
        db = stacks.configure_django(database)
        with pytest.warns(AutocommitWarning):
            await app.add_job("t", connection="default")
        with pytest.warns(AutocommitWarning):
            await app.add_job("t", connection=db.connection)
        await sync_to_async(db.connections.close_all)()
        assert await count(database) == 2


class Waiting(Middleware):
    async def enqueue(self, _specs: Any, proceed: Any) -> Any:
        await asyncio.sleep(0)
        return await proceed()


class Passing(Middleware):
    async def enqueue(self, _specs: Any, proceed: Any) -> Any:
        return await proceed()


class TestMiddleware:
    def test_middleware_that_waits_is_named_on_a_sync_connection(self, database: str) -> None:
        app = App(NOWHERE, middleware=[Passing(), Waiting(), Passing()])
        with (
            psycopg.connect(database) as connection,
            pytest.raises(ConfigurationError, match=r"Waiting\.enqueue waits"),
        ):
            app.add_job_sync("t", connection=connection)

    async def test_middleware_may_wait_on_an_async_connection(self, database: str) -> None:
        app = App(NOWHERE, middleware=[Waiting()])
        async with await psycopg.AsyncConnection.connect(database) as connection:
            assert (await app.add_job("t", connection=connection)).task_identifier == "t"


async def test_quick_add_job_takes_any_connection(database: str) -> None:
    async with await psycopg.AsyncConnection.connect(database) as connection:
        await quick_add_job("t", dsn=NOWHERE, connection=connection)
    with psycopg.connect(database) as sync:
        quick_add_job_sync("t", dsn=NOWHERE, connection=sync)
    assert await count(database) == 2


def test_quick_add_job_sync_opens_its_own_connection(database: str) -> None:
    assert quick_add_job_sync("t", {"a": 1}, dsn=database).payload == {"a": 1}


async def test_schema_name_may_look_like_placeholders(empty_database: str) -> None:
    name = "odd %s 100% :x \\:y ::z $1 ?"
    await run_migrations(empty_database, schema=name)
    app = App(NOWHERE, schema=name)
    for stack in ("asyncpg", "psycopg", "SQLAlchemy AsyncSession", "SQLAlchemy AsyncSession on psycopg"):
        async with stacks.ASYNC[stack](empty_database) as given:
            assert (await app.add_job("t", connection=given.connection)).task_identifier == "t"
    for sync_stack in ("psycopg", "psycopg2", "pg8000", "SQLAlchemy Session on psycopg2", "pg8000.native"):
        with stacks.SYNC[sync_stack](empty_database) as given:
            assert app.add_job_sync("t", connection=given.connection).task_identifier == "t"


async def test_bound_app_adds_and_cancels_jobs(app: App, database: str) -> None:
    @app.task
    async def send(to: str) -> None: ...

    async with await psycopg.AsyncConnection.connect(database) as connection:
        jobs = app.bind(connection)
        job = await jobs.using(send, priority=3).enqueue(to="Ann")
        assert job.priority == 3
        assert await jobs.cancel_job(job.id) == "cancelled"
        assert len(await jobs.add_jobs([send.spec(to="Bob")])) == 1
    assert await count(database) == 2


async def test_task_on_a_thread_adds_a_job_in_its_own_transaction(database: str) -> None:
    app = App(database)

    @app.task
    def first(ctx: JobContext) -> None:
        with psycopg.connect(database) as connection:
            ctx.add_job_sync("undone", connection=connection)
            connection.rollback()
            ctx.add_job_sync("kept", {"n": 1}, connection=connection)
        ctx.add_job_sync("own")

    await first.enqueue()
    await app.run_once()
    found = await app.utils.list_jobs()
    assert sorted(job.task_identifier for job in found) == ["kept", "own"]
    await app.close()


async def test_task_adds_a_job_in_the_transaction_of_a_session(database: str) -> None:
    app = App(database)
    engine = stacks.async_engine(database)

    @app.task
    async def first(ctx: JobContext) -> None:
        async with AsyncSession(engine) as session, session.begin():
            await ctx.add_job("kept", connection=session)

    await first.enqueue()
    await app.run_once()
    assert [job.task_identifier for job in await app.utils.list_jobs()] == ["kept"]
    await app.close()
    await engine.dispose()


@AUTOCOMMITS
class TestInterruptedCalls:
    async def test_cancelled_add_leaves_no_transaction_on_an_autocommit_connection(
        self, app: App, database: str
    ) -> None:
        async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
            for steps in range(12):
                adding = asyncio.ensure_future(app.add_job("t", connection=connection))
                for _ in range(steps):
                    await asyncio.sleep(0)
                adding.cancel()
                await asyncio.gather(adding, return_exceptions=True)
                assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE

    async def test_time_limit_of_the_caller_is_not_doubled_by_a_repetition(
        self, db: asyncpg.Connection, app: App, database: str
    ) -> None:
        holder, sent = await asyncpg.connect(database), list[str]()
        await app.add_job("t", job_key="k", connection=db)
        async with holder.transaction():
            await holder.execute("select from graphile_worker._private_jobs for update")
            async with db.transaction():
                await app.add_job("other", connection=db)
                await db.execute("set local statement_timeout = '200ms'")
                with (
                    db.query_logger(lambda record: sent.append(record.query)),
                    pytest.raises(DatabaseError),
                ):
                    await app.add_job("t", job_key="k", connection=db)
                await db.execute("set local statement_timeout = 0")
                assert len(sent) == 1, "a repetition would take the time limit twice"
                await app.add_job("third", connection=db)
        await holder.close()
        assert await count(database) == 3


class TestSecretsInErrors:
    def test_connection_string_as_connection_is_not_repeated(self, app: App) -> None:
        with pytest.raises(ConfigurationError, match="connection string") as caught:
            app.add_job_sync("t", connection="postgresql://me:s3cret@host/db")
        assert "s3cret" not in str(caught.value)

    def test_error_of_sqlalchemy_without_sqlstate_does_not_show_the_payload(
        self, app: App, database: str
    ) -> None:
        engine = sqlalchemy.create_engine(database.replace("postgresql://", "postgresql+psycopg://"))
        with engine.connect() as connection:
            connection.connection.dbapi_connection.close()  # type: ignore[union-attr]
            with pytest.raises(DatabaseError) as caught:
                app.add_job_sync("t", {"secret": "s3cret"}, connection=connection)
        engine.dispose()
        assert "s3cret" not in str(caught.value)


def test_proxy_of_a_connection_is_recognized(app: App, database: str) -> None:
    """Tracers wrap connections in proxies that report the class of the connection."""

    class Proxy:
        def __init__(self, wrapped: Any) -> None:
            vars(self)["wrapped"] = wrapped

        @property  # type: ignore[misc]
        def __class__(self) -> Any:
            return type(vars(self)["wrapped"])

        def __getattr__(self, name: str) -> Any:
            return getattr(vars(self)["wrapped"], name)

    with psycopg2.connect(database) as connection:
        job = app.add_job_sync("t", connection=cast("Any", Proxy(connection)))
        assert job.task_identifier == "t"
    connection.close()


async def test_sync_twin_of_a_read_refuses_an_asyncpg_connection_unharmed(
    db: asyncpg.Connection, database: str
) -> None:
    utils = WorkerUtils(database)
    with pytest.raises(ConfigurationError, match="belongs to an event loop"):
        utils.stats_sync(connection=db)
    with pytest.raises(ConfigurationError, match="asyncpg connection, which has to be awaited"):
        utils.cleanup_sync(connection=db)
    assert await db.fetchval("select 1") == 1


def test_autocommit_pipeline_with_pending_results_is_refused(app: App, database: str) -> None:
    with psycopg.connect(database, autocommit=True) as connection, connection.pipeline() as pipeline:
        connection.execute("select 1")
        with pytest.raises(ConfigurationError, match=r"pipeline\.sync\(\)"):
            app.add_job_sync("t", connection=connection)
        pipeline.sync()


async def test_workers_and_schedules_are_the_same_on_any_connection(
    db: asyncpg.Connection, database: str
) -> None:
    await db.execute(
        """
        insert into graphile_worker._private_workers (id, last_heartbeat_at, started_at, metadata)
        values ('worker-é', now(), now() - interval '1 hour', '{"language": "rust", "pid": 7}');
        insert into graphile_worker._private_known_crontabs (identifier, known_since, last_execution)
        values ('new', now(), null), ('old', now() - interval '1 day', now());
        select graphile_worker.add_job('t');
        update graphile_worker._private_jobs set locked_by = 'node', locked_at = now();
        """
    )
    async with WorkerUtils(database) as utils:
        workers, schedules = await utils.workers(), await utils.known_crontabs()
    [alive, node] = workers
    assert (alive.id, alive.pid, node.id, node.jobs) == ("worker-é", 7, "node", 1)
    with psycopg.connect(database, options="-c timezone=Asia/Kathmandu") as connection:
        sync = WorkerUtils(NOWHERE)
        found = sync.workers_sync(connection=connection)
        assert [(one.id, one.started_at, one.jobs) for one in found] == [
            (one.id, one.started_at, one.jobs) for one in workers
        ]
        assert [one.id for one in sync.workers_sync(include_locks=False, connection=connection)] == [alive.id]
        assert sync.known_crontabs_sync(connection=connection) == schedules
        sync.force_unlock_workers_sync(["node"], connection=connection)
        assert sync.list_jobs_sync(locked_by="node", connection=connection) == []
        connection.rollback()
        assert len(sync.list_jobs_sync(locked_by="node", connection=connection)) == 1


def test_migrations_and_cleanup_say_that_they_need_asyncpg(database: str) -> None:
    utils = WorkerUtils(NOWHERE)
    with psycopg.connect(database) as connection:
        for call in (utils.migrate_sync, utils.cleanup_sync, utils.pending_migrations_sync):
            with pytest.raises(ConfigurationError, match="asyncpg connection"):
                call(connection=connection)  # type: ignore[arg-type]
