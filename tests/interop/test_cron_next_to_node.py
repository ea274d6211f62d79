"""Python workers and Node workers with the same crontab schedule each minute once."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import asyncpg
import pytest

from graphile_worker.testing import Databases
from support import node
from support.waiting import until
from support.workers import EventRecorder, nothing, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

TASK = "module.exports = async () => {};\n"


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@asynccontextmanager
async def node_worker(dsn: str, folder: Path, crontab: str, version: str = "0.18.0") -> AsyncIterator[None]:
    """Run a Node worker with that crontab, and without a task for its jobs."""
    (folder / "tasks").mkdir(exist_ok=True)
    (folder / "tasks" / "none.js").write_text(TASK)
    (folder / "crontab").write_text(crontab)
    process = await asyncio.create_subprocess_exec(
        node.command(version),
        cwd=folder,
        env=node.environment(dsn),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


async def added(db: asyncpg.Connection) -> Counter[tuple[str, datetime]]:
    rows = await db.fetch("""
        select task.identifier, run_at from graphile_worker._private_jobs as job
        join graphile_worker._private_tasks as task on task.id = job.task_id""")
    return Counter((row["identifier"], row["run_at"]) for row in rows)


async def store_known_crontabs(db: asyncpg.Connection, *identifiers: str) -> datetime:
    """Store the schedules as known and last executed six hours ago; return that time."""
    since = (datetime.now(UTC) - timedelta(hours=6)).replace(second=0, microsecond=0)
    for identifier in identifiers:
        await db.execute(
            "insert into graphile_worker._private_known_crontabs values ($1, $2, $2)", identifier, since
        )
    return since


@pytest.mark.parametrize("version", ["0.18.0", "0.17.3"])
async def test_python_and_node_backfill_concurrently(
    db: asyncpg.Connection, database: str, tmp_path: Path, version: str
) -> None:
    crontab = "* * * * * a ?fill=1d\n*/7 * * * * b ?fill=1d {n: 1}\n"
    since = await store_known_crontabs(db, "a", "b")
    recorder = EventRecorder()
    async with (
        node_worker(database, tmp_path, crontab, version),
        running({"none": nothing}, database, recorder=recorder, crontab=crontab),
    ):
        started = (await recorder.until("cron:started")).start
        last = started.replace(second=0, microsecond=0)

        async def caught_up() -> bool:
            executed = await db.fetchval(
                "select last_execution from graphile_worker._private_known_crontabs where identifier = 'a'"
            )
            return bool(executed >= last)

        await until(caught_up, "the backfill is complete")
    found = await added(db)
    assert set(found.values()) == {1}
    minutes = {at for task, at in found if task == "a"}
    assert minutes >= {
        since + timedelta(minutes=n) for n in range(1, (last - since) // timedelta(minutes=1) + 1)
    }


async def test_python_does_not_repeat_the_backfill_of_node(
    db: asyncpg.Connection, database: str, tmp_path: Path
) -> None:
    """First a Node worker backfills, then a Python worker."""
    crontab = "* * * * * a ?fill=1d\n"
    await store_known_crontabs(db, "a")

    async def some_hundred() -> bool:
        return len(await added(db)) > 300

    async with node_worker(database, tmp_path, crontab):
        await until(some_hundred, "the Node worker backfills")
    recorder = EventRecorder()
    async with running({"none": nothing}, database, recorder=recorder, crontab=crontab):
        await recorder.until("cron:started")
    assert set((await added(db)).values()) == {1}


PAYLOADS = [
    "{hex: 0xFF, big: 12345678901234567890, exact: 9007199254740993, huge: 1e400, none: NaN, less: -0}",
    "{b: 1, a: 2, b: 3, '2': 0, '10': 1, '1': 2}",
    "{first: 1, _cron: 'mine', last: [1.0, 1e-7, .5]}",
    r"{text: 'a\u00e9\n\u2028', pair: '\ud83d\ude00', quote: '\"'}",
    "",
]


async def test_python_and_node_store_the_same_payload_text(
    db: asyncpg.Connection, database: str, tmp_path: Path
) -> None:
    def crontab(side: str) -> str:
        lines = [
            f"0 * * * * task{n} ?id={side}{n}&queue={side}&fill=1d {payload}\n"
            for n, payload in enumerate(PAYLOADS)
        ]
        return "".join(lines)

    await store_known_crontabs(
        db, *(f"{side}{n}" for side in ("node", "python") for n in range(len(PAYLOADS)))
    )

    async def stored(side: str) -> dict[tuple[str, datetime], str]:
        rows = await db.fetch(
            """select task.identifier, run_at, payload::text from graphile_worker._private_jobs as job
            join graphile_worker._private_tasks as task on task.id = job.task_id
            join graphile_worker._private_job_queues as queue on queue.id = job.job_queue_id
            where queue_name = $1""",
            side,
        )
        return {(row["identifier"], row["run_at"]): row["payload"] for row in rows}

    async def five_hours_by_node() -> bool:
        return len(await stored("node")) >= 5 * len(PAYLOADS)

    began = await db.fetchval("select now()")
    async with node_worker(database, tmp_path, crontab("node")):
        await until(five_hours_by_node, "the Node worker backfills")
    recorder = EventRecorder()
    async with running({"none": nothing}, database, recorder=recorder, crontab=crontab("python")):
        await recorder.until("cron:started")
    # Python also backfills jobs that have become due meanwhile; Node does not.
    by_node = {job: text for job, text in (await stored("node")).items() if job[1] <= began}
    by_python = await stored("python")
    assert len(by_node) >= 5 * len(PAYLOADS)
    assert {job: by_python[job] for job in by_node} == by_node


@pytest.mark.slow
async def test_python_and_node_schedule_each_minute_once(
    db: asyncpg.Connection, database: str, tmp_path: Path
) -> None:
    crontab = "* * * * * a\n* * * * * b ?jobKey=b\n"
    async with (
        node_worker(database, tmp_path, crontab),
        running({"none": nothing}, database, crontab=crontab),
        running({"none": nothing}, database, crontab=crontab),
    ):
        async with asyncio.timeout(200):
            while len({at for task, at in await added(db) if task == "a"}) < 2:
                await asyncio.sleep(1)
    assert set((await added(db)).values()) == {1}
