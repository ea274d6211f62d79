"""Flags that verbs share: those of the settings, above all of the connection; and what makes a verb."""

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
_EXIT_CODES = (
    "Exit codes: 0, all is done; 1, something failed, or is not there; 2, the command line is wrong{}; "
    "128 + N, signal N."
)
_ENVIRONMENT = (
    " Environment: DATABASE_URL, or PGHOST and so on; GRAPHILE_WORKER_*. See graphile-worker config."
)
_NAMES = {setting.name for setting in SETTINGS}
_SHARED = {"config", *(setting.name for setting in SETTINGS if setting.for_all_verbs)}


class _Kind(click.ParamType[Any]):
    """The values of a setting."""

    def __init__(self, setting: Setting) -> None:
        self.name = setting.metavar
        self._setting = setting

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._setting.read(value)
        except ValueError as error:
            shown = "" if self.name == "DSN" else f"{value!r} does not do; "
            self.fail(f"{shown}it must be {error}.", param, ctx)


def setting_flags(*, of_run: bool, also: Sequence[str] = ()) -> Decorator:
    """Flags for the settings: for all of them, or for those that every verb has and these."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for setting in reversed(SETTINGS):
            if not setting.flags or not (of_run or setting.for_all_verbs or setting.name in also):
                continue
            kind: dict[str, Any] = {"type": _Kind(setting), "metavar": setting.metavar}
            if setting.is_switch:
                kind = {"is_flag": True}
            option = click.option(*setting.flags, setting.name, help=setting.help, default=None, **kind)
            function = option(function)
        return click.option("-C", "--config", metavar="PATH", help="The configuration file.")(function)

    return decorate


def given(ctx: click.Context) -> dict[str, Any]:
    """What the command line has of this command's flags."""
    switches = {setting.name for setting in SETTINGS if setting.is_switch}
    return {
        name: name not in switches and value
        for name, value in ctx.params.items()
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }


def gathered(flags: Mapping[str, Any]) -> dict[str, Value]:
    """All settings, with what the command line has of them."""
    return gather({name: value for name, value in flags.items() if name in _NAMES}, flags.get("config"))


def ending(*examples: str, codes: str = "", reads: bool = True) -> str:
    """What a help ends with: examples, and what holds for all verbs.

    Args:
        examples: Whole commands.
        codes: Exit codes of its own.
        reads: Whether it reads the settings.
    """
    shown = "\n".join(f"  {example}" for example in examples)
    heading = "Examples" if len(examples) > 1 else "Example"
    common = _EXIT_CODES.format(codes) + (_ENVIRONMENT if reads else "")
    return f"\b\n{heading}:\n{shown}\n\n{common}"


def verb(
    name: str, *examples: str, also: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a verb that looks after a queue; its function gets the settings, and what its own flags say.

    An exit code other than 0 is what the function returns. It has flags also for these settings.
    """
    shared = _SHARED.union(also)

    def decorate(function: Callable[..., int | None]) -> click.Command:
        @wraps(function)
        def call(ctx: click.Context, /, **arguments: Any) -> None:
            from graphile_worker.cli import logs  # noqa: PLC0415

            flags = {name: value for name, value in given(ctx).items() if name in shared}
            settings = gathered({**(ctx.obj or {}), **flags})
            logs.configure(settings["log_level"].value, settings["log_format"].value)
            own = {name: value for name, value in arguments.items() if name not in shared}
            ctx.exit(function(settings, **own) or 0)

        shown = ending(*(f"graphile-worker {example}" for example in examples))
        made = click.command(name, context_settings=CONTEXT, epilog=shown)(
            setting_flags(of_run=False, also=also)(click.pass_context(call))
        )
        made.params.sort(key=lambda param: param.name in shared)
        return made

    return decorate


class Integer(click.IntRange):
    """Some of them; what is none is told so."""

    name = "integer"


def small_integer(least: int) -> Integer:
    """Integers from there on that a column of the jobs can have."""
    return Integer(least, SMALLINT.stop - 1)


PRIORITY = small_integer(SMALLINT.start)
json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON: one document.")
yes_flag = click.option("-y", "--yes", is_flag=True, help="Do not ask.")


@asynccontextmanager
async def queue_of(settings: Mapping[str, Value], *, reads: bool = True) -> AsyncIterator[WorkerUtils]:
    """The queue that the settings name; whoever reads jobs is not to be told that there are none."""
    from graphile_worker.client import WorkerUtils  # noqa: PLC0415

    dsn, schema = settings["connection"].value, settings["schema"].value
    async with WorkerUtils(
        dsn,
        schema=schema,
        max_pool_size=2,
        prepared_statements=settings["prepared_statements"].value,
        max_payload_size=settings["max_payload_size"].value,
    ) as utils:
        if reads:
            await utils.many.insist_on_sight()
        yield utils
