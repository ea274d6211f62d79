"""What a test can say about jobs that are enqueued, and tasks that it calls by itself."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from uuid import UUID

import asyncpg
import pytest

from graphile_worker import App, ConfigurationError, InvalidJobError, JobContext, JobSpec, TaskError, task
from graphile_worker.testing import (
    Clock,
    Databases,
    assert_enqueued,
    assert_not_enqueued,
    context,
    enqueued,
    job,
    using,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


app = App()


@dataclass
class Item:
    sku: str
    count: int = 1


@app.task
async def ship(order: UUID, items: list[Item], day: datetime | None = None) -> None: ...


@app.task
async def whole(payload: Item) -> None: ...


@app.task(batch=True)
async def index(words: list[str]) -> None: ...


@task
async def loose(n: int) -> None: ...


@app.task
async def switch(on: str) -> None: ...


@pytest.fixture
async def queue(database: str) -> AsyncIterator[App]:
    async with using(app, dsn=database):
        yield app


class TestEnqueued:
    async def test_a_slip_in_a_name_is_told(self, queue: App) -> None:  # noqa: ARG002
        for check in (assert_enqueued, assert_not_enqueued):
            with pytest.raises(
                ConfigurationError, match="'ship' has no parameter 'ordre'; did you mean 'order'"
            ):
                await check(ship, ordre=UUID(int=7))

    async def test_some_of_the_arguments_do(self, queue: App) -> None:
        added = await ship.enqueue(UUID(int=7), [Item("A", 2)], day=datetime(2030, 1, 1, tzinfo=UTC))
        assert await assert_enqueued(ship) == added
        await assert_enqueued(ship, order=UUID(int=7))
        await assert_enqueued(ship, items=[Item("A", 2)], day=datetime(2030, 1, 1, tzinfo=UTC))
        await assert_enqueued(ship, {"order": str(UUID(int=7))})
        await assert_enqueued("ship", on=queue, order=UUID(int=7))
        await assert_enqueued(JobSpec("ship", {"order": UUID(int=7)}), on=queue)
        await assert_not_enqueued(ship, order=UUID(int=8))
        await assert_not_enqueued(ship, day=None)
        await assert_not_enqueued(whole)
        with pytest.raises(AssertionError, match="is enqueued, and should not be: 'ship'"):
            await assert_not_enqueued(ship, order=UUID(int=7))

    @pytest.mark.usefixtures("queue")
    async def test_payloads_of_other_kinds(self) -> None:
        await whole.enqueue(Item("A"))
        await index.enqueue(["a", "b"])
        await assert_enqueued(whole, Item("A"))
        await assert_enqueued(whole, sku="A")
        await assert_enqueued(index, ["a", "b"])
        await assert_not_enqueued(index, ["a"])

    async def test_what_was_said_by_using(self, queue: App) -> None:
        at = datetime(2030, 1, 1, 8, tzinfo=UTC)
        await index.using(queue_name="q", priority=3, job_key="k", max_attempts=2, flags=["f", "g"]).enqueue(
            ["a"]
        )
        await index.using(run_at=at, timeout=5).enqueue(["b"])
        await index.using(run_at=timedelta(hours=2)).enqueue(["c"])
        for fitting in (
            index.using(queue_name="q", priority=3),
            index.using(job_key="k", job_key_mode="replace", max_attempts=2),
            index.using(flags=["f"]),
        ):
            assert (await assert_enqueued(fitting)).payload == ["a"]
        for fitting in (index.using(run_at=at), index.using(run_at=at.isoformat()), index.using(timeout=5)):
            assert (await assert_enqueued(fitting)).payload == ["b"]
        assert (await assert_enqueued(index.using(run_at=timedelta(hours=2)))).payload == ["c"]
        assert (await assert_enqueued(index.using(job_key=None))).payload == ["b"]
        for other in (
            index.using(queue_name="r"),
            index.using(priority=0, queue_name="q"),
            index.using(flags=["f", "h"]),
            index.using(run_at=at + timedelta(minutes=1)),
            index.using(run_at=timedelta(hours=3)),
        ):
            await assert_not_enqueued(other)
        await assert_not_enqueued(JobSpec("index", ["a"], priority=4), on=queue)

    @pytest.mark.usefixtures("queue")
    async def test_the_message_tells_what_is_there_instead(self) -> None:
        with pytest.raises(
            AssertionError, match=r"^No such job is enqueued: 'ship'\. Nothing is enqueued\.$"
        ):
            await assert_enqueued(ship)
        await index.enqueue(["a"])
        with pytest.raises(AssertionError) as raised:
            await assert_enqueued(ship.using(priority=-5), order=UUID(int=1))
        first, second = str(raised.value).splitlines()
        assert first == (
            "No such job is enqueued: 'ship' with {'order': '00000000-0000-0000-0000-000000000001'} "
            "(priority=-5). Of other tasks there are:"
        )
        assert second.startswith("  1: 'index' with ['a'] (priority=0, run_at=20")
        await index.enqueue_many([[str(n)] for n in range(30)])
        with pytest.raises(AssertionError, match=r"Of that task there are:\n(  .*\n){20}  and 11 more"):
            await assert_enqueued(index, ["b"])

    async def test_jobs_that_run_or_failed_are_not_waiting(self, queue: App) -> None:
        failed = await index.enqueue(["a"])
        await queue.utils.permanently_fail_jobs([failed.id], "no")
        later = await index.using(run_at=timedelta(hours=1)).enqueue(["b"])
        assert [waiting.id for waiting in await enqueued(index)] == [later.id]
        assert [waiting.id for waiting in await enqueued(queue)] == [later.id]

    async def test_on_a_connection(self, db: asyncpg.Connection, database: str) -> None:
        async with db.transaction(), using(app, dsn=database):
            await index.using(connection=db).enqueue(["a"])
            await assert_enqueued(index.using(connection=db), ["a"])
            await assert_enqueued(index, ["a"], on=db)
            await assert_enqueued("index", ["a"], on=db)
            await assert_enqueued(JobSpec("index"), on=db)
            await assert_not_enqueued(index)
            assert len(await enqueued(db, "index")) == len(await enqueued(db, index)) == 1
            assert len(await enqueued(index.using(connection=db))) == 1

    async def test_a_task_of_no_app(self, db: asyncpg.Connection) -> None:
        await db.execute("select graphile_worker.add_job('loose', '{\"n\": 1}')")
        await assert_enqueued(loose, n=1, on=db)
        with pytest.raises(ConfigurationError, match="belongs to no app"):
            await assert_enqueued(loose, n=1)
        with pytest.raises(ConfigurationError, match=r"Where are the jobs\?"):
            await assert_enqueued("loose")

    @pytest.mark.usefixtures("queue")
    async def test_a_parameter_that_is_called_on_is_looked_for_in_a_dict(self) -> None:
        await switch.enqueue(on="a")
        await assert_enqueued(switch, {"on": "a"})
        await assert_not_enqueued(switch, {"on": "b"})
        for check in (assert_enqueued, assert_not_enqueued):
            with pytest.raises(
                ConfigurationError, match=r"on= says where to look: .* not 'a'\. .* pass a dict: {'on': 'a'}"
            ):
                await check(switch, on="a")  # type: ignore[arg-type]

    async def test_what_is_no_task_is_refused(self, queue: App) -> None:
        with pytest.raises(ConfigurationError, match=r"^5 is neither a task, nor the name of one, nor a"):
            await assert_enqueued(5, on=queue)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=r"on= says where to look: .*, not 5\.$"):
            await assert_enqueued("index", on=5)  # type: ignore[arg-type]

    async def test_by_a_clock(self, db: asyncpg.Connection) -> None:
        async with using(app, connection=db, clock=Clock(datetime(2040, 1, 1, tzinfo=UTC))):
            await index.using(run_at=timedelta(days=1)).enqueue(["a"])
            await assert_enqueued(index.using(run_at=timedelta(days=1)))
            await assert_enqueued(index.using(run_at=datetime(2040, 1, 2, tzinfo=UTC)))


@dataclass
class State:
    greeting: str


@app.task
async def greet(payload: str, ctx: JobContext[State]) -> str:
    await ctx.add_job("next", {"n": ctx.job.attempts}, priority=2)
    await ctx.add_jobs([JobSpec("last")])
    ctx.logger.info("greeted")
    return f"{ctx.state.greeting}, {payload}"


@app.task
def on_thread(ctx: JobContext) -> str:
    added = ctx.blocking(ctx.add_job("next"))
    return added.task_identifier


class TestContexts:
    async def test_a_task_can_be_called_with_one(self) -> None:
        ctx = context(job("greet", attempts=3), state=State("Hi"))
        assert await greet("Ann", ctx) == "Hi, Ann"
        assert ctx.added == [JobSpec("next", {"n": 3}, priority=2), JobSpec("last")]
        assert (ctx.deadline, ctx.cron, ctx.queue_name, bool(ctx.stopping)) == (None, None, None, False)
        assert isinstance(ctx, JobContext)

    def test_without_an_event_loop(self) -> None:
        ctx = context()
        assert on_thread(ctx) == "next"
        assert ctx.added == [JobSpec("next")]

    async def test_on_a_thread_beside_one(self) -> None:
        assert await asyncio.to_thread(on_thread, context()) == "next"
        with pytest.raises(TaskError, match="use await"):
            on_thread(context())

    async def test_it_can_be_told_to_stop(self) -> None:
        ctx = context()
        ctx.stopping.set()
        await ctx.stopping
        assert ctx.stopping

    def test_it_can_have_a_deadline(self) -> None:
        clock = Clock(datetime(2040, 1, 1, tzinfo=UTC))
        for limited in (
            context(timeout=timedelta(seconds=5), clock=clock),
            context(job(flags=frozenset({"timeout:5"})), clock=clock),
        ):
            assert limited.deadline == datetime(2040, 1, 1, 0, 0, 5, tzinfo=UTC)
            limited.extend_deadline(60)
            assert limited.deadline == datetime(2040, 1, 1, 0, 1, tzinfo=UTC)
            limited.stopping.set()
            assert limited.stopping
        for ctx in (context(), context(timeout=5)):
            with pytest.raises(ConfigurationError, match="extend_deadline is -1"):
                ctx.extend_deadline(-1)
        with pytest.raises(ConfigurationError, match="timeout is 0"):
            context(timeout=0)

    async def test_without_a_database_there_is_none(self) -> None:
        ctx = context()
        for asking in (ctx.query("select 1"), ctx.utils.stats()):
            with pytest.raises(ConfigurationError, match="context has no database"):
                await asking
        with pytest.raises(InvalidJobError):
            await ctx.add_job("")

    async def test_with_one_it_is_that(self, db: asyncpg.Connection) -> None:
        clock = Clock(datetime(2040, 1, 1, tzinfo=UTC))
        ctx = context(connection=db, clock=clock)
        await ctx.add_job("next")
        assert (ctx.added, ctx.now()) == ([], clock.now())
        assert [waiting.run_at for waiting in await enqueued(db)] == [clock.now()]
        assert [tuple(row) for row in await ctx.query("select 1")] == [(1,)]
        assert threading.current_thread() is threading.main_thread()

    def test_a_job_has_no_other_fields(self) -> None:
        assert job("a", [1], key="k", id=5).key == "k"
        with pytest.raises(ConfigurationError, match="A job has no colour"):
            job(colour="red")
