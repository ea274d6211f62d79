"""A limit across worker processes that are killed, frozen and restarted, while it is lowered and raised."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from graphile_worker import WorkerUtils
from support.jobs import count
from support.limited import LEDGER
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import asyncpg

PROGRAM = Path(__file__).parent / "support" / "limited.py"
JOBS = 150
PATIENCE = 120.0


class Fleet:
    """Worker processes, and what the ledger says about their jobs."""

    def __init__(self, dsn: str, db: asyncpg.Connection) -> None:
        self._dsn, self._db = dsn, db
        self._chance = random.Random(5)
        self.processes: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        self.processes.append(
            await asyncio.create_subprocess_exec(
                sys.executable, str(PROGRAM), self._dsn, stdin=asyncio.subprocess.DEVNULL
            )
        )

    async def kill(self) -> None:
        """Kill one worker with its jobs, and start another one."""
        victim = self.processes.pop(self._chance.randrange(len(self.processes)))
        victim.kill()
        await victim.wait()
        await self._db.execute(
            "update ledger set ended = clock_timestamp() where pid = $1 and ended is null", victim.pid
        )
        await self.start()

    async def freeze(self) -> None:
        """Freeze one worker for less than its lease. Its jobs still count."""
        victim = self._chance.choice(self.processes)
        os.kill(victim.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(0.7)
        finally:
            os.kill(victim.pid, signal.SIGCONT)

    async def restart(self) -> None:
        """Stop one worker properly, and start another one."""
        victim = self.processes.pop(0)
        victim.terminate()
        await victim.wait()
        await self.start()

    async def now(self) -> Any:
        return await self._db.fetchval("select clock_timestamp()")

    async def until_runs(self, number: int) -> None:
        before = await self._db.fetchval("select count(*) from ledger")

        async def enough() -> bool:
            return bool(await self._db.fetchval("select count(*) from ledger") >= before + number)

        await until(enough, "jobs run", within=PATIENCE)

    async def peak(self, since: Any, until: Any) -> int:
        """Return how many jobs ran at once at most."""
        found: int = await self._db.fetchval(
            """with change as (
              select greatest(started, $1) as at, 1 as step from ledger
              where started <= $2 and coalesce(ended, 'infinity') > $1
              union all
              select ended, -1 from ledger where ended between $1 and $2
            )
            select coalesce(max(running), 0)
            from (select sum(step) over (order by at, step) as running from change) as counted""",
            since,
            until,
        )
        return found


@asynccontextmanager
async def fleet_of(dsn: str, db: asyncpg.Connection, size: int) -> AsyncIterator[Fleet]:
    await db.execute(LEDGER)
    fleet = Fleet(dsn, db)
    try:
        for _ in range(size):
            await fleet.start()
        yield fleet
    finally:
        for process in fleet.processes:
            process.kill()
            await process.wait()


@pytest.mark.slow
async def test_limit_is_never_exceeded_by_processes_that_die_freeze_and_restart(
    database: str, db: asyncpg.Connection
) -> None:
    async with WorkerUtils(database) as utils, fleet_of(database, db, 3) as fleet:
        await db.execute(
            f"select graphile_worker.add_job(task) from unnest(array['charge', 'refund']) as task,"
            f" generate_series(1, {JOBS})"
        )
        await fleet.until_runs(20)
        started = await fleet.now()
        for disturb in (fleet.kill, fleet.freeze, fleet.restart, fleet.kill):
            await disturb()
            await fleet.until_runs(20)
        lowered = await fleet.now()
        await utils.set_limit("stripe", 2)

        async def is_drained() -> bool:
            [limit] = await utils.limits()
            return limit.held <= 2

        await until(is_drained, "enough jobs have ended", within=PATIENCE)
        drained = await fleet.now()
        await fleet.until_runs(20)
        await fleet.kill()
        await fleet.until_runs(20)
        raised = await fleet.now()
        await utils.set_limit("stripe", 6)

        async def is_empty() -> bool:
            return await count(db) == 0

        await until(is_empty, "all jobs have run", within=PATIENCE)
        ended = await fleet.now()
        assert await fleet.peak(started, lowered) <= 4
        assert await fleet.peak(drained, raised) <= 2
        assert await fleet.peak(raised, ended) <= 6
        assert await fleet.peak(started, ended) > 2, "the limit was used"
        [limit] = await utils.limits()
        assert (limit.concurrency, limit.waiting) == (6, 0)

        async def shares_are_free() -> bool:
            return (await utils.limits())[0].held == 0

        await until(shares_are_free, "the shares of killed workers are free", within=PATIENCE)
