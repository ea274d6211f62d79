"""``graphile-worker config``: each setting, and where its value comes from."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import click

from graphile_worker.cli.settings import SETTINGS, unknown_variables

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from graphile_worker.cli.settings import Value

_PASSWORD = re.compile(r"(?<=[?&]password=)[^&]*")


def print_settings(settings: Mapping[str, Value], *, as_json: bool) -> None:
    """Print them, without passwords."""
    rows = []
    for setting in SETTINGS:
        value, source = settings[setting.name]
        if value is not None and setting.metavar in _SHOWN:
            value = _SHOWN[setting.metavar](value)
        rows.append((setting.name, value, source))
    if as_json:
        values = {name: {"value": value, "source": source} for name, value, source in rows}
        click.echo(json.dumps(values, indent=2))
        return
    shown = [(name, "" if value is None else str(value), source) for name, value, source in rows]
    widths = [max(len(row[column]) for row in shown) for column in (0, 1)]
    for name, text, source in shown:
        click.echo(f"{name:{widths[0]}}  {text:{widths[1]}}  {source}")
    for sentence in unknown_variables():
        click.echo(sentence, err=True)


def masked(dsn: str) -> str:
    """The connection string without its password.

    >>> masked("postgresql://me:secret@host/mine")
    'postgresql://me:***@host/mine'
    """
    scheme, colon, rest = dsn.partition("://")
    if not colon:
        return dsn
    credentials, at, address = rest.rpartition("@")
    user, colon, _password = credentials.partition(":")
    address = _PASSWORD.sub("***", address)
    return f"{scheme}://{user}{':***' if colon else ''}{at}{address}"


def _as_time(seconds: float) -> str:
    return f"{seconds:g}s"


_SHOWN: dict[str, Callable[[Any], str]] = {"DSN": masked, "TIME": _as_time}
