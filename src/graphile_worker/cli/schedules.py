"""``graphile-worker cron``: recurring tasks and their next runs."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphile_worker._base.text import pluralize
from graphile_worker._tasks.loader import load_crontab
from graphile_worker.app import App
from graphile_worker.cli import logs
from graphile_worker.cli.printing import escape
from graphile_worker.cli.run_worker import find_crontab, load
from graphile_worker.client import WorkerUtils
from graphile_worker.cron import CronItem, parse_cron_items
from graphile_worker.cron.crontab import read_crontab
from graphile_worker.cron.expression import parse_pattern
from graphile_worker.cron.schedule import get_zone
from graphile_worker.errors import ConfigurationError, SchemaMissingError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphile_worker._db.queries.crontabs import KnownCrontab
    from graphile_worker.cli.settings import Value

_NEXT_RUNS = 5
_STANDARD_INPUT = Path("-")


def print_schedules(settings: Mapping[str, Value], app_path: str | None, *, as_json: bool) -> None:
    """Print the items of the crontab and the app, with their state in the database."""
    logs.configure(settings["log_level"].value, settings["log_format"].value)
    found = None if app_path is None else load(settings, app_path)
    app = found if isinstance(found, App) else None
    items, path = [] if app is None else app.cron_items, find_crontab(settings, app_path, found)
    if path is not None:
        items += load_crontab(path)
    items = parse_cron_items(items)
    try:
        known = asyncio.run(_known(settings, app))
    except SchemaMissingError as error:
        known = {}
        click.echo(f"Cannot read their last runs: {error}", err=True)
    now = datetime.now(UTC)
    others = sorted(known.keys() - {item.identifier for item in items})
    if as_json:
        objects = [_as_object(item, known.get(item.identifier), now) for item in items]
        objects += [{"identifier": identifier, **_known_times(known[identifier])} for identifier in others]
        click.echo(json.dumps(objects, indent=2))
        return
    for item in items:
        _print_item(item, known.get(item.identifier), now)
    if not items:
        click.echo(f"No recurring tasks: there is no file {settings['crontab'].value!r}, and no @app.cron.")
    for identifier in others:
        click.echo(f"{escape(identifier)}: in the database, but not in this crontab")


async def _known(settings: Mapping[str, Value], app: App | None) -> dict[str, KnownCrontab]:
    if app is not None:
        async with app:
            return await app.utils.known_crontabs()
    dsn, schema = settings["connection"].value, settings["schema"].value
    async with WorkerUtils(dsn, schema=schema, max_pool_size=1) as utils:
        return await utils.known_crontabs()


def _print_item(item: CronItem, known: KnownCrontab | None, now: datetime) -> None:
    zone = f" ({item.tz})" if item.tz else ""
    click.echo(f"{item.identifier}: {_pattern(item)}{zone}, adds {item.task}")
    if known is None:
        click.echo("  not in the database: no worker has registered it")
    else:
        last = "never" if known.last_execution is None else _format(known.last_execution)
        click.echo(f"  known since {_format(known.known_since)}, last run {last}")
    runs, error = _next_runs(item, now)
    for line in [_format_run(item, at) for at in runs] or [error or "never"]:
        click.echo(f"  {line}")


def _as_object(item: CronItem, known: KnownCrontab | None, now: datetime) -> dict[str, Any]:
    runs, error = _next_runs(item, now)
    zone = UTC if item.tz is None else get_zone(item.tz)
    return {
        "identifier": item.identifier,
        "task": item.task,
        "match": _pattern(item),
        "tz": item.tz,
        "fill": item.backfill_period.total_seconds(),
        "overlap": item.overlap,
        **_known_times(known),
        "next": [at.isoformat() for at in runs],
        "next_local": [at.astimezone(zone).isoformat() for at in runs],
        "error": error,
    }


def _known_times(known: KnownCrontab | None) -> dict[str, str | None]:
    last = known.last_execution if known else None
    return {
        "known_since": known.known_since.isoformat() if known else None,
        "last_execution": last.isoformat() if last else None,
    }


def check(paths: tuple[Path, ...]) -> bool:
    """Print every error of these crontabs, and return whether there is none."""
    valid = True
    for path in paths:
        try:
            items = parse_cron_items(
                _read_standard_input() if path == _STANDARD_INPUT else load_crontab(path)
            )
        except ConfigurationError as error:
            valid = False
            click.echo(str(error), err=True)
        else:
            click.echo(f"{path}: {pluralize(len(items), 'item')}")
    return valid


def _read_standard_input() -> list[CronItem]:
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"Cannot read the crontab '-': {error}.") from error
    return read_crontab(text, source=str(_STANDARD_INPUT))


def print_next(pattern: str, tz: str | None, count: int) -> None:
    """Print the next moments that a pattern matches."""
    parse_pattern(pattern)  # these two raise errors that do not name an item
    if tz is not None:
        get_zone(tz)
    item = CronItem("pattern", pattern, tz=tz)
    runs, _ = _next_runs(item, datetime.now(UTC), count)
    for line in [_format_run(item, at) for at in runs] or ["never"]:
        click.echo(line)


def _next_runs(item: CronItem, now: datetime, count: int = _NEXT_RUNS) -> tuple[list[datetime], str | None]:
    """Return the next runs, and the error if the item's function fails."""
    try:
        return list(islice(item.occurrences(now), count)), None
    except Exception as error:  # noqa: BLE001 - any error of a user's function must not hide the other items
        return [], f"{_pattern(item)} fails: {type(error).__name__}: {error}"


def _pattern(item: CronItem) -> str:
    return item.match if isinstance(item.match, str) else getattr(item.match, "__name__", "a function")


def _format_run(item: CronItem, at: datetime) -> str:
    local = "" if item.tz is None else f"  {at.astimezone(get_zone(item.tz)):%Y-%m-%d %H:%M %Z} in {item.tz}"
    return f"{_format(at)}{local}"


def _format(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
