"""Run each job where it is added."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from graphile_worker._client.results import JOB_RUNNER, JobRunner
from graphile_worker.testing.draining import LIMIT, lifespan_of, options_of, run_due
from graphile_worker.testing.overrides import IN_TEST_JOB, ClockedUtils, override

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from graphile_worker._db.connection.connect import Connection
    from graphile_worker.app import App
    from graphile_worker.testing.clocks import Clock


@asynccontextmanager
async def inline(
    app: App,
    *,
    dsn: str | None = None,
    connection: Connection | None = None,
    clock: Clock | None = None,
    limit: int | None = LIMIT,
    raise_errors: bool = True,
) -> AsyncIterator[App]:
    """Make every caller that adds a job wait until the job has run.

    The job is stored, claimed, run and recorded as by `drain`, on the connection with which it was added.
    While it runs, all jobs of the app are added on that connection. Jobs that it adds run after it. If its
    own threads add jobs, the threads do not wait. Jobs that are scheduled for later stay in the queue.

    Args:
        app: The app.
        dsn: Another database.
        connection: An asyncpg connection: see `override`.
        clock: The clock to use [the real time].
        limit: The number of jobs that may run after a job is added.
        raise_errors: Whether the caller that adds a job gets the task's error, once it is recorded.

    Example:
        >>> import asyncio
        >>> from graphile_worker import App
        >>> from graphile_worker.testing import inline
        >>> app = App(dsn=dsn)
        >>> @app.task
        ... async def hello(name: str) -> None:
        ...     print(f"Hello, {name}")
        >>> async def test():
        ...     await app.migrate()
        ...     async with inline(app):
        ...         await hello.enqueue(name="Ann")
        >>> asyncio.run(test())
        Hello, Ann
    """
    running = asyncio.Lock()
    run_again = False
    options = options_of(app)
    async with override(app, dsn=dsn, connection=connection, clock=clock), lifespan_of(options) as state:
        utils = app.utils

        async def run(on: Any) -> None:
            nonlocal run_again
            if running.locked() and IN_TEST_JOB.get() is None:
                # The caller may be a thread that the running job waits for: waiting here would deadlock.
                run_again = True
                return
            async with running:
                run_again = True
                while run_again:
                    run_again = False
                    if on is None:
                        await run_jobs(ClockedUtils.over(utils))
                    else:
                        async with override(app, connection=on):
                            await run_jobs(ClockedUtils.over(app.utils))

        async def run_jobs(client: ClockedUtils) -> None:
            await run_due(app, client, options, state, limit=limit, raise_errors=raise_errors)

        assert isinstance(utils, ClockedUtils)  # noqa: S101 - for the type checker
        utils.on_added = run
        before = IN_TEST_JOB.get()
        IN_TEST_JOB.set(before or False)
        runner = JOB_RUNNER.set(JobRunner(asyncio.get_running_loop(), partial(run, None), set()))
        try:
            yield app
        finally:
            IN_TEST_JOB.set(before)
            with suppress(ValueError):  # a fixture ends in another context than it began
                JOB_RUNNER.reset(runner)
