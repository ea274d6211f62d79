"""Changes of any number of jobs: confirmation, batches with progress, interruption, and the report."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from graphile_worker._base.text import pluralize
from graphile_worker._client.bulk import JobFilter
from graphile_worker.cli.flags import open_utils
from graphile_worker.cli.printing import console, print_note, print_object
from graphile_worker.cli.selection import no_job_message
from graphile_worker.errors import GraphileWorkerError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence

    from graphile_worker._client.bulk import BatchResult, Change
    from graphile_worker._db.queries.bulk_update import UnchangedJob
    from graphile_worker.cli.selection import Selection
    from graphile_worker.cli.settings import Value
    from graphile_worker.client import WorkerUtils

_MAX_LISTED = 10


@dataclass(frozen=True, kw_only=True)
class Wording:
    """The words for a change in output."""

    do: str
    done: str
    if_unchanged: str = "could not be changed at the moment; try again"
    """For a job that exists and is not running, but was not changed."""
    if_running: str = "it was not changed"
    if_requested: str = ""
    """For running jobs, which change later."""


@dataclass
class Progress:
    """Progress of a change."""

    total: int
    changed: list[int] = field(default_factory=list)
    requested: int = 0
    locked_elsewhere: int = 0
    stopped_by: Exception | None = None
    """The error that stopped the change; `click.Abort` for Ctrl-C."""

    def add(self, batch: BatchResult) -> None:
        """Count a batch."""
        self.changed += batch.changed
        self.requested += batch.requested
        self.locked_elsewhere += batch.locked_elsewhere

    def raise_if_stopped(self) -> None:
        """If the change was stopped, print how far it came, and raise what stopped it."""
        if self.stopped_by is None:
            return
        changed = f"{pluralize(len(self.changed), 'job')} of {self.total:,} changed"
        if isinstance(self.stopped_by, click.Abort):
            print_note(f"Interrupted: {changed}, the others were not. Run the command again to continue.")
        else:
            print_note(f"Stopped by an error: {changed}. The current batch may or may not have been changed.")
        raise self.stopped_by


class UnchangedJobs(NamedTuple):
    """The selected jobs that were not changed."""

    missing: Sequence[int | str] = ()
    running: Sequence[UnchangedJob] = ()
    other: Sequence[UnchangedJob] = ()


def confirm(question: str, *, yes: bool) -> bool:
    """Ask whether to go on.

    Raises:
        click.ClickException: There is no terminal to ask on, and `yes` is not set.
    """
    if yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.ClickException(f"{question} There is no terminal to confirm on: use --yes to proceed.")
    # While the prompt waits, the event loop does not run, so it cannot handle Ctrl-C. Python would not handle
    # one that arrives just before the read until there is an answer. Nothing is under way, so end at once.
    previous = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        if click.confirm(f"{question} Continue?", err=True):
            return True
    finally:
        signal.signal(signal.SIGINT, previous)
    print_note("Nothing was changed.")
    return False


async def change_jobs(
    settings: Mapping[str, Value],
    selection: Selection,
    change: Change,
    wording: Wording,
    *,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Change the selected jobs, print the outcome, and return the exit code."""
    async with open_utils(settings) as utils:
        named, missing = await _find_named(utils, selection)
        target: JobFilter | list[int] = selection.filter
        if selection.ids is not None:
            target = await utils.many.find_changeable(selection.ids, change)
        total = len(target) if isinstance(target, list) else await utils.many.count(target, change)
        progress = Progress(total)
        if not dry_run:
            if total > 1 and not confirm(f"This would {wording.do} {pluralize(total, 'job')}.", yes=yes):
                return 1
            await run_batches(utils.many.change(change, target), progress, wording)
        unchanged = UnchangedJobs()
        if progress.stopped_by is None:
            done = await utils.many.find_changeable(named, change) if dry_run else progress.changed
            unchanged = await _read_unchanged(utils, set(named) - set(done), missing)
        _print_outcome(progress, wording, unchanged, dry_run=dry_run, as_json=as_json)
        progress.raise_if_stopped()
        if isinstance(target, JobFilter) and not dry_run and not any(unchanged):
            await _print_missed(utils, target, change, progress)
    return 1 if any(unchanged) else 0


async def _find_named(utils: WorkerUtils, selection: Selection) -> tuple[list[int], list[str]]:
    """Return the ids of the jobs that were named, and a key that no job has; both are empty for a filter."""
    if selection.only_key is None:
        return selection.ids or [], []
    job = await utils.get_job(key=selection.only_key)
    return ([], [selection.only_key]) if job is None else ([job.id], [])


async def run_batches(batches: AsyncGenerator[BatchResult], progress: Progress, wording: Wording) -> None:
    """Run all batches, with a progress bar, until Ctrl-C or an error."""
    async with aclosing(batches):
        with _interruptible() as is_interrupted, _progress_bar(progress.total, wording) as advance:
            try:
                async for batch in batches:
                    progress.add(batch)
                    advance(batch.seen)
                    if is_interrupted():
                        progress.stopped_by = click.Abort()
                        break
            except asyncio.CancelledError:
                if not is_interrupted():
                    raise
                progress.stopped_by = click.Abort()
            except GraphileWorkerError as error:
                progress.stopped_by = error


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C wait for the current batch, whose outcome is then known; the second does not."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    interrupts = 0

    def on_interrupt() -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts > 1 and task is not None:
            task.cancel()
        else:
            print_note("Stopping after the current batch. Ctrl-C again rolls it back.")

    loop.add_signal_handler(signal.SIGINT, on_interrupt)
    try:
        yield lambda: interrupts > 0
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@contextmanager
def _progress_bar(total: int, wording: Wording) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty() or total <= _MAX_LISTED:
        yield lambda _: None
        return
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=console(errors=True), transient=True) as bar:
        task = bar.add_task(f"{wording.do.capitalize()} jobs", total=total)
        yield lambda count: bar.advance(task, count)


async def _read_unchanged(utils: WorkerUtils, ids: Iterable[int], missing: Sequence[str]) -> UnchangedJobs:
    """Return the states of jobs that were not changed."""
    ids = sorted(ids)
    found = await utils.many.read_unchanged(ids)
    existing = {job.id for job in found}
    return UnchangedJobs(
        missing=[*missing, *(job_id for job_id in ids if job_id not in existing)],
        running=[job for job in found if job.state == "running"],
        other=[job for job in found if job.state != "running"],
    )


def _print_outcome(
    progress: Progress, wording: Wording, unchanged: UnchangedJobs, *, dry_run: bool, as_json: bool
) -> None:
    if as_json:
        print_object(
            {
                "dry_run": dry_run,
                "jobs": progress.total,
                "changed": len(progress.changed) - progress.requested,
                "requested": progress.requested,
                "ids": progress.changed,
                "missing": unchanged.missing,
                "running": [job._asdict() for job in unchanged.running],
                "unchanged": [job._asdict() for job in unchanged.other],
            }
        )
    elif dry_run:
        click.echo(f"This would {wording.do} {pluralize(progress.total, 'job')}.")
    elif progress.changed or not any(unchanged):
        click.echo(_summary(progress, wording))
    _print_each(unchanged.missing, no_job_message)
    _print_each(
        unchanged.running,
        lambda job: f"Job {job.id} is being run by {job.locked_by or 'a worker'}: {wording.if_running}.",
    )
    _print_each(unchanged.other, lambda job: f"Job {job.id} is {job.state}: it {wording.if_unchanged}.")


def _summary(progress: Progress, wording: Wording) -> str:
    """Return sentences about what was done."""
    done, running = len(progress.changed) - progress.requested, progress.requested - progress.locked_elsewhere
    ids = ""
    if 0 < done <= _MAX_LISTED and not progress.requested:
        ids = f": {', '.join(map(str, progress.changed))}"
    sentences = [f"{wording.done} {pluralize(done, 'job')}{ids}."]
    if running:
        sentences.append(wording.if_requested.format(running))
    if progress.locked_elsewhere:
        sentences.append(
            f"Requested it for {pluralize(progress.locked_elsewhere, 'job')} that another transaction has "
            "locked: a Python worker completes the request when that transaction ends."
        )
    return " ".join(sentences)


async def _print_missed(utils: WorkerUtils, target: JobFilter, change: Change, progress: Progress) -> None:
    """Print how many jobs were counted, but then not changed."""
    missed = progress.total - len(progress.changed)
    if missed <= 0:
        return
    remaining = min(missed, await utils.many.count(target, change))
    if remaining:
        print_note(
            f"{pluralize(remaining, 'job')} of {progress.total:,} not changed: locked at the moment, or "
            "running meanwhile. Run the command again for the rest."
        )
    if missed > remaining:
        gone = pluralize(missed - remaining, "job was", "jobs were")
        print_note(f"{gone} not changed: completed, removed or running before their batch.")


def _print_each(items: Iterable[Any], message: Callable[[Any], str]) -> None:
    items = list(items)
    for item in items[:_MAX_LISTED]:
        print_note(message(item))
    if len(items) > _MAX_LISTED:
        print_note(f"The same applies to {pluralize(len(items) - _MAX_LISTED, 'more job')}.")
