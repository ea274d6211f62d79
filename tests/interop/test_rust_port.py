"""The Rust port's worker registry and its sweep, beside our workers: called as it calls them.

What they may find and do among our rows is what these tests are about.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from graphile_worker import WorkerUtils, run_migrations
from support.here import Here
from support.jobs import add, existing, get, lock
from support.programs import program
from support.rust import PATIENCE, RESILIENT, SWEEP_LOCK, THRESHOLD, RustWorker
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from graphile_worker.testing import Databases

VICTIM = Path(__file__).parent.parent / "support" / "victim.py"
SHORT: dict[str, Any] = {"heartbeat_interval": 0.3, "lease": 4.0, "fast_lease": 1.2}


@pytest.fixture(params=["ours", "the port's"])
async def database(
    request: pytest.FixtureRequest, graphile_worker_databases: Databases
) -> AsyncIterator[str]:
    """A database whose schema we installed; or one that the port did, by what can be told apart."""
    async with graphile_worker_databases.fresh() as dsn:
        if request.param != "ours":
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


async def test_its_sweep_never_takes_a_job_of_a_live_worker_of_ours(
    db: asyncpg.Connection, here: Here
) -> None:
    """However long the job runs, and also what was claimed ahead of the slots."""
    jobs = [await here.add("hold", n, queue_name="q") for n in range(3)]
    worker = await here.start("hold", prefetch=5, heartbeat_interval=0.3)
    await here.until_begun(jobs[0])

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

    await until(held_for_long, "our locks are older than its threshold")
    assert await RustWorker(db).sweep(dry_run=True) == ([], 0)
    assert await RustWorker(db).sweep() == ([], 0)
    for job_id in jobs:
        await here.until_begun(job_id)
        await here.release(job_id)

    async def all_done() -> bool:
        return not [job_id for job_id in jobs if await get(db, job_id)]

    await until(all_done, "all of them are done")
    assert "job:lost" not in here.heard.names


async def test_ours_never_takes_a_job_of_its(db: asyncpg.Connection, here: Here, utils: WorkerUtils) -> None:
    """Neither of one that beats nor of one that is silent: that is for the port to decide."""
    rust = RustWorker(db)
    await rust.beat()
    held = (await add(db, "hold", queue_name="q"))["id"]
    await lock(db, held, by=rust.name, age="3 hours")
    await age(db, rust.name)
    before = await existing(db, held)

    await here.start("see", "hold", **SHORT)
    shown = await here.add("see")

    async def is_done() -> bool:
        return await get(db, shown) is None

    await until(is_done, "our worker works")
    assert await utils.sweep() == []
    assert await existing(db, held) == before
    [found] = [worker for worker in await utils.workers() if worker.id == rust.name]
    assert (found.language, found.pid, found.jobs, found.queues) == ("rust", 4711, 1, 1)


@pytest.mark.parametrize("with_hooks", [False, True])
async def test_it_may_free_what_a_killed_worker_of_ours_held_and_each_job_runs_once_more(
    database: str, db: asyncpg.Connection, here: Here, *, with_hooks: bool
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
    await here.start("see", **SHORT)
    follower = await here.add("see", queue_name="q", priority=-1)

    async def is_done() -> bool:
        return await get(db, follower) is None

    await until(is_done, "the queue is free")
    assert here.heard.counts["worker:recovered"] == 0, "there is nothing left for ours to do"


async def test_a_live_worker_of_ours_that_it_forgot_registers_anew_and_goes_on(
    db: asyncpg.Connection, here: Here
) -> None:
    worker = await here.start("see", **SHORT)
    await db.execute("select * from graphile_worker.delete_stale_workers($1::text[])", [worker])

    async def is_back() -> bool:
        rows = await db.fetch("select id from graphile_worker._private_workers")
        return len(rows) == 1

    await until(is_back, "it is registered")
    job_id = await here.add("see")

    async def is_done() -> bool:
        return await get(db, job_id) is None

    await until(is_done, "it works")


async def test_beats_lists_and_deregistration_work_on_both_sides(
    db: asyncpg.Connection, here: Here, utils: WorkerUtils
) -> None:
    ours = await here.start("see", **SHORT)
    rust = RustWorker(db)
    await rust.beat()
    languages = {worker.id: worker.language for worker in await utils.workers()}
    assert languages == {ours: "python", rust.name: "rust"}
    await rust.beat()
    await rust.deregister()
    assert [worker.id for worker in await utils.workers()] == [ours]
    await here.stop()
    assert await db.fetch("select id from graphile_worker._private_workers") == []


async def test_its_sweep_takes_what_workers_without_heartbeats_have_held_for_long(
    db: asyncpg.Connection,
) -> None:
    """Node's, and ours with recovery=False: why the docs ask for a threshold that is longer than any job."""
    for number, holder in enumerate(("pool-0123456789abcdef01", "python-without-recovery")):
        await lock(db, (await add(db, queue_name=f"q{number}"))["id"], by=holder, age="6 seconds")
    await lock(db, (await add(db))["id"], by="pool-young", age="1 second")
    dead, taken = await RustWorker(db).sweep()
    assert (sorted(dead), taken) == (["pool-0123456789abcdef01", "python-without-recovery"], 2)


async def test_a_job_with_its_flag_of_patience_is_left_alone_for_three_times_as_long(
    db: asyncpg.Connection,
) -> None:
    """The flag is a job's, whoever added it, and so it holds for a worker of ours, too."""
    rust, ours = RustWorker(db), RustWorker(db, "python-of-ours")
    await ours.beat()
    job_id = (await add(db, "hold", flags=[RESILIENT]))["id"]
    await lock(db, job_id, by=ours.name)
    await age(db, ours.name, PATIENCE - 1)
    assert await rust.holds_resilient(ours.name)
    assert [job["task_identifier"] for job in await rust.locked_jobs([ours.name])] == ["hold"]
    assert await rust.sweep() == ([], 0)
    await age(db, ours.name, PATIENCE + 1)
    assert await rust.sweep() == ([ours.name], 1)
    assert await rust.last_heartbeat(ours.name) is None


async def test_both_sweeps_at_once_do_not_wait_for_each_other(
    db: asyncpg.Connection, utils: WorkerUtils
) -> None:
    """They have locks of their own, and both lock jobs before queues."""
    rust = RustWorker(db)
    await db.execute("begin")
    await db.fetchval("select pg_try_advisory_xact_lock($1, $2)", *SWEEP_LOCK)
    await db.execute(
        "select * from graphile_worker.recover_dead_worker_jobs"
        "($1::text[], $2::bigint * interval '1 millisecond')",
        ["nobody"],
        0,
    )
    assert await utils.sweep() == []
    await db.execute("commit")
    assert await rust.sweep() == ([], 0)
