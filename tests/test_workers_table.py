"""The workers table and its functions behave like those of migration 20 of the Rust port."""

from __future__ import annotations

import json
from datetime import timedelta

import asyncpg
import pytest

from support.jobs import add, fetch_one, get, lock


async def backdate_heartbeat(db: asyncpg.Connection, worker: str, interval: timedelta) -> None:
    await db.execute(
        "update graphile_worker._private_workers set last_heartbeat_at = now() - $2::interval where id = $1",
        worker,
        interval,
    )


async def test_heartbeat_functions_behave_like_those_of_the_rust_port(db: asyncpg.Connection) -> None:
    await db.execute("select graphile_worker.worker_heartbeat('w', $1)", '{"pid": 7}')
    await backdate_heartbeat(db, "w", timedelta(hours=1))
    before = await fetch_one(db, "select * from graphile_worker._private_workers")
    await db.execute("select graphile_worker.worker_heartbeat('w')")
    after = await fetch_one(db, "select * from graphile_worker._private_workers")

    assert json.loads(after["metadata"]) == {"pid": 7}
    assert after["started_at"] == before["started_at"]
    assert after["last_heartbeat_at"] - before["last_heartbeat_at"] >= timedelta(hours=1)

    await db.execute("select graphile_worker.worker_heartbeat(worker_id => 'w', metadata => '{}')")
    assert await db.fetchval("select metadata from graphile_worker._private_workers") == "{}"
    await db.execute("select graphile_worker.worker_deregister('w')")
    assert await db.fetch("select * from graphile_worker._private_workers") == []


async def test_stale_workers_and_orphaned_locks_are_listed(db: asyncpg.Connection) -> None:
    for worker in ("fresh", "stale"):
        await db.execute("select graphile_worker.worker_heartbeat($1)", worker)
    await backdate_heartbeat(db, "stale", timedelta(minutes=6))
    for holder, lock_age in (
        ("fresh", "10 minutes"),
        ("orphan", "6 minutes"),
        ("young", "4 minutes"),
    ):
        await lock(db, (await add(db, queue_name=holder))["id"], by=holder, age=lock_age)
    await add(db)

    stale = await db.fetch("select * from graphile_worker.list_stale_workers('5 minutes'::interval)")
    orphans = await db.fetch(
        "select * from graphile_worker.list_orphan_locked_workers('5 minutes'::interval)"
    )

    assert [row["worker_id"] for row in stale] == ["stale"]
    assert [row["worker_id"] for row in orphans] == ["orphan"]


@pytest.mark.parametrize("delay", [None, timedelta(seconds=0.5)])
async def test_recover_dead_worker_jobs_releases_jobs_and_queues(
    db: asyncpg.Connection, delay: timedelta | None
) -> None:
    jobs = {holder: await add(db, queue_name=holder) for holder in ("dead", "alive")}
    for holder, job in jobs.items():
        await lock(db, job["id"], by=holder)

    async with db.transaction():
        now = await db.fetchval("select now()")
        if delay is None:
            call = db.fetchval("select graphile_worker.recover_dead_worker_jobs(array['dead'])")
        else:
            call = db.fetchval("select graphile_worker.recover_dead_worker_jobs(array['dead'], $1)", delay)
        assert await call == 1

    recovered, kept = await get(db, jobs["dead"]["id"]), await get(db, jobs["alive"]["id"])
    assert recovered is not None
    assert kept is not None
    assert (recovered["attempts"], recovered["locked_by"], recovered["locked_at"]) == (
        0,
        None,
        None,
    )
    assert recovered["last_error"] == "Job recovered after worker interruption"
    assert recovered["run_at"] == now + (delay or timedelta(0))
    assert kept["locked_by"] == "alive"
    queues = "select array_agg(locked_by order by id) from graphile_worker._private_job_queues"
    assert await db.fetchval(queues) == [None, "alive"]


async def test_recovery_functions_with_empty_arrays_change_nothing(db: asyncpg.Connection) -> None:
    await lock(db, (await add(db))["id"])
    await db.execute("select graphile_worker.worker_heartbeat('w')")

    assert await db.fetchval("select graphile_worker.recover_dead_worker_jobs(array[]::text[])") == 0
    await db.execute("select graphile_worker.delete_stale_workers(array[]::text[])")
    assert await db.fetchval("select count(*) from graphile_worker._private_workers") == 1
    await db.execute("select graphile_worker.delete_stale_workers(array['w', 'x'])")
    assert await db.fetchval("select count(*) from graphile_worker._private_workers") == 0
