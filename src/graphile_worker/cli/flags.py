"""Flags that verbs share, above all those of the settings; and the decorator that makes a verb."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from graphile_worker.cli.settings import SETTINGS, Setting, gather
from graphile_worker.job import SMALLINT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from graphile_worker.cli.settings import Value
    from graphile_worker.client import WorkerUtils

    Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_EXIT_CODES = "Exit codes: 0, success; 1, failed or not found; 2, invalid command line{}; 128 + N, signal N."
_ENVIRONMENT = " Environment: DATABASE_URL or PG*; GRAPHILE_WORKER_*. See graphile-worker config."
_NAMES = {setting.name for setting in SETTINGS}
_SHARED = {"config", *(setting.name for setting in SETTINGS if setting.for_all_verbs)}


class _SettingType(click.ParamType[Any]):
    """Type of the flag of a setting."""

    def __init__(self, setting: Setting) -> None:
        self.name = setting.metavar
        self._setting = setting

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._setting.read(value)
        except ValueError as error:
            shown = "value" if self.name == "DSN" else repr(value)  # a DSN may contain a password
            self.fail(f"{shown} is not valid: must be {error}.", param, ctx)


def setting_flags(*, all_settings: bool, also: Sequence[str] = ()) -> Decorator:
    """Return a decorator that adds the flags of settings.

    Args:
        all_settings: Whether to add all of them, or only those that every verb has.
        also: Names of further settings.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for setting in reversed(SETTINGS):
            if not setting.flags or not (all_settings or setting.for_all_verbs or setting.name in also):
                continue
            kind: dict[str, Any] = {"type": _SettingType(setting), "metavar": setting.metavar}
            if setting.is_switch:
                kind = {"is_flag": True}
            option = click.option(*setting.flags, setting.name, help=setting.help, default=None, **kind)
            function = option(function)
        config = click.option("-C", "--config", metavar="PATH", help="Configuration file.")
        return config(function)

    return decorate


def parsed_flags(ctx: click.Context) -> dict[str, Any]:
    """Return the values of this command's parameters that the command line has."""
    switches = {setting.name for setting in SETTINGS if setting.is_switch}
    return {
        name: name not in switches and value
        for name, value in ctx.params.items()
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }


def load_settings(flags: Mapping[str, Any]) -> dict[str, Value]:
    """Return the value of every setting, from the flags, the environment and the configuration file."""
    return gather({name: value for name, value in flags.items() if name in _NAMES}, flags.get("config"))


def make_epilog(*examples: str, codes: str = "", reads_settings: bool = True) -> str:
    """Return the end of a verb's help: examples, exit codes and environment.

    Args:
        examples: Whole commands.
        codes: Further exit codes of this verb.
        reads_settings: Whether the verb reads the settings.
    """
    shown = "\n".join(f"  {example}" for example in examples)
    heading = "Examples" if len(examples) > 1 else "Example"
    common = _EXIT_CODES.format(codes) + (_ENVIRONMENT if reads_settings else "")
    return f"\b\n{heading}:\n{shown}\n\n{common}"


def verb(
    name: str, *examples: str, also: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator that makes a verb of a function.

    The function gets the settings, and the values of the verb's own flags. It returns the exit code, or None
    for 0.

    Args:
        name: Name of the verb.
        examples: Examples for its help, without the name of the command.
        also: Settings that the verb has flags for, besides those that every verb has.
    """
    shared = _SHARED.union(also)

    def decorate(function: Callable[..., int | None]) -> click.Command:
        @wraps(function)
        def call(ctx: click.Context, /, **arguments: Any) -> None:
            from graphile_worker.cli import logs  # noqa: PLC0415

            flags = {name: value for name, value in parsed_flags(ctx).items() if name in shared}
            settings = load_settings({**(ctx.obj or {}), **flags})
            logs.configure(settings["log_level"].value, settings["log_format"].value)
            own = {name: value for name, value in arguments.items() if name not in shared}
            ctx.exit(function(settings, **own) or 0)

        epilog = make_epilog(*(f"graphile-worker {example}" for example in examples))
        made = click.command(name, context_settings=CONTEXT, epilog=epilog)(
            setting_flags(all_settings=False, also=also)(click.pass_context(call))
        )
        made.params.sort(key=lambda param: param.name in shared)
        return made

    return decorate


class Integer(click.IntRange):
    """Integers in a range; the error for other values calls them integers."""

    name = "integer"


def small_integer(minimum: int) -> Integer:
    """Return the type of integers from `minimum` on that fit a smallint column of the jobs table."""
    return Integer(minimum, SMALLINT.stop - 1)


PRIORITY = small_integer(SMALLINT.start)
json_flag = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
yes_flag = click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")


@asynccontextmanager
async def open_utils(settings: Mapping[str, Value], *, reads_jobs: bool = True) -> AsyncIterator[WorkerUtils]:
    """Connect to the queue that the settings name.

    With `reads_jobs` it is an error if row level security hides the jobs, because an empty list would be
    wrong.
    """
    from graphile_worker.client import WorkerUtils  # noqa: PLC0415

    dsn, schema = settings["connection"].value, settings["schema"].value
    async with WorkerUtils(
        dsn,
        schema=schema,
        max_pool_size=2,
        prepared_statements=settings["prepared_statements"].value,
        max_payload_size=settings["max_payload_size"].value,
    ) as utils:
        if reads_jobs:
            await utils.many.check_rows_visible()
        yield utils
