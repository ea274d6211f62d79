"""``graphile-worker export`` and ``import``: jobs as lines of JSON."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from contextlib import aclosing, contextmanager
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from graphile_worker._base.text import pluralize
from graphile_worker.cli.flags import json_flag, open_utils, verb
from graphile_worker.cli.printing import console, print_note, print_object
from graphile_worker.cli.selection import filter_flags, pop_filter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from graphile_worker._client.bulk import JobFilter
    from graphile_worker.cli.settings import Value

_PERMISSIONS = 0o777


@verb("export", "export > jobs.jsonl", "export --state failed --output failed.jsonl")
@filter_flags
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    default="-",
    metavar="FILE",
    help="Output file [standard output].",
)
@click.option(
    "--json", is_flag=True, expose_value=False, help="Accepted for consistency: the output is always JSON."
)
def export_jobs(settings: Mapping[str, Value], *, output: str, **arguments: Any) -> None:
    """Write jobs as lines of JSON, for import.

    A line has all fields of a job except its lock. Stop the workers first: otherwise the jobs that they are
    running will run again where they are imported. The jobs are not removed.
    """
    job_filter = pop_filter(arguments)
    with _atomic_file(output) as file:
        asyncio.run(_export(settings, file, job_filter))


async def _export(settings: Mapping[str, Value], output: BinaryIO, job_filter: JobFilter) -> None:
    count = 0
    async with open_utils(settings) as utils:
        with _counter("Export jobs") as show:
            async with aclosing(utils.many.export(job_filter)) as pages:
                async for lines in pages:
                    output.write(b"\n".join(lines) + b"\n")
                    count += len(lines)
                    show(count)
    output.flush()
    print_note(f"Exported {pluralize(count, 'job')}.")


@verb("import", "import jobs.jsonl", "import jobs.jsonl --new-ids", "import - < jobs.jsonl")
@click.argument("file", type=click.File("rb"))
@click.option("--new-ids", is_flag=True, help="Assign new ids to the jobs.")
@json_flag
def import_jobs(settings: Mapping[str, Value], *, file: BinaryIO, new_ids: bool, as_json: bool) -> None:
    """Import jobs from the output of export.

    All jobs are imported, or none if one of them cannot be. They keep their ids, so that no job is imported
    twice: a job whose id or key already exists is an error. A database with other jobs needs --new-ids; then
    only keys prevent duplicates.
    """
    asyncio.run(_import(settings, file, new_ids=new_ids, as_json=as_json))


async def _import(settings: Mapping[str, Value], file: BinaryIO, *, new_ids: bool, as_json: bool) -> None:
    count, may_be_committed = 0, False
    async with open_utils(settings) as utils:
        try:
            with _counter("Import jobs") as show:
                async with aclosing(utils.many.import_lines(file, new_ids=new_ids)) as steps:
                    async for step in steps:
                        count, may_be_committed = step
                        show(count)
        except asyncio.CancelledError:  # Ctrl-C
            outcome = (
                "the jobs may or may not have been imported" if may_be_committed else "nothing was imported"
            )
            print_note(f"Interrupted: {outcome}.")
            raise
    if as_json:
        print_object({"imported": count})
    else:
        click.echo(f"Imported {pluralize(count, 'job')}.")


@contextmanager
def _atomic_file(path: str) -> Iterator[BinaryIO]:
    """Open a file that gets its name only when it is complete; pipes and devices are opened directly."""
    if path == "-":
        yield sys.stdout.buffer
        return
    target = Path(path)
    try:
        folder = target.absolute().parent
        is_device = folder.is_relative_to("/proc") or folder in {Path("/dev"), Path("/dev/fd")}
        if is_device or (target.exists() and not target.is_file()):
            # /dev/stdout may be a file that another program has open, so never truncate it.
            with target.open("ab" if is_device else "wb") as file:
                yield file
            return
        target = _resolve(target)  # keep a symbolic link, and replace its target
        # A unique name, because another process may write the same file; in the same folder, for the rename.
        part = target.with_name(f"{target.name}.{token_hex(4)}.part")
        try:
            with part.open("xb") as file:
                yield file
            if target.exists():
                part.chmod(target.stat().st_mode & _PERMISSIONS)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise click.ClickException(f"Cannot write {path}: {error.strerror}.") from None
    except BaseException:
        print_note(f"{path} was not written.")
        raise


def _resolve(path: Path) -> Path:
    loop = OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    try:
        target = path.resolve()
    except RuntimeError:  # before Python 3.13
        raise loop from None
    if target.is_symlink():  # since Python 3.13
        raise loop
    return target


@contextmanager
def _counter(label: str) -> Iterator[Callable[[int], None]]:
    """Show the number of jobs so far on a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn  # noqa: PLC0415

    columns = (SpinnerColumn(), TextColumn(f"{label}: {{task.completed:,}}"))
    with Progress(*columns, console=console(errors=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda count: bar.update(task, completed=count)
