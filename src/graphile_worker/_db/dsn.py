"""Connection strings: every form that Graphile Worker's users write, as arguments for the driver.

A bare database name, ``postgres://``, ``postgresql://`` and ``pg://`` URLs with libpq's parameters or
Node's ``?ssl=``, Unix sockets as ``?host=/folder`` or ``socket:/folder?db=name``, and ``embedded:``.
"""

from __future__ import annotations

import difflib
import os
import ssl
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from graphile_worker.errors import ConfigurationError

EMBEDDED = "embedded:"
_NEARLY = 0.85
_CONNECT_TIMEOUT = 15.0
_URL_SCHEMES = ("postgresql", "postgres", "pg")
_NODE_SSL_MODES = {"0": "disable", "false": "disable", "no-verify": "require"}
# Parameters of libpq's that the driver would pass on to the server, which does not know them. None of them
# changes what is connected to.
_LIBPQ_ONLY = {
    *("channel_binding", "gssencmode", "keepalives", "keepalives_count", "keepalives_idle"),
    *("keepalives_interval", "krbsrvname", "sslcompression", "sslsni", "tcp_user_timeout"),
}


@dataclass(frozen=True)
class Target:
    """Where to connect to. Its representation has no password."""

    description: str
    arguments: dict[str, Any] = field(repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)

    @property
    def has_password(self) -> bool:
        """Whether it says one itself; a file or the environment may have another."""
        return bool(self.secrets)

    @property
    def several_hosts(self) -> bool:
        """Whether there is more than one server to try."""
        return "," in self.description.partition(", database ")[0]


def find_dsn(dsn: str | None) -> str:
    """The connection string given, or else what the environment says.

    With none at all it is an error: a worker must not pick a database by chance.
    """
    if dsn is not None:
        if not isinstance(dsn, str):
            raise ConfigurationError(f"A connection string is a str, not a {type(dsn).__name__}.")
        return dsn
    if url := os.environ.get("DATABASE_URL"):
        return url
    if os.environ.get("PGDATABASE"):
        return "postgresql://"  # the driver reads the other PG* variables
    raise ConfigurationError(
        "No database was named. Pass a connection string (postgresql://user@host/database, or embedded: for "
        "a private one), to the command by -c; or set DATABASE_URL or PGDATABASE."
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
        if "://" in dsn:
            return _parse_url(dsn)
        return _parse_name(dsn)
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
    if not name.strip():
        raise ConfigurationError("The connection string is empty.")
    if name == EMBEDDED[:-1]:
        raise ConfigurationError("Did you mean embedded: (with a colon)?")
    before, colon, _ = name.partition(":")
    if colon and difflib.get_close_matches(before, [EMBEDDED[:-1]], cutoff=_NEARLY):
        raise ConfigurationError("Did you mean embedded:?")
    if set(name) & set("@:/?&"):
        raise unreadable()
    if "=" in name:
        raise ConfigurationError(
            "A connection string of the form key=value is not read here. "
            "Write it as a URL: postgresql://user@host/database"
        )
    return _parse_url(f"postgresql:///{quote(name)}")


def _parse_socket(dsn: str) -> Target:
    parts = urlsplit(dsn)
    parameters = dict(parse_qsl(parts.query))
    database = parameters.pop("db", "")
    parameters["host"] = unquote(parts.path)
    user, at, _ = parts.netloc.rpartition("@")
    return _parse_url(f"postgresql://{user}{at}/{quote(database)}?{urlencode(parameters)}")


def _parse_url(dsn: str) -> Target:
    parts = urlsplit(dsn)
    if parts.scheme not in _URL_SCHEMES:
        raise ConfigurationError(
            f"{parts.scheme}:// is not the beginning of a connection string for PostgreSQL; postgresql:// is."
        )
    # An @ further on is the end of a password with an unescaped slash or question mark.
    if parts.fragment or "@" in parts.path or ("@" in parts.query and "@" not in parts.netloc):
        raise unreadable()
    credentials, at, address = parts.netloc.rpartition("@")
    user, colon, password = credentials.partition(":")
    parameters = dict(parse_qsl(parts.query, keep_blank_values=True))
    arguments: dict[str, Any] = {"timeout": float(parameters.pop("connect_timeout", 0)) or _CONNECT_TIMEOUT}
    arguments |= _take_ssl(parameters)
    for name in _LIBPQ_ONLY:
        parameters.pop(name, None)
    # Several hosts are taken as they are; of one, a port that is none is noticed here.
    host, port = (address, None) if "," in address else (parts.hostname, parts.port)
    description = _describe(host, port, unquote(parts.path[1:]), parameters)
    url = f"postgresql://{user}{colon}{quote(unquote(password), safe='')}{at}{address}{parts.path}"
    if parameters:
        url += "?" + urlencode(parameters, safe="/")
    secrets = {password, unquote(password), parameters.get("password", "")} - {""}
    return Target(description, {"dsn": url, **arguments}, tuple(secrets))


def _take_ssl(parameters: dict[str, str]) -> dict[str, Any]:
    """Node's way to ask for TLS, in the driver's terms."""
    wish = parameters.pop("ssl", None)
    if wish is None:
        return {}
    if wish in _NODE_SSL_MODES:
        parameters["sslmode"] = _NODE_SSL_MODES[wish]
        return {}
    if wish not in {"1", "true"}:
        raise ConfigurationError(f"ssl={wish} in the connection string is not true, false or no-verify.")
    # As Node does: the certificate must be good, by the system's authorities or by the one given.
    authority = parameters.pop("sslrootcert", None)
    try:
        return {"ssl": ssl.create_default_context(cafile=authority)}
    except OSError as error:
        raise ConfigurationError(f"The certificate {authority} cannot be read: {error}.") from error


def _describe(host: str | None, port: int | None, database: str, parameters: dict[str, str]) -> str:
    host = parameters.get("host") or host or os.environ.get("PGHOST")
    where = str(host or "the local server")
    if number := parameters.get("port") or port or os.environ.get("PGPORT"):
        where += f":{number}" if host else f" at port {number}"
    database = parameters.get("dbname") or database or os.environ.get("PGDATABASE", "")
    return f"{where}, database {database}" if database else where
