"""Helpers that build the sentences of messages."""

from __future__ import annotations

from pathlib import Path


def join_truncated(names: list[str], most: int = 5) -> str:
    """Join the first names with commas, and say how many more there are.

    >>> join_truncated(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def pluralize(number: int, singular: str, plural: str | None = None) -> str:
    """Return a number followed by the noun that it counts.

    >>> pluralize(1, "job"), pluralize(1200, "job"), pluralize(2, "queue is", "queues are")
    ('1 job', '1,200 jobs', '2 queues are')
    """
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def without_end(text: str) -> str:
    """Return a message without its final full stop or question, to be embedded in a sentence.

    >>> without_end("The server does not answer. Is it running?")
    'The server does not answer'
    """
    if text.endswith("?"):
        text = text.rpartition(". ")[0] or text[:-1]
    return text.rstrip(".")


def relative_path(path: str) -> str:
    """Return a path relative to the current folder if it is inside of it, and otherwise as it is."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):  # elsewhere, or the current folder is gone
        return path
