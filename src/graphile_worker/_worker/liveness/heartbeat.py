"""`Heartbeat`: records heartbeats, from its own thread and connection.

So a worker does not look dead while a task blocks its event loop.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

from graphile_worker._base.text import without_end
from graphile_worker._base.user_code import is_being_cancelled
from graphile_worker._db.connection.connect import close_connection
from graphile_worker._db.connection.error_mapping import ErrorKind, classify_error, message_of, server_is_down
from graphile_worker._db.connection.keepalive import keep_alive
from graphile_worker._db.connection.session_settings import own_transaction
from graphile_worker._db.queries import workers as database

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    import asyncpg

    from graphile_worker._db.connection.connect import Connection
    from graphile_worker._db.sql_files import Schema
    from graphile_worker._worker.liveness.lease_state import LeaseState
    from graphile_worker.workers import Health

    Dial = Callable[[], Awaitable[asyncpg.Connection]]

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 1.0
_REGISTER_TIMEOUT = 30.0
_MAX_UNANSWERED = 2
_DEREGISTER_TIMEOUT = 2.0
_MAX_REASON_LENGTH = 500
"""Characters. The limit is low because each exchange reads the row."""


class Heartbeat:
    """Records heartbeats on the background thread, and calls the callbacks there.

    Args:
        dial: Opens a connection.
        in_transactions: Returns whether a pooler may use another session for each transaction.
        one_host: Whether the connection string names one server only.
        schema: The schema of the queue.
        worker_id: The worker's id.
        metadata: The description of the worker, for its row.
        health: Returns the worker's health. Its state and reason are part of each heartbeat.
        lease_state: The state of the worker's lease, which this class updates.
        on_death: Called when another worker has declared this one dead. No heartbeat is recorded after that
            until `revive`.
        on_beat: Called when a heartbeat is recorded.
        on_loss: Called when the connection is lost, because the lease may end earlier then.
        on_failure: Called with the reason when heartbeats begin to fail.
        on_recovery: Called when they are recorded again.
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
        lease_state: LeaseState,
        on_death: Callable[[], None],
        on_beat: Callable[[], None],
        on_loss: Callable[[], None],
        on_failure: Callable[[str], None],
        on_recovery: Callable[[], None],
    ) -> None:
        assert lease_state.lease is not None  # noqa: S101 - for the type checker
        self._lease = lease_state.lease
        self._dial = dial
        self._in_transactions = in_transactions
        self._one_host = one_host
        self._schema = schema
        self._worker_id = worker_id
        self._metadata: dict[str, Any] = dict(metadata)
        self._recorded: dict[str, Any] = {}
        self._health = health
        self._lease_state = lease_state
        self._on_death = on_death
        self._on_beat = on_beat
        self._on_loss = on_loss
        self._on_failure, self._on_recovery = on_failure, on_recovery
        # After so many seconds without an answer, the connection may be dead without being closed. The next
        # heartbeat then tries another connection.
        self._answer_timeout = min(5.0, self._lease.interval)
        self._is_direct = False
        self._pause = _FIRST_PAUSE
        self._logged_failure = False
        self._registered = False
        self._connection: asyncpg.Connection | None = None
        self._unanswered: dict[asyncpg.Connection, asyncio.Task[None]] = {}
        """Connections without an answer. They are kept, because their sessions exist and may still answer."""
        self._woken = asyncio.Event()

    async def begin(self) -> None:
        """Register the worker. Raises the error if that fails."""
        async with asyncio.timeout(_REGISTER_TIMEOUT):
            await self._beat(await self._connect())

    async def run(self) -> None:
        """Record heartbeats until cancelled, and keep trying during outages."""
        while True:
            self._woken.clear()
            try:
                await self._beat_once()
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
                    raise
                self._handle_failure(error)
                delay = self._pause
                self._pause = min(self._pause * 2, _LONGEST_PAUSE)
            else:
                delay = self._lease.interval
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._woken.wait()

    def revive(self) -> None:
        """Register the worker again, after it was declared dead and has given up its jobs."""
        self._registered = False
        self._woken.set()

    async def end(self, *, deregister: bool) -> None:
        """Close the connections.

        Args:
            deregister: Whether to remove the worker's row, because the worker holds no locks.
        """
        connection, self._connection = self._connection, None
        beating = list(self._unanswered.values())
        self._drop_unanswered()
        if beating:
            await asyncio.wait(beating)
        if connection is None:
            return
        if deregister:
            with suppress(Exception):  # if it fails, other workers will find this one dead, without locks
                async with asyncio.timeout(_DEREGISTER_TIMEOUT), self._statement_on(connection):
                    await database.deregister(connection, self._schema, self._worker_id)
        await close_connection(connection)

    async def _beat_once(self) -> None:
        connection = self._connection
        if connection is None:
            if len(self._unanswered) >= _MAX_UNANSWERED:  # another connection would get no answer either
                raise TimeoutError("no answer")
            async with asyncio.timeout(max(self._answer_timeout, self._lease.fast - self._lease.interval)):
                connection = await self._connect()
        # A slow heartbeat is not cancelled, because that would end the session, which other workers can see.
        beating = asyncio.create_task(self._beat(connection))
        try:
            await asyncio.wait([beating], timeout=self._answer_timeout)
        except asyncio.CancelledError:  # the heartbeat is ending
            await asyncio.wait([beating], timeout=_DEREGISTER_TIMEOUT)
            if not beating.done():
                self._unanswered[connection] = beating
                self._connection = None
            raise
        if beating.done():
            self._on_answer(connection, beating)
            beating.result()
            return
        self._connection = None
        self._unanswered[connection] = beating
        beating.add_done_callback(lambda task: self._on_answer(connection, task))
        raise TimeoutError(f"no answer within {self._answer_timeout:g} s")

    def _on_answer(self, connection: asyncpg.Connection, beating: asyncio.Task[None]) -> None:
        self._unanswered.pop(connection, None)
        error = None if beating.cancelled() else beating.exception()
        if beating.cancelled() or (error is not None and classify_error(error) is ErrorKind.LOST):
            connection.terminate()
            if self._connection is connection:
                self._connection = None
        elif self._connection is None:
            self._connection = connection  # it has answered late
            if error is None:
                # The lease counts from when that heartbeat was sent, so it may end soon. The next one is due.
                self._woken.set()
        elif self._connection is not connection:
            connection.terminate()
        self._update_has_session()

    async def _connect(self) -> asyncpg.Connection:
        connection = await self._dial()
        try:
            keep_alive(connection)
            connection.add_termination_listener(self._on_termination)
            async with self._statement_on(connection):
                server = await database.identify_server(connection, self._schema)
                held = server.is_session and await database.hold_session(
                    connection, self._schema, self._worker_id
                )
                if not self._in_transactions():
                    await database.set_lock_timeout(connection, self._schema, self._answer_timeout)
        except BaseException:
            connection.terminate()
            raise
        if self._connection is not None:  # an unanswered connection has answered in the meantime
            self._connection.terminate()
        self._connection = connection
        self._is_direct = server.is_direct and self._one_host
        self._metadata["lease"] = {
            "seconds": self._lease.seconds,
            "fast": self._lease.fast if held else None,
            "epoch": server.epoch,
            "tasks": dict(self._lease.tasks),
        }
        return connection

    async def _beat(self, connection: asyncpg.Connection) -> None:
        lease_state, lease, health = self._lease_state, self._metadata["lease"], self._health()
        state, reason = health.state, health.reason and health.reason[:_MAX_REASON_LENGTH]
        changes: dict[str, object] = {}
        if lease != self._recorded.get("lease"):
            changes["lease"] = lease
        if state != self._recorded.get("state"):
            changes["state"] = state
        if reason != self._recorded.get("reason"):
            changes["reason"] = reason
        sent = lease_state.clock()
        async with self._statement_on(connection):
            if self._in_transactions():
                await database.set_lock_timeout(
                    connection, self._schema, self._answer_timeout, in_transaction=True
                )
            if not self._registered:
                row = {**self._metadata, "state": state, "reason": reason}
                await database.register(connection, self._schema, self._worker_id, row)
                self._registered, lease_state.dead = True, False
            elif lease_state.dead:
                return
            elif not await database.record_heartbeat(connection, self._schema, self._worker_id, changes):
                lease_state.dead = True
                self._on_death()
                return
        if lease_state.dead:  # the answer came after the worker was declared dead
            return
        self._recorded.update(changes)
        lease_state.confirm(sent)
        lease_state.sessions_announced = self._recorded["lease"]["fast"] is not None
        self._drop_unanswered(keep=connection)
        self._update_has_session()
        self._pause = _FIRST_PAUSE
        if self._logged_failure:
            self._logged_failure = False
            self._on_recovery()
        self._on_beat()

    def _drop_unanswered(self, keep: asyncpg.Connection | None = None) -> None:
        """Terminate connections without an answer, because another one answers or none is needed."""
        for connection in list(self._unanswered):
            if connection is not keep:
                connection.terminate()  # which also ends its heartbeat

    def _update_has_session(self) -> None:
        had_session = self._lease_state.has_session
        is_any_open = any(not connection.is_closed() for connection in self._unanswered)
        self._lease_state.has_session = self._connection is not None or is_any_open
        if had_session and not self._lease_state.has_session:
            self._on_loss()

    def _statement_on(self, connection: Connection) -> AbstractAsyncContextManager[object]:
        return own_transaction(connection) if self._in_transactions() else nullcontext()

    def _handle_failure(self, error: BaseException) -> None:
        self._lease_state.server_down = server_is_down(error, is_direct=self._is_direct)
        if self._connection is not None and self._connection.is_closed():
            self._connection = None
        self._update_has_session()
        self._on_loss()
        if not self._logged_failure:
            self._logged_failure = True
            self._on_failure(f"cannot record a heartbeat: {without_end(message_of(error))}")

    def _on_termination(self, connection: object) -> None:
        if connection is self._connection:
            self._connection = None
            self._woken.set()
        self._update_has_session()
