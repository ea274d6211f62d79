"""Ours and npm's workers with one crontab: each minute once."""

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
from support.workers import Heard, nothing, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

TASK = "module.exports = async () => {};\n"


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@asynccontextmanager
async def nodes_worker(dsn: str, folder: Path, crontab: str, version: str = "0.18.0") -> AsyncIterator[None]:
    """npm's worker, with that crontab, and with no job that it could run."""
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


async def forget_since(db: asyncpg.Connection, *identifiers: str) -> datetime:
    """Let the schedules be known, and not had for six hours."""
    since = (datetime.now(UTC) - timedelta(hours=6)).replace(second=0, microsecond=0)
    for identifier in identifiers:
        await db.execute(
            "insert into graphile_worker._private_known_crontabs values ($1, $2, $2)", identifier, since
        )
    return since


@pytest.mark.parametrize("version", ["0.18.0", "0.17.3"])
async def test_both_fill_at_the_same_time(
    db: asyncpg.Connection, database: str, tmp_path: Path, version: str
) -> None:
    crontab = "* * * * * a ?fill=1d\n*/7 * * * * b ?fill=1d {n: 1}\n"
    since = await forget_since(db, "a", "b")
    heard = Heard()
    async with (
        nodes_worker(database, tmp_path, crontab, version),
        running({"none": nothing}, database, heard=heard, crontab=crontab),
    ):
        started = (await heard.until("cron:started")).start
        last = started.replace(second=0, microsecond=0)

        async def caught_up() -> bool:
            had = await db.fetchval(
                "select last_execution from graphile_worker._private_known_crontabs where identifier = 'a'"
            )
            return bool(had >= last)

        await until(caught_up, "all is filled")
    found = await added(db)
    assert set(found.values()) == {1}
    minutes = {at for task, at in found if task == "a"}
    assert minutes >= {
        since + timedelta(minutes=n) for n in range(1, (last - since) // timedelta(minutes=1) + 1)
    }


async def test_what_one_has_had_the_other_leaves(
    db: asyncpg.Connection, database: str, tmp_path: Path
) -> None:
    """First npm's, which needs a moment; then ours."""
    crontab = "* * * * * a ?fill=1d\n"
    await forget_since(db, "a")

    async def some_hundred() -> bool:
        return len(await added(db)) > 300

    async with nodes_worker(database, tmp_path, crontab):
        await until(some_hundred, "npm's worker fills")
    heard = Heard()
    async with running({"none": nothing}, database, heard=heard, crontab=crontab):
        await heard.until("cron:started")
    assert set((await added(db)).values()) == {1}


PAYLOADS = [
    "{hex: 0xFF, big: 12345678901234567890, exact: 9007199254740993, huge: 1e400, none: NaN, less: -0}",
    "{b: 1, a: 2, b: 3, '2': 0, '10': 1, '1': 2}",
    "{first: 1, _cron: 'mine', last: [1.0, 1e-7, .5]}",
    r"{text: 'a\u00e9\n\u2028', pair: '\ud83d\ude00', quote: '\"'}",
    "",
]


async def test_what_is_stored_is_the_same_text(db: asyncpg.Connection, database: str, tmp_path: Path) -> None:
    def crontab(who: str) -> str:
        lines = [
            f"0 * * * * task{place} ?id={who}{place}&queue={who}&fill=1d {payload}\n"
            for place, payload in enumerate(PAYLOADS)
        ]
        return "".join(lines)

    await forget_since(db, *(f"{who}{place}" for who in ("npm", "ours") for place in range(len(PAYLOADS))))

    async def stored(who: str) -> dict[tuple[str, datetime], str]:
        rows = await db.fetch(
            """select task.identifier, run_at, payload::text from graphile_worker._private_jobs as job
            join graphile_worker._private_tasks as task on task.id = job.task_id
            join graphile_worker._private_job_queues as queue on queue.id = job.job_queue_id
            where queue_name = $1""",
            who,
        )
        return {(row["identifier"], row["run_at"]): row["payload"] for row in rows}

    async def five_hours_of_npms() -> bool:
        return len(await stored("npm")) >= 5 * len(PAYLOADS)

    began = await db.fetchval("select now()")
    async with nodes_worker(database, tmp_path, crontab("npm")):
        await until(five_hours_of_npms, "npm's worker fills")
    heard = Heard()
    async with running({"none": nothing}, database, heard=heard, crontab=crontab("ours")):
        await heard.until("cron:started")
    # What comes due meanwhile is not filled by npm's, and is by ours.
    theirs = {which: text for which, text in (await stored("npm")).items() if which[1] <= began}
    ours = await stored("ours")
    assert len(theirs) >= 5 * len(PAYLOADS)
    assert {which: ours[which] for which in theirs} == theirs


@pytest.mark.slow
async def test_they_take_turns_minute_by_minute(
    db: asyncpg.Connection, database: str, tmp_path: Path
) -> None:
    crontab = "* * * * * a\n* * * * * b ?jobKey=b\n"
    async with (
        nodes_worker(database, tmp_path, crontab),
        running({"none": nothing}, database, crontab=crontab),
        running({"none": nothing}, database, crontab=crontab),
    ):
        async with asyncio.timeout(200):
            while len({at for task, at in await added(db) if task == "a"}) < 2:
                await asyncio.sleep(1)
    assert set((await added(db)).values()) == {1}
