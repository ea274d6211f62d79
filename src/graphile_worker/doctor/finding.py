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
