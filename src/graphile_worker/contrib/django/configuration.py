"""The queue's settings, ``settings.GRAPHILE_WORKER``, and a connection string from ``settings.DATABASES``."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

SETTING = "GRAPHILE_WORKER"
APP_SETTINGS = (
    "SCHEMA",
    "MAX_POOL_SIZE",
    "POOL_TIMEOUT",
    "PREPARED_STATEMENTS",
    "USE_LOCAL_TIME",
    "MAX_PAYLOAD_SIZE",
    "REQUIRE_TRANSACTION",
    "MIDDLEWARE",
    "HISTORY",
    "HISTORY_KEEP",
)
"""Keys that are arguments of `App`, in upper case."""
KEYS = ("DATABASE", "TASK_MODULES", *APP_SETTINGS)
DEFAULT_DATABASE = "default"
DEFAULT_TASK_MODULES = ("tasks",)
_PASSED_ON = (
    "connect_timeout",
    "options",
    "passfile",
    "service",
    "sslcert",
    "sslcrl",
    "sslkey",
    "sslmode",
    "sslpassword",
    "sslrootcert",
    "target_session_attrs",
)
"""Keys of OPTIONS that a worker's own connections use too. The others configure psycopg or Django."""


def read_setting(key: str, default: Any = None) -> Any:
    """Return the value of a key of ``settings.GRAPHILE_WORKER``."""
    return read_settings().get(key, default)


def read_settings() -> Mapping[str, Any]:
    """Return ``settings.GRAPHILE_WORKER``; an empty dictionary if it is not one, which a check reports."""
    try:
        given = getattr(settings, SETTING, None)
    except ImproperlyConfigured as error:
        raise ConfigurationError(
            "Django's settings are not configured. Set DJANGO_SETTINGS_MODULE, and call django.setup() first."
        ) from error
    return given if isinstance(given, dict) else {}


def check_type() -> None:
    """Raise an error if ``settings.GRAPHILE_WORKER`` is not a dictionary."""
    if (given := getattr(settings, SETTING, {})) and not isinstance(given, dict):
        raise ConfigurationError(f"settings.{SETTING} is {given!r}; it must be a dictionary.")


def unknown_keys() -> list[tuple[str, str]]:
    """Return the keys of the setting that do not exist, each with a hint."""
    found = []
    for key in read_settings():
        if key not in KEYS:
            near = difflib.get_close_matches(str(key).upper(), KEYS, n=1)
            found.append((str(key), f"Did you mean {near[0]}?" if near else f"Keys: {', '.join(KEYS)}."))
    return found


def database_alias() -> str:
    """Return the alias of the database that has the queue."""
    return str(read_setting("DATABASE", DEFAULT_DATABASE))


def app_settings() -> dict[str, Any]:
    """Return the arguments of `App` that the project sets."""
    given = {key.lower(): value for key, value in read_settings().items() if key in APP_SETTINGS}
    if "middleware" in given:
        given["middleware"] = [_load(one) for one in given["middleware"]]
    return given


def _load(middleware: Any) -> Any:
    """Return a middleware: the object itself, or what a dotted path names, called if it is a class."""
    if not isinstance(middleware, str):
        return middleware
    found = import_string(middleware)
    return found() if isinstance(found, type) else found


def find_dsn(alias: str) -> str:
    """Return a connection string for a database of ``settings.DATABASES``; in tests, for the test database.

    Raises:
        ConfigurationError: There is no such database, or it is not PostgreSQL.
    """
    from django.db import connections  # noqa: PLC0415 - needs settings

    if alias not in connections:
        raise ConfigurationError(
            f"settings.DATABASES has no {alias!r}. It has {', '.join(sorted(connections))}. Change "
            f'settings.{SETTING}["DATABASE"], or --database.'
        )
    connection = connections[alias]
    if connection.vendor != "postgresql":
        raise ConfigurationError(
            f"The database {alias!r} is {connection.vendor}, and the queue needs PostgreSQL. Name another "
            f'one in settings.{SETTING}["DATABASE"].'
        )
    return as_dsn(connection.settings_dict)


def as_dsn(database: Mapping[str, Any]) -> str:
    """Return a connection string for a database of ``settings.DATABASES``.

    >>> as_dsn({"NAME": "shop", "USER": "me", "PASSWORD": "a/b", "HOST": "db", "PORT": 5433})
    'postgresql://me:a%2Fb@db:5433/shop'
    """
    options = database.get("OPTIONS") or {}
    parameters = {name: options[name] for name in _PASSED_ON if options.get(name) is not None}
    if (role := options.get("assume_role")) is not None:
        parameters["role"] = role
    user, password = str(database.get("USER") or ""), str(database.get("PASSWORD") or "")
    host, port = str(database.get("HOST") or ""), str(database.get("PORT") or "")
    if host.startswith("/") or "," in host:  # a socket's folder, or several hosts
        parameters["host"] = host
        if port:
            parameters["port"] = port
        address = ""
    else:
        shown = f"[{host}]" if ":" in host else host
        address = f"{shown}:{port}" if port else shown
        if port and not host:
            parameters["port"], address = port, ""
    secret = f":{quote(password, safe='')}" if password else ""
    credentials = f"{quote(user, safe='')}{secret}@" if user or password else ""
    query = f"?{urlencode(parameters)}" if parameters else ""
    if credentials and not address:
        # A URL cannot have a user without a host.
        credentials = ""
        query_parameters = {"user": user, **({"password": password} if password else {}), **parameters}
        query = f"?{urlencode({name: value for name, value in query_parameters.items() if value})}"
    return f"postgresql://{credentials}{address}/{quote(str(database.get('NAME') or ''), safe='')}{query}"
