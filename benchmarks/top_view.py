"""Measure what one refresh of ``graphile-worker top`` costs, by the size of the queue.

Run it with ``make bench-top``. It uses an embedded server and prints the table of docs/production/top.md. One
job in ten is in one of 100 queues; one in a hundred has failed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import TYPE_CHECKING

import asyncpg

from graphile_worker import WorkerUtils
from graphile_worker.cli.live.loop import PAUSE_FACTOR
from graphile_worker.cli.live.snapshot import take_snapshot
from graphile_worker.testing import Databases
from graphile_worker.testing.servers import running_server

if TYPE_CHECKING:
    from collections.abc import Sequence

_SIZES = (0, 1_000, 100_000, 1_000_000)
_REFRESHES = 7
_INTERVAL = 2.0


async def measure(dsn: str, jobs: int) -> float:
    """Return the median number of seconds that a refresh takes."""
    connection = await asyncpg.connect(dsn)
    await connection.execute(
        f"""insert into graphile_worker._private_tasks (identifier)
        select 'task ' || n from generate_series(1, 10) n;
        insert into graphile_worker._private_job_queues (queue_name)
        select 'queue ' || n from generate_series(1, 100) n;
        insert into graphile_worker._private_jobs (task_id, job_queue_id, payload, attempts, last_error)
        select
          (select min(id) from graphile_worker._private_tasks) + n % 10,
          case when n % 10 = 0 then
            (select min(id) from graphile_worker._private_job_queues) + n / 10 % 100
          end,
          '{{}}',
          case when n % 100 = 0 then 25 else 0 end,
          case when n % 100 = 0 then repeat('oops ', 100) end
        from generate_series(1, {jobs}) n;
        """
    )
    await connection.execute("vacuum analyze graphile_worker._private_jobs")
    await connection.close()
    async with WorkerUtils(dsn) as utils:
        snapshot = await take_snapshot(utils, None)
        durations = []
        for _ in range(_REFRESHES):
            snapshot = await take_snapshot(utils, snapshot)
            durations.append(snapshot.duration)
    return statistics.median(durations)


async def print_table(server: str, sizes: Sequence[int]) -> None:
    """Measure each size, and print the table."""
    print("| jobs in the table | a refresh takes | interval | share of one session |\n|---|---|---|---|")
    databases = Databases(server)
    try:
        for jobs in sizes:
            async with databases.fresh() as dsn:
                duration = await measure(dsn, jobs)
            pause = max(_INTERVAL, PAUSE_FACTOR * duration)
            print(
                f"| {jobs:,} | {duration * 1000:.0f} ms | {pause:.1f} s | {duration / pause:.1%} |",
                flush=True,
            )
    finally:
        await databases.close()


def main() -> None:
    """Measure the sizes that the command line gives."""
    parser = argparse.ArgumentParser(description="Measure what a refresh of top costs.")
    parser.add_argument("--jobs", type=int, nargs="+", default=_SIZES, help="numbers of jobs in the table")
    sizes = parser.parse_args().jobs
    with running_server() as server:
        asyncio.run(print_table(server, sizes))


if __name__ == "__main__":
    main()
