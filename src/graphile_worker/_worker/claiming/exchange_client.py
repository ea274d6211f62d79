"""`ExchangeClient`: the connection on which a worker makes its exchanges. It is reopened after an outage.

An exchange has no timeout, and is cancelled only when the worker is given up. Otherwise the worker would not
know whether it was committed, and jobs that it claimed would stay locked without running. After a lost
connection, no job is claimed until the old session has ended and the worker has read which jobs and queues it
has locked.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, nullcontext, suppress
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from graphile_worker._db.connection.connect import is_open
from graphile_worker._db.connection.error_mapping import (
    ErrorKind,
    classify_error,
    is_refusal,
    is_stale_session,
    statement_failed,
)
from graphile_worker._db.connection.session_settings import own_transaction
from graphile_worker._db.queries import exchange as database
from graphile_worker._db.queries.limits import end_lost_shares, end_shares, register_limits
from graphile_worker._db.queries.small_exchange import is_small, prepare_small, small_exchange
from graphile_worker._db.queries.workers import hold_session
from graphile_worker._worker.claiming.outage import OutageError
from graphile_worker.errors import GraphileWorkerError
from graphile_worker.events import PoolExchange

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime

    from graphile_worker._db.connection.connect import Connection
    from graphile_worker._db.connection.session import Session
    from graphile_worker._db.queries.exchange import (
        Answer,
        Backend,
        ClaimedJob,
        ClaimRequest,
        ExchangeReply,
        Fetch,
        Locked,
        Result,
    )
    from graphile_worker._db.queries.small_exchange import SmallExchange
    from graphile_worker._worker.claiming.named_limits import NamedLimits
    from graphile_worker.events import WorkerPool
    from graphile_worker.events.emitter import Events

T = TypeVar("T")
_RENEW_AFTER = 3600.0
_LEAVE_TIMEOUT = 2.0


class PendingExchange(NamedTuple):
    """An exchange that is in flight, or about to be sent."""

    results: list[Result]
    request: ClaimRequest
    sent: float
    """When it was sent, on the monotonic clock."""
    lease_time: float
    """When it was sent, by the clock of `LeaseState`."""
    answer: Awaitable[Answer]
    """A task if it was sent ahead."""
    careful: bool = False
    """Whether each job is recorded and claimed separately."""


def emit_exchange(events: Events, pool: WorkerPool, exchange: PendingExchange, reply: ExchangeReply) -> None:
    """Emit that an exchange was answered."""
    if events.wants(PoolExchange):
        events.emit(
            PoolExchange(
                worker_pool=pool,
                duration=monotonic() - exchange.sent,
                wanted=exchange.request.wanted,
                claimed=len(reply.claimed),
                recorded=len(exchange.results),
            )
        )


class ExchangeClient:
    """Makes a worker's exchanges on a dedicated connection."""

    def __init__(
        self, session: Session, worker_id: str, identifiers: Iterable[str], limits: NamedLimits
    ) -> None:
        self._session = session
        self._worker_id = worker_id
        self._identifiers = list(identifiers)
        self._limits = limits
        self._declares_limits = True  # only once: a newer release may have declared another value since
        self._tasks: dict[int, str] = {}
        self._connection: Connection | None = None
        self._backend: Backend | None = None
        self._fetch: Fetch | None = None
        self._small: SmallExchange | None = None
        self._generation = 0
        self._resources = AsyncExitStack()
        self._renewing = asyncio.Lock()
        self.holds_session = False
        """Whether other workers can see that this session exists."""

    @property
    def connected(self) -> bool:
        """Whether there is an open connection."""
        return self._connection is not None and is_open(self._connection)

    async def connect(self) -> Locked:
        """Connect, and return the jobs and queues that the database has locked by this worker."""
        await self.disconnect()
        schema = self._session.schema
        try:
            connection = await self._resources.enter_async_context(self._session.pool.dedicated())
            async with self._statement_on(connection):
                if self._backend is not None:
                    await database.end_backend(connection, schema, self._backend)
                self._backend = await database.identify_backend(connection, schema)
                self._tasks = await database.register_tasks(connection, schema, self._identifiers)
                if self._limits:
                    await self._register_limits(connection)
                self.holds_session = self._backend is not None and await hold_session(
                    connection, schema, self._worker_id
                )
            self._fetch = self._small = None
            if self._session.pool.prepared_statements:
                self._fetch = await database.prepare(connection, schema)
            async with self._statement_on(connection):
                locked = await database.read_locked(connection, schema, self._worker_id, self._tasks)
            if self._session.pool.is_own and self._session.pool.prepared_statements and self._backend:
                self._small = await prepare_small(connection, schema)
        except Exception as error:
            await self.disconnect()
            raise self._translate(error, unknown=False) from error
        self._connection, self._generation = connection, locked.generation
        return locked

    async def disconnect(self) -> None:
        """Close the connection."""
        resources, self._resources, self._connection = self._resources, AsyncExitStack(), None
        await resources.aclose()

    def abandon(self) -> None:
        """Terminate the connection without waiting for it."""
        if self._connection is not None:
            self._connection.terminate()

    async def exchange(
        self, results: Sequence[Result], request: ClaimRequest, *, careful: bool = False
    ) -> Answer:
        """Record results and claim jobs; job by job if `careful`."""
        small = self._small
        if small is not None and not careful and is_small(results, request):
            return await self._request(
                lambda _: small_exchange(
                    small, self._worker_id, results, request, self._tasks, generation=self._generation
                ),
                may_be_fatal=False,
            )
        return await self._request(
            lambda on: database.exchange(
                on,
                self._session.schema,
                self._worker_id,
                results,
                request,
                self._tasks,
                self._fetch,
                generation=self._generation,
                careful=careful,
            ),
            # The error of a trigger that misses an object looks like the error of an incomplete schema. Only
            # a careful exchange tells them apart.
            may_be_fatal=careful,
        )

    async def leave(self) -> None:
        """Remove the worker's session from the database, because the worker has no locks and claims nothing.

        If this fails, a cleanup removes the session later.
        """
        with suppress(OutageError, GraphileWorkerError, TimeoutError):
            async with asyncio.timeout(_LEAVE_TIMEOUT):
                if self._limits:
                    await self._request(lambda on: end_shares(on, self._session.schema, self._worker_id))
                await self._request(
                    lambda on: database.end_session(
                        on, self._session.schema, self._worker_id, self._generation
                    )
                )

    async def renew(self, claimed: Iterable[ClaimedJob], now: datetime) -> None:
        """Renew locks that are an hour old, before other workers consider them stale."""
        longest_ago = now - timedelta(seconds=_RENEW_AFTER)
        known = list(claimed)
        jobs = [job for job in known if job.locked_at < longest_ago]
        locks = {job.queue.id: job.queue for job in known if job.queue is not None}
        queues = [lock for lock in locks.values() if lock.locked_at < longest_ago]
        if jobs or queues:
            async with self._renewing:
                await self._request(
                    lambda on: database.renew(
                        on,
                        self._session.schema,
                        self._worker_id,
                        jobs,
                        queues,
                        generation=self._generation,
                    )
                )

    async def wait_for_renewal(self) -> None:
        """Wait until no renewal is under way, and claimed jobs have the times of their renewed locks."""
        async with self._renewing:
            pass

    async def refresh_tasks(self) -> bool:
        """Read the task ids again, because a cleanup may have removed a task that was added again later.

        Returns whether they have changed. This also keeps the limits of tasks in order.
        """
        before = self._tasks
        if self._limits:
            await self._request(self._maintain_limits)
        self._tasks = await self._request(
            lambda on: database.register_tasks(on, self._session.schema, self._identifiers)
        )
        return self._tasks != before

    async def _register_limits(self, connection: Connection) -> None:
        registered = await register_limits(
            connection, self._session.schema, self._limits.by_task, declare=self._declares_limits
        )
        self._limits.ids = registered.ids
        self._declares_limits = self._declares_limits and not registered.is_declared

    async def _maintain_limits(self, connection: Connection) -> None:
        if self._declares_limits:
            await self._register_limits(connection)
        await end_lost_shares(connection, self._session.schema)

    async def unlock_queues(self, queues: Mapping[int, datetime]) -> set[int]:
        """Release queues without a claimed job. Returns those that are still locked."""
        return await self._request(
            lambda on: database.unlock_queues(on, self._session.schema, self._worker_id, queues)
        )

    async def _request(
        self, make_request: Callable[[Connection], Awaitable[T]], *, may_be_fatal: bool = True
    ) -> T:
        connection = self._connection
        if connection is None:
            raise OutageError(ConnectionError("there is no connection"), unknown=False)
        try:
            async with self._statement_on(connection):
                return await make_request(connection)
        except Exception as error:
            is_stale = is_stale_session(error)
            lost = classify_error(error) is ErrorKind.LOST and not is_stale
            if lost:
                if is_open(connection):
                    # The request may still be running, so the pool must not reuse the connection.
                    connection.terminate()
                await self.disconnect()
            elif is_stale:
                await self.disconnect()
            raise self._translate(error, unknown=lost, may_be_fatal=may_be_fatal) from error

    def _statement_on(self, connection: Connection) -> AbstractAsyncContextManager[object]:
        if self._session.pool.prepared_statements:
            return nullcontext()
        return own_transaction(connection)  # see Pool.connection

    def _translate(self, error: Exception, *, unknown: bool, may_be_fatal: bool = True) -> Exception:
        explained = (
            error if isinstance(error, GraphileWorkerError) else statement_failed(error, self._session.schema)
        )
        if classify_error(error) is ErrorKind.FATAL and (may_be_fatal or not is_refusal(error)):
            return explained
        return OutageError(error, unknown=unknown, error=explained)
