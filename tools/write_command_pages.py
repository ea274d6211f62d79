"""Write docs/reference/cli/: a page for each verb of the command, from its help text."""

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

FOLDER = Path(__file__).parent.parent / "docs" / "reference" / "cli"
NOTE = "<!-- Written by `make command-pages` from the help of the command; do not edit. -->\n\n"
PROGRAM = "graphile-worker"


def commands(
    group: click.Group, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield all verbs, including the verbs of groups."""
    for name, command in group.commands.items():
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


def paragraphs(text: str | None) -> list[str]:
    """Return the paragraphs of a help text as Markdown. Unwrapped paragraphs become code blocks."""
    found = []
    for part in inspect.cleandoc(text or "").split("\n\n"):
        if part.startswith("\b"):
            found.append("```\n" + part.removeprefix("\b").strip("\n") + "\n```")
        else:
            found.append(_marked(part))
    return found


def _marked(text: str) -> str:
    """Return a paragraph with flags and variables marked as code."""
    marked = re.sub(r"(?<!\w)(--\w[\w-]*|[A-Z]+_[A-Z_]+\*?)", r"`\1`", " ".join(text.split()))
    return textwrap.fill(marked, width=110, break_on_hyphens=False, break_long_words=False)


def options(command: click.Command, context: click.Context) -> list[str]:
    """Return a table with a row for each option."""
    flags_of = [param for param in command.get_params(context) if isinstance(param, click.Option)]
    records = [param.get_help_record(context) for param in flags_of]
    rows = [
        f"| `{flags}` | {re.sub(r'(?<=[^ ])  +', ' ', text).replace('|', chr(92) + '|')} |"
        for flags, text in (record for record in records if record)
    ]
    return ["## Options\n\n| | |\n|---|---|\n" + "\n".join(rows)] if rows else []


def examples(command: click.Command) -> list[str]:
    """Return the examples, exit codes and environment, from the end of the help text."""
    shown, *rest = (command.epilog or "").split("\n\n")
    _heading, *lines = shown.removeprefix("\b").strip().splitlines()
    text = "\n".join(f"$ {line.strip()}" for line in lines)
    return [
        f"## Examples\n\n```console\n{text}\n```",
        "## Exit codes and environment",
        *map(_marked, rest),
    ]


def page(path: tuple[str, ...], command: click.Command) -> str:
    """Return the page of a verb."""
    context = click.Context(command, info_name=" ".join((PROGRAM, *path)), terminal_width=80)
    context.help_option_names = ["-h", "--help"]
    usage = " ".join(command.collect_usage_pieces(context))
    title = f"# {PROGRAM} {' '.join(path)}"
    synopsis = f"```console\n$ {context.command_path} {usage}\n```"
    parts = [title, synopsis, *paragraphs(command.help), *options(command, context), *examples(command)]
    return NOTE + "\n\n".join(parts) + "\n"


def index() -> str:
    """Return the page that lists all verbs."""
    parts = [
        "# Commands",
        "See [the command line](index.md) for what all commands have in common.",
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
    """Return every page by its file name."""
    found = {f"{'-'.join(path)}.md": page(path, command) for path, command in commands(root)}
    return {"commands.md": index(), **found}


def main() -> None:
    """Write the pages, and remove the pages of verbs that no longer exist."""
    FOLDER.mkdir(exist_ok=True)
    written = pages()
    for old in FOLDER.glob("*.md"):
        if old.name not in {*written, "index.md"}:
            old.unlink()
    for name, text in written.items():
        (FOLDER / name).write_text(text)
    print(f"Wrote {len(written)} pages to {FOLDER}")


if __name__ == "__main__":
    main()
