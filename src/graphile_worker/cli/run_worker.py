"""``graphile-worker run``: running workers from the command line."""

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

from graphile_worker._base.logs import library_logger as logger
from graphile_worker._client.administration import CleanupTask
from graphile_worker._tasks.loader import load_object, load_tasks
from graphile_worker._worker.execution.job_log import without_frames_in
from graphile_worker._worker.lifespan import LIBRARY_FILES
from graphile_worker._worker.run_options import AppRunOnceOptions, AppRunOptions
from graphile_worker.app import App
from graphile_worker.cli import logs
from graphile_worker.cli.control import Control
from graphile_worker.cli.exit_codes import BREAKING_MIGRATION, exit_by_signal
from graphile_worker.cli.printing import cleanup_summary
from graphile_worker.cli.service_manager import ServiceManager
from graphile_worker.cli.settings import (
    CONNECTION_ARGUMENTS,
    HOST,
    HOST_APP,
    SETTING_NAMES,
    unknown_variables,
)
from graphile_worker.cli.unserved import warn_of_unserved
from graphile_worker.client import WorkerUtils
from graphile_worker.errors import ConfigurationError, MissingExtraError, SchemaTooNewError
from graphile_worker.events import PoolFatalError
from graphile_worker.events.emitter import Events
from graphile_worker.middleware import BlockedLoop
from graphile_worker.runner import run, run_once
from graphile_worker.tasks import task_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Sequence
    from types import TracebackType

    from graphile_worker._client.administration import CleanupResult
    from graphile_worker._worker.execution.handlers import Tasks
    from graphile_worker.cli.settings import Value
    from graphile_worker.middleware import Middleware
    from graphile_worker.runner import Runner


def run_worker(
    settings: Mapping[str, Value],
    app_path: str | None,
    *,
    once: bool = False,
    watch: bool = False,
    schema_only: bool = False,
    cleanup: Sequence[str] = (),
    dev: bool = False,
) -> None:
    """Run a worker, or several in processes; or only install the schema, or clean up.

    With `dev` the worker warns of a blocked event loop, and of jobs without a worker.
    """
    _reject_combinations(once=once, watch=watch, schema_only=schema_only, cleanup=bool(cleanup))
    if app_path is not None and settings["tasks"].source == "--tasks":
        raise click.UsageError(f"{app_path} and --tasks cannot be combined: give one of them.")
    app_path = resolve_app_path(settings, app_path)
    control = Control.from_environment()
    level, form = settings["log_level"].value, settings["log_format"].value
    logs.configure(level, form, is_child=control is not None)
    if control is None:
        for warning in unknown_variables():
            logger.warning("%s", warning)
    if schema_only:
        _install(settings, app_path)
    elif cleanup:
        _clean_up(settings, app_path, cleanup)
    elif settings["metrics"].value != "off" and settings["health"].value is None:
        raise click.UsageError("--metrics needs a port: pass --health too.")
    elif control is None and (watch or settings["processes"].value > 1):
        from graphile_worker.cli.supervisor import supervise  # noqa: PLC0415

        paths = _watched_paths(settings, app_path) if watch else ()
        supervise(settings["processes"].value, once=once, watched=paths, health=settings["health"].value)
    else:
        source = load(settings, app_path)
        events = source.events if isinstance(source, App) else Events()
        if once:
            worker = _run_once(settings, source, events, control)
        else:
            crontab = find_crontab(settings, app_path, source)
            worker = _run(settings, source, crontab, events, control, dev=dev)
        _run_to_end(worker, events)


def _run_to_end(worker: Coroutine[Any, Any, int], events: Events) -> None:
    """Run the worker, and exit with its status or by the signal that stopped it."""
    stopped_by: list[str] = []
    lifespan_errors: list[tuple[BaseException, TracebackType | None]] = []

    def on_fatal_error(fatal: PoolFatalError) -> None:
        if fatal.action == "lifespan":
            frames = without_frames_in(LIBRARY_FILES, fatal.error.__traceback__)
            lifespan_errors.append((fatal.error, frames))

    events.on("gracefulShutdown", lambda event: stopped_by.append(event.signal))
    events.on(PoolFatalError, on_fatal_error)
    try:
        status = asyncio.run(worker)
    except Exception as error:
        # If the user's code failed, log its frames without those of the command.
        for failure, frames in lifespan_errors:
            if failure is error:
                exc_info = (type(error), error, frames)
                logger.error("Cannot start the worker: its lifespan failed", exc_info=exc_info)  # noqa: TRY400
                sys.exit(1)
        raise
    if stopped_by:
        exit_by_signal(signal.Signals[stopped_by[0]])
    sys.exit(status)


def resolve_app_path(settings: Mapping[str, Value], argument: str | None) -> str | None:
    """Return the path of the app: the argument, or the setting unless the flag --tasks is given."""
    has_folder = settings["tasks"].source.startswith("-")
    return argument or (None if has_folder else settings["app"].value)


def _reject_combinations(**chosen: bool) -> None:
    flags = [f"--{name.replace('_', '-')}" for name, is_chosen in chosen.items() if is_chosen]
    if len(flags) > 1:
        raise click.UsageError(f"{' and '.join(flags)} cannot be combined.")


async def _run(
    settings: Mapping[str, Value],
    source: App | Tasks,
    crontab: str | None,
    events: Events,
    control: Control | None,
    *,
    dev: bool,
) -> int:
    if crontab is not None:
        logger.info("Using the crontab %s", crontab)
    options: Any = {
        **_arguments(settings, AppRunOptions.__annotations__),
        "exit_if_stuck": True,  # a supervisor is expected to start the command again
        "crontab_file": crontab,
        "handle_signals": True,
    }
    if control is not None:  # the supervisor has the port
        options["health"] = control.health_socket
    tasks = source.tasks if isinstance(source, App) else source
    middleware = _extra_middleware(settings, dev=dev)
    try:
        if isinstance(source, App):
            _add_middleware(source, middleware)
            async with source.running(**options) as runner:
                await _wait(runner, settings, control, tasks if dev else None)
        else:
            runner = await run(
                source, **connection_arguments(settings), **options, events=events, middleware=middleware
            )
            await _wait(runner, settings, control, tasks if dev else None)
    except SchemaTooNewError:
        return BREAKING_MIGRATION
    return 0


def _extra_middleware(settings: Mapping[str, Value], *, dev: bool) -> list[Middleware]:
    """Return the middleware that the command adds to that of the app."""
    added: list[Middleware] = [BlockedLoop()] if dev else []
    if settings["metrics"].value == "prometheus":
        from graphile_worker.telemetry.prometheus import PrometheusMetrics  # noqa: PLC0415

        added.append(PrometheusMetrics())
    return added


def _add_middleware(app: App, added: Iterable[Middleware]) -> None:
    """Add middleware to the app, except kinds of middleware that it has."""
    given = list(app.settings["middleware"] or ())
    kinds = {type(middleware) for middleware in given}
    if missing := [middleware for middleware in added if type(middleware) not in kinds]:
        app.close_sync()  # an import may have added jobs, and an open app cannot be configured
        app.configure(middleware=[*missing, *given])


async def _wait(
    runner: Runner,
    settings: Mapping[str, Value],
    control: Control | None,
    served: Collection[str] | None,
) -> None:
    """Wait until the worker ends; meanwhile warn of tasks that are not in `served`, if given."""
    if control is not None:
        _listen_to_supervisor(control, runner, settings["shutdown_grace"].value)
        await _wait_until_ended(runner, served)
        return
    with ServiceManager.from_environment() as service_manager:
        runner.events.on("stop", lambda _: service_manager.report_stopping())
        service_manager.report_ready("Running jobs", lambda: runner.health().live)
        await _wait_until_ended(runner, served)


async def _wait_until_ended(runner: Runner, served: Collection[str] | None) -> None:
    if served is None:
        await runner.wait()
        return
    warning = asyncio.create_task(warn_of_unserved(runner.utils, served))
    runner.events.on("stop", lambda _: warning.cancel())  # because its connections are closed then
    try:
        await runner.wait()
    finally:
        warning.cancel()
        await asyncio.wait([warning])


def _listen_to_supervisor(control: Control, runner: Runner, grace: float) -> None:
    stops: list[asyncio.Task[None]] = []

    def stop(reason: str, grace: float | None = None) -> None:
        runner.events.on("stop", lambda _: logger.info("%s: finishing running jobs", reason))
        stopping = asyncio.create_task(runner.stop(grace))
        stopping.add_done_callback(lambda task: task.cancelled() or task.exception())  # `wait` raises it
        stops.append(stopping)

    control.listen(
        finish=lambda: stop("A new worker process has started"),
        orphaned=lambda: stop("The supervisor process is gone", grace),
    )
    control.ready()


async def _run_once(
    settings: Mapping[str, Value], source: App | Tasks, events: Events, control: Control | None
) -> int:
    if control is not None:
        control.listen(finish=_terminate_self, orphaned=_terminate_self)
    options: Any = {**_arguments(settings, AppRunOnceOptions.__annotations__), "exit_if_stuck": True}
    if isinstance(source, App):
        summary = await source.run_once(**options)
    else:
        summary = await run_once(source, **connection_arguments(settings), **options, events=events)
    logger.info("No jobs left to run: %d succeeded, %d failed", summary.succeeded, summary.failed)
    return 0


def _terminate_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _arguments(settings: Mapping[str, Value], names: Iterable[str]) -> dict[str, Any]:
    """Return the values of those arguments of `run` that are settings of the command."""
    return {name: settings[SETTING_NAMES[name]].value for name in names if name in SETTING_NAMES}


def connection_arguments(settings: Mapping[str, Value]) -> dict[str, Any]:
    """Return the arguments that say where the queue is and how to connect to it."""
    return _arguments(settings, CONNECTION_ARGUMENTS)


def _configure(app: App, settings: Mapping[str, Value]) -> App:
    """Apply the settings of the connection: flags always, others unless the app sets them itself."""
    for argument in connection_arguments(settings):
        value, source = settings[SETTING_NAMES[argument]]
        is_set = app._sets(argument) or (argument == "dsn" and app._sets("pool"))
        if source.startswith("-") or (source != "default" and not is_set):
            app.configure(**{argument: value})
    return app


def load(settings: Mapping[str, Value], app_path: str | None) -> App | Tasks:
    """Return the app or the mapping at a path, or the tasks of the folder if there is no path."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # tasks import modules from here
    if app_path is None:
        tasks = load_tasks(settings["tasks"].value)
        app = App(**connection_arguments(settings))
        for function in tasks.values():
            if (declared := task_of(function)) is not None and declared._is_unattached:
                declared._attach(app)  # so that tasks can enqueue each other
        return tasks
    host = HOST.get()
    found = load_object(app_path) if host is None or app_path != HOST_APP else host.app
    if isinstance(found, App):
        return _configure(found, settings)
    if isinstance(found, Mapping):
        return found
    raise ConfigurationError(
        f"{app_path} is a {type(found).__name__!r}; it must be an App, or a mapping of task identifiers to "
        "functions."
    )


def _watched_paths(settings: Mapping[str, Value], app_path: str | None) -> list[Path]:
    if find_spec("watchfiles") is None:
        raise MissingExtraError("--watch needs an extra package: pip install 'graphile-worker[watch]'")
    crontabs = _possible_crontabs(settings, app_path)
    if app_path is not None:
        return [Path.cwd(), *crontabs]
    folder = Path(settings["tasks"].value)
    return [folder, folder.with_name(f"{folder.name}.py"), *crontabs]


def _install(settings: Mapping[str, Value], app_path: str | None) -> None:
    async def install() -> str:
        async with _utils(settings, load(settings, app_path) if app_path else None) as utils:
            await utils.migrate()
            return utils.schema

    click.echo(f"Schema {asyncio.run(install())} is up to date")


@asynccontextmanager
async def _utils(settings: Mapping[str, Value], source: App | Tasks | None) -> AsyncIterator[WorkerUtils]:
    """Yield the utils of the app, or those of the settings if the source is not an app."""
    if isinstance(source, App):
        async with source:
            yield source.utils
    else:
        async with WorkerUtils(settings["connection"].value, schema=settings["schema"].value) as utils:
            yield utils


def _clean_up(settings: Mapping[str, Value], app_path: str | None, names: Sequence[str]) -> None:
    cleanup_tasks = [name.strip() for argument in names for name in argument.split(",")]
    for name in cleanup_tasks:
        if name not in set(CleanupTask):
            raise click.UsageError(f"Unknown cleanup {name!r}: must be one of {', '.join(CleanupTask)}.")
    # Workers cache the ids of their task identifiers, so the identifiers of these tasks must be kept.
    is_needed = app_path is not None or CleanupTask.GC_TASK_IDENTIFIERS in cleanup_tasks
    source = load(settings, app_path) if is_needed else {}
    click.echo(cleanup_summary(*asyncio.run(_run_cleanup(settings, source, cleanup_tasks))))


async def _run_cleanup(
    settings: Mapping[str, Value], source: App | Tasks, cleanup_tasks: list[str]
) -> CleanupResult:
    async with _utils(settings, source) as utils:
        await utils.migrate()
        keep = list(source.tasks if isinstance(source, App) else source)
        return await utils.cleanup(cleanup_tasks, keep_task_identifiers=keep)


def find_crontab(
    settings: Mapping[str, Value], app_path: str | None, source: App | Tasks | None
) -> str | None:
    """Return the path of the crontab, if there is one.

    A path from the settings is returned even if it does not exist, so that reading it fails.
    """
    crontab, setting_source = settings["crontab"]
    if setting_source != "default":
        return str(crontab)
    if isinstance(source, App) and source._sets("crontab"):
        return None
    return next((str(path) for path in _possible_crontabs(settings, app_path) if path.exists()), None)


def _possible_crontabs(settings: Mapping[str, Value], app_path: str | None) -> list[Path]:
    """Return where the crontab may be: next to the folder of the tasks, or in the current folder."""
    crontab, source = settings["crontab"]
    path = Path(crontab)
    if app_path is not None or source != "default":
        return [path]
    next_to_tasks = Path(settings["tasks"].value).parent / path
    return [path] if next_to_tasks == path else [next_to_tasks, path]
