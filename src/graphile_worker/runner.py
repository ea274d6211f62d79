"""`run` and `run_once`: run a worker in this process."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Unpack

from graphile_worker._tasks.loader import load_cron_items, load_tasks
from graphile_worker._tasks.options import option_hint
from graphile_worker._worker.lifecycle import Runner
from graphile_worker._worker.options import WorkerOptions
from graphile_worker._worker.run_options import OPTIONS, AppRunOnceOptions, RunOnceOptions, RunOptions
from graphile_worker.errors import ConfigurationError, ShutdownError

__all__ = ["Runner", "run", "run_once"]

if TYPE_CHECKING:
    from collections.abc import Iterable
    from os import PathLike

    from graphile_worker._base.durations import Duration
    from graphile_worker._worker.execution.handlers import Tasks
    from graphile_worker.outcome import RunSummary

DEFAULT_GRACE: float = OPTIONS["shutdown_grace"].default


async def run(tasks: Tasks | None = None, dsn: str | None = None, **options: Unpack[RunOptions]) -> Runner:
    """Start a worker in this event loop, and return once it listens.

    Args:
        tasks: Functions by task identifier, or tasks made with ``@task``. A function is called with
            ``(payload)`` or ``(payload, ctx)``. An ``async def`` runs on the event loop, a ``def`` on a
            thread.
        dsn: Connection string; by default ``DATABASE_URL``, or the ``PG*`` variables.
        options: Options of the worker, such as ``concurrency=10``; docs/reference/settings.md describes all
            of them.

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
    check_option_names("run", options, RunOptions)
    return await _start(tasks, {"dsn": dsn, **options})


async def run_once(
    tasks: Tasks | None = None, dsn: str | None = None, **options: Unpack[RunOnceOptions]
) -> RunSummary:
    """Run all jobs that are due, and the jobs that they add; return how many succeeded and how many failed.

    A job that fails raises no exception here. The arguments are those of `run`, except those that concern
    polling, listening, recurring tasks and health checks.

    Example:
        >>> import asyncio
        >>> from graphile_worker import quick_add_job, run_once
        >>> async def main():
        ...     await run_once({"hello": print}, dsn)
        ...     await quick_add_job("hello", [1, 2], dsn=dsn)
        ...     return await run_once({"hello": lambda payload: print(payload)}, dsn)
        >>> asyncio.run(main())
        [1, 2]
        RunSummary(succeeded=1, failed=0, snoozed=0, cancelled=0, errors=())
    """
    check_option_names("run_once", options, RunOnceOptions)
    runner = await _start(tasks, {"dsn": dsn, **options, "listen": False}, once=True)
    await wait_until_ended(runner, options.get("shutdown_grace", DEFAULT_GRACE))
    return runner.summary


def check_option_names(
    function: str, given: Iterable[str], known: type[RunOnceOptions | AppRunOnceOptions]
) -> None:
    """Check that the function takes all given options.

    Raises:
        ConfigurationError: It does not take one of them. The message suggests the option that was meant.
    """
    for name in given:
        if name not in known.__annotations__:
            hint = option_hint(name, known.__annotations__)
            raise ConfigurationError(f"{function} takes no option {name!r}. {hint}")


async def _start(tasks: Tasks | None, given: dict[str, Any], *, once: bool = False) -> Runner:
    tasks = _read_tasks(tasks, given.pop("task_directory", None))
    crontab, crontab_file = given.pop("crontab", None), given.pop("crontab_file", None)
    given["cron_items"] = load_cron_items(crontab, crontab_file, given.pop("cron_items", None))
    runner = Runner(tasks, WorkerOptions.of(**given, once=once))
    await runner.start()
    return runner


async def wait_until_ended(runner: Runner, grace: Duration) -> None:
    """Wait until the worker has stopped. Cancelling the wait stops the worker, as a signal does."""
    try:
        await runner.wait()
    except asyncio.CancelledError:
        # The worker has logged what it could not record.
        with suppress(ShutdownError):
            await runner.stop(grace=grace)
        raise


def _read_tasks(tasks: Tasks | None, directory: str | PathLike[str] | None) -> Tasks:
    if tasks is not None and directory is None:
        return tasks
    if tasks is None and directory is not None:
        return load_tasks(directory)
    raise ConfigurationError("Pass either tasks, or task_directory to load the tasks from a folder.")
