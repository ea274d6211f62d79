"""The SQL function add_job."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from support.jobs import STATES, add, count, fetch_one, get, put_in_state

LATER = datetime(2030, 1, 1, tzinfo=UTC)


async def test_omitted_arguments_have_defaults(db: asyncpg.Connection) -> None:
    job = await add(db)

    assert dict(job) | {"id": 1} == {
        "id": 1,
        "job_queue_id": None,
        "task_id": 1,
        "payload": "{}",
        "priority": 0,
        "run_at": job["created_at"],
        "attempts": 0,
        "max_attempts": 25,
        "last_error": None,
        "created_at": job["created_at"],
        "updated_at": job["created_at"],
        "key": None,
        "locked_at": None,
        "locked_by": None,
        "revision": 0,
        "flags": None,
        "is_available": True,
    }
    assert await get(db, job["id"]) == job


async def test_every_argument_is_stored(db: asyncpg.Connection) -> None:
    job = await add(
        db,
        "send",
        payload={"to": "Ann", "n": 3.10},
        queue_name="mail",
        run_at=LATER,
        max_attempts=3,
        job_key="k",
        priority=-7,
        flags=["a", "b", "a"],
    )

    view = await fetch_one(db, "select * from graphile_worker.jobs")
    assert json.loads(job["payload"]) == {"to": "Ann", "n": 3.10}
    assert json.loads(job["flags"]) == {"a": True, "b": True}
    assert (view["task_identifier"], view["queue_name"]) == ("send", "mail")
    assert (view["run_at"], view["max_attempts"], view["key"], view["priority"]) == (
        LATER,
        3,
        "k",
        -7,
    )


async def test_null_arguments_mean_the_defaults(db: asyncpg.Connection) -> None:
    job = await fetch_one(
        db,
        "select * from graphile_worker.add_job('t', null, null, null, null, null, null, null, null)",
    )

    assert (job["payload"], job["max_attempts"], job["priority"], job["flags"]) == (
        "{}",
        25,
        0,
        None,
    )


async def test_payload_text_is_stored_unchanged(db: asyncpg.Connection) -> None:
    text = '{"b": 1,  "a": 3.10, "b": 2}'

    job = await fetch_one(db, "select * from graphile_worker.add_job('t', $1)", text)

    assert job["payload"] == text


async def test_empty_list_of_flags_is_stored_as_null(db: asyncpg.Connection) -> None:
    assert (await add(db, flags=[]))["flags"] is None


async def test_repeated_adds_use_up_no_ids_of_tasks_and_queues(db: asyncpg.Connection) -> None:
    for mode in ("replace", "unsafe_dedupe"):
        for _ in range(20):
            await add(db, "t", queue_name="q", job_key="k", job_key_mode=mode)

    await add(db, "t2", queue_name="q2")
    await add(db, "t3", queue_name="q3", job_key="k3", job_key_mode="unsafe_dedupe")
    tasks = "select array_agg(id order by id) from graphile_worker._private_tasks"
    queues = "select array_agg(id order by id) from graphile_worker._private_job_queues"
    assert await db.fetchval(tasks) == [1, 2, 3]
    assert await db.fetchval(queues) == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"identifier": "x" * 129}, "23514"),
        ({"identifier": None}, "23502"),
        ({"queue_name": "x" * 129}, "23514"),
        ({"job_key": ""}, "23514"),
        ({"job_key": "x" * 513}, "23514"),
        ({"max_attempts": 0}, "23514"),
        ({"max_attempts": 32768}, "22003"),
        ({"priority": -32769}, "22003"),
        ({"flags": ["a", None]}, "22023"),
        ({"job_key": "k", "job_key_mode": "upsert"}, "GWBKM"),
    ],
)
@pytest.mark.parametrize("mode", ["replace", "unsafe_dedupe"])
async def test_invalid_argument_is_rejected_with_its_sqlstate(
    db: asyncpg.Connection, arguments: dict[str, Any], code: str, mode: str
) -> None:
    if mode == "unsafe_dedupe":
        arguments = {"job_key": "k", "job_key_mode": mode} | arguments

    with pytest.raises(asyncpg.PostgresError) as caught:
        await add(db, **({"identifier": "t"} | arguments))

    assert caught.value.sqlstate == code
    assert await count(db) == 0


@pytest.mark.parametrize("mode", ["replace", "unsafe_dedupe"])
@pytest.mark.parametrize("arguments", [{"priority": 32768}, {"max_attempts": 32768}], ids=str)
async def test_out_of_range_number_uses_up_no_id(
    db: asyncpg.Connection, arguments: dict[str, Any], mode: str
) -> None:
    # Seven calls lead to a generic plan. With a custom plan, the planner itself may reject the number.
    for _ in range(7):
        with pytest.raises(asyncpg.NumericValueOutOfRangeError):
            await add(db, queue_name="q", job_key="k", job_key_mode=mode, **arguments)

    job = await add(db, queue_name="q")

    assert (job["id"], job["task_id"], job["job_queue_id"]) == (1, 1, 1)


async def test_unknown_job_key_mode_is_rejected_with_the_valid_ones(db: asyncpg.Connection) -> None:
    with pytest.raises(asyncpg.PostgresError, match="upsert") as caught:
        await add(db, job_key="k", job_key_mode="upsert")

    hint = caught.value.as_dict()["hint"]
    assert all(mode in hint for mode in ("replace", "preserve_run_at", "unsafe_dedupe"))


async def test_job_key_mode_without_a_key_is_ignored(
    db: asyncpg.Connection,
) -> None:
    assert (await add(db, job_key_mode="upsert"))["id"]
    assert (await add(db, job_key_mode=None))["id"]


async def test_longest_key_queue_name_and_identifier_are_stored(db: asyncpg.Connection) -> None:
    assert (await add(db, "x" * 128, queue_name="é" * 128, job_key="é" * 512))["id"]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("mode", ["replace", "preserve_run_at", None])
async def test_existing_key_updates_or_supersedes_its_job_by_state(
    db: asyncpg.Connection, state: str, mode: str | None
) -> None:
    old = await add(
        db, "old", payload=[1], job_key="k", queue_name="q", priority=5, max_attempts=7, flags=["f"]
    )
    await put_in_state(db, state, old["id"])
    before = await get(db, old["id"])
    assert before is not None

    new = await add(db, "new", payload={"n": 2}, job_key="k", run_at=LATER, job_key_mode=mode)

    after = await get(db, old["id"])
    assert after is not None
    assert json.loads(new["payload"]) == {"n": 2}
    assert (new["key"], new["attempts"], new["max_attempts"], new["priority"]) == ("k", 0, 25, 0)
    assert (new["job_queue_id"], new["flags"], new["last_error"]) == (None, None, None)
    if state in {"new", "retrying"}:
        keeps_run_at = mode == "preserve_run_at" and state == "new"
        assert new["id"] == old["id"]
        assert new["run_at"] == (old["run_at"] if keeps_run_at else LATER)
        assert (new["revision"], new["created_at"]) == (1, old["created_at"])
        assert new["updated_at"] > old["updated_at"]
        assert await count(db) == 1
    else:
        assert new["id"] != old["id"]
        assert (new["run_at"], new["revision"]) == (LATER, 0)
        # The old job keeps everything except its key, and will not run again.
        changed = {
            "key": None,
            "attempts": 7,
            "updated_at": after["updated_at"],
            "is_available": False,
        }
        assert dict(after) == dict(before) | changed
        assert await count(db) == 2


@pytest.mark.parametrize("state", STATES)
async def test_unsafe_dedupe_changes_only_the_revision_in_every_state(
    db: asyncpg.Connection, state: str
) -> None:
    old = await add(db, "old", payload=[1], job_key="k", queue_name="q")
    await put_in_state(db, state, old["id"])
    before = await get(db, old["id"])
    assert before is not None

    again = await add(db, "new", payload=[2], job_key="k", run_at=LATER, job_key_mode="unsafe_dedupe")

    assert dict(again) == dict(before) | {"revision": 1, "updated_at": again["updated_at"]}
    assert again["updated_at"] > before["updated_at"]
    assert await get(db, old["id"]) == again
    assert await count(db) == 1


async def test_job_key_modes_apply_one_after_another_to_one_key(db: asyncpg.Connection) -> None:
    soon = LATER - timedelta(days=1)
    steps: list[tuple[dict[str, Any], tuple[int, str, datetime]]] = [
        ({"payload": 1, "run_at": LATER}, (0, "1", LATER)),
        ({"payload": 2, "run_at": soon, "job_key_mode": "preserve_run_at"}, (1, "2", LATER)),
        ({"payload": 3, "run_at": soon, "job_key_mode": "unsafe_dedupe"}, (2, "2", LATER)),
        ({"payload": 4, "run_at": soon, "job_key_mode": "replace"}, (3, "4", soon)),
    ]
    for arguments, expected in steps:
        job = await add(db, job_key="k", **arguments)
        assert (job["revision"], job["payload"], job["run_at"]) == expected
    assert await count(db) == 1


@pytest.mark.parametrize(
    ("old", "new", "merged"),
    [
        ([1], [2, 3], [1, 2, 3]),
        ([], [1], [1]),
        ([1], {"a": 1}, {"a": 1}),
        ({"a": 1}, [1], [1]),
        ([1], None, None),
        ("x", [1], [1]),
    ],
)
async def test_two_array_payloads_are_concatenated_and_others_replaced(
    db: asyncpg.Connection, old: object, new: object, merged: object
) -> None:
    await add(db, payload=old, job_key="k")

    job = await add(db, payload=new, job_key="k")

    assert json.loads(job["payload"]) == merged


async def test_three_batches_with_one_key_become_one_job(db: asyncpg.Connection) -> None:
    for item in (1, 2, 3):
        job = await add(db, payload=[item], job_key="k")
    assert (json.loads(job["payload"]), job["attempts"]) == ([1, 2, 3], 0)
    assert await count(db) == 1
    assert await db.fetchval("select count(*) from graphile_worker._private_job_queues") == 0


async def test_null_payload_replaces_an_array(db: asyncpg.Connection) -> None:
    await add(db, payload=[1], job_key="k")

    assert (await add(db, job_key="k"))["payload"] == "{}"


@pytest.mark.parametrize("state", ["locked", "failed"])
async def test_arrays_are_not_concatenated_with_a_superseded_job(db: asyncpg.Connection, state: str) -> None:
    await put_in_state(db, state, (await add(db, payload=[1], job_key="k"))["id"])

    assert json.loads((await add(db, payload=[2], job_key="k"))["payload"]) == [2]


async def test_concatenating_arrays_rejects_an_escaped_nul(db: asyncpg.Connection) -> None:
    insert = "select graphile_worker.add_job('t', $1, job_key => 'k')"
    await db.execute(insert, '["\\u0000"]')

    with pytest.raises(asyncpg.UntranslatableCharacterError):
        await db.execute(insert, "[1]")


async def test_job_keys_are_shared_by_all_tasks(db: asyncpg.Connection) -> None:
    first = await add(db, "a", job_key="k")

    assert (await add(db, "b", job_key="k"))["id"] == first["id"]


async def test_expanding_the_result_adds_a_job_per_column(
    db: asyncpg.Connection,
) -> None:
    """PostgreSQL calls the function once per column, so the documentation says to call it in FROM."""
    await db.execute("select (graphile_worker.add_job('t')).*")

    assert await count(db) == 17


async def test_role_with_all_grants_still_sees_and_adds_nothing(db: asyncpg.Connection) -> None:
    await add(db)
    role = f"gw_other_role_{uuid4().hex}"
    await db.execute(f"""
        create role {role};
        grant usage on schema graphile_worker to {role};
        grant all on all tables in schema graphile_worker to {role};
        grant all on all sequences in schema graphile_worker to {role}""")
    try:
        async with db.transaction():
            await db.execute(f"set local role {role}")
            assert await count(db) == 0
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                async with db.transaction():
                    await add(db)
    finally:
        await db.execute(f"drop owned by {role}; drop role {role}")
