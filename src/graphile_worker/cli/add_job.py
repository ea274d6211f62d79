"""``graphile-worker add``: adding a job."""

from __future__ import annotations

import asyncio
import difflib
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphile_worker._base.text import join_truncated
from graphile_worker.cli import times
from graphile_worker.cli.flags import PRIORITY, json_flag, open_utils, small_integer, verb
from graphile_worker.cli.printing import escape, on_terminal, print_object
from graphile_worker.cli.times import Delay, Moment
from graphile_worker.errors import GraphileWorkerError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphile_worker.app import App
    from graphile_worker.cli.settings import Value
    from graphile_worker.job import Job

_MODES = ["replace", "preserve_run_at", "unsafe_dedupe"]


class _Mode(click.Choice[str]):
    """A choice that also accepts hyphens for underscores."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(str(value).replace("-", "_"), param, ctx)


@verb(
    "add",
    """add hello '{"name": "Ann"}'""",
    "add report @report.json --queue reports --delay 2h",
    "add report --key report:7 --key-mode preserve_run_at",
)
@click.argument("task")
@click.argument("payload", required=False)
@click.option("--queue", "queue_name", metavar="NAME", help="Serial queue: its jobs run one after another.")
@click.option("--run-at", type=Moment(), help="When to run it: 90s, 5m, 2h, 1d, or 2030-01-31T12:00Z [now].")
@click.option("--delay", type=Delay(), help="Delay before it runs: 5 (seconds), 5m, 2h, 1d.")
@click.option(
    "--max-attempts",
    type=small_integer(1),
    metavar="N",
    help="Maximum number of attempts [the task's, or 25].",
)
@click.option("--key", "job_key", metavar="KEY", help="Job key: adding again updates the job with this key.")
@click.option(
    "--key-mode",
    "job_key_mode",
    type=_Mode(_MODES),
    metavar="MODE",
    help=f"What to do if the key exists: {', '.join(_MODES)} [{_MODES[0]}].",
)
@click.option(
    "--priority", type=PRIORITY, metavar="N", help="Priority: lower numbers run first [the task's, or 0]."
)
@click.option(
    "--flag", "flags", metavar="FLAG", multiple=True, help="Flag for forbidden_flags; may be repeated."
)
@click.option("--no-app", is_flag=True, help="Ignore the app of the settings.")
@json_flag
def add(
    settings: Mapping[str, Value],
    *,
    task: str,
    payload: str | None,
    no_app: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Add a job, and print its id.

    PAYLOAD is JSON, {} by default; @FILE reads it from a file, and - from standard input.

    If the setting app names an app, the job is added through it: to the app's database, with the task's
    options unless a flag overrides them, and with a payload that the task accepts.
    """
    given = {name: value for name, value in options.items() if value not in (None, ())}
    if {"run_at", "delay"} <= given.keys():
        raise click.UsageError("--run-at and --delay cannot be combined.")
    value = _read_payload(payload)
    app = None if no_app else _load_app(settings)
    declared = app.tasks.get(task) if app is not None else None
    if options["job_key_mode"] and not (options["job_key"] or (declared and declared._has_job_key)):
        raise click.UsageError("--key-mode needs --key: it says what to do if the key is in use.")
    job = asyncio.run(
        _add_through(app, task, value, given) if app is not None else _add(settings, task, value, given)
    )
    if app is not None and declared is None:
        click.echo(_unknown_task_warning(task, app), err=True)
    if as_json:
        from graphile_worker.cli.list_jobs import job_as_object  # noqa: PLC0415

        print_object(job_as_object(job))
    elif on_terminal():
        click.echo(f"Added job {job.id}: {escape(job.task_identifier)}, due {times.format_time(job.run_at)}")
    else:
        click.echo(job.id)


def _unknown_task_warning(task: str, app: App) -> str:
    """Return a warning that the app does not have the task, although another program may."""
    near = difflib.get_close_matches(task, app.tasks, n=1)
    hint = (
        f"Did you mean {near[0]!r}?" if near else f"Its tasks: {join_truncated(sorted(app.tasks)) or 'none'}."
    )
    return f"Warning: the app has no task {escape(repr(task))}, so its workers will not run this job. {hint}"


def _load_app(settings: Mapping[str, Value]) -> App | None:
    """Return the app of the settings, if any; a mapping of functions has no options for jobs."""
    if settings["app"].value is None:
        return None
    from graphile_worker.app import App  # noqa: PLC0415
    from graphile_worker.cli.run_worker import load  # noqa: PLC0415

    try:
        with redirect_stdout(sys.stderr):  # keep what modules print out of the output
            found = load(settings, settings["app"].value)
    except GraphileWorkerError as error:
        reason = str(error).rstrip(".")
        raise click.ClickException(
            f"{reason}. No job was added. To add it without the app, use --no-app."
        ) from None
    return found if isinstance(found, App) else None


async def _add_through(app: App, task: str, payload: Any, options: Mapping[str, Any]) -> Job:
    async with app:
        return await app.add_job(task, payload, **options)


async def _add(settings: Mapping[str, Value], task: str, payload: Any, options: Mapping[str, Any]) -> Job:
    async with open_utils(settings, reads_jobs=False) as utils:
        return await utils.add_job(task, payload, **options)


def _read_payload(given: str | None) -> Any:
    from graphile_worker._base.payload import decode_payload  # noqa: PLC0415

    if given is None:
        return None
    text, where = given, "PAYLOAD"
    try:
        if given == "-":
            text, where = sys.stdin.read(), "Standard input"
        elif given.startswith("@"):
            text, where = Path(given[1:]).read_text(encoding="utf-8"), given[1:]
        return decode_payload(text)
    except OSError as error:
        raise click.ClickException(f"Cannot read {given[1:]}: {error.strerror or error}.") from None
    except ValueError as error:
        is_argument = where == "PAYLOAD" and isinstance(error, json.JSONDecodeError)
        hint = """ Quote it for the shell, as in '{"name": "Ann"}'.""" if is_argument else ""
        raise click.UsageError(f"{where} is not valid JSON: {error}.{hint}") from None
