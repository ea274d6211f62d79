"""The verbs, flags and helps of the command line. A verb's implementation is imported when it is called."""

from __future__ import annotations

import difflib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphile_worker import __version__
from graphile_worker.cli import (
    add_job,
    change_jobs,
    doctor,
    exporter,
    history,
    init,
    limits,
    list_jobs,
    maintenance,
    overview,
    pausing,
    top,
    transfer_jobs,
    web,
)  # fmt: skip
from graphile_worker.cli.exit_codes import BREAKING_MIGRATION, exit_by_signal
from graphile_worker.cli.flags import (
    CONTEXT,
    Integer,
    json_flag,
    load_settings,
    make_epilog,
    parsed_flags,
    setting_flags,
)
from graphile_worker.cli.settings import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable

_CRON_SETTINGS = ("crontab", "tasks")
_ACTIONS = ("once", "watch", "schema_only", "cleanup")
_VERBS = (
    add_job.add, list_jobs.list_jobs, list_jobs.show, change_jobs.complete, change_jobs.fail,
    change_jobs.reschedule, change_jobs.retry, change_jobs.remove, change_jobs.cancel,
    overview.stats, overview.queues, overview.workers, maintenance.unlock, maintenance.sweep,
    maintenance.cleanup, maintenance.migrate, transfer_jobs.export_jobs, transfer_jobs.import_jobs,
    doctor.doctor, exporter.exporter, init.init, top.top, history.history, history.failures,
    web.web,
    pausing.pause, pausing.resume, pausing.pauses, limits.limits,
)  # fmt: skip
HEADINGS = {
    "Workers": ("run", "dev", "init", "health", "workers", "unlock", "sweep", "cron"),
    "Jobs": ("add", "list", "show", "complete", "fail", "reschedule", "retry", "remove", "cancel"),
    "Queue": (
        "top",
        "web",
        "stats",
        "failures",
        "history",
        "queues",
        "pause",
        "resume",
        "pauses",
        "limits",
        "cleanup",
        "migrate",
        "export",
        "import",
        "doctor",
        "exporter",
    ),
    "This command": ("config", "completion"),
}
"""The verbs under each heading of the help."""
_CODES = f"; {BREAKING_MIGRATION}, the schema is newer than this worker supports"


def _actions(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option(
            "--cleanup",
            metavar="TASKS",
            multiple=True,
            help="Run cleanup tasks (GC_JOB_QUEUES, …), then exit.",
        ),
        click.option("--schema-only", is_flag=True, help="Install or migrate the schema, then exit."),
        click.option("-w", "--watch", is_flag=True, help="Restart with the new code when a file changes."),
        click.option("--once", is_flag=True, help="Run the jobs that are due, then exit."),
    ):
        function = option(function)
    return function


class Group(click.Group):
    """A group of commands that suggests a similar name for an unknown one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not ctx.resilient_parsing:
            near = difflib.get_close_matches(args[0], self.commands, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Commands: {', '.join(self.commands)}."
            if ":" in args[0]:
                prefix = "run" if ctx.parent is None else f"{ctx.info_name} --app"
                hint = f"Did you mean: graphile-worker {prefix} {args[0]}?"
            ctx.fail(f"Unknown command {args[0]!r}. {hint}")
        return super().resolve_command(ctx, args)


class Root(Group):
    """The command itself. Its help is short, although it has many commands and all flags of a worker."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and end by SIGPIPE if the reader of its output has closed the pipe."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:  # caught here, because click would exit with code 1
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            exit_by_signal(signal.SIGPIPE)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write only the flags that all commands have. The help of run lists the flags of a worker."""
        for_all = {setting.name for setting in SETTINGS if setting.for_all_verbs}
        shown = [
            record
            for param in self.get_params(ctx)
            if param.name in {*for_all, "config"} or param.is_eager
            if (record := param.get_help_record(ctx)) is not None
        ]
        with formatter.section("Options, besides those of run"):
            formatter.write_dl(shown)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands under their headings, with a line for each."""
        for heading, names in HEADINGS.items():
            found = [(name, command) for name in names if (command := self.get_command(ctx, name))]
            with formatter.section(heading):
                formatter.write_dl([(name, command.get_short_help_str(60)) for name, command in found])


@click.group(
    cls=Root,
    invoke_without_command=True,
    context_settings=CONTEXT,
    epilog="\b\nExample: graphile-worker -c postgresql://me@localhost/mine -j 10\n"
    "Exit codes and environment: graphile-worker run --help.",
)
@_actions
@setting_flags(all_settings=True)
@click.version_option(__version__, message="%(version)s")
@click.pass_context
def root(ctx: click.Context, /, **_: Any) -> None:
    """Run jobs from a queue in PostgreSQL: Graphile Worker for Python.

    Without a command, run a worker with the tasks in the folder tasks/.
    """
    ctx.obj = parsed_flags(ctx)
    if ctx.invoked_subcommand is None:
        _run(ctx.obj, None)
    elif ctx.invoked_subcommand not in {"run", "dev"}:
        verb = ctx.invoked_subcommand
        allowed = {
            setting.name for setting in SETTINGS if setting.for_all_verbs or verb in {"config", setting.name}
        } | {"config", *(_CRON_SETTINGS if verb == "cron" else ())}
        for name in ctx.obj.keys() - allowed:
            flag = next(p.opts[-1] for p in ctx.command.params if p.name == name)
            ctx.fail(f"{flag} is an option for running a worker: it has no effect on {verb}.")


@root.command(
    context_settings=CONTEXT, epilog=make_epilog("graphile-worker run myapp.jobs:app -j 10", codes=_CODES)
)
@_actions
@setting_flags(all_settings=True)
@click.argument("app_path", metavar="[MODULE:APP]", required=False)
@click.pass_context
def run(ctx: click.Context, /, app_path: str | None, **_: Any) -> None:
    """Run a worker with the tasks of an app or a folder.

    MODULE:APP names an App, or a mapping of task identifiers to functions. Connection settings of an App
    apply unless a flag overrides them.
    """
    _run({**ctx.obj, **parsed_flags(ctx)}, app_path)


@root.command(
    context_settings=CONTEXT,
    epilog=make_epilog("graphile-worker dev", "graphile-worker dev shop.jobs:app -j 5", codes=_CODES),
)
@setting_flags(all_settings=True)
@click.option("--web/--no-web", "shows_web", default=True, help="Serve the dashboard too [yes].")
@click.option(
    "--web-port",
    metavar="PORT",
    type=Integer(0, 65535),
    default=8900,
    help="Port of the dashboard [8900].",
)
@click.argument("app_path", metavar="[MODULE:APP]", required=False)
@click.pass_context
def dev(ctx: click.Context, /, app_path: str | None, *, shows_web: bool, web_port: int, **_: Any) -> None:
    """Run a worker for development, with a dashboard.

    It restarts when a file changes, prints the psql command for its database, and uses a private PostgreSQL
    if no database is configured.
    """
    from graphile_worker.cli.develop import develop  # noqa: PLC0415

    settings = load_settings({**ctx.obj, **parsed_flags(ctx)})
    develop(settings, app_path, web_port=web_port if shows_web else None)


@root.command(context_settings=CONTEXT, epilog=make_epilog("graphile-worker health --health 8080"))
@setting_flags(all_settings=False, also=("health",))
@click.option(
    "--live", is_flag=True, help="Check only whether workers are alive, not whether they claim jobs."
)
@click.option("--any-host", is_flag=True, help="Check the workers on all machines, not only on this one.")
@json_flag
@click.pass_context
def health(ctx: click.Context, /, *, live: bool, any_host: bool, as_json: bool, **_: Any) -> None:
    """Check whether workers are healthy; exit code 1 if not.

    With --health, query the worker that serves health checks at this address. Without it, read the heartbeats
    of this machine's workers from the database: there must be at least one, and all must be ready.
    """
    from graphile_worker.cli.check_health import check_health  # noqa: PLC0415

    settings = load_settings({**ctx.obj, **parsed_flags(ctx)})
    if not check_health(settings, live=live, any_host=any_host, as_json=as_json):
        ctx.exit(1)


@root.group(
    cls=Group,
    invoke_without_command=True,
    context_settings=CONTEXT,
    epilog=make_epilog("graphile-worker cron next '0 8 * * MON' --tz Europe/Paris"),
)
@setting_flags(all_settings=False, also=_CRON_SETTINGS)
@click.option("--app", "app_path", metavar="MODULE:APP", help="App whose recurring tasks to show too.")
@json_flag
@click.pass_context
def cron(ctx: click.Context, /, *, app_path: str | None, as_json: bool, **_: Any) -> None:
    """Show recurring tasks and their next runs.

    Also show when each ran last, and whether the database knows it.
    """
    if ctx.invoked_subcommand is None:
        from graphile_worker.cli.schedules import print_schedules  # noqa: PLC0415

        settings = load_settings({**ctx.obj, **parsed_flags(ctx)})
        print_schedules(settings, app_path or settings["app"].value, as_json=as_json)


@cron.command(
    "check",
    context_settings=CONTEXT,
    epilog=make_epilog("graphile-worker cron check crontab", reads_settings=False),
)
@click.argument("paths", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.pass_context
def check_crontab(ctx: click.Context, paths: tuple[Path, ...]) -> None:
    """Check crontab files, and print every error in them.

    The file - is standard input. The exit code is 1 if there is an error.
    """
    from graphile_worker.cli.schedules import check  # noqa: PLC0415

    if not check(paths):
        ctx.exit(1)


@cron.command(
    "next",
    context_settings=CONTEXT,
    epilog=make_epilog("graphile-worker cron next '*/5 * * * *'", reads_settings=False),
)
@click.argument("pattern")
@click.option("--tz", metavar="ZONE", help="Time zone of the pattern, such as Europe/Paris [UTC].")
@click.option(
    "-n", "--count", metavar="N", type=Integer(1, 1000), default=5, help="Number of runs to show [5]."
)
def next_runs(pattern: str, tz: str | None, count: int) -> None:
    """Show when a pattern matches next."""
    from graphile_worker.cli.schedules import print_next  # noqa: PLC0415

    print_next(pattern, tz, count)


@root.command(context_settings=CONTEXT, epilog=make_epilog("graphile-worker config -j 10"))
@setting_flags(all_settings=True)
@json_flag
@click.pass_context
def config(ctx: click.Context, /, *, as_json: bool, **_: Any) -> None:
    """Show all settings and the sources of their values.

    Passwords are not shown.
    """
    from graphile_worker.cli.show_settings import print_settings  # noqa: PLC0415

    print_settings(load_settings({**ctx.obj, **parsed_flags(ctx)}), as_json=as_json)


@root.command(
    context_settings=CONTEXT,
    epilog=make_epilog('eval "$(graphile-worker completion bash)"', reads_settings=False),
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that lets a shell complete this command.

    Add the line of the example to ~/.bashrc, or to the startup file of another shell.
    """
    from click.shell_completion import get_completion_class  # noqa: PLC0415

    completion_class = get_completion_class(shell)
    assert completion_class is not None  # noqa: S101 - click has all three
    name = "graphile-worker"
    click.echo(completion_class(ctx.find_root().command, {}, name, "_GRAPHILE_WORKER_COMPLETE").source())


for _verb in _VERBS:
    root.add_command(_verb)


def _run(flags: dict[str, Any], app_path: str | None) -> None:
    from graphile_worker.cli.run_worker import run_worker  # noqa: PLC0415

    actions = {name: flags[name] for name in _ACTIONS if name in flags}
    run_worker(load_settings(flags), app_path, **actions)
