"""The SQL function add_jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime

import asyncpg
import pytest

from support.jobs import add, count, get, put_in_state

LATER = datetime(2030, 1, 1, tzinfo=UTC)
ADD_JOBS = """
    select * from graphile_worker.add_jobs(
      array(select row(identifier, payload, queue_name, run_at, max_attempts, job_key, priority, flags)
        ::graphile_worker.job_spec
        from json_populate_recordset(null::graphile_worker.job_spec, $1)),
      $2)"""


async def add_jobs(
    db: asyncpg.Connection, *specs: Mapping[str, object], preserve_run_at: bool = False
) -> list[asyncpg.Record]:
    rows: list[asyncpg.Record] = await db.fetch(ADD_JOBS, json.dumps(specs, default=str), preserve_run_at)
    return rows


async def test_rows_and_ids_are_in_the_order_of_the_specs(
    db: asyncpg.Connection,
) -> None:
    # No join or sort produces this order of names by chance.
    specs = [
        {
            "identifier": f"t{n * 7 % 10}",
            "queue_name": f"q{n * 3 % 8}" if n % 3 else None,
            "payload": n,
        }
        for n in range(200)
    ]

    jobs = await add_jobs(db, *specs)

    assert [job["payload"] for job in jobs] == [str(n) for n in range(200)]
    assert [job["id"] for job in jobs] == list(range(1, 201))
    named = await db.fetch("select task_identifier, queue_name from graphile_worker.jobs order by id")
    assert [tuple(row) for row in named] == [(s["identifier"], s["queue_name"]) for s in specs]


async def test_order_is_kept_when_keys_exist_in_every_state(db: asyncpg.Connection) -> None:
    for state in ("new", "retrying", "failed", "locked", "stale"):
        await put_in_state(db, state, (await add(db, job_key=state))["id"])
    keys = ["other", "locked", None, "new", "failed", None, "stale", "retrying"]

    jobs = await add_jobs(db, *({"identifier": "t", "job_key": key} for key in keys))

    assert [job["key"] for job in jobs] == keys
    assert all(job["is_available"] for job in jobs)


async def test_every_field_of_a_spec_is_stored(db: asyncpg.Connection) -> None:
    [job] = await add_jobs(
        db,
        {
            "identifier": "send",
            "payload": {"to": "Ann"},
            "queue_name": "mail",
            "run_at": LATER,
            "max_attempts": 3,
            "job_key": "k",
            "priority": -7,
            "flags": ["a", "b"],
        },
    )

    assert json.loads(job["flags"]) == {"a": True, "b": True}
    assert (job["run_at"], job["max_attempts"], job["key"], job["priority"]) == (LATER, 3, "k", -7)


async def test_keyed_specs_replace_jobs_and_optionally_preserve_run_at(db: asyncpg.Connection) -> None:
    spec = {"identifier": "t", "job_key": "k"}
    [first] = await add_jobs(db, spec | {"run_at": LATER})
    [second] = await add_jobs(db, spec, preserve_run_at=True)
    [third] = await add_jobs(db, spec)

    assert (second["revision"], second["run_at"]) == (1, LATER)
    assert (third["revision"], third["id"]) == (2, first["id"])
    assert third["run_at"] < LATER
    assert await count(db) == 1


async def test_empty_or_null_list_adds_nothing(db: asyncpg.Connection) -> None:
    assert await add_jobs(db) == []
    assert await db.fetch("select * from graphile_worker.add_jobs(null)") == []


async def test_duplicate_key_rejects_the_whole_call(db: asyncpg.Connection) -> None:
    with pytest.raises(asyncpg.CardinalityViolationError):
        await add_jobs(db, {"identifier": "a", "job_key": "k"}, {"identifier": "b", "job_key": "k"})

    assert await count(db) == 0


async def test_null_spec_rejects_the_whole_call(db: asyncpg.Connection) -> None:
    with pytest.raises(asyncpg.NotNullViolationError):
        await db.fetch("select * from graphile_worker.add_jobs(array[null::graphile_worker.job_spec])")


async def test_running_job_that_loses_its_key_is_not_retried(db: asyncpg.Connection) -> None:
    running = await add(db, job_key="k", max_attempts=4)
    await put_in_state(db, "locked", running["id"])

    await add_jobs(db, {"identifier": "t", "job_key": "k"})

    after = await get(db, running["id"])
    assert after is not None
    assert (after["key"], after["attempts"], after["locked_by"]) == (None, 4, "w")


async def test_array_with_another_lower_bound_is_accepted(db: asyncpg.Connection) -> None:
    specs = '[0:1]={"(a,,,,,k1,,)","(b,,q,,,k2,,)"}'
    jobs = await db.fetch(f"select * from graphile_worker.add_jobs('{specs}'::graphile_worker.job_spec[])")
    assert [job["key"] for job in jobs] == ["k1", "k2"]
