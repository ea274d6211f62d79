"""Fixtures for one queue that Node workers and Python workers share, installed by either."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from graphile_worker import WorkerUtils, run_migrations
from support.peer import Peer, started
from support.python_peer import PythonPeer, Sql

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from graphile_worker.testing import Databases

VERSIONS = ["0.18.0", "0.17.3"]
PYTHON, NODE = "Python's", "Node's"


@dataclass(frozen=True)
class Shared:
    """A database, with a Node worker and a Python worker."""

    dsn: str
    db: asyncpg.Connection
    utils: WorkerUtils
    node: Peer
    python: PythonPeer
    sql: Sql

    def side(self, name: str) -> Any:
        """Return "node", "python" or "sql" by name; their common methods have no declared type."""
        return getattr(self, name)


async def _shared(databases: Databases, version: str, installed_by: str, stack: AsyncExitStack) -> Shared:
    dsn = await stack.enter_async_context(databases.fresh(empty=installed_by == NODE))
    node = await stack.enter_async_context(started(version, dsn))
    if installed_by == NODE:
        await node.request("migrate")
        await run_migrations(dsn)
    db = await asyncpg.connect(dsn)
    stack.push_async_callback(db.close)
    utils = await stack.enter_async_context(WorkerUtils(dsn))
    python = PythonPeer(dsn, utils)
    stack.push_async_callback(python.stop)
    return Shared(dsn, db, utils, node, python, Sql(db))


@pytest.fixture(
    params=[(version, by) for version in VERSIONS for by in (PYTHON, NODE)],
    ids=lambda case: f"{case[0]} on {case[1]} schema",
)
async def shared(
    request: pytest.FixtureRequest, graphile_worker_databases: Databases
) -> AsyncIterator[Shared]:
    """Yield each Node release on a schema installed by either side, for tests of the SQL functions."""
    async with AsyncExitStack() as stack:
        version, installed_by = request.param
        yield await _shared(graphile_worker_databases, version, installed_by, stack)


@pytest.fixture(params=VERSIONS)
async def mixed(
    request: pytest.FixtureRequest, graphile_worker_databases: Databases
) -> AsyncIterator[Shared]:
    """Yield each Node release on a schema installed by Python, for tests of the workers."""
    async with AsyncExitStack() as stack:
        yield await _shared(graphile_worker_databases, request.param, PYTHON, stack)


@pytest.fixture
async def newest(graphile_worker_databases: Databases) -> AsyncIterator[Shared]:
    """Yield the newest Node release, for tests that do not depend on the release."""
    async with AsyncExitStack() as stack:
        yield await _shared(graphile_worker_databases, VERSIONS[0], PYTHON, stack)


@pytest.fixture
async def utils(database: str) -> AsyncIterator[WorkerUtils]:
    async with WorkerUtils(database) as utils:
        yield utils


@pytest.fixture
async def python_peer(database: str, utils: WorkerUtils) -> AsyncIterator[PythonPeer]:
    """Yield a Python worker without a Node worker."""
    python_peer = PythonPeer(database, utils)
    yield python_peer
    await python_peer.stop()
