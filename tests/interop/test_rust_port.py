"""The Rust port's worker registry and sweep next to Python workers, called as the port calls them.

The tests check what they find and change among the rows of Python workers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from graphile_worker import WorkerUtils, run_migrations
from support.jobs import add, existing, get, lock
from support.programs import program
from support.python_peer import PythonPeer
from support.rust import RESILIENT, RESILIENT_FACTOR, SWEEP_LOCK, THRESHOLD, RustWorker
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from graphile_worker.testing import Databases

VICTIM = Path(__file__).parent.parent / "support" / "victim.py"
SHORT: dict[str, Any] = {"heartbeat_interval": 0.3, "lease": 4.0, "fast_lease": 1.2}


@pytest.fixture(params=["Python's schema", "the port's schema"])
async def database(
    request: pytest.FixtureRequest, graphile_worker_databases: Databases
) -> AsyncIterator[str]:
    """Yield a database with a schema installed by Python, or one that looks as if the port installed it."""
    async with graphile_worker_databases.fresh() as dsn:
        if request.param == "the port's schema":
            db = await asyncpg.connect(dsn)
            await db.execute("update graphile_worker.migrations set breaking = false where id = 19")
            await db.execute("drop table graphile_worker._private_python_migrations")
            await db.close()
            await run_migrations(dsn)
        yield dsn


async def age(db: asyncpg.Connection, worker: str, thresholds: float = 2) -> None:
    await db.execute(
        "update graphile_worker._private_workers set last_heartbeat_at = now() - $2::interval where id = $1",
        worker,
        thresholds * THRESHOLD,
    )


@pytest.mark.sample(1)
async def test_rust_sweep_never_unlocks_jobs_of_a_live_python_worker(
    db: asyncpg.Connection, python_peer: PythonPeer
) -> None:
    """Neither a job that runs for long nor a prefetched job."""
    jobs = [await python_peer.add("hold", n, queue_name="q") for n in range(3)]
    worker = await python_peer.start("hold", prefetch=5, heartbeat_interval=0.3)
    await python_peer.until_started(jobs[0])

    async def held_for_long() -> bool:
        return bool(
            await db.fetchval(
                "select count(*) = 3 from graphile_worker._private_jobs "
                "where locked_by = $1 and locked_at < now() - $2::interval "
                "and exists (select from graphile_worker._private_workers "
                "where id = $1 and last_heartbeat_at > now() - interval '2 s')",
                worker,
                THRESHOLD,
            )
        )

    await until(held_for_long, "the Python worker's locks are older than the port's threshold")
    assert await RustWorker(db).sweep(dry_run=True) == ([], 0)
    assert await RustWorker(db).sweep() == ([], 0)
    for job_id in jobs:
        await python_peer.until_started(job_id)
        await python_peer.release(job_id)

    async def all_done() -> bool:
        return not [job_id for job_id in jobs if await get(db, job_id)]

    await until(all_done, "all jobs are done")
    assert "job:lost" not in python_peer.recorder.names


async def test_python_sweep_never_unlocks_jobs_of_a_rust_worker(
    db: asyncpg.Connection, python_peer: PythonPeer, utils: WorkerUtils
) -> None:
    """Neither of a live Rust worker nor of a silent one: the port decides about its own workers."""
    rust = RustWorker(db)
    await rust.beat()
    held = (await add(db, "hold", queue_name="q"))["id"]
    await lock(db, held, by=rust.name, age="3 hours")
    await age(db, rust.name)
    before = await existing(db, held)

    await python_peer.start("see", "hold", **SHORT)
    shown = await python_peer.add("see")

    async def is_done() -> bool:
        return await get(db, shown) is None

    await until(is_done, "the Python worker runs jobs")
    assert await utils.sweep() == []
    assert await existing(db, held) == before
    [found] = [worker for worker in await utils.workers() if worker.id == rust.name]
    assert (found.language, found.pid, found.jobs, found.queues) == ("rust", 4711, 1, 1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("with_hooks", [False, True])
async def test_rust_sweep_unlocks_jobs_of_a_killed_python_worker(
    database: str, db: asyncpg.Connection, python_peer: PythonPeer, *, with_hooks: bool
) -> None:
    job_id = (await add(db, "sleep", payload=600, queue_name="q"))["id"]
    async with program(sys.executable, VICTIM, database, json.dumps(SHORT), with_errors=True) as victim:
        await victim.until("begun sleep")
        worker = (await existing(db, job_id))["locked_by"]
        victim.process.kill()
        await victim.end()
    await age(db, worker)

    assert await RustWorker(db).sweep(with_hooks=with_hooks) == ([worker], 1)

    job = await existing(db, job_id)
    assert (job["attempts"], job["locked_by"]) == (0, None), "the port gives the attempt back"
    assert job["last_error"] == "Job recovered after worker interruption"
    await python_peer.start("see", **SHORT)
    follower = await python_peer.add("see", queue_name="q", priority=-1)

    async def is_done() -> bool:
        return await get(db, follower) is None

    await until(is_done, "the queue is unlocked")
    assert python_peer.recorder.counts["worker:recovered"] == 0, (
        "there is nothing left for the Python worker to recover"
    )


async def test_live_python_worker_deleted_by_the_port_registers_again(
    db: asyncpg.Connection, python_peer: PythonPeer
) -> None:
    worker = await python_peer.start("see", **SHORT)
    await db.execute("select * from graphile_worker.delete_stale_workers($1::text[])", [worker])

    async def is_back() -> bool:
        rows = await db.fetch("select id from graphile_worker._private_workers")
        return len(rows) == 1

    await until(is_back, "the worker is registered again")
    job_id = await python_peer.add("see")

    async def is_done() -> bool:
        return await get(db, job_id) is None

    await until(is_done, "the worker runs jobs")


async def test_heartbeats_lists_and_deregistration_of_both_sides(
    db: asyncpg.Connection, python_peer: PythonPeer, utils: WorkerUtils
) -> None:
    python = await python_peer.start("see", **SHORT)
    rust = RustWorker(db)
    await rust.beat()
    languages = {worker.id: worker.language for worker in await utils.workers()}
    assert languages == {python: "python", rust.name: "rust"}
    await rust.beat()
    await rust.deregister()
    assert [worker.id for worker in await utils.workers()] == [python]
    await python_peer.stop()
    assert await db.fetch("select id from graphile_worker._private_workers") == []


async def test_rust_sweep_unlocks_old_locks_of_workers_without_heartbeats(
    db: asyncpg.Connection,
) -> None:
    """Node workers, and Python workers with recovery=False: so the docs ask for a long threshold."""
    for number, holder in enumerate(("pool-0123456789abcdef01", "python-without-recovery")):
        await lock(db, (await add(db, queue_name=f"q{number}"))["id"], by=holder, age="6 seconds")
    await lock(db, (await add(db))["id"], by="pool-young", age="1 second")
    dead, taken = await RustWorker(db).sweep()
    assert (sorted(dead), taken) == (["pool-0123456789abcdef01", "python-without-recovery"], 2)


async def test_job_with_the_resilient_flag_is_kept_three_times_as_long(
    db: asyncpg.Connection,
) -> None:
    """The flag belongs to the job, so it also protects a Python worker."""
    rust, python = RustWorker(db), RustWorker(db, "python-worker")
    await python.beat()
    job_id = (await add(db, "hold", flags=[RESILIENT]))["id"]
    await lock(db, job_id, by=python.name)
    await age(db, python.name, RESILIENT_FACTOR - 1)
    assert await rust.holds_resilient(python.name)
    assert [job["task_identifier"] for job in await rust.locked_jobs([python.name])] == ["hold"]
    assert await rust.sweep() == ([], 0)
    await age(db, python.name, RESILIENT_FACTOR + 1)
    assert await rust.sweep() == ([python.name], 1)
    assert await rust.last_heartbeat(python.name) is None


async def test_concurrent_sweeps_do_not_wait_for_each_other(
    db: asyncpg.Connection, utils: WorkerUtils
) -> None:
    """They use different advisory locks, and both lock jobs before queues."""
    rust = RustWorker(db)
    await db.execute("begin")
    await db.fetchval("select pg_try_advisory_xact_lock($1, $2)", *SWEEP_LOCK)
    await db.execute(
        "select * from graphile_worker.recover_dead_worker_jobs"
        "($1::text[], $2::bigint * interval '1 millisecond')",
        ["unknown"],
        0,
    )
    assert await utils.sweep() == []
    await db.execute("commit")
    assert await rust.sweep() == ([], 0)
