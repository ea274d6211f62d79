"""Fixtures: a server for the test run, a database for each test, and a check for leaked tasks."""

from __future__ import annotations

import asyncio
import gc
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

collect_ignore = ["django_project"]  # the tests of a project of its own: see test_contrib_django.py

# The duration of an example depends on the machine's load, so hypothesis does not check it.
settings.register_profile("without deadline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("without deadline")

# A shell that runs pytest with & or nohup makes it ignore these signals, and child processes would inherit
# that. With a handler here, child processes start with the default action, as on a terminal.
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests that use a database on the newest PostgreSQL, and in `make test-all` on the others too.

    Tests on older servers that `-m` deselects are not even created. They are more than half of all.
    """
    if "installation" not in metafunc.fixturenames:
        return
    default, *others = installations()
    params = [pytest.param(default, id=default.name)]
    if "not older" not in metafunc.config.getoption("markexpr"):
        params += [pytest.param(found, id=found.name, marks=pytest.mark.older) for found in others]
    metafunc.parametrize("installation", params, indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)  # before -m deselects tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the parameters of a test as slow, except for as many as its mark `sample` names.

    Those are the first, the last, and some evenly between them.
    """
    sampled: dict[tuple[str, object], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") is not None and isinstance(item, pytest.Function):
            server = item.callspec.params.get("installation")
            sampled.setdefault((item.nodeid.partition("[")[0], server), []).append(item)
    for group in sampled.values():
        [count] = next(group[0].iter_markers("sample")).args
        last = len(group) - 1
        kept = {round(position * last / max(count - 1, 1)) for position in range(count)}
        for position, item in enumerate(group):
            if position not in kept:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    # Otherwise every full collection in a test would visit the objects of all tests.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def installation(request: pytest.FixtureRequest) -> Installation:
    """Every PostgreSQL on this machine. Tests that use a database run on each."""
    found: Installation = request.param
    return found


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, installation: Installation) -> Iterator[str]:
    if installation.binaries is None:
        yield request.getfixturevalue("graphile_worker_server")
        return
    with running_server(binaries=installation.binaries) as dsn:
        yield dsn


@pytest.fixture(scope="session")
def databases(request: pytest.FixtureRequest, installation: Installation, server: str) -> Iterator[Databases]:
    """Databases on each PostgreSQL. Tests that do not depend on the server use the plugin's fixture."""
    if installation.binaries is None:
        yield request.getfixturevalue("graphile_worker_databases")
        return
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
    return "tested on: " + ", ".join([*found, f"Node {node.release() or 'not installed'}"])


@pytest.fixture(autouse=True)
async def no_leaked_tasks() -> AsyncIterator[None]:
    yield
    leaked = asyncio.all_tasks() - {asyncio.current_task()}
    assert not leaked, f"Tasks are still running: {leaked}"
