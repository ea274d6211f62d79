"""How much may run at once: pauses."""

from __future__ import annotations

from datetime import datetime  # noqa: TC003 - msgspec reads the annotations
from typing import Literal

import msgspec

PAUSED = "python:paused"
"""What a paused queue is locked by."""


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """A pause of a task, of a serial queue, or of everything: see `WorkerUtils.pause`.

    Example:
        >>> import asyncio
        >>> from graphile_worker import WorkerUtils
        >>> async def main():
        ...     async with WorkerUtils(dsn=dsn) as utils:
        ...         await utils.migrate()
        ...         await utils.pause(task="charge", reason="the bank is down")
        ...         return await utils.pauses()
        >>> for pause in asyncio.run(main()):
        ...     print(pause.kind, pause.name, pause.reason)
        task charge the bank is down
    """

    kind: Literal["all", "task", "queue"]
    name: str
    """The task's identifier or the queue's name; empty if everything is paused."""
    paused_at: datetime
    until: datetime | None = None
    """When the pause ends by itself; None if it does not."""
    reason: str | None = None
    paused_by: str
    """Who paused it: by default the database role."""

    @property
    def subject(self) -> str:
        """What is paused, in words."""
        return "everything" if self.kind == "all" else f"{self.kind} {self.name!r}"

    @property
    def is_obeyed_by_all(self) -> bool:
        """Whether Node and Rust workers obey the pause too: they do not claim jobs of a paused queue."""
        return self.kind == "queue"
