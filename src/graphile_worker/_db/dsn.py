"""Connection strings: every form that Graphile Worker's users write, as arguments for the driver.

A bare database name, ``postgres://``, ``postgresql://`` and ``pg://`` URLs with libpq's parameters or
Node's ``?ssl=``, Unix sockets as ``?host=/folder`` or ``socket:/folder?db=name``, and ``embedded:``.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from graphile_worker.errors import ConfigurationError

EMBEDDED = "embedded:"
_URL_SCHEMES = {"postgres", "postgresql", "pg"}
_NODE_SSL_MODES = {"0": "disable", "false": "disable", "no-verify": "require"}


@dataclass(frozen=True)
class Target:
    """Where to connect to. Its representation has no password."""

    description: str
    arguments: dict[str, Any] = field(repr=False)


def find_dsn(dsn: str | None) -> str:
    """The connection string given, or else what the environment says.

    With none at all it is an error: a worker must not pick a database by chance.
    """
    if dsn:
        return dsn
    if url := os.environ.get("DATABASE_URL"):
        return url
    if os.environ.get("PGDATABASE"):
        return "postgresql://"  # the driver reads the other PG* variables
    raise ConfigurationError(
        "No database was named. Pass a connection string "
        "(postgresql://user@host/database), or set DATABASE_URL or PGDATABASE."
    )


def parse_dsn(dsn: str) -> Target:
    """What the driver needs to know.

    >>> parse_dsn("pg://me:secret@db.example.com:5433/shop?ssl=no-verify").arguments["dsn"]
    'postgresql://me:secret@db.example.com:5433/shop?sslmode=require'
    >>> parse_dsn("shop").description
    'the local server, database shop'
    """
    try:
        if dsn.startswith("socket:"):
            return _parse_socket(dsn)
        if "://" not in dsn:
            return _parse_name(dsn)
        return _parse_url(dsn)
    except ValueError:
        # Not chained: the message of the parser may quote a part of the password.
        raise unreadable() from None


def unreadable() -> ConfigurationError:
    """The error for a string that makes no sense; it never quotes the string."""
    return ConfigurationError(
        "The connection string cannot be read. It looks like postgresql://user:password@host/"
        "database, with special characters in the password percent-encoded."
    )


def _parse_name(name: str) -> Target:
    if not name or set(name) & set("@:/?=& "):
        raise unreadable()
    return Target(f"the local server, database {name}", {"dsn": f"postgresql:///{quote(name)}"})


def _parse_socket(dsn: str) -> Target:
    parts = urlsplit(dsn)
    parameters = dict(parse_qsl(parts.query))
    database = parameters.pop("db", None)
    parameters["host"] = unquote(parts.path)
    user, _, _ = parts.netloc.rpartition("@")
    url = urlunsplit(
        ("postgresql", f"{user}@" if user else "", "/" + quote(database or ""), urlencode(parameters), "")
    )
    return _parse_url(url)


def _parse_url(dsn: str) -> Target:
    parts = urlsplit(dsn)
    if parts.scheme not in _URL_SCHEMES or parts.fragment:
        raise unreadable()
    parameters = dict(parse_qsl(parts.query, keep_blank_values=True))
    arguments: dict[str, Any] = {}
    wish = parameters.pop("ssl", None)
    if wish in _NODE_SSL_MODES:
        parameters["sslmode"] = _NODE_SSL_MODES[wish]
    elif wish in {"1", "true"}:
        # As Node does: the certificate must be good, by the system's authorities or the one given.
        arguments["ssl"] = ssl.create_default_context(cafile=parameters.pop("sslrootcert", None))
    elif wish is not None:
        raise ConfigurationError(f"ssl={wish} in the connection string is not true, false or no-verify.")
    host = parameters.get("host") or parts.hostname or os.environ.get("PGHOST")
    port = parameters.get("port") or parts.port or os.environ.get("PGPORT")
    database = parameters.get("dbname") or unquote(parts.path[1:]) or os.environ.get("PGDATABASE")
    description = f"{host}:{port}" if host and port else host or "the local server"
    if database:
        description += f", database {database}"
    url = urlunsplit(("postgresql", parts.netloc, parts.path, urlencode(parameters, safe="/"), ""))
    # urlunsplit drops the slashes of an empty authority, which the driver wants.
    if not parts.netloc and not url.startswith("postgresql://"):
        url = url.replace("postgresql:", "postgresql://", 1)
    return Target(description, {"dsn": url, **arguments})
