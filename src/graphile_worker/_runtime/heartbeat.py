"""Saying that the worker lives, from a thread and a connection of its own.

A task that blocks the event loop must not make its worker look dead.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

from graphile_worker._db import workers as database
from graphile_worker._db.connect import end
from graphile_worker._db.failures import Trouble, message_of, server_is_down, trouble_of
from graphile_worker._db.keepalive import keep_alive
from graphile_worker._db.session_settings import own_transaction
from graphile_worker.user_code import is_being_cancelled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    import asyncpg

    from graphile_worker._db.connect import Connection
    from graphile_worker._db.sql import Schema
    from graphile_worker._runtime.vitals import Vitals
    from graphile_worker.liveness import Health

    Dial = Callable[[], Awaitable[asyncpg.Connection]]

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 1.0
_FIRST_PATIENCE = 30.0
_MOST_UNANSWERED = 2
_GOODBYE = 2.0
_LONGEST_REASON = 500
"""Characters: the row is read for each exchange."""


class Heartbeat:
    """Runs on the sidecar; the callbacks are called there.

    Args:
        dial: Opens a connection.
        in_transactions: Tells whether a pooler may hand each transaction to another session.
        one_host: Whether a refusal can only come from one server.
        schema: Where to say it.
        worker_id: Who lives.
        metadata: What others may want to know of the worker.
        health: Returns the worker's health. Its state and reason are part of each heartbeat.
        vitals: Where it is kept what we know.
        on_death: Others have declared the worker dead. It says nothing more until `revive`.
        on_beat: It is recorded that the worker lives.
        on_loss: The connection is lost: the work may have to be given up earlier.
        say: Logs, given a level and a message; not here, where nothing may block.
    """

    def __init__(
        self,
        *,
        dial: Dial,
        in_transactions: Callable[[], bool],
        one_host: bool,
        schema: Schema,
        worker_id: str,
        metadata: Mapping[str, object],
        health: Callable[[], Health],
        vitals: Vitals,
        on_death: Callable[[], None],
        on_beat: Callable[[], None],
        on_loss: Callable[[], None],
        say: Callable[..., None],
    ) -> None:
        assert vitals.lease is not None  # noqa: S101 - for the type checker
        self._lease = vitals.lease
        self._dial = dial
        self._in_transactions = in_transactions
        self._one_host = one_host
        self._schema = schema
        self._worker_id = worker_id
        self._metadata: dict[str, Any] = dict(metadata)
        self._said: dict[str, Any] = {}
        self._health = health
        self._vitals = vitals
        self._on_death = on_death
        self._on_beat = on_beat
        self._on_loss = on_loss
        self._say = say
        # A beat that is not answered for so long may be on a connection that leads nowhere: try another.
        self._patience = min(5.0, self._lease.interval)
        self._is_direct = False
        self._pause = _FIRST_PAUSE
        self._complained = False
        self._registered = False
        self._connection: asyncpg.Connection | None = None
        self._unanswered: dict[asyncpg.Connection, asyncio.Task[None]] = {}
        """Connections that are kept for all that: the session is there, and the answer may come."""
        self._woken = asyncio.Event()

    async def begin(self) -> None:
        """Register the worker; an error is the caller's."""
        async with asyncio.timeout(_FIRST_PATIENCE):
            await self._beat(await self._connect())

    async def beat_for_ever(self) -> None:
        """Beat, through all outages."""
        while True:
            self._woken.clear()
            try:
                await self._beat_once()
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
                    raise
                self._complain(error)
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
        beating = list(self._unanswered.values())
        self._drop_unanswered()
        if beating:
            await asyncio.wait(beating)
        if connection is None:
            return
        if deregister:
            with suppress(Exception):  # then others find it dead, and holding nothing
                async with asyncio.timeout(_GOODBYE), self._statement_on(connection):
                    await database.deregister(connection, self._schema, self._worker_id)
        await end(connection)

    async def _beat_once(self) -> None:
        connection = self._connection
        if connection is None:
            if len(self._unanswered) >= _MOST_UNANSWERED:  # another one would hang as well
                raise TimeoutError("no answer")
            async with asyncio.timeout(max(self._patience, self._lease.fast - self._lease.interval)):
                connection = await self._connect()
        # Not cancelled if it takes long: that would cost us the session, which others can see.
        beating = asyncio.create_task(self._beat(connection))
        try:
            await asyncio.wait([beating], timeout=self._patience)
        except asyncio.CancelledError:  # it is the end
            await asyncio.wait([beating], timeout=_GOODBYE)
            if not beating.done():
                self._unanswered[connection] = beating
                self._connection = None
            raise
        if beating.done():
            self._answered(connection, beating)
            beating.result()
            return
        self._connection = None
        self._unanswered[connection] = beating
        beating.add_done_callback(lambda task: self._answered(connection, task))
        raise TimeoutError(f"no answer within {self._patience:g} s")

    def _answered(self, connection: asyncpg.Connection, beating: asyncio.Task[None]) -> None:
        self._unanswered.pop(connection, None)
        error = None if beating.cancelled() else beating.exception()
        if beating.cancelled() or (error is not None and trouble_of(error) is Trouble.LOST):
            connection.terminate()
            if self._connection is connection:
                self._connection = None
        elif self._connection is None:
            self._connection = connection  # late, but there
        elif self._connection is not connection:
            connection.terminate()
        self._see_sessions()

    async def _connect(self) -> asyncpg.Connection:
        connection = await self._dial()
        try:
            keep_alive(connection)
            connection.add_termination_listener(self._on_termination)
            async with self._statement_on(connection):
                met = await database.meet(connection, self._schema)
                held = met.is_session and await database.hold_session(
                    connection, self._schema, self._worker_id
                )
                if not self._in_transactions():
                    await database.limit_waits(connection, self._schema, self._patience)
        except BaseException:
            connection.terminate()
            raise
        if self._connection is not None:  # one that was not answered was, meanwhile
            self._connection.terminate()
        self._connection = connection
        self._is_direct = met.is_direct and self._one_host
        self._metadata["lease"] = {
            "seconds": self._lease.seconds,
            "fast": self._lease.fast if held else None,
            "epoch": met.epoch,
            "tasks": dict(self._lease.tasks),
        }
        return connection

    async def _beat(self, connection: asyncpg.Connection) -> None:
        vitals, lease, health = self._vitals, self._metadata["lease"], self._health()
        state, reason = health.state, health.reason and health.reason[:_LONGEST_REASON]
        changes: dict[str, object] = {}
        if lease != self._said.get("lease"):
            changes["lease"] = lease
        if state != self._said.get("state"):
            changes["state"] = state
        if reason != self._said.get("reason"):
            changes["reason"] = reason
        sent = vitals.clock()
        async with self._statement_on(connection):
            if self._in_transactions():
                await database.limit_waits(connection, self._schema, self._patience, in_transaction=True)
            if not self._registered:
                whole = {**self._metadata, "state": state, "reason": reason}
                await database.register(connection, self._schema, self._worker_id, whole)
                self._registered, vitals.dead = True, False
            elif vitals.dead:
                return
            elif not await database.beat(connection, self._schema, self._worker_id, changes):
                vitals.dead = True
                self._on_death()
                return
        if vitals.dead:  # an answer that comes too late
            return
        self._said.update(changes)
        vitals.confirm(sent)
        vitals.says_sessions = self._said["lease"]["fast"] is not None
        self._drop_unanswered(but=connection)
        self._see_sessions()
        self._pause = _FIRST_PAUSE
        if self._complained:
            self._complained = False
            self._say(logging.INFO, "The heartbeat is recorded again")
        self._on_beat()

    def _drop_unanswered(self, but: asyncpg.Connection | None = None) -> None:
        """There is a better connection, or no need for one."""
        for connection in list(self._unanswered):
            if connection is not but:
                connection.terminate()  # and with it ends the beat

    def _see_sessions(self) -> None:
        had = self._vitals.has_session
        open_ones = [connection for connection in self._unanswered if not connection.is_closed()]
        self._vitals.has_session = self._connection is not None or bool(open_ones)
        if had and not self._vitals.has_session:
            self._on_loss()

    def _statement_on(self, connection: Connection) -> AbstractAsyncContextManager[object]:
        return own_transaction(connection) if self._in_transactions() else nullcontext()

    def _complain(self, error: BaseException) -> None:
        self._vitals.server_down = server_is_down(error, is_direct=self._is_direct)
        if self._connection is not None and self._connection.is_closed():
            self._connection = None
        self._see_sessions()
        self._on_loss()
        if not self._complained:
            self._complained = True
            self._say(logging.WARNING, "The heartbeat cannot be recorded: %s", message_of(error))

    def _on_termination(self, connection: object) -> None:
        if connection is self._connection:
            self._connection = None
            self._woken.set()
        self._see_sessions()
