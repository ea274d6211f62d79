"""Timeouts of jobs, and the outcome of jobs that exceed them."""

from __future__ import annotations

import asyncio
import functools
import re
import threading
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from graphile_worker import (
    App,
    ConfigurationError,
    InvalidJobError,
    Job,
    JobContext,
    RunSummary,
    Snooze,
    TaskTimeoutError,
    WorkerUtils,
    quick_add_job,
    run_once,
    task,
)
from graphile_worker._worker.execution import deadline
from support.waiting import until
from support.workers import DEADLINE, EventRecorder, running

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphile_worker.testing import Databases

once = functools.partial(run_once, handle_signals=False)
LATE = "The job exceeded its timeout of 0.05 s"


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


async def run_job(
    database: str, function: Callable[..., Any], recorder: EventRecorder | None = None, **options: Any
) -> Job | None:
    """Return the job after its first run, or None if it was deleted."""
    async with WorkerUtils(database) as utils:
        job = await utils.add_job("task", **options)
        await once({"task": function}, database, events=recorder.events if recorder else None)
        return await utils.get_job(id=job.id)


class TestOnTheEventLoop:
    async def test_timed_out_async_task_is_cancelled_and_fails(self, database: str) -> None:
        cancelled: list[str] = []

        @task(timeout=0.05)
        async def function() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append("cancelled")
                raise

        recorder = EventRecorder()
        job = await run_job(database, function, recorder)
        assert job is not None
        assert (job.attempts, job.last_error) == (1, "The job exceeded its timeout of 0.05 s")
        assert cancelled == ["cancelled"]
        error = recorder.named("job:error")[0].error
        assert isinstance(error, TaskTimeoutError)
        assert isinstance(error.__cause__, asyncio.CancelledError), "its traceback shows where the task was"
        assert recorder.counts["job:interrupted"] == 0

    async def test_error_raised_on_timeout_becomes_the_cause(self, database: str) -> None:
        @task(timeout=0.05)
        async def function() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise TimeoutError("no answer from the bank") from None

        recorder = EventRecorder()
        await run_job(database, function, recorder)
        error = recorder.named("job:error")[0].error
        assert isinstance(error, TaskTimeoutError)
        assert str(error.__cause__) == "no answer from the bank"
        assert str(error) == f"{LATE}, and then failed: no answer from the bank"

    async def test_task_that_returns_after_its_timeout_fails(self, database: str) -> None:
        @task(timeout=0.05)
        async def function() -> None:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

        job = await run_job(database, function)
        assert job is not None
        assert (job.attempts, job.last_error) == (1, LATE)

    async def test_stop_requested_is_set_after_the_timeout_of_an_async_task(self, database: str) -> None:
        seen: list[Any] = []

        @task(timeout=0.05)
        async def function(ctx: JobContext) -> None:
            seen.append(ctx.stop_requested)
            await asyncio.Event().wait()

        recorder = EventRecorder()
        async with running({"task": function}, database, recorder=recorder) as runner:
            await runner.add_job("task", max_attempts=1)
            await recorder.until("job:error")
            assert seen[0]

    async def test_plain_wrapper_of_an_async_function_keeps_the_timeout(self, database: str) -> None:
        async def wrapped() -> None:
            await asyncio.sleep(DEADLINE)

        @task(timeout=0.05)
        @functools.wraps(wrapped)
        def function() -> Any:
            return wrapped()

        job = await run_job(database, function)
        assert job is not None
        assert job.last_error == LATE

    async def test_retry_policy_applies_to_timeouts(self, database: str) -> None:
        @task(timeout=timedelta(seconds=0.05), retry={TaskTimeoutError: [600]})
        async def function() -> None:
            await asyncio.Event().wait()

        job = await run_job(database, function)
        assert job is not None
        assert 600 <= (job.run_at - job.updated_at).total_seconds() < 660

    async def test_task_within_its_timeout_succeeds(self, database: str) -> None:
        @task(timeout=60)
        async def function(ctx: JobContext) -> None:
            assert ctx.deadline is not None
            assert timedelta(seconds=50) < ctx.deadline - datetime.now(UTC) < timedelta(seconds=61)
            assert not ctx.stop_requested

        assert await run_job(database, function) is None

    async def test_timeout_error_of_the_task_itself_is_not_a_task_timeout(self, database: str) -> None:
        @task(timeout=60)
        async def function() -> None:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()

        recorder = EventRecorder()
        job = await run_job(database, function, recorder)
        assert job is not None
        assert job.last_error == "TimeoutError"
        assert not isinstance(recorder.named("job:error")[0].error, TaskTimeoutError)

    async def test_async_task_can_extend_its_deadline(self, database: str) -> None:
        @task(timeout=1)
        async def function(ctx: JobContext) -> None:
            before = ctx.deadline
            ctx.extend_deadline(timedelta(minutes=1))
            assert before is not None
            assert ctx.deadline is not None
            assert ctx.deadline > before + timedelta(seconds=50)
            await asyncio.sleep(1.1)

        assert await run_job(database, function) is None

    async def test_timeout_error_names_the_changed_deadline(self, database: str) -> None:
        @task(timeout=60)
        async def function(ctx: JobContext) -> None:
            ctx.extend_deadline(0.05)
            await asyncio.Event().wait()

        job = await run_job(database, function)
        assert job is not None
        assert re.search(r"timeout of 60 s, shortened to [\d.]+ s$", job.last_error or "")
        limit = deadline.Deadline(1)
        limit.extend(600)
        assert str(limit.over()) == "The job exceeded its timeout of 1 s, extended to 600 s"

    async def test_stopping_worker_interrupts_a_task_with_a_timeout(self, database: str) -> None:
        started = asyncio.Event()

        @task(timeout=60)
        async def function() -> None:
            started.set()
            await asyncio.Event().wait()

        async with running({"task": function}, database) as runner:
            job = await runner.add_job("task")
            await started.wait()
            await runner.stop(grace=0)
        async with WorkerUtils(database) as utils:
            found = await utils.get_job(id=job.id)
        assert found is not None
        assert (found.attempts, found.last_error) == (0, None)


class TestOnAThread:
    @pytest.fixture(autouse=True)
    def _long_last_chance(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Give the thread time to notice the stop signal.

        After a stall, the timer of the event loop runs before the thread does.
        """
        monkeypatch.setattr(deadline, "_STOP_GRACE", DEADLINE)

    async def test_timed_out_thread_can_end_on_stop_requested(self, database: str) -> None:
        @task(timeout=0.05)
        def function(ctx: JobContext) -> None:
            assert ctx.stop_requested.wait(20)
            raise ValueError("gave up")

        recorder = EventRecorder()
        job = await run_job(database, function, recorder)
        assert job is not None
        assert job.last_error == f"{LATE}, and then failed: gave up"
        error = recorder.named("job:error")[0].error
        assert isinstance(error, TaskTimeoutError)
        assert isinstance(error.__cause__, ValueError)

    async def test_thread_that_returns_after_its_timeout_fails(self, database: str) -> None:
        @task(timeout=0.05)
        def function(ctx: JobContext) -> None:
            assert ctx.stop_requested.wait(DEADLINE)

        job = await run_job(database, function)
        assert job is not None
        assert (job.attempts, job.last_error) == (1, LATE)

    async def test_outcome_raised_by_a_thread_after_its_timeout_is_kept(self, database: str) -> None:
        @task(timeout=0.05)
        def function(ctx: JobContext) -> None:
            assert ctx.stop_requested.wait(DEADLINE)
            raise Snooze(600, "half of it is done")

        job = await run_job(database, function)
        assert job is not None
        assert (job.attempts, job.last_error) == (0, "Snoozed for 600 s: half of it is done")
        assert job.run_at > datetime.now(UTC) + timedelta(minutes=5)

    @pytest.mark.parametrize(("failed", "left"), [(False, None), (True, [2])])
    async def test_batch_results_of_a_thread_after_its_timeout_are_kept(
        self, database: str, *, failed: bool, left: list[int] | None
    ) -> None:
        @task(timeout=0.05, batch=True)
        def function(items: list[int], ctx: JobContext) -> list[Exception | None]:
            assert ctx.stop_requested.wait(DEADLINE)
            return [ValueError("not begun") if failed and item == 2 else None for item in items]

        job = await run_job(database, function, payload=[1, 2])
        assert (None if job is None else job.payload) == left

    async def test_awaitable_returned_by_a_thread_after_its_timeout_never_starts(self, database: str) -> None:
        started: list[bool] = []

        async def rest() -> None:
            started.append(True)

        @task(timeout=0.05)
        def function(ctx: JobContext) -> Any:
            assert ctx.stop_requested.wait(DEADLINE)
            return rest()

        job = await run_job(database, function)
        assert job is not None
        assert job.last_error == LATE
        assert started == []

    async def test_thread_that_ignores_its_timeout_is_abandoned_and_its_slot_freed(
        self, database: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(deadline, "_STOP_GRACE", 0.05)
        caplog.set_level("INFO", "graphile_worker")
        release = threading.Event()

        @task(timeout=0.05, max_attempts=1)
        def stubborn() -> Any:
            release.wait()
            return asyncio.sleep(0)  # Never awaited, and Python must not warn about that.

        ran = asyncio.Event()

        async def other(_payload: object) -> None:
            ran.set()

        recorder = EventRecorder()
        async with running({"stubborn": stubborn, "other": other}, database, recorder=recorder) as runner:
            await runner.add_job("stubborn")
            await recorder.until("job:error")
            await runner.add_job("other")
            await ran.wait()
            assert runner.health().abandoned == 1
            assert "Abandoned threads: 1" in caplog.text
            release.set()
            await until(lambda: _is(lambda: runner.health().abandoned == 0), "the thread ends")
        assert "has ended" in caplog.text
        assert isinstance(recorder.named("job:error")[0].error, TaskTimeoutError)

    async def test_thread_can_extend_its_deadline(self, database: str) -> None:
        @task(timeout=2)  # Long enough for the thread to start.
        def function(ctx: JobContext) -> None:
            before = ctx.deadline
            assert before is not None
            ctx.extend_deadline(60)
            while datetime.now(UTC) < before + timedelta(seconds=0.2):
                assert not ctx.stop_requested.wait(0.05)

        assert await run_job(database, function) is None

    async def test_thread_can_shorten_its_deadline(self, database: str) -> None:
        loop = asyncio.get_running_loop()
        signalled: list[bool] = []

        @task(timeout=600)
        def function(ctx: JobContext) -> None:
            loop_runs = threading.Event()
            loop.call_soon_threadsafe(loop_runs.set)
            assert loop_runs.wait(DEADLINE), "the event loop did not run while it waits for this thread"
            ctx.extend_deadline(0.05)
            signalled.append(ctx.stop_requested.wait(DEADLINE))

        job = await run_job(database, function)
        assert signalled == [True]
        assert job is not None
        assert re.search(r"timeout of 600 s, shortened to [\d.]+ s$", job.last_error or "")

    async def test_stopping_worker_sets_stop_requested_for_a_thread_with_a_timeout(
        self, database: str
    ) -> None:
        started = threading.Event()
        signalled: list[bool] = []

        @task(timeout=60)
        def function(ctx: JobContext) -> None:
            started.set()
            signalled.append(ctx.stop_requested.wait(20))

        async with running({"task": function}, database) as runner:
            await runner.add_job("task")
            await asyncio.to_thread(started.wait)
            await runner.stop()
        assert signalled == [True]


class TestTimeoutOption:
    async def test_job_can_override_the_timeout_of_its_task(self, database: str) -> None:
        app = App(database)
        found: list[Any] = []

        @app.task(timeout=60, flags=["slow"])
        async def hello(ctx: JobContext) -> None:
            assert ctx.deadline is not None
            found.append((ctx.deadline - datetime.now(UTC)).total_seconds())

        async with app:
            job = await hello.using(timeout=timedelta(minutes=5)).enqueue()
            assert job.flags == frozenset({"slow", "timeout:300"})
            await hello.enqueue()
            assert await app.run_once() == RunSummary(2, 0)
            assert (await app.add_job("other", timeout=3)).flags == frozenset({"timeout:3"})
        assert found == [pytest.approx(300, abs=20), pytest.approx(60, abs=20)]

    async def test_every_way_of_adding_a_job_takes_a_timeout(self, database: str) -> None:
        async def adds(_payload: object, ctx: JobContext) -> None:
            jobs.append(await ctx.add_job("elsewhere", timeout=3))
            jobs.append(await ctx.add_job("hello", timeout=3))

        @task(timeout=60)
        async def hello() -> None: ...

        jobs = [await quick_add_job("elsewhere", dsn=database, timeout=3)]
        async with WorkerUtils(database) as utils:
            jobs.append(await utils.add_job("elsewhere", timeout=timedelta(seconds=3)))
            jobs.append(await utils.add_batch_job("elsewhere", [1], timeout=3))
            await utils.add_job("adds")
        await once({"adds": adds, "hello": hello}, database)
        assert [job.flags for job in jobs] == [frozenset({"timeout:3"})] * 5

    @pytest.mark.parametrize("wrong", [0, -1, "5", float("nan"), timedelta(0)])
    async def test_invalid_timeout_of_a_job_is_rejected(self, database: str, wrong: Any) -> None:
        @task
        async def hello() -> None: ...

        with pytest.raises(InvalidJobError, match=r"timeout is .*; it must be seconds"):
            hello.using(timeout=wrong)
        async with WorkerUtils(database) as utils:
            with pytest.raises(InvalidJobError, match=r"timeout is .*; it must be seconds"):
                await utils.add_job("hello", timeout=wrong)
            with pytest.raises(InvalidJobError, match="flags is 'slow'"):
                await utils.add_job("hello", flags="slow", timeout=3)

    async def test_timeout_function_receives_the_job(self, database: str) -> None:
        @task(timeout=lambda job: 0.05 if job.payload["n"] else None)
        async def function(n: int, ctx: JobContext) -> None:
            if n:
                await asyncio.Event().wait()
            assert ctx.deadline is None
            ctx.extend_deadline(3)

        assert await run_job(database, function, payload={"n": 0}) is None
        job = await run_job(database, function, payload={"n": 1})
        assert job is not None
        assert "timeout of 0.05 s" in (job.last_error or "")

    async def test_invalid_result_of_a_timeout_function_fails_the_job(self, database: str) -> None:
        @task(timeout=lambda _job: -1)
        async def function() -> None: ...

        job = await run_job(database, function)
        assert job is not None
        assert "timeout is -1" in (job.last_error or "")

    async def test_flag_with_an_invalid_timeout_is_ignored(self, database: str) -> None:
        async def function(_payload: object, ctx: JobContext) -> None:
            assert ctx.deadline is None

        assert await run_job(database, function, flags=["timeout:soon"]) is None

    def test_invalid_timeout_of_a_task_is_rejected(self) -> None:
        async def coroutine(_job: Job) -> float:
            return 1

        for wrong in (0, -1, "x", True, coroutine, lambda: 3):
            with pytest.raises(ConfigurationError, match="timeout is"):
                task(timeout=wrong)(coroutine)  # type: ignore[arg-type]


def test_job_option_passed_as_an_argument_gets_a_hint() -> None:
    @task
    async def hello(name: str) -> None: ...

    with pytest.raises(InvalidJobError, match=r"hello\.using\(run_at=\.\.\.\)\.enqueue"):
        hello.spec("Ann", run_at=3)  # type: ignore[call-arg]


async def _is(condition: Callable[[], bool]) -> bool:
    return condition()
