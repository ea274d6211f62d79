"""Griffe extension: docstrings as Markdown, for the API reference.

Docstrings contain doctests and paths of pages, readable in an editor. On the site, a doctest becomes
a code block, and ``docs/guides/cron.md`` becomes a link.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(
    r"^(?P<indent>[ \t]*)>>> .*\n?(?:(?P=indent)\S.*\n?|(?P=indent)[ \t]+\S.*\n?)*", re.MULTILINE
)
PAGE = re.compile(r"\bdocs/([\w/-]+)\.md\b")


class MarkdownDocstrings(griffe.Extension):  # type: ignore[misc, unused-ignore]
    """Rewrite each docstring once, when its object is loaded."""

    def on_object(self, *, obj: griffe.Object, **_rest: Any) -> None:
        """Rewrite the object's docstring."""
        if obj.docstring is not None:
            text = DOCTEST.sub(_fenced, obj.docstring.value)
            # All pages of the API are in reference/api/.
            obj.docstring.value = PAGE.sub(r"[\1](../../\1.md)", text)


def _fenced(block: re.Match[str]) -> str:
    indent = block["indent"]
    return f"{indent}```pycon\n{block[0].rstrip()}\n{indent}```\n"
