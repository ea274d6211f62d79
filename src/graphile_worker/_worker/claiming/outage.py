"""Outages of the database: the error of a request, and the tracker of whether the database is available."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from graphile_worker import events as event
from graphile_worker._base.text import without_end
from graphile_worker._db.connection.error_mapping import (
    is_about_data,
    is_conflict,
    is_refusal,
    is_stale_session,
    is_timeout,
    message_of,
)
from graphile_worker._worker.service import pause_after

if TYPE_CHECKING:
    from graphile_worker._base.logs import ScopedLogger
    from graphile_worker.errors import GraphileWorkerError
    from graphile_worker.events import WorkerPool
    from graphile_worker.events.emitter import Events


class OutageError(Exception):
    """The database was unavailable or refused a request. A later request may succeed."""

    def __init__(
        self, why: BaseException, *, unknown: bool, error: GraphileWorkerError | None = None
    ) -> None:
        super().__init__(without_end(message_of(why)))
        self.error = error
        """The error for callers that do not wait."""
        self.unknown = unknown
        """Whether the request may have been committed."""
        self.is_refusal = is_refusal(why)
        """Whether the server may accept a part of the request."""
        self.is_conflict = is_conflict(why)
        """Whether the request conflicts with another transaction, or a trigger raised such an error."""
        self.is_about_data = is_about_data(why)
        """Whether a value cannot be stored."""
        self.is_timeout = is_timeout(why)
        """Whether the server cancelled the statement, usually because it took too long."""
        self.is_stale_session = is_stale_session(why)
        """Whether the server accepts no more exchanges from this session. A new session can make them."""


class OutageLog:
    """Logs an outage once, although several parts of a worker notice it, each on its own connection.

    There is one warning from the first part, and one line when all of them can use the database again. Its
    methods must be called on the worker's event loop.
    """

    def __init__(self, logger: ScopedLogger) -> None:
        self._logger = logger
        self._parts: set[str] = set()
        self._since = 0.0

    @property
    def is_logged(self) -> bool:
        """Whether an outage is logged that has not ended."""
        return bool(self._parts)

    def begin(self, part: str, reason: object) -> None:
        """Record that a part of the worker cannot use the database."""
        if not self._parts:
            self._since = monotonic()
            self._logger.warning(
                "The database is unavailable: %s. Running jobs go on; retrying until it is back", reason
            )
        elif part not in self._parts:
            self._logger.debug("The database is unavailable for the %s too: %s", part, reason)
        self._parts.add(part)

    def end(self, part: str) -> None:
        """Record that a part of the worker can use the database again, or ends."""
        if part in self._parts:
            self._parts.remove(part)
            if not self._parts:
                self._logger.info("The database is back after %.1f s", monotonic() - self._since)


class OutageTracker:
    """Tracks whether the database is available, from the worker's requests."""

    def __init__(self, pool: WorkerPool, events: Events, log: OutageLog) -> None:
        self._pool = pool
        self._events = events
        self._log = log
        self._since: float | None = None
        self._reason = ""
        self._failures = 0
        self._retry_at = 0.0

    @property
    def pause(self) -> float:
        """Seconds until the next request may be made."""
        return max(0.0, self._retry_at - monotonic()) if self._retry_at else 0.0

    @property
    def is_available(self) -> bool:
        """Whether the last request succeeded."""
        return self._since is None

    @property
    def reason(self) -> str:
        """The reason for the current outage, or for the last one."""
        return self._reason

    def record_failure(self, error: Exception) -> None:
        """Record a failed request."""
        self._failures += 1
        self._reason = str(error)
        if self._since is None:
            self._since = monotonic()
            self._log.begin("exchange", error)
        self._retry_at = monotonic() + pause_after(self._failures)
        self._events.emit(event.PoolDatabaseError(worker_pool=self._pool, error=error))

    def record_success(self) -> None:
        """Record a successful request."""
        if self._since is None:
            return
        outage = monotonic() - self._since
        self._log.end("exchange")
        self._since, self._failures, self._retry_at = None, 0, 0.0
        self._events.emit(event.PoolDatabaseRecovered(worker_pool=self._pool, outage=outage))

    def retry_now(self) -> None:
        """End the pause, because the worker stops or a heartbeat has reached the database."""
        self._retry_at = 0.0
