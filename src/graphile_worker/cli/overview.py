"""``graphile-worker stats``, ``queues`` and ``workers``: the state of a queue."""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import click
import msgspec

from graphile_worker._base.durations import format_duration
from graphile_worker._base.text import pluralize
from graphile_worker.cli import times
from graphile_worker.cli.activity import print_activity
from graphile_worker.cli.flags import Integer, json_flag, open_utils, verb
from graphile_worker.cli.printing import (
    STATES,
    Column,
    console,
    on_terminal,
    print_note,
    print_object,
    row_printer,
    table,
    to_json,
)
from graphile_worker.errors import GraphileWorkerError
from graphile_worker.stats import TaskStats

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from datetime import timedelta

    from graphile_worker.cli.settings import Value
    from graphile_worker.client import WorkerUtils
    from graphile_worker.limits import LimitState, Pause
    from graphile_worker.stats import QueueStats, RunningJob, Stats
    from graphile_worker.workers import WorkerInfo

_TERMINAL_LIMIT = 50
_MAX_JOBS_SHOWN = 3


class _TaskRow(NamedTuple):
    task: str
    stats: TaskStats


def _state_column(state: str) -> Column[_TaskRow]:
    def count(row: _TaskRow) -> int:
        found: int = getattr(row.stats, state)
        return found

    return Column(
        title=state.upper(),
        value=count,
        align_right=True,
        style=lambda row: STATES[state] if count(row) else "dim",
    )


_STATS: list[Column[_TaskRow]] = [
    Column(title="TASK", value=lambda row: row.task, min_width=16),
    *(_state_column(state) for state in STATES),
    Column(title="TOTAL", value=lambda row: row.stats.total, align_right=True),
    Column(
        title="OLDEST DUE",
        value=lambda row: row.stats.oldest_due,
        terminal_value=lambda row: (
            times.format_relative(row.stats.oldest_due) if row.stats.oldest_due else ""
        ),
    ),
]


@verb("stats", "stats", "stats --watch", "stats --since 24h", "stats --json | jq .failed")
@click.option("-w", "--watch", is_flag=True, help="Refresh until Ctrl-C.")
@click.option("--interval", type=times.Period(minimum=0.1), default="2s", help="Time between refreshes [2s].")
@click.option("--since", type=times.Delay(), help="Show what Python workers did since then instead.")
@click.option("--step", type=times.Delay(), help="With --since: length of a step [a thirtieth].")
@json_flag
def stats(
    settings: Mapping[str, Value],
    *,
    watch: bool,
    interval: float,
    since: timedelta | None,
    step: timedelta | None,
    as_json: bool,
) -> None:
    """Count jobs by task and state.

    Also show how long the oldest due job has waited. Each refresh scans all jobs once. With --watch and
    --json, each refresh is an object on a line of its own. If the connection is lost while watching, the
    command reports the error, and continues when the database is back.

    With --since, show the jobs that Python workers ran: how many succeeded and failed, how long half and 95 %
    of them ran and waited at most, and a chart. Jobs that Node and Rust workers ran are not included.
    """
    if since is not None or step is not None:
        if watch or since is None:
            raise click.UsageError(
                "--step needs --since." if since is None else "--watch and --since cannot be combined."
            )
        asyncio.run(print_activity(settings, since, step, as_json=as_json))
        return
    asyncio.run(_stats(settings, interval if watch else None, as_json=as_json))


async def _stats(settings: Mapping[str, Value], interval: float | None, *, as_json: bool) -> None:
    async with open_utils(settings) as utils:
        if interval is not None and on_terminal() and not as_json:
            await _watch(utils, interval)
            return
        if interval is None:
            _print_stats(await _read_state(utils), as_json=as_json)
            return
        reported = ""
        async for found, error in _poll_stats(utils, interval):
            if not error:
                _print_stats(found, as_json=as_json)
                sys.stdout.flush()
            elif error != reported:
                print_note(error)
            reported = error


class _State(NamedTuple):
    stats: Stats
    pauses: list[Pause]
    limits: list[LimitState]

    @property
    def notes(self) -> list[str]:
        """What keeps jobs waiting, in words."""
        names = ", ".join(pause.subject for pause in self.pauses)
        notes = [f"Paused: {names}. See: graphile-worker pauses"] if names else []
        return notes + [
            f"{pluralize(limit.waiting, 'job waits', 'jobs wait')} for the limit {limit.name!r}, "
            f"which is {limit.concurrency}."
            for limit in self.limits
            if limit.is_full and limit.waiting
        ]


async def _read_state(utils: WorkerUtils) -> _State:
    return _State(await utils.stats(), await utils.pauses(), await utils.limits())


async def _poll_stats(utils: WorkerUtils, interval: float) -> AsyncIterator[tuple[_State, str]]:
    """Yield the latest statistics, with the error message if they could not be refreshed.

    An error of the first query is raised.
    """
    found, message = await _read_state(utils), ""
    while True:
        yield found, message
        await asyncio.sleep(interval)
        try:
            found, message = await _read_state(utils), ""
        except GraphileWorkerError as error:
            message = str(error)


async def _watch(utils: WorkerUtils, interval: float) -> None:
    from rich.console import Group  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415

    from graphile_worker.cli.live.layout import wrap_lines  # noqa: PLC0415

    with Live(console=console(), auto_refresh=False) as live:
        async for found, error in _poll_stats(utils, interval):
            width, height = live.console.size
            status = f"{datetime.now().astimezone():%H:%M:%S}, every {interval:g} s. Press Ctrl-C to quit."
            footer = wrap_lines(error or status, width, "bold yellow" if error else "dim")
            notes = [line for note in found.notes for line in wrap_lines(note, width, "yellow")]
            footer = [*notes, *footer]
            rows = table(_STATS, _rows(found.stats, height - len(footer) - 1))
            live.update(Group(rows, *footer), refresh=True)


def _rows(found: Stats, max_rows: int | None = None) -> list[_TaskRow]:
    """Return a row for each task, and a total; if there are too many, tasks with few jobs share a row."""
    tasks = found.tasks
    if max_rows is not None and len(tasks) + 1 > max_rows:
        largest = sorted(tasks, key=lambda name: -tasks[name].total)[: max(0, max_rows - 2)]
        others = TaskStats.of_tasks([counts for name, counts in tasks.items() if name not in largest])
        tasks = {name: counts for name, counts in tasks.items() if name in largest}
        tasks[f"({len(found.tasks) - len(largest)} others)"] = others
    return [*(_TaskRow(task, counts) for task, counts in tasks.items()), _TaskRow("(all)", found)]


def _print_stats(found: _State, *, as_json: bool) -> None:
    stats = found.stats
    if as_json:
        tasks = {name: _counts(task) for name, task in stats.tasks.items()}
        pauses = [msgspec.structs.asdict(pause) for pause in found.pauses]
        limits = [msgspec.structs.asdict(limit) for limit in found.limits]
        print_object({**_counts(stats), "tasks": tasks, "pauses": pauses, "limits": limits})
        return
    with row_printer(_STATS, lambda _: {}, as_json=False) as rows:
        rows.add(_rows(stats))
    for note in found.notes:
        print_note(note)


def _counts(found: TaskStats) -> dict[str, object]:
    counts = {state: getattr(found, state) for state in STATES}
    return {**counts, "total": found.total, "oldest_due": found.oldest_due}


_QUEUES: list[Column[QueueStats]] = [
    Column(title="QUEUE", value=lambda queue: queue.queue_name, min_width=16),
    Column(title="JOBS", value=lambda queue: queue.jobs, align_right=True),
    Column(title="READY", value=lambda queue: queue.ready, align_right=True),
    Column(title="FAILED", value=lambda queue: queue.failed, align_right=True),
    Column(
        title="OLDEST DUE",
        value=lambda queue: queue.oldest_due,
        terminal_value=lambda queue: times.format_relative(queue.oldest_due) if queue.oldest_due else "",
    ),
    Column(title="LOCKED BY", value=lambda queue: queue.locked_by, min_width=12),
    Column(
        title="SINCE",
        value=lambda queue: queue.locked_at,
        terminal_value=lambda queue: times.format_time(queue.locked_at),
    ),
]


@verb("queues", "queues", "queues --locked", "queues mails reports --json")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--locked", is_flag=True, help="Only queues that a worker has locked.")
@click.option(
    "-n", "--limit", type=Integer(1), metavar="N", help="Maximum number of queues [all; 50 on a terminal]."
)
@json_flag
def queues(
    settings: Mapping[str, Value], *, names: tuple[str, ...], locked: bool, limit: int | None, as_json: bool
) -> int:
    """List serial queues, and the workers that have locked them.

    Queues with most jobs come first. A queue is locked while one of its jobs runs. Queues without jobs are
    removed by cleanup.
    """
    if limit is None and on_terminal() and not as_json:
        limit = _TERMINAL_LIMIT
    return asyncio.run(_queues(settings, names, locked=locked, limit=limit, as_json=as_json))


async def _queues(
    settings: Mapping[str, Value], names: tuple[str, ...], *, locked: bool, limit: int | None, as_json: bool
) -> int:
    async with open_utils(settings) as utils:
        found = await utils.many.queues(
            list(names) or None, only_locked=locked, limit=None if limit is None else limit + 1
        )
    with row_printer(_QUEUES, msgspec.structs.asdict, as_json=as_json) as rows:
        rows.add(found[:limit])
    if limit is not None and len(found) > limit:
        print_note("There are more: raise --limit.")
    missing = sorted(set(names) - {queue.queue_name for queue in found})
    for name in missing if not locked else ():
        print_note(f"There is no queue {name!r}.")
    return 1 if missing and not locked else 0


class _WorkerRow(NamedTuple):
    worker: WorkerInfo
    jobs: list[RunningJob]


def _shown_jobs(row: _WorkerRow) -> str:
    now = datetime.now(UTC)
    shown = [
        f"{job.id} {job.task_identifier} {format_duration((now - job.locked_at).total_seconds())}"
        for job in row.jobs[:_MAX_JOBS_SHOWN]
    ]
    more = [f"and {len(row.jobs) - _MAX_JOBS_SHOWN} more"] if len(row.jobs) > _MAX_JOBS_SHOWN else []
    return ", ".join([*shown, *more])


_STYLES = {"ready": "green", "alive": "green", "dead": "red", "silent": "red", "unknown": "dim"}
_WORKERS: list[Column[_WorkerRow]] = [
    Column(title="WORKER", value=lambda row: row.worker.id),
    Column(title="LANGUAGE", value=lambda row: row.worker.language, drop_order=3),
    Column(title="HOST", value=lambda row: row.worker.host, min_width=8, drop_order=5),
    Column(title="PID", value=lambda row: row.worker.pid, align_right=True, drop_order=4),
    Column(
        title="STATE",
        value=lambda row: row.worker.status,
        style=lambda row: _STYLES.get(row.worker.status, "yellow"),
    ),
    Column(
        title="HEARTBEAT",
        value=lambda row: row.worker.last_heartbeat_at,
        terminal_value=lambda row: (
            ""
            if row.worker.seconds_since_heartbeat is None
            else f"{format_duration(row.worker.seconds_since_heartbeat)} ago"
        ),
    ),
    Column(title="SLOTS", value=lambda row: row.worker.concurrency, align_right=True, drop_order=2),
    Column(title="JOBS", value=lambda row: row.worker.jobs, align_right=True),
    Column(title="QUEUES", value=lambda row: row.worker.queues, align_right=True, drop_order=1),
    Column(
        title="RUNS",
        value=lambda row: to_json([[job.id, job.task_identifier] for job in row.jobs]),
        terminal_value=_shown_jobs,
        min_width=20,
        wraps=True,
    ),
]


@verb("workers", "workers", "workers --json | jq '.[] | select(.state == \"dead\") | .id'")
@json_flag
def workers(settings: Mapping[str, Value], *, as_json: bool) -> None:
    """List workers, and the jobs that each is running.

    Python and Rust workers send heartbeats. Node workers do not, and are listed only while they have locked
    jobs or queues. The locks of a dead Node worker expire after four hours, or are released by unlock.
    """
    asyncio.run(_workers(settings, as_json=as_json))


async def _workers(settings: Mapping[str, Value], *, as_json: bool) -> None:
    async with open_utils(settings) as utils:
        found = await utils.workers()
        running: defaultdict[str, list[RunningJob]] = defaultdict(list)
        for job in await utils.many.running():
            running[job.locked_by].append(job)
    columns = _WORKERS
    if on_terminal():
        columns = [
            column for column in _WORKERS if column.title not in {"HOST", "PID"} or _has_values(found, column)
        ]
    with row_printer(columns, _as_object, as_json=as_json) as rows:
        rows.add(_WorkerRow(worker, running[worker.id]) for worker in found)
    if not found and not as_json and on_terminal():
        print_note("No workers found: none has a heartbeat, and none has locked jobs or queues.")


def _has_values(found: list[WorkerInfo], column: Column[_WorkerRow]) -> bool:
    value: Callable[[_WorkerRow], object] = column.value
    return any(value(_WorkerRow(worker, [])) is not None for worker in found)


def _as_object(row: _WorkerRow) -> dict[str, object]:
    fields = msgspec.structs.asdict(row.worker)
    return {
        **fields,
        "state": row.worker.status,
        "is_alive": row.worker.is_alive,
        "runs": [msgspec.structs.asdict(job) for job in row.jobs],
    }
