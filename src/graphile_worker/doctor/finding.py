"""What the doctor says."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping


class Level(StrEnum):
    """How bad it is, the worst last."""

    OK = "ok"
    """As it should be."""
    NOTE = "note"
    """Good to know."""
    WARNING = "warning"
    """It works, but not as well as it could, or not for long."""
    TROUBLE = "trouble"
    """Something does not work."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    check: str
    level: Level
    says: str
    advice: str | None = None
    details: Mapping[str, Any] = msgspec.field(default_factory=dict)


def lasting(seconds: float) -> str:
    """A duration, roughly.

    >>> lasting(0.2), lasting(59), lasting(90 * 60), lasting(3 * 86400)
    ('0.2 s', '59 s', '90 min', '72 h')
    """
    if seconds < 10:  # noqa: PLR2004 - where a digit more is worth its place
        return f"{seconds:.1f} s"
    if seconds < 120:  # noqa: PLR2004 - two minutes
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"
