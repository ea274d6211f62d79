"""Settings of the command: which there are, and where each value comes from.

A value is taken from the configuration file, the environment and the command line; the later wins.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from graphile_worker.errors import ConfigurationError
from graphile_worker.liveness import parse_address
from graphile_worker.payload import MAX_PAYLOAD_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Read = Callable[[object], Any]

FILE = "graphile-worker.toml"
PYPROJECT = "pyproject.toml"
PREFIX = "GRAPHILE_WORKER_"
_OF_JOBS = ("DEBUG", "CONTROL", "PAYLOAD_FORMAT", "TASK_IDENTIFIER", "JOB_")
"""Variables that are no settings: a program that is a task has them."""
_MOST = 100_000
_OTHER_NAMES = {
    "concurrency": "jobs",
    "connection": "DATABASE_URL",
    "database_url": "connection",
    "dsn": "connection",
    "exit_if_stuck": "nothing: the command always does, and run() in Python if it is told to",
    "on_recovery": "run() in Python? It has that, the command has not",
    "refund_attempt_on_recovery": "run() in Python? It has that, the command has not",
    "task_leases": "run() in Python? It has that, the command has not",
    "tool": "the keys without [tool.graphile-worker], which only pyproject.toml needs",
}
_ON = ("true", "1", "on", "yes")
_OFF = ("false", "0", "off", "no")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_SIZES = {"B": 1, "KB": 1000, "MB": 1_000_000}
_SIZE = re.compile(r"(\d{1,12})\s*(B|KB|MB)?")
_LARGEST = 2**30 - 1
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)")


def text(value: object) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ValueError("a text")  # noqa: TRY004 - not our mistake, but the user's
    return value


def count(least: int) -> Read:
    """An integer from there on."""

    def read(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"\d{1,6}", value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
            raise ValueError(f"an integer from {least} to {_MOST:,}")
        return value

    return read


def duration(value: object) -> float:
    """Seconds, from a number with a unit.

    >>> duration("2s"), duration("500ms")
    (2.0, 0.5)
    """
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError("a number with a unit: 500ms, 2s, 5m or 1h")
    number, unit = match.groups()
    return float(number) * _UNITS[unit]


def interval(value: object) -> float:
    """The same, but not nothing; without a unit it is milliseconds, as Graphile Worker has it."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        found = duration(f"{value}ms" if is_number or str(value).strip().isdecimal() else value)
    except ValueError as error:
        raise ValueError(f"milliseconds, or {error}") from None
    if found <= 0:
        raise ValueError("more than 0")
    return found


def size(value: object) -> int:
    """Bytes, from a number with or without a unit.

    >>> size("16MB"), size(500)
    (16000000, 500)
    """
    is_number = isinstance(value, int) and not isinstance(value, bool)
    match = _SIZE.fullmatch(str(value).strip()) if is_number or isinstance(value, str) else None
    number = int(match[1]) * _SIZES[match[2] or "B"] if match else 0
    if not 0 < number <= _LARGEST:
        raise ValueError("a number of bytes, or one with a unit: 500KB or 16MB")
    return number


def address(value: object) -> str:
    """A port, with or without a host."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("a port, or host:port")  # noqa: TRY004 - not our mistake, but the user's
    try:
        parse_address(value)
    except ConfigurationError:
        raise ValueError("a port, or host:port") from None
    return str(value)


def switch(value: object) -> bool:
    """On or off."""
    if isinstance(value, bool):
        return value
    if str(value).lower() not in {*_ON, *_OFF}:
        raise ValueError("true or false")
    return str(value).lower() in _ON


def one_of(*allowed: str) -> Read:
    """One of these words."""

    def read(value: object) -> str:
        if not isinstance(value, str) or value.lower() not in allowed:
            raise ValueError(" or ".join(allowed))
        return value.lower()

    return read


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One of them."""

    name: str
    flags: tuple[str, ...]
    """None for what few ever change: that is set in the file, or in the environment."""
    read: Read
    default: Any
    help: str
    metavar: str = "TEXT"
    variable: str = ""
    for_all_verbs: bool = False
    """Otherwise it is about running a worker."""

    @property
    def is_switch(self) -> bool:
        """Whether its flag takes no value, and turns off what is on by default."""
        return self.read is switch

    @property
    def environment(self) -> str:
        """The variable that it is read from."""
        return self.variable or f"{PREFIX}{self.name.upper()}"


SETTINGS = (
    Setting(
        name="connection", flags=("-c", "--connection"), read=text, default=None, metavar="DSN",
        variable="DATABASE_URL", for_all_verbs=True, help="The database; embedded: for a private PostgreSQL.",
    ),
    Setting(
        name="schema", flags=("-s", "--schema"), read=text, default="graphile_worker", metavar="NAME",
        for_all_verbs=True, help="The schema of the queue.",
    ),
    Setting(
        name="app", flags=(), read=text, default=None, metavar="MODULE:APP",
        help="The app whose tasks to run, in place of a folder.",
    ),
    Setting(
        name="tasks", flags=("--tasks",), read=text, default="tasks", metavar="PATH",
        help="Folder, or .py file, with the tasks.",
    ),
    Setting(
        name="crontab", flags=("--crontab",), read=text, default="crontab", metavar="PATH",
        help="Recurring tasks: beside the tasks, or here.",
    ),
    Setting(
        name="jobs", flags=("-j", "--jobs"), read=count(1), default=1, metavar="N",
        help="How many jobs run at once.",
    ),
    Setting(
        name="processes", flags=("--processes",), read=count(1), default=1, metavar="N",
        help="How many worker processes.",
    ),
    Setting(
        name="max_task_processes", flags=(), read=count(1), default=None, metavar="N",
        help="How many processes for tasks that run in some.",
    ),
    Setting(
        name="max_jobs_per_task_process", flags=(), read=count(1), default=None, metavar="N",
        help="After how many jobs each is replaced.",
    ),
    Setting(
        name="max_pool_size", flags=("-m", "--max-pool-size"), read=count(1), default=10, metavar="N",
        help="How many connections tasks may use.",
    ),
    Setting(
        name="pool_timeout", flags=(), read=duration, default=None, metavar="TIME",
        help="How long to wait for a connection.",
    ),
    Setting(
        name="max_payload_size", flags=(), read=size, default=MAX_PAYLOAD_SIZE, metavar="SIZE",
        help="Largest payload of a job that is added [16MB].",
    ),
    Setting(
        name="poll_interval", flags=("--poll-interval",), read=interval, default=2.0, metavar="TIME",
        help="How often to look if nothing is heard: 2s.",
    ),
    Setting(
        name="prefetch", flags=("--prefetch",), read=count(0), default=0, metavar="N",
        help="How many jobs to claim ahead.",
    ),
    Setting(
        name="listen", flags=("--no-listen",), read=switch, default=True, help="Only poll.",
    ),
    Setting(
        name="listen_connection", flags=("--listen-connection",), read=text, default=None, metavar="DSN",
        help="Where to listen, past a pooler.",
    ),
    Setting(
        name="prepared_statements", flags=("--no-prepared-statements",), read=switch, default=True,
        help="For a PgBouncer in transaction mode.",
    ),
    Setting(
        name="shutdown_grace", flags=("--shutdown-grace",), read=duration, default=5.0, metavar="TIME",
        help="What running jobs get after a signal: 5s.",
    ),
    Setting(
        name="recovery", flags=("--no-recovery",), read=switch, default=True,
        help="Neither beat nor free the jobs of dead workers.",
    ),
    Setting(
        name="heartbeat_interval", flags=(), read=duration, default=3.0,
        metavar="TIME", help="How often to say that it lives: 3s.",
    ),
    Setting(
        name="lease", flags=("--lease",), read=duration, default=38.0, metavar="TIME",
        help="After how much silence others run its jobs: 38s.",
    ),
    Setting(
        name="fast_lease", flags=(), read=duration, default=8.0, metavar="TIME",
        help="The same, if its connections are gone: 8s.",
    ),
    Setting(
        name="recovery_delay", flags=(), read=duration, default=0.0, metavar="TIME",
        help="When jobs of a dead worker run again: 0s.",
    ),
    Setting(
        name="health", flags=("--health",), read=address, default=None, metavar="ADDRESS",
        help="Answer /live and /ready here: 8080, or host:port.",
    ),
    Setting(
        name="log_level", flags=("--log-level",), read=one_of("debug", "info", "warning", "error"),
        default="info", metavar="LEVEL", for_all_verbs=True, help="debug, info, warning or error.",
    ),
    Setting(
        name="log_format", flags=("--log-format",), read=one_of("text", "json", "pretty"), default="text",
        metavar="FORMAT", for_all_verbs=True, help="text, json or pretty.",
    ),
)  # fmt: skip
_BY_NAME = {setting.name: setting for setting in SETTINGS}


class Value(NamedTuple):
    """A value, and where it comes from."""

    value: Any
    source: str


def gather(
    flags: Mapping[str, Any],
    file: str | None = None,
    *,
    environment: Mapping[str, str] = os.environ,
    folder: Path | None = None,
) -> dict[str, Value]:
    """All settings.

    Args:
        flags: Those that the command line has, read already.
        file: The configuration file; by default that of the folder, if it has one.
        environment: The environment.
        folder: Where the command is run.

    Raises:
        ConfigurationError: A key is not known, or a value cannot be.
    """
    values = {setting.name: Value(setting.default, "default") for setting in SETTINGS}
    path, table = _read_file(file, folder or Path.cwd())
    for key, raw in table.items():
        setting = _BY_NAME.get(key.replace("-", "_"))
        if setting is None:
            raise ConfigurationError(f"{path}: there is no setting {key!r}. {_hint(key, _BY_NAME)}")
        values[setting.name] = _read(setting, raw, str(path))
    for setting in SETTINGS:
        if raw := environment.get(setting.environment):
            values[setting.name] = _read(setting, raw, setting.environment)
    for name, value in flags.items():
        values[name] = Value(value, _BY_NAME[name].flags[-1])
    return values


def unknown_variables(environment: Mapping[str, str] = os.environ) -> Iterable[str]:
    """A sentence for each variable that looks like a setting, and is none."""
    known = {setting.environment for setting in SETTINGS}
    for name in environment:
        rest = name.removeprefix(PREFIX)
        if rest != name and name not in known and not rest.startswith(_OF_JOBS):
            yield f"The variable {name} is ignored: there is no such setting. {_hint(name, known)}"


def _read(setting: Setting, raw: object, source: str) -> Value:
    try:
        return Value(setting.read(raw), source)
    except ValueError as error:
        shown = "***" if setting.metavar == "DSN" else repr(raw)
        raise ConfigurationError(f"{source}: {setting.name} is {shown}; it must be {error}.") from None


def _read_file(named: str | None, folder: Path) -> tuple[Path, Mapping[str, object]]:
    if named is not None:
        path = Path(named)
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
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not TOML: {error}.") from None


def _table(path: Path, content: Mapping[str, Any]) -> Mapping[str, object]:
    """Our table of a pyproject.toml, or all of another file."""
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
    if simple in _OTHER_NAMES:
        return f"Did you mean {_OTHER_NAMES[simple]}?"
    near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    return f"Did you mean {near[0]}?" if near else f"There are: {', '.join(sorted(known))}."
