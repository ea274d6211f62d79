"""Migrations by one side while workers of the other side run."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import asyncpg
import pytest

from graphile_worker import WorkerUtils, run_migrations
from support import node
from support.peer import NodeError, started
from support.programs import program
from support.python_peer import PythonPeer
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from graphile_worker.testing import Databases
    from interop.conftest import Shared

BREAKING = """
    insert into graphile_worker.migrations (id, breaking) values (21, true);
    select pg_notify('worker:migrate', '{"migrationNumber": 21, "breaking": true}')"""


@pytest.fixture
async def empty(graphile_worker_databases: Databases) -> AsyncIterator[str]:
    async with graphile_worker_databases.fresh(empty=True) as dsn:
        yield dsn


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "here.py").write_text("def here(payload):\n    print('ran', payload, flush=True)\n")
    return tmp_path


def command(dsn: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "graphile_worker", "-c", dsn, *arguments]


@pytest.mark.sample(1)
@pytest.mark.parametrize("version", ["0.18.0", "0.17.3"])
async def test_both_workers_start_concurrently_on_an_empty_database(empty: str, version: str) -> None:
    async with AsyncExitStack() as stack:
        peer = await stack.enter_async_context(started(version, empty))
        utils = await stack.enter_async_context(WorkerUtils(empty))
        python_peer = PythonPeer(empty, utils)
        stack.push_async_callback(python_peer.stop)
        await asyncio.gather(peer.start("see"), python_peer.start("hold"))
        await peer.until("job:success", id=await python_peer.add("see"))
        job_id = await peer.add("hold")
        await python_peer.until_started(job_id)
        await python_peer.release(job_id)
        await python_peer.recorder.until("job:complete")


async def test_breaking_migration_stops_python_and_node_workers_with_57(newest: Shared, folder: Path) -> None:
    await newest.node.start("see")
    async with program(*command(newest.dsn), folder=folder, with_errors=True) as worker:
        await worker.until("Worker connected")
        await newest.db.execute(BREAKING)
        assert await worker.end() == 57
        assert "revision 21" in worker.text
        assert "Traceback" not in worker.text
    assert (await newest.node.until("stopped"))["code"] == 57


@pytest.mark.sample(1)
@pytest.mark.parametrize("version", ["0.18.0", "0.17.3"])
async def test_node_installing_another_schema_does_not_stop_python_workers(
    newest: Shared, folder: Path, version: str
) -> None:
    """Node announces revisions 1 to 20, some of them as breaking, which stops its own workers."""
    await newest.node.start("see")
    async with program(*command(newest.dsn), folder=folder, with_errors=True) as worker:
        await worker.until("Worker connected")
        await node.install(version, newest.dsn, schema="another")
        assert (await newest.node.until("stopped"))["code"] == 57
        await newest.sql.add("here", 7)
        await worker.until("ran 7")
        assert worker.process.returncode is None


async def test_python_installing_another_schema_does_not_stop_node_workers(mixed: Shared) -> None:
    await mixed.node.start("see")
    await run_migrations(mixed.dsn, schema="another")
    job_id = await mixed.python.add("see")
    await mixed.node.until("job:success", id=job_id)
    assert not any(sent["what"] == "stopped" for sent in mixed.node.messages)


async def test_revision_18_is_rejected_with_a_next_step_and_its_worker_continues(
    empty: str, folder: Path
) -> None:
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(started("0.16.6", empty))
        await old.start("see")
        worker = await stack.enter_async_context(program(*command(empty), folder=folder, with_errors=True))
        assert await worker.end() == 1
        assert "revision 18" in worker.text
        assert "npx graphile-worker@0.18" in worker.text
        assert "Traceback" not in worker.text

        job = await old.utils("addJob", "see", {"n": 1}, {})
        assert (await old.until("seen"))["job"]["id"] == job["id"]


async def test_node_016_rejects_a_schema_installed_by_python(newest: Shared) -> None:
    async with started("0.16.6", newest.dsn) as old:
        with pytest.raises(NodeError):
            await old.start("see")


async def test_node_016_rejects_a_schema_started_by_the_rust_port(empty: str) -> None:
    """The Rust port's revision 19 has other contents, and old Node workers accept it."""
    await node.install("0.16.6", empty)
    db = await asyncpg.connect(empty)
    await db.execute("insert into graphile_worker.migrations (id, breaking) values (19, false)")
    await db.close()
    async with started("0.16.6", empty) as old:
        await old.start("see")
        await old.stop()
        await run_migrations(empty)
        with pytest.raises(NodeError):
            await old.start("see")


async def test_migration_from_19_to_20_while_a_node_017_worker_runs(empty: str) -> None:
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(started("0.17.3", empty))
        await old.start("hold", "see", concurrency=2)
        held = await old.add("hold", queue_name="q")
        await old.until_started(held)
        db = await asyncpg.connect(empty)
        stack.push_async_callback(db.close)
        revision = "select max(id) from graphile_worker.migrations"
        assert await db.fetchval(revision) == 19
        notifications: asyncio.Queue[str] = asyncio.Queue()
        await db.add_listener("worker:migrate", lambda *message: notifications.put_nowait(message[3]))

        utils = await stack.enter_async_context(WorkerUtils(empty))
        python_peer = PythonPeer(empty, utils)
        stack.push_async_callback(python_peer.stop)
        await python_peer.start("fail")  # adopts the schema

        assert json.loads(await notifications.get()) == {"migrationNumber": 20, "breaking": False}
        await db.reset()
        assert await db.fetchval(revision) == 20
        behind = await python_peer.add("see", "behind", queue_name="q")
        elsewhere = await old.add("see", "elsewhere", job_key="k")
        await old.until("job:success", id=elsewhere)
        await old.release(held)
        await old.until("job:success", id=behind)
        assert not any(sent["what"] == "stopped" for sent in old.messages)

        async def is_empty() -> bool:
            return not await utils.list_jobs()

        await until(is_empty, "all jobs are recorded")
