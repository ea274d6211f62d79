"""``graphile-worker history`` and ``failures``: attempts that have ended, and jobs that failed."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
import msgspec

from graphile_worker._base.durations import format_duration
from graphile_worker._base.text import pluralize
from graphile_worker.cli import times
from graphile_worker.cli.bulk import confirm
from graphile_worker.cli.flags import CONTEXT, Integer, json_flag, make_epilog, open_utils, verb, yes_flag
from graphile_worker.cli.printing import (
    Column,
    on_terminal,
    print_fields,
    print_note,
    print_object,
    row_printer,
    to_json,
    truncate,
)
from graphile_worker.history import NOT_COMPLETE, AttemptOutcome

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime, timedelta

    from graphile_worker.cli.settings import Value
    from graphile_worker.history import HistorySummary, JobAttempt
    from graphile_worker.stats import FailureGroup

_TERMINAL_LIMIT = 50
_PAGE_SIZE = 1000
_MAX_GROUPS = 100
_STYLES = {
    "completed": "green",
    "failed": "red",
    "worker_died": "red",
    "cancelled": "yellow",
    "snoozed": "cyan",
}


def attempt_as_object(attempt: JobAttempt) -> dict[str, object]:
    """Return an attempt as an object for JSON."""
    return {**asdict(attempt), "result": attempt.result, "payload": attempt.payload, "wait": attempt.wait}


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value * 1000:.0f} ms" if value < 1 else format_duration(value)


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def attempt_columns(*, of_one_job: bool = False) -> list[Column[JobAttempt]]:
    """Return the columns of a list of attempts."""
    return [
        Column(
            title="ENDED",
            value=lambda attempt: attempt.ended_at,
            terminal_value=lambda attempt: times.format_relative(attempt.ended_at),
        ),
        *(
            []
            if of_one_job
            else [
                Column[Any](title="JOB", value=lambda attempt: attempt.job_id, align_right=True),
                Column[Any](title="TASK", value=lambda attempt: attempt.task_identifier, min_width=16),
            ]
        ),
        Column(title="ATTEMPT", value=lambda attempt: attempt.attempt, align_right=True),
        Column(
            title="OUTCOME",
            value=lambda attempt: attempt.outcome.value,
            terminal_value=_outcome_text,
            style=lambda attempt: _STYLES[attempt.outcome],
        ),
        Column(
            title="WAIT",
            value=lambda attempt: _rounded(attempt.wait),
            terminal_value=lambda attempt: _seconds(attempt.wait),
            align_right=True,
            drop_order=2,
        ),
        Column(
            title="TOOK",
            value=lambda attempt: _rounded(attempt.duration),
            terminal_value=lambda attempt: _seconds(attempt.duration),
            align_right=True,
        ),
        Column(title="KEY", value=lambda attempt: attempt.key, min_width=8, drop_order=3),
        Column(title="WORKER", value=lambda attempt: attempt.worker, min_width=10, drop_order=4),
        Column(title="TYPE", value=lambda attempt: attempt.error_type, min_width=12, drop_order=1),
        Column(
            title="ERROR",
            value=lambda attempt: attempt.error,
            terminal_value=lambda attempt: truncate((attempt.error or "").partition("\n")[0]),
            min_width=12,
        ),
    ]


def _outcome_text(attempt: JobAttempt) -> str:
    text = attempt.outcome.value.replace("_", " ")
    failed = attempt.outcome in {AttemptOutcome.FAILED, AttemptOutcome.WORKER_DIED}
    return f"{text}, no attempts left" if failed and attempt.is_final else text


@click.group(
    "history",
    context_settings=CONTEXT,
    epilog=make_epilog("graphile-worker history list --since 1h", "graphile-worker history show 42"),
)
def history() -> None:
    """Show attempts that have ended.

    The history has what Python workers were told to keep, with history = "failures" or "all". Jobs that Node
    or Rust workers ran are not in it.
    """


@verb(
    "list",
    "history list --since 1h",
    "history list --task send_email --outcome failed",
    "history list --json | jq '.[].error_type'",
)
@click.option("--task", metavar="NAME", help="Attempts of this task.")
@click.option(
    "--outcome",
    "outcomes",
    type=click.Choice([outcome.value for outcome in AttemptOutcome]),
    metavar="OUTCOME",
    multiple=True,
    help=f"Attempts with this outcome: {', '.join(AttemptOutcome)}.",
)
@click.option(
    "--since", type=times.Moment(), help="Attempts that ended since then, or in the last 5m, 2h, 1d."
)
@click.option("--job", "job_id", type=Integer(0), metavar="ID", help="Attempts of this job.")
@click.option("--key", metavar="KEY", help="Attempts of jobs with this key.")
@click.option(
    "--error", "error_type", metavar="TYPE", help="Attempts that failed with this type of exception."
)
@click.option(
    "-n", "--limit", type=Integer(1), metavar="N", help="Maximum number of attempts [all; 50 on a terminal]."
)
@json_flag
def list_attempts(
    settings: Mapping[str, Value],
    *,
    outcomes: tuple[str, ...],
    job_id: int | None,
    limit: int | None,
    as_json: bool,
    **filters: Any,
) -> None:
    """List attempts, the latest first.

    Filters are combined. Into a pipe the command prints one attempt per line, with tabs between the columns:
    ended, job, task, attempt, outcome, wait, took, key, worker, type, error. Times are in seconds.

    Attempts of Node and Rust workers are not listed.
    """
    if job_id is not None and (outcomes or any(value is not None for value in filters.values())):
        raise click.UsageError("--job cannot be combined with other filters.")
    if limit is None and on_terminal() and not as_json:
        limit = _TERMINAL_LIMIT
    asyncio.run(_list(settings, {**filters, "outcome": outcomes or None}, job_id, limit, as_json=as_json))


async def _list(
    settings: Mapping[str, Value],
    filters: dict[str, Any],
    job_id: int | None,
    limit: int | None,
    *,
    as_json: bool,
) -> None:
    async with open_utils(settings) as utils:
        with row_printer(attempt_columns(), attempt_as_object, as_json=as_json) as rows:
            if job_id is not None:
                rows.add(await utils.job_history(job_id, limit=min(limit or 100_000, 100_000)))
            last = None
            while job_id is None and (limit is None or rows.count < limit):
                size = _PAGE_SIZE if limit is None else min(limit - rows.count, _PAGE_SIZE)
                page = await utils.history(**filters, before=last, limit=size)
                rows.add(page)
                if len(page) < size:
                    break
                last = page[-1]
    if on_terminal() and not as_json:
        print_note(NOT_COMPLETE if rows.count else f"No attempts found. {NOT_COMPLETE}")


@verb("show", "history show 42", "history show 42 --json")
@click.argument("job_id", metavar="ID", type=Integer(0))
@json_flag
def show_attempts(settings: Mapping[str, Value], *, job_id: int, as_json: bool) -> int:
    """Show the attempts of a job in full, with tracebacks.

    The exit code is 1 if the history has none, for example because a Node worker ran the job.
    """

    async def read() -> list[JobAttempt]:
        async with open_utils(settings) as utils:
            return await utils.job_history(job_id)

    attempts = asyncio.run(read())
    if as_json:
        with row_printer([], attempt_as_object, as_json=True) as rows:
            rows.add(attempts)
    for number, attempt in enumerate(() if as_json else attempts):
        if number:
            click.echo()
        _print_attempt(attempt)
    if not attempts:
        print_note(f"The history has no attempt of job {job_id}. {NOT_COMPLETE}")
    return 0 if attempts else 1


def _print_attempt(attempt: JobAttempt) -> None:
    fields = attempt_as_object(attempt)
    fields |= {"duration": _seconds(attempt.duration), "wait": _seconds(attempt.wait)}
    has_result = fields.pop("has_result")
    fields["result"] = to_json(attempt.result) if has_result else None
    fields["payload"] = None if attempt.payload is None else to_json(attempt.payload)
    shown = {name: value for name, value in fields.items() if value not in {None, ""}}
    last = ("payload", "result", "error", "traceback")  # they may have many lines
    print_fields(
        {name: shown[name] for name in (*(n for n in shown if n not in last), *last) if name in shown}
    )


_SUMMARY: list[Column[HistorySummary]] = [
    Column(title="TASK", value=lambda row: row.task_identifier, min_width=16),
    *(
        Column(title=title, value=lambda row, name=name: getattr(row, name), align_right=True)  # type: ignore[misc]
        for title, name in (
            ("ATTEMPTS", "attempts"),
            ("COMPLETED", "completed"),
            ("FAILED", "failed"),
            ("FOR GOOD", "failed_permanently"),
            ("CANCELLED", "cancelled"),
            ("SNOOZED", "snoozed"),
            ("DIED", "workers_died"),
        )
    ),
    *(
        Column(
            title=title,
            value=lambda row, name=name: _rounded(getattr(row, name)),  # type: ignore[misc]
            terminal_value=lambda row, name=name: _seconds(getattr(row, name)),  # type: ignore[misc]
            align_right=True,
        )
        for title, name in (("MEDIAN", "median_duration"), ("P95", "p95_duration"), ("P95 WAIT", "p95_wait"))
    ),
]


@verb("stats", "history stats", "history stats --since 7d --json")
@click.option(
    "--since",
    type=times.Moment(),
    default="1d",
    help="Attempts that ended since then, or in the last 2h, 7d [1d].",
)
@json_flag
def summarize(settings: Mapping[str, Value], *, since: datetime | timedelta, as_json: bool) -> None:
    """Count attempts by task and outcome, with run times.

    With history = "failures", completed attempts are not counted, because they are not kept. Attempts of Node
    and Rust workers are never counted.
    """

    async def read() -> Sequence[HistorySummary]:
        async with open_utils(settings) as utils:
            return await utils.history_summary(since=since)

    found = asyncio.run(read())
    with row_printer(_SUMMARY, asdict, as_json=as_json) as rows:
        rows.add(found)
    if on_terminal() and not as_json:
        print_note(NOT_COMPLETE if found else f"No attempts found. {NOT_COMPLETE}")


@verb("prune", "history prune --older-than 7d")
@click.option(
    "--older-than",
    type=times.Delay(),
    required=True,
    help="Age of the attempts to remove, such as 12h or 7d.",
)
@yes_flag
@json_flag
def prune(settings: Mapping[str, Value], *, older_than: timedelta, yes: bool, as_json: bool) -> None:
    """Remove old attempts from the history.

    Attempts are removed by the day. Workers do so by themselves, after the time that history_keep sets.
    """
    age = format_duration(older_than.total_seconds())
    if not confirm(f"This removes attempts older than {age} from the history.", yes=yes):
        return

    async def remove() -> Any:
        async with open_utils(settings, reads_jobs=False) as utils:
            return await utils.prune_history(older_than)

    pruned = asyncio.run(remove())
    if as_json:
        print_object(asdict(pruned))
    else:
        click.echo(
            f"Removed {pluralize(pruned.days, 'day')} and {pluralize(pruned.attempts, 'further attempt')}."
        )


for _verb in (list_attempts, show_attempts, summarize, prune):
    history.add_command(_verb)

_GROUPS: list[Column[FailureGroup]] = [
    Column(title="JOBS", value=lambda group: group.jobs, align_right=True),
    Column(title="FOR GOOD", value=lambda group: group.permanent, align_right=True),
    Column(title="TASK", value=lambda group: group.task_identifier, min_width=16),
    Column(title="TYPE", value=lambda group: group.error_type, min_width=12),
    Column(
        title="LAST",
        value=lambda group: group.last_failed_at,
        terminal_value=lambda group: (
            "" if group.last_failed_at is None else times.format_relative(group.last_failed_at)
        ),
        drop_order=1,
    ),
    Column(title="EXAMPLE", value=lambda group: group.example_id, align_right=True),
    Column(title="ERROR", value=lambda group: group.fingerprint, min_width=16),
]


@verb("failures", "failures", "failures --task charge --json")
@click.option("--task", metavar="NAME", help="Jobs of this task.")
@click.option(
    "-n",
    "--limit",
    type=Integer(1),
    metavar="N",
    default=_MAX_GROUPS,
    help=f"Maximum number of groups [{_MAX_GROUPS}].",
)
@json_flag
def failures(settings: Mapping[str, Value], *, task: str | None, limit: int, as_json: bool) -> None:
    """Group failed jobs by task and error.

    These are jobs that are still there: they wait for a retry, or have no attempts left (FOR GOOD). # in an
    error stands for numbers, hexadecimal digits and UUIDs. EXAMPLE is the id of one of the jobs: show prints
    its traceback. TYPE and LAST are unknown for failures that Node or Rust workers recorded.
    """

    async def read() -> Sequence[FailureGroup]:
        async with open_utils(settings) as utils:
            return await utils.failures(task=task, limit=limit)

    found = asyncio.run(read())
    with row_printer(_GROUPS, msgspec.structs.asdict, as_json=as_json) as rows:
        rows.add(found)
    if not found and on_terminal() and not as_json:
        print_note("No failed jobs found.")
