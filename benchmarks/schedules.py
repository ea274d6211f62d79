"""Measure how long a worker takes to backfill missed cron jobs: ``python -m benchmarks.schedules``.

A hundred recurring tasks are due every minute, have a backfill, and last ran a week ago. So a worker that
starts adds a million jobs. The benchmark measures the time that this takes.
"""

from __future__ import annotations

import argparse
import asyncio
from datetime import UTC, datetime, timedelta
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import asyncpg

from benchmarks.server import server
from graphile_worker import CronItem, Events, run, run_migrations

if TYPE_CHECKING:
    from collections.abc import Sequence

_INSERT_KNOWN = """
  insert into graphile_worker._private_known_crontabs (identifier, known_since)
  select 'item' || number, $2 from generate_series(1, $1) as number
"""


class Backfill(NamedTuple):
    """The jobs that a worker added, and the seconds that it took."""

    jobs: int
    seconds: float


async def measure_backfill(dsn: str, items: int, period: timedelta) -> Backfill:
    """Let a worker backfill a period."""
    await run_migrations(dsn)
    db = await asyncpg.connect(dsn)
    try:
        await db.execute(_INSERT_KNOWN, items, datetime.now(UTC) - period)
        moments: dict[str, float] = {}
        started, events = asyncio.Event(), Events()
        events.on("cron:starting", lambda _: moments.update(starting=perf_counter()))
        events.on("cron:started", lambda _: moments.update(started=perf_counter()))
        events.on("cron:started", lambda _: started.set())
        schedules = [
            CronItem("unknown_task", "* * * * *", identifier=f"item{number}", backfill=period)
            for number in range(1, items + 1)
        ]
        runner = await run({"other": _nothing}, dsn, cron_items=schedules, events=events)
        await started.wait()
        seconds = moments["started"] - moments["starting"]
        await runner.stop()
        jobs: int = await db.fetchval("select count(*) from graphile_worker._private_jobs")
    finally:
        await db.close()
    return Backfill(jobs, seconds)


async def _nothing(_payload: object) -> None: ...


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedules", description=__doc__)
    parser.add_argument("--items", type=int, default=100, metavar="N", help="number of recurring tasks [100]")
    parser.add_argument(
        "--hours", type=float, default=7 * 24, metavar="N", help="hours without a worker [168]"
    )
    options = parser.parse_args(arguments)
    with server() as dsn:
        backfill = asyncio.run(measure_backfill(dsn, options.items, timedelta(hours=options.hours)))
    print(f"{backfill.jobs:,} jobs of {options.items} recurring tasks in {backfill.seconds:.1f} s")


if __name__ == "__main__":
    main()
