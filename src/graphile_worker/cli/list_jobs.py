"""``graphile-worker list`` and ``show``: the jobs of a queue."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import click

from graphile_worker.cli import times
from graphile_worker.cli.flags import Integer, json_flag, queue_of, verb
from graphile_worker.cli.printing import (
    STATES,
    Column,
    as_json_text,
    console,
    on_terminal,
    print_fields,
    printed_rows,
    shortened,
    tell,
)
from graphile_worker.cli.selection import filter_flags, read_ids, taken_filter
from graphile_worker.payload import decode_payload

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphile_worker.cli.settings import Value
    from graphile_worker.job import Job
    from graphile_worker.many_jobs import JobFilter

_SCREEN = 50
_WIDE = 140
_PAGE = 1000
_FIELDS = (
    "id", "task_identifier", "queue_name", "state", "payload", "priority", "run_at", "attempts",
    "max_attempts", "last_error", "key", "locked_by", "locked_at", "flags", "revision", "created_at",
    "updated_at",
)  # fmt: skip


def job_as_object(job: Job) -> dict[str, object]:
    """A job for JSON."""
    return {**{name: getattr(job, name) for name in _FIELDS}, "flags": sorted(job.flags)}


def _line_of(error: str | None) -> str:
    """The line of an error that says most: of a traceback the last."""
    lines = [line for line in (error or "").splitlines() if line.strip()]
    if not lines:
        return ""
    return lines[-1] if lines[0].startswith("Traceback") else lines[0]


def _columns() -> list[Column[Job]]:
    due = times.both if not on_terminal() or console().width >= _WIDE else times.from_now
    return [
        Column(title="ID", value=lambda job: job.id, right=True),
        Column(title="STATE", value=lambda job: job.state, style=lambda job: STATES[job.state]),
        Column(title="TASK", value=lambda job: job.task_identifier, least=16),
        Column(title="QUEUE", value=lambda job: job.queue_name, least=8, spare=2),
        Column(title="DUE", value=lambda job: job.run_at, short=lambda job: due(job.run_at)),
        Column(title="TRIES", value=lambda job: f"{job.attempts}/{job.max_attempts}", right=True),
        Column(title="PRIORITY", value=lambda job: job.priority, right=True, spare=4),
        Column(
            title="KEY",
            value=lambda job: job.key,
            short=lambda job: shortened(job.key or "", 30),
            least=8,
            spare=3,
        ),
        Column(title="WORKER", value=lambda job: job.locked_by, least=10, spare=5),
        Column(
            title="PAYLOAD",
            value=lambda job: as_json_text(job.payload),
            short=lambda job: shortened(as_json_text(job.payload)),
            least=12,
            spare=1,
        ),
        Column(
            title="ERROR",
            value=lambda job: job.last_error,
            short=lambda job: shortened(_line_of(job.last_error)),
            least=12,
        ),
    ]


def _shown_columns(jobs: list[Job]) -> list[Column[Job]]:
    """On a terminal without those that are empty for all jobs."""
    if not on_terminal():
        return _columns()
    return [
        column
        for column in _columns()
        if column.title != "PRIORITY" or any(job.priority for job in jobs)
        if any((column.short or column.value)(job) not in {"", None} for job in jobs)
    ]


@verb("list", "list --task send_email --state failed", "list --json | jq '.[].payload'", "list --after 1042")
@filter_flags
@click.option("-n", "--limit", type=Integer(1), metavar="N", help="How many; on a terminal 50.")
@click.option("--after", type=Integer(0), metavar="ID", help="Only ids above this: the next page.")
@click.option("--ids", "only_ids", is_flag=True, help="Print nothing but ids, for other verbs to read.")
@json_flag
def list_jobs(
    settings: Mapping[str, Value],
    *,
    limit: int | None,
    after: int | None,
    only_ids: bool,
    as_json: bool,
    **arguments: Any,
) -> None:
    """List the jobs of the queue, in the order of their ids.

    All that is given must hold. Into a pipe go all jobs, a line each, with tabs between: id, state, task,
    queue, due, tries, priority, key, worker, payload, error.

    A failed job is due when it would have been tried again; when it failed is in the worker's log.
    """
    if only_ids and as_json:
        raise click.UsageError("--ids and --json cannot be combined.")
    if limit is None and on_terminal() and not as_json:
        limit = _SCREEN
    chosen = taken_filter(arguments)
    if only_ids:
        asyncio.run(_list_ids(settings, chosen, limit, after))
    else:
        asyncio.run(_list(settings, chosen, limit, after, as_json=as_json))


async def _list_ids(
    settings: Mapping[str, Value], chosen: JobFilter, limit: int | None, after: int | None
) -> None:
    count, size = 0, _PAGE if limit is None else min(limit + 1, _PAGE)
    async with queue_of(settings) as utils, aclosing(utils.many.ids(chosen, after=after, size=size)) as pages:
        async for page in pages:
            wanted = page if limit is None else page[: limit - count]
            if wanted:
                click.echo("\n".join(map(str, wanted)))
            count += len(wanted)
            if len(wanted) < len(page):
                _tell_of_more(wanted[-1] if wanted else page[0] - 1)
                break


def _tell_of_more(after: int | None) -> None:
    tell(f"There are more: go on with --after {after}, or take more with --limit.")


async def _list(
    settings: Mapping[str, Value],
    chosen: JobFilter,
    limit: int | None,
    after: int | None,
    *,
    as_json: bool,
) -> None:
    # With one job more than are wanted, to know whether there is one.
    size = _PAGE if limit is None else min(limit + 1, _PAGE)
    columns = _columns()
    async with queue_of(settings) as utils:
        with printed_rows(columns, job_as_object, as_json=as_json) as rows:
            async with aclosing(utils.many.pages(chosen, after=after, size=size)) as pages:
                async for page in pages:
                    wanted = page if limit is None else page[: limit - rows.count]
                    if not rows.count:
                        columns[:] = _shown_columns(page)
                    rows.add(wanted)
                    after = wanted[-1].id if wanted else after
                    if len(wanted) < len(page):
                        _tell_of_more(after)
                        break
    if not rows.count and not as_json and on_terminal():
        tell("There is no such job.")


@verb("show", "show 42", "show --key welcome:7 --json", "list --ids --state failed | graphile-worker show -")
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option("--key", metavar="KEY", help="The job with this key.")
@json_flag
def show(settings: Mapping[str, Value], *, ids: tuple[str, ...], key: str | None, as_json: bool) -> int:
    """Show all there is to know of jobs.

    The id - stands for ids from standard input. The exit code is 1 if one of them is not there.
    """
    if bool(ids) == (key is not None):
        raise click.UsageError("Name jobs by their ids, or one by --key.")
    return asyncio.run(_show(settings, read_ids(ids), key, as_json=as_json))


async def _show(settings: Mapping[str, Value], ids: list[int], key: str | None, *, as_json: bool) -> int:
    missing = []
    async with queue_of(settings) as utils:
        with printed_rows([], job_as_object, as_json=as_json) as rows:
            for name in [key] if key is not None else ids:
                job = await (utils.many.find(key=name) if isinstance(name, str) else utils.many.find(id=name))
                if job is None:
                    missing.append(name)
                elif as_json:
                    rows.add([job])
                else:
                    if rows.count:
                        click.echo()
                    rows.count += 1
                    _print_job(job)
    for name in missing:
        tell(
            f"There is no job with the key {name!r}." if isinstance(name, str) else f"There is no job {name}."
        )
    return 1 if missing else 0


def _print_job(job: Job) -> None:
    fields = job_as_object(job)
    stored = as_json_text(job.payload)
    try:
        payload = decode_payload(stored)
        fields["payload"] = json.dumps(payload, indent=2, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # a number beyond all floats, or one that Python cannot read
        fields["payload"] = stored
    fields["flags"] = ", ".join(sorted(job.flags))
    # What is short first, and what may take many lines last.
    last = ("payload", "last_error")
    print_fields({name: fields[name] for name in (*(n for n in fields if n not in last), *last)})
