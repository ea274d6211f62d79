"""Installers and migrations of one side while the other is at work."""

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
from support.here import Here
from support.peer import NodeError, started
from support.programs import program
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


@pytest.mark.parametrize("version", ["0.18.0", "0.17.3"])
async def test_workers_of_both_sides_that_start_at_once_on_an_empty_database_both_work(
    empty: str, version: str
) -> None:
    async with AsyncExitStack() as stack:
        peer = await stack.enter_async_context(started(version, empty))
        utils = await stack.enter_async_context(WorkerUtils(empty))
        here = Here(empty, utils)
        stack.push_async_callback(here.stop)
        await asyncio.gather(peer.start("see"), here.start("hold"))
        await peer.until("job:success", id=await here.add("see"))
        job_id = await peer.add("hold")
        await here.until_begun(job_id)
        await here.release(job_id)
        await here.heard.until("job:complete")


async def test_a_breaking_migration_ends_ours_with_57_and_npms_with_it(newest: Shared, folder: Path) -> None:
    await newest.node.start("see")
    async with program(*command(newest.dsn), folder=folder, with_errors=True) as worker:
        await worker.until("Worker connected")
        await newest.db.execute(BREAKING)
        assert await worker.end() == 57
        assert "revision 21" in worker.text
        assert "Traceback" not in worker.text
    assert (await newest.node.until("stopped"))["code"] == 57


@pytest.mark.parametrize("version", ["0.18.0", "0.17.3"])
async def test_that_node_installs_another_schema_in_the_same_database_does_not_stop_ours(
    newest: Shared, folder: Path, version: str
) -> None:
    """It announces revisions 1 to 20, some of them as breaking; and that stops npm's own workers."""
    await newest.node.start("see")
    async with program(*command(newest.dsn), folder=folder, with_errors=True) as worker:
        await worker.until("Worker connected")
        await node.install(version, newest.dsn, schema="another")
        assert (await newest.node.until("stopped"))["code"] == 57
        await newest.sql.add("here", 7)
        await worker.until("ran 7")
        assert worker.process.returncode is None


async def test_our_installer_stops_nobody_in_another_schema(beside: Shared) -> None:
    await beside.node.start("see")
    await run_migrations(beside.dsn, schema="another")
    job_id = await beside.python.add("see")
    await beside.node.until("job:success", id=job_id)
    assert not any(one["what"] == "stopped" for one in beside.node.told)


async def test_revision_18_is_refused_with_what_to_do_and_its_worker_goes_on(
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


async def test_a_worker_of_016_refuses_what_we_installed(newest: Shared) -> None:
    async with started("0.16.6", newest.dsn) as old:
        with pytest.raises(NodeError):
            await old.start("see")


async def test_and_what_the_rust_port_had_begun(empty: str) -> None:
    """Under the number 19 it has something else, which keeps nobody out."""
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


async def test_revision_19_is_brought_to_20_while_a_worker_of_017_keeps_running(empty: str) -> None:
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(started("0.17.3", empty))
        await old.start("hold", "see", concurrency=2)
        held = await old.add("hold", queue_name="q")
        await old.until_begun(held)
        db = await asyncpg.connect(empty)
        stack.push_async_callback(db.close)
        revision = "select max(id) from graphile_worker.migrations"
        assert await db.fetchval(revision) == 19
        heard: asyncio.Queue[str] = asyncio.Queue()
        await db.add_listener("worker:migrate", lambda *message: heard.put_nowait(message[3]))

        utils = await stack.enter_async_context(WorkerUtils(empty))
        here = Here(empty, utils)
        stack.push_async_callback(here.stop)
        await here.start("fail")  # adopts it

        assert json.loads(await heard.get()) == {"migrationNumber": 20, "breaking": False}
        await db.reset()
        assert await db.fetchval(revision) == 20
        behind = await here.add("see", "behind", queue_name="q")
        elsewhere = await old.add("see", "elsewhere", job_key="k")
        await old.until("job:success", id=elsewhere)
        await old.release(held)
        await old.until("job:success", id=behind)
        assert not any(one["what"] == "stopped" for one in old.told)

        async def is_empty() -> bool:
            return not await utils.list_jobs()

        await until(is_empty, "all of it is recorded")
