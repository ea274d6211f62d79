"""Measure the time from a payload to a task's arguments: ``python -m benchmarks.binding``.

The payload has three scalars. It is text, as the database driver returns it. The goal is 5 µs for everything:
decoding, checking and the context. The floor is msgspec alone, decoding into a struct with the same fields.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from datetime import UTC, datetime
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from graphile_worker import Job, JobContext, JobState, Task, WorkerUtils, task
from graphile_worker._base.logs import ScopedLogger
from graphile_worker._base.payload import decode_payload
from graphile_worker._tasks.specs import Specs
from graphile_worker._worker.execution.completion import Completions
from graphile_worker._worker.execution.handlers import read_handlers
from graphile_worker.context import WorkerEnvironment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GOAL = 5.0
_TEXT = '{"user_id": 12345, "template": "welcome", "ratio": 0.75}'
_ROUNDS = 7


class _Floor(msgspec.Struct, gc=False):
    user_id: int
    template: str
    ratio: float


@task
async def keywords(user_id: int, template: str, ratio: float) -> None:
    """Take three parameters."""


@task
async def with_context(ctx: JobContext, user_id: int, template: str, ratio: float) -> None:
    """Take three parameters and the context."""


@task
async def with_defaults(ctx: JobContext, user_id: int, *, template: str = "", ratio: float = 1.0) -> None:
    """Take keyword-only parameters with defaults, and the context."""


@task
async def struct(payload: _Floor, ctx: JobContext) -> None:
    """Take the payload as one value."""


async def by_position(payload: Any, ctx: Any) -> None:
    """Take the payload as a mapping, in a plain function."""


class Cost(NamedTuple):
    """The cost of one way to take a payload."""

    name: str
    microseconds: float


def measure(count: int) -> list[Cost]:
    """Return the cost of each way: the best of several rounds with a number of payloads each."""
    tasks: list[Task[..., ..., Any]] = [keywords, with_context, with_defaults, struct]
    functions: dict[str, Callable[..., Any]] = {one.identifier: one for one in tasks}
    handlers = read_handlers({**functions, "by_position": by_position})
    environment = asyncio.run(_environment())
    floor = msgspec.json.Decoder(_Floor).decode
    ways: dict[str, Callable[[], object]] = {"msgspec alone": partial(floor, _TEXT)}
    for name, handler in handlers.items():
        ways[name] = partial(_bind, handler, make_job(name), environment)
    return [
        Cost(name, min(_seconds(way, count) for _ in range(_ROUNDS)) / count * 1e6)
        for name, way in ways.items()
    ]


def _bind(handler: Any, job: Job, environment: WorkerEnvironment) -> None:
    # As in the worker, which creates the job with its payload.
    job_payload = decode_payload(_TEXT)
    msgspec.structs.force_setattr(job, "payload", job_payload)
    handler.call(job, environment)


def _seconds(way: Callable[[], object], count: int) -> float:
    started = perf_counter()
    for _ in range(count):
        way()
    return perf_counter() - started


async def _environment() -> WorkerEnvironment:
    return make_environment()


def make_environment() -> WorkerEnvironment:
    """Return the environment that a worker's jobs share. Call it on an event loop."""
    logger = ScopedLogger(logging.getLogger("graphile_worker"), {})
    utils = WorkerUtils("postgresql://localhost/none")
    return WorkerEnvironment(
        worker_id="w",
        utils=utils,
        logger=logger,
        now=lambda: datetime.now(UTC),
        specs=Specs({}),
        completions=Completions(utils._session, "w"),  # noqa: SLF001 - as a worker does
    )


def make_job(task_identifier: str, payload: Any = None) -> Job:
    """Return a claimed job of a task."""
    now = datetime.now(UTC)
    return Job(
        id=1, task_identifier=task_identifier, queue_name=None, payload=payload, priority=0, run_at=now,
        attempts=1, max_attempts=25, last_error=None, created_at=now, updated_at=now, key=None, locked_at=now,
        locked_by="w", revision=0, flags=frozenset(), is_available=False, task_id=1, job_queue_id=None,
        state=JobState.RUNNING,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.binding", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, metavar="N", help="payloads per round [100000]")
    costs = measure(parser.parse_args(arguments).count)
    for name, microseconds in costs:
        print(f"{name:<14} {microseconds:6.2f} µs")
    worst = max(microseconds for _, microseconds in costs)
    print(f"goal: at most {GOAL:g} µs; {'reached' if worst <= GOAL else 'missed'}")


if __name__ == "__main__":
    main()
