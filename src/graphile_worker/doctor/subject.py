"""What is examined, and from which point on something is worth a word."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

from graphile_worker._db import symptoms

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from graphile_worker._db.connect import Connection, Pool
    from graphile_worker._db.sql import Schema
    from graphile_worker._db.symptoms import Rights, Server

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """From which point on something is worth a word; seconds, rows, connections, or a part of 1."""

    clock: tuple[float, float] = (1.0, 60.0)
    """A warning, and trouble; and so with the others that are pairs."""
    notifications: tuple[float, float] = (0.05, 0.5)
    connections: tuple[int, int] = (15, 4)
    """How many are left: for a worker and its tasks, and for a worker alone."""
    dead_rows: int = 100_000
    transaction: tuple[float, float] = (300.0, 3600.0)
    due: float = 60.0
    """How long a job may be due before it is told that nobody serves its task."""
    lock: float = 900.0
    """How old a lock may be, of a worker that does not say whether it lives."""
    probe: float = 3.0
    """How long to wait for a notification."""


@dataclass(kw_only=True)
class Subject:
    """A queue to examine, and what is known of it so far."""

    pool: Pool
    listen_on: Pool
    schema: Schema
    listens: bool
    prepares: bool
    """Whether workers are to use prepared statements."""
    limits: Limits = field(default_factory=Limits)
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    server: Server | None = None
    rights: Rights | None = None

    async def look(self, at: Callable[[Connection], Awaitable[T]]) -> T:
        """What is seen, in a transaction of its own."""
        return await symptoms.look(self.pool, self.schema, at)
