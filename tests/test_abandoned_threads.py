"""Threads that a worker goes on without are limited: each keeps what its task holds."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest

from graphile_worker import Drained, TaskTimeoutError, WorkerUtils, run_once, task
from graphile_worker._runtime import deadline
from graphile_worker._runtime.abandoned import AbandonedThreads
from support.waiting import until
from support.workers import DEADLINE, Heard, running
from test_health import ask, port

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
    monkeypatch.setattr(deadline, "_LAST_CHANCE", 0.02)


class Stubborn:
    """A task whose threads end only when they are released."""

    def __init__(self) -> None:
        self.begun = 0
        self.release = threading.Event()
        self.task = task("stubborn", timeout=0.02, max_attempts=1)(self._run)
        self.other_ran = asyncio.Event()

    def _run(self) -> None:
        self.begun += 1
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
async def test_task_with_too_many_claims_no_jobs_until_threads_end(
    prefetch: int, database: str, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    stubborn, heard = Stubborn(), Heard()
    await add_jobs(database)
    options = {"concurrency": 4, "prefetch": prefetch, "health": port, "poll_interval": 0.05}
    async with running(stubborn.tasks, database, heard=heard, **options) as runner:
        try:
            await until(lambda: _is(lambda: not runner.health().live), "the worker is not live")
            # A job of another task, which all of the others come before, and which still runs.
            await runner.add_job("other", priority=10)
            await stubborn.other_ran.wait()
            health = runner.health()
            assert (health.state, health.ready, health.live) == ("exhausted", False, False)
            assert f"{health.abandoned} threads still run after the timeouts" in (health.reason or "")
            assert 4 <= stubborn.begun <= 4 + 3, "those that ran beside the last of them"
            assert (await asyncio.to_thread(ask, port, "/live"))[0] == 503
            assert caplog.text.count("This worker is not live any more") == 1
        finally:
            stubborn.release.set()
        await until(lambda: _is(lambda: stubborn.begun == JOBS), "the rest is claimed once threads end")
        await until(lambda: _is(lambda: runner.health().live), "the worker is live again")
        assert (await asyncio.to_thread(ask, port, "/live"))[0] == 200
    assert "this worker is live again" in caplog.text
    assert heard.counts["job:start"] == JOBS + 1


async def test_run_once_returns_though_threads_go_on(database: str) -> None:
    stubborn = Stubborn()
    await add_jobs(database)
    try:
        summary = await run_once(stubborn.tasks, database, handle_signals=False, concurrency=4)
    finally:
        stubborn.release.set()
    assert summary == Drained(0, stubborn.begun)
    async with WorkerUtils(database) as utils:
        assert (await utils.stats()).ready == JOBS - stubborn.begun > 0


async def test_logging_that_fails_changes_neither_the_count_nor_the_outcome(database: str) -> None:
    stubborn, heard, library = Stubborn(), Heard(), logging.getLogger("graphile_worker")
    broken = Broken()
    library.addFilter(broken)
    try:
        await add_jobs(database)
        async with running(stubborn.tasks, database, heard=heard, concurrency=4) as runner:
            await until(lambda: _is(lambda: not runner.health().live), "the worker is not live")
            await until(lambda: _is(lambda: heard.counts["job:error"] >= 4), "the jobs have failed")
            stubborn.release.set()
            await until(lambda: _is(lambda: runner.health().abandoned == 0), "all threads are counted off")
    finally:
        stubborn.release.set()
        library.removeFilter(broken)
    errors = {type(failed.error) for failed in heard.named("job:error")}
    assert errors == {TaskTimeoutError}


class Broken(logging.Filter):
    def filter(self, _record: logging.LogRecord) -> bool:
        raise OSError("the log server is away")


def test_limit_is_the_concurrency_and_at_least_four() -> None:
    assert [AbandonedThreads(concurrency).limit for concurrency in (1, 4, 24)] == [4, 4, 24]


def test_tasks_are_exhausted_each_by_its_own_threads() -> None:
    threads, changes = AbandonedThreads(4), []
    threads.on_change = lambda: changes.append(threads.exhausted)
    for name in ("a", "b", "a", "b"):
        threads.add(name)
    assert threads.too_many
    assert changes == [], "neither has too many by itself"
    for _ in range(2):
        threads.add("a")
    threads.add("b")
    assert changes == [{"a"}]
    threads.remove("a")
    assert changes == [{"a"}, set()]
    assert (
        threads.reason == "6 threads still run after the timeouts of their jobs, of the tasks: a (3), b (3)."
    )


async def _is(condition: Callable[[], bool]) -> bool:
    return condition()
