"""The databases and servers of `graphile_worker.testing`, and the leak checks of this test suite."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import asyncpg
import pytest

from graphile_worker.testing import Databases, running_server
from graphile_worker.testing.servers import fastest_folder
from support.jobs import add
from support.postgres import ROOT

if TYPE_CHECKING:
    from pathlib import Path


async def schemas(dsn: str) -> set[str]:
    connection = await asyncpg.connect(dsn)
    rows = await connection.fetch("select nspname from pg_namespace where nspname !~ '^(pg_|information_)'")
    await connection.close()
    return {row["nspname"] for row in rows} - {"public"}


async def test_fresh_database_has_the_schema_unless_empty(databases: Databases) -> None:
    async with databases.fresh() as dsn, databases.fresh(empty=True) as empty:
        assert await schemas(dsn) == {"graphile_worker"}
        assert await schemas(empty) == set()


async def test_fresh_databases_are_isolated(databases: Databases) -> None:
    for _ in range(2):
        async with databases.fresh() as dsn:
            connection = await asyncpg.connect(dsn)
            assert (await add(connection))["id"] == 1
            await connection.close()


async def test_leaked_connection_fails_the_test_and_is_named(databases: Databases) -> None:
    fresh = databases.fresh()
    leaked = await asyncpg.connect(await fresh.__aenter__(), server_settings={"application_name": "mine"})
    await leaked.fetchval("select 'the last thing it did'")
    with pytest.raises(AssertionError, match=r"'mine' idle: select 'the last thing it did'"):
        await fresh.__aexit__(None, None, None)
    leaked.terminate()


def test_databases_work_without_an_event_loop(graphile_worker_server: str) -> None:
    with Databases(graphile_worker_server) as databases:
        with databases.fresh_sync() as dsn, databases.fresh_sync(empty=True) as empty:
            assert asyncio.run(schemas(dsn)) == {"graphile_worker"}
            assert asyncio.run(schemas(empty)) == set()
        prefix = databases._prefix
    assert asyncio.run(count_databases(graphile_worker_server, prefix)) == 0


async def count_databases(server: str, prefix: str) -> int:
    connection = await asyncpg.connect(server)
    left: int = await connection.fetchval(
        "select count(*) from pg_database where starts_with(datname, $1)", prefix
    )
    await connection.close()
    return left


async def test_concurrent_callers_share_one_template(server: str) -> None:
    databases = Databases(server)

    async def use() -> set[str]:
        async with databases.fresh() as dsn:
            return await schemas(dsn)

    assert await asyncio.gather(*(use() for _ in range(5))) == [{"graphile_worker"}] * 5
    await databases.close()
    assert await count_databases(server, databases._prefix) == 0


async def test_databases_use_the_configured_schema_name(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHILE_WORKER_SCHEMA", "from_env")
    for databases, name in ((Databases(server), "from_env"), (Databases(server, schema="mine"), "mine")):
        async with databases.fresh() as dsn:
            assert await schemas(dsn) == {name}
        await databases.close()


def test_embedded_test_server_is_removed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_DATABASE_URL", raising=False)
    with running_server() as dsn:
        # Other test runs on this machine create such folders too.
        [folder] = [found for found in fastest_folder().glob("graphile-worker-*") if str(found) in dsn]
    assert not folder.exists()


def test_test_database_url_names_another_server(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_DATABASE_URL", "postgresql://somewhere/else")
    with running_server() as dsn:
        assert dsn == "postgresql://somewhere/else"
    monkeypatch.setenv("TEST_DATABASE_URL", f"embedded:{short_folder}")
    with running_server() as dsn:
        assert str(short_folder) in dsn
    assert short_folder.exists()


def test_leaked_asyncio_task_fails_the_test(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_leak.py").write_text(
        textwrap.dedent("""
            import asyncio

            async def test_leaves_a_task_running():
                asyncio.create_task(asyncio.sleep(60))
        """)
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-o",
            "asyncio_mode=auto",
            "-o",
            f"pythonpath={ROOT / 'tests'} {ROOT}",
            tmp_path,
        ],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
    )
    assert "no_leaked_tasks" in done.stdout
    assert "1 error" in done.stdout
