"""A Node worker or a Python worker is killed while it runs jobs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.jobs import existing, get
from support.programs import program
from support.waiting import until

if TYPE_CHECKING:
    from interop.conftest import Shared

VICTIM = Path(__file__).parent.parent / "support" / "victim.py"


async def kill_node_with_a_job(mixed: Shared) -> tuple[int, str]:
    """Kill a Node worker that runs a job; return the job's id and the worker's id."""
    job_id = await mixed.python.add("hold", queue_name="q")
    pool = await mixed.node.start("hold")
    await mixed.node.until_started(job_id)
    await mixed.node.killed()
    return job_id, pool


async def test_job_of_a_killed_node_worker_stays_locked_and_is_listed(mixed: Shared) -> None:
    """It may still be alive: a Node worker has no heartbeat."""
    job_id, pool = await kill_node_with_a_job(mixed)
    before = await existing(mixed.db, job_id)
    behind = await mixed.python.add("see", queue_name="q")
    # A Python worker that sweeps, with short leases.
    await mixed.python.start("see", "hold", heartbeat_interval=0.2, lease=4, fast_lease=1)
    shown = await mixed.python.add("see", "shown")
    await until(lambda: is_gone(mixed, shown), "the Python worker runs jobs")

    assert await mixed.utils.sweep() == [], "a manual sweep does not free it either"
    [held] = [worker for worker in await mixed.utils.workers() if worker.id == pool]
    assert (held.language, held.jobs, held.queues, held.is_alive) == ("node", 1, 1, False)
    assert [job.id for job in await mixed.utils.list_jobs(locked_by=pool)] == [job_id]
    assert await existing(mixed.db, job_id) == before
    waiting = await mixed.utils.get_job(id=behind)
    assert waiting is not None
    assert waiting.attempts == 0, "its queue is locked"


@pytest.mark.sample(1)
async def test_job_of_a_killed_node_worker_is_unlocked_after_four_hours(mixed: Shared) -> None:
    job_id, pool = await kill_node_with_a_job(mixed)
    for table in ("_private_jobs", "_private_job_queues"):
        await mixed.db.execute(
            f"update graphile_worker.{table} set locked_at = locked_at - interval '4 hours' "
            "where locked_by = $1",
            pool,
        )
    await mixed.python.start("hold", min_reset_locked_interval=0.05, max_reset_locked_interval=0.1)
    await mixed.python.until_started(job_id)
    job = await existing(mixed.db, job_id)
    assert job["attempts"] == 2, "the attempt that died counts"
    await mixed.python.release(job_id)
    await until(lambda: is_gone(mixed, job_id), "it is done")


@pytest.mark.sample(1)
async def test_force_unlock_workers_unlocks_a_killed_node_worker_at_once(mixed: Shared) -> None:
    job_id, pool = await kill_node_with_a_job(mixed)
    await mixed.utils.force_unlock_workers([pool])
    await mixed.python.start("hold")
    await mixed.python.until_started(job_id)
    await mixed.python.release(job_id)
    await until(lambda: is_gone(mixed, job_id), "it is done")
    assert pool not in {worker.id for worker in await mixed.utils.workers()}


@pytest.mark.sample(1)
async def test_node_runs_jobs_recovered_from_a_killed_python_worker(
    mixed: Shared,
) -> None:
    options = {"heartbeat_interval": 0.2, "lease": 4, "fast_lease": 1}
    job_id = await mixed.node.add("sleep", 600, queue_name="q")
    async with program(sys.executable, VICTIM, mixed.dsn, json.dumps(options)) as victim:
        await victim.until("begun sleep")
        victim.process.kill()
        await victim.end()
    await mixed.python.start("see", **options)  # it does not have the task, but recovers dead workers
    recovered = await mixed.python.recorder.until("worker:recovered")
    assert [job.id for job in recovered.recovered.jobs] == [job_id]

    await mixed.node.start("sleep")
    seen = await mixed.node.until("seen")
    assert (int(seen["job"]["id"]), seen["job"]["attempts"], seen["queue"]) == (job_id, 2, "q")
    assert seen["job"]["last_error"].startswith("The worker that ran this job died: python-")
    await until(lambda: is_gone(mixed, job_id), "it is done")


async def is_gone(shared: Shared, job_id: int) -> bool:
    return await get(shared.db, job_id) is None


@pytest.mark.sample(1)
async def test_command_lists_and_unlocks_a_killed_node_worker(mixed: Shared) -> None:
    job_id, pool = await kill_node_with_a_job(mixed)

    async def output(*arguments: str) -> str:
        command = (sys.executable, "-m", "graphile_worker", *arguments, "-c", mixed.dsn)
        async with program(*command, with_errors=True) as running:
            assert await running.end() == 0, running.text
        return running.text

    assert pool in await output("workers")
    await mixed.db.execute(
        "update graphile_worker._private_jobs set locked_at = locked_at - interval '2 hours' where id = $1",
        job_id,
    )
    assert re.search(rf"{pool}\b.* 1 job\b", " ".join((await output("doctor")).split()))
    assert " 1 job and 1 queue" in await output("unlock", pool)
    job = await existing(mixed.db, job_id)
    assert (job["locked_by"], job["attempts"]) == (None, 1)
    assert pool not in await output("workers")
