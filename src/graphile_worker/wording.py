"""Words for sentences."""

from __future__ import annotations

from pathlib import Path


def some(names: list[str], most: int = 5) -> str:
    """The first of them, and how many more.

    >>> some(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def counted(number: int, what: str, plural: str | None = None) -> str:
    """A number and what it counts.

    >>> counted(1, "job"), counted(1200, "job"), counted(2, "queue is", "queues are")
    ('1 job', '1,200 jobs', '2 queues are')
    """
    return f"{number:,} {what if number == 1 else plural or what + 's'}"


def without_end(text: str) -> str:
    """What happened, to stand inside of a sentence: without its full stop, and without a question at its end.

    >>> without_end("Nobody answers. Is the server running?")
    'Nobody answers'
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
