"""Words for sentences."""

from __future__ import annotations


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
