"""Measure what middleware and listeners cost a job: ``python -m benchmarks.middleware``.

The benchmark adds a trivial job, runs it in the executor and emits its events, without a database. It does so
with none, one and ten of each. Without middleware and listeners the cost must not be measurable; with ten it
should be microseconds.
"""

from __future__ import annotations

import argparse
import asyncio
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.binding import make_environment, make_job
from graphile_worker import Events, JobSpec, Middleware, WorkerUtils, events as event, task
from graphile_worker._db.queries.exchange import ClaimedJob
from graphile_worker._worker.execution.executor import Executor
from graphile_worker._worker.execution.handlers import read_handlers
from graphile_worker._worker.execution.job_events import JobRun, emit_ended, emit_settled, emit_started

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphile_worker import Job, JobContext
    from graphile_worker.middleware import Adding, Running

_ROUNDS = 7


class PassThrough(Middleware):
    """Middleware that only calls the next one."""

    async def execute(self, ctx: JobContext, proceed: Running) -> Any:  # noqa: ARG002
        """Proceed."""
        return await proceed()

    async def enqueue(self, specs: Sequence[JobSpec], proceed: Adding) -> Any:  # noqa: ARG002
        """Proceed."""
        return await proceed()


class UtilsWithoutDatabase(WorkerUtils):
    """A client that adds jobs to no database."""

    job = make_job("trivial", {})

    async def _add_one(self, spec: JobSpec, connection: object) -> Job:  # noqa: ARG002
        return self.job


@task
async def trivial() -> None:
    """Do nothing."""


class Cost(NamedTuple):
    """The cost of a job with a number of middlewares and listeners."""

    middleware: int
    listeners: int
    added: float
    """Microseconds to add the job, without the database."""
    run: float
    """Microseconds to run the job and emit its events."""


async def measure(count: int) -> list[Cost]:
    """Return the costs: the best of several rounds with a number of jobs each."""
    return [
        Cost(
            middleware,
            listeners,
            await _to_add(middleware, count),
            await _to_run(middleware, listeners, count),
        )
        for middleware, listeners in ((0, 0), (1, 0), (10, 0), (0, 1), (0, 10), (10, 10))
    ]


async def _to_add(middleware: int, count: int) -> float:
    utils, spec = (
        UtilsWithoutDatabase("postgres://", middleware=[PassThrough() for _ in range(middleware)]),
        JobSpec("trivial"),
    )
    best = float("inf")
    for _ in range(_ROUNDS):
        started = perf_counter()
        for _ in range(count):
            await utils.add_spec(spec)
        best = min(best, perf_counter() - started)
    return best / count * 1e6


async def _to_run(middleware: int, listeners: int, count: int) -> float:
    handlers = read_handlers({"trivial": trivial})
    executor = Executor(handlers, make_environment(), 0.0, [PassThrough() for _ in range(middleware)])
    events = Events()
    for kind in (event.JobStart, event.JobSuccess, event.JobComplete):
        for _ in range(listeners):
            events.on(kind, lambda _event: None)
    job = make_job("trivial", {})
    claimed, slot = ClaimedJob(job, job.run_at, None), event.Worker("w-1", 1, "w")
    best = float("inf")
    for _ in range(_ROUNDS):
        started = perf_counter()
        for _ in range(count):
            run = JobRun(claimed, slot, 0.0)
            emit_started(events, run)
            emit_ended(events, run, await executor.execute(run))
            emit_settled(events, run, event.JobComplete)
        best = min(best, perf_counter() - started)
    return best / count * 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.middleware", description=__doc__)
    parser.add_argument("--count", type=int, default=20_000, metavar="N", help="jobs per round [20000]")
    print("middleware  listeners of each event  to add a job  to run it")
    for cost in asyncio.run(measure(parser.parse_args(arguments).count)):
        print(f"{cost.middleware:>10}  {cost.listeners:>23}  {cost.added:>9.2f} µs  {cost.run:>6.2f} µs")


if __name__ == "__main__":
    main()
