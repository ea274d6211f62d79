"""Wait for a condition instead of sleeping for a fixed time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import asyncpg

DEADLINE = 20.0


async def until(condition: Callable[[], Awaitable[object]], what: str, within: float = DEADLINE) -> None:
    """Wait until the condition holds. If it never does, fail with `what` in the message."""
    try:
        async with asyncio.timeout(within):
            while not await condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"never happened: {what}") from None


async def until_blocked(observer: asyncpg.Connection, pid: int) -> None:
    """Wait until that session waits for a lock."""

    async def blocked() -> bool:
        return bool(await observer.fetchval("select cardinality(pg_blocking_pids($1)) > 0", pid))

    await until(blocked, f"session {pid} waits for a lock")
