"""``graphile-worker unlock``, ``cleanup``, ``migrate`` and ``sweep``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from graphile_worker.cli.flags import json_flag, queue_of, verb, yes_flag
from graphile_worker.cli.printing import Column, clean, cleaned_up, print_object, printed_rows, tell
from graphile_worker.cli.selection import words_of_stdin
from graphile_worker.cli.times import Period
from graphile_worker.durations import lasting
from graphile_worker.wording import counted, some

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphile_worker.cli.settings import Value
    from graphile_worker.client import WorkerUtils
    from graphile_worker.liveness import Recovered, WorkerInfo

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
@click.option("--force", is_flag=True, help="Also workers that live: what they run may run twice.")
@yes_flag
@json_flag
def unlock(
    settings: Mapping[str, Value], *, workers: tuple[str, ...], force: bool, yes: bool, as_json: bool
) -> int:
    """Free all jobs and queues that workers hold, by their ids.

    For workers that are gone for good: what a live one holds would run twice. One of Rust's counts as live
    until it has been silent for five minutes; if you know that it is gone, say --force. Dead workers of this
    library need it not, for others see that they are dead: see sweep. The id - stands for ids from standard
    input.
    """
    names: dict[str, None] = {}
    for word in workers:
        names |= dict.fromkeys(words_of_stdin() if word == "-" else [word])
    return asyncio.run(_unlock(settings, list(names), force=force, yes=yes, as_json=as_json))


async def _unlock(
    settings: Mapping[str, Value], names: list[str], *, force: bool, yes: bool, as_json: bool
) -> int:
    from graphile_worker.cli.bulk import confirmed  # noqa: PLC0415

    async with queue_of(settings) as utils:
        known = {worker.id: worker for worker in await utils.workers()}
        found = [known[name] for name in names if name in known]
        if not force:
            _refuse_living(found)
        held, queues = sum(one.jobs for one in found), sum(one.queues for one in found)
        question = f"This would free {counted(held, 'job')} and {counted(queues, 'queue')}."
        if held > 1 and not confirmed(question, yes=yes):
            return 1
        await utils.force_unlock_workers([one.id for one in found])
    missing = [name for name in names if name not in known]
    if as_json:
        print_object(
            {"workers": [one.id for one in found], "jobs": held, "queues": queues, "missing": missing}
        )
    elif found:
        click.echo(f"Freed {counted(held, 'job')} and {counted(queues, 'queue')}.")
    for name in missing:
        tell(f"No worker {clean(name)!r} is known, and none of that name holds anything.")
    return 1 if missing else 0


def _refuse_living(workers: Sequence[WorkerInfo]) -> None:
    for worker in workers:
        if worker.lives:
            raise click.ClickException(
                f"{worker.name} lives: it was heard from {worker.silence or 0:.0f} s ago. What it runs would "
                "run twice. Stop it first; if it is stopped, say --force."
            )


@verb("cleanup", "cleanup", "cleanup failed-jobs queues", "cleanup task-identifiers --keep send_email")
@click.argument("parts", metavar="[WHAT]...", nargs=-1)
@click.option("--keep", metavar="TASK", multiple=True, help="A name of a task to keep; may be given again.")
@yes_flag
@json_flag
def cleanup(
    settings: Mapping[str, Value], *, parts: tuple[str, ...], keep: tuple[str, ...], yes: bool, as_json: bool
) -> int:
    """Remove what nobody needs any more.

    \b
    queues            serial queues without a job; this is the default
    failed-jobs       jobs that have failed for good
    task-identifiers  names of tasks without a job

    Graphile Worker's own names do too: GC_JOB_QUEUES and so on. Names of tasks that live workers of this
    library serve are kept. Node's and Rust's workers do not tell theirs: keep those, or stop those workers
    first.
    """  # noqa: D301 - click is told not to wrap those lines
    chosen = [_part(word) for given in parts for word in given.split(",")] or ["queues"]
    return asyncio.run(_cleanup(settings, chosen, keep, yes=yes, as_json=as_json))


def _part(word: str) -> str:
    plain = word.strip().lower().replace("_", "-")
    for name, task in _PARTS.items():
        if plain in {name, task.lower().replace("_", "-")}:
            return name
    raise click.UsageError(f"There is no cleanup {word!r}. There are: {', '.join(_PARTS)}.")


async def _cleanup(
    settings: Mapping[str, Value], chosen: list[str], keep: Sequence[str], *, yes: bool, as_json: bool
) -> int:
    async with queue_of(settings) as utils:
        removed = await _remove_failed(utils, yes=yes) if "failed-jobs" in chosen else 0
        if removed is None:
            return 1
        served = {
            task
            for one in await utils.workers(and_locks=False)
            if one.is_ours and one.lives
            for task in one.tasks or ()
        }
        rest = [_PARTS[name] for name in chosen if name != "failed-jobs"]
        cleaned = await utils.cleanup(rest, keep_task_identifiers=[*keep, *served])
    if as_json:
        print_object(
            {"jobs": removed, "task_identifiers": cleaned.task_identifiers, "queues": cleaned.queues}
        )
    else:
        click.echo(cleaned_up(removed, cleaned.task_identifiers, cleaned.queues))
    return 0


async def _remove_failed(utils: WorkerUtils, *, yes: bool) -> int | None:
    """How many jobs were removed; None if they are not to be."""
    from graphile_worker.cli.bulk import Progress, Words, confirmed, work_through  # noqa: PLC0415
    from graphile_worker.many_jobs import Change, JobFilter  # noqa: PLC0415

    change, failed = Change.complete(), JobFilter(state="failed")
    total = await utils.many.count(failed, change)
    if total > 1 and not confirmed(
        f"This would remove {counted(total, 'job')} that failed for good.", yes=yes
    ):
        return None
    progress = Progress(total)
    words = Words(do="remove", done="Removed")
    await work_through(utils.many.change(change, failed), progress, words)
    progress.insist_on_the_end()
    return len(progress.changed)


@verb("migrate", "migrate", "migrate --check", "migrate --sql > for-the-dba.sql")
@click.option("--check", is_flag=True, help="Only tell what is to be done; exit code 1 if something is.")
@click.option("--sql", is_flag=True, help="Only print the SQL that does it, for somebody else to run.")
@json_flag
def migrate(settings: Mapping[str, Value], *, check: bool, sql: bool, as_json: bool) -> int:
    """Install the schema, or bring it up to date.

    It happens in one transaction; only indexes on a schema in use are built before, so that nobody has to
    wait. Workers do it themselves when they start. A schema that Graphile Worker has made is adopted.
    """
    if sum((check, sql, as_json)) > 1 and not (check and as_json):
        raise click.UsageError("--check, --sql and --json cannot be combined, but for --check --json.")
    return asyncio.run(_migrate(settings, check=check, sql=sql, as_json=as_json))


async def _migrate(settings: Mapping[str, Value], *, check: bool, sql: bool, as_json: bool) -> int:
    async with queue_of(settings, reads=False) as utils:
        pending = await utils.pending_migrations()
        if sql:
            click.echo(pending.script or "-- There is nothing to do.", nl=not pending.script)
            return 0
        if not check:
            await utils.migrate()
        schema = utils.schema
    if as_json:
        print_object({"schema": schema, "up_to_date": not (check and pending.what), "steps": pending.what})
    elif check and pending.what:
        click.echo(
            "\n".join([f"To be done to the schema {schema}, by graphile-worker migrate:", *pending.what])
        )
    elif pending.what:
        click.echo("\n".join(["Done:", *pending.what, f"Schema {schema} is up to date"]))
    else:
        click.echo(f"Schema {schema} is up to date")
    return 1 if check and pending.what else 0


_RECOVERED: list[Column[Recovered]] = [
    Column(title="WORKER", value=lambda one: one.worker.name),
    Column(title="SILENT FOR", value=lambda one: f"{one.silence:.0f} s", right=True),
    Column(title="JOBS", value=lambda one: ", ".join(str(job.id) for job in one.jobs), least=20, folds=True),
    Column(title="QUEUES", value=lambda one: ", ".join(one.queues), least=20, folds=True),
]


@verb("sweep", "sweep --dry-run", "sweep --recovery-delay 1m")
@click.option("--dry-run", is_flag=True, help="Free nothing, and show what would be.")
@click.option("--recovery-delay", type=Period(), help="When the jobs run again: 0s.")
@click.option("--refund", is_flag=True, help="Give the jobs the attempt back that their worker's death cost.")
@json_flag
def sweep(
    settings: Mapping[str, Value], *, dry_run: bool, recovery_delay: float | None, refund: bool, as_json: bool
) -> None:
    """Free what dead workers hold.

    Running workers do so all the time. Whether one is dead is seen by watching it: for 3 seconds if all
    live, else as long as its lease says, 8 or 38 seconds by default. For workers of Node and Rust see unlock.
    It does not ask, however many jobs it frees, because nobody runs them.
    """
    delay = settings["recovery_delay"].value if recovery_delay is None else recovery_delay
    asyncio.run(_sweep(settings, delay, dry_run=dry_run, refund=refund, as_json=as_json))


async def _sweep(
    settings: Mapping[str, Value], delay: float, *, dry_run: bool, refund: bool, as_json: bool
) -> None:
    async with queue_of(settings) as utils:
        _tell_who_is_watched(await utils.workers(and_locks=False))
        found = await utils.sweep(recovery_delay=delay, refund_attempt_on_recovery=refund, dry_run=dry_run)
    with printed_rows(_RECOVERED, _as_object, as_json=as_json) as rows:
        rows.add(found)
    count = sum(len(one.jobs) for one in found)
    if not as_json:
        freed = f"{counted(count, 'job')} would be" if dry_run else counted(count, "job was", "jobs were")
        tell(f"{counted(len(found), 'worker is', 'workers are')} dead; {freed} freed.")


def _tell_who_is_watched(workers: Sequence[WorkerInfo]) -> None:
    """Because nothing else is to be seen for a while."""
    leases = {one.name: one.lease for one in workers if one.lease is not None and one.died_at is None}
    if leases:
        longest = max(float(lease.get("seconds") or 0) for lease in leases.values())
        who = f"{counted(len(leases), 'worker')}: {some(list(leases))}"
        tell(f"Watching, until each was heard from or for {lasting(longest)}, {who}")


def _as_object(one: Recovered) -> dict[str, object]:
    return {
        "worker": one.worker.id,
        "silence": one.silence,
        "jobs": [job.id for job in one.jobs],
        "queues": list(one.queues),
    }
