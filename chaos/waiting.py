"""Waiting for what another process does."""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING

from chaos.ledger import now

if TYPE_CHECKING:
    from collections.abc import Callable

LOOK = 0.02
"""How often to look, in seconds."""


async def until(condition: Callable[[], object], limit: float = inf) -> bool:
    """Return when the condition holds, or after so long; whether it does."""
    deadline = now() + limit
    while not condition():
        if now() > deadline:
            return False
        await asyncio.sleep(LOOK)
    return True
