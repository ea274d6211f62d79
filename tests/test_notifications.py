"""Notifications that the SQL functions send, and their channels."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import asyncpg
import pytest

from support.jobs import add, put_in_state

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

Notifications = list[tuple[str, str]]


@pytest.fixture
async def received(database: str) -> AsyncIterator[Callable[[], Awaitable[Notifications]]]:
    """Returns all notifications since its last call. A marker ensures that none is missing."""
    listener = await asyncpg.connect(database)
    queue: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    def receive(_connection: object, _pid: object, channel: str, payload: object) -> None:
        queue.put_nowait((channel, str(payload)))

    for channel in ("jobs:insert", "worker:migrate", "marker"):
        await listener.add_listener(channel, receive)

    async def collect() -> Notifications:
        await listener.execute("notify marker")
        notifications: Notifications = []
        while (message := await queue.get())[0] != "marker":
            notifications.append(message)
        return notifications

    yield collect
    await listener.close()


def counts(notifications: Notifications) -> list[int]:
    assert {channel for channel, _ in notifications} <= {"jobs:insert"}
    messages = [json.loads(payload) for _, payload in notifications]
    assert all(set(message) == {"r", "count"} for message in messages)
    return [message["count"] for message in messages]


async def test_added_job_is_announced_with_a_count_of_one(
    db: asyncpg.Connection, received: Callable[[], Awaitable[Notifications]]
) -> None:
    await add(db)
    await add(db, job_key="k")
    await add(db, job_key="k")
    await add(db, job_key="dedupe", job_key_mode="unsafe_dedupe")
    assert counts(await received()) == [1, 1, 1, 1]


async def test_jobs_added_in_one_call_are_announced_once(
    db: asyncpg.Connection, received: Callable[[], Awaitable[Notifications]]
) -> None:
    await db.execute("""select graphile_worker.add_jobs(array[
        row('a', '{}', null, null, null, null, null, null)::graphile_worker.job_spec,
        row('b', '{}', null, null, null, null, null, null)::graphile_worker.job_spec])""")
    assert counts(await received()) == [2]


async def test_equal_notifications_of_one_transaction_all_arrive(
    db: asyncpg.Connection, received: Callable[[], Awaitable[Notifications]]
) -> None:
    async with db.transaction():
        await add(db)
        await add(db)
    assert counts(await received()) == [1, 1]


async def test_rolled_back_job_is_not_announced(
    db: asyncpg.Connection, received: Callable[[], Awaitable[Notifications]]
) -> None:
    transaction = db.transaction()
    await transaction.start()
    await add(db)
    await transaction.rollback()
    assert await received() == []


async def test_removal_is_announced_as_minus_one_unless_the_job_is_running(
    db: asyncpg.Connection, received: Callable[[], Awaitable[Notifications]]
) -> None:
    for key in ("pending", "running"):
        job = await add(db, job_key=key)
    await put_in_state(db, "locked", job["id"])
    await received()

    for key in ("pending", "running", "unknown"):
        await db.execute("select graphile_worker.remove_job($1)", key)

    assert counts(await received()) == [-1]


async def test_calls_that_add_no_job_send_no_notification(
    db: asyncpg.Connection, received: Callable[[], Awaitable[Notifications]]
) -> None:
    job = await add(db, job_key="k", job_key_mode="unsafe_dedupe")
    await received()

    await add(db, job_key="k", job_key_mode="unsafe_dedupe")
    for nothing in ("null", "'{}'"):
        await db.execute(f"select graphile_worker.add_jobs({nothing})")
    for function in ("reschedule_jobs", "permanently_fail_jobs", "complete_jobs"):
        await db.execute(f"select graphile_worker.{function}($1)", [job["id"]])
    await db.execute("select graphile_worker.force_unlock_workers(array['w'])")

    assert await received() == []
