"""Administration by one language of jobs that the other has added, runs, or has failed to run."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from graphile_worker import CleanupTask, Job
from support.jobs import count, existing, get
from support.waiting import until

if TYPE_CHECKING:
    from interop.conftest import Shared

SOON, LATER = datetime(2099, 1, 1, tzinfo=UTC), datetime(2099, 2, 2, tzinfo=UTC)
EVERYTHING = [task.value for task in CleanupTask]
OTHER = {"python": "node", "node": "python"}
both_ways = pytest.mark.parametrize("side", ["python", "node"])


class Tools:
    """The administration functions of one side; each returns the ids of the changed jobs."""

    def __init__(self, shared: Shared, side: str) -> None:
        self._shared = shared
        self._side = side

    async def complete(self, ids: list[int]) -> list[int]:
        if self._side == "python":
            return _ids(await self._shared.utils.complete_jobs(ids))
        return _ids(await self._node("completeJobs", ids))

    async def fail(self, ids: list[int], reason: str) -> list[int]:
        if self._side == "python":
            return _ids(await self._shared.utils.permanently_fail_jobs(ids, reason))
        return _ids(await self._node("permanentlyFailJobs", ids, reason))

    async def reschedule(self, ids: list[int]) -> list[int]:
        if self._side == "python":
            jobs = await self._shared.utils.reschedule_jobs(
                ids, run_at=LATER, priority=7, attempts=2, max_attempts=9
            )
            return _ids(jobs)
        changes = {"runAt": LATER.isoformat(), "priority": 7, "attempts": 2, "maxAttempts": 9}
        return _ids(await self._node("rescheduleJobs", ids, changes))

    async def unlock(self, worker: str) -> None:
        if self._side == "python":
            await self._shared.utils.force_unlock_workers([worker])
        else:
            await self._shared.node.utils("forceUnlockWorkers", [worker])

    async def clean_up(self, *tasks: str, keep: tuple[str, ...] = ()) -> None:
        if self._side == "python":
            await self._shared.utils.cleanup(tasks, keep_task_identifiers=keep)
        else:
            options = {"tasks": list(tasks), "taskIdentifiersToKeep": list(keep)}
            await self._shared.node.utils("cleanup", options)

    async def _node(self, method: str, ids: list[int], *arguments: object) -> Any:
        return await self._shared.node.utils(method, [str(job_id) for job_id in ids], *arguments)


def _ids(jobs: list[Any]) -> list[int]:
    return sorted(job.id if isinstance(job, Job) else int(job["id"]) for job in jobs)


@pytest.mark.sample(2)
@both_ways
async def test_other_side_completes_fails_and_reschedules_waiting_jobs(shared: Shared, side: str) -> None:
    tools, adder = Tools(shared, side), shared.side(OTHER[side])
    done, failed, moved = [
        await adder.add("task", n, run_at=SOON, job_key=f"k{n}", queue_name="q") for n in range(3)
    ]

    assert await tools.complete([done]) == [done]
    assert await tools.fail([failed], "no such thing") == [failed]
    assert await tools.reschedule([moved]) == [moved]

    assert await get(shared.db, done) is None
    job = await existing(shared.db, failed)
    assert (job["last_error"], job["attempts"], job["key"]) == ("no such thing", 25, "k1")
    job = await existing(shared.db, moved)
    assert (job["run_at"], job["priority"], job["attempts"], job["max_attempts"]) == (LATER, 7, 2, 9)


@pytest.mark.sample(2)
@both_ways
async def test_permanently_failed_jobs_are_rescheduled_or_deleted_by_the_other_side(
    mixed: Shared, side: str
) -> None:
    tools, other = Tools(mixed, side), mixed.side(OTHER[side])
    again, never = [await other.add("fail", {"error": "as told"}, max_attempts=1) for _ in range(2)]
    await other.start("fail")

    async def failed() -> bool:
        rows = [await existing(mixed.db, job_id) for job_id in (again, never)]
        return all(row["last_error"] == "as told" and row["locked_at"] is None for row in rows)

    await until(failed, "both have failed permanently")
    await other.stop()
    assert await tools.reschedule([again]) == [again]
    rescheduled = await mixed.utils.get_job(id=again)
    assert rescheduled is not None
    assert rescheduled.state == "scheduled"
    await tools.clean_up("DELETE_PERMAFAILED_JOBS")
    assert await get(mixed.db, never) is None
    assert await count(mixed.db) == 1


@pytest.mark.sample(2)
@both_ways
async def test_running_jobs_of_the_other_side_are_not_changed(mixed: Shared, side: str) -> None:
    tools, other = Tools(mixed, side), mixed.side(OTHER[side])
    job_id = await other.add("hold", queue_name="q")
    worker = await other.start("hold")
    await other.until_started(job_id)
    before = await existing(mixed.db, job_id)
    assert before["locked_by"] == worker

    assert await tools.complete([job_id]) == []
    assert await tools.fail([job_id], "x") == []
    assert await tools.reschedule([job_id]) == []
    await tools.clean_up(*EVERYTHING)

    assert await existing(mixed.db, job_id) == before
    await other.release(job_id)

    async def is_done() -> bool:
        return await get(mixed.db, job_id) is None

    await until(is_done, "the job ends as usual")


@pytest.mark.sample(2)
@both_ways
async def test_force_unlock_workers_accepts_worker_ids_of_the_other_side(mixed: Shared, side: str) -> None:
    """It leaves the locks of other workers."""
    tools, other = Tools(mixed, side), mixed.side(OTHER[side])
    held = await other.add("hold", queue_name="first")
    unrelated = await mixed.side(side).add("see", queue_name="second", run_at=SOON)
    worker = await other.start("hold")
    await other.until_started(held)
    await mixed.db.execute(
        """update graphile_worker._private_jobs set locked_by = 'unrelated', locked_at = now()
        where id = $1""",
        unrelated,
    )

    await tools.unlock(worker)

    unlocked, kept = await existing(mixed.db, held), await existing(mixed.db, unrelated)
    assert (unlocked["locked_by"], unlocked["locked_at"], unlocked["attempts"]) == (None, None, 1)
    assert kept["locked_by"] == "unrelated"
    assert not await mixed.db.fetchval(
        "select exists (select from graphile_worker._private_job_queues where locked_at is not null)"
    )


async def test_job_unlocked_by_node_is_lost_and_its_next_run_is_not_deleted(
    newest: Shared,
) -> None:
    """A Node worker would delete the job by its id, even if another worker runs it by then."""
    job_id = await newest.python.add("hold", queue_name="q")
    worker = await newest.python.start("hold")
    await newest.python.until_started(job_id)
    await newest.node.utils("forceUnlockWorkers", [worker])
    await newest.node.start("hold")
    await newest.node.until_started(job_id)

    await newest.python.release(job_id)
    lost = await newest.python.recorder.until("job:lost")

    assert lost.job.id == job_id
    job = await newest.utils.get_job(id=job_id)
    assert job is not None
    assert (job.state, job.attempts) == ("running", 2)
    await newest.node.release(job_id)

    async def is_done() -> bool:
        return await get(newest.db, job_id) is None

    await until(is_done, "the second run counts")


@pytest.mark.sample(2)
@both_ways
async def test_cleanup_by_one_side_loses_no_job_of_the_other(shared: Shared, side: str) -> None:
    """Unused task names are deleted too, except Node's: its workers would never see them again."""
    tools, other = Tools(shared, side), shared.side(OTHER[side])
    keep = ("see",) if OTHER[side] == "node" else ()
    await other.start("see", concurrency=2)
    for number in range(4):
        cleaning = asyncio.create_task(tools.clean_up(*EVERYTHING, keep=keep))
        if side == "node":
            # Node's cleanup can delete a queue to which another session is adding a job.
            await cleaning
        job_id = await other.add("see", number, queue_name=f"q{number % 2}")
        await cleaning

        async def is_done(id: int = job_id) -> bool:
            return await get(shared.db, id) is None

        await until(is_done, f"job {number} ran")
    await tools.clean_up(*EVERYTHING, keep=keep)
    assert await shared.db.fetchval("select count(*) from graphile_worker._private_job_queues") == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("error", [None, "as told"], ids=["succeeds", "fails"])
async def test_cancelled_job_running_in_node_is_not_interrupted_and_not_retried(
    mixed: Shared, error: str | None
) -> None:
    job_id = await mixed.python.add("hold", queue_name="q")
    await mixed.node.start("hold")
    await mixed.python.start("see")
    await mixed.node.until_started(job_id)
    assert await mixed.utils.cancel_job(job_id, "not needed") == "requested"
    await mixed.node.release(job_id, error)
    await mixed.node.stop()  # it might retry before the Python worker settles the cancellation

    async def ended() -> bool:
        job = await get(mixed.db, job_id)
        return job is None or job["locked_at"] is None

    await until(ended, "the job ends by itself")
    if error is None:
        assert await get(mixed.db, job_id) is None
        return

    async def is_over() -> bool:
        return not (await existing(mixed.db, job_id))["is_available"]

    await until(is_over, "the Python worker prevents a retry")
    assert (await existing(mixed.db, job_id))["last_error"] == "Cancelled: not needed"
