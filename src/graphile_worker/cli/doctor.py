"""``graphile-worker doctor``: what is wrong with a queue."""

from __future__ import annotations

import asyncio
import shutil
import textwrap
from typing import TYPE_CHECKING

import click
import msgspec

from graphile_worker.cli import logs
from graphile_worker.doctor import Level, examine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphile_worker.cli.settings import Value
    from graphile_worker.doctor import Finding

_COLOURS = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.TROUBLE: "red"}
_INDENT = 9
_WIDEST = 110


def print_findings(settings: Mapping[str, Value], *, quiet: bool, as_json: bool) -> bool:
    """Print what is found, each when it is known. Whether there is no trouble."""
    logs.configure(settings["log_level"].value, settings["log_format"].value)
    return asyncio.run(_print_findings(settings, quiet=quiet, as_json=as_json))


async def _print_findings(settings: Mapping[str, Value], *, quiet: bool, as_json: bool) -> bool:
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
            click.echo(("," if found else "[") + "\n " + msgspec.json.encode(finding).decode(), nl=False)
        else:
            _print(finding)
        found.append(finding)
    if as_json:
        click.echo("\n]" if found else "[]")
    else:
        click.echo(_summary(found))
    return not any(finding.level is Level.TROUBLE for finding in found)


def _print(finding: Finding) -> None:
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    says = finding.says if finding.says.endswith((".", "?")) else f"{finding.says}."
    level = click.style(f"{finding.level:<{_INDENT}}", fg=_COLOURS[finding.level], bold=True)
    click.echo(level + _wrapped(f"{finding.check}: {says}", width, ""))
    if finding.advice:
        click.echo(" " * _INDENT + _wrapped(finding.advice, width, "  → "))


def _wrapped(text: str, width: int, mark: str) -> str:
    clean = text.encode(errors="backslashreplace").decode()
    clean = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in clean)
    return textwrap.fill(
        clean, max(40, width - _INDENT), initial_indent=mark,
        subsequent_indent=" " * len(mark), break_long_words=False, break_on_hyphens=False,
    ).replace("\n", "\n" + " " * _INDENT)  # fmt: skip


def _summary(found: list[Finding]) -> str:
    counts = [
        f"{number} {level}"
        for level in reversed(Level)
        if level is not Level.OK and (number := sum(one.level is level for one in found))
    ]
    return f"Found: {', '.join(counts)}" if counts else "All is well"
