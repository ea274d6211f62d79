"""Who is told of what on which channel."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import asyncpg
import pytest

from support.jobs import add, bring_to

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

Heard = list[tuple[str, str]]


@pytest.fixture
async def hear(database: str) -> AsyncIterator[Callable[[], Awaitable[Heard]]]:
    """Everything notified since the last call, known to be complete by a marker of our own."""
    listener = await asyncpg.connect(database)
    queue: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    def receive(_connection: object, _pid: object, channel: str, payload: object) -> None:
        queue.put_nowait((channel, str(payload)))

    for channel in ("jobs:insert", "worker:migrate", "marker"):
        await listener.add_listener(channel, receive)

    async def collect() -> Heard:
        await listener.execute("notify marker")
        heard: Heard = []
        while (message := await queue.get())[0] != "marker":
            heard.append(message)
        return heard

    yield collect
    await listener.close()


def counts(heard: Heard) -> list[int]:
    assert {channel for channel, _ in heard} <= {"jobs:insert"}
    messages = [json.loads(payload) for _, payload in heard]
    assert all(set(message) == {"r", "count"} for message in messages)
    return [message["count"] for message in messages]


async def test_an_added_job_is_announced_with_its_number(
    db: asyncpg.Connection, hear: Callable[[], Awaitable[Heard]]
) -> None:
    await add(db)
    await add(db, job_key="k")
    await add(db, job_key="k")
    await add(db, job_key="dedupe", job_key_mode="unsafe_dedupe")
    assert counts(await hear()) == [1, 1, 1, 1]


async def test_jobs_added_together_are_announced_together(
    db: asyncpg.Connection, hear: Callable[[], Awaitable[Heard]]
) -> None:
    await db.execute("""select graphile_worker.add_jobs(array[
        row('a', '{}', null, null, null, null, null, null)::graphile_worker.job_spec,
        row('b', '{}', null, null, null, null, null, null)::graphile_worker.job_spec])""")
    assert counts(await hear()) == [2]


async def test_equal_announcements_of_one_transaction_all_arrive(
    db: asyncpg.Connection, hear: Callable[[], Awaitable[Heard]]
) -> None:
    async with db.transaction():
        await add(db)
        await add(db)
    assert counts(await hear()) == [1, 1]


async def test_a_rolled_back_job_is_not_announced(
    db: asyncpg.Connection, hear: Callable[[], Awaitable[Heard]]
) -> None:
    transaction = db.transaction()
    await transaction.start()
    await add(db)
    await transaction.rollback()
    assert await hear() == []


async def test_removal_is_announced_as_minus_one_unless_the_job_runs(
    db: asyncpg.Connection, hear: Callable[[], Awaitable[Heard]]
) -> None:
    for key in ("pending", "running"):
        job = await add(db, job_key=key)
    await bring_to(db, "locked", job["id"])
    await hear()

    for key in ("pending", "running", "nobody"):
        await db.execute("select graphile_worker.remove_job($1)", key)

    assert counts(await hear()) == [-1]


async def test_nobody_is_told_of_what_adds_nothing(
    db: asyncpg.Connection, hear: Callable[[], Awaitable[Heard]]
) -> None:
    job = await add(db, job_key="k", job_key_mode="unsafe_dedupe")
    await hear()

    await add(db, job_key="k", job_key_mode="unsafe_dedupe")
    for nothing in ("null", "'{}'"):
        await db.execute(f"select graphile_worker.add_jobs({nothing})")
    for function in ("reschedule_jobs", "permanently_fail_jobs", "complete_jobs"):
        await db.execute(f"select graphile_worker.{function}($1)", [job["id"]])
    await db.execute("select graphile_worker.force_unlock_workers(array['w'])")

    assert await hear() == []
