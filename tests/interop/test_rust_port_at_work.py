"""The Rust port claims, completes, fails and gives back jobs beside our worker, on one queue."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from support.here import LEDGER, Here
from support.jobs import add, existing, get
from support.rust import RustWorker
from support.waiting import until
from support.workers import locked

if TYPE_CHECKING:
    from graphile_worker.testing import Databases

DEADLINE = 120.0
QUEUES, SLOTS = 6, 3


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


class Feeder:
    """Adds jobs to serial queues, some of them with keys that are added again and removed."""

    def __init__(self, db: asyncpg.Connection) -> None:
        self._db = db
        self._chance = random.Random(12)
        self.queues: dict[int, str] = {}
        self.unkeyed: set[int] = set()

    async def feed(self, count: int) -> None:
        for _ in range(count):
            number = self._chance.randrange(QUEUES)
            key = f"key {number}" if self._chance.random() < 0.3 else None
            if key is not None and self._chance.random() < 0.3:
                await self._db.execute("select graphile_worker.remove_job($1)", key)
            payload = {"ms": self._chance.choice([0, 1, 4])}
            job = await add(self._db, "record", payload=payload, queue_name=f"queue {number}", job_key=key)
            self.queues[job["id"]] = f"queue {number}"
            if key is None:
                self.unkeyed.add(job["id"])


async def runs(db: asyncpg.Connection) -> list[Any]:
    rows: list[Any] = await db.fetch("select * from ledger order by begun")
    return rows


@pytest.mark.parametrize("options", [{}, {"prefetch": 10}], ids=["plain", "prefetch"])
async def test_jobs_of_one_queue_never_overlap_and_both_make_progress(
    database: str, db: asyncpg.Connection, here: Here, options: dict[str, Any]
) -> None:
    await db.execute(LEDGER)
    feeder, over = Feeder(db), asyncio.Event()
    await feeder.feed(60)

    async def least_share() -> int:
        had = Counter(run["who"] for run in await runs(db))
        return min(had["rust"], had["python"])

    async def is_empty() -> bool:
        return not await db.fetchval("select exists (select from graphile_worker._private_jobs)")

    async with AsyncExitStack() as stack:
        slots = []
        for _ in range(SLOTS):
            connection = await asyncpg.connect(database)
            stack.push_async_callback(connection.close)
            slots.append(asyncio.create_task(RustWorker(connection).work("record", over)))
        await here.start("record", concurrency=SLOTS, **options)
        async with asyncio.timeout(DEADLINE):
            while await least_share() < 20:
                await feeder.feed(15)
        await until(is_empty, "all of them are done")
        over.set()
        await asyncio.gather(*slots)

    ledger = await runs(db)
    times = Counter(run["job_id"] for run in ledger)
    assert {times[job_id] for job_id in feeder.unkeyed} == {1}
    assert max(times.values()) == 1, "one that was taken over or removed while it ran is not run again"
    lanes: dict[str, list[Any]] = defaultdict(list)
    for run in ledger:
        lanes[feeder.queues[run["job_id"]]].append(run)
    for lane in lanes.values():
        for earlier, later in pairwise(lane):
            assert later["begun"] >= earlier["ended"], (dict(earlier), dict(later))

    async def is_free() -> bool:
        return not await locked(db)

    await until(is_free, "nothing is locked")


@pytest.mark.parametrize("end", ["complete", "fail", "give back"])
async def test_the_queue_of_a_job_that_it_holds_waits_for_it_whatever_becomes_of_that(
    db: asyncpg.Connection, here: Here, end: str
) -> None:
    rust = RustWorker(db)
    first = (await add(db, "hold", queue_name="q", priority=-1))["id"]
    claimed = await rust.claim("hold")
    assert claimed is not None
    assert (claimed["id"], claimed["attempts"], claimed["locked_by"]) == (first, 1, rust.name)
    assert await rust.claim("hold") is None
    behind = await here.add("see", queue_name="q")
    await here.start("see")
    shown = await here.add("see")

    async def is_gone(job_id: int) -> bool:
        return await get(db, job_id) is None

    await until(lambda: is_gone(shown), "our worker has looked")
    assert (await existing(db, behind))["attempts"] == 0

    if end == "complete":
        await rust.complete(first)
        assert await is_gone(first)
    elif end == "fail":
        await rust.fail(first, "no", {"left": 1})
        failed = await existing(db, first)
        assert (failed["last_error"], failed["payload"], failed["attempts"]) == ("no", '{"left": 1}', 1)
    else:
        await rust.give_back(first)
        assert (await existing(db, first))["attempts"] == 0
    await until(lambda: is_gone(behind), "the queue goes on here")


async def test_what_our_worker_holds_it_neither_claims_nor_fails_nor_gives_back(
    db: asyncpg.Connection, here: Here
) -> None:
    rust = RustWorker(db)
    ours = await here.add("hold", queue_name="q")
    behind = await here.add("see", queue_name="q")
    await here.start("hold")
    await here.until_begun(ours)
    before = await existing(db, ours)

    assert await rust.claim("hold", "see") is None
    await rust.fail(ours, "no")
    await rust.give_back(ours)

    assert await existing(db, ours) == before
    await here.release(ours)

    async def is_free() -> bool:
        job = await rust.claim("see")
        return job is not None and job["id"] == behind

    await until(is_free, "then the queue goes on there")


async def test_flags_that_it_forbids_leave_a_job_to_ours(db: asyncpg.Connection, here: Here) -> None:
    job_id = await here.add("see", flags=["big"])
    assert await RustWorker(db).claim("see", forbidden_flags=["big"]) is None
    await here.start("see")

    async def is_gone() -> bool:
        return await get(db, job_id) is None

    await until(is_gone, "ours runs it")
