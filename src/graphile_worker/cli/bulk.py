"""Changing jobs, however many: asking first, batch by batch, until all is done or somebody interrupts it."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from graphile_worker.cli.flags import queue_of
from graphile_worker.cli.printing import console, print_object, tell
from graphile_worker.errors import GraphileWorkerError
from graphile_worker.many_jobs import JobFilter
from graphile_worker.wording import counted

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence

    from graphile_worker._db.many import Left
    from graphile_worker.cli.selection import Selection
    from graphile_worker.cli.settings import Value
    from graphile_worker.client import WorkerUtils
    from graphile_worker.many_jobs import Batch, Change

_FEW = 10


@dataclass(frozen=True, kw_only=True)
class Words:
    """How a change is called."""

    do: str
    done: str
    otherwise: str = "could not be changed at this moment: try again"
    """Of a job that is there and does not run, but was not changed."""
    while_running: str = "it was left alone"
    asked: str = ""
    """Of jobs that run, and to which it will happen later."""


@dataclass
class Progress:
    """How far it came."""

    total: int
    changed: list[int] = field(default_factory=list)
    requested: int = 0
    held: int = 0
    stopped_by: Exception | None = None
    """Ctrl-C is an `Abort`."""

    def note(self, batch: Batch) -> None:
        """One batch more."""
        self.changed += batch.changed
        self.requested += batch.requested
        self.held += batch.held

    def insist_on_the_end(self) -> None:
        """If it did not get there, tell how far it came, and raise what stopped it."""
        if self.stopped_by is None:
            return
        how_far = f"{counted(len(self.changed), 'job')} of {self.total:,} changed"
        if isinstance(self.stopped_by, click.Abort):
            tell(f"Interrupted: {how_far}, the others are as they were. Run it again to go on.")
        else:
            tell(f"Stopped by an error: {how_far}; of the batch under way it is not known.")
        raise self.stopped_by


class Rest(NamedTuple):
    """Of the jobs that were named, those that were not changed."""

    missing: Sequence[int | str] = ()
    running: Sequence[Left] = ()
    unchanged: Sequence[Left] = ()


def confirmed(question: str, *, yes: bool) -> bool:
    """Whether it is to be done; asks, and refuses to guess where nobody can be asked."""
    if yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.ClickException(f"{question} There is nobody to ask here: say --yes to do it.")
    # While somebody thinks, Ctrl-C is not for the event loop, which does not run. Nor for Python: one that
    # comes just before it reads would not be seen until there is an answer. Nothing is under way.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        if click.confirm(f"{question} Do it?", err=True):
            return True
    finally:
        signal.signal(signal.SIGINT, before)
    tell("Nothing was changed.")
    return False


async def change_jobs(
    settings: Mapping[str, Value],
    selection: Selection,
    change: Change,
    words: Words,
    *,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Do it, and tell what was done; the exit code."""
    async with queue_of(settings) as utils:
        named, missing = await _named(utils, selection)
        chosen: JobFilter | list[int] = selection.filter
        if selection.ids is not None:
            chosen = await utils.many.taken(selection.ids, change)
        total = len(chosen) if isinstance(chosen, list) else await utils.many.count(chosen, change)
        progress = Progress(total)
        if not dry_run:
            if total > 1 and not confirmed(f"This would {words.do} {counted(total, 'job')}.", yes=yes):
                return 1
            await work_through(utils.many.change(change, chosen), progress, words)
        rest = Rest()
        if progress.stopped_by is None:
            done = await utils.many.taken(named, change) if dry_run else progress.changed
            rest = await _rest(utils, set(named) - set(done), missing)
        _print_outcome(progress, words, rest, dry_run=dry_run, as_json=as_json)
        progress.insist_on_the_end()
        if isinstance(chosen, JobFilter) and not dry_run and not any(rest):
            await _tell_of_missed(utils, chosen, change, progress)
    return 1 if any(rest) else 0


async def _named(utils: WorkerUtils, selection: Selection) -> tuple[list[int], list[str]]:
    """The ids of the jobs that were named, and a key that no job has; none of both, if there is a filter."""
    if selection.only_key is None:
        return selection.ids or [], []
    job = await utils.get_job(key=selection.only_key)
    return ([], [selection.only_key]) if job is None else ([job.id], [])


async def work_through(batches: AsyncGenerator[Batch], progress: Progress, words: Words) -> None:
    """Take all batches, with a bar, until Ctrl-C or an error."""
    async with aclosing(batches):
        with _interruptible() as is_interrupted, _bar(progress.total, words) as advance:
            try:
                async for batch in batches:
                    progress.note(batch)
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
    """Let Ctrl-C wait for the batch under way, so that it is known what was done; a second one does not."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    heard: list[int] = []

    def hear() -> None:
        heard.append(signal.SIGINT)
        if len(heard) > 1 and task is not None:
            task.cancel()
        else:
            tell("Ending with the batch under way. Ctrl-C again undoes it.")

    loop.add_signal_handler(signal.SIGINT, hear)
    try:
        yield lambda: bool(heard)
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@contextmanager
def _bar(total: int, words: Words) -> Iterator[Callable[[int], None]]:
    """A bar for a person who waits; nothing for anybody else."""
    if not sys.stderr.isatty() or total <= _FEW:
        yield lambda _: None
        return
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=console(errors=True), transient=True) as bar:
        task = bar.add_task(f"{words.do.capitalize()} jobs", total=total)
        yield lambda count: bar.advance(task, count)


async def _rest(utils: WorkerUtils, ids: Iterable[int], missing: Sequence[str]) -> Rest:
    """Where these jobs stand, none of which was changed."""
    ids = sorted(ids)
    found = await utils.many.explain_left(ids)
    there = {one.id for one in found}
    return Rest(
        missing=[*missing, *(one for one in ids if one not in there)],
        running=[one for one in found if one.state == "running"],
        unchanged=[one for one in found if one.state != "running"],
    )


def _print_outcome(progress: Progress, words: Words, rest: Rest, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        print_object(
            {
                "dry_run": dry_run,
                "jobs": progress.total,
                "changed": len(progress.changed) - progress.requested,
                "requested": progress.requested,
                "ids": progress.changed,
                "missing": rest.missing,
                "running": [one._asdict() for one in rest.running],
                "unchanged": [one._asdict() for one in rest.unchanged],
            }
        )
    elif dry_run:
        click.echo(f"This would {words.do} {counted(progress.total, 'job')}.")
    elif progress.changed or not any(rest):
        click.echo(_told(progress, words))
    _tell_of(rest.missing, _there_is_none)
    _tell_of(
        rest.running,
        lambda one: f"Job {one.id} is run by {one.locked_by or 'somebody'}; {words.while_running}.",
    )
    _tell_of(rest.unchanged, lambda one: f"Job {one.id} is {one.state}; it {words.otherwise}.")


def _told(progress: Progress, words: Words) -> str:
    """What was done, in words."""
    count, run = len(progress.changed) - progress.requested, progress.requested - progress.held
    few = f": {', '.join(map(str, progress.changed))}"
    sentences = [
        f"{words.done} {counted(count, 'job')}{few if 0 < count <= _FEW and not progress.requested else ''}."
    ]
    if run:
        sentences.append(words.asked.format(run))
    if progress.held:
        sentences.append(
            f"Asked for {progress.held:,} that somebody's transaction has locked: when that ends, a worker "
            "of this library does it."
        )
    return " ".join(sentences)


def _there_is_none(named: int | str) -> str:
    return (
        f"There is no job {named}." if isinstance(named, int) else f"There is no job with the key {named!r}."
    )


async def _tell_of_missed(utils: WorkerUtils, chosen: JobFilter, change: Change, progress: Progress) -> None:
    """Of jobs that were counted, and then not changed."""
    missed = progress.total - len(progress.changed)
    if missed <= 0:
        return
    there = min(missed, await utils.many.count(chosen, change))
    if there:
        tell(
            f"{counted(there, 'job')} of {progress.total:,} not changed: locked by somebody at that moment, "
            "or run meanwhile. Run it again for what is left."
        )
    if missed > there:
        gone = counted(missed - there, "job was", "jobs were")
        tell(f"{gone} gone, or run by somebody, before it came to them.")


def _tell_of(some: Iterable[Any], sentence: Callable[[Any], str]) -> None:
    some = list(some)
    for one in some[:_FEW]:
        tell(sentence(one))
    if len(some) > _FEW:
        tell(f"And so for {len(some) - _FEW:,} more.")
