"""Serial queues that Node's worker and ours share: one job at a time, in order, and both get on."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from support.here import LEDGER
from support.jobs import get
from support.peer import started
from support.waiting import until
from support.workers import locked

if TYPE_CHECKING:
    from interop.conftest import Shared

SIDES = ("python", "node", "sql")
DEADLINE = 120.0


class Added(NamedTuple):
    """What is known of a job that was added."""

    queue: str
    priority: int
    number: int


class Adder:
    """Adds jobs to queues, by all three sides in turn."""

    def __init__(self, shared: Shared, queues: int) -> None:
        self._shared = shared
        self._chance = random.Random(12)
        self._queues = [f"queue {n}" for n in range(queues)]
        self.jobs: dict[int, Added] = {}

    async def add(self, count: int, *, priorities: tuple[int, ...] = (0,)) -> set[int]:
        """One after the other, so that each is due later than the one before it."""
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
    return await shared.db.fetch("select * from ledger order by begun")


async def assert_serial(shared: Shared, adder: Adder) -> None:
    """No two at once, each once."""
    lanes: dict[str, list[Any]] = defaultdict(list)
    ledger = await runs(shared)
    assert Counter(run["job_id"] for run in ledger) == Counter(adder.jobs.keys())
    for run in ledger:
        lanes[adder.jobs[run["job_id"]].queue].append(run)
    for lane in lanes.values():
        for earlier, later in pairwise(lane):
            assert later["begun"] >= earlier["ended"], (dict(earlier), dict(later))


async def assert_in_order(shared: Shared, adder: Adder, jobs: set[int]) -> None:
    """By priority, and then as they were added; within each queue."""
    lanes: dict[str, list[Added]] = defaultdict(list)
    for run in await runs(shared):
        if run["job_id"] in jobs:
            added = adder.jobs[run["job_id"]]
            lanes[added.queue].append(added)
    for lane in lanes.values():
        assert lane == sorted(lane, key=lambda added: (added.priority, added.number))


async def share(shared: Shared, *, python: dict[str, Any], node: dict[str, Any], queues: int = 8) -> None:
    """Jobs that were there before the workers, and then more until both have had their share."""
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
    """How many runs the side has had that had less."""
    had = Counter(run["who"] for run in await runs(shared))
    return min(had["node"], had["python"])


async def until_nothing_is_locked(shared: Shared) -> None:
    async def free() -> bool:
        return not await locked(shared.db)

    await until(free, "nothing is locked")


async def test_jobs_of_one_queue_never_overlap_keep_their_order_and_both_sides_make_progress(
    shared: Shared,
) -> None:
    await share(shared, python={}, node={})


async def test_the_same_with_nodes_local_queue_and_our_prefetch(newest: Shared) -> None:
    await share(newest, python={"prefetch": 10}, node={"localQueue": {"size": 10}})


async def test_the_same_with_our_prefetch_alone(beside: Shared) -> None:
    await share(beside, python={"prefetch": 10}, node={})


async def test_a_single_queue_is_emptied_in_order(beside: Shared) -> None:
    await beside.db.execute(LEDGER)
    adder = Adder(beside, queues=1)
    jobs = await adder.add(80, priorities=(3, 1, 2))
    await beside.node.start("record", concurrency=3)
    await beside.python.start("record", concurrency=3)
    await drained(beside)
    await assert_in_order(beside, adder, jobs)
    await assert_serial(beside, adder)


@pytest.mark.parametrize("holder", ["python", "node"])
async def test_the_rest_of_a_queue_waits_for_the_other_sides_job_and_then_goes_on_here(
    beside: Shared, holder: str
) -> None:
    other = "node" if holder == "python" else "python"
    first = await beside.side(holder).add("hold", queue_name="q")
    await beside.side(holder).start("hold", concurrency=3)
    await beside.side(holder).until_begun(first)
    second = await beside.side(other).add("see", queue_name="q")
    await beside.side(other).start("see", concurrency=3)
    # Those that are added later and run show that the other side has looked.
    for n in range(3):
        elsewhere = await beside.side(holder).add("see", queue_name=f"another {n}")
        await until(lambda job_id=elsewhere: gone(beside, job_id), "jobs of other queues run")  # type: ignore[misc]
    waiting = await beside.utils.get_job(id=second)
    assert waiting is not None
    assert (waiting.attempts, waiting.state) == (0, "ready")

    await beside.side(holder).release(first)
    await until(lambda: gone(beside, second), "the queue goes on")


async def gone(shared: Shared, job_id: int) -> bool:
    return await get(shared.db, job_id) is None


async def test_jobs_that_we_have_claimed_ahead_are_not_run_by_node(beside: Shared) -> None:
    jobs = [await beside.python.add("hold", n, queue_name="q") for n in range(4)]
    worker = await beside.python.start("hold", prefetch=10)
    await beside.python.until_begun(jobs[0])

    async def all_ours() -> bool:
        return len(await beside.utils.list_jobs(locked_by=worker)) == len(jobs)

    await until(all_ours, "all are claimed")
    await beside.node.start("hold", "see", concurrency=3)
    shown = await beside.node.add("see")
    await beside.node.until("job:success", id=shown)
    assert not any(one["what"] == "begun" for one in beside.node.told)

    # Stopping gives back what did not begin, and Node goes on where we were.
    stopping = asyncio.create_task(beside.python.stop())
    await beside.node.until_begun(jobs[0])
    await stopping
    for job_id in jobs:
        await beside.node.until_begun(job_id)
        await beside.node.release(job_id)
    order = [one["payload"] for one in beside.node.told if one["what"] == "begun"]
    assert order == [0, 1, 2, 3]


async def test_npms_017_breaks_a_serial_queue_by_itself_if_it_has_a_local_queue(newest: Shared) -> None:
    """Why the docs warn of it; nobody beside it can help."""
    async with started("0.17.3", newest.dsn) as old:
        jobs = [await newest.python.add("hold", queue_name="q") for _ in range(4)]
        await old.start("hold", concurrency=4, localQueue={"size": 4})
        for job_id in jobs:
            await old.until_begun(job_id)
