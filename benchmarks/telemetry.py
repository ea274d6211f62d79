"""Measure what metrics cost a worker: ``python -m benchmarks.telemetry``.

Two workers with a concurrency of 24 run trivial jobs, one with metrics and one without, in turns on one
database. The result is the ratio of the processor time that they take, because that of the clock depends on
what else the machine does. It should be at most 1.03.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from statistics import median
from time import process_time
from typing import TYPE_CHECKING

from graphile_worker import JobSpec, Middleware, WorkerUtils, run_once
from graphile_worker.telemetry.prometheus import PrometheusMetrics
from graphile_worker.testing import Databases, running_server

if TYPE_CHECKING:
    from collections.abc import Sequence

_CONCURRENCY = 24


async def _trivial(_payload: object) -> None:
    """Do nothing."""


async def _seconds(dsn: str, jobs: int, middleware: list[Middleware]) -> float:
    async with WorkerUtils(dsn) as utils:
        await utils.add_jobs([JobSpec("trivial")] * jobs)
    started = process_time()
    summary = await run_once({"trivial": _trivial}, dsn, concurrency=_CONCURRENCY, middleware=middleware)
    taken = process_time() - started
    if summary.succeeded != jobs:
        raise RuntimeError(f"{summary.succeeded} of {jobs} jobs succeeded")
    return taken


async def measure(dsn: str, jobs: int, rounds: int) -> float:
    """Return how many times as long the jobs take with metrics: the median of all rounds."""
    ratios = []
    await _seconds(dsn, jobs, [])  # the first run is slower
    for number in range(rounds):
        with_metrics = number % 2 == 0
        first = await _seconds(dsn, jobs, [PrometheusMetrics()] if with_metrics else [])
        second = await _seconds(dsn, jobs, [] if with_metrics else [PrometheusMetrics()])
        ratio = first / second if with_metrics else second / first
        each = [f"{seconds / jobs * 1e6:.1f}" for seconds in (first, second)]
        print(f"round {number + 1}: {' and '.join(each)} µs per job, ratio {ratio:.3f}")
        ratios.append(ratio)
    return median(ratios)


async def _measure_on_new_database(server: str, jobs: int, rounds: int) -> float:
    with Databases(server) as databases:
        async with databases.fresh() as dsn:
            return await measure(dsn, jobs, rounds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the ratio."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.telemetry", description=__doc__)
    parser.add_argument("--jobs", type=int, default=20_000, metavar="N", help="jobs per run [20000]")
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="pairs of runs [8]")
    given = parser.parse_args(arguments)
    os.environ["NO_LOG_SUCCESS"] = ""
    with running_server() as server:
        ratio = asyncio.run(_measure_on_new_database(server, given.jobs, given.rounds))
    print(
        f"Prometheus metrics at concurrency {_CONCURRENCY}: {(ratio - 1) * 100:+.1f} % processor time per job"
    )


if __name__ == "__main__":
    main()
