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

from graphile_worker.cli.flags import json_flag, queue_of, verb
from graphile_worker.cli.printing import console, print_object, tell
from graphile_worker.cli.selection import filter_flags, taken_filter
from graphile_worker.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from graphile_worker.cli.settings import Value
    from graphile_worker.many_jobs import JobFilter

_PERMISSIONS = 0o777


@verb("export", "export > jobs.jsonl", "export --state failed --output failed.jsonl")
@filter_flags
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), default="-", metavar="FILE", help="Where to write."
)
@click.option("--json", is_flag=True, expose_value=False, help="It is JSON anyway: a line a job.")
def export_jobs(settings: Mapping[str, Value], *, output: str, **arguments: Any) -> None:
    """Write jobs as JSON, a line each, for import.

    A line has everything of a job but its lock: stop the workers first, or what they run will run again
    where it is imported. The jobs stay where they are.
    """
    chosen = taken_filter(arguments)
    with _whole(output) as file:
        asyncio.run(_export(settings, file, chosen))


async def _export(settings: Mapping[str, Value], output: BinaryIO, chosen: JobFilter) -> None:
    count = 0
    async with queue_of(settings) as utils:
        with _counter("Export jobs") as show:
            async with aclosing(utils.many.export(chosen)) as pages:
                async for lines in pages:
                    output.write(b"\n".join(lines) + b"\n")
                    count += len(lines)
                    show(count)
    output.flush()
    tell(f"Exported {counted(count, 'job')}.")


@verb("import", "import jobs.jsonl", "import jobs.jsonl --new-ids", "import - < jobs.jsonl")
@click.argument("file", type=click.File("rb"))
@click.option("--new-ids", is_flag=True, help="Give the jobs other ids than they had.")
@json_flag
def import_jobs(settings: Mapping[str, Value], *, file: BinaryIO, new_ids: bool, as_json: bool) -> None:
    """Add the jobs that export wrote.

    All of them or, if one cannot be added, none. They are as they were, their ids too, so that nothing is
    imported twice: if there is one with the same id or the same key already, it is refused. A database with
    jobs of its own needs --new-ids; then only keys tell what is there already.
    """
    asyncio.run(_import(settings, file, new_ids=new_ids, as_json=as_json))


async def _import(settings: Mapping[str, Value], file: BinaryIO, *, new_ids: bool, as_json: bool) -> None:
    count, is_all = 0, False
    async with queue_of(settings) as utils:
        try:
            with _counter("Import jobs") as show:
                async with aclosing(utils.many.import_lines(file, new_ids=new_ids)) as steps:
                    async for step in steps:
                        count, is_all = step
                        show(count)
        except asyncio.CancelledError:  # Ctrl-C
            what = "whether they were imported is not known" if is_all else "nothing was imported"
            tell(f"Interrupted: {what}.")
            raise
    if as_json:
        print_object({"imported": count})
    else:
        click.echo(f"Imported {counted(count, 'job')}.")


@contextmanager
def _whole(path: str) -> Iterator[BinaryIO]:
    """A file that has its name when all is in it, and not before; but a pipe or a device is written to."""
    if path == "-":
        yield sys.stdout.buffer
        return
    target = Path(path)
    try:
        folder = target.absolute().parent
        is_device = folder.is_relative_to("/proc") or folder in {Path("/dev"), Path("/dev/fd")}
        if is_device or (target.exists() and not target.is_file()):
            # Behind /dev/stdout may be a file that somebody else has opened: never begin that anew.
            with target.open("ab" if is_device else "wb") as file:
                yield file
            return
        target = _resolved(target)  # a link stays one, and what it leads to is written anew
        # A name of its own, for others may be writing the same file; beside it, so that it can be renamed.
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
        raise click.ClickException(f"{path} cannot be written: {error.strerror}.") from None
    except BaseException:
        tell(f"{path} was not written.")
        raise


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except RuntimeError:  # links in a circle, until Python 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None


@contextmanager
def _counter(what: str) -> Iterator[Callable[[int], None]]:
    """How far it came, for a person who waits."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn  # noqa: PLC0415

    columns = (SpinnerColumn(), TextColumn(f"{what}: {{task.completed:,}}"))
    with Progress(*columns, console=console(errors=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda count: bar.update(task, completed=count)
