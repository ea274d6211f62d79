"""A Python worker adopts a schema installed by Node, and runs its jobs."""

from __future__ import annotations

import asyncpg
import pytest

from graphile_worker import JobSpec, RunSummary, WorkerUtils, run_once
from support import node
from support.workers import EventRecorder, locked, running


@pytest.mark.sample(1)
@pytest.mark.parametrize("version", ["0.17.3", "0.18.0"])
async def test_jobs_added_before_and_after_adoption_run(empty_database: str, version: str) -> None:
    await node.install(version, empty_database)
    db = await asyncpg.connect(empty_database)
    await db.execute(
        "select graphile_worker.add_job('task', '1', queue_name := 'q') from generate_series(1, 5)"
    )
    ran: list[int] = []

    assert await run_once({"task": ran.append}, empty_database, handle_signals=False) == RunSummary(5, 0)

    recorder = EventRecorder()
    async with running(
        {"task": ran.append}, empty_database, recorder=recorder, concurrency=3, prefetch=5
    ) as runner:
        await db.execute("select graphile_worker.add_job('task', '2', job_key := 'k')")
        async with WorkerUtils(empty_database) as utils:
            await utils.add_jobs(JobSpec("task", 3, queue_name=f"q{n % 2}") for n in range(10))
        await recorder.until("job:complete", 11)
        assert runner.summary == RunSummary(11, 0)
    assert sorted(ran) == [1] * 5 + [2] + [3] * 10
    assert await locked(db) == []
    await db.close()
