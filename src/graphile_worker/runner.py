"""`run` and `run_once`: a worker in this process."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from graphile_worker._runtime.lifecycle import Drained, Runner
from graphile_worker.errors import ConfigurationError, ShutdownError
from graphile_worker.loader import load_cron_items, load_tasks
from graphile_worker.options import WorkerOptions
from graphile_worker.payload import MAX_PAYLOAD_SIZE

__all__ = ["Drained", "Runner", "run", "run_once"]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractAsyncContextManager
    from os import PathLike

    import asyncpg

    from graphile_worker._runtime.handlers import Tasks
    from graphile_worker.durations import Duration
    from graphile_worker.emitter import Events
    from graphile_worker.liveness import OnRecovery
    from graphile_worker.logs import AnyLogger
    from graphile_worker.middleware import Middleware
    from graphile_worker.options import CronItems, FlagsOption
    from graphile_worker.task_options import OnInvalidPayload


async def run(
    tasks: Tasks | None = None,
    dsn: str | None = None,
    *,
    task_directory: str | PathLike[str] | None = None,
    pool: asyncpg.Pool | None = None,
    schema: str | None = None,
    concurrency: int = 1,
    max_task_processes: int | None = None,
    max_jobs_per_task_process: int | None = None,
    max_pool_size: int = 10,
    pool_timeout: Duration | None = None,
    poll_interval: Duration = 2.0,
    listen: bool = True,
    listen_dsn: str | None = None,
    prefetch: int = 0,
    prefetch_ttl: Duration = 300.0,
    forbidden_flags: FlagsOption = None,
    use_local_time: bool = False,
    max_payload_size: int = MAX_PAYLOAD_SIZE,
    interrupted_delay: Duration = 0.0,
    shutdown_grace: Duration = 5.0,
    min_reset_locked_interval: Duration = 480.0,
    max_reset_locked_interval: Duration = 600.0,
    recovery: bool = True,
    heartbeat_interval: Duration = 3.0,
    lease: Duration = 38.0,
    fast_lease: Duration = 8.0,
    task_leases: Mapping[str, Duration] | None = None,
    recovery_delay: Duration = 0.0,
    refund_attempt_on_recovery: bool = False,
    on_recovery: OnRecovery | None = None,
    exit_if_stuck: bool = False,
    on_invalid_payload: OnInvalidPayload = "retry",
    lifespan: Callable[[], AbstractAsyncContextManager[Any]] | None = None,
    middleware: Iterable[Middleware] | None = None,
    crontab: str | None = None,
    crontab_file: str | PathLike[str] | None = None,
    cron_items: CronItems | None = None,
    health: str | int | None = None,
    handle_signals: bool = True,
    migrate: bool = True,
    prepared_statements: bool = True,
    events: Events | None = None,
    logger: AnyLogger | None = None,
) -> Runner:
    """Start a worker in this event loop; returns once it listens.

    Args:
        tasks: The function for each task identifier, called with ``(payload)`` or ``(payload, ctx)``, or a
            task that was made with ``@task``. An ``async def`` runs on the event loop, a ``def`` on a thread.
        task_directory: A folder with a file for each task, in place of `tasks`; see docs/command-line.md.
        dsn: The connection string; by default ``DATABASE_URL``, or the ``PG*`` variables.
        pool: An asyncpg pool instead of `dsn`. The worker keeps two of its connections, and one
            or two that its tasks cannot hold: it needs four. It is not closed.
        schema: The schema's name; by default ``GRAPHILE_WORKER_SCHEMA``, or ``graphile_worker``.
        concurrency: How many jobs run at once.
        max_task_processes: How many processes to start at most for tasks with ``executor="process"``; by
            default as many as there are processors.
        max_jobs_per_task_process: After how many jobs such a process is replaced by a new one, for code that
            does not give back its memory; by default never.
        max_pool_size: How many connections tasks may use at once. The worker itself has three more, and up to
            two that add jobs and look after other workers while tasks hold all of these.
        pool_timeout: How long to wait for a connection before a `PoolTimeoutError`; by default as long as it
            takes.
        poll_interval: How often to look for jobs when nothing tells that there are any.
        listen: Off to only poll.
        listen_dsn: Where to listen, if `dsn` goes through a pooler that does not bring notifications.
        prefetch: How many jobs to claim beyond the free slots.
        prefetch_ttl: After how long jobs that were claimed ahead and not started are given back.
        forbidden_flags: Leave jobs with any of these flags alone: a list, or a function that returns one each
            time that jobs are claimed.
        use_local_time: Take "now" from this machine's clock and not from the database's.
        max_payload_size: How many bytes of JSON a payload may have when a task adds a job; by default 16 MB.
        interrupted_delay: After how long a job that was interrupted at shutdown is available again.
        shutdown_grace: How long running jobs have after a signal or a breaking migration before they are
            interrupted.
        min_reset_locked_interval: How often, at most, locks older than four hours are freed.
        max_reset_locked_interval: How often, at least.
        recovery: Off to neither say that this worker lives nor look whether others do. What it holds when it
            is killed then stays locked for four hours.
        heartbeat_interval: How often the worker says that it lives.
        lease: For how long it may be silent before others run its jobs.
        fast_lease: The same, if others see that its connections are gone.
        task_leases: Longer leases for jobs of some tasks: work that must not lightly run twice.
        recovery_delay: After how long a job whose worker died runs again; after the next death in a row it is
            the usual delay between attempts.
        refund_attempt_on_recovery: Whether such a job gets its attempt back. A job that kills its worker then
            does so for ever.
        on_recovery: Decides what becomes of such a job: called with the job and a `WorkerInfo`, returns a
            `Recovery`, or None for the default; may be async.
        exit_if_stuck: End this process if others may take its jobs and they cannot be stopped, because they
            run on threads or block the event loop. The command does so.
        on_invalid_payload: What becomes of a job whose payload does not fit the parameters of a task that was
            made with ``@task``: ``"retry"``, as after any failure, for a newer deploy may understand it, or
            ``"fail"``.
        lifespan: Makes an async context manager that is entered before the first job and left after the last;
            what it gives is at ``ctx.state``.
        middleware: What stands around the running of its jobs, and the adding of jobs by them: see
            docs/middleware.md.
        crontab: Recurring tasks, as the text of a crontab: see docs/cron.md.
        crontab_file: The same as a file, in place of `crontab`.
        cron_items: The same as a list of `CronItem` or of dictionaries, in place of either.
        health: Where to answer ``/live`` and ``/ready`` over HTTP: a port, or ``"host:port"``.
        handle_signals: Stop at SIGINT, SIGTERM, SIGHUP and SIGUSR2; afterwards the signal takes its usual
            course.
        migrate: Off if the schema is installed by somebody else.
        prepared_statements: Off for a PgBouncer in transaction mode.
        events: An emitter to which listeners were added already, to hear of the start too.
        logger: Where to log; by default the logger ``graphile_worker``.

    Raises:
        ConfigurationError: An argument is wrong, or there are no tasks.
        DatabaseError: The database cannot be reached, or the schema cannot be installed.

    Example:
        >>> import asyncio
        >>> from graphile_worker import quick_add_job, run
        >>> async def hello(payload):
        ...     print(f"Hello, {payload['name']}")
        ...     done.set()
        >>> async def main():
        ...     global done
        ...     done = asyncio.Event()
        ...     async with await run({"hello": hello}, dsn, concurrency=10) as runner:
        ...         await runner.add_job("hello", {"name": "Bobby Tables"})
        ...         await done.wait()
        >>> asyncio.run(main())
        Hello, Bobby Tables
    """
    return await _started(dict(locals()))


async def run_once(
    tasks: Tasks | None = None,
    dsn: str | None = None,
    *,
    task_directory: str | PathLike[str] | None = None,
    pool: asyncpg.Pool | None = None,
    schema: str | None = None,
    concurrency: int = 1,
    max_task_processes: int | None = None,
    max_jobs_per_task_process: int | None = None,
    max_pool_size: int = 10,
    pool_timeout: Duration | None = None,
    prefetch: int = 0,
    prefetch_ttl: Duration = 300.0,
    forbidden_flags: FlagsOption = None,
    use_local_time: bool = False,
    max_payload_size: int = MAX_PAYLOAD_SIZE,
    interrupted_delay: Duration = 0.0,
    shutdown_grace: Duration = 5.0,
    recovery: bool = True,
    heartbeat_interval: Duration = 3.0,
    lease: Duration = 38.0,
    fast_lease: Duration = 8.0,
    task_leases: Mapping[str, Duration] | None = None,
    recovery_delay: Duration = 0.0,
    refund_attempt_on_recovery: bool = False,
    on_recovery: OnRecovery | None = None,
    exit_if_stuck: bool = False,
    on_invalid_payload: OnInvalidPayload = "retry",
    lifespan: Callable[[], AbstractAsyncContextManager[Any]] | None = None,
    middleware: Iterable[Middleware] | None = None,
    handle_signals: bool = True,
    migrate: bool = True,
    prepared_statements: bool = True,
    events: Events | None = None,
    logger: AnyLogger | None = None,
) -> Drained:
    """Run all jobs that can run now, and those that they add; returns how many were done and how many failed.

    A job that fails is no error here. The arguments are those of `run`.

    Example:
        >>> import asyncio
        >>> from graphile_worker import quick_add_job, run_once
        >>> async def main():
        ...     await run_once({"hello": print}, dsn)
        ...     await quick_add_job("hello", [1, 2], dsn=dsn)
        ...     return await run_once({"hello": lambda payload: print(payload)}, dsn)
        >>> asyncio.run(main())
        [1, 2]
        Drained(done=1, failed=0)
    """
    runner = await _started({**locals(), "listen": False, "once": True})
    await wait_until_ended(runner, shutdown_grace)
    return runner.drained


async def _started(given: dict[str, Any]) -> Runner:
    tasks = _tasks_of(given.pop("tasks"), given.pop("task_directory"))
    crontab, crontab_file = given.pop("crontab", None), given.pop("crontab_file", None)
    given["cron_items"] = load_cron_items(crontab, crontab_file, given.pop("cron_items", None))
    runner = Runner(tasks, WorkerOptions.of(**given))
    await runner.start()
    return runner


async def wait_until_ended(runner: Runner, grace: Duration) -> None:
    """Until it has stopped; whoever stops waiting stops it, as a signal would."""
    try:
        await runner.wait()
    except asyncio.CancelledError:
        # What cannot be recorded was logged.
        with suppress(ShutdownError):
            await runner.stop(grace=grace)
        raise


def _tasks_of(tasks: Tasks | None, directory: str | PathLike[str] | None) -> Tasks:
    if tasks is not None and directory is None:
        return tasks
    if tasks is None and directory is not None:
        return load_tasks(directory)
    raise ConfigurationError("Pass tasks, or a task_directory to load them from: one of the two.")
