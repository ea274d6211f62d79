"""Waiting for what the server shows, instead of sleeping and hoping."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import asyncpg

DEADLINE = 20.0


async def until(condition: Callable[[], Awaitable[object]], what: str, within: float = DEADLINE) -> None:
    """Return when the condition holds; fail, naming it, if it never does."""
    try:
        async with asyncio.timeout(within):
            while not await condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"never happened: {what}") from None


async def until_blocked(observer: asyncpg.Connection, pid: int) -> None:
    """Return when that session waits for a lock."""

    async def blocked() -> bool:
        return bool(await observer.fetchval("select cardinality(pg_blocking_pids($1)) > 0", pid))

    await until(blocked, f"session {pid} waits for a lock")
