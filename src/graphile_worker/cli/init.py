"""``graphile-worker init``: a starter project."""

from __future__ import annotations

import hashlib
import os
import shlex
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

import click

from graphile_worker.cli.flags import CONTEXT, json_flag, make_epilog
from graphile_worker.cli.printing import print_object
from graphile_worker.errors import EmbeddedServerError

_SERVER = "embedded:./.postgres"
_FILES = ("jobs.py", "crontab", "graphile-worker.toml", "test_jobs.py")
_NEXT = """\
Wrote {files}. Next:

{enter}  graphile-worker dev                           # a worker that restarts on changes
  graphile-worker add hello '{{"name": "Ann"}}'   # in another terminal, in the same folder
  pytest                                        # run the tests (pip install pytest)
"""


@click.command(
    context_settings=CONTEXT,
    epilog=make_epilog("graphile-worker init", "graphile-worker init shop", reads_settings=False),
)
@click.argument("folder", default=".", type=click.Path(path_type=Path))
@json_flag
def init(folder: Path, *, as_json: bool) -> None:
    """Create a starter project: tasks, crontab, tests.

    The files are written to FOLDER, or to the current folder. `graphile-worker dev` runs them at once, on a
    private PostgreSQL of the project. Existing files are never overwritten: if one of them exists, nothing
    is written.
    """
    if folder.exists() and not folder.is_dir():
        raise click.ClickException(
            f"{folder} is not a folder. Choose another one: graphile-worker init FOLDER"
        )
    existing = [name for name in _FILES if (folder / name).exists()]
    if existing:
        raise click.ClickException(
            f"{_join(existing)} already {'exists' if len(existing) == 1 else 'exist'} in {folder.resolve()}, "
            "so nothing was written. Choose another folder: graphile-worker init FOLDER"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            text = files(__package__).joinpath("starter", f"{name}.txt").read_text(encoding="utf-8")
            with (folder / name).open(
                "x", encoding="utf-8"
            ) as file:  # fails if the file was created meanwhile
                file.write(text.replace(_SERVER, _server_path(folder)))
    except OSError as error:
        raise click.ClickException(f"Cannot write to {folder}: {error.strerror}.") from None
    written = [str(folder / name) for name in _FILES]
    enter = "" if folder.resolve() == Path.cwd() else f"  cd {shlex.quote(str(folder))}\n"
    if as_json:
        print_object({"folder": str(folder.resolve()), "files": written})
    else:
        click.echo(_NEXT.format(files=_join(written), enter=enter), nl=False)


def _server_path(folder: Path) -> str:
    """Return where the project's server keeps its data: in the project, if the server's user can reach it."""
    from graphile_worker.embedded.binaries import SYSTEM_FOLDER, ServerUser  # noqa: PLC0415

    here = folder.resolve()
    with suppress(EmbeddedServerError):  # the error is reported when the server starts
        if ServerUser.find().closed_folder_above(here / ".postgres" / "data"):
            digest = hashlib.sha256(os.fsencode(here)).hexdigest()[:8]
            return f"embedded:{SYSTEM_FOLDER / f'project-{digest}'}"
    return _SERVER


def _join(names: list[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
