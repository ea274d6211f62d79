"""``graphile-worker cron``: recurring tasks, and when they are due."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphile_worker.app import App
from graphile_worker.cli import logs
from graphile_worker.cli.printing import clean
from graphile_worker.cli.run_worker import crontab_of, load
from graphile_worker.client import WorkerUtils
from graphile_worker.cron import CronItem, parse_cron_items
from graphile_worker.cron.crontab import read_crontab
from graphile_worker.cron.schedule import zone_of
from graphile_worker.errors import ConfigurationError, SchemaMissingError
from graphile_worker.loader import load_crontab
from graphile_worker.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphile_worker._db.crontabs import KnownCrontab
    from graphile_worker.cli.settings import Value

_RUNS = 5
_STANDARD_INPUT = Path("-")


def print_schedules(settings: Mapping[str, Value], tasks_of: str | None, *, as_json: bool) -> None:
    """Print the items of the crontab, and of the app, and what the database knows of them."""
    logs.configure(settings["log_level"].value, settings["log_format"].value)
    found = None if tasks_of is None else load(settings, tasks_of)
    app = found if isinstance(found, App) else None
    items, path = [] if app is None else app.cron_items, crontab_of(settings, tasks_of, found)
    if path is not None:
        items += load_crontab(path)
    items = parse_cron_items(items)
    try:
        known = asyncio.run(_known(settings, app))
    except SchemaMissingError as error:
        known = {}
        click.echo(f"Nothing is known of them: {error}", err=True)
    now = datetime.now(UTC)
    others = sorted(known.keys() - {item.identifier for item in items})
    if as_json:
        objects = [_as_object(item, known.get(item.identifier), now) for item in items]
        objects += [{"identifier": identifier, **_when_known(known[identifier])} for identifier in others]
        click.echo(json.dumps(objects, indent=2))
        return
    for item in items:
        _print_item(item, known.get(item.identifier), now)
    if not items:
        click.echo(f"There are no recurring tasks: no file {settings['crontab'].value!r}, and no @app.cron.")
    for identifier in others:
        click.echo(f"{clean(identifier)}: known to the database, but not to this crontab")


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
        click.echo("  not known: no worker has had it")
    else:
        last = "never" if known.last_execution is None else _shown(known.last_execution)
        click.echo(f"  known since {_shown(known.known_since)}, last run {last}")
    runs, fault = _runs(item, now)
    for line in [_at(item, at) for at in runs] or [fault or "never"]:
        click.echo(f"  {line}")


def _as_object(item: CronItem, known: KnownCrontab | None, now: datetime) -> dict[str, Any]:
    runs, fault = _runs(item, now)
    zone = UTC if item.tz is None else zone_of(item.tz)
    return {
        "identifier": item.identifier,
        "task": item.task,
        "match": _pattern(item),
        "tz": item.tz,
        "fill": item.backfill.total_seconds(),
        "overlap": item.overlap,
        **_when_known(known),
        "next": [at.isoformat() for at in runs],
        "next_local": [at.astimezone(zone).isoformat() for at in runs],
        "error": fault,
    }


def _when_known(known: KnownCrontab | None) -> dict[str, str | None]:
    last = known.last_execution if known else None
    return {
        "known_since": known.known_since.isoformat() if known else None,
        "last_execution": last.isoformat() if last else None,
    }


def check(paths: tuple[Path, ...]) -> bool:
    """Whether these crontabs are good; tells all that is wrong with them."""
    good = True
    for path in paths:
        try:
            items = parse_cron_items(_of_standard_input() if path == _STANDARD_INPUT else load_crontab(path))
        except ConfigurationError as error:
            good = False
            click.echo(str(error), err=True)
        else:
            click.echo(f"{path}: {counted(len(items), 'item')}")
    return good


def _of_standard_input() -> list[CronItem]:
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"The crontab '-' cannot be read: {error}.") from error
    return read_crontab(text, source=str(_STANDARD_INPUT))


def print_next(pattern: str, tz: str | None, count: int) -> None:
    """Print when a pattern fits next."""
    try:
        item = CronItem("pattern", pattern, tz=tz)
    except ConfigurationError as error:
        raise ConfigurationError(str(error).removeprefix("The cron item 'pattern': ")) from None
    runs, _ = _runs(item, datetime.now(UTC), count)
    for line in [_at(item, at) for at in runs] or ["never"]:
        click.echo(line)


def _runs(item: CronItem, now: datetime, count: int = _RUNS) -> tuple[list[datetime], str | None]:
    """The next ones, and what is wrong with the item's function if it cannot tell."""
    try:
        return list(islice(item.occurrences(now), count)), None
    except Exception as error:  # noqa: BLE001 - a function of the user's: the other items are to be shown
        return [], f"{_pattern(item)} fails: {type(error).__name__}: {error}"


def _pattern(item: CronItem) -> str:
    return item.match if isinstance(item.match, str) else getattr(item.match, "__name__", "a function")


def _at(item: CronItem, at: datetime) -> str:
    there = "" if item.tz is None else f"  {at.astimezone(zone_of(item.tz)):%Y-%m-%d %H:%M %Z} in {item.tz}"
    return f"{_shown(at)}{there}"


def _shown(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
