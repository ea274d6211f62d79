"""Abandoned threads run on after the timeouts of their jobs. Each keeps its resources, so a limit applies."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest

from graphile_worker import RunSummary, TaskTimeoutError, WorkerUtils, run_once, task
from graphile_worker._worker.execution import deadline
from graphile_worker._worker.execution.abandoned_threads import AbandonedThreads
from support.waiting import until
from support.workers import DEADLINE, EventRecorder, running
from test_health import port, request_health

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphile_worker.testing import Databases

__all__ = ["port"]
JOBS = 16


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture(autouse=True)
def _short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "_STOP_GRACE", 0.02)


class Stubborn:
    """A task whose threads end only when the test releases them."""

    def __init__(self) -> None:
        self.started = 0
        self.release = threading.Event()
        self.task = task("stubborn", timeout=0.02, max_attempts=1)(self._run)
        self.other_ran = asyncio.Event()

    def _run(self) -> None:
        self.started += 1
        assert self.release.wait(DEADLINE)

    async def other(self, _payload: object) -> None:
        self.other_ran.set()

    @property
    def tasks(self) -> dict[str, Callable[..., Any]]:
        return {"stubborn": self.task, "other": self.other}


async def add_jobs(database: str) -> None:
    async with WorkerUtils(database) as utils:
        for _ in range(JOBS):
            await utils.add_job("stubborn")


@pytest.mark.parametrize("prefetch", [0, JOBS])
async def test_task_with_too_many_abandoned_threads_claims_no_jobs_until_they_end(
    prefetch: int, database: str, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    stubborn, recorder = Stubborn(), EventRecorder()
    await add_jobs(database)
    options = {"concurrency": 4, "prefetch": prefetch, "health": port, "poll_interval": 0.05}
    async with running(stubborn.tasks, database, recorder=recorder, **options) as runner:
        try:
            await until_true(lambda: not runner.health().live, "the worker is not live")
            # A job of another task still runs, although all other jobs precede it.
            await runner.add_job("other", priority=10)
            await stubborn.other_ran.wait()
            health = runner.health()
            assert (health.state, health.ready, health.live) == ("exhausted", False, False)
            assert f"{health.abandoned} threads still run after the timeouts" in (health.reason or "")
            assert 4 <= stubborn.started <= 4 + 3, "up to three more ran next to the fourth"
            assert (await asyncio.to_thread(request_health, port, "/live"))[0] == 503
            assert caplog.text.count("Restart it") == 1
        finally:
            stubborn.release.set()
        await until_true(lambda: stubborn.started == JOBS, "the other jobs are claimed when threads end")
        await until_true(lambda: runner.health().live, "the worker is live again")
        assert (await asyncio.to_thread(request_health, port, "/live"))[0] == 200
    assert "live again" in caplog.text
    assert recorder.counts["job:start"] == JOBS + 1


async def test_run_once_returns_while_abandoned_threads_run(database: str) -> None:
    stubborn = Stubborn()
    await add_jobs(database)
    try:
        summary = await run_once(stubborn.tasks, database, handle_signals=False, concurrency=4)
    finally:
        stubborn.release.set()
    assert summary == RunSummary(0, stubborn.started)
    async with WorkerUtils(database) as utils:
        assert (await utils.stats()).ready == JOBS - stubborn.started > 0


async def test_failing_log_filter_changes_neither_thread_count_nor_outcome(database: str) -> None:
    stubborn, recorder, library = Stubborn(), EventRecorder(), logging.getLogger("graphile_worker")
    failing_filter = FailingFilter()
    library.addFilter(failing_filter)
    try:
        await add_jobs(database)
        async with running(stubborn.tasks, database, recorder=recorder, concurrency=4) as runner:
            await until_true(lambda: not runner.health().live, "the worker is not live")
            await until_true(lambda: recorder.counts["job:error"] >= 4, "the jobs have failed")
            stubborn.release.set()
            await until_true(lambda: runner.health().abandoned == 0, "no abandoned threads are left")
    finally:
        stubborn.release.set()
        library.removeFilter(failing_filter)
    errors = {type(failed.error) for failed in recorder.named("job:error")}
    assert errors == {TaskTimeoutError}


class FailingFilter(logging.Filter):
    def filter(self, _record: logging.LogRecord) -> bool:
        raise OSError("the log server is unreachable")


def test_limit_of_abandoned_threads_is_the_concurrency_but_at_least_four() -> None:
    assert [AbandonedThreads(concurrency).limit for concurrency in (1, 4, 24)] == [4, 4, 24]


def test_task_is_exhausted_only_by_its_own_threads() -> None:
    threads, changes = AbandonedThreads(4), []
    threads.on_change = lambda: changes.append(threads.exhausted)
    for name in ("a", "b", "a", "b"):
        threads.add(name)
    assert threads.too_many
    assert changes == [], "neither task has too many on its own"
    for _ in range(2):
        threads.add("a")
    threads.add("b")
    assert changes == [{"a"}]
    threads.remove("a")
    assert changes == [{"a"}, set()]
    assert "6 threads" in threads.reason
    assert "a (3), b (3)" in threads.reason


async def until_true(condition: Callable[[], bool], what: str) -> None:
    async def check() -> bool:
        return condition()

    await until(check, what)
