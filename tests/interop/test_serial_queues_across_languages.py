"""Serial queues shared by Node workers and Python workers: one job at a time, in order, progress on both."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from support.jobs import get
from support.peer import started
from support.python_peer import LEDGER
from support.waiting import until
from support.workers import locked

if TYPE_CHECKING:
    from interop.conftest import Shared

SIDES = ("python", "node", "sql")
DEADLINE = 120.0


class Added(NamedTuple):
    """An added job."""

    queue: str
    priority: int
    number: int


class Adder:
    """Adds jobs to queues, from all three sides in turn."""

    def __init__(self, shared: Shared, queues: int) -> None:
        self._shared = shared
        self._chance = random.Random(12)
        self._queues = [f"queue {n}" for n in range(queues)]
        self.jobs: dict[int, Added] = {}

    async def add(self, count: int, *, priorities: tuple[int, ...] = (0,)) -> set[int]:
        """Add jobs one after the other, so that each has a later run_at than the one before."""
        chance, new = self._chance, set()
        for _ in range(count):
            number = len(self.jobs)
            added = Added(chance.choice(self._queues), chance.choice(priorities), number)
            job_id = await self._shared.side(SIDES[number % 3]).add(
                "record",
                {"ms": chance.choice([0, 1, 4])},
                queue_name=added.queue,
                priority=added.priority,
            )
            self.jobs[job_id] = added
            new.add(job_id)
        return new


async def drained(shared: Shared) -> None:
    async def is_drained() -> bool:
        return not await shared.db.fetchval("select exists (select from graphile_worker._private_jobs)")

    async with asyncio.timeout(DEADLINE):
        while not await is_drained():
            await asyncio.sleep(0.02)


async def runs(shared: Shared) -> list[Any]:
    return await shared.db.fetch("select * from ledger order by started")


async def assert_serial(shared: Shared, adder: Adder) -> None:
    """Assert that each job ran once, and no two jobs of a queue at the same time."""
    runs_by_queue: dict[str, list[Any]] = defaultdict(list)
    ledger = await runs(shared)
    assert Counter(run["job_id"] for run in ledger) == Counter(adder.jobs.keys())
    for run in ledger:
        runs_by_queue[adder.jobs[run["job_id"]].queue].append(run)
    for queue_runs in runs_by_queue.values():
        for earlier, later in pairwise(queue_runs):
            assert later["started"] >= earlier["ended"], (dict(earlier), dict(later))


async def assert_in_order(shared: Shared, adder: Adder, jobs: set[int]) -> None:
    """Assert that each queue's jobs ran by priority, then in the order in which they were added."""
    jobs_by_queue: dict[str, list[Added]] = defaultdict(list)
    for run in await runs(shared):
        if run["job_id"] in jobs:
            added = adder.jobs[run["job_id"]]
            jobs_by_queue[added.queue].append(added)
    for queue_jobs in jobs_by_queue.values():
        assert queue_jobs == sorted(queue_jobs, key=lambda added: (added.priority, added.number))


async def share(shared: Shared, *, python: dict[str, Any], node: dict[str, Any], queues: int = 8) -> None:
    """Run jobs that were added before the workers started, then more until both sides have run enough."""
    await shared.db.execute(LEDGER)
    adder = Adder(shared, queues)
    before = await adder.add(60, priorities=(-5, 0, 0, 7))
    await shared.node.start("record", concurrency=2, **node)
    await shared.python.start("record", concurrency=2, **python)
    await drained(shared)
    await assert_in_order(shared, adder, before)

    later: set[int] = set()
    async with asyncio.timeout(DEADLINE):
        while await least_share(shared) < 20:
            later |= await adder.add(15)
    await drained(shared)
    await until_nothing_is_locked(shared)
    await assert_in_order(shared, adder, later)
    await assert_serial(shared, adder)


async def least_share(shared: Shared) -> int:
    """Return the number of runs of the side that had fewer."""
    counts = Counter(run["who"] for run in await runs(shared))
    return min(counts["node"], counts["python"])


async def until_nothing_is_locked(shared: Shared) -> None:
    async def free() -> bool:
        return not await locked(shared.db)

    await until(free, "nothing is locked")


@pytest.mark.sample(2)
async def test_serial_queues_keep_order_without_overlap_and_both_sides_progress(
    shared: Shared,
) -> None:
    await share(shared, python={}, node={})


async def test_serial_queues_with_local_queue_in_node_and_prefetch_in_python(newest: Shared) -> None:
    await share(newest, python={"prefetch": 10}, node={"localQueue": {"size": 10}})


@pytest.mark.sample(1)
async def test_serial_queues_with_prefetch_in_python_only(mixed: Shared) -> None:
    await share(mixed, python={"prefetch": 10}, node={})


@pytest.mark.sample(1)
async def test_single_serial_queue_is_emptied_in_order(mixed: Shared) -> None:
    await mixed.db.execute(LEDGER)
    adder = Adder(mixed, queues=1)
    jobs = await adder.add(80, priorities=(3, 1, 2))
    await mixed.node.start("record", concurrency=3)
    await mixed.python.start("record", concurrency=3)
    await drained(mixed)
    await assert_in_order(mixed, adder, jobs)
    await assert_serial(mixed, adder)


@pytest.mark.sample(2)
@pytest.mark.parametrize("holder", ["python", "node"])
async def test_queue_waits_for_a_running_job_of_the_other_side(mixed: Shared, holder: str) -> None:
    other = "node" if holder == "python" else "python"
    first = await mixed.side(holder).add("hold", queue_name="q")
    await mixed.side(holder).start("hold", concurrency=3)
    await mixed.side(holder).until_started(first)
    second = await mixed.side(other).add("see", queue_name="q")
    await mixed.side(other).start("see", concurrency=3)
    # Jobs that are added later and run show that the other side has polled.
    for n in range(3):
        elsewhere = await mixed.side(holder).add("see", queue_name=f"another {n}")
        await until(lambda job_id=elsewhere: gone(mixed, job_id), "jobs of other queues run")  # type: ignore[misc]
    waiting = await mixed.utils.get_job(id=second)
    assert waiting is not None
    assert (waiting.attempts, waiting.state) == (0, "ready")

    await mixed.side(holder).release(first)
    await until(lambda: gone(mixed, second), "the other side runs the next job of the queue")


async def gone(shared: Shared, job_id: int) -> bool:
    return await get(shared.db, job_id) is None


@pytest.mark.sample(1)
async def test_node_does_not_run_jobs_prefetched_by_python(mixed: Shared) -> None:
    jobs = [await mixed.python.add("hold", n, queue_name="q") for n in range(4)]
    worker = await mixed.python.start("hold", prefetch=10)
    await mixed.python.until_started(jobs[0])

    async def all_claimed() -> bool:
        return len(await mixed.utils.list_jobs(locked_by=worker)) == len(jobs)

    await until(all_claimed, "all are claimed")
    await mixed.node.start("hold", "see", concurrency=3)
    shown = await mixed.node.add("see")
    await mixed.node.until("job:success", id=shown)
    assert not any(sent["what"] == "started" for sent in mixed.node.messages)

    # A stopping worker releases jobs that have not started, and Node continues with them.
    stopping = asyncio.create_task(mixed.python.stop())
    await mixed.node.until_started(jobs[0])
    await stopping
    for job_id in jobs:
        await mixed.node.until_started(job_id)
        await mixed.node.release(job_id)
    order = [sent["payload"] for sent in mixed.node.messages if sent["what"] == "started"]
    assert order == [0, 1, 2, 3]


async def test_node_017_with_a_local_queue_breaks_serial_queues(newest: Shared) -> None:
    """So the docs warn of it; other workers cannot prevent it."""
    async with started("0.17.3", newest.dsn) as old:
        jobs = [await newest.python.add("hold", queue_name="q") for _ in range(4)]
        await old.start("hold", concurrency=4, localQueue={"size": 4})
        for job_id in jobs:
            await old.until_started(job_id)
