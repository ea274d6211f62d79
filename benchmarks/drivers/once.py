"""A process that starts, finds no jobs and ends."""

from __future__ import annotations

import asyncio

from graphile_worker import run_once


async def trivial(_payload: object) -> None:
    """Nothing."""


if __name__ == "__main__":
    asyncio.run(run_once({"trivial": trivial}))
