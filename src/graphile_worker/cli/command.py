"""The command line: verbs, flags and helps. What a verb does is imported when it is called."""

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
    init,
    list_jobs,
    maintenance,
    overview,
    top,
    transfer_jobs,
)  # fmt: skip
from graphile_worker.cli.exits import end_by
from graphile_worker.cli.flags import CONTEXT, Integer, ending, gathered, given, setting_flags
from graphile_worker.cli.settings import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable

_OF_CRON = ("crontab", "tasks")
_ACTIONS = ("once", "watch", "schema_only", "cleanup")
_VERBS = (
    add_job.add, list_jobs.list_jobs, list_jobs.show, change_jobs.complete, change_jobs.fail,
    change_jobs.reschedule, change_jobs.retry, change_jobs.remove, change_jobs.cancel,
    overview.stats, overview.queues, overview.workers, maintenance.unlock, maintenance.sweep,
    maintenance.cleanup, maintenance.migrate, transfer_jobs.export_jobs, transfer_jobs.import_jobs,
    doctor.doctor, init.init, top.top,
)  # fmt: skip
HEADINGS = {
    "Workers": ("run", "dev", "init", "health", "workers", "unlock", "sweep", "cron"),
    "Jobs": ("add", "list", "show", "complete", "fail", "reschedule", "retry", "remove", "cancel"),
    "The queue": ("top", "stats", "queues", "cleanup", "migrate", "export", "import", "doctor"),
    "This command": ("config", "completion"),
}
"""Under which heading of the help a command stands."""
_CODES = "; 57, the schema is a newer one"


def _actions(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option(
            "--cleanup", metavar="TASKS", multiple=True, help="Clean up (GC_JOB_QUEUES, …), then exit."
        ),
        click.option("--schema-only", is_flag=True, help="Install or complete the schema, then exit."),
        click.option("-w", "--watch", is_flag=True, help="Take new code at once when a file changes."),
        click.option("--once", is_flag=True, help="Run what can run now, then exit."),
    ):
        function = option(function)
    return function


class Group(click.Group):
    """Knows what was nearly meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not ctx.resilient_parsing:
            near = difflib.get_close_matches(args[0], self.commands, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(self.commands)}."
            if ":" in args[0]:
                how = "run" if ctx.parent is None else f"{ctx.info_name} --app"
                hint = f"Did you mean: graphile-worker {how} {args[0]}?"
            ctx.fail(f"There is no command {args[0]!r}. {hint}")
        return super().resolve_command(ctx, args)


class Root(Group):
    """Keeps its help short, though it has many commands and all flags of a worker."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; if whoever reads what it prints has seen enough, it ends as programs do then."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:  # here, for click would make the exit code 1 of it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            end_by(signal.SIGPIPE)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Only the flags that all commands have: those of a worker stand in the help of run."""
        for_all = {setting.name for setting in SETTINGS if setting.for_all_verbs}
        shown = [
            record
            for param in self.get_params(ctx)
            if param.name in {*for_all, "config"} or param.is_eager
            if (record := param.get_help_record(ctx)) is not None
        ]
        with formatter.section("Options, beside those of run"):
            formatter.write_dl(shown)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """By what they are about, with a line for each."""
        for heading, names in HEADINGS.items():
            found = [(name, command) for name in names if (command := self.get_command(ctx, name))]
            with formatter.section(heading):
                formatter.write_dl([(name, command.get_short_help_str(60)) for name, command in found])


@click.group(
    cls=Root,
    invoke_without_command=True,
    context_settings=CONTEXT,
    epilog="\b\nExample: graphile-worker -c postgresql://me@localhost/mine -j 10\n\n"
    "Exit codes and environment: graphile-worker run --help.",
)
@_actions
@setting_flags(of_run=True)
@click.version_option(__version__, message="%(version)s")
@click.pass_context
def root(ctx: click.Context, /, **_: Any) -> None:
    """Run jobs of a queue in PostgreSQL: Graphile Worker for Python.

    Without a command it runs a worker, with the tasks of the folder tasks/.
    """
    ctx.obj = given(ctx)
    if ctx.invoked_subcommand is None:
        _run(ctx.obj, None)
    elif ctx.invoked_subcommand not in {"run", "dev"}:
        verb = ctx.invoked_subcommand
        allowed = {
            setting.name for setting in SETTINGS if setting.for_all_verbs or verb in {"config", setting.name}
        } | {"config", *(_OF_CRON if verb == "cron" else ())}
        for name in ctx.obj.keys() - allowed:
            flag = next(p.opts[-1] for p in ctx.command.params if p.name == name)
            ctx.fail(f"{flag} is about running a worker; it does nothing with {verb}.")


@root.command(
    context_settings=CONTEXT, epilog=ending("graphile-worker run myapp.jobs:app -j 10", codes=_CODES)
)
@_actions
@setting_flags(of_run=True)
@click.argument("tasks_of", metavar="[MODULE:APP]", required=False)
@click.pass_context
def run(ctx: click.Context, /, tasks_of: str | None, **_: Any) -> None:
    """Run a worker, with the tasks of the folder or of a module.

    MODULE:APP names an App, or a mapping of task identifiers to functions. What an App says of its
    connection holds, unless a flag says otherwise.
    """
    _run({**ctx.obj, **given(ctx)}, tasks_of)


@root.command(
    context_settings=CONTEXT,
    epilog=ending("graphile-worker dev", "graphile-worker dev shop.jobs:app -j 5", codes=_CODES),
)
@setting_flags(of_run=True)
@click.argument("tasks_of", metavar="[MODULE:APP]", required=False)
@click.pass_context
def dev(ctx: click.Context, /, tasks_of: str | None, **_: Any) -> None:
    """Run a worker while you write its tasks.

    It takes new code at once when a file changes, and says how to look into its database: a private
    PostgreSQL, unless another is named by -c, DATABASE_URL, the configuration file or the app.
    """
    from graphile_worker.cli.develop import develop  # noqa: PLC0415

    develop(gathered({**ctx.obj, **given(ctx)}), tasks_of)


@root.command(context_settings=CONTEXT, epilog=ending("graphile-worker health --health 8080"))
@setting_flags(of_run=False, also=("health",))
@click.option("--live", is_flag=True, help="Only whether they live, not whether they claim jobs.")
@click.option("--any-host", is_flag=True, help="Workers of all machines, not only of this one.")
@click.option("--json", "as_json", is_flag=True, help="What was found, as JSON.")
@click.pass_context
def health(ctx: click.Context, /, *, live: bool, any_host: bool, as_json: bool, **_: Any) -> None:
    """Ask whether workers can do their work; exit code 1 if not.

    With --health it asks the worker that answers there. Without, it asks the database for the workers of this
    machine: one at least must be there, and all must be ready.
    """
    from graphile_worker.cli.check_health import check_health  # noqa: PLC0415

    settings = gathered({**ctx.obj, **given(ctx)})
    if not check_health(settings, live=live, any_host=any_host, as_json=as_json):
        ctx.exit(1)


@root.group(
    cls=Group,
    invoke_without_command=True,
    context_settings=CONTEXT,
    epilog=ending("graphile-worker cron next '0 8 * * MON' --tz Europe/Paris"),
)
@setting_flags(of_run=False, also=_OF_CRON)
@click.option("--app", "tasks_of", metavar="MODULE:APP", help="An app whose recurring tasks to show too.")
@click.option("--json", "as_json", is_flag=True, help="An array of objects.")
@click.pass_context
def cron(ctx: click.Context, /, *, tasks_of: str | None, as_json: bool, **_: Any) -> None:
    """Show recurring tasks, and when they run next.

    Also when they ran last, and whether the database knows them.
    """
    if ctx.invoked_subcommand is None:
        from graphile_worker.cli.schedules import print_schedules  # noqa: PLC0415

        settings = gathered({**ctx.obj, **given(ctx)})
        print_schedules(settings, tasks_of or settings["app"].value, as_json=as_json)


@cron.command(
    "check", context_settings=CONTEXT, epilog=ending("graphile-worker cron check crontab", reads=False)
)
@click.argument("paths", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.pass_context
def check_crontab(ctx: click.Context, paths: tuple[Path, ...]) -> None:
    """Read crontabs, and tell all that is wrong with them.

    A file called - is standard input. The exit code is 1 if something is wrong.
    """
    from graphile_worker.cli.schedules import check  # noqa: PLC0415

    if not check(paths):
        ctx.exit(1)


@cron.command(
    "next", context_settings=CONTEXT, epilog=ending("graphile-worker cron next '*/5 * * * *'", reads=False)
)
@click.argument("pattern")
@click.option("--tz", metavar="ZONE", help="The time zone of the pattern, such as Europe/Paris.")
@click.option("-n", "--count", metavar="N", type=Integer(1, 1000), default=5, help="How many to show.")
def next_runs(pattern: str, tz: str | None, count: int) -> None:
    """Tell when a pattern fits next."""
    from graphile_worker.cli.schedules import print_next  # noqa: PLC0415

    print_next(pattern, tz, count)


@root.command(context_settings=CONTEXT, epilog=ending("graphile-worker config -j 10"))
@setting_flags(of_run=True)
@click.option("--json", "as_json", is_flag=True, help="An object.")
@click.pass_context
def config(ctx: click.Context, /, *, as_json: bool, **_: Any) -> None:
    """Show each setting, and where its value comes from. Passwords are not shown."""
    from graphile_worker.cli.show_settings import print_settings  # noqa: PLC0415

    print_settings(gathered({**ctx.obj, **given(ctx)}), as_json=as_json)


@root.command(
    context_settings=CONTEXT,
    epilog=ending('eval "$(graphile-worker completion bash)"', reads=False),
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print what makes a shell complete this command's flags.

    A line such as that of the example, in ~/.bashrc, is all that it takes.
    """
    from click.shell_completion import get_completion_class  # noqa: PLC0415

    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 - they are click's own
    name = "graphile-worker"
    click.echo(kind(ctx.find_root().command, {}, name, "_GRAPHILE_WORKER_COMPLETE").source())


for _verb in _VERBS:
    root.add_command(_verb)


def _run(flags: dict[str, Any], tasks_of: str | None) -> None:
    from graphile_worker.cli.run_worker import run_worker  # noqa: PLC0415

    actions = {name: flags[name] for name in _ACTIONS if name in flags}
    run_worker(gathered(flags), tasks_of, **actions)
