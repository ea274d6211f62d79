"""``graphile-worker stats``, ``queues`` and ``workers``: how a queue is."""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import click
import msgspec

from graphile_worker.cli import times
from graphile_worker.cli.flags import Integer, json_flag, queue_of, verb
from graphile_worker.cli.printing import (
    STATES,
    Column,
    as_json_text,
    console,
    on_terminal,
    print_object,
    printed_rows,
    table,
    tell,
)
from graphile_worker.durations import lasting
from graphile_worker.errors import GraphileWorkerError
from graphile_worker.stats import TaskStats

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from graphile_worker.cli.settings import Value
    from graphile_worker.client import WorkerUtils
    from graphile_worker.liveness import WorkerInfo
    from graphile_worker.stats import QueueStats, RunningJob, Stats

_SCREEN = 50
_FEW = 3


class _TaskRow(NamedTuple):
    task: str
    stats: TaskStats


def _state_column(state: str) -> Column[_TaskRow]:
    def count(row: _TaskRow) -> int:
        found: int = getattr(row.stats, state)
        return found

    return Column(
        title=state.upper(), value=count, right=True, style=lambda row: STATES[state] if count(row) else "dim"
    )


_STATS: list[Column[_TaskRow]] = [
    Column(title="TASK", value=lambda row: row.task, least=16),
    *(_state_column(state) for state in STATES),
    Column(title="TOTAL", value=lambda row: row.stats.total, right=True),
    Column(
        title="OLDEST DUE",
        value=lambda row: row.stats.oldest_due,
        short=lambda row: times.from_now(row.stats.oldest_due) if row.stats.oldest_due else "",
    ),
]


@verb("stats", "stats", "stats --watch", "stats --json | jq .failed")
@click.option("-w", "--watch", is_flag=True, help="Look again and again, until Ctrl-C.")
@click.option("--interval", type=times.Period(least=0.1), default="2s", show_default=True, help="How often.")
@json_flag
def stats(settings: Mapping[str, Value], *, watch: bool, interval: float, as_json: bool) -> None:
    """Count the jobs, by task and state.

    Also how long the oldest that is due has waited. Each look is one pass over all jobs. With
    --watch and --json each look is an object on a line of its own. If the database goes away
    while it is watched, that is told, and it goes on when it is back.
    """
    asyncio.run(_stats(settings, interval if watch else None, as_json=as_json))


async def _stats(settings: Mapping[str, Value], interval: float | None, *, as_json: bool) -> None:
    async with queue_of(settings) as utils:
        if interval is not None and on_terminal() and not as_json:
            await _watch(utils, interval)
            return
        if interval is None:
            _print_stats(await utils.stats(), as_json=as_json)
            return
        told = ""
        async for found, trouble in _looks(utils, interval):
            if not trouble:
                _print_stats(found, as_json=as_json)
                sys.stdout.flush()
            elif trouble != told:
                tell(trouble)
            told = trouble


async def _looks(utils: WorkerUtils, interval: float) -> AsyncIterator[tuple[Stats, str]]:
    """What was seen last, and why there is nothing newer, if so. What is wrong at once is an error."""
    found, trouble = await utils.stats(), ""
    while True:
        yield found, trouble
        await asyncio.sleep(interval)
        try:
            found, trouble = await utils.stats(), ""
        except GraphileWorkerError as error:
            trouble = str(error)


async def _watch(utils: WorkerUtils, interval: float) -> None:
    from rich.console import Group  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415

    from graphile_worker.cli.live.layout import wrapped  # noqa: PLC0415

    with Live(console=console(), auto_refresh=False) as live:
        async for found, trouble in _looks(utils, interval):
            width, height = live.console.size
            says = f"{datetime.now().astimezone():%H:%M:%S}, every {interval:g} s. Ctrl-C ends it."
            foot = wrapped(trouble or says, width, "bold yellow" if trouble else "dim")
            made = table(_STATS, _rows(found, height - len(foot) - 1))
            live.update(Group(made, *foot), refresh=True)


def _rows(found: Stats, room: int | None = None) -> list[_TaskRow]:
    """A row a task, and one of all; where there is no room for so many, tasks with few jobs share one."""
    tasks = found.tasks
    if room is not None and len(tasks) + 1 > room:
        most = sorted(tasks, key=lambda name: -tasks[name].total)[: max(0, room - 2)]
        others = TaskStats.together([counts for name, counts in tasks.items() if name not in most])
        tasks = {name: counts for name, counts in tasks.items() if name in most}
        tasks[f"({len(found.tasks) - len(most)} others)"] = others
    return [*(_TaskRow(task, counts) for task, counts in tasks.items()), _TaskRow("(all)", found)]


def _print_stats(found: Stats, *, as_json: bool) -> None:
    if as_json:
        tasks = {name: _counts(task) for name, task in found.tasks.items()}
        print_object({**_counts(found), "tasks": tasks})
        return
    with printed_rows(_STATS, lambda _: {}, as_json=False) as rows:
        rows.add(_rows(found))


def _counts(found: TaskStats) -> dict[str, object]:
    counts = {state: getattr(found, state) for state in STATES}
    return {**counts, "total": found.total, "oldest_due": found.oldest_due}


_QUEUES: list[Column[QueueStats]] = [
    Column(title="QUEUE", value=lambda queue: queue.queue_name, least=16),
    Column(title="JOBS", value=lambda queue: queue.jobs, right=True),
    Column(title="READY", value=lambda queue: queue.ready, right=True),
    Column(title="FAILED", value=lambda queue: queue.failed, right=True),
    Column(
        title="OLDEST DUE",
        value=lambda queue: queue.oldest_due,
        short=lambda queue: times.from_now(queue.oldest_due) if queue.oldest_due else "",
    ),
    Column(title="LOCKED BY", value=lambda queue: queue.locked_by, least=12),
    Column(
        title="SINCE", value=lambda queue: queue.locked_at, short=lambda queue: times.both(queue.locked_at)
    ),
]


@verb("queues", "queues", "queues --locked", "queues mails reports --json")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--locked", is_flag=True, help="Only those that a worker has locked.")
@click.option("-n", "--limit", type=Integer(1), metavar="N", help="How many; on a terminal 50.")
@json_flag
def queues(
    settings: Mapping[str, Value], *, names: tuple[str, ...], locked: bool, limit: int | None, as_json: bool
) -> int:
    """List the serial queues, and who has locked them.

    Those with most jobs come first. A queue is locked while one of its jobs runs. Those without
    jobs are removed by cleanup.
    """
    if limit is None and on_terminal() and not as_json:
        limit = _SCREEN
    return asyncio.run(_queues(settings, names, locked=locked, limit=limit, as_json=as_json))


async def _queues(
    settings: Mapping[str, Value], names: tuple[str, ...], *, locked: bool, limit: int | None, as_json: bool
) -> int:
    async with queue_of(settings) as utils:
        found = await utils.many.queues(
            list(names) or None, only_locked=locked, limit=None if limit is None else limit + 1
        )
    with printed_rows(_QUEUES, msgspec.structs.asdict, as_json=as_json) as rows:
        rows.add(found[:limit])
    if limit is not None and len(found) > limit:
        tell("There are more: take more with --limit.")
    missing = sorted(set(names) - {queue.queue_name for queue in found})
    for name in missing if not locked else ():
        tell(f"There is no queue {name!r}.")
    return 1 if missing and not locked else 0


class _Seen(NamedTuple):
    worker: WorkerInfo
    runs: list[RunningJob]


def _runs(row: _Seen) -> str:
    now = datetime.now(UTC)
    shown = [
        f"{job.id} {job.task_identifier} {lasting((now - job.locked_at).total_seconds())}"
        for job in row.runs[:_FEW]
    ]
    more = [f"and {len(row.runs) - _FEW} more"] if len(row.runs) > _FEW else []
    return ", ".join([*shown, *more])


_STYLES = {"ready": "green", "beats": "green", "dead": "red", "silent": "red", "unknown": "dim"}
_WORKERS: list[Column[_Seen]] = [
    Column(title="WORKER", value=lambda row: row.worker.id),
    Column(title="LANGUAGE", value=lambda row: row.worker.language, spare=3),
    Column(title="HOST", value=lambda row: row.worker.host, least=8, spare=5),
    Column(title="PID", value=lambda row: row.worker.pid, right=True, spare=4),
    Column(
        title="STATE",
        value=lambda row: row.worker.condition,
        style=lambda row: _STYLES.get(row.worker.condition, "yellow"),
    ),
    Column(
        title="HEARTBEAT",
        value=lambda row: row.worker.last_heartbeat_at,
        short=lambda row: "" if row.worker.silence is None else f"{lasting(row.worker.silence)} ago",
    ),
    Column(title="SLOTS", value=lambda row: row.worker.concurrency, right=True, spare=2),
    Column(title="JOBS", value=lambda row: row.worker.jobs, right=True),
    Column(title="QUEUES", value=lambda row: row.worker.queues, right=True, spare=1),
    Column(
        title="RUNS",
        value=lambda row: as_json_text([[job.id, job.task_identifier] for job in row.runs]),
        short=_runs,
        least=20,
        folds=True,
    ),
]


@verb("workers", "workers", "workers --json | jq '.[] | select(.state == \"dead\") | .id'")
@json_flag
def workers(settings: Mapping[str, Value], *, as_json: bool) -> None:
    """List the workers, and what each runs now.

    Workers of this library and of the Rust port send heartbeats. Those of Node do not, and are known only
    while they hold jobs or queues; what a dead one of theirs holds is free after four hours, or by unlock.
    """
    asyncio.run(_workers(settings, as_json=as_json))


async def _workers(settings: Mapping[str, Value], *, as_json: bool) -> None:
    async with queue_of(settings) as utils:
        found = await utils.workers()
        runs: defaultdict[str, list[RunningJob]] = defaultdict(list)
        for job in await utils.many.running():
            runs[job.locked_by].append(job)
    columns = _WORKERS
    if on_terminal():
        columns = [
            column for column in _WORKERS if column.title not in {"HOST", "PID"} or _any(found, column)
        ]
    with printed_rows(columns, _as_object, as_json=as_json) as rows:
        rows.add(_Seen(worker, runs[worker.id]) for worker in found)
    if not found and not as_json and on_terminal():
        tell("There is no worker with a heartbeat, and none that holds anything.")


def _any(found: list[WorkerInfo], column: Column[_Seen]) -> bool:
    shown: Callable[[_Seen], object] = column.value
    return any(shown(_Seen(worker, [])) is not None for worker in found)


def _as_object(row: _Seen) -> dict[str, object]:
    fields = msgspec.structs.asdict(row.worker)
    return {
        **fields,
        "state": row.worker.condition,
        "lives": row.worker.lives,
        "runs": [msgspec.structs.asdict(job) for job in row.runs],
    }
