"""``graphile-worker init``: a project to begin with."""

from __future__ import annotations

import hashlib
import os
import shlex
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

import click

from graphile_worker.cli.flags import CONTEXT, ending, json_flag
from graphile_worker.cli.printing import print_object
from graphile_worker.errors import EmbeddedServerError

_SERVER = "embedded:./.postgres"
_FILES = ("jobs.py", "crontab", "graphile-worker.toml", "test_jobs.py")
_NEXT = """\
Wrote {files}. Next:

{enter}  graphile-worker dev                           # a worker that takes changes at once
  graphile-worker add hello '{{"name": "Ann"}}'   # in another terminal, where these files are
  pytest                                        # their tests; pip install pytest
"""


@click.command(
    context_settings=CONTEXT, epilog=ending("graphile-worker init", "graphile-worker init shop", reads=False)
)
@click.argument("folder", default=".", type=click.Path(path_type=Path))
@json_flag
def init(folder: Path, *, as_json: bool) -> None:
    """Write a project to begin with: tasks, crontab, tests.

    It is written to FOLDER, or to where the command is run, and works with `graphile-worker dev` at once, on
    a private PostgreSQL of its own. Files are never overwritten: if one of the same name is there, nothing
    is written.
    """
    if folder.exists() and not folder.is_dir():
        raise click.ClickException(f"{folder} is no folder. Name another: graphile-worker init FOLDER")
    there = [name for name in _FILES if (folder / name).exists()]
    if there:
        raise click.ClickException(
            f"{_and(there)} {'is' if len(there) == 1 else 'are'} in {folder.resolve()} already, so nothing "
            "was written. Name another folder: graphile-worker init FOLDER"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            text = files(__package__).joinpath("starter", f"{name}.txt").read_text(encoding="utf-8")
            with (folder / name).open("x", encoding="utf-8") as file:  # not even one that appeared just now
                file.write(text.replace(_SERVER, _server_of(folder)))
    except OSError as error:
        raise click.ClickException(f"{folder} cannot be written to: {error.strerror}.") from None
    written = [str(folder / name) for name in _FILES]
    enter = "" if folder.resolve() == Path.cwd() else f"  cd {shlex.quote(str(folder))}\n"
    if as_json:
        print_object({"folder": str(folder.resolve()), "files": written})
    else:
        click.echo(_NEXT.format(files=_and(written), enter=enter), nl=False)


def _server_of(folder: Path) -> str:
    """Where the project's server has its data: in the project, but for root in a folder that it can reach."""
    from graphile_worker.embedded.binaries import SYSTEM_FOLDER, ServerUser  # noqa: PLC0415

    here = folder.resolve()
    with suppress(EmbeddedServerError):  # nobody is there to run it; who needs it is told then
        if ServerUser.find().closed_folder_above(here / ".postgres" / "data"):
            digest = hashlib.sha256(os.fsencode(here)).hexdigest()[:8]
            return f"embedded:{SYSTEM_FOLDER / f'project-{digest}'}"
    return _SERVER


def _and(names: list[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
