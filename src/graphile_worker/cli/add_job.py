"""``graphile-worker add``: one job more."""

from __future__ import annotations

import asyncio
import difflib
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphile_worker.cli import times
from graphile_worker.cli.flags import PRIORITY, json_flag, queue_of, small_integer, verb
from graphile_worker.cli.printing import clean, on_terminal, print_object
from graphile_worker.cli.times import Moment
from graphile_worker.errors import GraphileWorkerError
from graphile_worker.wording import some

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphile_worker.app import App
    from graphile_worker.cli.settings import Value
    from graphile_worker.job import Job

_MODES = ["replace", "preserve_run_at", "unsafe_dedupe"]


class _Mode(click.Choice[str]):
    """The same with a hyphen."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(str(value).replace("-", "_"), param, ctx)


@verb(
    "add",
    """add hello '{"name": "Ann"}'""",
    "add report @report.json --queue reports --run-at 2h",
    "add report --key report:7 --key-mode preserve_run_at",
)
@click.argument("task")
@click.argument("payload", required=False)
@click.option("--queue", "queue_name", metavar="NAME", help="Jobs of one queue run one after another.")
@click.option("--run-at", type=Moment(), help="now, 90s, 5m, 2h, 1d, or 2030-01-31T12:00Z.")
@click.option(
    "--max-attempts", type=small_integer(1), metavar="N", help="By default 25, or what the task says."
)
@click.option("--key", "job_key", metavar="KEY", help="Adding again changes the job with this key.")
@click.option("--key-mode", "job_key_mode", type=_Mode(_MODES), metavar="MODE", help=f"{', '.join(_MODES)}.")
@click.option("--priority", type=PRIORITY, metavar="N", help="Lower runs first.")
@click.option("--flag", "flags", metavar="FLAG", multiple=True, help="A label; may be given again.")
@click.option("--no-app", is_flag=True, help="Add it as it is here, whatever the app says.")
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

    PAYLOAD is JSON, {} by default; @FILE reads it from a file, and - from standard input. Without --run-at
    the job is due now.

    Where the setting app names an app, the job is added as the app adds it, where its workers look: what a
    task of the app says of its jobs holds, unless a flag says otherwise, and the payload is checked.
    """
    given = {name: value for name, value in options.items() if value not in (None, ())}
    read = _read_payload(payload)
    app = None if no_app else _app_of(settings)
    declared = app.tasks.get(task) if app is not None else None
    if options["job_key_mode"] and not (options["job_key"] or (declared and declared.makes_keys)):
        raise click.UsageError("--key-mode says what to do if the key is in use: it needs --key.")
    job = asyncio.run(
        _add_by(app, task, read, given) if app is not None else _add(settings, task, read, given)
    )
    if app is not None and declared is None:
        click.echo(_unknown(task, app), err=True)
    if as_json:
        from graphile_worker.cli.list_jobs import job_as_object  # noqa: PLC0415

        print_object(job_as_object(job))
    elif on_terminal():
        click.echo(f"Added job {job.id}: {clean(job.task_identifier)}, due {times.both(job.run_at)}")
    else:
        click.echo(job.id)


def _unknown(task: str, app: App) -> str:
    """Return the warning that the app does not have the task; another program may."""
    near = difflib.get_close_matches(task, app.tasks, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"It has: {some(sorted(app.tasks)) or 'none'}."
    return f"Warning: the app has no task {clean(repr(task))}, so its workers leave this job alone. {hint}"


def _app_of(settings: Mapping[str, Value]) -> App | None:
    """The app of the settings; a mapping of functions says nothing of jobs."""
    if settings["app"].value is None:
        return None
    from graphile_worker.app import App  # noqa: PLC0415
    from graphile_worker.cli.run_worker import load  # noqa: PLC0415

    try:
        with redirect_stdout(sys.stderr):  # what a module prints is not what we print
            found = load(settings, settings["app"].value)
    except GraphileWorkerError as error:
        why = str(error).rstrip(".")
        raise click.ClickException(f"{why}. Nothing was added; --no-app adds it without the app.") from None
    return found if isinstance(found, App) else None


async def _add_by(app: App, task: str, payload: Any, options: Mapping[str, Any]) -> Job:
    async with app:
        return await app.add_job(task, payload, **options)


async def _add(settings: Mapping[str, Value], task: str, payload: Any, options: Mapping[str, Any]) -> Job:
    async with queue_of(settings, reads=False) as utils:
        return await utils.add_job(task, payload, **options)


def _read_payload(given: str | None) -> Any:
    from graphile_worker.payload import decode_payload  # noqa: PLC0415

    if given is None:
        return None
    text, where = given, "PAYLOAD"
    try:
        if given == "-":
            text, where = sys.stdin.read(), "What came from standard input"
        elif given.startswith("@"):
            text, where = Path(given[1:]).read_text(encoding="utf-8"), given[1:]
        return decode_payload(text)
    except OSError as error:
        raise click.ClickException(f"{given[1:]} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:
        is_garbled = where == "PAYLOAD" and isinstance(error, json.JSONDecodeError)
        hint = """ Quote it for the shell, as in '{"name": "Ann"}'.""" if is_garbled else ""
        raise click.UsageError(f"{where} is not JSON that can be read: {error}.{hint}") from None
