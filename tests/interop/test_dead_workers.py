"""A worker of either side is killed with jobs in hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from support.jobs import existing, get
from support.programs import program
from support.waiting import until

if TYPE_CHECKING:
    from interop.conftest import Shared

VICTIM = Path(__file__).parent.parent / "support" / "victim.py"


async def kill_node_with_a_job(beside: Shared) -> tuple[int, str]:
    """The job that it had, and the name that it had."""
    job_id = await beside.python.add("hold", queue_name="q")
    pool = await beside.node.start("hold")
    await beside.node.until_begun(job_id)
    await beside.node.killed()
    return job_id, pool


async def test_what_a_killed_node_worker_held_stays_locked_and_is_named(beside: Shared) -> None:
    """It may live, for all that anybody can see: npm's worker gives no sign of life."""
    job_id, pool = await kill_node_with_a_job(beside)
    before = await existing(beside.db, job_id)
    behind = await beside.python.add("see", queue_name="q")
    # A worker of ours that sweeps, and whose leases are short.
    await beside.python.start("see", "hold", heartbeat_interval=0.2, lease=4, fast_lease=1)
    shown = await beside.python.add("see", "shown")
    await until(lambda: is_gone(beside, shown), "our worker runs jobs")

    assert await beside.utils.sweep() == [], "and by hand neither"
    [held] = [worker for worker in await beside.utils.workers() if worker.id == pool]
    assert (held.language, held.jobs, held.queues, held.lives) == ("node", 1, 1, False)
    assert [job.id for job in await beside.utils.list_jobs(locked_by=pool)] == [job_id]
    assert await existing(beside.db, job_id) == before
    waiting = await beside.utils.get_job(id=behind)
    assert waiting is not None
    assert waiting.attempts == 0, "its queue is locked"


async def test_after_four_hours_we_free_it_and_its_queue_goes_on(beside: Shared) -> None:
    job_id, pool = await kill_node_with_a_job(beside)
    for table in ("_private_jobs", "_private_job_queues"):
        await beside.db.execute(
            f"update graphile_worker.{table} set locked_at = locked_at - interval '4 hours' "
            "where locked_by = $1",
            pool,
        )
    await beside.python.start("hold", min_reset_locked_interval=0.05, max_reset_locked_interval=0.1)
    await beside.python.until_begun(job_id)
    job = await existing(beside.db, job_id)
    assert job["attempts"] == 2, "the attempt that died counts"
    await beside.python.release(job_id)
    await until(lambda: is_gone(beside, job_id), "it is done")


async def test_force_unlock_workers_frees_it_at_once(beside: Shared) -> None:
    job_id, pool = await kill_node_with_a_job(beside)
    await beside.utils.force_unlock_workers([pool])
    await beside.python.start("hold")
    await beside.python.until_begun(job_id)
    await beside.python.release(job_id)
    await until(lambda: is_gone(beside, job_id), "it is done")
    assert pool not in {worker.id for worker in await beside.utils.workers()}


async def test_jobs_of_a_killed_worker_of_ours_run_in_node_once_another_of_ours_has_freed_them(
    beside: Shared,
) -> None:
    options = {"heartbeat_interval": 0.2, "lease": 4, "fast_lease": 1}
    job_id = await beside.node.add("sleep", 600, queue_name="q")
    async with program(sys.executable, VICTIM, beside.dsn, json.dumps(options)) as victim:
        await victim.until("begun sleep")
        victim.process.kill()
        await victim.end()
    await beside.python.start("see", **options)  # not the task, but it looks after the dead
    recovered = await beside.python.heard.until("worker:recovered")
    assert [job.id for job in recovered.recovered.jobs] == [job_id]

    await beside.node.start("sleep")
    seen = await beside.node.until("seen")
    assert (int(seen["job"]["id"]), seen["job"]["attempts"], seen["queue"]) == (job_id, 2, "q")
    assert seen["job"]["last_error"].startswith("The worker that ran this job died: python-")
    await until(lambda: is_gone(beside, job_id), "it is done")


async def is_gone(shared: Shared, job_id: int) -> bool:
    return await get(shared.db, job_id) is None


async def test_the_command_names_a_killed_node_worker_and_unlocks_it(beside: Shared) -> None:
    job_id, pool = await kill_node_with_a_job(beside)

    async def said(*arguments: str) -> str:
        command = (sys.executable, "-m", "graphile_worker", *arguments, "-c", beside.dsn)
        async with program(*command, with_errors=True) as running:
            assert await running.end() == 0, running.text
        return running.text

    assert pool in await said("workers")
    await beside.db.execute(
        "update graphile_worker._private_jobs set locked_at = locked_at - interval '2 hours' where id = $1",
        job_id,
    )
    assert f"{pool}, a worker of Node's, has held 1 job" in " ".join((await said("doctor")).split())
    assert "Freed 1 job and 1 queue" in await said("unlock", pool)
    job = await existing(beside.db, job_id)
    assert (job["locked_by"], job["attempts"]) == (None, 1)
    assert pool not in await said("workers")
