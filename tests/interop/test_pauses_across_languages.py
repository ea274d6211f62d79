"""Node workers obey the pause of a queue, and jobs of the queue never overlap when it is resumed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from graphile_worker.limits import PAUSED
from support.jobs import get
from support.waiting import until
from support.workers import locked

if TYPE_CHECKING:
    from interop.conftest import Shared


async def until_node_ran_another(shared: Shared) -> None:
    """Wait until Node has run a job that was added now, so it has searched for jobs since."""
    shown = await shared.node.add("see")
    await shared.node.until("job:success", id=shown)


async def gone(shared: Shared, job_id: int) -> bool:
    return await get(shared.db, job_id) is None


async def holder(shared: Shared, queue: str) -> str | None:
    found: str | None = await shared.db.fetchval(
        "select locked_by from graphile_worker._private_job_queues where queue_name = $1", queue
    )
    return found


@pytest.mark.sample(1)
async def test_node_claims_no_job_of_a_paused_queue(mixed: Shared) -> None:
    await mixed.utils.pause(queue="q", reason="a test")
    waiting = await mixed.node.add("see", queue_name="q")
    await mixed.node.start("see", concurrency=3)
    for _ in range(3):
        await until_node_ran_another(mixed)
    job = await get(mixed.db, waiting)
    assert job is not None
    assert (job["attempts"], job["locked_by"]) == (0, None)

    assert await mixed.utils.resume(queue="q")
    await mixed.node.until("job:success", id=waiting)


@pytest.mark.sample(1)
async def test_queue_stays_paused_when_node_ends_a_job_of_it(mixed: Shared) -> None:
    first = await mixed.node.add("hold", queue_name="q")
    second = await mixed.node.add("see", queue_name="q")
    await mixed.node.start("hold", "see", concurrency=3)
    await mixed.node.until_started(first)
    await mixed.utils.pause(queue="q")
    await mixed.node.release(first)
    await mixed.node.until("job:success", id=first)
    await until_node_ran_another(mixed)
    assert await get(mixed.db, second) is not None
    assert await holder(mixed, "q") == PAUSED

    await mixed.utils.resume(queue="q")
    await mixed.node.until("job:success", id=second)


@pytest.mark.sample(1)
async def test_resumed_queue_waits_for_the_job_that_node_still_runs(mixed: Shared) -> None:
    first = await mixed.node.add("hold", queue_name="q")
    second = await mixed.node.add("see", queue_name="q")
    await mixed.node.start("hold", "see", concurrency=3)
    await mixed.node.until_started(first)
    before = await holder(mixed, "q")
    await mixed.utils.pause(queue="q")
    await mixed.utils.resume(queue="q")
    assert await holder(mixed, "q") == before
    await mixed.python.start("see", concurrency=3)
    for n in range(4):
        other = await mixed.node.add("see", queue_name=f"other {n}")
        await until(lambda job_id=other: gone(mixed, job_id), "jobs of other queues run")  # type: ignore[misc]
    job = await get(mixed.db, second)
    assert job is not None
    assert job["attempts"] == 0

    await mixed.node.release(first)

    async def drained() -> bool:
        return await get(mixed.db, second) is None and not await locked(mixed.db)

    await until(drained, "Node releases the queue, and its next job runs")
