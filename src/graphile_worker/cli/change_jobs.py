"""``graphile-worker complete``, ``fail``, ``reschedule``, ``retry``, ``remove`` and ``cancel``."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click
import msgspec

from graphile_worker.cli.flags import PRIORITY, json_flag, small_integer, verb, yes_flag
from graphile_worker.cli.selection import pop_selection, selection_flags
from graphile_worker.cli.times import Moment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from graphile_worker.cli.settings import Value

_dry_run = click.option("--dry-run", is_flag=True, help="Only count the jobs, and change nothing.")


def _bulk_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (json_flag, yes_flag, _dry_run):
        function = option(function)
    return selection_flags(function)


def _run_change(
    settings: Mapping[str, Value],
    arguments: dict[str, Any],
    name: str,
    values: dict[str, Any],
    *,
    frees_key: bool = False,
    **wording: str,
) -> int:
    """Change the selected jobs by the method of `Change` with this name.

    Args:
        settings: Settings of the command.
        arguments: Arguments of the verb: the selection, and the flags of all changes.
        name: Name of a method of `Change`.
        values: Arguments of this method.
        frees_key: Whether, with a key as the only filter, a running job loses its key.
        wording: Fields of `Wording`.
    """
    from graphile_worker._client.bulk import Change  # noqa: PLC0415
    from graphile_worker.cli.bulk import Wording, change_jobs  # noqa: PLC0415

    selection = pop_selection(arguments)
    job_filter = selection.filter
    if job_filter.state == "running" and name != "cancel":
        raise click.UsageError(
            "Running jobs cannot be changed. Cancel them, or stop their worker; if it is gone, unlock it."
        )
    if name == "retry" and job_filter.state is None and job_filter.key is None:
        selection = selection._replace(filter=msgspec.structs.replace(job_filter, state="failed"))
    change: Change = getattr(Change, name)(**values)
    if frees_key and selection.only_key is not None:
        change = Change.remove(selection.only_key)
    return asyncio.run(change_jobs(settings, selection, change, Wording(**wording), **arguments))


@verb("complete", "complete 42 43", "complete --task send_email --state failed")
@_bulk_flags
def complete(settings: Mapping[str, Value], **arguments: Any) -> int:
    """Delete jobs, as if they had succeeded.

    Running jobs are not changed. The command prints the ids of jobs that are running or do not exist; the
    exit code is then 1.
    """
    return _run_change(settings, arguments, "complete", {}, do="complete", done="Completed")


@verb("fail", "fail 42 --reason 'no such customer'", "fail --task send_email --yes")
@click.option("-r", "--reason", metavar="TEXT", help="Reason to store in last_error.")
@_bulk_flags
def fail(settings: Mapping[str, Value], reason: str | None, **arguments: Any) -> int:
    """Fail jobs permanently, without further attempts.

    They stay in the table as failed until they are completed, retried or removed. Running jobs are not
    changed.
    """
    if reason == "":
        raise click.UsageError("--reason is empty: give a reason, or leave it out.")
    return _run_change(settings, arguments, "fail", {"reason": reason}, do="fail", done="Failed")


@verb("reschedule", "reschedule 42 --run-at 2h", "reschedule --queue mails --priority -10")
@click.option("--run-at", type=Moment(), help="Time: now, 90s, 5m, 2h, 1d or 2030-01-31T12:00Z.")
@click.option("--now", is_flag=True, help="Same as --run-at now.")
@click.option("--priority", type=PRIORITY, metavar="N", help="Priority: lower numbers run first.")
@click.option("--attempts", type=small_integer(0), metavar="N", help="Number of attempts made so far.")
@click.option("--max-attempts", type=small_integer(1), metavar="N", help="Maximum number of attempts.")
@_bulk_flags
def reschedule(
    settings: Mapping[str, Value],
    *,
    run_at: Any,
    now: bool,
    priority: int | None,
    attempts: int | None,
    max_attempts: int | None,
    **arguments: Any,
) -> int:
    """Change the time, priority or attempts of jobs.

    Other values stay as they are, and running jobs are not changed. A permanently failed job stays failed
    unless it gets more attempts: see retry.
    """
    if now and run_at is not None:
        raise click.UsageError("--now and --run-at cannot be combined.")
    values = {
        "run_at": timedelta(0) if now else run_at,
        "priority": priority,
        "attempts": attempts,
        "max_attempts": max_attempts,
    }
    if all(value is None for value in values.values()):
        raise click.UsageError(
            "Nothing to change. Give --run-at, --now, --priority, --attempts or --max-attempts."
        )
    return _run_change(settings, arguments, "reschedule", values, do="reschedule", done="Rescheduled")


@verb("retry", "retry 42", "retry --task send_email", "retry --search 'Connection refused' --yes")
@_bulk_flags
def retry(settings: Mapping[str, Value], **arguments: Any) -> int:
    """Run failed jobs again, now and with all their attempts.

    A filter or --all selects jobs that failed permanently. With --state scheduled, an id or a key, the
    command also retries jobs that wait for their next attempt. Running jobs, and jobs without an attempt so
    far, are not changed.
    """
    return _run_change(
        settings,
        arguments,
        "retry",
        {},
        do="retry",
        done="Will retry",
        if_unchanged="has not been attempted yet; to run it now, use reschedule --now",
    )


@verb("remove", "remove 42", "remove --key welcome:7", "remove --state failed --yes")
@_bulk_flags
def remove(settings: Mapping[str, Value], **arguments: Any) -> int:
    """Remove jobs from the queue.

    Running jobs are not changed. If --key is the only filter, a running job loses its key and is not retried.
    """
    return _run_change(
        settings,
        arguments,
        "complete",
        {},
        do="remove",
        frees_key=True,
        done="Removed",
        if_requested="{:,} is running: it has lost its key, and will not be retried.",
    )


@verb("cancel", "cancel 42", "cancel --task export --state running --reason 'too many'")
@click.option("-r", "--reason", metavar="TEXT", default="", help="Reason to store in last_error.")
@_bulk_flags
def cancel(settings: Mapping[str, Value], reason: str, **arguments: Any) -> int:
    """Cancel jobs, even running ones.

    A waiting job will not run; it stays in the table as failed. For a running job the command notifies the
    worker: Python workers cancel the job, others ignore the request. The job may still succeed before that.
    """
    return _run_change(
        settings,
        arguments,
        "cancel",
        {"reason": reason},
        do="cancel",
        done="Cancelled",
        if_unchanged="has already failed permanently",
        if_running="it could not be cancelled at the moment; try again",
        if_requested="Requested it for {:,} running; Node and Rust workers ignore the request.",
    )
