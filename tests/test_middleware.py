"""Middleware: around the running of jobs, around their adding, and before they are claimed."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import time
from collections import Counter
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import pytest

from graphile_worker import (
    App,
    Cancel,
    ConfigurationError,
    Drained,
    Fail,
    InvalidJobError,
    Job,
    JobContext,
    JobSkippedError,
    JobSpec,
    Middleware,
    Retry,
    Snooze,
    TaskError,
    TaskTimeoutError,
    WorkerUtils,
    run_once,
    task,
)
from graphile_worker._runtime import deadline
from graphile_worker.middleware import BlockedLoop, ConcurrencyLimits, SlowJobs
from support.workers import DEADLINE, Gate, Heard, running

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphile_worker.middleware import Adding, Running
    from graphile_worker.testing import Databases


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


class Around(Middleware):
    """Whatever a test wants it to be."""

    def __init__(self, execute: Callable[..., Any]) -> None:
        self._execute = execute

    async def execute(self, ctx: JobContext, proceed: Running) -> Any:
        return await self._execute(ctx, proceed)


class Before(Middleware):
    """The same, as a plain function."""

    def __init__(self, execute: Callable[..., Any]) -> None:
        self._execute = execute

    def execute(self, ctx: JobContext, proceed: Running) -> Any:
        return self._execute(ctx, proceed)


class Adds(Middleware):
    """The same, for what is added."""

    def __init__(self, enqueue: Callable[..., Any]) -> None:
        self._enqueue = enqueue

    async def enqueue(self, specs: Sequence[JobSpec], proceed: Adding) -> Any:
        return await self._enqueue(specs, proceed)


async def result(
    database: str, function: Callable[..., Any], *middleware: Middleware, payload: Any = None
) -> Job | None:
    """The job after its first run, if it is still there."""
    async with WorkerUtils(database) as utils:
        job = await utils.add_job("task", payload)
        await run_once({"task": function}, database, middleware=middleware, handle_signals=False)
        return await utils.get_job(id=job.id)


async def tries_again(_ctx: JobContext, proceed: Running) -> None:
    try:
        await proceed()
    except TaskTimeoutError:
        await proceed()


class TestAroundRunning:
    async def test_the_first_is_the_outermost(self, database: str) -> None:
        order: list[str] = []

        def named(name: str) -> Around:
            async def execute(_ctx: JobContext, proceed: Running) -> None:
                order.append(f"{name} before")
                await proceed()
                order.append(f"{name} after")

            return Around(execute)

        async def function(_payload: Any) -> None:
            order.append("task")

        assert await result(database, function, named("outer"), named("inner")) is None
        assert order == ["outer before", "inner before", "task", "inner after", "outer after"]

    async def test_a_plain_function_may_return_what_proceed_returned(self, database: str) -> None:
        ran: list[Any] = []

        def execute(ctx: JobContext, proceed: Running) -> Any:
            ran.append(ctx.job.payload)
            return proceed()

        assert await result(database, ran.append, Before(execute), payload={"n": 1}) is None
        assert ran == [{"n": 1}, {"n": 1}]

    @pytest.mark.parametrize("kind", ["async", "thread"])
    async def test_the_value_of_the_task_comes_back(self, database: str, kind: str) -> None:
        seen: list[Any] = []

        async def execute(_ctx: JobContext, proceed: Running) -> None:
            seen.append(await proceed())

        async def on_loop(_payload: Any) -> str:
            return "value"

        def on_thread(_payload: Any) -> str:
            return "value"

        assert await result(database, on_loop if kind == "async" else on_thread, Around(execute)) is None
        assert seen == ["value"]

    async def test_without_proceed_the_job_is_done_and_the_task_was_not_called(self, database: str) -> None:
        async def execute(_ctx: JobContext, _proceed: Running) -> None:
            return

        ran: list[Any] = []
        assert await result(database, ran.append, Around(execute)) is None
        assert ran == []

    async def test_another_payload_is_bound_and_checked_as_if_it_were_the_jobs(self, database: str) -> None:
        seen: list[Any] = []

        @task
        async def function(ctx: JobContext, n: int) -> None:
            seen.extend([n, ctx.job.payload])

        async def execute(ctx: JobContext, proceed: Running) -> None:
            await proceed({"n": ctx.job.payload["n"] + 1})

        assert await result(database, function, Around(execute), Around(execute), payload={"n": 1}) is None
        assert seen == [3, {"n": 3}]
        seen.clear()
        job = await result(
            database, function, Around(lambda _ctx, proceed: proceed({"n": "x"})), payload={"n": 1}
        )
        assert job is not None
        assert job.last_error == "The payload does not fit: n: Expected `int`, got `str`"
        assert job.payload == {"n": 1}

    @pytest.mark.parametrize(
        ("choice", "error", "attempts"),
        [
            (RuntimeError("no"), "no", (1, 25)),
            (Retry("later", after=60), "To be tried again in 60 s: later", (1, 25)),
            (Fail("never"), "never", (25, 25)),
            (Snooze(60), "Snoozed for 60 s", (0, 25)),
            (Cancel("not wanted"), "Cancelled: not wanted", (25, 25)),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
    )
    async def test_what_it_raises_counts_as_the_tasks(
        self, database: str, choice: Exception, error: str, attempts: tuple[int, int]
    ) -> None:
        async def execute(_ctx: JobContext, proceed: Running) -> None:
            await proceed()
            raise choice

        job = await result(database, lambda _payload: None, Around(execute))
        assert job is not None
        assert (job.last_error, (job.attempts, job.max_attempts)) == (error, attempts)

    async def test_it_sees_what_the_task_raised_and_may_forgive_it(self, database: str) -> None:
        seen: list[BaseException] = []

        async def execute(_ctx: JobContext, proceed: Running) -> None:
            try:
                await proceed()
            except RuntimeError as error:
                seen.append(error)

        def function(_payload: Any) -> None:
            raise RuntimeError("on purpose")

        assert await result(database, function, Around(execute)) is None
        assert str(seen[0]) == "on purpose"

    @pytest.mark.parametrize("times", [1, 2])
    async def test_whoever_forgets_to_wait_is_told(self, database: str, times: int) -> None:
        async def forgets(_ctx: JobContext, proceed: Running) -> None:
            proceed()
            if times == 2:
                await proceed()

        job = await result(database, lambda _payload: None, Around(forgets))
        assert job is not None
        assert job.last_error == (
            "Around.execute called proceed() and did not wait for it: write await proceed(), or return "
            "proceed()."
        )

    async def test_context_variables_reach_the_task(self, database: str) -> None:
        tenant: ContextVar[int] = ContextVar("tenant")
        seen: list[int] = []

        async def execute(_ctx: JobContext, proceed: Running) -> None:
            tenant.set(7)
            await proceed()

        async def on_loop(_payload: Any) -> None:
            seen.append(tenant.get())

        def on_thread(_payload: Any) -> None:
            seen.append(tenant.get())

        for function in (on_loop, on_thread):
            assert await result(database, function, Around(execute)) is None
        assert seen == [7, 7]

    async def test_items_of_a_batch_that_fail_are_left_if_their_number_is_the_same(
        self, database: str
    ) -> None:
        @task(batch=True)
        async def function(payload: list[int]) -> list[Any]:
            return [ValueError(n) if n % 2 else None for n in payload]

        async def adds_two(ctx: JobContext, proceed: Running) -> None:
            await proceed([n + 2 for n in ctx.job.payload])

        job = await result(database, function, Around(adds_two), payload=[1, 2, 3])
        assert job is not None
        assert job.payload == [1, 3]

        async def drops_one(ctx: JobContext, proceed: Running) -> None:
            await proceed(ctx.job.payload[1:])

        job = await result(database, function, Around(drops_one), payload=[1, 2, 3])
        assert job is not None
        assert job.payload == [1, 2, 3]
        assert "All items are tried again, for Around gave the batch another number" in (job.last_error or "")

    async def test_a_timeout_ends_the_task_and_is_seen(self, database: str) -> None:
        seen: list[str] = []

        @task(timeout=0.05)
        async def function() -> None:
            await asyncio.Event().wait()

        async def execute(ctx: JobContext, proceed: Running) -> None:
            assert ctx.deadline is not None
            try:
                await proceed()
            except Exception as error:
                seen.append(type(error).__name__)
                raise

        job = await result(database, function, Around(execute))
        assert job is not None
        assert seen == ["TaskTimeoutError"]

    async def test_after_a_timeout_the_task_may_be_tried_again_with_all_its_time(self, database: str) -> None:
        seen: list[str] = []

        @task(timeout=60)
        async def function(ctx: JobContext) -> None:
            seen.append("begins")
            if len(seen) == 1:
                ctx.extend_deadline(0.01)
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            seen.append("is to stop" if ctx.stopping else "ends")

        assert await result(database, function, Around(tries_again)) is None
        assert seen == ["begins", "begins", "ends"]

    async def test_a_thread_that_is_tried_again_after_a_timeout_is_not_told_to_stop_at_once(
        self, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(deadline, "_LAST_CHANCE", DEADLINE)
        seen: list[bool] = []

        @task(timeout=60)
        def function(ctx: JobContext) -> None:
            if not seen:
                ctx.extend_deadline(0.01)
                seen.append(ctx.stopping.wait(DEADLINE))
                return
            seen.append(bool(ctx.stopping))

        assert await result(database, function, Around(tries_again)) is None
        assert seen == [True, False]

    async def test_time_that_a_run_asks_for_when_it_is_over_is_not_the_next_ones(
        self, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(deadline, "_LAST_CHANCE", DEADLINE)
        left: list[timedelta] = []

        @task(timeout=600)
        def function(ctx: JobContext) -> None:
            assert ctx.deadline is not None
            left.append(ctx.deadline - datetime.now(UTC))
            if len(left) == 1:
                ctx.extend_deadline(0.01)
                assert ctx.stopping.wait(DEADLINE)
                ctx.extend_deadline(60)

        assert await result(database, function, Around(tries_again)) is None
        assert left[1] > timedelta(minutes=5)

    async def test_a_thread_of_the_first_run_does_not_meddle_with_the_second(
        self, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(deadline, "_LAST_CHANCE", 0.05)
        begun, meddled = threading.Event(), threading.Event()
        told: list[bool] = []
        left: list[timedelta] = []

        @task(timeout=60)
        def function(ctx: JobContext) -> None:
            if not begun.is_set():
                ctx.extend_deadline(0.01)
                assert begun.wait(DEADLINE), "the second run began, and this one goes on"
                told.append(bool(ctx.stopping))
                ctx.extend_deadline(600)
                meddled.set()
                return
            assert meddled.wait(DEADLINE)
            told.append(bool(ctx.stopping))
            assert ctx.deadline is not None
            left.append(ctx.deadline - datetime.now(UTC))

        async def looks_and_tries_again(ctx: JobContext, proceed: Running) -> None:
            try:
                await proceed()
            except TaskTimeoutError:
                again = proceed()
                told.append(bool(ctx.stopping))
                begun.set()
                await again

        assert await result(database, function, Around(looks_and_tries_again)) is None
        assert told == [False, True, False]
        assert left[0] < timedelta(minutes=2)

    @pytest.mark.parametrize("when", ["before", "after a timeout"])
    async def test_it_may_give_the_task_more_time(self, database: str, when: str) -> None:
        left: list[timedelta] = []

        @task(timeout=60)
        async def function(ctx: JobContext) -> None:
            if when != "before" and not left:
                left.append(timedelta(0))
                ctx.extend_deadline(0.01)
                await asyncio.Event().wait()
            assert ctx.deadline is not None
            left.append(ctx.deadline - datetime.now(UTC))

        async def gives(ctx: JobContext, proceed: Running) -> None:
            if when == "before":
                ctx.extend_deadline(600)
            try:
                await proceed()
            except TaskTimeoutError:
                ctx.extend_deadline(600)
                await proceed()

        assert await result(database, function, Around(gives)) is None
        assert left[-1] > timedelta(minutes=5)

    async def test_it_is_cancelled_with_the_job_at_shutdown(self, database: str) -> None:
        gate = Gate()
        seen: list[str] = []

        async def execute(_ctx: JobContext, proceed: Running) -> None:
            try:
                await proceed()
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

        heard = Heard()
        async with running({"task": gate}, database, middleware=[Around(execute)], heard=heard) as runner:
            await runner.add_job("task")
            await gate.until_begun()
            await runner.stop(grace=0)
        assert seen == ["cancelled"]
        assert heard.counts["job:interrupted"] == 1


class TestAroundAdding:
    async def test_it_may_change_what_is_added_however_it_is_added(self, database: str) -> None:
        async def enqueue(specs: Sequence[JobSpec], proceed: Adding) -> Sequence[Job]:
            return await proceed([spec.replace(priority=7, payload=[spec.payload]) for spec in specs])

        app = App(database, middleware=[Adds(enqueue)])

        @app.task
        async def known(payload: list[Any], ctx: JobContext) -> None:
            if payload != [[{"from": "job"}]]:
                await ctx.add_job("other", {"from": "job"})

        async with app:
            added = [
                await known.enqueue([1]),
                *(await known.enqueue_many([[2]])),
                await app.add_job("other", {"n": 1}),
                *(await app.add_jobs([JobSpec("other", {"n": 2}), JobSpec("other", {"n": 3})])),
                await app.utils.add_batch_job("other", [4]),
                await asyncio.to_thread(app.add_job_sync, "other", {"n": 5}),
            ]
            await app.run_once()
            stored = [job async for job in _all(app, "other")]
        app.close_sync()
        assert {job.priority for job in [*added, *stored]} == {7}
        assert [job.payload for job in added][:4] == [[[1]], [[2]], [{"n": 1}], [{"n": 2}]]
        assert sum(job.payload == [{"from": "job"}] for job in stored) == 2

    async def test_the_first_is_the_outermost(self, database: str) -> None:
        def named(name: str) -> Adds:
            async def enqueue(specs: Sequence[JobSpec], proceed: Adding) -> Sequence[Job]:
                return await proceed([spec.replace(payload=[*(spec.payload or []), name]) for spec in specs])

            return Adds(enqueue)

        async with WorkerUtils(database, middleware=[named("outer"), named("inner")]) as utils:
            assert (await utils.add_job("task")).payload == ["outer", "inner"]

    async def test_a_plain_function_will_do(self, database: str) -> None:
        class Plain(Middleware):
            def enqueue(self, specs: Sequence[JobSpec], proceed: Adding) -> Any:
                return proceed([spec.replace(queue_name="one") for spec in specs])

        async with WorkerUtils(database, middleware=[Plain()]) as utils:
            assert (await utils.add_job("task")).queue_name == "one"

    async def test_what_is_left_out_is_not_added_and_one_who_waits_for_it_is_told(
        self, database: str
    ) -> None:
        async def even(specs: Sequence[JobSpec], proceed: Adding) -> Sequence[Job]:
            return await proceed([spec for spec in specs if spec.payload["n"] % 2 == 0])

        async with WorkerUtils(database, middleware=[Adds(even)]) as utils:
            jobs = await utils.add_jobs(JobSpec("task", {"n": n}) for n in range(5))
            assert [job.payload["n"] for job in jobs] == [0, 2, 4]
            with pytest.raises(JobSkippedError, match="The job of 'task' was not added: a middleware left"):
                await utils.add_job("task", {"n": 1})
            assert (await utils.stats()).total == 3

    async def test_it_may_add_more_and_all_are_added_or_none(self, database: str) -> None:
        async def twice(specs: Sequence[JobSpec], proceed: Adding) -> Sequence[Job]:
            return await proceed([*specs, *(spec.replace(identifier="audit") for spec in specs)])

        async with WorkerUtils(database, middleware=[Adds(twice)]) as utils:
            assert (await utils.add_job("task")).task_identifier == "task"
            with pytest.raises(InvalidJobError):
                await utils.add_job("task", job_key="same")
            assert (await utils.stats()).total == 2

    async def test_it_is_part_of_the_callers_transaction(self, database: str, db: Any) -> None:
        async def enqueue(specs: Sequence[JobSpec], proceed: Adding) -> Sequence[Job]:
            return await proceed([spec.replace(priority=1) for spec in specs])

        async with WorkerUtils(database, middleware=[Adds(enqueue)]) as utils:
            transaction = db.transaction()
            await transaction.start()
            await utils.add_job("task", connection=db)
            await utils.add_jobs([JobSpec("task")], connection=db)
            assert await db.fetchval("select count(*) from graphile_worker.jobs where priority = 1") == 2
            await transaction.rollback()
            assert (await utils.stats()).total == 0

    async def test_what_it_raises_is_the_callers(self, database: str) -> None:
        async def refuses(_specs: Sequence[JobSpec], _proceed: Adding) -> Sequence[Job]:
            raise PermissionError("not you")

        async with WorkerUtils(database, middleware=[Adds(refuses)]) as utils:
            with pytest.raises(PermissionError, match="not you"):
                await utils.add_jobs([JobSpec("task")])

    async def test_what_it_raises_after_jobs_were_added_undoes_them_in_the_callers_transaction_only(
        self, database: str, db: Any
    ) -> None:
        async def adds_and_raises(_specs: Sequence[JobSpec], proceed: Adding) -> Sequence[Job]:
            await proceed()
            raise PermissionError("too late")

        async with WorkerUtils(database, middleware=[Adds(adds_and_raises)]) as utils:
            with pytest.raises(PermissionError):
                async with db.transaction():
                    await utils.add_job("task", connection=db)
            assert (await utils.stats()).total == 0
            with pytest.raises(PermissionError):
                await utils.add_job("task")
            assert (await utils.stats()).total == 1

    async def test_what_it_began_before_it_raised_is_not_added(self, database: str) -> None:
        async def begins_and_raises(_specs: Sequence[JobSpec], proceed: Adding) -> Sequence[Job]:
            adding = proceed()
            raise PermissionError(f"not {type(adding).__name__}")

        async with WorkerUtils(database, middleware=[Adds(begins_and_raises)]) as utils:
            with pytest.raises(PermissionError, match="not coroutine"):
                await utils.add_job("task")
            gc.collect()
            assert (await utils.stats()).total == 0

    async def test_who_returns_nothing_means_what_was_added(self, database: str) -> None:
        async def forgets(_specs: Sequence[JobSpec], proceed: Adding) -> None:
            await proceed()

        async with WorkerUtils(database, middleware=[Adds(forgets)]) as utils:
            assert (await utils.add_job("task")).task_identifier == "task"
            assert len(await utils.add_jobs([JobSpec("task"), JobSpec("task")])) == 2
            assert (await utils.stats()).total == 3

    async def test_whoever_forgets_to_wait_is_told_and_nothing_is_added(self, database: str) -> None:
        async def forgets(_specs: Sequence[JobSpec], proceed: Adding) -> None:
            proceed()

        async with WorkerUtils(database, middleware=[Adds(forgets)]) as utils:
            with pytest.raises(TaskError, match=r"^Adds\.enqueue called proceed\(\) and did not wait for it"):
                await utils.add_job("task")
            assert (await utils.stats()).total == 0

    async def test_nonsense_is_refused_with_the_name_of_the_middleware(self, database: str) -> None:
        async def returns_none(_specs: Sequence[JobSpec], _proceed: Adding) -> Any:
            return [None]

        async def garbles(_specs: Sequence[JobSpec], proceed: Adding) -> Any:
            return await proceed(["task"])  # type: ignore[list-item]

        async with WorkerUtils(database, middleware=[Adds(returns_none)]) as utils:
            with pytest.raises(ConfigurationError, match=r"Adds\.enqueue: it must return a list of Job, not"):
                await utils.add_job("task")
        async with WorkerUtils(database, middleware=[Adds(garbles)]) as utils:
            with pytest.raises(InvalidJobError, match=r"Adds\.enqueue: proceed.* takes a list of JobSpec"):
                await utils.add_job("task")


async def _all(app: App, identifier: str) -> Any:
    async with app.utils.lend_connection() as connection:
        ids = await connection.fetch(
            "select id from graphile_worker.jobs where task_identifier = $1", identifier
        )
    for row in ids:
        yield await app.utils.get_job(id=row["id"])


class Slips(Middleware):
    async def exectue(self, ctx: JobContext, proceed: Running) -> None: ...


class TakesTooLittle(Middleware):
    async def execute(self, ctx: JobContext) -> None: ...  # type: ignore[override]


class AsksLong(Middleware):
    async def room(self, task: str, in_hand: int) -> None: ...  # type: ignore[override]


class TestDeclaring:
    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (SlowJobs(), "middleware= takes a list"),
            ([SlowJobs], r"SlowJobs is a class of middleware: pass SlowJobs\(…\)"),
            ([print], "is no middleware: derive a class from Middleware"),
            (3, "middleware= takes a list"),
            ([Slips()], "Slips does nothing: it has neither execute, nor enqueue, nor room"),
            ([TakesTooLittle()], r"TakesTooLittle.execute must take \(self, ctx, proceed\)"),
            ([AsksLong()], r"AsksLong.room is asked before each claim, and must be a plain def"),
        ],
    )
    def test_what_is_none_is_refused(self, given: Any, said: str) -> None:
        for make in (App, WorkerUtils):
            with pytest.raises(ConfigurationError, match=said):
                make("postgres://", middleware=given)

    async def test_an_iterator_will_do(self, database: str) -> None:
        seen: list[str] = []

        async def execute(_ctx: JobContext, proceed: Running) -> None:
            seen.append("seen")
            await proceed()

        app = App(database, middleware=iter([Around(execute)]))

        @app.task
        async def hello() -> None: ...

        async with app:
            for _ in range(2):
                await hello.enqueue()
                await app.run_once()
        assert seen == ["seen", "seen"]


class TestConcurrencyLimits:
    @pytest.mark.parametrize("prefetch", [0, 20])
    async def test_no_more_than_that_run_at_once_and_all_do(self, database: str, prefetch: int) -> None:
        now: Counter[str] = Counter()
        most: Counter[str] = Counter()

        def counted(name: str) -> Callable[[Any], Any]:
            async def function(_payload: Any) -> None:
                now[name] += 1
                most[name] = max(most[name], now[name])
                for _ in range(3):
                    await asyncio.sleep(0)
                now[name] -= 1

            return function

        async with WorkerUtils(database) as utils:
            await utils.add_jobs(
                JobSpec(f"task {n % 3}", {"n": n}, queue_name=f"queue {n % 7}" if n % 2 else None)
                for n in range(300)
            )
            done = await run_once(
                {f"task {n}": counted(f"task {n}") for n in range(3)},
                database,
                concurrency=12,
                prefetch=prefetch,
                middleware=[ConcurrencyLimits({"task 0": 1, "task 1": 3})],
                handle_signals=False,
            )
            assert done == Drained(done=300, failed=0)
        assert most["task 0"] == 1
        assert most["task 1"] <= 3 < most["task 2"] <= 12

    async def test_others_may_run_what_is_left(self, database: str) -> None:
        """What is beyond the limit is not claimed."""
        gate = Gate()
        limits = ConcurrencyLimits({"task": 2})
        heard = Heard()
        async with running(
            {"task": gate, "other": gate}, database, concurrency=10, middleware=[limits], heard=heard
        ) as runner:
            await runner.utils.add_jobs(JobSpec("task") for _ in range(5))
            await runner.add_job("other")
            await heard.until("job:start", 3)
            stats = await runner.utils.stats()
            assert (stats.running, stats.ready) == (3, 3)
            # Another worker, without a limit.
            assert await run_once({"task": lambda _payload: None}, database, handle_signals=False) == (
                Drained(done=3, failed=0)
            )
            gate.open()
            await heard.until("job:complete", 3)

    async def test_one_that_ends_makes_room_at_once(self, database: str) -> None:
        ran: list[Any] = []

        async def function(payload: Any) -> None:
            ran.append(payload["n"])

        heard = Heard()
        async with running(
            {"task": function},
            database,
            concurrency=5,
            poll_interval=3600,
            middleware=[ConcurrencyLimits({"task": 1})],
            heard=heard,
        ) as runner:
            await runner.utils.add_jobs(JobSpec("task", {"n": n}) for n in range(20))
            await heard.until("job:complete", 20)
        assert ran == list(range(20))

    async def test_a_middleware_that_fails_to_say_does_not_stop_the_worker(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Broken(Middleware):
            def room(self, task: str, in_hand: int) -> int | None:  # noqa: ARG002
                raise RuntimeError("no idea")

        async with WorkerUtils(database) as utils:
            await utils.add_job("task")
        done = await run_once(
            {"task": lambda _payload: None}, database, middleware=[Broken()], handle_signals=False
        )
        assert done == Drained(done=1, failed=0)
        assert caplog.text.count("Broken cannot say how many jobs of 'task' may be claimed, so all may") == 1

    async def test_all_run_also_if_nobody_can_say_at_once_what_is_forbidden(self, database: str) -> None:
        async def flags() -> list[str]:
            await asyncio.sleep(0.08)
            return []

        async def function(_payload: Any) -> None:
            await asyncio.sleep(0.1)

        async with WorkerUtils(database) as utils:
            await utils.add_jobs(JobSpec("task") for _ in range(4))
        done = await run_once(
            {"task": function},
            database,
            concurrency=2,
            middleware=[ConcurrencyLimits({"task": 1})],
            forbidden_flags=flags,
            handle_signals=False,
        )
        assert done == Drained(done=4, failed=0)

    async def test_a_limit_for_a_task_that_is_not_there_is_told(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        limits = ConcurrencyLimits({"task": 1, "tsak": 2})
        await run_once({"task": print}, database, middleware=[limits], handle_signals=False)
        assert "There are limits for tasks that this worker does not have: tsak" in caplog.text

    async def test_a_task_without_room_is_left_alone(self, database: str) -> None:
        class Closed(Middleware):
            def room(self, task: str, in_hand: int) -> int | None:  # noqa: ARG002
                return 0 if task == "closed" else None

        async with WorkerUtils(database) as utils:
            await utils.add_jobs([JobSpec("closed"), JobSpec("open")])
            tasks = {"closed": lambda _payload: None, "open": lambda _payload: None}
            done = await run_once(tasks, database, middleware=[Closed()], handle_signals=False)
            assert done == Drained(done=1, failed=0)
            done = await run_once({"closed": print}, database, middleware=[Closed()], handle_signals=False)
            assert done == Drained(done=0, failed=0)
            assert (await utils.stats()).ready == 1

    @pytest.mark.parametrize("limits", [{"task": 0}, {"task": True}, {"task": "3"}, [("task", 3)]])
    def test_nonsense_is_refused(self, limits: Any) -> None:
        with pytest.raises(ConfigurationError):
            ConcurrencyLimits(limits)


class TestSlowJobs:
    async def test_it_warns_while_the_job_runs(self, database: str, caplog: pytest.LogCaptureFixture) -> None:
        gate = Gate()
        heard = Heard()
        async with running({"task": gate}, database, middleware=[SlowJobs(0.01)], heard=heard) as runner:
            job = await runner.add_job("task")
            async with asyncio.timeout(20):
                while "has been running" not in caplog.text:
                    await asyncio.sleep(0.01)
            gate.open()
            await heard.until("job:complete")
        assert f"Job {job.id} (task) has been running for 0.01 s" in caplog.text

    async def test_of_one_that_blocks_the_event_loop_it_tells_at_the_end(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def blocks(_payload: Any) -> None:
            time.sleep(0.02)

        assert await result(database, blocks, SlowJobs(0.01)) is None
        assert len(re.findall(r"Job \d+ \(task\) has run for [\d.]+ s", caplog.text)) == 1
        assert "has been running" not in caplog.text

    async def test_of_others_it_says_nothing_also_not_when_they_have_ended(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        contexts: list[ReferenceType[JobContext]] = []

        class Remembers(SlowJobs):
            async def execute(self, ctx: JobContext, proceed: Running) -> Any:
                contexts.append(ref(ctx))
                return await super().execute(ctx, proceed)

        assert await result(database, lambda _payload: None, Remembers(60)) is None
        gc.collect()
        assert [context() for context in contexts] == [None]  # nobody waits to tell of it
        assert "has run" not in caplog.text


def blocks_until_told(caplog: pytest.LogCaptureFixture) -> None:
    until = time.monotonic() + 20
    while "in blocks_until_told" not in caplog.text:
        assert time.monotonic() < until
        time.sleep(0.001)


def told(caplog: pytest.LogCaptureFixture, who: str) -> None:
    """It is said who blocked the event loop in there, then and afterwards; maybe of others too."""
    messages = [record.getMessage() for record in caplog.records]
    [place] = [at for at, message in enumerate(messages) if "in blocks_until_told" in message]
    assert re.match(f"{who} is blocking the event loop, and all other jobs with it, at:\n", messages[place])
    assert any(re.match(f"{who} blocked the event loop for about .* s", said) for said in messages[place:])


class TestBlockedLoop:
    @pytest.mark.parametrize("way", ["directly", "gathered", "in a group", "a child of a child"])
    async def test_it_names_the_job_and_the_place_while_it_blocks_and_the_time_afterwards(
        self, database: str, caplog: pytest.LogCaptureFixture, way: str
    ) -> None:
        async def child() -> None:
            await asyncio.sleep(0)
            blocks_until_told(caplog)

        async def parent() -> None:
            await asyncio.gather(child())

        async def blocks(_payload: Any) -> None:
            match way:
                case "directly":
                    await child()
                case "gathered":
                    await asyncio.gather(asyncio.sleep(0), child())
                case "in a group":
                    async with asyncio.TaskGroup() as group:
                        group.create_task(child())
                case _:
                    await asyncio.create_task(parent())

        assert await result(database, blocks, BlockedLoop(0.01)) is None
        told(caplog, r"Job \d+ \(task\)")

    @pytest.mark.parametrize("way", ["a task", "a callback"])
    async def test_what_is_no_job_is_told_as_such(
        self, database: str, caplog: pytest.LogCaptureFixture, way: str
    ) -> None:
        begun, blocked = asyncio.Event(), asyncio.Event()

        async def waits(_payload: Any) -> None:
            begun.set()
            await blocked.wait()

        async def of_the_application() -> None:
            await begun.wait()
            if way == "a task":
                blocks()
            else:
                asyncio.get_running_loop().call_soon(blocks)

        def blocks() -> None:
            blocked.set()
            blocks_until_told(caplog)

        application = asyncio.create_task(of_the_application())
        assert await result(database, waits, BlockedLoop(0.01)) is None
        await application
        told(caplog, "Something that is no job")

    async def test_waiting_is_not_blocking(self, database: str, caplog: pytest.LogCaptureFixture) -> None:
        async def waits(_payload: Any) -> None:
            await asyncio.sleep(0.3)

        def on_a_thread(_payload: Any) -> None:
            time.sleep(0.3)

        for function in (waits, on_a_thread):
            assert await result(database, function, BlockedLoop(0.2)) is None
        # That the machine has not let the event loop run for so long may be told, but of no job.
        assert not re.search(r"Job \d+ .* event loop", caplog.text)

    async def test_values_errors_and_cancellation_pass_through(self, database: str) -> None:
        seen: list[str] = []

        async def function(_payload: Any) -> str:
            try:
                async with asyncio.timeout(0.01):
                    await asyncio.Event().wait()
            except TimeoutError:
                seen.append("timeout")
            try:
                await asyncio.wait_for(_raise(), 10)
            except RuntimeError:
                seen.append("error")
            return "value"

        async def _raise() -> None:
            await asyncio.sleep(0)
            raise RuntimeError

        async def execute(_ctx: JobContext, proceed: Running) -> None:
            seen.append(await proceed())

        assert await result(database, function, Around(execute), BlockedLoop()) is None
        assert seen == ["timeout", "error", "value"]

    async def test_its_thread_ends_with_the_jobs(self, database: str) -> None:
        assert await result(database, lambda _payload: None, BlockedLoop(0.001)) is None
        for thread in threading.enumerate():
            if thread.name == "graphile-worker blocked loop":
                thread.join(20)
                assert not thread.is_alive()
