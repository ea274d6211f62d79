"""``graphile-worker doctor``: what is wrong with a queue."""

from __future__ import annotations

import asyncio
import shutil
import textwrap
from typing import TYPE_CHECKING

import click

from graphile_worker.cli.flags import json_flag, verb
from graphile_worker.cli.printing import as_json_text, clean
from graphile_worker.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphile_worker.cli.settings import Value
    from graphile_worker.doctor import Finding

_COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "trouble": "red"}
_INDENT = 9
_WIDEST = 110
_NARROWEST = 40


@verb(
    "doctor",
    "doctor",
    "doctor --json | jq '.[] | select(.level == \"trouble\")'",
    also=("listen", "listen_connection", "prepared_statements"),
)
@click.option("-q", "--quiet", is_flag=True, help="Only what is not ok.")
@json_flag
def doctor(settings: Mapping[str, Value], *, quiet: bool, as_json: bool) -> int:
    """Look for what is wrong with a queue and its database.

    It looks at the connection and what stands in between, the server, rights, the schema, notifications, the
    clock, vacuum and long transactions, stuck queues, stale locks, and jobs that nobody serves. Each finding
    is ok, a note, a warning or trouble, and says what to do. With trouble the exit code is 1.

    It changes nothing. It takes the settings that workers take, so run it where they run.
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
            click.echo((",\n " if found else "[") + as_json_text(finding), nl=False)
        else:
            _print(finding)
        found.append(finding)
    if as_json:
        click.echo("]" if found else "[]")
    else:
        click.echo(_summary(found))
    return int(any(finding.level is Level.TROUBLE for finding in found))


def _print(finding: Finding) -> None:
    says = finding.says if finding.says.endswith((".", "?")) else f"{finding.says}."
    level = click.style(f"{finding.level:<{_INDENT}}", fg=_COLOURS[finding.level], bold=True)
    click.echo(level + _wrapped(f"{finding.check}: {says}"))
    if finding.advice:
        click.echo(" " * _INDENT + _wrapped(finding.advice, "  → "))


def _wrapped(text: str, mark: str = "") -> str:
    width = min(_WIDEST, shutil.get_terminal_size().columns) - _INDENT
    return textwrap.fill(
        clean(text), max(_NARROWEST, width), initial_indent=mark,
        subsequent_indent=" " * len(mark), break_long_words=False, break_on_hyphens=False,
    ).replace("\n", "\n" + " " * _INDENT)  # fmt: skip


def _summary(found: list[Finding]) -> str:
    levels = [finding.level.value for finding in found]
    counts = [
        counted(levels.count(level), level) for level in ("trouble", "warning", "note") if level in levels
    ]
    return f"Found: {', '.join(counts)}" if counts else "All is well"
