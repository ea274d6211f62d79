"""The settings of the command, and where the value of each comes from.

A value comes from the configuration file, the environment or the command line; the last one wins. Settings
that are options of a worker are declared in `_worker/run_options.py`.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from graphile_worker._worker.option_kinds import (
    MAX_COUNT,
    Address,
    Count,
    Keeping,
    Kind,
    Seconds,
    Size,
    Switch,
)
from graphile_worker._worker.run_options import OPTIONS, AppSettings
from graphile_worker.errors import ConfigurationError
from graphile_worker.history import KEEP
from graphile_worker.workers import parse_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from graphile_worker.app import App

    Read: TypeAlias = Callable[[object], Any]

FILE = "graphile-worker.toml"
PYPROJECT = "pyproject.toml"
PREFIX = "GRAPHILE_WORKER_"
CONNECTION_ARGUMENTS = ("dsn", *AppSettings.__annotations__)
_JOB_VARIABLES = ("DEBUG", "CONTROL", "WEB_", "PAYLOAD_FORMAT", "TASK_IDENTIFIER", "JOB_")
"""How other variables continue after the prefix: variables of the library, and those that a program receives
when it runs as a task."""
_PYTHON_ONLY = "Only run() in Python has this option."
_HINTS = {
    "concurrency": "Did you mean jobs?",
    "connection": "Did you mean DATABASE_URL?",
    "database_url": "Did you mean connection?",
    "dsn": "Did you mean connection?",
    "exit_if_stuck": f"{_PYTHON_ONLY} The command always exits if it is stuck.",
    "on_recovery": _PYTHON_ONLY,
    "refund_attempt_on_recovery": _PYTHON_ONLY,
    "task_leases": _PYTHON_ONLY,
    "tool": "Write the keys without [tool.graphile-worker], which only pyproject.toml needs.",
}
_ON = ("true", "1", "on", "yes")
_OFF = ("false", "0", "off", "no")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_SIZES = {"B": 1, "KB": 1000, "MB": 1_000_000}
_SIZE = re.compile(r"(\d{1,12})\s*(B|KB|MB)?")
_MAX_SIZE = 2**30 - 1
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")


def text(value: object) -> str:
    """Read a string."""
    if not isinstance(value, str):
        raise ValueError("a string")  # noqa: TRY004 - the user's mistake, not the caller's
    return value


def count(minimum: int, *, auto: bool = False) -> Read:
    """Return a function that reads an integer from `minimum` on; or, if `auto`, the word auto."""

    def read(value: object) -> int | str:
        if auto and value == "auto":
            return "auto"
        if isinstance(value, str) and re.fullmatch(r"\d{1,6}", value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= MAX_COUNT:
            raise ValueError(f"an integer from {minimum} to {MAX_COUNT:,}{', or auto' if auto else ''}")
        return value

    return read


def duration(value: object) -> float:
    """Read a number with a unit as seconds.

    >>> duration("2s"), duration("500ms")
    (2.0, 0.5)
    """
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError("a number with a unit: 500ms, 2s, 5m, 1h or 14d")
    number, unit = match.groups()
    return float(number) * _UNITS[unit]


def interval(value: object) -> float:
    """Read a duration above 0; a number without a unit is milliseconds, as in Graphile Worker."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        found = duration(f"{value}ms" if is_number or str(value).strip().isdecimal() else value)
    except ValueError as error:
        raise ValueError(f"milliseconds, or {error}") from None
    if found <= 0:
        raise ValueError("more than 0")
    return found


def size(value: object) -> int:
    """Read a number of bytes, with or without a unit.

    >>> size("16MB"), size(500)
    (16000000, 500)
    """
    is_number = isinstance(value, int) and not isinstance(value, bool)
    match = _SIZE.fullmatch(str(value).strip()) if is_number or isinstance(value, str) else None
    number = int(match[1]) * _SIZES[match[2] or "B"] if match else 0
    if not 0 < number <= _MAX_SIZE:
        raise ValueError("a number of bytes, or a number with a unit: 500KB or 16MB")
    return number


def address(value: object) -> str:
    """Read a port, with or without a host."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("a port, or host:port")  # noqa: TRY004 - the user's mistake, not the caller's
    try:
        parse_address(value)
    except ConfigurationError:
        raise ValueError("a port, or host:port") from None
    return str(value)


def switch(value: object) -> bool:
    """Read true or false."""
    if isinstance(value, bool):
        return value
    if str(value).lower() not in {*_ON, *_OFF}:
        raise ValueError("true or false")
    return str(value).lower() in _ON


def one_of(*allowed: str) -> Read:
    """Return a function that reads one of these words."""

    def read(value: object) -> str:
        if not isinstance(value, str) or value.lower() not in allowed:
            raise ValueError(" or ".join(allowed))
        return value.lower()

    return read


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of the command."""

    name: str
    flags: tuple[str, ...] = ()
    """Empty for settings that are rarely changed: only the file and the environment have them."""
    read: Read
    default: Any = None
    description: str
    """One sentence, without the default."""
    flag_help: str = ""
    """The help of the flag, if it turns something off or needs a shorter text than the documentation."""
    default_text: str = ""
    """What None means as the default, for the documentation."""
    details: str = ""
    """Further sentences for the documentation."""
    metavar: str = "TEXT"
    variable: str = ""
    for_all_verbs: bool = False
    """Whether every verb has its flag, and not only those that run a worker."""
    argument: str | None = None
    """The argument of `run` that this setting is for; None if only the command has it."""

    @property
    def is_switch(self) -> bool:
        """Whether its flag takes no value, and turns off what is on by default."""
        return self.read is switch

    @property
    def environment(self) -> str:
        """The environment variable of the setting."""
        return self.variable or f"{PREFIX}{self.name.upper()}"

    @property
    def help(self) -> str:
        """The help of its flag, with the default in brackets."""
        sentence = self.flag_help or self.description.replace("`", "")
        shown = "" if self.is_switch else self.shown_default
        return f"{sentence.removesuffix('.')} [{shown}]." if shown else sentence

    @property
    def shown_default(self) -> str:
        """The default in the form of a configuration file; empty if there is none."""
        if self.default is None:
            return ""
        if isinstance(self.default, bool):
            return str(self.default).lower()
        if self.metavar == "TIME" and self.default >= _UNITS["d"]:
            return f"{self.default / _UNITS['d']:g}d"
        if self.metavar == "TIME":
            return f"{self.default:g}s"
        if self.metavar == "SIZE":
            return f"{self.default / _SIZES['MB']:g}MB"
        return str(self.default)


def _reader(kind: Kind) -> Read:
    if isinstance(kind, Count):
        return count(kind.minimum, auto=kind.auto)
    if isinstance(kind, Seconds):
        return interval if kind.may_be_milliseconds else duration
    readers: dict[type[Kind], Read] = {
        Switch: switch,
        Size: size,
        Address: address,
        Keeping: one_of(*KEEP),
    }
    return readers.get(type(kind), text)


def _setting_for(argument: str, **changes: Any) -> Setting:
    """Return the setting for an argument of `run`."""
    option = OPTIONS[argument]
    made = Setting(
        name=option.key,
        flags=option.flags,
        read=_reader(option.kind),
        default=option.default,
        description=option.help,
        flag_help=option.flag_help,
        default_text=option.default_text,
        details=option.details,
        metavar=option.kind.metavar,
        argument=argument,
    )
    return replace(made, **changes)


_FIRST_SETTINGS = (
    _setting_for("dsn", default_text="the `PG*` variables", variable="DATABASE_URL", for_all_verbs=True),
    _setting_for("schema", default="graphile_worker", for_all_verbs=True),
    Setting(
        name="app",
        read=text,
        metavar="MODULE:APP",
        description="App whose tasks to run, instead of a folder.",
        details="For example `shop.jobs:app`. The verb `run` uses it if it has no argument, and `add` adds "
        "jobs through it.",
    ),
    Setting(
        name="tasks",
        flags=("--tasks",),
        read=text,
        default="tasks",
        metavar="PATH",
        description="Folder, or .py file, with the tasks.",
    ),
    Setting(
        name="crontab",
        flags=("--crontab",),
        read=text,
        default="crontab",
        metavar="PATH",
        description="File with recurring tasks.",
        details="By default the file `crontab` next to the tasks or in the current folder, if it exists. See "
        "[cron](../guides/cron.md).",
    ),
    _setting_for("concurrency"),
    Setting(
        name="processes",
        flags=("--processes",),
        read=count(1),
        default=1,
        metavar="N",
        description="Number of worker processes.",
        details="Each runs as many jobs at once as `jobs` says.",
    ),
)
_FIRST_ARGUMENTS = {setting.argument for setting in _FIRST_SETTINGS}
SETTINGS = (
    *_FIRST_SETTINGS,
    *(
        _setting_for(argument)
        for argument, option in OPTIONS.items()
        if option.key and argument not in _FIRST_ARGUMENTS
    ),
    Setting(
        name="metrics",
        flags=("--metrics",),
        read=one_of("off", "prometheus"),
        default="off",
        metavar="KIND",
        description="Metrics on the health port, at /metrics: off or prometheus.",
        flag_help="Metrics at /metrics: off or prometheus.",
        details="Needs `health`, and the extra `prometheus`. See [metrics](../production/metrics.md).",
    ),
    Setting(
        name="log_level",
        flags=("--log-level",),
        read=one_of("debug", "info", "warning", "error"),
        default="info",
        metavar="LEVEL",
        for_all_verbs=True,
        description="Lowest level to log: debug, info, warning or error.",
        flag_help="Level: debug, info, warning or error.",
    ),
    Setting(
        name="log_format",
        flags=("--log-format",),
        read=one_of("text", "json", "pretty"),
        default="text",
        metavar="FORMAT",
        for_all_verbs=True,
        description="Log format: text, json or pretty.",
        details="`json` logs one object per line; `pretty` uses colours on a terminal. All of them show "
        "[`scope` and `extra=`](../guides/running-workers.md#logging).",
    ),
)
_BY_NAME = {setting.name: setting for setting in SETTINGS}
SETTING_NAMES = {setting.argument: setting.name for setting in SETTINGS if setting.argument is not None}
"""The name of the setting for each argument of `run` that has one."""


class Value(NamedTuple):
    """The value of a setting, and its source: ``"default"``, a file, a variable or a flag."""

    value: Any
    source: str


class Host(NamedTuple):
    """A program whose command line contains this command, such as ``flask``."""

    app: App
    """The app that the host uses. Its settings apply unless a flag overrides them."""
    program: str
    """The module that Python runs for the host's command line."""
    reloads: bool = False
    """Whether the host itself restarts ``dev`` when the code changes."""


HOST: ContextVar[Host | None] = ContextVar("host", default=None)
"""The host of the command that runs now."""
HOST_APP = "the app"
"""What stands for the host's app instead of ``MODULE:APP``."""


def gather(
    flags: Mapping[str, Any],
    file: str | None = None,
    *,
    environment: Mapping[str, str] = os.environ,
    folder: Path | None = None,
) -> dict[str, Value]:
    """Return the value of every setting.

    Args:
        flags: Values from the command line, already read.
        file: Path of the configuration file; by default the one in the folder, if there is one.
        environment: Environment variables.
        folder: Folder in which the command runs; by default the current one.

    Raises:
        ConfigurationError: A key is unknown, or a value is invalid.
    """
    values = {setting.name: Value(setting.default, "default") for setting in SETTINGS}
    path, table = _read_file(file, folder or Path.cwd())
    for key, raw in table.items():
        setting = _BY_NAME.get(key.replace("-", "_"))
        if setting is None:
            raise ConfigurationError(f"{path}: unknown setting {key!r}. {_hint(key, _BY_NAME)}")
        values[setting.name] = _read(setting, raw, str(path))
    for setting in SETTINGS:
        if raw := environment.get(setting.environment):
            values[setting.name] = _read(setting, raw, setting.environment)
    if (host := HOST.get()) is not None:
        values |= _settings_of(host.app)
    for name, value in flags.items():
        values[name] = Value(value, _BY_NAME[name].flags[-1])
    return values


def _settings_of(app: App) -> dict[str, Value]:
    """Return the settings that the host's app has."""
    found = {
        setting.name: Value(app.settings[setting.argument], HOST_APP)
        for setting in SETTINGS
        if setting.argument in CONNECTION_ARGUMENTS and app._sets(setting.argument)
    }
    return {**found, "app": Value(HOST_APP, HOST_APP)}


def unknown_variables(environment: Mapping[str, str] = os.environ) -> Iterable[str]:
    """Yield a warning for each environment variable that is named like a setting but is not one."""
    known = {setting.environment for setting in SETTINGS}
    for name in environment:
        rest = name.removeprefix(PREFIX)
        if rest != name and name not in known and not rest.startswith(_JOB_VARIABLES):
            yield f"Environment variable {name} is ignored: unknown setting. {_hint(name, known)}"


def _read(setting: Setting, raw: object, source: str) -> Value:
    try:
        return Value(setting.read(raw), source)
    except ValueError as error:
        shown = "***" if setting.metavar == "DSN" else repr(raw)
        raise ConfigurationError(f"{source}: {setting.name} is {shown}; it must be {error}.") from None


def _read_file(given: str | None, folder: Path) -> tuple[Path, Mapping[str, object]]:
    if given is not None:
        path = Path(given)
        table = _table(path, _parse(path))
        if not table and path.name == PYPROJECT:
            raise ConfigurationError(f"{path} has no table [tool.graphile-worker].")
        return path, table
    for name in (FILE, PYPROJECT):
        path = folder / name
        if path.is_file():
            table = _table(Path(name), _parse(path))
            if table or name == FILE:
                return Path(name), table
    return folder, {}


def _parse(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"Cannot read {path}: {error.strerror or error}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not TOML: {error}.") from None


def _table(path: Path, content: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the table [tool.graphile-worker] of a pyproject.toml, or the whole of another file."""
    if path.name != PYPROJECT:
        return content
    tools = content.get("tool")
    if not isinstance(tools, dict):
        return {}
    if "graphile_worker" in tools:
        raise ConfigurationError(f"{path}: write [tool.graphile-worker], with a hyphen.")
    table = tools.get("graphile-worker", {})
    if not isinstance(table, dict):
        raise ConfigurationError(f"{path}: tool.graphile-worker must be a table.")
    return table


def _hint(name: str, known: Iterable[str]) -> str:
    known = list(known)
    simple = name.removeprefix(PREFIX).replace("-", "_").lower()
    if simple in _HINTS:
        return _HINTS[simple]
    near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    return f"Did you mean {near[0]}?" if near else f"Settings: {', '.join(sorted(known))}."
