"""Assertions about enqueued jobs, and contexts for tasks that a test calls directly."""

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
    override,
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
async def stock(payload: Item) -> None: ...


@app.task(batch=True)
async def index(words: list[str]) -> None: ...


@task
async def unattached(n: int) -> None: ...


@app.task
async def switch(on: str) -> None: ...


@pytest.fixture
async def queue(database: str) -> AsyncIterator[App]:
    async with override(app, dsn=database):
        yield app


class TestEnqueued:
    async def test_misspelled_argument_is_rejected_with_a_hint(self, queue: App) -> None:  # noqa: ARG002
        for check in (assert_enqueued, assert_not_enqueued):
            with pytest.raises(
                ConfigurationError, match="'ship' has no parameter 'ordre'; did you mean 'order'"
            ):
                await check(ship, ordre=UUID(int=7))

    async def test_subset_of_the_arguments_matches(self, queue: App) -> None:
        added = await ship.enqueue(UUID(int=7), [Item("A", 2)], day=datetime(2030, 1, 1, tzinfo=UTC))
        assert await assert_enqueued(ship) == added
        await assert_enqueued(ship, order=UUID(int=7))
        await assert_enqueued(ship, items=[Item("A", 2)], day=datetime(2030, 1, 1, tzinfo=UTC))
        await assert_enqueued(ship, {"order": str(UUID(int=7))})
        await assert_enqueued("ship", on=queue, order=UUID(int=7))
        await assert_enqueued(JobSpec("ship", {"order": UUID(int=7)}), on=queue)
        await assert_not_enqueued(ship, order=UUID(int=8))
        await assert_not_enqueued(ship, day=None)
        await assert_not_enqueued(stock)
        with pytest.raises(AssertionError, match="is enqueued that should not be: 'ship'"):
            await assert_not_enqueued(ship, order=UUID(int=7))

    @pytest.mark.usefixtures("queue")
    async def test_payload_may_be_a_dataclass_or_a_list(self) -> None:
        await stock.enqueue(Item("A"))
        await index.enqueue(["a", "b"])
        await assert_enqueued(stock, Item("A"))
        await assert_enqueued(stock, sku="A")
        await assert_enqueued(index, ["a", "b"])
        await assert_not_enqueued(index, ["a"])

    async def test_options_of_using_must_match(self, queue: App) -> None:
        at = datetime(2030, 1, 1, 8, tzinfo=UTC)
        await index.using(queue_name="q", priority=3, job_key="k", max_attempts=2, flags=["f", "g"]).enqueue(
            ["a"]
        )
        await index.using(run_at=at, timeout=5).enqueue(["b"])
        await index.using(run_at=timedelta(hours=2)).enqueue(["c"])
        for matching in (
            index.using(queue_name="q", priority=3),
            index.using(job_key="k", job_key_mode="replace", max_attempts=2),
            index.using(flags=["f"]),
        ):
            assert (await assert_enqueued(matching)).payload == ["a"]
        for matching in (index.using(run_at=at), index.using(run_at=at.isoformat()), index.using(timeout=5)):
            assert (await assert_enqueued(matching)).payload == ["b"]
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
    async def test_message_lists_the_jobs_that_are_enqueued_instead(self) -> None:
        with pytest.raises(AssertionError, match=r"^No matching job .*: 'ship'\. Nothing is enqueued\.$"):
            await assert_enqueued(ship)
        await index.enqueue(["a"])
        with pytest.raises(AssertionError) as raised:
            await assert_enqueued(ship.using(priority=-5), order=UUID(int=1))
        first, second = str(raised.value).splitlines()
        assert first == (
            "No matching job is enqueued: 'ship' with {'order': '00000000-0000-0000-0000-000000000001'} "
            "(priority=-5). Enqueued jobs of other tasks:"
        )
        assert second.startswith("  1: 'index' with ['a'] (priority=0, run_at=20")
        await index.enqueue_many([[str(n)] for n in range(30)])
        with pytest.raises(AssertionError, match=r"jobs of that task:\n(  .*\n){20}  and 11 more"):
            await assert_enqueued(index, ["b"])

    async def test_failed_jobs_are_not_enqueued(self, queue: App) -> None:
        failed = await index.enqueue(["a"])
        await queue.utils.permanently_fail_jobs([failed.id], "no")
        later = await index.using(run_at=timedelta(hours=1)).enqueue(["b"])
        assert [waiting.id for waiting in await enqueued(index)] == [later.id]
        assert [waiting.id for waiting in await enqueued(queue)] == [later.id]

    async def test_assertions_see_jobs_of_an_open_transaction(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        async with db.transaction(), override(app, dsn=database):
            await index.using(connection=db).enqueue(["a"])
            await assert_enqueued(index.using(connection=db), ["a"])
            await assert_enqueued(index, ["a"], on=db)
            await assert_enqueued("index", ["a"], on=db)
            await assert_enqueued(JobSpec("index"), on=db)
            await assert_not_enqueued(index)
            assert len(await enqueued(db, "index")) == len(await enqueued(db, index)) == 1
            assert len(await enqueued(index.using(connection=db))) == 1

    async def test_unattached_task_needs_a_connection(self, db: asyncpg.Connection) -> None:
        await db.execute("select graphile_worker.add_job('unattached', '{\"n\": 1}')")
        await assert_enqueued(unattached, n=1, on=db)
        with pytest.raises(ConfigurationError, match="belongs to no app"):
            await assert_enqueued(unattached, n=1)
        with pytest.raises(ConfigurationError, match="pass a task that belongs to an app, or on=app"):
            await assert_enqueued("unattached")

    @pytest.mark.usefixtures("queue")
    async def test_task_parameter_named_on_is_passed_in_a_dict(self) -> None:
        await switch.enqueue(on="a")
        await assert_enqueued(switch, {"on": "a"})
        await assert_not_enqueued(switch, {"on": "b"})
        for check in (assert_enqueued, assert_not_enqueued):
            with pytest.raises(ConfigurationError, match=r"Invalid on='a': .* pass a dict: {'on': 'a'}"):
                await check(switch, on="a")  # type: ignore[arg-type]

    async def test_invalid_task_and_invalid_on_are_rejected(self, queue: App) -> None:
        with pytest.raises(ConfigurationError, match=r"Invalid task 5: .* JobSpec"):
            await assert_enqueued(5, on=queue)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=r"Invalid on=5: pass an app, a WorkerUtils or"):
            await assert_enqueued("index", on=5)  # type: ignore[arg-type]

    async def test_run_at_is_compared_with_the_test_clock(self, db: asyncpg.Connection) -> None:
        async with override(app, connection=db, clock=Clock(datetime(2040, 1, 1, tzinfo=UTC))):
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
    added = ctx.run_sync(ctx.add_job("next"))
    return added.task_identifier


class TestContexts:
    async def test_task_can_be_called_with_a_fake_context(self) -> None:
        ctx = context(job("greet", attempts=3), state=State("Hi"))
        assert await greet("Ann", ctx) == "Hi, Ann"
        assert ctx.added == [JobSpec("next", {"n": 3}, priority=2), JobSpec("last")]
        assert (ctx.deadline, ctx.cron, ctx.queue_name, bool(ctx.stop_requested)) == (None, None, None, False)
        assert isinstance(ctx, JobContext)

    def test_fake_context_works_without_an_event_loop(self) -> None:
        ctx = context()
        assert on_thread(ctx) == "next"
        assert ctx.added == [JobSpec("next")]

    async def test_fake_context_works_on_a_thread_next_to_an_event_loop(self) -> None:
        assert await asyncio.to_thread(on_thread, context()) == "next"
        with pytest.raises(TaskError, match="await"):
            on_thread(context())

    async def test_stop_requested_can_be_set(self) -> None:
        ctx = context()
        ctx.stop_requested.set()
        await ctx.stop_requested
        assert ctx.stop_requested

    def test_fake_context_may_have_a_deadline(self) -> None:
        clock = Clock(datetime(2040, 1, 1, tzinfo=UTC))
        for limited in (
            context(timeout=timedelta(seconds=5), clock=clock),
            context(job(flags=frozenset({"timeout:5"})), clock=clock),
        ):
            assert limited.deadline == datetime(2040, 1, 1, 0, 0, 5, tzinfo=UTC)
            limited.extend_deadline(60)
            assert limited.deadline == datetime(2040, 1, 1, 0, 1, tzinfo=UTC)
            limited.stop_requested.set()
            assert limited.stop_requested
        for ctx in (context(), context(timeout=5)):
            with pytest.raises(ConfigurationError, match="extend_deadline is -1"):
                ctx.extend_deadline(-1)
        with pytest.raises(ConfigurationError, match="timeout is 0"):
            context(timeout=0)

    async def test_queries_without_a_connection_are_rejected(self) -> None:
        ctx = context()
        for query in (ctx.query("select 1"), ctx.utils.stats()):
            with pytest.raises(ConfigurationError, match="context has no database"):
                await query
        with pytest.raises(InvalidJobError):
            await ctx.add_job("")

    async def test_fake_context_uses_the_given_connection(self, db: asyncpg.Connection) -> None:
        clock = Clock(datetime(2040, 1, 1, tzinfo=UTC))
        ctx = context(connection=db, clock=clock)
        await ctx.add_job("next")
        assert (ctx.added, ctx.now()) == ([], clock.now())
        assert [waiting.run_at for waiting in await enqueued(db)] == [clock.now()]
        assert [tuple(row) for row in await ctx.query("select 1")] == [(1,)]
        assert threading.current_thread() is threading.main_thread()

    def test_job_rejects_unknown_fields(self) -> None:
        assert job("a", [1], key="k", id=5).key == "k"
        with pytest.raises(ConfigurationError, match="has no field 'colour'"):
            job(colour="red")
