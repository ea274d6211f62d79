"""Hearing of new jobs at once.

Notifications are a courtesy: a worker that hears nothing polls. What goes wrong here is said once, and mended
in the background.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING

from graphile_worker import events as event
from graphile_worker._db import exchange as database
from graphile_worker._db.cancellations import CHANNEL as _CANCELLATION
from graphile_worker._db.failures import message_of
from graphile_worker._db.listen import Ear, listening
from graphile_worker._runtime.service import Service, pause_after
from graphile_worker.user_code import StrayExitError, is_being_cancelled
from graphile_worker.wording import without_end

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphile_worker._db.connect import Pool
    from graphile_worker._db.session import Session
    from graphile_worker.emitter import Events
    from graphile_worker.events import WorkerPool
    from graphile_worker.logs import ScopedLogger

_NEW_JOBS = "jobs:insert"
_MIGRATION = "worker:migrate"
_PROBE_TIMEOUT = 5.0
_PROBE_INTERVAL = 30.0
_DEAF_INTERVAL = 300.0


class DeafError(Exception):
    """The connection brings no notifications."""


class Notifier(Service):
    """Listens on a connection of its own.

    It proves that it hears by sending a message to itself from another connection: a PgBouncer in transaction
    mode lets LISTEN pass, and swallows what it should bring.

    Args:
        on_jobs: There may be new jobs; called with how many, if that is known.
        on_migration: The schema may have been changed.
        on_cancellation: Jobs may have been cancelled, or we do not hear of them any more.
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
        events: Events,
        logger: ScopedLogger,
    ) -> None:
        super().__init__(logger)
        self._pool = pool
        self._listen_on = listen_on
        self._session = session
        self._on_jobs = on_jobs
        self._on_migration = on_migration
        self._on_cancellation = on_cancellation
        self._events = events
        self._probe = f"graphile-worker:{pool.id}"
        self._answered = asyncio.Event()
        self._attempts = 0
        self._reported = self._heard = False
        self._ear: Ear | None = None
        self.tried = asyncio.Event()
        """Set once it listens, or has found that it cannot for now."""

    @property
    def listens(self) -> bool:
        """Whether there is a connection to hear on."""
        return self._ear is not None

    @property
    def hears(self) -> bool:
        """Whether it is proven that what is told arrives."""
        return self._ear is not None and self._heard

    async def tick(self) -> float:
        """Listen for as long as the connection holds."""
        self._events.emit(event.PoolListenConnecting(worker_pool=self._pool, attempts=self._attempts))
        self._heard = False
        client = None
        channels = (_NEW_JOBS, _MIGRATION, _CANCELLATION, self._probe)
        try:
            async with listening(self._listen_on, channels, self._hear) as ear:
                self._ear, client = ear, ear.connection
                try:
                    self._events.emit(event.PoolListenSuccess(worker_pool=self._pool, client=ear.connection))
                    # What was sent while nobody listened will not come again.
                    self._on_jobs(None)
                    self._on_migration()
                    self._on_cancellation()
                    self.tried.set()
                    await self._keep_probing(ear)
                finally:
                    self._ear = None
                    self._on_cancellation()
                    self._events.emit(event.PoolListenRelease(worker_pool=self._pool, client=ear.connection))
            error: Exception = DeafError("nothing arrives on the connection")
            if ear.closed.is_set():
                error = ConnectionError("the connection was closed")
        except BaseException as raised:
            if isinstance(raised, asyncio.CancelledError) and is_being_cancelled():
                raise
            error = raised if isinstance(raised, Exception) else StrayExitError(raised)
        self._events.emit(event.PoolListenError(worker_pool=self._pool, error=error, client=client))
        self.tried.set()
        return self._pause(error)

    def _pause(self, error: Exception) -> float:
        self._attempts = 1 if self._heard else self._attempts + 1
        if self._heard:
            self.logger.info("The listening connection is lost (%s); connecting again", message_of(error))
        elif not self._reported:
            self._reported = True
            hint = ""
            if isinstance(error, DeafError):
                hint = (
                    " If there is a PgBouncer in between, pass listen_dsn with a direct connection, or "
                    "listen=False (--listen-connection, --no-listen)."
                )
            reason = without_end(message_of(error))
            self.logger.warning(
                "Notifications of new jobs do not arrive (%s), so the queue is polled.%s", reason, hint
            )
        deaf = isinstance(error, DeafError) and not self._heard
        return _DEAF_INTERVAL * random.uniform(0.5, 1.0) if deaf else pause_after(self._attempts)  # noqa: S311

    async def _keep_probing(self, ear: Ear) -> None:
        """Returns when the connection is closed, or nothing is heard."""
        while not ear.closed.is_set():
            if not await self._probes(ear):
                break
            self._heard = True
            self._attempts = 0
            if self._reported:
                self._reported = False
                self.logger.info("Notifications of new jobs arrive")
            await _wait(ear.closed, _PROBE_INTERVAL)

    async def _probes(self, ear: Ear) -> bool:
        self._answered.clear()
        try:
            await self._session.call(lambda on: database.notify(on, self._session.schema, self._probe, ""))
        except Exception:  # noqa: BLE001 - the database is away: nothing is learnt about the ear
            return not ear.closed.is_set()
        return await _wait(self._answered, _PROBE_TIMEOUT)

    def _hear(self, channel: str, message: str) -> None:
        if self._events.wants(event.PoolListenNotification) and self._ear is not None:
            self._events.emit(
                event.PoolListenNotification(
                    worker_pool=self._pool, channel=channel, message=message, client=self._ear.connection
                )
            )
        if channel == self._probe:
            self._answered.set()
        elif channel == _MIGRATION:
            self._on_migration()
        elif channel == _CANCELLATION:
            if message == self._session.schema.name:
                self._on_cancellation()
        else:
            count = _count(message)
            if count is None or count > 0:
                self._on_jobs(count)


def _count(message: str) -> int | None:
    """How many jobs a notification tells of, if it does."""
    try:
        count = json.loads(message)["count"]
    except Exception:  # noqa: BLE001 - anyone may notify, with any text
        return None
    return count if isinstance(count, int) else None


async def _wait(flag: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await flag.wait()
    except TimeoutError:
        pass
    return flag.is_set()
