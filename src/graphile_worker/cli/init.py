"""``graphile-worker init``: a project to begin with."""

from __future__ import annotations

import shlex
from importlib.resources import files
from pathlib import Path

import click

from graphile_worker.cli.flags import CONTEXT

_FILES = ("jobs.py", "crontab", "graphile-worker.toml", "test_jobs.py")
_NEXT = """\
Wrote {files}. Next:

{enter}  graphile-worker dev                           # a worker that takes changes at once
  graphile-worker add hello '{{"name": "Ann"}}'   # in another terminal, where these files are
  pytest                                        # their tests; pip install pytest
"""


@click.command(
    context_settings=CONTEXT, epilog="\b\nExamples:\n  graphile-worker init\n  graphile-worker init shop"
)
@click.argument("folder", default=".", type=click.Path(path_type=Path))
def init(folder: Path) -> None:
    """Write a project to begin with: tasks, crontab, tests.

    It is written to FOLDER, or to where the command is run, and works with `graphile-worker dev` at once.
    Files are never overwritten: if one of the same name is there, nothing is written.
    """
    there = [name for name in _FILES if (folder / name).exists()]
    if there:
        raise click.ClickException(
            f"{_and(there)} {'is' if len(there) == 1 else 'are'} in {folder.resolve()} already, so nothing "
            "was written. Name another folder: graphile-worker init FOLDER"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        text = files(__package__).joinpath("starter", f"{name}.txt").read_text(encoding="utf-8")
        with (folder / name).open("x", encoding="utf-8") as file:  # not even one that appeared just now
            file.write(text)
    enter = "" if folder.resolve() == Path.cwd() else f"  cd {shlex.quote(str(folder))}\n"
    click.echo(_NEXT.format(files=_and([str(folder / name) for name in _FILES]), enter=enter), nl=False)


def _and(names: list[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
