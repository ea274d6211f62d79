"""The SQL functions that administer jobs."""

from __future__ import annotations

from datetime import UTC, datetime

import asyncpg
import pytest

from support.jobs import STATES, add, count, fetch_one, get, lock, put_in_state

LATER = datetime(2030, 1, 1, tzinfo=UTC)
UNLOCKED = [state for state in STATES if state != "locked"]


async def add_job_in_each_state(db: asyncpg.Connection) -> dict[str, int]:
    jobs = {}
    for state in STATES:
        jobs[state] = (await add(db, job_key=state, queue_name=f"q-{state}", max_attempts=9))["id"]
        await put_in_state(db, state, jobs[state])
    return jobs


@pytest.mark.parametrize("state", STATES)
async def test_remove_job_deletes_a_job_unless_it_is_running(db: asyncpg.Connection, state: str) -> None:
    job_id = (await add_job_in_each_state(db))[state]
    before = await get(db, job_id)
    assert before is not None

    removed = await fetch_one(db, "select * from graphile_worker.remove_job($1)", state)

    after = await get(db, job_id)
    if state == "locked":
        assert removed == after
        changed = {"key": None, "attempts": 9, "updated_at": removed["updated_at"]}
        assert dict(removed) == dict(before) | changed
    else:
        assert (removed, after) == (before, None)


async def test_remove_job_with_an_unknown_key_returns_nulls(db: asyncpg.Connection) -> None:
    for key in ("unknown", None):
        row = await fetch_one(db, "select * from graphile_worker.remove_job($1)", key)
        assert set(row.values()) == {None}


async def test_complete_jobs_deletes_all_except_running_jobs(db: asyncpg.Connection) -> None:
    jobs = await add_job_in_each_state(db)
    other = (await add(db))["id"]

    done = await db.fetch("select * from graphile_worker.complete_jobs($1)", list(jobs.values()))

    assert {row["id"] for row in done} == {jobs[state] for state in UNLOCKED}
    assert await get(db, jobs["locked"])
    assert await get(db, other)


@pytest.mark.parametrize("reason", ["no use", None])
async def test_permanently_fail_jobs_fails_all_except_running_jobs(
    db: asyncpg.Connection, reason: str | None
) -> None:
    jobs = await add_job_in_each_state(db)
    before = {state: await get(db, job_id) for state, job_id in jobs.items()}

    failed = await db.fetch(
        "select * from graphile_worker.permanently_fail_jobs($1, $2)", list(jobs.values()), reason
    )

    assert {row["id"] for row in failed} == {jobs[state] for state in UNLOCKED}
    for row in failed:
        assert (row["attempts"], row["is_available"]) == (9, False)
        assert row["last_error"] == (reason or "Manually marked as failed")
        assert row["key"] is not None
    assert await get(db, jobs["locked"]) == before["locked"]


async def test_reschedule_jobs_changes_given_values_of_all_except_running_jobs(
    db: asyncpg.Connection,
) -> None:
    jobs = await add_job_in_each_state(db)
    before = {state: await get(db, job_id) for state, job_id in jobs.items()}

    changed = await db.fetch(
        """select * from graphile_worker.reschedule_jobs(
          $1, run_at => $2, priority => 0, attempts => 0, max_attempts => 3)""",
        list(jobs.values()),
        LATER,
    )

    assert {row["id"] for row in changed} == {jobs[state] for state in UNLOCKED}
    for row in changed:
        assert (row["run_at"], row["priority"]) == (LATER, 0)
        assert (row["attempts"], row["max_attempts"], row["revision"]) == (0, 3, 0)
    errors = {row["key"]: row["last_error"] for row in changed}
    assert errors["failed"] == "oops"
    assert await get(db, jobs["locked"]) == before["locked"]


async def test_reschedule_jobs_keeps_values_that_are_not_given(db: asyncpg.Connection) -> None:
    job = await add(db, run_at=LATER, priority=4, max_attempts=6)

    [after] = await db.fetch("select * from graphile_worker.reschedule_jobs($1)", [job["id"]])

    assert dict(after) == dict(job) | {"updated_at": after["updated_at"]}
    assert after["updated_at"] > job["updated_at"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("attempts => 32768", "22003"),
        ("priority => 40000", "22003"),
        ("max_attempts => 0", "23514"),
    ],
)
async def test_reschedule_jobs_rejects_out_of_range_values(
    db: asyncpg.Connection, arguments: str, code: str
) -> None:
    job = await add(db)
    with pytest.raises(asyncpg.PostgresError) as caught:
        await db.fetch(f"select graphile_worker.reschedule_jobs($1, {arguments})", [job["id"]])
    assert caught.value.sqlstate == code


@pytest.mark.parametrize("function", ["complete_jobs", "permanently_fail_jobs", "reschedule_jobs"])
@pytest.mark.parametrize("ids", [None, []])
async def test_empty_or_null_list_of_ids_changes_nothing(
    db: asyncpg.Connection, function: str, ids: list[int] | None
) -> None:
    await add(db)
    assert await db.fetch(f"select graphile_worker.{function}($1)", ids) == []
    assert await count(db) == 1


async def test_force_unlock_workers_releases_jobs_and_queues_of_the_named_workers(
    db: asyncpg.Connection,
) -> None:
    jobs = {worker: (await add(db, queue_name=worker))["id"] for worker in ("w1", "w2", "w3")}
    for worker, job_id in jobs.items():
        await lock(db, job_id, by=worker)
    before = await get(db, jobs["w1"])
    assert before is not None

    await db.execute("select graphile_worker.force_unlock_workers(array['w1', 'w3'])")

    released = await get(db, jobs["w1"])
    assert released is not None
    assert dict(released) == dict(before) | {
        "locked_at": None,
        "locked_by": None,
        "is_available": True,
    }
    holders = "select array_agg(locked_by order by id) from graphile_worker."
    assert await db.fetchval(holders + "_private_jobs") == [None, "w2", None]
    assert await db.fetchval(holders + "_private_job_queues") == [None, "w2", None]


@pytest.mark.parametrize(
    "call", ["remove_job('stale')", "complete_jobs(array[$1])", "permanently_fail_jobs(array[$1])"]
)
async def test_queue_of_a_stale_job_stays_locked_until_the_sweep(db: asyncpg.Connection, call: str) -> None:
    """As in Node's functions, only its worker or the sweep releases a queue."""
    job_id = (await add_job_in_each_state(db))["stale"]
    await db.execute(f"select graphile_worker.{call.replace('$1', str(job_id))}")
    locked = "select locked_by from graphile_worker._private_job_queues where queue_name = 'q-stale'"
    assert await db.fetchval(locked) == "w"


async def test_view_shows_every_job_without_its_payload(db: asyncpg.Connection) -> None:
    jobs = await add_job_in_each_state(db)
    jobs["unqueued"] = (await add(db))["id"]

    rows = await db.fetch("select * from graphile_worker.jobs order by id")

    assert [row["id"] for row in rows] == sorted(jobs.values())
    assert list(rows[0].keys()) == [
        *("id", "queue_name", "task_identifier", "priority", "run_at", "attempts", "max_attempts"),
        *(
            "last_error",
            "created_at",
            "updated_at",
            "key",
            "locked_at",
            "locked_by",
            "revision",
            "flags",
        ),
    ]
    assert [row["queue_name"] for row in rows] == [*(f"q-{state}" for state in STATES), None]
