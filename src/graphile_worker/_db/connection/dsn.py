"""Parse connection strings, in every form that Graphile Worker accepts.

The forms are: a bare database name; ``postgres://``, ``postgresql://`` and ``pg://`` URLs with libpq
parameters or Node's ``?ssl=``; Unix sockets as ``?host=/folder`` or ``socket:/folder?db=name``; and
``embedded:``.
"""

from __future__ import annotations

import difflib
import os
import ssl
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from graphile_worker.errors import ConfigurationError

EMBEDDED = "embedded:"
_MIN_SIMILARITY = 0.85
_CONNECT_TIMEOUT = 15.0
_URL_SCHEMES = ("postgresql", "postgres", "pg")
_NODE_SSL_MODES = {"0": "disable", "false": "disable", "no-verify": "require"}
# The driver would pass these libpq parameters on to the server, which does not know them. None of them
# changes which server is connected to.
_LIBPQ_ONLY = {
    *("channel_binding", "gssencmode", "keepalives", "keepalives_count", "keepalives_idle"),
    *("keepalives_interval", "krbsrvname", "sslcompression", "sslsni", "tcp_user_timeout"),
}


@dataclass(frozen=True)
class Target:
    """The database to connect to. Its repr contains no password."""

    description: str
    arguments: dict[str, Any] = field(repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)
    server: tuple[str | None, int | None] = (None, None)
    """The host and the port, as far as the connection string or the environment has them."""

    @property
    def has_password(self) -> bool:
        """Whether the connection string has a password. A file or the environment may have one too."""
        return bool(self.secrets)

    @property
    def has_several_hosts(self) -> bool:
        """Whether there is more than one server to try."""
        return "," in self.description.partition(", database ")[0]


def find_dsn(dsn: str | None) -> str:
    """Return the given connection string, or the one from the environment.

    Raises `ConfigurationError` if there is neither, because a worker must not pick a database by chance.
    """
    if dsn is not None:
        if not isinstance(dsn, str):
            raise ConfigurationError(f"A connection string must be a str, not {type(dsn).__name__}.")
        return dsn
    if url := os.environ.get("DATABASE_URL"):
        return url
    if os.environ.get("PGDATABASE"):
        return "postgresql://"  # the driver reads the other PG* variables
    raise ConfigurationError(
        "No database was specified. Pass a connection string (postgresql://user@host/database, or embedded: "
        "for a private database; on the command line with -c), or set DATABASE_URL or PGDATABASE."
        + _settings_file_hint()
    )


def _settings_file_hint() -> str:
    """Say that Python programs do not read the settings file of the current folder, if that has a connection.

    The command reads it, so the command fails only if the file has no connection, or if -C names another one.
    """
    for name in ("graphile-worker.toml", "pyproject.toml"):
        try:
            settings = tomllib.loads(Path(name).read_text(encoding="utf-8"))
            if name == "pyproject.toml":
                settings = settings["tool"]["graphile-worker"]
            has_connection = "connection" in settings
        except (OSError, ValueError, LookupError, TypeError):
            continue
        if has_connection:
            return (
                f" The connection in {name} applies only to the graphile-worker command. In Python, pass it "
                "to App(dsn=...)."
            )
    return ""


def parse_dsn(dsn: str) -> Target:
    """Parse a connection string into arguments for the driver.

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
        # Not chained, because the parser's message may quote a part of the password.
        raise invalid_dsn() from None


def invalid_dsn() -> ConfigurationError:
    """Return the error for an invalid connection string. It never quotes the string."""
    return ConfigurationError(
        "Invalid connection string. Write postgresql://user:password@host/database, and percent-encode "
        "special characters in the password."
    )


def _parse_name(name: str) -> Target:
    if not name.strip():
        raise ConfigurationError("The connection string is empty.")
    if name == EMBEDDED[:-1]:
        raise ConfigurationError("Did you mean embedded: (with a colon)?")
    before, colon, _ = name.partition(":")
    if colon and difflib.get_close_matches(before, [EMBEDDED[:-1]], cutoff=_MIN_SIMILARITY):
        raise ConfigurationError("Did you mean embedded:?")
    if set(name) & set("@:/?&"):
        raise invalid_dsn()
    if "=" in name:
        raise ConfigurationError(
            "Connection strings of the form key=value are not supported. "
            "Write a URL instead: postgresql://user@host/database"
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
        message = f"Invalid connection string: unknown scheme {parts.scheme}://. Use postgresql://."
        dialect, plus, driver = parts.scheme.partition("+")
        if plus and dialect in _URL_SCHEMES:
            message += f" The +{driver} part names SQLAlchemy's driver: remove it."
        raise ConfigurationError(message)
    # An @ in the path or query is the end of a password with an unescaped slash or question mark.
    if parts.fragment or "@" in parts.path or ("@" in parts.query and "@" not in parts.netloc):
        raise invalid_dsn()
    credentials, at, address = parts.netloc.rpartition("@")
    user, colon, password = credentials.partition(":")
    parameters = dict(parse_qsl(parts.query, keep_blank_values=True))
    arguments: dict[str, Any] = {"timeout": float(parameters.pop("connect_timeout", 0)) or _CONNECT_TIMEOUT}
    arguments |= _take_ssl(parameters)
    for name in _LIBPQ_ONLY:
        parameters.pop(name, None)
    # The driver parses a list of hosts. For a single host, reading the port here rejects an invalid one.
    host, port = (address, None) if "," in address else (parts.hostname, parts.port)
    description = _describe(host, port, unquote(parts.path[1:]), parameters)
    server = _server(host, port, parameters)
    url = f"postgresql://{user}{colon}{quote(unquote(password), safe='')}{at}{address}{parts.path}"
    if parameters:
        url += "?" + urlencode(parameters, safe="/")
    secrets = {password, unquote(password), parameters.get("password", "")} - {""}
    return Target(description, {"dsn": url, **arguments}, tuple(secrets), server)


def _take_ssl(parameters: dict[str, str]) -> dict[str, Any]:
    """Translate Node's ``ssl`` parameter into the driver's arguments."""
    mode = parameters.pop("ssl", None)
    if mode is None:
        return {}
    if mode in _NODE_SSL_MODES:
        parameters["sslmode"] = _NODE_SSL_MODES[mode]
        return {}
    if mode not in {"1", "true"}:
        raise ConfigurationError(
            f"Invalid ssl={mode} in the connection string: must be true, false or no-verify."
        )
    # Like Node, verify the certificate against the system's authorities, or against the given one.
    authority = parameters.pop("sslrootcert", None)
    try:
        return {"ssl": ssl.create_default_context(cafile=authority)}
    except OSError as error:
        raise ConfigurationError(f"Cannot read the certificate {authority}: {error}.") from error


def _server(host: str | None, port: int | None, parameters: dict[str, str]) -> tuple[str | None, int | None]:
    host = parameters.get("host") or host or os.environ.get("PGHOST") or None
    number = str(parameters.get("port") or port or os.environ.get("PGPORT") or "")
    return host, int(number) if number.isdigit() else None


def _describe(host: str | None, port: int | None, database: str, parameters: dict[str, str]) -> str:
    host = parameters.get("host") or host or os.environ.get("PGHOST")
    where = str(host or "the local server")
    if number := parameters.get("port") or port or os.environ.get("PGPORT"):
        where += f":{number}" if host else f" at port {number}"
    database = parameters.get("dbname") or database or os.environ.get("PGDATABASE", "")
    return f"{where}, database {database}" if database else where
