"""Fixtures for pytest, which loads this module by itself. Nothing else is imported until a test uses one.

They are plain fixtures, so they work with pytest-asyncio, with anyio, and without either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphile_worker.testing.databases import Databases


@pytest.fixture(scope="session")
def graphile_worker_server() -> Iterator[str]:
    """Yield the connection string of a test server; redefine this fixture to use another server."""
    from graphile_worker.testing.servers import running_server  # noqa: PLC0415

    with running_server() as dsn:
        yield dsn


@pytest.fixture(scope="session")
def graphile_worker_databases(graphile_worker_server: str) -> Iterator[Databases]:
    """Yield an object that creates databases on the test server."""
    from graphile_worker.testing.databases import Databases  # noqa: PLC0415

    with Databases(graphile_worker_server) as databases:
        yield databases


@pytest.fixture
def graphile_worker_dsn(graphile_worker_databases: Databases) -> Iterator[str]:
    """Yield the connection string of a new database with the schema installed, for one test."""
    with graphile_worker_databases.fresh_sync() as dsn:
        yield dsn
