"""The partitions of the history: workers create them ahead of time, and drop old ones."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from graphile_worker import App, ConfigurationError, WorkerUtils, run_once
from graphile_worker._base.logs import ScopedLogger
from graphile_worker._db.connection.connect import Pool
from graphile_worker._db.connection.session import Session
from graphile_worker._db.queries import history as queries
from graphile_worker._db.sql_files import Schema
from graphile_worker._worker.claiming.clock import Clock
from graphile_worker._worker.execution.attempts import AttemptRecorder
from graphile_worker._worker.maintenance.history_partitions import HistoryPartitions
from graphile_worker.history import CALLED_FLAG, History
from support.jobs import add
from test_exchange import ExchangeWorker, worker
from test_history import kept, rows

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["worker"]

SCHEMA = Schema()
DAY = 86_400.0


class Service:
    """The service, on connections of its own."""

    def __init__(self, database: str, keep: Any = "all") -> None:
        self.pool = Pool(database)
        self.logger = ScopedLogger(logging.getLogger("graphile_worker"), {})
        self.session = Session(SCHEMA, self.pool, self.logger.logger)
        self.attempts = AttemptRecorder(History(keep), {"task": lambda _: None}, Clock(local=False))

    def keeping(self, seconds: float) -> HistoryPartitions:
        return HistoryPartitions(
            attempts=self.attempts, keep_for=seconds, session=self.session, logger=self.logger
        )


@pytest.fixture
async def service(database: str) -> AsyncIterator[Service]:
    service = Service(database)
    yield service
    await service.pool.close()


def name_of(days_ago: int) -> str:
    return f"_private_python_runs_{datetime.now(UTC) - timedelta(days=days_ago):%Y%m%d}"


async def create_day(db: asyncpg.Connection, days_ago: int) -> None:
    """Create the partition of a day in the past, with one attempt."""
    day = (datetime.now(UTC) - timedelta(days=days_ago)).replace(hour=0, minute=0, second=0, microsecond=0)
    await db.execute(
        f"""create table graphile_worker.{name_of(days_ago)} partition of graphile_worker._private_python_runs
        for values from ('{day.isoformat()}') to ('{(day + timedelta(days=1)).isoformat()}')"""
    )
    await write_attempt(db, day + timedelta(hours=1))


async def write_attempt(db: asyncpg.Connection, at: datetime) -> None:
    await db.execute(
        """insert into graphile_worker._private_python_runs
        (job_id, attempt, outcome, final, ended_at, run_at, created_at, task_id)
        values (1, 1, 1, true, $1, $1, $1, 1)""",
        at,
    )


async def partitions(db: asyncpg.Connection) -> list[str]:
    found = await db.fetchval(
        """select array_agg(inhrelid::regclass::text order by inhrelid::regclass::text collate "C")
        from pg_inherits where inhparent = 'graphile_worker._private_python_runs'::regclass"""
    )
    return [name.removeprefix("graphile_worker.") for name in found]


async def test_worker_creates_partitions_before_it_records_anything(
    db: asyncpg.Connection, database: str
) -> None:
    await add(db)
    await run_once({"task": lambda _: None}, database, history="all")
    ahead = [name_of(-days) for days in range(queries.DAYS_AHEAD + 1)]
    assert await partitions(db) == [*ahead, "_private_python_runs_default"]
    assert await db.fetchval(f"select count(*) from only graphile_worker.{name_of(0)}") == 1


async def test_worker_without_history_creates_no_partitions(db: asyncpg.Connection, database: str) -> None:
    await add(db)
    await run_once({"task": lambda _: None}, database)
    assert await partitions(db) == ["_private_python_runs_default"]


async def test_partitions_have_the_indexes(db: asyncpg.Connection, service: Service) -> None:
    assert await service.keeping(DAY).maintain()
    indexed = await db.fetch(
        "select tablename, count(*) from pg_indexes where tablename like '%runs%' group by 1"
    )
    assert {count for _, count in indexed} == {3}
    attached = await db.fetchval(
        "select count(*) from pg_inherits where inhparent = "
        "'graphile_worker._private_python_runs_job_id'::regclass"
    )
    assert attached == queries.DAYS_AHEAD + 2


async def test_old_days_are_dropped_and_others_kept(db: asyncpg.Connection, service: Service) -> None:
    for days in (20, 15, 14, 1):
        await create_day(db, days)
    assert await service.keeping(14 * DAY).maintain()
    assert [name for name in await partitions(db) if name < name_of(0)] == [name_of(14), name_of(1)]
    assert await service.keeping(14 * DAY).maintain(), "nothing is left to do"


async def test_row_of_a_day_without_partition_goes_to_the_default_one(
    db: asyncpg.Connection, service: Service, worker: ExchangeWorker
) -> None:
    await add(db)
    [held] = await worker.claim()
    await worker.exchange([kept(held)], 0)
    assert await db.fetchval("select count(*) from only graphile_worker._private_python_runs_default") == 1
    # Today's rows are in the default partition already, so today gets no partition. The next days do.
    assert await service.keeping(14 * DAY).maintain()
    assert name_of(0) not in await partitions(db)
    assert name_of(-1) in await partitions(db)


async def test_old_rows_of_the_default_partition_are_deleted(
    db: asyncpg.Connection, service: Service
) -> None:
    now = datetime.now(UTC)
    await write_attempt(db, now - timedelta(days=20))
    await write_attempt(db, now - timedelta(days=2))
    await service.keeping(14 * DAY).maintain()
    assert [now - row["ended_at"] for row in await rows(db)] == [timedelta(days=2)]


async def test_reader_delays_the_drop_but_no_exchange(
    db: asyncpg.Connection, database: str, service: Service, worker: ExchangeWorker
) -> None:
    await create_day(db, 20)
    await service.keeping(30 * DAY).maintain()
    reader = await asyncpg.connect(database)
    reading = reader.transaction()
    await reading.start()
    await reader.fetchval("select count(*) from graphile_worker._private_python_runs")

    dropping = asyncio.create_task(service.keeping(14 * DAY).maintain())
    for _ in range(20):
        await add(db)
        [held] = await worker.claim()
        await worker.exchange([kept(held)], 0)  # fails if it takes 10 s
    assert not await dropping, "it is tried again later"
    assert name_of(20) in await partitions(db)

    await reading.rollback()
    assert await service.keeping(14 * DAY).maintain()
    assert name_of(20) not in await partitions(db)
    await reader.close()
    assert len(await rows(db)) == 20


async def test_drop_waits_for_no_lock_while_the_history_is_in_use(
    db: asyncpg.Connection, database: str, service: Service
) -> None:
    """A waiting drop would let every exchange after it wait too."""
    await create_day(db, 20)
    await service.keeping(30 * DAY).maintain()
    reader = await asyncpg.connect(database)
    reading = reader.transaction()
    await reading.start()
    await reader.fetchval("select count(*) from graphile_worker._private_python_runs")
    found = await queries.inspect_partitions(db, SCHEMA)
    assert found is not None
    for lock in ("lock_at_once", "lock_soon"):  # the second is the last resort, and waits for 50 ms
        assert not await queries._drop_partition(db, SCHEMA, found, name_of(20), lock)
    await reading.rollback()
    assert await queries._drop_partition(db, SCHEMA, found, name_of(20), "lock_at_once")
    await reader.close()


async def test_workers_take_turns(db: asyncpg.Connection, database: str, service: Service) -> None:
    services = [Service(database) for _ in range(3)]
    await create_day(db, 20)
    await asyncio.gather(*(one.keeping(14 * DAY).maintain() for one in services))
    while not await service.keeping(14 * DAY).maintain():
        pass
    assert name_of(20) not in await partitions(db)
    assert name_of(0) in await partitions(db)
    for one in services:
        await one.pool.close()


async def test_role_that_may_not_create_tables_keeps_history_and_is_warned(
    db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    role = f"history_{db.get_server_pid()}"
    await db.execute(
        f"""create role {role} login;
        grant usage on schema graphile_worker to {role};
        grant all on all tables in schema graphile_worker to {role};
        grant all on all sequences in schema graphile_worker to {role};
        alter role {role} bypassrls"""
    )
    try:
        await add(db)
        dsn = database.replace("postgres@", f"{role}@")
        assert (await run_once({"task": lambda _: None}, dsn, history="all", migrate=False)).succeeded == 1
    finally:
        await db.execute(f"drop owned by {role}; drop role {role}")
    assert len(await rows(db)) == 1
    assert f"The role '{role}' may not create or drop partitions of the history" in caplog.text
    assert "Let the workers connect as the owner of the schema, 'postgres'" in caplog.text


async def test_member_of_the_owner_creates_partitions_for_the_owner(
    db: asyncpg.Connection, database: str
) -> None:
    pid = db.get_server_pid()
    owner, member = f"owner_{pid}", f"member_{pid}"
    await db.execute(
        f"""create role {owner}; create role {member} login in role {owner};
        alter schema graphile_worker owner to {owner};
        alter table graphile_worker._private_python_runs owner to {owner};
        alter table graphile_worker._private_python_runs_default owner to {owner};
        grant usage on schema graphile_worker to {member}"""
    )
    pool = Pool(database.replace("postgres@", f"{member}@"))
    try:
        session = Session(SCHEMA, pool, logging.getLogger("graphile_worker"))
        found = await session.call(lambda on: queries.inspect_partitions(on, SCHEMA))
        assert found is not None
        assert found.may_create
        assert await session.call(lambda on: queries.create_partitions(on, SCHEMA, found))
        owners = await db.fetchval(
            "select array_agg(distinct tableowner::text) from pg_tables "
            "where tablename like '_private_python_runs%'"
        )
        assert owners == [owner]
    finally:
        await pool.close()
        await db.execute(f"drop owned by {owner}, {member} cascade; drop role {owner}, {member}")


async def test_called_job_lets_its_worker_create_partitions(db: asyncpg.Connection, database: str) -> None:
    service = Service(database, keep="none")
    try:
        assert await service.keeping(DAY).maintain()
        assert await partitions(db) == ["_private_python_runs_default"]
        service.attempts.has_recorded = True
        assert await service.keeping(DAY).maintain()
        assert name_of(-1) in await partitions(db)
    finally:
        await service.pool.close()


async def test_prune_removes_old_days(db: asyncpg.Connection, database: str) -> None:
    for days in (9, 5, 2):
        await create_day(db, days)
    await write_attempt(db, datetime.now(UTC) - timedelta(days=30))
    async with WorkerUtils(database) as utils:
        pruned = await utils.prune_history(timedelta(days=4))
        assert (pruned.days, pruned.attempts) == (2, 1)
        assert len(await rows(db)) == 1
        with pytest.raises(ConfigurationError, match="older_than is -1"):
            await utils.prune_history(-1)


async def test_partitions_go_with_the_schema(db: asyncpg.Connection, service: Service) -> None:
    await service.keeping(DAY).maintain()
    await db.execute("drop schema graphile_worker cascade")
    assert await db.fetchval("select count(*) from pg_class where relname like '%python_runs%'") == 0


async def test_app_keeps_history_while_it_runs(database: str, db: asyncpg.Connection) -> None:
    async with App(dsn=database, history="all", history_keep="1d") as app:
        done = asyncio.Event()

        @app.task
        async def task() -> None:
            done.set()

        async with app.running():
            await task.using(flags=[CALLED_FLAG]).enqueue()
            async with asyncio.timeout(20):
                await done.wait()
    assert len(await rows(db)) == 1
    assert name_of(0) in await partitions(db)
