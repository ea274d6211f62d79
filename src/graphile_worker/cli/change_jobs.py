"""``graphile-worker complete``, ``fail``, ``reschedule``, ``retry``, ``remove`` and ``cancel``."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click
import msgspec

from graphile_worker.cli.flags import PRIORITY, json_flag, small_integer, verb, yes_flag
from graphile_worker.cli.selection import selection_flags, taken_selection
from graphile_worker.cli.times import Moment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from graphile_worker.cli.settings import Value

_dry_run = click.option("--dry-run", is_flag=True, help="Only tell how many jobs it is about.")


def _bulk_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (json_flag, yes_flag, _dry_run):
        function = option(function)
    return selection_flags(function)


def _change(
    settings: Mapping[str, Value], arguments: dict[str, Any], name: str, values: dict[str, Any], **words: str
) -> int:
    """Do what `Change` has under that name."""
    from graphile_worker.cli.bulk import Words, change_jobs  # noqa: PLC0415
    from graphile_worker.many_jobs import Change  # noqa: PLC0415

    selection = taken_selection(arguments)
    chosen = selection.filter
    if chosen.state == "running" and name != "cancel":
        raise click.UsageError(
            "Jobs that run are left alone. Cancel them, or stop their worker; if it is gone, unlock it."
        )
    if name == "retry" and chosen.state is None and chosen.key is None:
        selection = selection._replace(filter=msgspec.structs.replace(chosen, state="failed"))
    change: Change = getattr(Change, name)(**values)
    if words["do"] == "remove" and selection.only_key is not None:
        change = Change.remove(selection.only_key)
    return asyncio.run(change_jobs(settings, selection, change, Words(**words), **arguments))


@verb("complete", "complete 42 43", "complete --task send_email --state failed")
@_bulk_flags
def complete(settings: Mapping[str, Value], **arguments: Any) -> int:
    """Delete jobs, as if they had succeeded.

    Jobs that run are left alone. The ids are told of those that are not there, or that run; then the exit
    code is 1.
    """
    return _change(settings, arguments, "complete", {}, do="complete", done="Completed")


@verb("fail", "fail 42 --reason 'no such customer'", "fail --task send_email --yes")
@click.option("-r", "--reason", metavar="TEXT", help="What last_error is to say.")
@_bulk_flags
def fail(settings: Mapping[str, Value], reason: str | None, **arguments: Any) -> int:
    """Let jobs fail for good: they are not tried again.

    They stay in the table as failed, until somebody completes, retries or removes them. Jobs that run are
    left alone.
    """
    if reason == "":
        raise click.UsageError("--reason is empty. Leave it out, or say why.")
    return _change(settings, arguments, "fail", {"reason": reason}, do="fail", done="Failed")


@verb("reschedule", "reschedule 42 --run-at 2h", "reschedule --queue mails --priority -10")
@click.option("--run-at", type=Moment(), help="now, 90s, 5m, 2h, 1d, or 2030-01-31T12:00Z.")
@click.option("--now", is_flag=True, help="The same as --run-at now.")
@click.option("--priority", type=PRIORITY, metavar="N", help="Lower runs first.")
@click.option("--attempts", type=small_integer(0), metavar="N", help="How often it was tried.")
@click.option("--max-attempts", type=small_integer(1), metavar="N", help="How often to try it.")
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
    """Change when jobs run, their priority, or their attempts.

    What is not given stays as it is, and jobs that run are left alone. A job that has failed for good stays
    failed, unless it gets more attempts: see retry.
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
            "Say what to change: --run-at, --now, --priority, --attempts or --max-attempts."
        )
    return _change(settings, arguments, "reschedule", values, do="reschedule", done="Rescheduled")


@verb("retry", "retry 42", "retry --task send_email", "retry --text 'Connection refused' --yes")
@_bulk_flags
def retry(settings: Mapping[str, Value], **arguments: Any) -> int:
    """Run failed jobs again: now, and with all their attempts.

    By a filter or --all it finds jobs that failed for good; with --state scheduled, or by id or key, also
    those that wait for their next attempt. Jobs that run are left alone, and so are those that were not tried
    yet.
    """
    return _change(
        settings,
        arguments,
        "retry",
        {},
        do="retry",
        done="Will retry",
        otherwise="has not been tried yet: reschedule --now lets it run now",
    )


@verb("remove", "remove 42", "remove --key welcome:7", "remove --state failed --yes")
@_bulk_flags
def remove(settings: Mapping[str, Value], **arguments: Any) -> int:
    """Remove jobs that are not wanted any more.

    Jobs that run are left alone; but by --key alone, a job that runs loses its key and is not tried again.
    """
    return _change(
        settings,
        arguments,
        "complete",
        {},
        do="remove",
        done="Removed",
        asked="{:,} runs: it has lost its key, and will not be tried again.",
    )


@verb("cancel", "cancel 42", "cancel --task export --state running --reason 'too many'")
@click.option("-r", "--reason", metavar="TEXT", default="", help="What last_error is to say.")
@_bulk_flags
def cancel(settings: Mapping[str, Value], reason: str, **arguments: Any) -> int:
    """Cancel jobs, also those that run.

    A job that waits will not run; it stays as failed. The worker of a job that runs is told, and cancels it
    if it is a worker of this library; it may end well all the same.
    """
    return _change(
        settings,
        arguments,
        "cancel",
        {"reason": reason},
        do="cancel",
        done="Cancelled",
        otherwise="has failed for good already",
        while_running="it could not be cancelled at this moment: try again",
        asked="Asked for {:,} that run; workers of Node or Rust do not hear it.",
    )
