"""What can become of a job that a worker claimed."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

_LONGEST_ERROR = 10_000


class Completed(msgspec.Struct, frozen=True):
    """It returned: the job is deleted."""


class Failed(msgspec.Struct, frozen=True):
    """It raised: the job is tried again later, if it has attempts left."""

    error: BaseException


class Interrupted(msgspec.Struct, frozen=True):
    """The worker stopped it: the attempt is given back, and the job is available after `delay` seconds."""

    delay: float = 0.0


class Returned(msgspec.Struct, frozen=True):
    """It was claimed ahead and not started: the attempt is given back."""


Outcome: TypeAlias = Completed | Failed | Interrupted | Returned


def describe_error(error: BaseException) -> str:
    """What is kept of an error as the job's `last_error`.

    >>> describe_error(ValueError("no such file"))
    'no such file'
    >>> describe_error(ValueError())
    'ValueError'
    """
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - an exception whose text cannot be had is still an exception
        text = ""
    return storable(text or type(error).__name__)


def storable(text: str) -> str:
    """The text, as long as it may be, and without what PostgreSQL cannot keep as text."""
    if len(text) > _LONGEST_ERROR:
        text = text[:_LONGEST_ERROR] + "…"
    return text.replace("\0", "\\0").encode(errors="backslashreplace").decode()
