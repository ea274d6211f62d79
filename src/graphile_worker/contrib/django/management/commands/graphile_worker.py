"""``manage.py graphile_worker ...``: the whole command ``graphile-worker``, for the project's queue."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import BaseCommand

from graphile_worker.cli import logs
from graphile_worker.cli.entry import run_command
from graphile_worker.cli.settings import HOST, Host
from graphile_worker.contrib.django import app
from graphile_worker.contrib.django.autoreload import run_with_autoreload
from graphile_worker.contrib.django.configuration import SETTING, find_dsn
from graphile_worker.errors import ConfigurationError, GraphileWorkerError

_PROGRAM = "graphile_worker.contrib.django.manage"
_DATABASE = "--database"


class Command(BaseCommand):
    """Passes its arguments on, because the command's own parser has all verbs and flags."""

    help = "Run a worker, and manage the queue: see graphile_worker --help."
    requires_system_checks: list[str] = []  # noqa: RUF012 - Django's attribute

    def run_from_argv(self, argv: list[str]) -> None:
        """Run the command."""
        sys.exit(run(argv[2:], f"{argv[0]} {argv[1]}"))

    def handle(self, *args: Any, **_: Any) -> None:
        """Run the command for ``call_command("graphile_worker", "stats")``."""
        if status := run(list(args), "graphile_worker"):
            sys.exit(status)

    def add_arguments(self, parser: Any) -> None:
        """Accept any arguments from ``call_command``."""
        parser.add_argument("args", nargs="*")


def run(arguments: list[str], name: str) -> int:
    """Run the command, and return its exit status.

    Args:
        arguments: The arguments; the first ones may be ``--database alias``.
        name: The name of the command, for its messages.
    """
    try:
        arguments = _take_database(arguments)
        if app.settings_error is not None:
            raise ConfigurationError(f"settings.{SETTING}: {app.settings_error}")
    except GraphileWorkerError as error:
        logs.report(error)
        return 2
    is_dev = arguments[:1] == ["dev"] and not {"-h", "--help"} & set(arguments)
    token = HOST.set(Host(app, _PROGRAM, reloads=is_dev))
    try:
        if is_dev:
            return run_with_autoreload(app, arguments, name)
        return run_command(arguments, name)
    finally:
        HOST.reset(token)


def _take_database(arguments: list[str]) -> list[str]:
    """Use the database that the arguments name, and return the other arguments."""
    if arguments and arguments[0].startswith(f"{_DATABASE}="):
        alias, rest = arguments[0].partition("=")[2], arguments[1:]
    elif arguments[:1] == [_DATABASE] and len(arguments) > 1:
        alias, rest = arguments[1], arguments[2:]
    else:
        return arguments
    find_dsn(alias)
    app.database = alias
    return rest
