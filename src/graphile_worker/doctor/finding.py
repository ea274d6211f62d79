"""Findings and their levels."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping


class Level(StrEnum):
    """Severity of a finding, from the lowest to the highest."""

    OK = "ok"
    """No problem."""
    NOTE = "note"
    """Worth knowing."""
    WARNING = "warning"
    """It works, but not well, or not for long."""
    ERROR = "error"
    """Something does not work."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check.

    Attributes:
        check: Name of the check.
        level: Severity.
        message: The problem, or that there is none.
        advice: How to fix the problem.
        details: Measured values, for programs.
    """

    check: str
    level: Level
    message: str
    advice: str | None = None
    details: Mapping[str, Any] = msgspec.field(default_factory=dict)
