"""What a look of ``graphile-worker top`` costs, by the size of the queue: ``python -m benchmarks.looks``.

On an embedded server; prints the table of docs/top.md. One job in ten is in one of 100 queues, one in a
hundred has failed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import TYPE_CHECKING

import asyncpg

from graphile_worker import WorkerUtils
from graphile_worker.cli.live.loop import SHARE
from graphile_worker.cli.live.snapshot import look
from graphile_worker.testing import Databases
from graphile_worker.testing.servers import running_server

if TYPE_CHECKING:
    from collections.abc import Sequence

_SIZES = (0, 1_000, 100_000, 1_000_000)
_LOOKS = 7
_INTERVAL = 2.0


async def measure(dsn: str, jobs: int) -> float:
    """Seconds that a look takes, the usual one of several."""
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
        seen = await look(utils, None)
        took = []
        for _ in range(_LOOKS):
            seen = await look(utils, seen)
            took.append(seen.took)
    return statistics.median(took)


async def tell(server: str, sizes: Sequence[int]) -> None:
    """Print the table."""
    print(
        "| jobs in the table | a look takes | so it looks every | share of one session |\n|---|---|---|---|"
    )
    databases = Databases(server)
    try:
        for jobs in sizes:
            async with databases.fresh() as dsn:
                took = await measure(dsn, jobs)
            pause = max(_INTERVAL, SHARE * took)
            print(f"| {jobs:,} | {took * 1000:.0f} ms | {pause:.1f} s | {took / pause:.1%} |", flush=True)
    finally:
        await databases.close()


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description="Measure what a look of top costs.")
    parser.add_argument("--jobs", type=int, nargs="+", default=_SIZES, help="how many are in the table")
    sizes = parser.parse_args().jobs
    with running_server() as server:
        asyncio.run(tell(server, sizes))


if __name__ == "__main__":
    main()
