"""Selection of jobs by a verb's arguments: ids, ids from standard input, or a filter."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from graphile_worker.job import JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from graphile_worker._client.bulk import JobFilter

_FLAGS = {
    "task": ("--task", "NAME", "Jobs of this task."),
    "queue_name": ("--queue", "NAME", "Jobs of this serial queue."),
    "key": ("--key", "KEY", "The job with this key."),
    "locked_by": ("--worker", "ID", "Jobs that this worker is running."),
    "search": ("--search", "TEXT", "Text in payload, last error, key or worker."),
    "error_type": ("--error", "TYPE", "Jobs that failed with this type of exception."),
}
_ID_LIMIT = 2**63
_DIGITS = len(str(_ID_LIMIT))
_SELECTION_HELP = (
    "Select jobs by ids (- reads them from standard input) or by filters, which are combined. The command "
    "asks before it changes more than one job, except with --yes."
)


class Selection(NamedTuple):
    """Some ids, or all jobs that match a filter."""

    ids: list[int] | None
    filter: JobFilter

    @property
    def only_key(self) -> str | None:
        """The key, if the selection is nothing but a key."""
        given = {name for name, value in self.filter.parameters().items() if value is not None}
        return self.filter.key if self.ids is None and given == {"having_key"} else None


def filter_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags that make a `JobFilter`."""
    state = click.option(
        "--state",
        type=click.Choice([state.value for state in JobState]),
        metavar="STATE",
        help=f"Jobs in this state: {', '.join(JobState)}.",
    )
    flags = {
        name: click.option(flag, name, metavar=metavar, help=text)
        for name, (flag, metavar, text) in _FLAGS.items()
    }
    for option in reversed([flags["task"], flags["queue_name"], state, *list(flags.values())[2:]]):
        function = option(function)
    return function


def selection_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags of a filter, and the ids that can be given instead of a filter."""
    function = click.option("--all", "all_jobs", is_flag=True, help="All jobs that the command can change.")(
        function
    )
    function = filter_flags(function)
    function.__doc__ = f"{(function.__doc__ or '').rstrip()}\n\n    {_SELECTION_HELP}\n"
    return click.argument("ids", metavar="[ID]...", nargs=-1)(function)


def pop_filter(arguments: dict[str, Any]) -> JobFilter:
    """Remove the filter's flags from the arguments, and return the filter."""
    from graphile_worker._client.bulk import JobFilter  # noqa: PLC0415

    given = {name: arguments.pop(name) for name in (*_FLAGS, "state")}
    for name, value in given.items():
        if value == "":  # most likely an unset variable in a script, and it would match every job
            raise click.UsageError(f"{_FLAGS[name][0]} is empty: give a value, or leave it out.")
    return JobFilter(**given)


def pop_selection(arguments: dict[str, Any]) -> Selection:
    """Remove the selection from the arguments, and return it.

    Raises:
        click.UsageError: There is no selection, or more than one kind of it.
    """
    ids, all_jobs = arguments.pop("ids"), arguments.pop("all_jobs")
    job_filter = pop_filter(arguments)
    ways = [bool(ids), any(value is not None for value in job_filter.parameters().values()), all_jobs]
    if sum(ways) > 1:
        raise click.UsageError("Select jobs by their ids, by a filter or by --all, but only by one of these.")
    if not any(ways):
        raise click.UsageError(
            "No jobs selected. Give their ids, or - to read ids from standard input; or a filter such as "
            "--task; or --all."
        )
    return Selection(read_ids(ids) if ids else None, job_filter)


def read_stdin_words() -> list[str]:
    """Return the words of standard input, which spaces and line breaks separate."""
    return sys.stdin.buffer.read().decode(errors="replace").split()


def read_ids(words: Iterable[str]) -> list[int]:
    """Return the given ids, each once and in order; ``-`` stands for those of standard input."""
    found: dict[int, None] = {}
    for word in words:
        texts = read_stdin_words() if word == "-" else [word]
        for text in texts:
            if not text.isascii() or not text.isdecimal() or len(text) > _DIGITS or int(text) >= _ID_LIMIT:
                raise click.UsageError(f"{text[:40]!r} is not a job id: ids are numbers, such as 42.")
            found[int(text)] = None
    return sorted(found)


def no_job_message(name: int | str) -> str:
    """Return the sentence that no job has this id, or this key."""
    return f"There is no job {name}." if isinstance(name, int) else f"There is no job with the key {name!r}."
