"""``graphile-worker unlock``, ``cleanup``, ``migrate`` and ``sweep``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from graphile_worker._base.durations import format_duration
from graphile_worker._base.text import join_truncated, pluralize
from graphile_worker.cli.flags import json_flag, open_utils, verb, yes_flag
from graphile_worker.cli.printing import (
    Column,
    cleanup_summary,
    escape,
    print_note,
    print_object,
    row_printer,
)
from graphile_worker.cli.selection import read_stdin_words
from graphile_worker.cli.times import Period

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphile_worker.cli.settings import Value
    from graphile_worker.client import WorkerUtils
    from graphile_worker.workers import RecoveredWorker, WorkerInfo

_PARTS = {
    "failed-jobs": "DELETE_PERMAFAILED_JOBS",
    "task-identifiers": "GC_TASK_IDENTIFIERS",
    "queues": "GC_JOB_QUEUES",
}


@verb(
    "unlock",
    "unlock pool-0123456789abcdef01",
    "unlock - --yes < ids-of-dead-workers",
)
@click.argument("workers", metavar="WORKER...", nargs=-1, required=True)
@click.option("--force", is_flag=True, help="Unlock even live workers: their jobs may run twice.")
@yes_flag
@json_flag
def unlock(
    settings: Mapping[str, Value], *, workers: tuple[str, ...], force: bool, yes: bool, as_json: bool
) -> int:
    """Release all jobs and queues that workers have locked.

    Only for workers that are gone for good, because the jobs of a live worker would run twice. A Rust worker
    counts as alive until five minutes after its last heartbeat; if you know that it is gone, use --force.
    Dead Python workers don't need this command, because other workers detect them: see sweep. The id - reads
    worker ids from standard input.
    """
    names: dict[str, None] = {}
    for word in workers:
        names |= dict.fromkeys(read_stdin_words() if word == "-" else [word])
    return asyncio.run(_unlock(settings, list(names), force=force, yes=yes, as_json=as_json))


async def _unlock(
    settings: Mapping[str, Value], names: list[str], *, force: bool, yes: bool, as_json: bool
) -> int:
    from graphile_worker.cli.bulk import confirm  # noqa: PLC0415

    async with open_utils(settings) as utils:
        known = {worker.id: worker for worker in await utils.workers()}
        found = [known[name] for name in names if name in known]
        if not force:
            _reject_live_workers(found)
        held, queues = sum(worker.jobs for worker in found), sum(worker.queues for worker in found)
        question = f"This would release {pluralize(held, 'job')} and {pluralize(queues, 'queue')}."
        if held > 1 and not confirm(question, yes=yes):
            return 1
        await utils.force_unlock_workers([worker.id for worker in found])
    missing = [name for name in names if name not in known]
    if as_json:
        print_object(
            {"workers": [worker.id for worker in found], "jobs": held, "queues": queues, "missing": missing}
        )
    elif found:
        click.echo(f"Released {pluralize(held, 'job')} and {pluralize(queues, 'queue')}.")
    for name in missing:
        print_note(f"There is no worker {escape(name)!r}: it has no heartbeat and no locks.")
    return 1 if missing else 0


def _reject_live_workers(workers: Sequence[WorkerInfo]) -> None:
    for worker in workers:
        if worker.is_alive:
            raise click.ClickException(
                f"{worker.name} is alive: last heartbeat {worker.seconds_since_heartbeat or 0:.0f} s ago. "
                "Its jobs would run twice. Stop it first; if it is stopped, use --force."
            )


@verb("cleanup", "cleanup", "cleanup failed-jobs queues", "cleanup task-identifiers --keep send_email")
@click.argument("parts", metavar="[WHAT]...", nargs=-1)
@click.option("--keep", metavar="TASK", multiple=True, help="Task identifier to keep; may be repeated.")
@yes_flag
@json_flag
def cleanup(
    settings: Mapping[str, Value], *, parts: tuple[str, ...], keep: tuple[str, ...], yes: bool, as_json: bool
) -> int:
    """Remove unused queues, task identifiers and failed jobs.

    \b
    queues            serial queues without jobs; the default
    failed-jobs       jobs that have failed permanently
    task-identifiers  task identifiers without jobs

    Graphile Worker's names work too: GC_JOB_QUEUES and so on. Task identifiers that live Python workers serve
    are kept. Node and Rust workers do not publish theirs: pass them with --keep, or stop those workers first.
    """  # noqa: D301 - \b stops click from wrapping those lines
    chosen = [_part(word) for given in parts for word in given.split(",")] or ["queues"]
    return asyncio.run(_cleanup(settings, chosen, keep, yes=yes, as_json=as_json))


def _part(word: str) -> str:
    plain = word.strip().lower().replace("_", "-")
    for name, task in _PARTS.items():
        if plain in {name, task.lower().replace("_", "-")}:
            return name
    raise click.UsageError(f"Unknown cleanup {word!r}: must be one of {', '.join(_PARTS)}.")


async def _cleanup(
    settings: Mapping[str, Value], chosen: list[str], keep: Sequence[str], *, yes: bool, as_json: bool
) -> int:
    async with open_utils(settings) as utils:
        removed = await _remove_failed(utils, yes=yes) if "failed-jobs" in chosen else 0
        if removed is None:
            return 1
        served = {
            task
            for worker in await utils.workers(include_locks=False)
            if worker.is_ours and worker.is_alive
            for task in worker.tasks or ()
        }
        rest = [_PARTS[name] for name in chosen if name != "failed-jobs"]
        cleaned = await utils.cleanup(rest, keep_task_identifiers=[*keep, *served])
    if as_json:
        print_object(
            {"jobs": removed, "task_identifiers": cleaned.task_identifiers, "queues": cleaned.queues}
        )
    else:
        click.echo(cleanup_summary(removed, cleaned.task_identifiers, cleaned.queues))
    return 0


async def _remove_failed(utils: WorkerUtils, *, yes: bool) -> int | None:
    """Remove failed jobs, and return their number, or None if the user declined."""
    from graphile_worker._client.bulk import Change, JobFilter  # noqa: PLC0415
    from graphile_worker.cli.bulk import Progress, Wording, confirm, run_batches  # noqa: PLC0415

    change, failed = Change.complete(), JobFilter(state="failed")
    total = await utils.many.count(failed, change)
    if total > 1 and not confirm(
        f"This would remove {pluralize(total, 'job')} that failed permanently.", yes=yes
    ):
        return None
    progress = Progress(total)
    words = Wording(do="remove", done="Removed")
    await run_batches(utils.many.change(change, failed), progress, words)
    progress.raise_if_stopped()
    return len(progress.changed)


@verb("migrate", "migrate", "migrate --check", "migrate --sql > for-the-dba.sql")
@click.option("--check", is_flag=True, help="Only print the pending steps; exit code 1 if there are any.")
@click.option("--sql", is_flag=True, help="Only print the SQL of the pending steps.")
@json_flag
def migrate(settings: Mapping[str, Value], *, check: bool, sql: bool, as_json: bool) -> int:
    """Install the schema, or migrate it to the latest version.

    The migration is one transaction. Only indexes on a schema in use are built before it, without locks that
    block workers. Workers migrate by themselves when they start. A schema from Graphile Worker is adopted.
    """
    if sum((check, sql, as_json)) > 1 and not (check and as_json):
        raise click.UsageError("--check, --sql and --json cannot be combined, except --check with --json.")
    return asyncio.run(_migrate(settings, check=check, sql=sql, as_json=as_json))


async def _migrate(settings: Mapping[str, Value], *, check: bool, sql: bool, as_json: bool) -> int:
    async with open_utils(settings, reads_jobs=False) as utils:
        pending = await utils.pending_migrations()
        if sql:
            click.echo(pending.script or "-- Nothing to do.", nl=not pending.script)
            return 0
        if not check:
            await utils.migrate()
        schema = utils.schema
    if as_json:
        print_object({"schema": schema, "up_to_date": not (check and pending.what), "steps": pending.what})
    elif check and pending.what:
        click.echo(
            "\n".join([f"Schema {schema} is not up to date. graphile-worker migrate would:", *pending.what])
        )
    elif pending.what:
        click.echo("\n".join(["Done:", *pending.what, f"Schema {schema} is up to date"]))
    else:
        click.echo(f"Schema {schema} is up to date")
    return 1 if check and pending.what else 0


_RECOVERED: list[Column[RecoveredWorker]] = [
    Column(title="WORKER", value=lambda row: row.worker.name),
    Column(title="SILENT FOR", value=lambda row: f"{row.silence:.0f} s", align_right=True),
    Column(
        title="JOBS", value=lambda row: ", ".join(str(job.id) for job in row.jobs), min_width=20, wraps=True
    ),
    Column(title="QUEUES", value=lambda row: ", ".join(row.queues), min_width=20, wraps=True),
]


@verb("sweep", "sweep --dry-run", "sweep --recovery-delay 1m")
@click.option("--dry-run", is_flag=True, help="Only show what would be released.")
@click.option("--recovery-delay", type=Period(), help="Delay before the jobs run again [0s].")
@click.option("--refund", is_flag=True, help="Do not count the interrupted attempts.")
@json_flag
def sweep(
    settings: Mapping[str, Value], *, dry_run: bool, recovery_delay: float | None, refund: bool, as_json: bool
) -> None:
    """Release the jobs and queues of dead Python workers.

    Running workers do this all the time. The command watches heartbeats to find dead workers: for 3 seconds
    if all workers are alive, otherwise for the lease of a silent one, 8 or 38 seconds by default. For Node
    and Rust workers, see unlock. There is no confirmation, because no worker runs these jobs any more.
    """
    delay = settings["recovery_delay"].value if recovery_delay is None else recovery_delay
    asyncio.run(_sweep(settings, delay, dry_run=dry_run, refund=refund, as_json=as_json))


async def _sweep(
    settings: Mapping[str, Value], delay: float, *, dry_run: bool, refund: bool, as_json: bool
) -> None:
    async with open_utils(settings) as utils:
        _print_watched(await utils.workers(include_locks=False))
        found = await utils.sweep(recovery_delay=delay, refund_attempt_on_recovery=refund, dry_run=dry_run)
    with row_printer(_RECOVERED, _as_object, as_json=as_json) as rows:
        rows.add(found)
    count = sum(len(recovered.jobs) for recovered in found)
    if not as_json:
        released = (
            f"{pluralize(count, 'job')} would be" if dry_run else pluralize(count, "job was", "jobs were")
        )
        print_note(f"{pluralize(len(found), 'worker is', 'workers are')} dead; {released} released.")


def _print_watched(workers: Sequence[WorkerInfo]) -> None:
    """Print which workers are watched, because the next output may take a while."""
    leases = {
        worker.name: worker.lease for worker in workers if worker.lease is not None and worker.died_at is None
    }
    if leases:
        longest = max(float(lease.get("seconds") or 0) for lease in leases.values())
        print_note(
            f"Watching the heartbeats of {pluralize(len(leases), 'worker')} "
            f"for up to {format_duration(longest)}: {join_truncated(list(leases))}"
        )


def _as_object(recovered: RecoveredWorker) -> dict[str, object]:
    return {
        "worker": recovered.worker.id,
        "silence": recovered.silence,
        "jobs": [job.id for job in recovered.jobs],
        "queues": list(recovered.queues),
    }
