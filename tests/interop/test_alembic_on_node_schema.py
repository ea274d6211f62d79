"""Alembic on a schema that Node's Graphile Worker has installed."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import asyncpg
import pytest
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine, make_url
from sqlalchemy.pool import NullPool

from graphile_worker import App
from graphile_worker.contrib.alembic import install_schema
from support import node


def run_revision(dsn: str, **options: Any) -> None:
    """Install the schema as a revision does."""
    url = make_url(dsn).set(drivername="postgresql+psycopg")
    with create_engine(url, poolclass=NullPool).connect() as connection:
        context = MigrationContext.configure(connection, opts={"transaction_per_migration": True, **options})
        with context.begin_transaction(_per_migration=True), Operations.context(context):
            install_schema()


async def run_script(dsn: str) -> None:
    """Install the schema with the SQL of a revision."""
    script = io.StringIO()
    await asyncio.to_thread(run_revision, dsn, as_sql=True, output_buffer=script)
    connection = await asyncpg.connect(dsn)
    await connection.execute(script.getvalue())
    await connection.close()


# A script leaves the upgrade from the revision of 0.17.3 to `graphile-worker migrate`.
@pytest.mark.parametrize(("version", "how"), [("0.18.0", "sql"), ("0.18.0", "online"), ("0.17.3", "online")])
async def test_revision_adopts_the_schema_of_a_node_release(
    empty_database: str, version: str, how: str
) -> None:
    await node.install(version, empty_database)
    app = App(empty_database)

    @app.task
    async def hello() -> None: ...

    await app.add_job("hello")
    if how == "sql":
        await run_script(empty_database)
    else:
        await asyncio.to_thread(run_revision, empty_database)
    connection = await asyncpg.connect(empty_database)
    assert await connection.fetchval("select max(id) from graphile_worker.migrations") == 20
    await connection.close()
    assert (await app.run_once(migrate=False)).succeeded == 1
    await app.close()
