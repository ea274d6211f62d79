"""A server for the run, a database for the test, and no test that leaves something behind."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import pytest
from hypothesis import HealthCheck, settings

from graphile_worker.testing import Databases, running_server
from graphile_worker.testing.servers import fastest_folder
from support import node
from support.postgres import Installation, installations

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

# How long an example takes says more of what else the machine does than of what is tested.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

# Whoever runs us in the background, by & or nohup, has us ignore these, and what we start would too. What is
# handled here it has as on a terminal.
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)


def _by_age() -> list[object]:
    """The newest PostgreSQL in `make test`; the others take their time in `make test-all`."""
    default, *others = installations()
    return [
        pytest.param(default, id=default.name),
        *(pytest.param(found, id=found.name, marks=pytest.mark.older) for found in others),
    ]


@pytest.fixture(scope="session", params=_by_age())
def installation(request: pytest.FixtureRequest) -> Installation:
    """Every PostgreSQL that is found here: what uses a database is tested on each."""
    found: Installation = request.param
    return found


@pytest.fixture(scope="session")
def server(installation: Installation) -> Iterator[str]:
    with running_server(binaries=installation.binaries) as dsn:
        yield dsn


@pytest.fixture(scope="session")
def databases(server: str) -> Iterator[Databases]:
    """A module whose tests are about Python alone has those of the plugin instead, on one PostgreSQL."""
    with Databases(server) as databases:
        yield databases


@pytest.fixture
async def database(databases: Databases) -> AsyncIterator[str]:
    """The connection string of a fresh database with the schema installed."""
    async with databases.fresh() as dsn:
        yield dsn


@pytest.fixture
async def empty_database(databases: Databases) -> AsyncIterator[str]:
    """The connection string of a fresh database without the schema."""
    async with databases.fresh(empty=True) as dsn:
        yield dsn


@pytest.fixture
async def db(database: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection to a fresh database with the schema installed."""
    connection = await asyncpg.connect(database)
    yield connection
    await connection.close()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for an embedded server: short enough for a socket, open to the server's user."""
    folder = Path(tempfile.mkdtemp(prefix="gw-", dir=fastest_folder()))
    folder.chmod(0o755)
    yield folder / "pg"
    shutil.rmtree(folder, ignore_errors=True)


def pytest_report_header() -> str:
    found = [one.name for one in installations()]
    return "tested on: " + ", ".join([*found, f"Node {node.release() or 'that is not there'}"])


@pytest.fixture(autouse=True)
async def no_leaked_tasks() -> AsyncIterator[None]:
    yield
    leaked = asyncio.all_tasks() - {asyncio.current_task()}
    assert not leaked, f"Tasks were left running: {leaked}"
