"""Waiting for another process."""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING

from chaos.ledger import now

if TYPE_CHECKING:
    from collections.abc import Callable

POLL_INTERVAL = 0.02
"""Seconds between two checks."""


async def until(condition: Callable[[], object], limit: float = inf) -> bool:
    """Wait until the condition holds, or until the limit in seconds. Return whether it holds."""
    deadline = now() + limit
    while not condition():
        if now() > deadline:
            return False
        await asyncio.sleep(POLL_INTERVAL)
    return True
