"""``graphile-worker list`` and ``show``: printing jobs."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from graphile_worker._base.payload import decode_payload
from graphile_worker.cli import times
from graphile_worker.cli.flags import Integer, json_flag, open_utils, verb
from graphile_worker.cli.history import attempt_as_object, attempt_columns
from graphile_worker.cli.printing import (
    STATES,
    Column,
    console,
    describe_progress,
    on_terminal,
    print_fields,
    print_note,
    row_printer,
    to_json,
    truncate,
)
from graphile_worker.cli.selection import filter_flags, no_job_message, pop_filter, read_ids
from graphile_worker.history import NOT_COMPLETE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphile_worker._client.bulk import JobFilter
    from graphile_worker.cli.settings import Value
    from graphile_worker.history import JobAttempt
    from graphile_worker.job import Job, Progress

_TERMINAL_LIMIT = 50
_WIDE_TERMINAL = 140
_PAGE_SIZE = 1000
_NO_JOBS = "No jobs found."
_FIELDS = (
    "id", "task_identifier", "queue_name", "state", "payload", "priority", "run_at", "attempts",
    "max_attempts", "last_error", "error_type", "failed_at", "key", "locked_by", "locked_at", "flags",
    "revision", "created_at", "updated_at",
)  # fmt: skip


def job_as_object(job: Job) -> dict[str, object]:
    """Return a job as an object for JSON."""
    return {**{name: getattr(job, name) for name in _FIELDS}, "flags": sorted(job.flags)}


def _main_line(error: str | None) -> str:
    """Return the most informative line of an error: the last one of a traceback, else the first."""
    lines = [line for line in (error or "").splitlines() if line.strip()]
    if not lines:
        return ""
    return lines[-1] if lines[0].startswith("Traceback") else lines[0]


def _columns() -> list[Column[Job]]:
    due = (
        times.format_time if not on_terminal() or console().width >= _WIDE_TERMINAL else times.format_relative
    )
    return [
        Column(title="ID", value=lambda job: job.id, align_right=True),
        Column(title="STATE", value=lambda job: job.state, style=lambda job: STATES[job.state]),
        Column(title="TASK", value=lambda job: job.task_identifier, min_width=16),
        Column(title="QUEUE", value=lambda job: job.queue_name, min_width=8, drop_order=2),
        Column(title="DUE", value=lambda job: job.run_at, terminal_value=lambda job: due(job.run_at)),
        Column(title="TRIES", value=lambda job: f"{job.attempts}/{job.max_attempts}", align_right=True),
        Column(title="PRIORITY", value=lambda job: job.priority, align_right=True, drop_order=4),
        Column(
            title="KEY",
            value=lambda job: job.key,
            terminal_value=lambda job: truncate(job.key or "", 30),
            min_width=8,
            drop_order=3,
        ),
        Column(title="WORKER", value=lambda job: job.locked_by, min_width=10, drop_order=5),
        Column(
            title="PAYLOAD",
            value=lambda job: to_json(job.payload),
            terminal_value=lambda job: truncate(to_json(job.payload)),
            min_width=12,
            drop_order=1,
        ),
        Column(
            title="FAILED",
            value=lambda job: job.failed_at,
            terminal_value=lambda job: "" if job.failed_at is None else due(job.failed_at),
            drop_order=6,
        ),
        Column(
            title="ERROR",
            value=lambda job: job.last_error,
            terminal_value=lambda job: truncate(_main_line(job.last_error)),
            min_width=12,
        ),
    ]


def _shown_columns(jobs: list[Job]) -> list[Column[Job]]:
    """Return the columns; on a terminal, those that are empty for all jobs are left out."""
    if not on_terminal():
        return _columns()
    return [
        column
        for column in _columns()
        if column.title != "PRIORITY" or any(job.priority for job in jobs)
        if any((column.terminal_value or column.value)(job) not in {"", None} for job in jobs)
    ]


@verb("list", "list --task send_email --state failed", "list --json | jq '.[].payload'", "list --after 1042")
@filter_flags
@click.option(
    "-n", "--limit", type=Integer(1), metavar="N", help="Maximum number of jobs [all; 50 on a terminal]."
)
@click.option("--after", type=Integer(0), metavar="ID", help="Only jobs with a higher id: the next page.")
@click.option("--ids", "only_ids", is_flag=True, help="Print only ids, as input for other commands.")
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
    """List jobs, in the order of their ids.

    Filters are combined. Into a pipe the command prints all jobs, one per line, with tabs between the
    columns: id, state, task, queue, due, tries, priority, key, worker, payload, failed, error.

    DUE of a failed job is when it would have been retried. FAILED is when the failure was recorded, and is
    empty if that is unknown, as for failures that a Node worker recorded.
    """
    if only_ids and as_json:
        raise click.UsageError("--ids and --json cannot be combined.")
    if limit is None and on_terminal() and not as_json:
        limit = _TERMINAL_LIMIT
    job_filter = pop_filter(arguments)
    if only_ids:
        asyncio.run(_list_ids(settings, job_filter, limit, after))
    else:
        asyncio.run(_list(settings, job_filter, limit, after, as_json=as_json))


async def _list_ids(
    settings: Mapping[str, Value], job_filter: JobFilter, limit: int | None, after: int | None
) -> None:
    count, size = 0, _PAGE_SIZE if limit is None else min(limit + 1, _PAGE_SIZE)
    async with (
        open_utils(settings) as utils,
        aclosing(utils.many.ids(job_filter, after=after, size=size)) as pages,
    ):
        async for page in pages:
            wanted = page if limit is None else page[: limit - count]
            if wanted:
                click.echo("\n".join(map(str, wanted)))
            count += len(wanted)
            if len(wanted) < len(page):
                _print_more_note(wanted[-1] if wanted else page[0] - 1)
                break
    if not count and on_terminal():
        print_note(_NO_JOBS)


def _print_more_note(after: int | None) -> None:
    print_note(f"There are more: continue with --after {after}, or raise --limit.")


async def _list(
    settings: Mapping[str, Value],
    job_filter: JobFilter,
    limit: int | None,
    after: int | None,
    *,
    as_json: bool,
) -> None:
    # Read one job more than the limit, to know whether there are more.
    size = _PAGE_SIZE if limit is None else min(limit + 1, _PAGE_SIZE)
    columns = _columns()
    async with open_utils(settings) as utils:
        with row_printer(columns, job_as_object, as_json=as_json) as rows:
            async with aclosing(utils.many.pages(job_filter, after=after, size=size)) as pages:
                async for page in pages:
                    wanted = page if limit is None else page[: limit - rows.count]
                    if not rows.count:
                        columns[:] = _shown_columns(page)
                    rows.add(wanted)
                    after = wanted[-1].id if wanted else after
                    if len(wanted) < len(page):
                        _print_more_note(after)
                        break
    if not rows.count and not as_json and on_terminal():
        print_note(_NO_JOBS)


@verb("show", "show 42", "show --key welcome:7 --json", "list --ids --state failed | graphile-worker show -")
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option("--key", metavar="KEY", help="The job with this key.")
@json_flag
def show(settings: Mapping[str, Value], *, ids: tuple[str, ...], key: str | None, as_json: bool) -> int:
    """Show jobs in full.

    If the history has attempts of a job, they are listed too, even if the job is not there any more.

    The id - reads ids from standard input. The exit code is 1 if a job does not exist.
    """
    if bool(ids) == (key is not None):
        raise click.UsageError("Give either job ids or --key.")
    return asyncio.run(_show(settings, read_ids(ids), key, as_json=as_json))


async def _show(settings: Mapping[str, Value], ids: list[int], key: str | None, *, as_json: bool) -> int:
    missing = []
    async with open_utils(settings) as utils:
        has_history = await utils.has_history()
        with row_printer([], _as_shown, as_json=as_json) as rows:
            for name in [key] if key is not None else ids:
                job = await (utils.many.find(key=name) if isinstance(name, str) else utils.many.find(id=name))
                job_id = name if isinstance(name, int) else None if job is None else job.id
                attempts = await utils.job_history(job_id) if has_history and job_id is not None else []
                if job is None and not attempts:
                    missing.append(name)
                    continue
                progress = None if job is None else (await utils.many.progress([job.id])).get(job.id)
                shown = _Shown(job, progress, attempts)
                if as_json:
                    rows.add([shown])
                else:
                    if rows.count:
                        click.echo()
                    rows.count += 1
                    _print_job(shown)
    for name in missing:
        print_note(no_job_message(name))
    return 1 if missing else 0


class _Shown(NamedTuple):
    """A job, and what the history has about it. The job is None if only the history has it."""

    job: Job | None
    progress: Progress | None
    attempts: list[JobAttempt]


def _as_shown(shown: _Shown) -> dict[str, object]:
    attempts = [attempt_as_object(attempt) for attempt in shown.attempts]
    if shown.job is None:
        last = shown.attempts[-1]
        return {
            "id": last.job_id,
            "task_identifier": last.task_identifier,
            "state": None,
            "history": attempts,
        }
    progress = None if shown.progress is None else msgspec.structs.asdict(shown.progress)
    more = {"traceback": shown.job.traceback, "progress": progress, "history": attempts}
    return {**job_as_object(shown.job), **more}


def _print_job(shown: _Shown) -> None:
    if shown.job is not None:
        _print_stored_job(shown.job, shown.progress)
    else:
        last = shown.attempts[-1]
        print_fields({"id": last.job_id, "task_identifier": last.task_identifier, "state": "ended"})
    if shown.attempts:
        click.echo(f"\nHistory ({NOT_COMPLETE[0].lower()}{NOT_COMPLETE[1:].removesuffix('.')}):")
        with row_printer(attempt_columns(of_one_job=True), attempt_as_object, as_json=False) as rows:
            rows.add(shown.attempts)


def _print_stored_job(job: Job, progress: Progress | None) -> None:
    described = "" if progress is None else describe_progress(progress)
    fields = {**job_as_object(job), "traceback": job.traceback, "progress": described}
    stored = to_json(job.payload)
    try:
        payload = decode_payload(stored)
        fields["payload"] = json.dumps(payload, indent=2, ensure_ascii=False, allow_nan=False)
    except (
        ValueError,
        RecursionError,
    ):  # a number too large for a float, or a JSON document that Python cannot parse
        fields["payload"] = stored
    fields["flags"] = ", ".join(sorted(job.flags))
    # Short fields come first; those that may have many lines come last.
    last = ("payload", "last_error", *(["traceback"] if job.traceback else []))
    fields = {name: value for name, value in fields.items() if name != "traceback" or job.traceback}
    print_fields({name: fields[name] for name in (*(n for n in fields if n not in last), *last)})
