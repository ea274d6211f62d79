"""Saying that the worker lives, from a thread and a connection of its own.

A task that blocks the event loop must not make its worker look dead.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from graphile_worker._db import workers as database
from graphile_worker._db.connect import end, keep_alive
from graphile_worker._db.failures import server_is_down

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    import asyncpg

    from graphile_worker._db.connect import Connection
    from graphile_worker._db.sql import Schema
    from graphile_worker._runtime.vitals import Vitals
    from graphile_worker.logs import ScopedLogger

    Dial = Callable[[], Awaitable[asyncpg.Connection]]

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 1.0
_GOODBYE = 2.0


class Heartbeat:
    """Runs on the sidecar; the callbacks are called there.

    Args:
        dial: Opens a connection.
        in_transactions: Whether a pooler may hand each transaction to another session.
        schema: Where to say it.
        worker_id: Who lives.
        metadata: What others may want to know of the worker.
        state: How the worker is, to tell that too.
        vitals: Where it is kept what we know.
        on_death: Others have declared the worker dead. It says nothing more until `revive`.
        on_beat: It is recorded that the worker lives.
        on_loss: The connection is lost: the work may have to be given up earlier.
        logger: Where to say that it cannot be said.
    """

    def __init__(
        self,
        *,
        dial: Dial,
        in_transactions: bool,
        schema: Schema,
        worker_id: str,
        metadata: Mapping[str, object],
        state: Callable[[], str],
        vitals: Vitals,
        on_death: Callable[[], None],
        on_beat: Callable[[], None],
        on_loss: Callable[[], None],
        logger: ScopedLogger,
    ) -> None:
        assert vitals.lease is not None  # noqa: S101 - for the type checker
        self._lease = vitals.lease
        self._dial = dial
        self._in_transactions = in_transactions
        self._schema = schema
        self._worker_id = worker_id
        self._metadata = dict(metadata)
        self._state = state
        self._vitals = vitals
        self._on_death = on_death
        self._on_beat = on_beat
        self._on_loss = on_loss
        self._logger = logger
        # No statement of ours takes long. One without an answer is on a connection that leads nowhere.
        self._patience = min(5.0, self._lease.interval)
        self._is_direct = False
        self._pause = _FIRST_PAUSE
        self._complained = False
        self._registered = False
        self._connection: asyncpg.Connection | None = None
        self._woken = asyncio.Event()

    async def begin(self) -> None:
        """Register the worker; an error is the caller's."""
        await self._connect()

    async def beat_for_ever(self) -> None:
        """Beat, through all outages."""
        while True:
            self._woken.clear()
            try:
                if self._connection is None:
                    await self._connect()
                else:
                    await self._beat(self._connection)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is tried again
                await self._lose(error)
                delay = self._pause
                self._pause = min(self._pause * 2, _LONGEST_PAUSE)
            else:
                delay = self._lease.interval
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._woken.wait()

    def revive(self) -> None:
        """What was ours is given up: register again, as somebody who lives."""
        self._registered = False
        self._woken.set()

    async def end(self, *, deregister: bool) -> None:
        """Say goodbye, if nothing is left behind."""
        connection, self._connection = self._connection, None
        self._vitals.has_session = False
        if connection is None:
            return
        if deregister:
            with suppress(Exception):  # then others find it dead, and holding nothing
                async with asyncio.timeout(_GOODBYE), self._statement_on(connection):
                    await database.deregister(connection, self._schema, self._worker_id)
        await end(connection)

    async def _connect(self) -> None:
        async with asyncio.timeout(self._patience):
            connection = await self._dial()
        try:
            keep_alive(connection)
            connection.add_termination_listener(self._on_termination)
            async with asyncio.timeout(self._patience), self._statement_on(connection):
                met = await database.meet(connection, self._schema)
                if met.is_session:
                    await database.hold_session(connection, self._schema, self._worker_id)
        except BaseException:
            connection.terminate()
            raise
        self._connection = connection
        self._is_direct = met.is_direct
        self._metadata["lease"] = {
            "seconds": self._lease.seconds,
            "fast": self._lease.fast if met.is_session else None,
            "epoch": met.epoch,
            "tasks": dict(self._lease.tasks),
        }
        await self._beat(connection, {"lease": self._metadata["lease"]})
        self._vitals.says_sessions = met.is_session

    async def _beat(self, connection: Connection, changes: Mapping[str, object] | None = None) -> None:
        vitals = self._vitals
        if (state := self._state()) != self._metadata.get("state"):
            self._metadata["state"] = state
            changes = {**(changes or {}), "state": state}
        sent = vitals.clock()
        async with asyncio.timeout(self._patience), self._statement_on(connection):
            if not self._registered:
                await database.register(connection, self._schema, self._worker_id, self._metadata)
                self._registered, vitals.dead = True, False
            elif vitals.dead:
                return
            elif not await database.beat(connection, self._schema, self._worker_id, changes or {}):
                vitals.dead = True
                self._on_death()
                return
        vitals.confirm(sent)
        vitals.has_session = True
        self._pause = _FIRST_PAUSE
        if self._complained:
            self._complained = False
            self._logger.info("The heartbeat is recorded again")
        self._on_beat()

    def _statement_on(self, connection: Connection) -> AbstractAsyncContextManager[object]:
        return connection.transaction() if self._in_transactions else nullcontext()

    async def _lose(self, error: Exception) -> None:
        connection, self._connection = self._connection, None
        self._vitals.has_session = False
        self._vitals.server_down = server_is_down(error, is_direct=self._is_direct)
        if connection is not None:
            connection.terminate()
        self._on_loss()
        if not self._complained:
            self._complained = True
            self._logger.warning("The heartbeat cannot be recorded: %s", str(error) or type(error).__name__)

    def _on_termination(self, connection: object) -> None:
        if connection is self._connection:
            self._connection = None
            self._vitals.has_session = False
            self._on_loss()
            self._woken.set()
