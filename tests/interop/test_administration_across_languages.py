"""What one side's tools do to jobs that the other added, runs, or could not run."""

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
    """The administration of one side: what it says of jobs is their ids."""

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

    async def _node(self, method: str, ids: list[int], *given: object) -> Any:
        return await self._shared.node.utils(method, [str(one) for one in ids], *given)


def _ids(jobs: list[Any]) -> list[int]:
    return sorted(job.id if isinstance(job, Job) else int(job["id"]) for job in jobs)


@both_ways
async def test_waiting_jobs_are_completed_failed_and_rescheduled_by_the_other_side(
    shared: Shared, side: str
) -> None:
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


@both_ways
async def test_jobs_that_failed_for_good_there_are_brought_back_or_cleaned_up_here(
    beside: Shared, side: str
) -> None:
    tools, other = Tools(beside, side), beside.side(OTHER[side])
    again, never = [await other.add("fail", {"error": "as told"}, max_attempts=1) for _ in range(2)]
    await other.start("fail")

    async def failed() -> bool:
        rows = [await existing(beside.db, job_id) for job_id in (again, never)]
        return all(row["last_error"] == "as told" and row["locked_at"] is None for row in rows)

    await until(failed, "both have failed for good")
    await other.stop()
    assert await tools.reschedule([again]) == [again]
    brought_back = await beside.utils.get_job(id=again)
    assert brought_back is not None
    assert brought_back.state == "scheduled"
    await tools.clean_up("DELETE_PERMAFAILED_JOBS")
    assert await get(beside.db, never) is None
    assert await count(beside.db) == 1


@both_ways
async def test_what_runs_there_is_left_alone_here(beside: Shared, side: str) -> None:
    tools, other = Tools(beside, side), beside.side(OTHER[side])
    job_id = await other.add("hold", queue_name="q")
    worker = await other.start("hold")
    await other.until_begun(job_id)
    before = await existing(beside.db, job_id)
    assert before["locked_by"] == worker

    assert await tools.complete([job_id]) == []
    assert await tools.fail([job_id], "x") == []
    assert await tools.reschedule([job_id]) == []
    await tools.clean_up(*EVERYTHING)

    assert await existing(beside.db, job_id) == before
    await other.release(job_id)

    async def is_done() -> bool:
        return await get(beside.db, job_id) is None

    await until(is_done, "it ends as usual")


@both_ways
async def test_force_unlock_workers_takes_the_ids_of_the_other_side(beside: Shared, side: str) -> None:
    """For workers that are gone for good; and it leaves what others hold."""
    tools, other = Tools(beside, side), beside.side(OTHER[side])
    held = await other.add("hold", queue_name="theirs")
    mine = await beside.side(side).add("see", queue_name="mine", run_at=SOON)
    worker = await other.start("hold")
    await other.until_begun(held)
    await beside.db.execute(
        """update graphile_worker._private_jobs set locked_by = 'somebody', locked_at = now()
        where id = $1""",
        mine,
    )

    await tools.unlock(worker)

    freed, kept = await existing(beside.db, held), await existing(beside.db, mine)
    assert (freed["locked_by"], freed["locked_at"], freed["attempts"]) == (None, None, 1)
    assert kept["locked_by"] == "somebody"
    assert not await beside.db.fetchval(
        "select exists (select from graphile_worker._private_job_queues where locked_at is not null)"
    )


async def test_a_job_that_node_frees_under_us_is_lost_to_us_and_its_next_run_is_not_deleted(
    newest: Shared,
) -> None:
    """Npm's worker would delete it by its id, whoever runs it by then."""
    job_id = await newest.python.add("hold", queue_name="q")
    worker = await newest.python.start("hold")
    await newest.python.until_begun(job_id)
    await newest.node.utils("forceUnlockWorkers", [worker])
    await newest.node.start("hold")
    await newest.node.until_begun(job_id)

    await newest.python.release(job_id)
    lost = await newest.python.heard.until("job:lost")

    assert lost.job.id == job_id
    job = await newest.utils.get_job(id=job_id)
    assert job is not None
    assert (job.state, job.attempts) == ("running", 2)
    await newest.node.release(job_id)

    async def is_done() -> bool:
        return await get(newest.db, job_id) is None

    await until(is_done, "the second run counts")


@both_ways
async def test_a_cleanup_by_one_side_while_the_other_runs_costs_no_job(shared: Shared, side: str) -> None:
    """Task names go, too, but for those of Node's tasks: its workers would never see them again."""
    tools, other = Tools(shared, side), shared.side(OTHER[side])
    keep = ("see",) if OTHER[side] == "node" else ()
    await other.start("see", concurrency=2)
    for number in range(4):
        cleaning = asyncio.create_task(tools.clean_up(*EVERYTHING, keep=keep))
        if side == "node":
            # Npm's cleanup can take a queue away from a job that is being added, whoever adds it.
            await cleaning
        job_id = await other.add("see", number, queue_name=f"q{number % 2}")
        await cleaning

        async def is_done(id: int = job_id) -> bool:
            return await get(shared.db, id) is None

        await until(is_done, f"job {number} ran")
    await tools.clean_up(*EVERYTHING, keep=keep)
    assert await shared.db.fetchval("select count(*) from graphile_worker._private_job_queues") == 0


@pytest.mark.parametrize("error", [None, "as told"], ids=["ends well", "fails"])
async def test_a_job_that_runs_in_node_is_not_stopped_by_cancelling_it_but_will_not_run_again(
    beside: Shared, error: str | None
) -> None:
    job_id = await beside.python.add("hold", queue_name="q")
    await beside.node.start("hold")
    await beside.python.start("see")
    await beside.node.until_begun(job_id)
    assert await beside.utils.cancel_job(job_id, "not needed") == "requested"
    await beside.node.release(job_id, error)
    await beside.node.stop()  # or it might try again before ours has seen to it

    async def ended() -> bool:
        job = await get(beside.db, job_id)
        return job is None or job["locked_at"] is None

    await until(ended, "it ends in its own time")
    if error is None:
        assert await get(beside.db, job_id) is None
        return

    async def is_over() -> bool:
        return not (await existing(beside.db, job_id))["is_available"]

    await until(is_over, "our worker sees to it that it is not tried again")
    assert (await existing(beside.db, job_id))["last_error"] == "Cancelled: not needed"
