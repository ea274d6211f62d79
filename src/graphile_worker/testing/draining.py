"""Running what is due, here and now."""

from __future__ import annotations

import logging
import secrets
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graphile_worker._runtime.lifespan import Lifespan
from graphile_worker.app import App
from graphile_worker.client import WorkerUtils
from graphile_worker.errors import ConfigurationError
from graphile_worker.logs import ScopedLogger
from graphile_worker.options import WorkerOptions
from graphile_worker.outcome import Cancelled, Completed, Failed, Snoozed
from graphile_worker.testing.hands import Hands
from graphile_worker.testing.places import INSIDE, Place, using

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from graphile_worker._db.connect import Connection
    from graphile_worker._runtime.handlers import Tasks
    from graphile_worker.outcome import Outcome
    from graphile_worker.testing.clocks import Clock

LIMIT = 1000


@dataclass(frozen=True)
class Summary:
    """What `drain` did: how often a job came to this. A job that was lost while it ran is not counted.

    >>> Summary(done=2, failed=1).failed
    1
    """

    done: int = 0
    failed: int = 0
    """Whether or not they are to be tried again."""
    snoozed: int = 0
    cancelled: int = 0
    errors: tuple[BaseException, ...] = field(default=(), compare=False)
    """What they failed with, in that order."""


async def drain(
    tasks: App | Tasks,
    *,
    dsn: str | None = None,
    connection: Connection | None = None,
    schema: str | None = None,
    clock: Clock | None = None,
    limit: int | None = LIMIT,
    raise_errors: bool = False,
) -> Summary:
    """Run the jobs that are due, one after the other, until none is: also those that they add.

    They are claimed, run and recorded as a worker does it. What is scheduled for later, or is to be tried
    again later, stays; a clock can be moved to then.

    Args:
        tasks: An app, or the function for each task identifier. Jobs of other tasks stay where they are.
        dsn: Where the jobs are, for functions; an app knows. By default ``DATABASE_URL``.
        connection: A connection of asyncpg's on which to do everything, the context of the tasks and what
            the app's tasks enqueue included. In a transaction of the caller's nothing is committed.
        schema: The schema's name, for functions.
        clock: What time it is.
        limit: How many jobs may run: more of them means that they never end. None: any number.
        raise_errors: Whether to stop at the first failure, once it is recorded, and raise what the task
            raised.

    Raises:
        AssertionError: There is more to do than the limit allows.

    Example:
        >>> import asyncio
        >>> from graphile_worker import App
        >>> from graphile_worker.testing import Summary, drain
        >>> app = App(dsn=dsn)
        >>> @app.task
        ... async def hello(name: str) -> None:
        ...     print(f"Hello, {name}")
        >>> async def test():
        ...     await app.migrate()
        ...     await hello.enqueue(name="Ann")
        ...     assert await drain(app) == Summary(done=1)
        >>> asyncio.run(test())
        Hello, Ann
    """
    async with _place(tasks, dsn, connection, schema, clock) as place:
        options = options_of(tasks)
        async with lifespan_of(options) as state:
            return await run_due(tasks, place, options, state, limit=limit, raise_errors=raise_errors)


def options_of(tasks: App | Tasks) -> WorkerOptions:
    """How a worker for these tasks would run."""
    return WorkerOptions.of(**(tasks.settings if isinstance(tasks, App) else {}))


@asynccontextmanager
async def lifespan_of(options: WorkerOptions) -> AsyncIterator[Any]:
    """What the application opens for its tasks."""
    lifespan = Lifespan(options.lifespan, ScopedLogger(_logger_of(options), {}))
    try:
        yield await lifespan.open()
    finally:
        await lifespan.close()
    if lifespan.lost.done():
        raise lifespan.lost.result()


@asynccontextmanager
async def _place(
    tasks: App | Tasks,
    dsn: str | None,
    connection: Connection | None,
    schema: str | None,
    clock: Clock | None,
) -> AsyncIterator[Place]:
    """Where to look for jobs; meanwhile the app is there too."""
    if isinstance(tasks, App):
        if dsn is not None or schema is not None:
            raise ConfigurationError(
                "An app knows where its jobs are: App(dsn=..., schema=...), or testing.using(app, dsn=...)."
            )
        if connection is None and clock is None:
            yield Place.over(tasks.utils)
        else:
            async with using(tasks, connection=connection, clock=clock):
                yield Place.over(tasks.utils)
    elif connection is not None:
        if dsn is not None:
            raise ConfigurationError("Pass dsn or connection, not both.")
        yield Place.on_connection(connection, schema, clock)
    else:
        async with WorkerUtils(dsn, schema=schema) as utils:
            yield Place.over(utils, clock)


async def run_due(
    tasks: App | Tasks,
    place: Place,
    options: WorkerOptions,
    state: Any,
    *,
    limit: int | None,
    raise_errors: bool,
) -> Summary:
    """Run what is due in that place."""
    outcomes: list[Outcome] = []
    runs = 0
    before = INSIDE.get()
    INSIDE.set(True)  # the jobs inherit it
    logger = ScopedLogger(
        _logger_of(options), {"label": "worker", "worker_id": f"python-{secrets.token_hex(9)}"}
    )
    try:
        async with Hands(
            tasks.tasks if isinstance(tasks, App) else tasks, place, options, state, logger
        ) as hands:
            while (held := await hands.claim()) is not None:
                if runs == limit:
                    await hands.give_back(held)
                    raise AssertionError(_endless(limit, held.job.task_identifier))
                runs += 1
                outcome = await hands.run(held)
                if outcome is None:
                    continue
                outcomes.append(outcome)
                if raise_errors and isinstance(outcome, Failed):
                    raise outcome.error
    finally:
        INSIDE.set(before)
    return _summary(outcomes)


def _summary(outcomes: list[Outcome]) -> Summary:
    kinds = [type(outcome) for outcome in outcomes]
    return Summary(
        done=kinds.count(Completed),
        failed=kinds.count(Failed),
        snoozed=kinds.count(Snoozed),
        cancelled=kinds.count(Cancelled),
        errors=tuple(outcome.error for outcome in outcomes if isinstance(outcome, Failed)),
    )


def _endless(limit: int | None, task: str) -> str:
    return (
        f"{limit} jobs ran, and there are more that are due: the next is of {task!r}. If a task adds itself "
        "again and again, schedule it for later; if there are so many, say limit=..., or limit=None."
    )


def _logger_of(options: WorkerOptions) -> Any:
    return options.logger or logging.getLogger("graphile_worker")
