"""How long jobs may run, and what becomes of those that take longer."""

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
    Drained,
    InvalidJobError,
    Job,
    JobContext,
    Snooze,
    TaskTimeoutError,
    WorkerUtils,
    quick_add_job,
    run_once,
    task,
)
from graphile_worker._runtime import deadline
from support.waiting import until
from support.workers import DEADLINE, Heard, running

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphile_worker.testing import Databases

once = functools.partial(run_once, handle_signals=False)
LATE = "It took longer than its timeout of 0.05 s"


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


async def result(
    database: str, function: Callable[..., Any], heard: Heard | None = None, **options: Any
) -> Job | None:
    """The job after its first run, if it is still there."""
    async with WorkerUtils(database) as utils:
        job = await utils.add_job("task", **options)
        await once({"task": function}, database, events=heard.events if heard else None)
        return await utils.get_job(id=job.id)


class TestOnTheEventLoop:
    async def test_it_is_cancelled_and_fails_with_what_it_was(self, database: str) -> None:
        cancelled: list[str] = []

        @task(timeout=0.05)
        async def function() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append("cancelled")
                raise

        heard = Heard()
        job = await result(database, function, heard)
        assert job is not None
        assert (job.attempts, job.last_error) == (1, "It took longer than its timeout of 0.05 s")
        assert cancelled == ["cancelled"]
        error = heard.named("job:error")[0].error
        assert isinstance(error, TaskTimeoutError)
        assert isinstance(error.__cause__, asyncio.CancelledError), "which says where it was"
        assert heard.counts["job:interrupted"] == 0

    async def test_what_it_raises_instead_is_told_as_the_cause(self, database: str) -> None:
        @task(timeout=0.05)
        async def function() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise TimeoutError("no answer from the bank") from None

        heard = Heard()
        await result(database, function, heard)
        error = heard.named("job:error")[0].error
        assert isinstance(error, TaskTimeoutError)
        assert str(error.__cause__) == "no answer from the bank"
        assert str(error) == f"{LATE}, and then failed: no answer from the bank"

    async def test_one_that_returns_when_it_is_cancelled_has_failed(self, database: str) -> None:
        @task(timeout=0.05)
        async def function() -> None:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

        job = await result(database, function)
        assert job is not None
        assert (job.attempts, job.last_error) == (1, LATE)

    async def test_what_it_has_begun_on_a_thread_can_see_that_it_is_over(self, database: str) -> None:
        seen: list[Any] = []

        @task(timeout=0.05)
        async def function(ctx: JobContext) -> None:
            seen.append(ctx.stopping)
            await asyncio.Event().wait()

        heard = Heard()
        async with running({"task": function}, database, heard=heard) as runner:
            await runner.add_job("task", max_attempts=1)
            await heard.until("job:error")
            assert seen[0]

    async def test_a_plain_function_around_an_async_one_does_not_hide_it_from_its_timeout(
        self, database: str
    ) -> None:
        async def wrapped() -> None:
            await asyncio.sleep(DEADLINE)

        @task(timeout=0.05)
        @functools.wraps(wrapped)
        def function() -> Any:
            return wrapped()

        job = await result(database, function)
        assert job is not None
        assert job.last_error == LATE

    async def test_its_policy_decides_what_then(self, database: str) -> None:
        @task(timeout=timedelta(seconds=0.05), retry={TaskTimeoutError: [600]})
        async def function() -> None:
            await asyncio.Event().wait()

        job = await result(database, function)
        assert job is not None
        assert 600 <= (job.run_at - job.updated_at).total_seconds() < 660

    async def test_one_that_is_done_in_time_is_done(self, database: str) -> None:
        @task(timeout=60)
        async def function(ctx: JobContext) -> None:
            assert ctx.deadline is not None
            assert timedelta(seconds=50) < ctx.deadline - datetime.now(UTC) < timedelta(seconds=61)
            assert not ctx.stopping

        assert await result(database, function) is None

    async def test_a_timeout_of_its_own_is_another_matter(self, database: str) -> None:
        @task(timeout=60)
        async def function() -> None:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()

        heard = Heard()
        job = await result(database, function, heard)
        assert job is not None
        assert job.last_error == "TimeoutError"
        assert not isinstance(heard.named("job:error")[0].error, TaskTimeoutError)

    async def test_it_may_ask_for_more(self, database: str) -> None:
        @task(timeout=1)
        async def function(ctx: JobContext) -> None:
            before = ctx.deadline
            ctx.extend_deadline(timedelta(minutes=1))
            assert before is not None
            assert ctx.deadline is not None
            assert ctx.deadline > before + timedelta(seconds=50)
            await asyncio.sleep(1.1)

        assert await result(database, function) is None

    async def test_the_failure_says_how_much_time_it_had_in_all(self, database: str) -> None:
        @task(timeout=60)
        async def function(ctx: JobContext) -> None:
            ctx.extend_deadline(0.05)
            await asyncio.Event().wait()

        job = await result(database, function)
        assert job is not None
        assert re.fullmatch(r"It took .* its timeout of 60 s, shortened to [\d.]+ s", job.last_error or "")
        limit = deadline.Deadline(1)
        limit.extend(600)
        assert str(limit.over()) == "It took longer than its timeout of 1 s, extended to 600 s"

    async def test_a_worker_that_stops_interrupts_it_as_any_other(self, database: str) -> None:
        begun = asyncio.Event()

        @task(timeout=60)
        async def function() -> None:
            begun.set()
            await asyncio.Event().wait()

        async with running({"task": function}, database) as runner:
            job = await runner.add_job("task")
            await begun.wait()
            await runner.stop(grace=0)
        async with WorkerUtils(database) as utils:
            found = await utils.get_job(id=job.id)
        assert found is not None
        assert (found.attempts, found.last_error) == (0, None)


class TestOnAThread:
    @pytest.fixture(autouse=True)
    def _patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A thread that is told may have its turn later: after a pause the event loop's timer is first."""
        monkeypatch.setattr(deadline, "_LAST_CHANCE", DEADLINE)

    async def test_it_is_told_and_may_end(self, database: str) -> None:
        @task(timeout=0.05)
        def function(ctx: JobContext) -> None:
            assert ctx.stopping.wait(20)
            raise ValueError("gave up")

        heard = Heard()
        job = await result(database, function, heard)
        assert job is not None
        assert job.last_error == f"{LATE}, and then failed: gave up"
        error = heard.named("job:error")[0].error
        assert isinstance(error, TaskTimeoutError)
        assert isinstance(error.__cause__, ValueError)

    async def test_one_that_returns_when_it_is_told_has_failed(self, database: str) -> None:
        @task(timeout=0.05)
        def function(ctx: JobContext) -> None:
            assert ctx.stopping.wait(DEADLINE)

        job = await result(database, function)
        assert job is not None
        assert (job.attempts, job.last_error) == (1, LATE)

    async def test_what_it_chooses_when_it_is_told_stands(self, database: str) -> None:
        @task(timeout=0.05)
        def function(ctx: JobContext) -> None:
            assert ctx.stopping.wait(DEADLINE)
            raise Snooze(600, "half of it is done")

        job = await result(database, function)
        assert job is not None
        assert (job.attempts, job.last_error) == (0, "Snoozed for 600 s: half of it is done")
        assert job.run_at > datetime.now(UTC) + timedelta(minutes=5)

    @pytest.mark.parametrize(("failed", "left"), [(False, None), (True, [2])])
    async def test_what_it_then_says_of_the_items_of_a_batch_stands(
        self, database: str, *, failed: bool, left: list[int] | None
    ) -> None:
        @task(timeout=0.05, batch=True)
        def function(items: list[int], ctx: JobContext) -> list[Exception | None]:
            assert ctx.stopping.wait(DEADLINE)
            return [ValueError("not begun") if failed and item == 2 else None for item in items]

        job = await result(database, function, payload=[1, 2])
        assert (None if job is None else job.payload) == left

    async def test_what_it_returns_to_be_awaited_is_not_begun_any_more(self, database: str) -> None:
        begun: list[bool] = []

        async def rest() -> None:
            begun.append(True)

        @task(timeout=0.05)
        def function(ctx: JobContext) -> Any:
            assert ctx.stopping.wait(DEADLINE)
            return rest()

        job = await result(database, function)
        assert job is not None
        assert job.last_error == LATE
        assert begun == []

    async def test_otherwise_it_is_abandoned_and_its_slot_is_free(
        self, database: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(deadline, "_LAST_CHANCE", 0.05)
        caplog.set_level("INFO", "graphile_worker")
        release = threading.Event()

        @task(timeout=0.05, max_attempts=1)
        def stubborn() -> Any:
            release.wait()
            return asyncio.sleep(0)  # which nobody will await, and that must not be warned about

        ran = asyncio.Event()

        async def other(_payload: object) -> None:
            ran.set()

        heard = Heard()
        async with running({"stubborn": stubborn, "other": other}, database, heard=heard) as runner:
            await runner.add_job("stubborn")
            await heard.until("job:error")
            await runner.add_job("other")
            await ran.wait()
            assert runner.health().abandoned == 1
            assert "its thread does not end: going on without it. Threads like that: 1" in caplog.text
            release.set()
            await until(lambda: _is(lambda: runner.health().abandoned == 0), "the thread ends")
        assert "has ended after all" in caplog.text
        assert isinstance(heard.named("job:error")[0].error, TaskTimeoutError)

    async def test_it_may_ask_for_more(self, database: str) -> None:
        @task(timeout=2)  # within which the thread has to get its turn
        def function(ctx: JobContext) -> None:
            before = ctx.deadline
            assert before is not None
            ctx.extend_deadline(60)
            while datetime.now(UTC) < before + timedelta(seconds=0.2):
                assert not ctx.stopping.wait(0.05)

        assert await result(database, function) is None

    async def test_it_may_ask_for_less(self, database: str) -> None:
        loop = asyncio.get_running_loop()
        told: list[bool] = []

        @task(timeout=600)
        def function(ctx: JobContext) -> None:
            waited_for = threading.Event()
            loop.call_soon_threadsafe(waited_for.set)
            assert waited_for.wait(DEADLINE), "the worker waits for this thread, for as long as it has"
            ctx.extend_deadline(0.05)
            told.append(ctx.stopping.wait(DEADLINE))

        job = await result(database, function)
        assert told == [True]
        assert job is not None
        assert re.fullmatch(r"It took .* its timeout of 600 s, shortened to [\d.]+ s", job.last_error or "")

    async def test_a_worker_that_stops_tells_it_too(self, database: str) -> None:
        begun = threading.Event()
        told: list[bool] = []

        @task(timeout=60)
        def function(ctx: JobContext) -> None:
            begun.set()
            told.append(ctx.stopping.wait(20))

        async with running({"task": function}, database) as runner:
            await runner.add_job("task")
            await asyncio.to_thread(begun.wait)
            await runner.stop()
        assert told == [True]


class TestSaying:
    async def test_a_job_may_have_one_of_its_own(self, database: str) -> None:
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
            assert await app.run_once() == Drained(2, 0)
            assert (await app.add_job("other", timeout=3)).flags == frozenset({"timeout:3"})
        assert found == [pytest.approx(300, abs=20), pytest.approx(60, abs=20)]

    async def test_whoever_adds_a_job_can_say_it(self, database: str) -> None:
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
    async def test_what_cannot_be_one_is_refused_as_soon_as_it_is_said(
        self, database: str, wrong: Any
    ) -> None:
        @task
        async def hello() -> None: ...

        with pytest.raises(InvalidJobError, match=r"timeout is .*; it must be seconds"):
            hello.using(timeout=wrong)
        async with WorkerUtils(database) as utils:
            with pytest.raises(InvalidJobError, match=r"timeout is .*; it must be seconds"):
                await utils.add_job("hello", timeout=wrong)
            with pytest.raises(InvalidJobError, match="flags is 'slow'"):
                await utils.add_job("hello", flags="slow", timeout=3)

    async def test_it_may_depend_on_the_job(self, database: str) -> None:
        @task(timeout=lambda job: 0.05 if job.payload["n"] else None)
        async def function(n: int, ctx: JobContext) -> None:
            if n:
                await asyncio.Event().wait()
            assert ctx.deadline is None
            ctx.extend_deadline(3)

        assert await result(database, function, payload={"n": 0}) is None
        job = await result(database, function, payload={"n": 1})
        assert job is not None
        assert "timeout of 0.05 s" in (job.last_error or "")

    async def test_one_that_fails_fails_the_job(self, database: str) -> None:
        @task(timeout=lambda _job: -1)
        async def function() -> None: ...

        job = await result(database, function)
        assert job is not None
        assert "timeout is -1" in (job.last_error or "")

    async def test_a_flag_that_only_looks_like_one_is_none(self, database: str) -> None:
        async def function(_payload: object, ctx: JobContext) -> None:
            assert ctx.deadline is None

        assert await result(database, function, flags=["timeout:soon"]) is None

    def test_what_cannot_be_one(self) -> None:
        async def coroutine(_job: Job) -> float:
            return 1

        for wrong in (0, -1, "x", True, coroutine, lambda: 3):
            with pytest.raises(ConfigurationError, match="timeout is"):
                task(timeout=wrong)(coroutine)  # type: ignore[arg-type]


def test_what_is_about_the_job_is_no_argument() -> None:
    @task
    async def hello(name: str) -> None: ...

    with pytest.raises(InvalidJobError, match=r"using: hello.using\(run_at=...\).enqueue"):
        hello.spec("Ann", run_at=3)  # type: ignore[call-arg]


async def _is(condition: Callable[[], bool]) -> bool:
    return condition()
