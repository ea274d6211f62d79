"""A cancellation that the worker did not request is a failure, not an interruption."""

from __future__ import annotations

import asyncio
import functools
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from graphile_worker import Job, JobContext, JobState, Middleware, RunSummary, WorkerUtils, run_once, task
from graphile_worker.testing import drain
from support import computing
from support.waiting import DEADLINE
from support.workers import EventRecorder, running

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphile_worker.testing import Databases

once = functools.partial(run_once, handle_signals=False)


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


class RunCounter:
    def __init__(self) -> None:
        self.count = 0

    def begin(self) -> None:
        """Count the run, and stop a job that runs again and again, so that the test ends."""
        self.count += 1
        if self.count > 5:
            raise _TooManyRunsError


class _TooManyRunsError(Exception): ...


def cancel_current() -> None:
    current = asyncio.current_task()
    assert current is not None
    current.cancel("by the task")


def functions(runs: RunCounter) -> dict[str, Callable[..., Any]]:
    @task("plain")
    async def plain() -> None:
        runs.begin()
        cancel_current()
        await asyncio.sleep(DEADLINE)

    @task("with timeout", timeout=60)
    async def with_timeout() -> None:
        runs.begin()
        cancel_current()
        await asyncio.sleep(DEADLINE)

    @task("by a child")
    async def by_a_child() -> None:
        """Leak a cancellation as a library might: a child task cancels the task of the job."""
        runs.begin()
        parent = asyncio.current_task()
        assert parent is not None
        child = asyncio.create_task(_cancel(parent))
        try:
            await asyncio.sleep(DEADLINE)
        finally:
            with suppress(asyncio.CancelledError):
                await child

    @task("batch", batch=True)
    async def batch(items: list[int]) -> None:
        runs.begin()
        assert items == [1, 2]
        cancel_current()
        await asyncio.sleep(DEADLINE)

    @task("in middleware")
    async def in_middleware() -> None:
        pytest.fail("the middleware must cancel first")

    found = (plain, with_timeout, by_a_child, batch, in_middleware)
    return {str(one.identifier): one for one in found}


async def _cancel(other: asyncio.Task[Any]) -> None:
    other.cancel("by its child")


class CancellingMiddleware(Middleware):
    def __init__(self, runs: RunCounter) -> None:
        self._runs = runs

    async def execute(self, ctx: JobContext, proceed: Callable[..., Any]) -> Any:
        if ctx.job.task_identifier == "in middleware":
            self._runs.begin()
            cancel_current()
            await asyncio.sleep(DEADLINE)
        return await proceed()


@pytest.mark.parametrize("name", ["plain", "with timeout", "by a child", "batch", "in middleware"])
async def test_task_that_cancels_itself_fails_with_its_attempt_and_a_delay(name: str, database: str) -> None:
    runs, recorder = RunCounter(), EventRecorder()
    async with WorkerUtils(database) as utils:
        payload = [1, 2] if name == "batch" else None
        job = await utils.add_job(name, payload)
        served = functions(runs)
        summary = await once(
            served, database, events=recorder.events, middleware=[CancellingMiddleware(runs)]
        )
        found = await utils.get_job(id=job.id)
    assert runs.count == 1
    assert summary == RunSummary(0, 1)
    check_failed_once(found)
    assert isinstance(recorder.named("job:error")[0].error, asyncio.CancelledError)
    assert recorder.counts["job:interrupted"] == 0


def check_failed_once(job: Job | None) -> None:
    assert job is not None
    assert (job.attempts, job.state) == (1, JobState.SCHEDULED)
    assert "by" in (job.last_error or "")
    assert (job.run_at - job.updated_at).total_seconds() > 1


async def test_task_in_a_process_that_cancels_itself_fails(database: str) -> None:
    async with WorkerUtils(database) as utils:
        job = await utils.add_job("cancel_itself")
        assert await once({"cancel_itself": computing.cancel_itself}, database) == RunSummary(0, 1)
        check_failed_once(await utils.get_job(id=job.id))


async def test_interruption_takes_precedence_over_a_cancellation_by_the_task(database: str) -> None:
    recorder, started = EventRecorder(), asyncio.Event()

    async def both(_payload: object) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancel_current()
            await asyncio.sleep(DEADLINE)

    async with running({"both": both}, database, recorder=recorder) as runner:
        job = await runner.add_job("both")
        await started.wait()
        await runner.stop(grace=0)
    async with WorkerUtils(database) as utils:
        found = await utils.get_job(id=job.id)
    assert found is not None
    assert (found.attempts, found.last_error) == (0, None)
    assert (recorder.counts["job:interrupted"], recorder.counts["job:error"]) == (1, 0)


async def test_task_that_cancels_itself_and_returns_succeeds(database: str) -> None:
    async def late(_payload: object) -> None:
        cancel_current()

    async with WorkerUtils(database) as utils:
        await utils.add_job("late")
        assert await once({"late": late}, database) == RunSummary(1, 0)
        await utils.add_job("late")
        async with asyncio.timeout(DEADLINE):
            assert await drain({"late": late}, dsn=database) == RunSummary(succeeded=1)


async def test_drain_counts_a_task_that_cancels_itself_as_failed(database: str) -> None:
    runs = RunCounter()
    async with WorkerUtils(database) as utils:
        job = await utils.add_job("plain")
        served = {"plain": functions(runs)["plain"]}
        assert await drain(served, dsn=database) == RunSummary(failed=1)
        check_failed_once(await utils.get_job(id=job.id))
