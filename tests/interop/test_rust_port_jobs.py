"""The Rust port claims, completes, fails and releases jobs next to a Python worker, on one queue."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from support.jobs import add, existing, get
from support.python_peer import LEDGER, PythonPeer
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
    """Adds jobs to serial queues, some with keys that are added again and removed."""

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
    rows: list[Any] = await db.fetch("select * from ledger order by started")
    return rows


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{}, {"prefetch": 10}], ids=["plain", "prefetch"])
async def test_rust_and_python_share_serial_queues_without_overlap(
    database: str, db: asyncpg.Connection, python_peer: PythonPeer, options: dict[str, Any]
) -> None:
    await db.execute(LEDGER)
    feeder, stop = Feeder(db), asyncio.Event()
    await feeder.feed(60)

    async def least_share() -> int:
        counts = Counter(run["who"] for run in await runs(db))
        return min(counts["rust"], counts["python"])

    async def is_empty() -> bool:
        return not await db.fetchval("select exists (select from graphile_worker._private_jobs)")

    async with AsyncExitStack() as stack:
        slots = []
        for _ in range(SLOTS):
            connection = await asyncpg.connect(database)
            stack.push_async_callback(connection.close)
            slots.append(asyncio.create_task(RustWorker(connection).work("record", stop)))
        await python_peer.start("record", concurrency=SLOTS, **options)
        async with asyncio.timeout(DEADLINE):
            while await least_share() < 20:
                await feeder.feed(15)
        await until(is_empty, "all jobs are done")
        stop.set()
        await asyncio.gather(*slots)

    ledger = await runs(db)
    times = Counter(run["job_id"] for run in ledger)
    assert {times[job_id] for job_id in feeder.unkeyed} == {1}
    assert max(times.values()) == 1, (
        "a job whose key was added again or removed while it ran is not run again"
    )
    runs_by_queue: dict[str, list[Any]] = defaultdict(list)
    for run in ledger:
        runs_by_queue[feeder.queues[run["job_id"]]].append(run)
    for queue_runs in runs_by_queue.values():
        for earlier, later in pairwise(queue_runs):
            assert later["started"] >= earlier["ended"], (dict(earlier), dict(later))

    async def is_free() -> bool:
        return not await locked(db)

    await until(is_free, "nothing is locked")


@pytest.mark.parametrize("end", ["complete", "fail", "release"])
async def test_queue_waits_for_a_job_claimed_by_a_rust_worker(
    db: asyncpg.Connection, python_peer: PythonPeer, end: str
) -> None:
    rust = RustWorker(db)
    first = (await add(db, "hold", queue_name="q", priority=-1))["id"]
    claimed = await rust.claim("hold")
    assert claimed is not None
    assert (claimed["id"], claimed["attempts"], claimed["locked_by"]) == (first, 1, rust.name)
    assert await rust.claim("hold") is None
    behind = await python_peer.add("see", queue_name="q")
    await python_peer.start("see")
    shown = await python_peer.add("see")

    async def is_gone(job_id: int) -> bool:
        return await get(db, job_id) is None

    await until(lambda: is_gone(shown), "the Python worker has polled")
    assert (await existing(db, behind))["attempts"] == 0

    if end == "complete":
        await rust.complete(first)
        assert await is_gone(first)
    elif end == "fail":
        await rust.fail(first, "no", {"left": 1})
        failed = await existing(db, first)
        assert (failed["last_error"], failed["payload"], failed["attempts"]) == ("no", '{"left": 1}', 1)
    else:
        await rust.release(first)
        assert (await existing(db, first))["attempts"] == 0
    await until(lambda: is_gone(behind), "the Python worker runs the next job of the queue")


async def test_rust_worker_cannot_change_jobs_of_a_python_worker(
    db: asyncpg.Connection, python_peer: PythonPeer
) -> None:
    rust = RustWorker(db)
    held = await python_peer.add("hold", queue_name="q")
    behind = await python_peer.add("see", queue_name="q")
    await python_peer.start("hold")
    await python_peer.until_started(held)
    before = await existing(db, held)

    assert await rust.claim("hold", "see") is None
    await rust.fail(held, "no")
    await rust.release(held)

    assert await existing(db, held) == before
    await python_peer.release(held)

    async def is_free() -> bool:
        job = await rust.claim("see")
        return job is not None and job["id"] == behind

    await until(is_free, "the Rust worker claims the next job of the queue")


async def test_job_with_a_flag_forbidden_in_rust_runs_in_python(
    db: asyncpg.Connection, python_peer: PythonPeer
) -> None:
    job_id = await python_peer.add("see", flags=["big"])
    assert await RustWorker(db).claim("see", forbidden_flags=["big"]) is None
    await python_peer.start("see")

    async def is_gone() -> bool:
        return await get(db, job_id) is None

    await until(is_gone, "the Python worker runs the job")
