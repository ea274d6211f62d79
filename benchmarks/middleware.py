"""What middleware and listeners cost a job: ``python -m benchmarks.middleware``.

A job that does nothing is added, run by the executor and told about, without a database: with none, one and
ten of each. With none it must not be measurable, with ten it is to be microseconds.
"""

from __future__ import annotations

import argparse
import asyncio
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.binding import a_job, some_surroundings
from graphile_worker import Events, JobSpec, Middleware, WorkerUtils, task
from graphile_worker import events as event
from graphile_worker._db.exchange import Held
from graphile_worker._runtime.executor import Executor
from graphile_worker._runtime.handlers import read_handlers
from graphile_worker._runtime.runs import Run, tell_ended, tell_settled, tell_started

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphile_worker import Job, JobContext
    from graphile_worker.middleware import Adding, Running

_ROUNDS = 7


class Nothing(Middleware):
    """Only proceeds."""

    async def execute(self, ctx: JobContext, proceed: Running) -> Any:  # noqa: ARG002
        """Proceed."""
        return await proceed()

    async def enqueue(self, specs: Sequence[JobSpec], proceed: Adding) -> Any:  # noqa: ARG002
        """Proceed."""
        return await proceed()


class Nowhere(WorkerUtils):
    """Adds jobs to no database."""

    job = a_job("trivial", {})

    async def _add_one(self, spec: JobSpec, connection: object) -> Job:  # noqa: ARG002
        return self.job


@task
async def trivial() -> None:
    """Nothing."""


class Cost(NamedTuple):
    """Of a job with so many middlewares and listeners."""

    middleware: int
    listeners: int
    added: float
    """Microseconds until it is added, but for the database."""
    run: float
    """And until it has run, and everybody is told."""


async def measure(count: int) -> list[Cost]:
    """The best of several rounds for each, each with so many jobs."""
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
        Nowhere("postgres://", middleware=[Nothing() for _ in range(middleware)]),
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
    executor = Executor(handlers, some_surroundings(), 0.0, [Nothing() for _ in range(middleware)])
    events = Events()
    for kind in (event.JobStart, event.JobSuccess, event.JobComplete):
        for _ in range(listeners):
            events.on(kind, lambda _event: None)
    job = a_job("trivial", {})
    held, slot = Held(job, job.run_at, None), event.Worker("w-1", 1, "w")
    best = float("inf")
    for _ in range(_ROUNDS):
        started = perf_counter()
        for _ in range(count):
            run = Run(held, slot, 0.0)
            tell_started(events, run)
            tell_ended(events, run, await executor.execute(run))
            tell_settled(events, run, event.JobComplete)
        best = min(best, perf_counter() - started)
    return best / count * 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.middleware", description=__doc__)
    parser.add_argument("--count", type=int, default=20_000, metavar="N", help="jobs in a round")
    print("middleware  listeners of each event  to add a job  to run it")
    for cost in asyncio.run(measure(parser.parse_args(arguments).count)):
        print(f"{cost.middleware:>10}  {cost.listeners:>23}  {cost.added:>9.2f} µs  {cost.run:>6.2f} µs")


if __name__ == "__main__":
    main()
