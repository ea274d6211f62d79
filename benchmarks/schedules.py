"""How long a worker takes to make up for what it missed: ``python -m benchmarks.schedules``.

Recurring tasks that are due each minute, with ``fill``, whose last run was a week ago: a hundred of them have
a million jobs. Measured is what a worker does about them when it starts.
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

_KNOWN = """
  insert into graphile_worker._private_known_crontabs (identifier, known_since)
  select 'item' || number, $2 from generate_series(1, $1) as number
"""


class Filled(NamedTuple):
    """What a worker has added, and in how many seconds."""

    jobs: int
    seconds: float


async def fill(dsn: str, items: int, period: timedelta) -> Filled:
    """Let a worker make up for that period."""
    await run_migrations(dsn)
    db = await asyncpg.connect(dsn)
    try:
        await db.execute(_KNOWN, items, datetime.now(UTC) - period)
        moments: dict[str, float] = {}
        started, events = asyncio.Event(), Events()
        events.on("cron:starting", lambda _: moments.update(starting=perf_counter()))
        events.on("cron:started", lambda _: moments.update(started=perf_counter()))
        events.on("cron:started", lambda _: started.set())
        schedules = [
            CronItem("nobody_has_it", "* * * * *", identifier=f"item{number}", fill=period)
            for number in range(1, items + 1)
        ]
        runner = await run({"other": _nothing}, dsn, cron_items=schedules, events=events)
        await started.wait()
        seconds = moments["started"] - moments["starting"]
        await runner.stop()
        jobs: int = await db.fetchval("select count(*) from graphile_worker._private_jobs")
    finally:
        await db.close()
    return Filled(jobs, seconds)


async def _nothing(_payload: object) -> None: ...


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedules", description=__doc__)
    parser.add_argument("--items", type=int, default=100, metavar="N", help="how many recurring tasks")
    parser.add_argument("--hours", type=float, default=7 * 24, metavar="N", help="how long nobody was there")
    options = parser.parse_args(arguments)
    with server() as dsn:
        filled = asyncio.run(fill(dsn, options.items, timedelta(hours=options.hours)))
    print(f"{filled.jobs:,} jobs of {options.items} recurring tasks in {filled.seconds:.1f} s")


if __name__ == "__main__":
    main()
