"""Run the jobs that are due, in the test itself."""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from graphile_worker._base.logs import ScopedLogger
from graphile_worker._client.results import JOB_RUNNER, JobRunner
from graphile_worker._worker.lifespan import Lifespan
from graphile_worker._worker.options import WorkerOptions
from graphile_worker.app import App
from graphile_worker.client import WorkerUtils
from graphile_worker.errors import ConfigurationError
from graphile_worker.outcome import Cancelled, Completed, Failed, RunSummary, Snoozed
from graphile_worker.testing.overrides import IN_TEST_JOB, ClockedUtils, override
from graphile_worker.testing.single_job_worker import SingleJobWorker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from graphile_worker._db.connection.connect import Connection
    from graphile_worker._worker.execution.handlers import Tasks
    from graphile_worker.outcome import Outcome
    from graphile_worker.testing.clocks import Clock

LIMIT = 1000


async def drain(
    tasks: App | Tasks,
    *,
    dsn: str | None = None,
    connection: Connection | None = None,
    schema: str | None = None,
    clock: Clock | None = None,
    limit: int | None = LIMIT,
    raise_errors: bool = False,
) -> RunSummary:
    """Run the jobs that are due, one after the other, and the jobs that they add, until none is due.

    Jobs are claimed, run and recorded as by a worker. Jobs that are scheduled for later, or that will be
    retried later, stay in the queue; move a clock to run them.

    Args:
        tasks: An app, or a mapping from task identifiers to functions. Jobs of other tasks are not run.
        dsn: The database, if `tasks` is a mapping [``DATABASE_URL``]. An app has its own.
        connection: An asyncpg connection for everything, including the tasks' contexts and the jobs that the
            app's tasks enqueue. In the caller's transaction nothing is committed.
        schema: The schema's name, if `tasks` is a mapping.
        clock: The clock to use [the real time].
        limit: The number of jobs that may run; more than that is an endless loop. None means no limit.
        raise_errors: Whether to stop at the first failure, once it is recorded, and raise the task's error.

    Raises:
        AssertionError: More jobs are due than the limit allows.

    Example:
        >>> import asyncio
        >>> from graphile_worker import App, RunSummary
        >>> from graphile_worker.testing import drain
        >>> app = App(dsn=dsn)
        >>> @app.task
        ... async def hello(name: str) -> None:
        ...     print(f"Hello, {name}")
        >>> async def test():
        ...     await app.migrate()
        ...     await hello.enqueue(name="Ann")
        ...     assert await drain(app) == RunSummary(succeeded=1)
        >>> asyncio.run(test())
        Hello, Ann
    """
    async with _open_client(tasks, dsn, connection, schema, clock) as utils:
        options = options_of(tasks)
        async with lifespan_of(options) as state:
            return await run_due(tasks, utils, options, state, limit=limit, raise_errors=raise_errors)


def options_of(tasks: App | Tasks) -> WorkerOptions:
    """Return the options of a worker for these tasks."""
    return WorkerOptions.of(**(tasks.settings if isinstance(tasks, App) else {}))


@asynccontextmanager
async def lifespan_of(options: WorkerOptions) -> AsyncIterator[Any]:
    """Run the application's lifespan, and yield its state."""
    lifespan = Lifespan(options.lifespan, ScopedLogger(_logger_of(options), {}))
    try:
        yield await lifespan.open()
    finally:
        await lifespan.close()
    if lifespan.ended_early.done():
        raise lifespan.ended_early.result()


@asynccontextmanager
async def _open_client(
    tasks: App | Tasks,
    dsn: str | None,
    connection: Connection | None,
    schema: str | None,
    clock: Clock | None,
) -> AsyncIterator[ClockedUtils]:
    """Yield a client for the jobs' database; an app uses the same database meanwhile."""
    if isinstance(tasks, App):
        if dsn is not None or schema is not None:
            raise ConfigurationError(
                "dsn and schema belong to the app: App(dsn=..., schema=...), or "
                "testing.override(app, dsn=...)."
            )
        if connection is None and clock is None:
            yield ClockedUtils.over(tasks.utils)
        else:
            async with override(tasks, connection=connection, clock=clock):
                yield ClockedUtils.over(tasks.utils)
    elif connection is not None:
        if dsn is not None:
            raise ConfigurationError("Pass dsn or connection, not both.")
        yield ClockedUtils.on_connection(connection, schema, clock)
    else:
        async with WorkerUtils(dsn, schema=schema) as utils:
            yield ClockedUtils.over(utils, clock)


async def run_due(
    tasks: App | Tasks,
    utils: ClockedUtils,
    options: WorkerOptions,
    state: Any,
    *,
    limit: int | None,
    raise_errors: bool,
) -> RunSummary:
    """Run the jobs that are due in the client's database."""
    outcomes: list[Outcome] = []
    started = 0
    before = IN_TEST_JOB.get()
    IN_TEST_JOB.set(True)  # jobs inherit the context variables
    outer = JOB_RUNNER.get()
    running = set() if outer is None else outer.running
    nested = JOB_RUNNER.set(
        # A job that waits for another one would wait forever, because nothing else runs here.
        JobRunner(
            asyncio.get_running_loop(),
            partial(run_due, tasks, utils, options, state, limit=limit, raise_errors=False),
            running,
        )
    )
    logger = ScopedLogger(
        _logger_of(options), {"label": "worker", "worker_id": f"python-{secrets.token_hex(9)}"}
    )
    try:
        async with SingleJobWorker(
            tasks.tasks if isinstance(tasks, App) else tasks, utils, options, state, logger
        ) as worker:
            while (claimed := await worker.claim()) is not None:
                if started == limit:
                    await worker.release(claimed)
                    raise AssertionError(_limit_message(limit, claimed.job.task_identifier))
                started += 1
                running.add(claimed.job.id)
                try:
                    outcome = await worker.run(claimed)
                finally:
                    running.discard(claimed.job.id)
                if outcome is None:
                    continue
                outcomes.append(outcome)
                if raise_errors and isinstance(outcome, Failed):
                    raise outcome.error
    finally:
        IN_TEST_JOB.set(before)
        JOB_RUNNER.reset(nested)
    return _summary(outcomes)


def _summary(outcomes: list[Outcome]) -> RunSummary:
    kinds = [type(outcome) for outcome in outcomes]
    return RunSummary(
        succeeded=kinds.count(Completed),
        failed=kinds.count(Failed),
        snoozed=kinds.count(Snoozed),
        cancelled=kinds.count(Cancelled),
        errors=tuple(outcome.error for outcome in outcomes if isinstance(outcome, Failed)),
    )


def _limit_message(limit: int | None, task: str) -> str:
    return (
        f"{limit} jobs ran, and more are due: the next task is {task!r}. If a task adds itself again and "
        "again, schedule the new job for later. If there are many jobs, pass a higher limit=, or limit=None."
    )


def _logger_of(options: WorkerOptions) -> Any:
    return options.logger or logging.getLogger("graphile_worker")
