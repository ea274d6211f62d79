"""One queue that npm's worker and ours share, installed by either of them."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from graphile_worker import WorkerUtils, run_migrations
from support.here import Here, Sql
from support.peer import Peer, started

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from graphile_worker.testing import Databases

VERSIONS = ["0.18.0", "0.17.3"]
OURS, NPMS = "ours", "npm's"


@dataclass(frozen=True)
class Shared:
    """A database, and both sides at work on it."""

    dsn: str
    db: asyncpg.Connection
    utils: WorkerUtils
    node: Peer
    python: Here
    sql: Sql

    def side(self, name: str) -> Any:
        """One of the three by its name; what they have in common has no type."""
        return getattr(self, name)


async def _shared(databases: Databases, version: str, installed_by: str, stack: AsyncExitStack) -> Shared:
    dsn = await stack.enter_async_context(databases.fresh(empty=installed_by == NPMS))
    node = await stack.enter_async_context(started(version, dsn))
    if installed_by == NPMS:
        await node.ask("migrate")
        await run_migrations(dsn)
    db = await asyncpg.connect(dsn)
    stack.push_async_callback(db.close)
    utils = await stack.enter_async_context(WorkerUtils(dsn))
    python = Here(dsn, utils)
    stack.push_async_callback(python.stop)
    return Shared(dsn, db, utils, node, python, Sql(db))


@pytest.fixture(
    params=[(version, by) for version in VERSIONS for by in (OURS, NPMS)],
    ids=lambda given: f"{given[0]} on {given[1]} schema",
)
async def shared(
    request: pytest.FixtureRequest, graphile_worker_databases: Databases
) -> AsyncIterator[Shared]:
    """For what depends on the functions in the schema: each release on a schema of either side."""
    async with AsyncExitStack() as stack:
        version, installed_by = request.param
        yield await _shared(graphile_worker_databases, version, installed_by, stack)


@pytest.fixture(params=VERSIONS)
async def beside(
    request: pytest.FixtureRequest, graphile_worker_databases: Databases
) -> AsyncIterator[Shared]:
    """For what depends on the workers: each release, on our schema."""
    async with AsyncExitStack() as stack:
        yield await _shared(graphile_worker_databases, request.param, OURS, stack)


@pytest.fixture
async def newest(graphile_worker_databases: Databases) -> AsyncIterator[Shared]:
    """For what does not depend on the release."""
    async with AsyncExitStack() as stack:
        yield await _shared(graphile_worker_databases, VERSIONS[0], OURS, stack)


@pytest.fixture
async def utils(database: str) -> AsyncIterator[WorkerUtils]:
    async with WorkerUtils(database) as utils:
        yield utils


@pytest.fixture
async def here(database: str, utils: WorkerUtils) -> AsyncIterator[Here]:
    """Our side alone, for those whose statements are made by hand."""
    here = Here(database, utils)
    yield here
    await here.stop()
