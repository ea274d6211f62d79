"""A worker that freezes inside a transaction of its own does not block the others.

While a session is idle in a transaction, the server's limit ends it. Between preparing a statement and
executing it, the session counts as active. Only PostgreSQL 17 and newer can end its transaction then. So the
statements of every transaction that locks rows are prepared before it begins.
"""

from __future__ import annotations

import asyncio
import json
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

import asyncpg
import pytest

from graphile_worker import DatabaseError, JobSpec
from graphile_worker._db.connection.connect import Pool
from graphile_worker._db.connection.session import Session
from graphile_worker._db.queries import (
    bulk_insert,
    bulk_update,
    cancellations,
    cleanup,
    crontabs,
    exchange,
    jobs,
    transfer,
    workers,
)
from graphile_worker._db.schema.migrate import migrate
from graphile_worker._db.sql_files import Schema
from support.jobs import add, existing, lock
from support.proxy import proxied
from support.waiting import until
from support.workers import drop_schema
from test_recovery import TimedSweeper, add_locked_job, register_worker, session, timed_sweeper

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["session", "timed_sweeper"]

Operation: TypeAlias = "Callable[[asyncpg.Connection], Awaitable[object]]"
SCHEMA = Schema()
WITHOUT_ID = {"having_key": None}
LINE = json.dumps({"id": 900, "task_identifier": "task", "payload": {}, "key": "imported"}).encode()


@pytest.fixture
def prepared_inside(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements that were prepared inside a transaction."""
    found: list[str] = []
    real: Any = asyncpg.Connection._get_statement  # type: ignore[attr-defined]

    async def get_statement(self: Any, query: str, *arguments: Any, **options: Any) -> Any:
        is_cached = any(key[0] == query for key in self._stmt_cache._entries)
        if self.is_in_transaction() and not is_cached:
            found.append(query)
        return await real(self, query, *arguments, **options)

    monkeypatch.setattr(asyncpg.Connection, "_get_statement", get_statement)
    return found


async def renew(on: asyncpg.Connection) -> None:
    locked = await exchange.read_locked(on, SCHEMA, "w", await exchange.read_tasks(on, SCHEMA, ["task"]))
    assert len(locked.jobs) == 2
    queues = [held.queue for held in locked.jobs if held.queue is not None]
    assert len(queues) == 1
    before = [held.locked_at for held in locked.jobs]
    await exchange.renew(on, SCHEMA, "w", locked.jobs, queues, generation=locked.generation)
    assert all(held.locked_at > then for held, then in zip(locked.jobs, before, strict=True))


async def release_queues(on: asyncpg.Connection) -> None:
    await on.execute("delete from graphile_worker._private_jobs")
    [row] = await on.fetch("select id, locked_at from graphile_worker._private_job_queues")
    assert await exchange.unlock_queues(on, SCHEMA, "w", {row["id"]: row["locked_at"]}) == set()


async def release_stale_locks(on: asyncpg.Connection) -> None:
    for table in ("jobs", "job_queues"):
        await on.execute(
            f"update graphile_worker._private_{table} set locked_at = now() - interval '5 hours' "
            "where locked_at is not null"
        )
    released = await workers.unlock_stale(on, SCHEMA)
    assert (len(released.jobs), len(released.queues)) == (2, 1)


async def cancel(on: asyncpg.Connection) -> None:
    ids = [row["id"] for row in await on.fetch("select id from graphile_worker._private_jobs")]
    found = await cancellations.cancel_many(on, SCHEMA, ids, "why")
    assert {result.answer for result in found.values()} == {"cancelled", "requested"}


async def settle_refused_cancellations(on: asyncpg.Connection) -> None:
    await cancel(on)
    await on.execute(
        """update graphile_worker._private_jobs set locked_at = null, locked_by = null;
        create function refuse() returns trigger language plpgsql as
          $$ begin raise exception 'no'; end $$;
        create trigger refuse before update or delete on graphile_worker._private_jobs
          for each row execute function refuse()"""
    )
    await cancellations.settle(on, SCHEMA)


async def fail(on: asyncpg.Connection) -> None:
    ids = [row["id"] for row in await on.fetch("select id from graphile_worker._private_jobs")]
    assert len(await jobs.permanently_fail_jobs(on, SCHEMA, ids, "why")) == 1


def change_batch(name: str, *arguments: object) -> Operation:
    async def change(on: asyncpg.Connection) -> None:
        _, changed, _ = await bulk_update.change_batch(on, SCHEMA, name, WITHOUT_ID, arguments, limit=10)
        assert len(changed) == 1

    return change


async def cancel_batch(on: asyncpg.Connection) -> None:
    selected, results = await bulk_update.cancel_batch(on, SCHEMA, WITHOUT_ID, "why", limit=10)
    assert len(selected) == len(results) == 3


async def clean_up(on: asyncpg.Connection) -> None:
    await on.execute("delete from graphile_worker._private_jobs")
    assert await cleanup.delete_unused(on, SCHEMA, "task_identifiers", []) == 1
    assert await cleanup.delete_unused(on, SCHEMA, "queues") == 0, "the queue is locked"


def schedule(*keys: str | None) -> Operation:
    async def add_due(on: asyncpg.Connection) -> None:
        minute = datetime(2026, 1, 1, tzinfo=UTC)
        due = [
            crontabs.DueJob(minute, index, f"cron {index}", JobSpec("task", job_key=key), key is not None)
            for index, key in enumerate(keys)
        ]
        assert await crontabs.schedule(on, SCHEMA, due) == due

    return add_due


async def add_many(on: asyncpg.Connection) -> None:
    assert len(await bulk_insert.add_jobs(on, SCHEMA, [JobSpec("task"), JobSpec("new")])) == 2


async def import_jobs(on: asyncpg.Connection) -> None:
    steps = [step async for step in transfer.import_lines(on, SCHEMA, [LINE], new_ids=False)]
    assert steps[-1].jobs == 1


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(renew, id="renew locks"),
        pytest.param(release_queues, id="release queues"),
        pytest.param(release_stale_locks, id="release stale locks"),
        pytest.param(cancel, id="cancel"),
        pytest.param(settle_refused_cancellations, id="settle refused cancellations"),
        pytest.param(cancel_batch, id="cancel a batch"),
        pytest.param(fail, id="fail"),
        pytest.param(change_batch("fail", "why"), id="fail a batch"),
        pytest.param(change_batch("complete"), id="complete a batch"),
        pytest.param(clean_up, id="clean up"),
        pytest.param(schedule(None), id="schedule a job"),
        pytest.param(schedule(None, None, "k"), id="schedule jobs"),
        pytest.param(add_many, id="add many"),
        pytest.param(import_jobs, id="import"),
    ],
)
async def test_statements_are_prepared_before_a_transaction_that_locks_rows(
    db: asyncpg.Connection, database: str, prepared_inside: list[str], operation: Operation
) -> None:
    await add(db)
    for options in ({}, {"queue_name": "q"}):
        await lock(db, (await add(db, **options))["id"])
    connection = await asyncpg.connect(database)
    try:
        await operation(connection)
    finally:
        await connection.close()
    assert prepared_inside == []


async def test_sweep_prepares_its_statements_before_its_transactions_begin(
    db: asyncpg.Connection, timed_sweeper: TimedSweeper, prepared_inside: list[str]
) -> None:
    await register_worker(db)
    await add_locked_job(db, queue_name="q")
    [recovered] = await timed_sweeper.run_for(10)
    assert len(recovered.jobs) == 1
    assert prepared_inside == []


async def test_migration_prepares_its_statements_before_its_transaction_begins(
    db: asyncpg.Connection, database: str, prepared_inside: list[str]
) -> None:
    await drop_schema(db)
    connection = await asyncpg.connect(database)
    try:
        await migrate(connection, SCHEMA)
    finally:
        await connection.close()
    assert prepared_inside == []


async def test_nothing_is_prepared_ahead_without_prepared_statements(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pooler may use another session for the transaction, which does not know the statement."""
    prepared_outside: list[str] = []
    real: Any = asyncpg.Connection._get_statement  # type: ignore[attr-defined]

    async def get_statement(self: Any, query: str, *arguments: Any, **options: Any) -> Any:
        if not self.is_in_transaction():
            prepared_outside.append(query)
        return await real(self, query, *arguments, **options)

    monkeypatch.setattr(asyncpg.Connection, "_get_statement", get_statement)
    connection = await asyncpg.connect(database, statement_cache_size=0)
    try:
        await cleanup.delete_unused(connection, SCHEMA, "queues")
    finally:
        await connection.close()
    assert prepared_outside == []


async def test_sweeper_frozen_before_it_executes_a_statement_does_not_block_others(
    db: asyncpg.Connection, database: str, timed_sweeper: TimedSweeper
) -> None:
    text = "from json_to_recordset"  # the statement that releases jobs
    await register_worker(db)
    job = await add_locked_job(db)
    async with proxied(database) as (proxy, through):
        pool = Pool(through, max_size=1)
        frozen = TimedSweeper(Session(SCHEMA, pool, logging.getLogger("graphile_worker")))
        for one in (frozen, timed_sweeper):
            await one.run_for(8)
            one.clock.advance(2)
        seen: list[str] = []

        def freeze(direction: str, data: bytes) -> bool:
            if seen or text.encode() in data:
                seen.append(direction)
            if seen.count("reply") == 1:
                proxy.start_blackhole()
            return False

        proxy.cut_when = freeze
        sweep = asyncio.create_task(frozen.sweeper.sweep())

        async def is_frozen() -> bool:
            return bool(
                await db.fetchval(
                    "select exists (select from pg_stat_activity where datname = current_database() "
                    "and state = 'active' and wait_event = 'ClientRead' and strpos(query, $1) > 0 "
                    "and pid <> pg_backend_pid())",
                    text,
                )
            )

        await until(is_frozen, "the sweeper is frozen")
        async with asyncio.timeout(15):
            [recovered] = await timed_sweeper.sweeper.sweep(all_dead=True)
        assert [found.id for found in recovered.jobs] == [job]
        proxy.cut_when = lambda _direction, _data: False
        proxy.end_blackhole()
        with pytest.raises(DatabaseError):
            await sweep
        await pool.close()
    assert (await existing(db, job))["is_available"]
