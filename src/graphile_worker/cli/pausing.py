"""``graphile-worker pause``, ``resume`` and ``pauses``."""

from __future__ import annotations

import asyncio
import difflib
import getpass
import socket
from typing import TYPE_CHECKING, Any

import click
import msgspec

from graphile_worker.cli import times
from graphile_worker.cli.flags import json_flag, open_utils, verb
from graphile_worker.cli.printing import Column, print_note, row_printer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime, timedelta

    from graphile_worker.cli.settings import Value
    from graphile_worker.limits import Pause

_PAUSES: list[Column[Pause]] = [
    Column(title="KIND", value=lambda pause: pause.kind),
    Column(title="NAME", value=lambda pause: pause.name, min_width=16),
    Column(
        title="SINCE",
        value=lambda pause: pause.paused_at,
        terminal_value=lambda pause: times.format_time(pause.paused_at),
    ),
    Column(
        title="UNTIL",
        value=lambda pause: pause.until,
        terminal_value=lambda pause: times.format_time(pause.until),
    ),
    Column(title="BY", value=lambda pause: pause.paused_by, min_width=8),
    Column(title="REASON", value=lambda pause: pause.reason, min_width=16, wraps=True),
]


def _subject_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--all", "everything", is_flag=True, help="Everything."),
        click.option("--queue", "queues", metavar="NAME", multiple=True, help="Serial queue; repeatable."),
        click.option("--task", "tasks", metavar="NAME", multiple=True, help="Task; repeatable."),
    ):
        function = option(function)
    return function


def _read_subjects(tasks: Sequence[str], queues: Sequence[str], *, everything: bool) -> list[dict[str, str]]:
    if everything == bool(tasks or queues):
        raise click.UsageError("Give --task, --queue or --all; --all cannot be combined with others.")
    return [{"task": name} for name in tasks] + [{"queue": name} for name in queues] or [{}]


@verb(
    "pause",
    "pause --task charge --reason 'the bank is down'",
    "pause --queue tenant:7 --until 2h",
    "pause --all",
)
@_subject_flags
@click.option("--until", type=times.Moment(), help="End of the pause: 90s, 5m, 2h, 1d or 2030-01-31T12:00Z.")
@click.option("-r", "--reason", metavar="TEXT", help="Reason, for people.")
@click.option("--by", "paused_by", metavar="NAME", help="Who pauses it [user@host].")
@json_flag
def pause(
    settings: Mapping[str, Value],
    *,
    tasks: tuple[str, ...],
    queues: tuple[str, ...],
    everything: bool,
    until: datetime | timedelta | None,
    reason: str | None,
    paused_by: str | None,
    as_json: bool,
) -> None:
    """Stop starting jobs of a task, a queue or of all.

    Running jobs are not stopped, and jobs can still be added. The pause survives restarts. Pausing again
    changes the pause. Node and Rust workers obey only the pause of a queue.
    """
    subjects = _read_subjects(tasks, queues, everything=everything)
    values = {"until": until, "reason": reason, "paused_by": paused_by or _user()}
    asyncio.run(_pause(settings, subjects, values, as_json=as_json))


def _user() -> str | None:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # the user has no name
        return None


async def _pause(
    settings: Mapping[str, Value], subjects: list[dict[str, str]], values: dict[str, Any], *, as_json: bool
) -> None:
    async with open_utils(settings, reads_jobs=False) as utils:
        paused = [await utils.pause(**subject, **values) for subject in subjects]
        workers = await utils.workers()
    _print(paused, as_json=as_json)
    served = {task for worker in workers if worker.is_alive for task in worker.tasks or ()}
    for subject in subjects:
        if served and (task := subject.get("task", "")) and task not in served:
            print_note(_unserved_task(task, served))
    if not all(pause.is_obeyed_by_all for pause in paused):
        print_note("Python workers obey this. Node and Rust workers obey only the pause of a queue.")


def _unserved_task(task: str, served: set[str]) -> str:
    """Return a note that no worker that is alive has the task: the name may be misspelt."""
    near = difflib.get_close_matches(task, served, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"Warning: no Python worker has a task {task!r}, so this stops nothing now.{hint}"


@verb("resume", "resume --task charge", "resume --queue tenant:7", "resume --all")
@_subject_flags
def resume(
    settings: Mapping[str, Value], *, tasks: tuple[str, ...], queues: tuple[str, ...], everything: bool
) -> int:
    """End the pauses of tasks, of serial queues, or of everything.

    Each pause is ended by itself: --all ends the pause that --all began, and not those of single tasks and
    queues. The exit code is 1 if something was not paused.
    """
    subjects = _read_subjects(tasks, queues, everything=everything)
    return asyncio.run(_resume(settings, subjects))


async def _resume(settings: Mapping[str, Value], subjects: list[dict[str, str]]) -> int:
    missing = 0
    async with open_utils(settings, reads_jobs=False) as utils:
        for subject in subjects:
            [(kind, name)] = subject.items() or [("all", "")]
            what = "Everything" if kind == "all" else f"The {kind} {name!r}"
            if await utils.resume(**subject):
                print_note(f"{what} is resumed.")
            else:
                print_note(f"{what} is not paused.")
                missing += 1
        if not subjects[0]:
            others = [pause.subject for pause in await utils.pauses()]
            if others:
                print_note(f"Still paused: {', '.join(others)}.")
    return 1 if missing else 0


@verb("pauses", "pauses", "pauses --json")
@json_flag
def pauses(settings: Mapping[str, Value], *, as_json: bool) -> None:
    """List what is paused."""
    asyncio.run(_list(settings, as_json=as_json))


async def _list(settings: Mapping[str, Value], *, as_json: bool) -> None:
    async with open_utils(settings, reads_jobs=False) as utils:
        _print(await utils.pauses(), as_json=as_json)


def _print(found: list[Pause], *, as_json: bool) -> None:
    with row_printer(_PAUSES, msgspec.structs.asdict, as_json=as_json) as rows:
        rows.add(found)
