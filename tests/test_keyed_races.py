"""A keyed add that races with a worker always returns a job and never loses the request."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import asyncpg
import pytest

from support.jobs import add, count, fetch_one, get, lock
from support.waiting import until_blocked

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def worker(database: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database)
    yield connection
    await connection.close()


@pytest.fixture
async def adder(database: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database)
    yield connection
    await connection.close()


@pytest.mark.parametrize("mode", ["replace", "preserve_run_at"])
async def test_keyed_add_waits_for_an_uncommitted_claim_and_adds_a_second_job(
    db: asyncpg.Connection, worker: asyncpg.Connection, adder: asyncpg.Connection, mode: str
) -> None:
    old = await add(db, job_key="k", payload="old")
    claim = worker.transaction()
    await claim.start()
    await lock(worker, old["id"])
    adding = asyncio.create_task(add(adder, job_key="k", payload="new", job_key_mode=mode))
    await until_blocked(db, adder.get_server_pid())

    await claim.commit()
    new = await adding

    superseded = await get(db, old["id"])
    assert superseded is not None
    assert (new["key"], json.loads(new["payload"]), new["is_available"]) == ("k", "new", True)
    assert new["id"] != old["id"]
    assert (superseded["key"], superseded["attempts"]) == (None, 25)
    assert superseded["locked_by"] == "w"


async def test_keyed_add_replaces_the_job_if_the_claim_is_rolled_back(
    db: asyncpg.Connection, worker: asyncpg.Connection, adder: asyncpg.Connection
) -> None:
    old = await add(db, job_key="k", payload="old")
    claim = worker.transaction()
    await claim.start()
    await lock(worker, old["id"])
    adding = asyncio.create_task(add(adder, job_key="k", payload="new"))
    await until_blocked(db, adder.get_server_pid())

    await claim.rollback()
    new = await adding

    assert (new["id"], json.loads(new["payload"]), new["revision"]) == (old["id"], "new", 1)


async def test_bulk_add_during_claims_keeps_the_order_of_its_specs(
    db: asyncpg.Connection, worker: asyncpg.Connection, adder: asyncpg.Connection
) -> None:
    keys = ["a", "b", "c", "d"]
    claim = worker.transaction()
    old = {key: (await add(db, job_key=key))["id"] for key in keys}
    await claim.start()
    for key in ("b", "d"):
        await lock(worker, old[key])
    specs = [
        *({"identifier": "t", "job_key": key, "payload": key} for key in keys[:2]),
        {"identifier": "t", "payload": "no key"},
        *({"identifier": "t", "job_key": key, "payload": key} for key in keys[2:]),
    ]
    adding = asyncio.create_task(
        adder.fetch(
            """select * from graphile_worker.add_jobs(array(
            select row(s.*)::graphile_worker.job_spec
            from json_populate_recordset(null::graphile_worker.job_spec, $1) as s))""",
            json.dumps(specs),
        )
    )
    await until_blocked(db, adder.get_server_pid())

    await claim.commit()
    jobs = await adding

    assert [json.loads(job["payload"]) for job in jobs] == ["a", "b", "no key", "c", "d"]
    assert [job["id"] == old.get(job["key"]) for job in jobs] == [True, False, False, True, False]
    assert all(job["is_available"] for job in jobs)
    assert await count(db) == 7


async def test_removal_during_an_uncommitted_claim_lets_the_job_run_once(
    db: asyncpg.Connection, worker: asyncpg.Connection, adder: asyncpg.Connection
) -> None:
    job = await add(db, job_key="k")
    claim = worker.transaction()
    await claim.start()
    await lock(worker, job["id"])
    removing = asyncio.create_task(fetch_one(adder, "select * from graphile_worker.remove_job('k')"))
    await until_blocked(db, adder.get_server_pid())

    await claim.commit()
    removed = await removing

    assert (removed["id"], removed["key"], removed["attempts"]) == (job["id"], None, 25)
    assert removed["locked_by"] == "w"


async def test_removal_finds_the_job_that_got_the_key_while_it_waited(
    db: asyncpg.Connection, worker: asyncpg.Connection, adder: asyncpg.Connection
) -> None:
    await add(db, job_key="k")
    async with worker.transaction():
        await worker.execute("select graphile_worker.remove_job('k')")
        second = await add(worker, job_key="k")
        removing = asyncio.create_task(fetch_one(adder, "select * from graphile_worker.remove_job('k')"))
        await until_blocked(db, adder.get_server_pid())
    assert (await removing)["id"] == second["id"]
    assert await count(db) == 0


async def test_bulk_adds_in_opposite_orders_do_not_deadlock(
    db: asyncpg.Connection, worker: asyncpg.Connection, adder: asyncpg.Connection
) -> None:
    keys = [f"k{n}" for n in range(40)]
    call = """select count(*) from graphile_worker.add_jobs(array(
        select row('t', '{}', null, null, null, key, null, null)::graphile_worker.job_spec
        from unnest($1::text[]) with ordinality as k(key, n) order by n))"""
    await db.fetchval(call, keys)

    async def add_many(connection: asyncpg.Connection, order: list[str]) -> None:
        for _ in range(40):
            assert await connection.fetchval(call, order) == 40

    async with asyncio.TaskGroup() as group:
        group.create_task(add_many(worker, keys))
        group.create_task(add_many(adder, keys[::-1]))


async def test_add_to_a_queue_removed_meanwhile_fails_instead_of_losing_the_queue(
    db: asyncpg.Connection, worker: asyncpg.Connection, adder: asyncpg.Connection
) -> None:
    await db.execute("insert into graphile_worker._private_job_queues (queue_name) values ('old')")
    async with worker.transaction():
        # The adder finds "old", and then waits for the worker's transaction, which also inserts "new".
        await worker.execute("insert into graphile_worker._private_job_queues (queue_name) values ('new')")
        adding = asyncio.create_task(
            adder.fetch("""select * from graphile_worker.add_jobs(array[
              row('t', '{}', 'old', null, null, null, null, null),
              row('t', '{}', 'new', null, null, null, null, null)]::graphile_worker.job_spec[])""")
        )
        await until_blocked(db, adder.get_server_pid())
        await db.execute("delete from graphile_worker._private_job_queues where queue_name = 'old'")
    with pytest.raises(asyncpg.SerializationError, match='queue "old" was removed'):
        await adding
    assert await count(db) == 0


async def test_lost_race_under_repeatable_read_is_an_error_instead_of_a_lost_job(
    db: asyncpg.Connection, worker: asyncpg.Connection, adder: asyncpg.Connection
) -> None:
    old = await add(db, job_key="k")
    async with adder.transaction(isolation="repeatable_read"):
        await adder.fetchval("select 1")  # creates the snapshot
        await lock(worker, old["id"])
        with pytest.raises(asyncpg.SerializationError):
            async with adder.transaction():
                await add(adder, job_key="k")


async def run_jobs(worker: asyncpg.Connection, ran: dict[str, int], done: asyncio.Event) -> None:
    """Claim, run and complete jobs, each step in its own transaction, until no job is left."""
    while True:
        finished = done.is_set()
        job = await worker.fetchrow("""
            update graphile_worker._private_jobs
            set locked_by = 'w', locked_at = now(), attempts = attempts + 1
            where id = (select id from graphile_worker._private_jobs
              where is_available order by id limit 1 for update skip locked)
            returning id, payload""")
        if job is None:
            if finished:
                return
            continue
        payload = json.loads(job["payload"])
        ran[payload["key"]] = max(payload["n"], ran.get(payload["key"], 0))
        await worker.execute("delete from graphile_worker._private_jobs where id = $1", job["id"])


@pytest.mark.parametrize("adds", [150, pytest.param(5_000, marks=pytest.mark.slow)])
async def test_keyed_adds_under_load_return_a_job_and_the_last_of_each_key_runs(
    db: asyncpg.Connection, database: str, adds: int
) -> None:
    keys = [f"k{n}" for n in range(4)]
    ran: dict[str, int] = {}
    done = asyncio.Event()
    connections = [await asyncpg.connect(database) for _ in range(len(keys) + 3)]

    async def add_all(connection: asyncpg.Connection, key: str) -> None:
        for n in range(1, adds + 1):
            job = await add(connection, job_key=key, payload={"key": key, "n": n})
            assert job["key"] == key

    async with asyncio.TaskGroup() as workers:
        for connection in connections[len(keys) :]:
            workers.create_task(run_jobs(connection, ran, done))
        async with asyncio.TaskGroup() as adders:
            for connection, key in zip(connections, keys, strict=False):
                adders.create_task(add_all(connection, key))
        done.set()
    for connection in connections:
        await connection.close()

    assert ran == dict.fromkeys(keys, adds)
    assert await count(db) == 0
