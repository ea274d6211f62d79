"""``graphile-worker config``: print each setting with the source of its value."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import click

from graphile_worker.cli.settings import SETTINGS, unknown_variables

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from graphile_worker.cli.settings import Value

_NAME = re.compile(r"[\w-]+")
_URL = re.compile(r"(\w+://)(?:([^:/?#@]*)(:[^?#]*@))?([^?#:]*(?::\d+)?(?:/[^?#@]*)?)(\?[^#]*)?")
_PASSWORD = re.compile(r"(?<=password=)[^&]*", re.IGNORECASE)


def print_settings(settings: Mapping[str, Value], *, as_json: bool) -> None:
    """Print the settings without passwords."""
    rows = []
    for setting in SETTINGS:
        value, source = settings[setting.name]
        if value is not None and setting.metavar in _FORMATS:
            value = _FORMATS[setting.metavar](value)
        rows.append((setting.name, value, source))
    if as_json:
        values = {name: {"value": value, "source": source} for name, value, source in rows}
        click.echo(json.dumps(values, indent=2))
        return
    printed = [(name, "" if value is None else str(value), source) for name, value, source in rows]
    widths = [max(len(row[column]) for row in printed) for column in (0, 1)]
    for name, text, source in printed:
        click.echo(f"{name:{widths[0]}}  {text:{widths[1]}}  {source}")
    for warning in unknown_variables():
        click.echo(warning, err=True)


def masked(dsn: str) -> str:
    """Return the connection string without its passwords, or ``***`` if it cannot be parsed.

    >>> masked("postgresql://me:secret@host/mine?sslpassword=secret")
    'postgresql://me:***@host/mine?sslpassword=***'
    """
    if dsn.startswith("embedded:") or _NAME.fullmatch(dsn):
        return dsn
    match = _URL.fullmatch(dsn)
    if match is None:
        return "***"
    scheme, user, password, address, query = match.groups(default="")
    return f"{scheme}{user}{':***@' if password else ''}{address}{_PASSWORD.sub('***', query)}"


def _format_time(seconds: float) -> str:
    return f"{seconds:g}s"


_FORMATS: dict[str, Callable[[Any], str]] = {"DSN": masked, "TIME": _format_time}
