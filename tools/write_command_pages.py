"""Write docs/commands/: a page for each verb of the command, out of its help."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphile_worker.cli.command import HEADINGS, root

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).parent.parent / "docs" / "commands"
NOTE = "<!-- Written by `make command-pages` out of the help of the command; do not edit. -->\n\n"
PROGRAM = "graphile-worker"


def commands(
    group: click.Group, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """All verbs, and verbs of verbs."""
    for name, command in group.commands.items():
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


def paragraphs(text: str | None) -> list[str]:
    """As Markdown; what the help does not wrap is not wrapped here."""
    found = []
    for part in inspect.cleandoc(text or "").split("\n\n"):
        if part.startswith("\b"):
            found.append("```\n" + part.removeprefix("\b").strip("\n") + "\n```")
        else:
            found.append(_marked(part))
    return found


def _marked(text: str) -> str:
    """With what is to be typed as code."""
    marked = re.sub(r"(?<!\w)(--\w[\w-]*|[A-Z]+_[A-Z_]+\*?)", r"`\1`", " ".join(text.split()))
    return textwrap.fill(marked, width=110, break_on_hyphens=False, break_long_words=False)


def options(command: click.Command, context: click.Context) -> list[str]:
    """A row for each."""
    flags_of = [param for param in command.get_params(context) if isinstance(param, click.Option)]
    records = [param.get_help_record(context) for param in flags_of]
    rows = [
        f"| `{flags}` | {re.sub(r'(?<=[^ ])  +', ' ', text).replace('|', chr(92) + '|')} |"
        for flags, text in (record for record in records if record)
    ]
    return ["## Options\n\n| | |\n|---|---|\n" + "\n".join(rows)] if rows else []


def examples(command: click.Command) -> list[str]:
    """What the help ends with: some examples, and then what holds for all."""
    shown, *rest = (command.epilog or "").split("\n\n")
    _heading, *lines = shown.removeprefix("\b").strip().splitlines()
    text = "\n".join(f"$ {line.strip()}" for line in lines)
    return [
        f"## Examples\n\n```console\n{text}\n```",
        "## How it ends, and what it reads",
        *map(_marked, rest),
    ]


def page(path: tuple[str, ...], command: click.Command) -> str:
    """One of them."""
    context = click.Context(command, info_name=" ".join((PROGRAM, *path)), terminal_width=80)
    context.help_option_names = ["-h", "--help"]
    usage = " ".join(command.collect_usage_pieces(context))
    title = f"# {PROGRAM} {' '.join(path)}"
    synopsis = f"```console\n$ {context.command_path} {usage}\n```"
    parts = [title, synopsis, *paragraphs(command.help), *options(command, context), *examples(command)]
    return NOTE + "\n\n".join(parts) + "\n"


def index() -> str:
    """All of them."""
    parts = [
        "# The verbs of the command",
        "What they share stands in [the command line](../command-line.md).",
    ]
    for heading, names in HEADINGS.items():
        rows = [
            f"| [`{' '.join(path)}`]({'-'.join(path)}.md) | {command.get_short_help_str(200)} |"
            for path, command in commands(root)
            if path[0] in names
        ]
        parts.append(f"## {heading}\n\n| | |\n|---|---|\n" + "\n".join(rows))
    return NOTE + "\n\n".join(parts) + "\n"


def pages() -> dict[str, str]:
    """Every page by the name of its file."""
    found = {f"{'-'.join(path)}.md": page(path, command) for path, command in commands(root)}
    return {"README.md": index(), **found}


def main() -> None:
    """Write them, and remove those of verbs that are gone."""
    FOLDER.mkdir(exist_ok=True)
    written = pages()
    for old in FOLDER.glob("*.md"):
        if old.name not in written:
            old.unlink()
    for name, text in written.items():
        (FOLDER / name).write_text(text)
    print(f"Wrote {len(written)} pages to {FOLDER}")


if __name__ == "__main__":
    main()
