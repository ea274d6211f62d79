"""The command on a schema that Node installed and that Python has not adopted yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import asyncpg
import pytest

from graphile_worker import SchemaMissingError, SchemaTooOldError, WorkerUtils
from support import node
from support.commands import Cli
from support.jobs import add, existing, lock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from graphile_worker.testing import Databases

POOL = "pool-0123456789abcdef01"


@pytest.fixture
async def dsn(graphile_worker_databases: Databases) -> AsyncIterator[str]:
    async with graphile_worker_databases.fresh(empty=True) as dsn:
        yield dsn


@pytest.fixture(params=["0.18.0", "0.17.3", "0.16.6"])
async def db(request: pytest.FixtureRequest, dsn: str) -> AsyncIterator[asyncpg.Connection]:
    """Yield a connection to the schema of that release; Python refuses to adopt the oldest of them."""
    await node.install(request.param, dsn)
    connection = await asyncpg.connect(dsn)
    yield connection
    await connection.close()


@pytest.fixture
def cli(dsn: str, tmp_path: Path) -> Cli:
    return Cli(dsn, tmp_path)


async def is_untouched(db: asyncpg.Connection) -> bool:
    return await db.fetchval("select to_regclass('graphile_worker._private_workers')") is None


@pytest.mark.sample(1)
async def test_workers_and_unlock_on_an_unadopted_schema(db: asyncpg.Connection, cli: Cli) -> None:
    held = await add(db, "hold", queue_name="q")
    await lock(db, held["id"], by=POOL, age="2 hours")

    [worker] = await cli.json("workers")
    assert (worker["id"], worker["language"], worker["jobs"], worker["queues"]) == (POOL, "node", 1, 1)
    locks = [finding for finding in (await cli("doctor")).stdout.splitlines() if POOL in finding]
    assert locks, "the doctor names the worker"
    assert " 1 job and 1 queue" in await cli.out("unlock", POOL)

    assert (await existing(db, held["id"]))["locked_by"] is None
    assert await cli.json("workers") == []
    assert await is_untouched(db)


@pytest.mark.sample(1)
async def test_cleanup_sweep_and_health_on_an_unadopted_schema(db: asyncpg.Connection, cli: Cli) -> None:
    await db.execute("insert into graphile_worker._private_job_queues (queue_name) values ('unused')")
    await db.execute("insert into graphile_worker._private_tasks (identifier) values ('unused')")
    cleaned = await cli.json("cleanup", "queues", "task-identifiers")
    assert cleaned == {"jobs": 0, "task_identifiers": 1, "queues": 1}
    assert await cli.json("sweep") == []
    health = await cli("health")
    assert (health.returncode, "has a heartbeat in this schema" in health.stdout) == (1, True)
    assert await is_untouched(db)


@pytest.mark.sample(1)
@pytest.mark.parametrize("version", ["0.18.0", "0.16.6"])
async def test_cancel_job_explains_what_an_unadopted_schema_lacks(dsn: str, version: str) -> None:
    await node.install(version, dsn)
    async with WorkerUtils(dsn) as utils:
        job = await utils.add_job("task")
        expected, message = {
            "0.18.0": (SchemaMissingError, "this release needs"),
            "0.16.6": (SchemaTooOldError, "revision 18 .* npx graphile-worker@0.18"),
        }[version]
        with pytest.raises(expected, match=message):
            await utils.cancel_job(job.id)


@pytest.mark.slow
async def test_commands_without_a_schema_say_that_it_is_missing(cli: Cli) -> None:
    for verb in (["workers"], ["unlock", POOL], ["cleanup"], ["sweep"], ["health"]):
        done = await cli(*verb)
        assert (done.returncode, "is not installed in this database" in done.stderr) == (1, True), verb
