"""Changing jobs, however many: asking first, batch by batch, until all is done or somebody interrupts it."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from graphile_worker.cli.flags import queue_of
from graphile_worker.cli.printing import console, print_object, tell
from graphile_worker.wording import counted

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping

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


@dataclass
class Progress:
    """How far it came."""

    total: int
    changed: list[int] = field(default_factory=list)
    requested: int = 0
    interrupted: bool = False

    def note(self, batch: Batch) -> None:
        """One batch more."""
        self.changed += batch.changed
        self.requested += batch.requested


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
        if click.confirm(question, err=True):
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
        ids = selection.ids
        if selection.only_key is not None:  # one that is named, and that is told of like one with its id
            job = await utils.get_job(key=selection.only_key)
            if job is None:
                tell(f"There is no job with the key {selection.only_key!r}.")
                return 1
            ids = [job.id]
        total = len(ids) if ids is not None else await utils.many.count(selection.filter, change)
        if dry_run:
            _print_plan(total, words, as_json=as_json)
            return 0
        question = f"This would {words.do} {counted(total, 'job')}."
        if total > 1 and not confirmed(f"{question} Do it?" if sys.stdin.isatty() else question, yes=yes):
            return 1
        batches = utils.many.change(change, selection.filter if ids is None else ids)
        progress = await work_through(batches, total, words)
        left = await _left(utils, ids, progress)
        _print_result(progress, words, left, as_json=as_json)
        missed = total - len(progress.changed)
        if ids is None and missed > 0 and not progress.interrupted:
            tell(
                f"{counted(missed, 'job')} of {total:,} not changed: locked by somebody at that moment, or "
                "run meanwhile. Run it again for what is left."
            )
        if progress.interrupted:
            raise click.Abort
        return 1 if any(left.values()) else 0


async def work_through(batches: AsyncGenerator[Batch], total: int, words: Words) -> Progress:
    """Take all batches, with a bar, until Ctrl-C."""
    progress = Progress(total)
    async with aclosing(batches):
        with _interruptible() as is_interrupted, _bar(total, words) as advance:
            async for batch in batches:
                progress.note(batch)
                advance(batch.seen)
                if is_interrupted():
                    progress.interrupted = True
                    break
    return progress


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
    except asyncio.CancelledError:
        raise click.Abort from None
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


async def _left(utils: WorkerUtils, ids: list[int] | None, progress: Progress) -> dict[str, list[Left | int]]:
    """Of the jobs that were named, those that were not changed: gone, running, or something else."""
    if ids is None or progress.interrupted:
        return {"missing": [], "running": [], "unchanged": []}
    rest = sorted(set(ids) - set(progress.changed))
    found = await utils.many.explain_left(rest)
    there = {one.id for one in found}
    return {
        "missing": [one for one in rest if one not in there],
        "running": [one for one in found if one.state == "running"],
        "unchanged": [one for one in found if one.state != "running"],
    }


def _print_plan(total: int, words: Words, *, as_json: bool) -> None:
    if as_json:
        print_object({"dry_run": True, "jobs": total})
    else:
        click.echo(f"This would {words.do} {counted(total, 'job')}.")


def _print_result(progress: Progress, words: Words, left: Mapping[str, list[Any]], *, as_json: bool) -> None:
    count = len(progress.changed) - progress.requested
    if as_json:
        named = {
            kind: [one if isinstance(one, int) else one._asdict() for one in some]
            for kind, some in left.items()
        }
        print_object({"changed": count, "requested": progress.requested, "ids": progress.changed, **named})
    elif progress.changed or not any(left.values()):
        few = f": {', '.join(map(str, progress.changed))}"
        few = few if 0 < count <= _FEW and not progress.requested else ""
        asked = ""
        if progress.requested:
            asked = f" Asked for {progress.requested:,} that run; workers of Node or Rust do not hear it."
        click.echo(f"{words.done} {counted(count, 'job')}{few}.{asked}")
    if progress.interrupted:
        tell_interrupted(progress)
    _tell_of(left["missing"], lambda job_id: f"There is no job {job_id}.")
    _tell_of(
        left["running"],
        lambda one: f"Job {one.id} is run by {one.locked_by or 'somebody'}; {words.while_running}.",
    )
    _tell_of(left["unchanged"], lambda one: f"Job {one.id} is {one.state}; it {words.otherwise}.")


def tell_interrupted(progress: Progress) -> None:
    """How far it came."""
    tell(
        f"Interrupted: {counted(len(progress.changed), 'job')} of {progress.total:,} changed, the others are "
        "as they were. Run it again to go on."
    )


def _tell_of(some: Iterable[Any], sentence: Callable[[Any], str]) -> None:
    some = list(some)
    for one in some[:_FEW]:
        tell(sentence(one))
    if len(some) > _FEW:
        tell(f"And so for {len(some) - _FEW:,} more.")
