"""Running a worker from the command line."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphile_worker._runtime.job_log import without_frames_in
from graphile_worker._runtime.lifespan import NOT_THEIRS
from graphile_worker.administration import CleanupTask
from graphile_worker.app import App
from graphile_worker.cli import logs
from graphile_worker.cli.control import Control
from graphile_worker.cli.exits import BREAKING_MIGRATION, end_by
from graphile_worker.cli.printing import cleaned_up
from graphile_worker.cli.settings import unknown_variables
from graphile_worker.cli.unserved import warn_of_unserved
from graphile_worker.client import WorkerUtils
from graphile_worker.emitter import Events
from graphile_worker.errors import ConfigurationError, MissingExtraError, SchemaTooNewError
from graphile_worker.events import PoolFatalError
from graphile_worker.loader import load_named, load_tasks
from graphile_worker.logs import library_logger as logger
from graphile_worker.middleware import BlockedLoop
from graphile_worker.runner import run, run_once
from graphile_worker.tasks import task_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
    from types import TracebackType

    from graphile_worker._runtime.handlers import Tasks
    from graphile_worker.administration import Cleaned
    from graphile_worker.cli.settings import Value
    from graphile_worker.runner import Runner

_OF_CONNECTION = {
    "dsn": "connection",
    "schema": "schema",
    "max_pool_size": "max_pool_size",
    "pool_timeout": "pool_timeout",
    "prepared_statements": "prepared_statements",
    "max_payload_size": "max_payload_size",
}


def run_worker(
    settings: Mapping[str, Value],
    tasks_of: str | None,
    *,
    once: bool = False,
    watch: bool = False,
    schema_only: bool = False,
    cleanup: Sequence[str] = (),
    dev: bool = False,
) -> None:
    """Do what the flags say: run a worker, or several, or only install or clean up.

    With `dev` the worker warns of what its author should know: a blocked event loop, jobs without a worker.
    """
    _refuse_together(once=once, watch=watch, schema_only=schema_only, cleanup=bool(cleanup))
    if tasks_of is not None and settings["tasks"].source == "--tasks":
        raise click.UsageError(f"Name the tasks by {tasks_of} or by --tasks, not by both.")
    tasks_of = app_of(settings, tasks_of)
    control = Control.of_parent()
    level, form = settings["log_level"].value, settings["log_format"].value
    logs.configure(level, form, one_of_several=control is not None)
    if control is None:
        for sentence in unknown_variables():
            logger.warning("%s", sentence)
    if schema_only:
        _install(settings, tasks_of)
    elif cleanup:
        _clean_up(settings, tasks_of, cleanup)
    elif control is None and (watch or settings["processes"].value > 1):
        if settings["health"].value is not None:
            raise click.UsageError(
                "--health is about one process. With --processes or --watch ask the database: "
                "graphile-worker health"
            )
        from graphile_worker.cli.supervisor import supervise  # noqa: PLC0415

        paths = _watched(settings, tasks_of) if watch else ()
        supervise(settings["processes"].value, once=once, watched=paths)
    else:
        what = load(settings, tasks_of)
        events = what.events if isinstance(what, App) else Events()
        if once:
            worker = _run_once(settings, what, events, control)
        else:
            crontab = crontab_of(settings, tasks_of, what)
            worker = _run(settings, what, crontab, events, control, dev=dev)
        _run_to_end(worker, events)


def _run_to_end(worker: Coroutine[Any, Any, int], events: Events) -> None:
    """Run the worker, and end as it ends."""
    stopped_by: list[str] = []
    of_lifespan: list[tuple[BaseException, TracebackType | None]] = []

    def note(fatal: PoolFatalError) -> None:
        if fatal.action == "lifespan":
            steps = without_frames_in(NOT_THEIRS, fatal.error.__traceback__)
            of_lifespan.append((fatal.error, steps))

    events.on("gracefulShutdown", lambda event: stopped_by.append(event.signal))
    events.on(PoolFatalError, note)
    try:
        status = asyncio.run(worker)
    except Exception as error:
        # If the user's code failed, its own frames matter, and not those of the command.
        for failure, steps in of_lifespan:
            if failure is error:
                told = (type(error), error, steps)
                logger.error("The worker cannot start: its lifespan failed", exc_info=told)  # noqa: TRY400
                sys.exit(1)
        raise
    if stopped_by:
        end_by(signal.Signals[stopped_by[0]])
    sys.exit(status)


def app_of(settings: Mapping[str, Value], named: str | None) -> str | None:
    """The app that was named, or that of the settings, unless a folder was named."""
    of_folder = settings["tasks"].source.startswith("-")
    return named or (None if of_folder else settings["app"].value)


def _refuse_together(**chosen: bool) -> None:
    flags = [f"--{name.replace('_', '-')}" for name, is_chosen in chosen.items() if is_chosen]
    if len(flags) > 1:
        raise click.UsageError(f"{' and '.join(flags)} cannot be combined.")


async def _run(
    settings: Mapping[str, Value],
    what: App | Tasks,
    crontab: str | None,
    events: Events,
    control: Control | None,
    *,
    dev: bool,
) -> int:
    if crontab is not None:
        logger.info("The crontab is %s", crontab)
    options: Any = {
        **_of_both(settings),
        "poll_interval": settings["poll_interval"].value,
        "listen": settings["listen"].value,
        "listen_dsn": settings["listen_connection"].value,
        "health": settings["health"].value,
        "crontab_file": crontab,
        "handle_signals": True,
    }
    tasks = what.tasks if isinstance(what, App) else what
    try:
        if isinstance(what, App):
            if dev:
                _watch_loop(what)
            async with what.running(**options) as runner:
                await _wait(runner, settings, control, tasks if dev else None)
        else:
            watching = [BlockedLoop()] if dev else None
            runner = await run(what, **_connection(settings), **options, events=events, middleware=watching)
            await _wait(runner, settings, control, tasks if dev else None)
    except SchemaTooNewError:
        return BREAKING_MIGRATION
    return 0


def _watch_loop(app: App) -> None:
    """Add what warns of a blocked event loop, unless the app has it."""
    given = app.settings["middleware"]
    if not any(isinstance(one, BlockedLoop) for one in given):
        app.close_sync()  # an import may have added jobs; connections that are open cannot be configured
        app.configure(middleware=[BlockedLoop(), *given])


async def _wait(
    runner: Runner,
    settings: Mapping[str, Value],
    control: Control | None,
    served: Collection[str] | None,
) -> None:
    """Wait for the end of the worker; meanwhile warn of tasks that are not among `served`, if given."""
    if control is not None:
        _obey(control, runner, settings["shutdown_grace"].value)
    if served is None:
        await runner.wait()
        return
    warning = asyncio.create_task(warn_of_unserved(runner.utils, served))
    runner.events.on("stop", lambda _: warning.cancel())  # its connections are closed then
    try:
        await runner.wait()
    finally:
        warning.cancel()
        await asyncio.wait([warning])


def _obey(control: Control, runner: Runner, grace: float) -> None:
    stops: list[asyncio.Task[None]] = []

    def stop(why: str, grace: float | None = None) -> None:
        runner.events.on("stop", lambda _: logger.info("%s: finishing what runs", why))
        stopping = asyncio.create_task(runner.stop(grace))
        stopping.add_done_callback(lambda task: task.cancelled() or task.exception())  # `wait` raises it
        stops.append(stopping)

    control.listen(
        finish=lambda: stop("There is newer code"),
        orphaned=lambda: stop("The process that started this one is gone", grace),
    )
    control.ready()


async def _run_once(
    settings: Mapping[str, Value], what: App | Tasks, events: Events, control: Control | None
) -> int:
    if control is not None:
        control.listen(finish=_stop_ourselves, orphaned=_stop_ourselves)
    if isinstance(what, App):
        drained = await what.run_once(**_of_both(settings))
    else:
        drained = await run_once(what, **_connection(settings), **_of_both(settings), events=events)
    logger.info("Nothing is left to run: done %d, failed %d", drained.done, drained.failed)
    return 0


def _stop_ourselves() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _connection(settings: Mapping[str, Value]) -> dict[str, Any]:
    """Where the queue is, and how to connect to it."""
    return {argument: settings[name].value for argument, name in _OF_CONNECTION.items()}


def _configure(app: App, settings: Mapping[str, Value]) -> App:
    """What the app itself says of the connection holds, unless a flag says otherwise."""
    for argument, name in _OF_CONNECTION.items():
        value, source = settings[name]
        says_itself = app.sets(argument) or (argument == "dsn" and app.sets("pool"))
        if source.startswith("-") or (source != "default" and not says_itself):
            app.configure(**{argument: value})
    return app


def _of_both(settings: Mapping[str, Value]) -> dict[str, Any]:
    """What `run` and `run_once` take beside that."""
    names = {
        "concurrency": "jobs",
        "max_task_processes": "max_task_processes",
        "max_jobs_per_task_process": "max_jobs_per_task_process",
        "prefetch": "prefetch",
        "shutdown_grace": "shutdown_grace",
        "recovery": "recovery",
        "heartbeat_interval": "heartbeat_interval",
        "lease": "lease",
        "fast_lease": "fast_lease",
        "recovery_delay": "recovery_delay",
    }
    return {
        **{argument: settings[name].value for argument, name in names.items()},
        "exit_if_stuck": True,  # whoever started the command starts it again
    }


def load(settings: Mapping[str, Value], tasks_of: str | None) -> App | Tasks:
    """The tasks that were named, or those of the folder."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # where the modules are that tasks import
    if tasks_of is None:
        tasks = load_tasks(settings["tasks"].value)
        queue = App(**_connection(settings))
        for function in tasks.values():
            if (declared := task_of(function)) is not None and declared.is_loose:
                declared.attach(queue)  # so that they can add jobs of each other
        return tasks
    found = load_named(tasks_of)
    if isinstance(found, App):
        return _configure(found, settings)
    if isinstance(found, Mapping):
        return found
    raise ConfigurationError(
        f"{tasks_of} must be an App, or a mapping of task identifiers to functions, not a "
        f"{type(found).__name__!r}."
    )


def _watched(settings: Mapping[str, Value], tasks_of: str | None) -> list[Path]:
    if find_spec("watchfiles") is None:
        raise MissingExtraError("--watch needs one more package: pip install 'graphile-worker[watch]'")
    crontabs = _crontabs(settings, tasks_of)
    if tasks_of is not None:
        return [Path.cwd(), *crontabs]
    folder = Path(settings["tasks"].value)
    return [folder, folder.with_name(f"{folder.name}.py"), *crontabs]


def _install(settings: Mapping[str, Value], tasks_of: str | None) -> None:
    async def install() -> str:
        async with _utils(settings, load(settings, tasks_of) if tasks_of else None) as utils:
            await utils.migrate()
            return utils.schema

    click.echo(f"Schema {asyncio.run(install())} is up to date")


@asynccontextmanager
async def _utils(settings: Mapping[str, Value], what: App | Tasks | None) -> AsyncIterator[WorkerUtils]:
    """To look after the queue: the app's, if it is an app."""
    if isinstance(what, App):
        async with what:
            yield what.utils
    else:
        async with WorkerUtils(settings["connection"].value, schema=settings["schema"].value) as utils:
            yield utils


def _clean_up(settings: Mapping[str, Value], tasks_of: str | None, names: Sequence[str]) -> None:
    chosen = [name.strip() for given in names for name in given.split(",")]
    for name in chosen:
        if name not in set(CleanupTask):
            raise click.UsageError(f"There is no cleanup {name!r}. There are: {', '.join(CleanupTask)}.")
    # Workers remember the numbers of their tasks, so the names of ours are kept.
    needed = tasks_of is not None or CleanupTask.GC_TASK_IDENTIFIERS in chosen
    what = load(settings, tasks_of) if needed else {}
    click.echo(cleaned_up(*asyncio.run(_cleaned(settings, what, chosen))))


async def _cleaned(settings: Mapping[str, Value], what: App | Tasks, chosen: list[str]) -> Cleaned:
    async with _utils(settings, what) as utils:
        await utils.migrate()
        keep = list(what.tasks if isinstance(what, App) else what)
        return await utils.cleanup(chosen, keep_task_identifiers=keep)


def crontab_of(settings: Mapping[str, Value], tasks_of: str | None, what: App | Tasks | None) -> str | None:
    """The crontab to read, if there is one; one that was asked for must be there."""
    crontab, source = settings["crontab"]
    if source != "default":
        return str(crontab)
    if isinstance(what, App) and what.sets("crontab"):
        return None
    return next((str(path) for path in _crontabs(settings, tasks_of) if path.exists()), None)


def _crontabs(settings: Mapping[str, Value], tasks_of: str | None) -> list[Path]:
    """Where it may be: beside the folder of the tasks, or where the command is run."""
    crontab, source = settings["crontab"]
    here = Path(crontab)
    if tasks_of is not None or source != "default":
        return [here]
    beside = Path(settings["tasks"].value).parent / here
    return [here] if beside == here else [beside, here]
