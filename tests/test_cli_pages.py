"""The generated pages of the verbs, and their helps."""

from __future__ import annotations

import importlib
import sys

import click

from support.postgres import ROOT

sys.path.insert(0, str(ROOT / "tools"))
write_command_pages = importlib.import_module("write_command_pages")


def test_command_pages_are_current() -> None:
    written = {
        path.name: path.read_text()
        for path in write_command_pages.FOLDER.glob("*.md")
        if path.name != "index.md"
    }
    assert written == write_command_pages.pages(), "run make command-pages"


def test_every_verb_has_summary_options_and_examples() -> None:
    for path, command in write_command_pages.commands(write_command_pages.root):
        first = command.get_short_help_str(60)
        assert first.endswith("."), (path, first)
        assert not first.endswith("..."), (path, "does not fit the list of commands")
        assert "## Examples" in write_command_pages.page(path, command), path
        assert all(param.help for param in command.params if isinstance(param, click.Option)), path


def test_every_verb_is_under_a_heading() -> None:
    named = [name for names in write_command_pages.HEADINGS.values() for name in names]
    assert sorted(named) == sorted(write_command_pages.root.commands)


def test_every_verb_documents_exit_codes_and_environment() -> None:
    for path, command in write_command_pages.commands(write_command_pages.root):
        with click.Context(command, info_name=path[-1], max_content_width=100) as context:
            text = " ".join(command.get_help(context).split())
        assert "Exit codes: 0, success; 1, " in text, path
        reads_settings = path[-1] not in {"init", "completion", "check", "next"}
        assert ("Environment: DATABASE_URL" in text) is reads_settings, path
