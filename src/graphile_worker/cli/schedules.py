"""``graphile-worker cron``: recurring tasks, and when they are due."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import click

from graphile_worker.app import App
from graphile_worker.cli import logs
from graphile_worker.cli.run_worker import crontab_of, load
from graphile_worker.client import WorkerUtils
from graphile_worker.cron import CronItem, parse_cron_items
from graphile_worker.errors import ConfigurationError
from graphile_worker.loader import load_crontab
from graphile_worker.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from graphile_worker._db.crontabs import KnownCrontab
    from graphile_worker.cli.settings import Value

_RUNS = 5
_FAR = timedelta(days=366 * 9)


def print_schedules(settings: Mapping[str, Value], tasks_of: str | None, *, as_json: bool) -> None:
    """Print the items of the crontab, and of the app, and what the database knows of them."""
    logs.configure(settings["log_level"].value, settings["log_format"].value)
    found = None if tasks_of is None else load(settings, tasks_of)
    app = found if isinstance(found, App) else None
    items, path = [] if app is None else app.cron_items, crontab_of(settings, found)
    if path is not None:
        items += load_crontab(path)
    items = parse_cron_items(items)
    known = asyncio.run(_known(settings, app))
    now = datetime.now(UTC)
    if as_json:
        click.echo(json.dumps([_as_object(item, known, now) for item in items], indent=2))
        return
    for item in items:
        _print_item(item, known.get(item.identifier), now)
    if not items:
        click.echo(f"There are no recurring tasks: no file {settings['crontab'].value!r}, and no @app.cron.")
    for identifier in known.keys() - {item.identifier for item in items}:
        click.echo(f"{identifier}: known to the database, but not to this crontab")


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
    for at in _runs(item, now):
        click.echo(f"  {_at(item, at)}")


def _as_object(item: CronItem, known: Mapping[str, KnownCrontab], now: datetime) -> dict[str, Any]:
    found = known.get(item.identifier)
    last = found.last_execution if found else None
    return {
        "identifier": item.identifier,
        "task": item.task,
        "match": _pattern(item),
        "tz": item.tz,
        "fill": item.backfill.total_seconds(),
        "known_since": found.known_since.isoformat() if found else None,
        "last_execution": last.isoformat() if last else None,
        "next": [at.isoformat() for at in _runs(item, now)],
    }


def check(paths: tuple[Path, ...]) -> bool:
    """Whether these crontabs are good; tells all that is wrong with them."""
    good = True
    for path in paths:
        try:
            items = parse_cron_items(load_crontab(path))
        except ConfigurationError as error:
            good = False
            click.echo(str(error), err=True)
        else:
            click.echo(f"{path}: {counted(len(items), 'item')}")
    return good


def print_next(pattern: str, tz: str | None, count: int) -> None:
    """Print when a pattern fits next."""
    try:
        item = CronItem("pattern", pattern, tz=tz)
    except ConfigurationError as error:
        raise ConfigurationError(str(error).removeprefix("The cron item 'pattern': ")) from None
    found = list(_runs(item, datetime.now(UTC), count))
    for at in found:
        click.echo(_at(item, at))
    if not found:
        click.echo("never")


def _runs(item: CronItem, now: datetime, count: int = _RUNS) -> Iterator[datetime]:
    return islice(item.occurrences(now, now + _FAR), count)


def _pattern(item: CronItem) -> str:
    return item.match if isinstance(item.match, str) else getattr(item.match, "__name__", "a function")


def _at(item: CronItem, at: datetime) -> str:
    there = "" if item.tz is None else f"  {at.astimezone(ZoneInfo(item.tz)):%Y-%m-%d %H:%M %Z} in {item.tz}"
    return f"{_shown(at)}{there}"


def _shown(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
