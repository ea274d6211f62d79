"""Middleware: `execute` wraps running a job, `enqueue` wraps adding jobs, `claim_limit` limits claims."""

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
    Fail,
    InvalidJobError,
    Job,
    JobContext,
    JobSkippedError,
    JobSpec,
    Middleware,
    Retry,
    RunSummary,
    Snooze,
    TaskError,
    TaskTimeoutError,
    WorkerUtils,
    run_once,
    task,
)
from graphile_worker._worker.execution import deadline
from graphile_worker.middleware import BlockedLoop, ConcurrencyLimits, SlowJobs
from support.workers import DEADLINE, EventRecorder, Gate, running

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphile_worker.middleware import Adding, Running
    from graphile_worker.testing import Databases


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


class ExecuteMiddleware(Middleware):
    """A middleware whose execute calls a function of the test."""

    def __init__(self, execute: Callable[..., Any]) -> None:
        self._execute = execute

    async def execute(self, ctx: JobContext, proceed: Running) -> Any:
        return await self._execute(ctx, proceed)


class SyncExecuteMiddleware(Middleware):
    """The same with a sync execute."""

    def __init__(self, execute: Callable[..., Any]) -> None:
        self._execute = execute

    def execute(self, ctx: JobContext, proceed: Running) -> Any:
        return self._execute(ctx, proceed)


class EnqueueMiddleware(Middleware):
    """A middleware whose enqueue calls a function of the test."""

    def __init__(self, enqueue: Callable[..., Any]) -> None:
        self._enqueue = enqueue

    async def enqueue(self, specs: Sequence[JobSpec], proceed: Adding) -> Any:
        return await self._enqueue(specs, proceed)


async def run_job(
    database: str, function: Callable[..., Any], *middleware: Middleware, payload: Any = None
) -> Job | None:
    """Add and run a job, and return it if it still exists."""
    async with WorkerUtils(database) as utils:
        job = await utils.add_job("task", payload)
        await run_once({"task": function}, database, middleware=middleware, handle_signals=False)
        return await utils.get_job(id=job.id)


async def retry_after_timeout(_ctx: JobContext, proceed: Running) -> None:
    try:
        await proceed()
    except TaskTimeoutError:
        await proceed()


class TestExecute:
    async def test_first_middleware_is_the_outermost(self, database: str) -> None:
        order: list[str] = []

        def named(name: str) -> ExecuteMiddleware:
            async def execute(_ctx: JobContext, proceed: Running) -> None:
                order.append(f"{name} before")
                await proceed()
                order.append(f"{name} after")

            return ExecuteMiddleware(execute)

        async def function(_payload: Any) -> None:
            order.append("task")

        assert await run_job(database, function, named("outer"), named("inner")) is None
        assert order == ["outer before", "inner before", "task", "inner after", "outer after"]

    async def test_sync_execute_may_return_the_result_of_proceed(self, database: str) -> None:
        ran: list[Any] = []

        def execute(ctx: JobContext, proceed: Running) -> Any:
            ran.append(ctx.job.payload)
            return proceed()

        assert await run_job(database, ran.append, SyncExecuteMiddleware(execute), payload={"n": 1}) is None
        assert ran == [{"n": 1}, {"n": 1}]

    @pytest.mark.parametrize("kind", ["async", "thread"])
    async def test_proceed_returns_the_value_of_the_task(self, database: str, kind: str) -> None:
        seen: list[Any] = []

        async def execute(_ctx: JobContext, proceed: Running) -> None:
            seen.append(await proceed())

        async def on_loop(_payload: Any) -> str:
            return "value"

        def on_thread(_payload: Any) -> str:
            return "value"

        assert (
            await run_job(database, on_loop if kind == "async" else on_thread, ExecuteMiddleware(execute))
            is None
        )
        assert seen == ["value"]

    async def test_execute_without_proceed_completes_the_job_without_running_it(self, database: str) -> None:
        async def execute(_ctx: JobContext, _proceed: Running) -> None:
            return

        ran: list[Any] = []
        assert await run_job(database, ran.append, ExecuteMiddleware(execute)) is None
        assert ran == []

    async def test_payload_passed_to_proceed_is_validated_like_a_stored_payload(self, database: str) -> None:
        seen: list[Any] = []

        @task
        async def function(ctx: JobContext, n: int) -> None:
            seen.extend([n, ctx.job.payload])

        async def execute(ctx: JobContext, proceed: Running) -> None:
            await proceed({"n": ctx.job.payload["n"] + 1})

        assert (
            await run_job(
                database, function, ExecuteMiddleware(execute), ExecuteMiddleware(execute), payload={"n": 1}
            )
            is None
        )
        assert seen == [3, {"n": 3}]
        seen.clear()
        job = await run_job(
            database, function, ExecuteMiddleware(lambda _ctx, proceed: proceed({"n": "x"})), payload={"n": 1}
        )
        assert job is not None
        assert job.last_error == "Invalid payload: n: Expected `int`, got `str`"
        assert job.payload == {"n": 1}

    @pytest.mark.parametrize(
        ("choice", "error", "attempts"),
        [
            (RuntimeError("no"), "no", (1, 25)),
            (Retry("later", after=60), "Retry in 60 s: later", (1, 25)),
            (Fail("never"), "never", (25, 25)),
            (Snooze(60), "Snoozed for 60 s", (0, 25)),
            (Cancel("not wanted"), "Cancelled: not wanted", (25, 25)),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
    )
    async def test_exception_from_execute_decides_the_outcome(
        self, database: str, choice: Exception, error: str, attempts: tuple[int, int]
    ) -> None:
        async def execute(_ctx: JobContext, proceed: Running) -> None:
            await proceed()
            raise choice

        job = await run_job(database, lambda _payload: None, ExecuteMiddleware(execute))
        assert job is not None
        assert (job.last_error, (job.attempts, job.max_attempts)) == (error, attempts)

    async def test_execute_may_suppress_the_error_of_the_task(self, database: str) -> None:
        seen: list[BaseException] = []

        async def execute(_ctx: JobContext, proceed: Running) -> None:
            try:
                await proceed()
            except RuntimeError as error:
                seen.append(error)

        def function(_payload: Any) -> None:
            raise RuntimeError("on purpose")

        assert await run_job(database, function, ExecuteMiddleware(execute)) is None
        assert str(seen[0]) == "on purpose"

    @pytest.mark.parametrize("times", [1, 2])
    async def test_proceed_without_await_in_execute_fails_the_job(self, database: str, times: int) -> None:
        async def does_not_await(_ctx: JobContext, proceed: Running) -> None:
            proceed()
            if times == 2:
                await proceed()

        job = await run_job(database, lambda _payload: None, ExecuteMiddleware(does_not_await))
        assert job is not None
        assert "ExecuteMiddleware.execute" in (job.last_error or "")
        assert "await proceed()" in (job.last_error or "")

    async def test_context_variables_set_by_execute_reach_the_task(self, database: str) -> None:
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
            assert await run_job(database, function, ExecuteMiddleware(execute)) is None
        assert seen == [7, 7]

    async def test_failed_batch_items_are_kept_unless_middleware_changed_the_number_of_items(
        self, database: str
    ) -> None:
        @task(batch=True)
        async def function(payload: list[int]) -> list[Any]:
            return [ValueError(n) if n % 2 else None for n in payload]

        async def adds_two(ctx: JobContext, proceed: Running) -> None:
            await proceed([n + 2 for n in ctx.job.payload])

        job = await run_job(database, function, ExecuteMiddleware(adds_two), payload=[1, 2, 3])
        assert job is not None
        assert job.payload == [1, 3]

        async def drops_one(ctx: JobContext, proceed: Running) -> None:
            await proceed(ctx.job.payload[1:])

        job = await run_job(database, function, ExecuteMiddleware(drops_one), payload=[1, 2, 3])
        assert job is not None
        assert job.payload == [1, 2, 3]
        assert re.search(r"(?i)all items.*\bExecuteMiddleware\b", job.last_error or "")

    async def test_execute_sees_the_timeout_of_the_task(self, database: str) -> None:
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

        job = await run_job(database, function, ExecuteMiddleware(execute))
        assert job is not None
        assert seen == ["TaskTimeoutError"]

    async def test_task_repeated_after_a_timeout_has_its_full_timeout(self, database: str) -> None:
        seen: list[str] = []

        @task(timeout=60)
        async def function(ctx: JobContext) -> None:
            seen.append("begins")
            if len(seen) == 1:
                ctx.extend_deadline(0.01)
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            seen.append("stop requested" if ctx.stop_requested else "ends")

        assert await run_job(database, function, ExecuteMiddleware(retry_after_timeout)) is None
        assert seen == ["begins", "begins", "ends"]

    async def test_thread_task_repeated_after_a_timeout_has_no_stop_request(
        self, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(deadline, "_STOP_GRACE", DEADLINE)
        seen: list[bool] = []

        @task(timeout=60)
        def function(ctx: JobContext) -> None:
            if not seen:
                ctx.extend_deadline(0.01)
                seen.append(ctx.stop_requested.wait(DEADLINE))
                return
            seen.append(bool(ctx.stop_requested))

        assert await run_job(database, function, ExecuteMiddleware(retry_after_timeout)) is None
        assert seen == [True, False]

    async def test_deadline_extended_after_a_timeout_does_not_apply_to_the_next_run(
        self, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(deadline, "_STOP_GRACE", DEADLINE)
        left: list[timedelta] = []

        @task(timeout=600)
        def function(ctx: JobContext) -> None:
            assert ctx.deadline is not None
            left.append(ctx.deadline - datetime.now(UTC))
            if len(left) == 1:
                ctx.extend_deadline(0.01)
                assert ctx.stop_requested.wait(DEADLINE)
                ctx.extend_deadline(60)

        assert await run_job(database, function, ExecuteMiddleware(retry_after_timeout)) is None
        assert left[1] > timedelta(minutes=5)

    async def test_thread_of_the_first_run_does_not_affect_the_second_run(
        self, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(deadline, "_STOP_GRACE", 0.05)
        started, interfered = threading.Event(), threading.Event()
        stop_requests: list[bool] = []
        left: list[timedelta] = []

        @task(timeout=60)
        def function(ctx: JobContext) -> None:
            if not started.is_set():
                ctx.extend_deadline(0.01)
                assert started.wait(DEADLINE), "the second run must begin while this one continues"
                stop_requests.append(bool(ctx.stop_requested))
                ctx.extend_deadline(600)
                interfered.set()
                return
            assert interfered.wait(DEADLINE)
            stop_requests.append(bool(ctx.stop_requested))
            assert ctx.deadline is not None
            left.append(ctx.deadline - datetime.now(UTC))

        async def check_and_retry(ctx: JobContext, proceed: Running) -> None:
            try:
                await proceed()
            except TaskTimeoutError:
                again = proceed()
                stop_requests.append(bool(ctx.stop_requested))
                started.set()
                await again

        assert await run_job(database, function, ExecuteMiddleware(check_and_retry)) is None
        assert stop_requests == [False, True, False]
        assert left[0] < timedelta(minutes=2)

    @pytest.mark.parametrize("when", ["before", "after a timeout"])
    async def test_execute_may_extend_the_deadline(self, database: str, when: str) -> None:
        left: list[timedelta] = []

        @task(timeout=60)
        async def function(ctx: JobContext) -> None:
            if when != "before" and not left:
                left.append(timedelta(0))
                ctx.extend_deadline(0.01)
                await asyncio.Event().wait()
            assert ctx.deadline is not None
            left.append(ctx.deadline - datetime.now(UTC))

        async def extend_and_retry(ctx: JobContext, proceed: Running) -> None:
            if when == "before":
                ctx.extend_deadline(600)
            try:
                await proceed()
            except TaskTimeoutError:
                ctx.extend_deadline(600)
                await proceed()

        assert await run_job(database, function, ExecuteMiddleware(extend_and_retry)) is None
        assert left[-1] > timedelta(minutes=5)

    async def test_execute_is_cancelled_with_the_job_at_shutdown(self, database: str) -> None:
        gate = Gate()
        seen: list[str] = []

        async def execute(_ctx: JobContext, proceed: Running) -> None:
            try:
                await proceed()
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

        recorder = EventRecorder()
        async with running(
            {"task": gate}, database, middleware=[ExecuteMiddleware(execute)], recorder=recorder
        ) as runner:
            await runner.add_job("task")
            await gate.until_started()
            await runner.stop(grace=0)
        assert seen == ["cancelled"]
        assert recorder.counts["job:interrupted"] == 1


class TestEnqueue:
    async def test_enqueue_changes_jobs_however_they_are_added(self, database: str) -> None:
        async def enqueue(specs: Sequence[JobSpec], proceed: Adding) -> Sequence[Job]:
            return await proceed([spec.replace(priority=7, payload=[spec.payload]) for spec in specs])

        app = App(database, middleware=[EnqueueMiddleware(enqueue)])

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
            stored = [job async for job in _jobs_of(app, "other")]
        app.close_sync()
        assert {job.priority for job in [*added, *stored]} == {7}
        assert [job.payload for job in added][:4] == [[[1]], [[2]], [{"n": 1}], [{"n": 2}]]
        assert sum(job.payload == [{"from": "job"}] for job in stored) == 2

    async def test_first_middleware_is_the_outermost(self, database: str) -> None:
        def named(name: str) -> EnqueueMiddleware:
            async def enqueue(specs: Sequence[JobSpec], proceed: Adding) -> Sequence[Job]:
                return await proceed([spec.replace(payload=[*(spec.payload or []), name]) for spec in specs])

            return EnqueueMiddleware(enqueue)

        async with WorkerUtils(database, middleware=[named("outer"), named("inner")]) as utils:
            assert (await utils.add_job("task")).payload == ["outer", "inner"]

    async def test_enqueue_may_be_a_sync_function(self, database: str) -> None:
        class Plain(Middleware):
            def enqueue(self, specs: Sequence[JobSpec], proceed: Adding) -> Any:
                return proceed([spec.replace(queue_name="one") for spec in specs])

        async with WorkerUtils(database, middleware=[Plain()]) as utils:
            assert (await utils.add_job("task")).queue_name == "one"

    async def test_jobs_dropped_by_enqueue_are_not_added_and_add_job_raises(self, database: str) -> None:
        async def even(specs: Sequence[JobSpec], proceed: Adding) -> Sequence[Job]:
            return await proceed([spec for spec in specs if spec.payload["n"] % 2 == 0])

        async with WorkerUtils(database, middleware=[EnqueueMiddleware(even)]) as utils:
            jobs = await utils.add_jobs(JobSpec("task", {"n": n}) for n in range(5))
            assert [job.payload["n"] for job in jobs] == [0, 2, 4]
            with pytest.raises(JobSkippedError, match=r"'task'.*not added.*middleware"):
                await utils.add_job("task", {"n": 1})
            assert (await utils.stats()).total == 3

    async def test_enqueue_adds_additional_jobs_atomically(self, database: str) -> None:
        async def twice(specs: Sequence[JobSpec], proceed: Adding) -> Sequence[Job]:
            return await proceed([*specs, *(spec.replace(identifier="audit") for spec in specs)])

        async with WorkerUtils(database, middleware=[EnqueueMiddleware(twice)]) as utils:
            assert (await utils.add_job("task")).task_identifier == "task"
            with pytest.raises(InvalidJobError):
                await utils.add_job("task", job_key="same")
            assert (await utils.stats()).total == 2

    async def test_enqueue_runs_in_the_transaction_of_the_caller(self, database: str, db: Any) -> None:
        async def enqueue(specs: Sequence[JobSpec], proceed: Adding) -> Sequence[Job]:
            return await proceed([spec.replace(priority=1) for spec in specs])

        async with WorkerUtils(database, middleware=[EnqueueMiddleware(enqueue)]) as utils:
            transaction = db.transaction()
            await transaction.start()
            await utils.add_job("task", connection=db)
            await utils.add_jobs([JobSpec("task")], connection=db)
            assert await db.fetchval("select count(*) from graphile_worker.jobs where priority = 1") == 2
            await transaction.rollback()
            assert (await utils.stats()).total == 0

    async def test_exception_from_enqueue_reaches_the_caller(self, database: str) -> None:
        async def rejects(_specs: Sequence[JobSpec], _proceed: Adding) -> Sequence[Job]:
            raise PermissionError("not you")

        async with WorkerUtils(database, middleware=[EnqueueMiddleware(rejects)]) as utils:
            with pytest.raises(PermissionError, match="not you"):
                await utils.add_jobs([JobSpec("task")])

    async def test_exception_after_proceed_undoes_only_jobs_in_the_transaction_of_the_caller(
        self, database: str, db: Any
    ) -> None:
        async def adds_and_raises(_specs: Sequence[JobSpec], proceed: Adding) -> Sequence[Job]:
            await proceed()
            raise PermissionError("too late")

        async with WorkerUtils(database, middleware=[EnqueueMiddleware(adds_and_raises)]) as utils:
            with pytest.raises(PermissionError):
                async with db.transaction():
                    await utils.add_job("task", connection=db)
            assert (await utils.stats()).total == 0
            with pytest.raises(PermissionError):
                await utils.add_job("task")
            assert (await utils.stats()).total == 1

    async def test_proceed_not_awaited_before_an_exception_adds_no_job(self, database: str) -> None:
        async def begins_and_raises(_specs: Sequence[JobSpec], proceed: Adding) -> Sequence[Job]:
            adding = proceed()
            raise PermissionError(f"not {type(adding).__name__}")

        async with WorkerUtils(database, middleware=[EnqueueMiddleware(begins_and_raises)]) as utils:
            with pytest.raises(PermissionError, match="not coroutine"):
                await utils.add_job("task")
            gc.collect()
            assert (await utils.stats()).total == 0

    async def test_enqueue_that_returns_none_returns_the_added_jobs(self, database: str) -> None:
        async def returns_nothing(_specs: Sequence[JobSpec], proceed: Adding) -> None:
            await proceed()

        async with WorkerUtils(database, middleware=[EnqueueMiddleware(returns_nothing)]) as utils:
            assert (await utils.add_job("task")).task_identifier == "task"
            assert len(await utils.add_jobs([JobSpec("task"), JobSpec("task")])) == 2
            assert (await utils.stats()).total == 3

    async def test_proceed_without_await_in_enqueue_raises_and_adds_no_job(self, database: str) -> None:
        async def does_not_await(_specs: Sequence[JobSpec], proceed: Adding) -> None:
            proceed()

        async with WorkerUtils(database, middleware=[EnqueueMiddleware(does_not_await)]) as utils:
            with pytest.raises(TaskError, match=r"^EnqueueMiddleware\.enqueue\b.*proceed\(\)"):
                await utils.add_job("task")
            assert (await utils.stats()).total == 0

    async def test_invalid_values_from_enqueue_are_rejected_with_the_middleware_name(
        self, database: str
    ) -> None:
        async def returns_none(_specs: Sequence[JobSpec], _proceed: Adding) -> Any:
            return [None]

        async def passes_invalid_specs(_specs: Sequence[JobSpec], proceed: Adding) -> Any:
            return await proceed(["task"])  # type: ignore[list-item]

        async with WorkerUtils(database, middleware=[EnqueueMiddleware(returns_none)]) as utils:
            with pytest.raises(ConfigurationError, match=r"EnqueueMiddleware\.enqueue\b.*list of Job\b"):
                await utils.add_job("task")
        async with WorkerUtils(database, middleware=[EnqueueMiddleware(passes_invalid_specs)]) as utils:
            with pytest.raises(
                InvalidJobError, match=r"EnqueueMiddleware\.enqueue\b.*proceed.*list of JobSpec"
            ):
                await utils.add_job("task")


async def _jobs_of(app: App, identifier: str) -> Any:
    async with app.utils.connection() as connection:
        ids = await connection.fetch(
            "select id from graphile_worker.jobs where task_identifier = $1", identifier
        )
    for row in ids:
        yield await app.utils.get_job(id=row["id"])


class MisspelledMethod(Middleware):
    async def exectue(self, ctx: JobContext, proceed: Running) -> None: ...


class MissingParameter(Middleware):
    async def execute(self, ctx: JobContext) -> None: ...  # type: ignore[override]


class AsyncClaimLimit(Middleware):
    async def claim_limit(self, task: str, claimed: int) -> None: ...  # type: ignore[override]


class TestValidation:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (SlowJobs(), r"middleware.*list"),
            ([SlowJobs], r"SlowJobs.*class.*SlowJobs\("),
            ([print], r"print.*Middleware"),
            (3, r"middleware.*list"),
            ([MisspelledMethod()], r"MisspelledMethod.*execute.*enqueue.*claim_limit"),
            ([MissingParameter()], r"MissingParameter\.execute.*\(self, ctx, proceed\)"),
            ([AsyncClaimLimit()], r"AsyncClaimLimit\.claim_limit.*def"),
        ],
    )
    def test_invalid_middleware_is_rejected(self, given: Any, message: str) -> None:
        for make in (App, WorkerUtils):
            with pytest.raises(ConfigurationError, match=message):
                make("postgres://", middleware=given)

    async def test_middleware_may_be_an_iterator(self, database: str) -> None:
        seen: list[str] = []

        async def execute(_ctx: JobContext, proceed: Running) -> None:
            seen.append("seen")
            await proceed()

        app = App(database, middleware=iter([ExecuteMiddleware(execute)]))

        @app.task
        async def hello() -> None: ...

        async with app:
            for _ in range(2):
                await hello.enqueue()
                await app.run_once()
        assert seen == ["seen", "seen"]


class TestConcurrencyLimits:
    @pytest.mark.sample(1)
    @pytest.mark.parametrize("prefetch", [0, 20])
    async def test_limits_hold_and_all_jobs_run(self, database: str, prefetch: int) -> None:
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
            assert done == RunSummary(succeeded=300, failed=0)
        assert most["task 0"] == 1
        assert most["task 1"] <= 3 < most["task 2"] <= 12

    async def test_jobs_beyond_the_limit_are_left_for_other_workers(self, database: str) -> None:
        gate = Gate()
        limits = ConcurrencyLimits({"task": 2})
        recorder = EventRecorder()
        async with running(
            {"task": gate, "other": gate}, database, concurrency=10, middleware=[limits], recorder=recorder
        ) as runner:
            await runner.utils.add_jobs(JobSpec("task") for _ in range(5))
            await runner.add_job("other")
            await recorder.until("job:start", 3)
            stats = await runner.utils.stats()
            assert (stats.running, stats.ready) == (3, 3)
            # Another worker without a limit runs the rest.
            assert await run_once({"task": lambda _payload: None}, database, handle_signals=False) == (
                RunSummary(succeeded=3, failed=0)
            )
            gate.open()
            await recorder.until("job:complete", 3)

    async def test_finished_job_makes_room_for_the_next_at_once(self, database: str) -> None:
        ran: list[Any] = []

        async def function(payload: Any) -> None:
            ran.append(payload["n"])

        recorder = EventRecorder()
        async with running(
            {"task": function},
            database,
            concurrency=5,
            poll_interval=3600,
            middleware=[ConcurrencyLimits({"task": 1})],
            recorder=recorder,
        ) as runner:
            await runner.utils.add_jobs(JobSpec("task", {"n": n}) for n in range(20))
            await recorder.until("job:complete", 20)
        assert ran == list(range(20))

    async def test_failing_claim_limit_does_not_stop_the_worker(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Broken(Middleware):
            def claim_limit(self, task: str, claimed: int) -> int | None:  # noqa: ARG002
                raise RuntimeError("no idea")

        async with WorkerUtils(database) as utils:
            await utils.add_job("task")
        done = await run_once(
            {"task": lambda _payload: None}, database, middleware=[Broken()], handle_signals=False
        )
        assert done == RunSummary(succeeded=1, failed=0)
        assert caplog.text.count("Broken.claim_limit failed for task 'task'") == 1

    async def test_all_jobs_run_with_limits_and_slow_forbidden_flags(self, database: str) -> None:
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
        assert done == RunSummary(succeeded=4, failed=0)

    async def test_limit_for_an_unknown_task_is_logged(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        limits = ConcurrencyLimits({"task": 1, "tsak": 2})
        await run_once({"task": print}, database, middleware=[limits], handle_signals=False)
        assert "tasks that this worker does not have: tsak" in caplog.text

    async def test_task_with_a_claim_limit_of_zero_is_not_claimed(self, database: str) -> None:
        class Closed(Middleware):
            def claim_limit(self, task: str, claimed: int) -> int | None:  # noqa: ARG002
                return 0 if task == "closed" else None

        async with WorkerUtils(database) as utils:
            await utils.add_jobs([JobSpec("closed"), JobSpec("open")])
            tasks = {"closed": lambda _payload: None, "open": lambda _payload: None}
            done = await run_once(tasks, database, middleware=[Closed()], handle_signals=False)
            assert done == RunSummary(succeeded=1, failed=0)
            done = await run_once({"closed": print}, database, middleware=[Closed()], handle_signals=False)
            assert done == RunSummary(succeeded=0, failed=0)
            assert (await utils.stats()).ready == 1

    @pytest.mark.parametrize("limits", [{"task": 0}, {"task": True}, {"task": "3"}, [("task", 3)]])
    def test_invalid_concurrency_limits_are_rejected(self, limits: Any) -> None:
        with pytest.raises(ConfigurationError):
            ConcurrencyLimits(limits)


class TestSlowJobs:
    async def test_slow_job_is_logged_while_it_runs(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        gate = Gate()
        recorder = EventRecorder()
        async with running(
            {"task": gate}, database, middleware=[SlowJobs(0.01)], recorder=recorder
        ) as runner:
            job = await runner.add_job("task")
            async with asyncio.timeout(20):
                while "has been running" not in caplog.text:
                    await asyncio.sleep(0.01)
            gate.open()
            await recorder.until("job:complete")
        assert f"Job {job.id} (task) has been running for 0.01 s" in caplog.text

    async def test_slow_job_that_blocks_the_event_loop_is_logged_at_its_end(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def blocks(_payload: Any) -> None:
            time.sleep(0.02)

        assert await run_job(database, blocks, SlowJobs(0.01)) is None
        assert len(re.findall(r"Job \d+ \(task\) ran for [\d.]+ s", caplog.text)) == 1
        assert "has been running" not in caplog.text

    async def test_fast_job_is_not_logged_or_kept_in_memory(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        contexts: list[ReferenceType[JobContext]] = []

        class RecordsContexts(SlowJobs):
            async def execute(self, ctx: JobContext, proceed: Running) -> Any:
                contexts.append(ref(ctx))
                return await super().execute(ctx, proceed)

        assert await run_job(database, lambda _payload: None, RecordsContexts(60)) is None
        gc.collect()
        assert [context() for context in contexts] == [None]  # no timer keeps the context
        assert "has run" not in caplog.text


def block_until_logged(caplog: pytest.LogCaptureFixture) -> None:
    until = time.monotonic() + 20
    while "in block_until_logged" not in caplog.text:
        assert time.monotonic() < until
        time.sleep(0.001)


def check_logged(caplog: pytest.LogCaptureFixture, who: str) -> None:
    """Check that the log names the blocking code during and after the block, whatever else it contains."""
    messages = [record.getMessage() for record in caplog.records]
    [place] = [at for at, message in enumerate(messages) if "in block_until_logged" in message]
    assert re.match(f"{who} is blocking the event loop", messages[place])
    assert any(
        re.match(f"{who} blocked the event loop for about .* s", message) for message in messages[place:]
    )


class TestBlockedLoop:
    @pytest.mark.parametrize("way", ["directly", "gathered", "in a group", "a child of a child"])
    async def test_blocking_job_is_logged_with_its_stack_and_then_its_duration(
        self, database: str, caplog: pytest.LogCaptureFixture, way: str
    ) -> None:
        async def child() -> None:
            await asyncio.sleep(0)
            block_until_logged(caplog)

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

        assert await run_job(database, blocks, BlockedLoop(0.01)) is None
        check_logged(caplog, r"Job \d+ \(task\)")

    @pytest.mark.parametrize("way", ["a task", "a callback"])
    async def test_blocking_code_outside_of_jobs_is_logged_without_a_job(
        self, database: str, caplog: pytest.LogCaptureFixture, way: str
    ) -> None:
        started, blocked = asyncio.Event(), asyncio.Event()

        async def waits(_payload: Any) -> None:
            started.set()
            await blocked.wait()

        async def run_application() -> None:
            await started.wait()
            if way == "a task":
                blocks()
            else:
                asyncio.get_running_loop().call_soon(blocks)

        def blocks() -> None:
            blocked.set()
            block_until_logged(caplog)

        application = asyncio.create_task(run_application())
        assert await run_job(database, waits, BlockedLoop(0.01)) is None
        await application
        check_logged(caplog, r"(?!Job \d).*")

    async def test_job_that_waits_is_not_logged_as_blocking(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def waits(_payload: Any) -> None:
            await asyncio.sleep(0.3)

        def on_a_thread(_payload: Any) -> None:
            time.sleep(0.3)

        for function in (waits, on_a_thread):
            assert await run_job(database, function, BlockedLoop(0.2)) is None
        # On a slow machine the event loop may be blocked for so long, but not by a job.
        assert not re.search(r"Job \d+ .* event loop", caplog.text)

    async def test_blocked_loop_passes_on_values_errors_and_cancellation(self, database: str) -> None:
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

        assert await run_job(database, function, ExecuteMiddleware(execute), BlockedLoop()) is None
        assert seen == ["timeout", "error", "value"]

    async def test_sampling_thread_ends_with_the_last_job(self, database: str) -> None:
        assert await run_job(database, lambda _payload: None, BlockedLoop(0.001)) is None
        for thread in threading.enumerate():
            if thread.name == "graphile-worker blocked loop":
                thread.join(20)
                assert not thread.is_alive()


class ThreadMiddleware(Middleware):
    """A middleware whose call notes its name and its thread."""

    def __init__(self, name: str, notes: list[tuple[str, int]]) -> None:
        self._name = name
        self._notes = notes

    def call(self, function: Callable[[], Any]) -> Any:
        self._notes.append((self._name, threading.get_ident()))
        return f"{self._name} {function()}"


class TestCall:
    async def test_call_wraps_a_plain_function_on_its_thread_first_middleware_outermost(
        self, database: str
    ) -> None:
        notes: list[tuple[str, int]] = []
        values: list[Any] = []

        async def execute(_ctx: JobContext, proceed: Running) -> None:
            values.append(await proceed())

        def function(_payload: Any) -> str:
            notes.append(("task", threading.get_ident()))
            return "value"

        outer, inner = ThreadMiddleware("outer", notes), ThreadMiddleware("inner", notes)
        assert await run_job(database, function, ExecuteMiddleware(execute), outer, inner) is None
        assert values == ["outer inner value"]
        names, threads = zip(*notes, strict=True)
        assert names == ("outer", "inner", "task")
        assert len(set(threads)) == 1
        assert threading.get_ident() not in threads

    async def test_call_is_not_used_for_coroutine_functions(self, database: str) -> None:
        notes: list[tuple[str, int]] = []

        async def function(_payload: Any) -> None: ...

        assert await run_job(database, function, ThreadMiddleware("outer", notes)) is None
        assert notes == []

    async def test_exception_passes_through_call_and_an_exception_of_call_fails_the_job(
        self, database: str
    ) -> None:
        class Translating(Middleware):
            def call(self, function: Callable[[], Any]) -> Any:
                try:
                    return function()
                except KeyError as error:
                    raise Fail(f"translated {error}") from error

        def function(_payload: Any) -> None:
            raise KeyError("a key")

        job = await run_job(database, function, Translating())
        assert job is not None
        assert (job.state, job.last_error) == ("failed", "translated 'a key'")

    def test_async_call_is_refused(self) -> None:
        class Wrong(Middleware):
            async def call(self, function: Callable[[], Any]) -> Any:
                return function()

        with pytest.raises(ConfigurationError, match=r"Wrong\.call is async; it must be a plain def"):
            App(middleware=[Wrong()])
