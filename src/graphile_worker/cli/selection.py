"""Which jobs a verb is about: ids as arguments or from standard input, or a filter."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from graphile_worker.job import JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from graphile_worker.many_jobs import JobFilter

_FLAGS = {
    "task": ("--task", "NAME", "Jobs of this task."),
    "queue_name": ("--queue", "NAME", "Jobs of this serial queue."),
    "key": ("--key", "KEY", "The job with this key."),
    "locked_by": ("--worker", "ID", "Jobs that this worker runs."),
    "text": ("--text", "TEXT", "With this in payload, last error, key or worker."),
}
_HIGHEST = 2**63
_DIGITS = len(str(_HIGHEST))
_HOW = (
    "Jobs are named by their ids, with - for ids from standard input; or by flags, all of which must hold. "
    "More than one job is asked about, unless with --yes."
)


class Selection(NamedTuple):
    """Some ids, or all jobs for which a filter holds."""

    ids: list[int] | None
    filter: JobFilter

    @property
    def only_key(self) -> str | None:
        """The key, if that is all that is given."""
        given = {name for name, value in self.filter.parts().items() if value is not None}
        return self.filter.key if self.ids is None and given == {"having_key"} else None


def filter_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """Flags that make a `JobFilter`."""
    state = click.option(
        "--state",
        type=click.Choice([state.value for state in JobState]),
        metavar="STATE",
        help=f"{', '.join(JobState)}.",
    )
    flags = {
        name: click.option(flag, name, metavar=metavar, help=text)
        for name, (flag, metavar, text) in _FLAGS.items()
    }
    for option in reversed([flags["task"], flags["queue_name"], state, *list(flags.values())[2:]]):
        function = option(function)
    return function


def selection_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with ids in place of a filter."""
    function = click.option("--all", "all_jobs", is_flag=True, help="All jobs that it can be done with.")(
        function
    )
    function = filter_flags(function)
    function.__doc__ = f"{(function.__doc__ or '').rstrip()}\n\n    {_HOW}\n"
    return click.argument("ids", metavar="[ID]...", nargs=-1)(function)


def taken_filter(arguments: dict[str, Any]) -> JobFilter:
    """The filter, out of what the command line has."""
    from graphile_worker.many_jobs import JobFilter  # noqa: PLC0415

    given = {name: arguments.pop(name) for name in (*_FLAGS, "state")}
    for name, value in given.items():
        if value == "":  # a variable of a script that is not set, as a rule; and it would fit every job
            raise click.UsageError(f"{_FLAGS[name][0]} is empty: say which.")
    return JobFilter(**given)


def taken_selection(arguments: dict[str, Any]) -> Selection:
    """The selection, out of what the command line has; there must be one."""
    ids, all_jobs = arguments.pop("ids"), arguments.pop("all_jobs")
    chosen = taken_filter(arguments)
    ways = [bool(ids), any(value is not None for value in chosen.parts().values()), all_jobs]
    if sum(ways) > 1:
        raise click.UsageError("Name jobs by their ids, by a filter or by --all, one of these.")
    if not any(ways):
        raise click.UsageError(
            "Name jobs by their ids, with - for ids from standard input; or by a filter such as --task; or "
            "take --all."
        )
    return Selection(read_ids(ids) if ids else None, chosen)


def words_of_stdin() -> list[str]:
    """What is between spaces and line breaks of standard input."""
    return sys.stdin.buffer.read().decode(errors="replace").split()


def read_ids(words: Iterable[str]) -> list[int]:
    """The ids that were given, each once and in order; for ``-`` those of standard input."""
    found: dict[int, None] = {}
    for word in words:
        given = words_of_stdin() if word == "-" else [word]
        for text in given:
            if not text.isascii() or not text.isdecimal() or len(text) > _DIGITS or int(text) >= _HIGHEST:
                raise click.UsageError(f"{text[:40]!r} is no id of a job: ids are numbers, such as 42.")
            found[int(text)] = None
    return sorted(found)
