"""`Notifier`: listens for notifications, so that the worker claims new jobs at once.

Notifications are an optimization: a worker that receives none polls. The notifier logs a problem once, and
keeps trying in the background.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import msgspec

from graphile_worker import events as event
from graphile_worker._base.text import without_end
from graphile_worker._base.user_code import StrayExitError, is_being_cancelled
from graphile_worker._db.connection.error_mapping import message_of
from graphile_worker._db.connection.listen import Listener, listening
from graphile_worker._db.queries import workers as database
from graphile_worker._db.queries.cancellations import CHANNEL as _CANCELLATION
from graphile_worker._db.queries.pauses import CHANNEL as _PAUSE
from graphile_worker._worker.service import Service, pause_after

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphile_worker._base.logs import ScopedLogger
    from graphile_worker._db.connection.connect import Pool
    from graphile_worker._db.connection.session import Session
    from graphile_worker._worker.claiming.outage import OutageLog
    from graphile_worker.events import WorkerPool
    from graphile_worker.events.emitter import Events

_NEW_JOBS = "jobs:insert"
_MIGRATION = "worker:migrate"
_PROBE_TIMEOUT = 5.0
_PROBE_INTERVAL = 30.0
_SILENT_INTERVAL = 300.0
"""Seconds between two attempts to listen, if no notification arrives."""


class _NewJobs(msgspec.Struct):
    """The message of a notification of new jobs."""

    count: int


_decode = msgspec.json.Decoder(_NewJobs).decode


class NoNotificationsError(Exception):
    """No notification arrives on the connection."""


class Notifier(Service):
    """Listens on its own connection.

    It probes whether notifications arrive, by sending one to itself from another connection. PgBouncer in
    transaction mode accepts LISTEN, but does not deliver notifications.

    Args:
        pool: The worker's identity.
        listen_on: The pool that provides the connection.
        session: The connections from which probes are sent.
        on_jobs: Called when there may be new jobs, with their number if it is known.
        on_migration: Called when a migration may have changed the schema.
        on_cancellation: Called when jobs may have been cancelled, or when notifications no longer arrive.
        on_pause: Called when something may have been paused or resumed, or when notifications no longer
            arrive.
        events: The event emitter.
        outage_log: Logs an outage once.
        logger: The worker's logger.
    """

    name = "notifier"

    def __init__(
        self,
        *,
        pool: WorkerPool,
        listen_on: Pool,
        session: Session,
        on_jobs: Callable[[int | None], None],
        on_migration: Callable[[], None],
        on_cancellation: Callable[[], None],
        on_pause: Callable[[], None],
        events: Events,
        outage_log: OutageLog,
        logger: ScopedLogger,
    ) -> None:
        super().__init__(logger)
        self._outage_log = outage_log
        self._shares_connections = listen_on is session.pool
        self._pool = pool
        self._listen_on = listen_on
        self._session = session
        self._on_jobs = on_jobs
        self._on_migration = on_migration
        self._on_cancellation = on_cancellation
        self._on_pause = on_pause
        self._events = events
        self._probe = f"graphile-worker:{pool.id}"
        self._probe_arrived = asyncio.Event()
        self._attempts = 0
        self._reported = self._has_received = False
        self._listener: Listener | None = None
        self.first_attempt = asyncio.Event()
        """Set after the first attempt to listen, whether or not it succeeded."""

    @property
    def is_listening(self) -> bool:
        """Whether there is a listening connection."""
        return self._listener is not None

    @property
    def is_receiving(self) -> bool:
        """Whether a probe has arrived on the listening connection."""
        return self._listener is not None and self._has_received

    async def tick(self) -> float:
        """Listen until the connection is lost."""
        self._events.emit(event.PoolListenConnecting(worker_pool=self._pool, attempts=self._attempts))
        self._has_received = False
        client = None
        channels = (_NEW_JOBS, _MIGRATION, _CANCELLATION, _PAUSE, self._probe)
        try:
            async with listening(self._listen_on, channels, self._on_notification) as listener:
                self._listener, client = listener, listener.connection
                try:
                    self._events.emit(
                        event.PoolListenSuccess(worker_pool=self._pool, client=listener.connection)
                    )
                    # Notifications that were sent before are lost.
                    self._on_jobs(None)
                    self._on_migration()
                    self._on_cancellation()
                    self._on_pause()
                    self.first_attempt.set()
                    await self._keep_probing(listener)
                finally:
                    self._listener = None
                    self._on_cancellation()
                    self._on_pause()
                    self._events.emit(
                        event.PoolListenRelease(worker_pool=self._pool, client=listener.connection)
                    )
            error: Exception = NoNotificationsError("the probe did not arrive")
            if listener.closed.is_set():
                error = ConnectionError("the connection was closed")
        except BaseException as raised:
            if isinstance(raised, asyncio.CancelledError) and is_being_cancelled():
                raise
            error = raised if isinstance(raised, Exception) else StrayExitError(raised)
        self._events.emit(event.PoolListenError(worker_pool=self._pool, error=error, client=client))
        self.first_attempt.set()
        return self._pause(error)

    def _pause(self, error: Exception) -> float:
        self._attempts = 1 if self._has_received else self._attempts + 1
        if self._has_received:
            self.logger.debug("The listening connection was lost (%s). Connecting again", message_of(error))
        elif self._shares_connections and not isinstance(error, NoNotificationsError):
            self._outage_log.begin("listener", without_end(message_of(error)))
        elif not self._reported:
            self._reported = True
            hint = ""
            if isinstance(error, NoNotificationsError):
                hint = (
                    " If the connection goes through PgBouncer, set listen_dsn (--listen-connection) to a "
                    "direct connection, or listen=False (--no-listen)."
                )
            reason = without_end(message_of(error))
            self.logger.warning(
                "No notifications of new jobs arrive (%s), so the worker polls.%s", reason, hint
            )
        if isinstance(error, NoNotificationsError) and not self._has_received:
            return _SILENT_INTERVAL * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
        return pause_after(self._attempts)

    async def _keep_probing(self, listener: Listener) -> None:
        """Probe regularly, until the connection is closed or a probe does not arrive."""
        while not listener.closed.is_set():
            if not await self._send_probe(listener):
                break
            self._has_received = True
            self._attempts = 0
            self._outage_log.end("listener")
            if self._reported:
                self._reported = False
                self.logger.info("Notifications of new jobs arrive")
            await _wait(listener.closed, _PROBE_INTERVAL)

    async def _send_probe(self, listener: Listener) -> bool:
        self._probe_arrived.clear()
        try:
            await self._session.call(lambda on: database.notify(on, self._session.schema, self._probe, ""))
        except Exception:  # noqa: BLE001 - the probe was not sent, so it tells nothing
            return not listener.closed.is_set()
        return await _wait(self._probe_arrived, _PROBE_TIMEOUT)

    def _on_notification(self, channel: str, message: str) -> None:
        if self._events.wants(event.PoolListenNotification) and self._listener is not None:
            self._events.emit(
                event.PoolListenNotification(
                    worker_pool=self._pool, channel=channel, message=message, client=self._listener.connection
                )
            )
        if channel == self._probe:
            self._probe_arrived.set()
        elif channel == _MIGRATION:
            self._on_migration()
        elif channel == _CANCELLATION:
            if message == self._session.schema.name:
                self._on_cancellation()
        elif channel == _PAUSE:
            self._on_pause()
        else:
            count = _job_count(message)
            if count is None or count > 0:
                self._on_jobs(count)


def _job_count(message: str) -> int | None:
    """Return the number of new jobs in a notification, if it has one."""
    try:
        return _decode(message).count
    except Exception:  # noqa: BLE001 - any client may notify, with any text
        return None


async def _wait(flag: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await flag.wait()
    except TimeoutError:
        pass
    return flag.is_set()
