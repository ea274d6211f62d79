"""Verbs on a large table: none sorts it, holds it in memory, or changes it in one transaction."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import pytest

from graphile_worker._client.bulk import BATCH, JobFilter
from graphile_worker._db.queries.bulk_update import in_order
from graphile_worker._db.queries.jobs import compose
from graphile_worker._db.sql_files import Schema, statements_for
from graphile_worker.testing import Databases
from support.commands import COMMAND, Cli

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = [pytest.mark.slow, pytest.mark.alone]
JOBS = 150_000
MEGABYTE = 1024 * 1024
SCHEMA = Schema()


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture
def cli(database: str, tmp_path: Path) -> Cli:
    return Cli(database, tmp_path)


@pytest.fixture
async def large(db: asyncpg.Connection) -> asyncpg.Connection:
    """Insert jobs of a hundred tasks and queues: a third failed, a third due, a third scheduled; analyze."""
    await db.execute(
        """insert into graphile_worker._private_tasks (identifier)
        select 'task' || n from generate_series(0, 99) as n;
        insert into graphile_worker._private_job_queues (queue_name)
        select 'queue' || n from generate_series(0, 99) as n"""
    )
    await db.execute(
        """insert into graphile_worker._private_jobs (task_id, job_queue_id, payload, attempts, run_at)
        select 1 + n % 100, case when n % 2 = 0 then 1 + n % 100 end, json_build_object('n', n),
          case when n % 3 = 0 then 25 else 0 end,
          now() + case when n % 3 = 1 then interval '1 day' else '0' end
        from generate_series(1, $1::integer) as n""",
        JOBS,
    )
    await db.execute("vacuum analyze graphile_worker._private_jobs")
    return db


async def plan(db: asyncpg.Connection, query: str, filters: Mapping[str, object]) -> str:
    """Return the query plan for a page."""
    statement, values = compose(SCHEMA, statements_for(SCHEMA, "jobs.sql")[query], filters)
    async with in_order(db, SCHEMA, filters):
        rows = await db.fetch(f"explain (costs off) {statement}", *values)
    return "\n".join(row[0] for row in rows)


class TestQueryPlans:
    async def test_pages_use_the_primary_key(self, large: asyncpg.Connection) -> None:
        for job_filter in (
            JobFilter(),
            JobFilter(state="failed"),
            JobFilter(state="ready"),
            JobFilter(state="scheduled"),
            JobFilter(state="running"),
            JobFilter(task="task7"),
            JobFilter(queue_name="queue7", state="failed"),
            JobFilter(locked_by="w"),
            JobFilter(search="nowhere"),
        ):
            filters = {**job_filter.parameters(), "after_id": 1000, "first_jobs": BATCH}
            for query, more in (("select_jobs", {}), ("select_ids", {"lock": True})):
                found = await plan(large, query, {**filters, **more})
                assert "using jobs_pkey1" in found, (job_filter, found)
                assert "Sort" not in found, (job_filter, found)

    async def test_named_jobs_use_an_index(self, large: asyncpg.Connection) -> None:
        found = await plan(large, "select_jobs", {**JobFilter(key="k").parameters(), "first_jobs": 10})
        assert "using jobs_key_key1" in found
        filters = {"having_id_any": list(range(BATCH)), "first_jobs": BATCH, "lock": True}
        assert "using jobs_pkey1" in await plan(large, "select_ids", filters)


async def measure_memory(
    cli: Cli, *arguments: str, output: Path | None = None, given: Path | None = None
) -> int:
    """Run a verb that succeeds, and return its peak memory in bytes."""
    program = f"""
import resource, subprocess, sys
done = subprocess.run({[COMMAND, *arguments]!r}, stdin=open({str(given or "/dev/null")!r}),
    stdout=open({str(output or "/dev/null")!r}, "w"))
print(done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        stdout=asyncio.subprocess.PIPE,
        env=cli.environment,
        cwd=cli.folder,
    )
    out, _ = await process.communicate()
    code, kilobytes = map(int, out.split())
    assert code == 0
    return kilobytes * (1 if sys.platform == "darwin" else 1024)


class TestVerbsOnLargeQueue:
    @pytest.mark.usefixtures("large")
    async def test_verbs_work_on_a_large_queue(self, cli: Cli, tmp_path: Path) -> None:
        small = await measure_memory(cli, "list", "--limit", "10")
        for arguments in (["list"], ["list", "--json", "--state", "failed"], ["list", "--search", "99"]):
            assert await measure_memory(cli, *arguments) < small + 50 * MEGABYTE, arguments
        exported = tmp_path / "jobs.jsonl"
        assert await measure_memory(cli, "export", output=exported) < small + 50 * MEGABYTE
        assert (await cli.json("stats"))["total"] == JOBS
        assert len(await cli.json("queues")) == 100
        await cli.out("workers")
        assert await cli.out("retry", "--state", "failed", "--yes") == f"Will retry {JOBS // 3:,} jobs.\n"
        await cli.out("fail", "--task", "task7", "--yes")
        await cli.out("reschedule", "--queue", "queue8", "--run-at", "1h", "--yes")
        assert await cli.out("cancel", "--task", "task9", "--yes") == f"Cancelled {JOBS // 100:,} jobs.\n"
        ids = await cli.out("list", "--ids", "--task", "task11")
        assert await cli.out("complete", "-", "--yes", given=ids) == f"Completed {JOBS // 100:,} jobs.\n"
        assert f"Removed {JOBS // 50:,} jobs, " in await cli.out("cleanup", "failed-jobs", "--yes")
        assert await cli.out("remove", "--all", "--yes") == f"Removed {JOBS - 3 * JOBS // 100:,} jobs.\n"
        assert await measure_memory(cli, "import", "-", given=exported) < small + 50 * MEGABYTE
        assert (await cli.json("stats"))["total"] == JOBS
        with exported.open() as lines:
            first = json.loads(next(lines))
        assert first["payload"] == {"n": 1}
