"""``graphile-worker doctor``: finding problems with a queue."""

from __future__ import annotations

import asyncio
import shutil
import textwrap
from typing import TYPE_CHECKING

import click

from graphile_worker._base.text import pluralize
from graphile_worker.cli.flags import json_flag, verb
from graphile_worker.cli.printing import escape, to_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphile_worker.cli.settings import Value
    from graphile_worker.doctor import Finding

_COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}
_INDENT = 9
_WIDEST = 110
_NARROWEST = 40


@verb(
    "doctor",
    "doctor",
    "doctor --json | jq '.[] | select(.level == \"error\")'",
    also=("listen", "listen_connection", "prepared_statements"),
)
@click.option("-q", "--quiet", is_flag=True, help="Print only findings that are not ok.")
@json_flag
def doctor(settings: Mapping[str, Value], *, quiet: bool, as_json: bool) -> int:
    """Find problems with a queue and its database.

    Check the connection and poolers, the server, rights, the schema, notifications, the clock, vacuum and
    long transactions, stuck queues, stale locks, and jobs that no worker serves. Each finding is ok, a note,
    a warning or an error, and says what to do. The exit code is 1 if there is an error.

    The command changes nothing. Run it where workers run, with the same settings.
    """
    return asyncio.run(_doctor(settings, quiet=quiet, as_json=as_json))


async def _doctor(settings: Mapping[str, Value], *, quiet: bool, as_json: bool) -> int:
    from graphile_worker.doctor import Level, examine  # noqa: PLC0415

    found: list[Finding] = []
    async for finding in examine(
        settings["connection"].value,
        schema=settings["schema"].value,
        listen=settings["listen"].value,
        listen_dsn=settings["listen_connection"].value,
        prepared_statements=settings["prepared_statements"].value,
    ):
        if quiet and finding.level is Level.OK:
            continue
        if as_json:
            click.echo((",\n " if found else "[") + to_json(finding), nl=False)
        else:
            _print(finding)
        found.append(finding)
    if as_json:
        click.echo("]" if found else "[]")
    else:
        click.echo(_summary(found))
    return int(any(finding.level is Level.ERROR for finding in found))


def _print(finding: Finding) -> None:
    message = finding.message if finding.message.endswith((".", "?")) else f"{finding.message}."
    level = click.style(f"{finding.level:<{_INDENT}}", fg=_COLOURS[finding.level], bold=True)
    click.echo(level + _wrapped(f"{finding.check}: {message}"))
    if finding.advice:
        click.echo(" " * _INDENT + _wrapped(finding.advice, "  → "))


def _wrapped(text: str, mark: str = "") -> str:
    width = min(_WIDEST, shutil.get_terminal_size().columns) - _INDENT
    return textwrap.fill(
        escape(text), max(_NARROWEST, width), initial_indent=mark,
        subsequent_indent=" " * len(mark), break_long_words=False, break_on_hyphens=False,
    ).replace("\n", "\n" + " " * _INDENT)  # fmt: skip


def _summary(found: list[Finding]) -> str:
    levels = [finding.level.value for finding in found]
    counts = [
        pluralize(levels.count(level), level) for level in ("error", "warning", "note") if level in levels
    ]
    return f"Found: {', '.join(counts)}" if counts else "No problems found"
