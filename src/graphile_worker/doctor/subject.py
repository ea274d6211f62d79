"""The queue that the checks examine, and the thresholds for findings."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

from graphile_worker._db.queries import diagnostics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from graphile_worker._db.connection.connect import Connection, Pool
    from graphile_worker._db.queries.diagnostics import Rights, Server
    from graphile_worker._db.sql_files import Schema

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Thresholds for findings: seconds, rows, connections, or fractions.

    A pair is the threshold for a warning, and the threshold for an error.
    """

    clock: tuple[float, float] = (1.0, 60.0)
    """Difference between the clocks."""
    notifications: tuple[float, float] = (0.05, 0.5)
    """Usage of the server's notification queue."""
    connections: tuple[int, int] = (15, 4)
    """Remaining connections: enough for a worker and its tasks, and enough for a worker alone."""
    dead_rows: int = 100_000
    """Dead rows in a table."""
    transaction: tuple[float, float] = (300.0, 3600.0)
    """Age of the oldest transaction."""
    due: float = 60.0
    """How long a job may be due before a task without a worker is a warning."""
    lock: float = 900.0
    """Age of a lock of a worker without heartbeats."""
    probe: float = 3.0
    """How long to wait for the test notification."""


@dataclass(kw_only=True)
class Subject:
    """The queue to examine, and what earlier checks found."""

    pool: Pool
    listen_on: Pool
    schema: Schema
    listens: bool
    prepares: bool
    """Whether workers use prepared statements."""
    limits: Limits = field(default_factory=Limits)
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    server: Server | None = None
    rights: Rights | None = None

    async def read(self, query: Callable[[Connection], Awaitable[T]]) -> T:
        """Run a query in its own transaction, and return its result."""
        return await diagnostics.examine(self.pool, self.schema, query)
