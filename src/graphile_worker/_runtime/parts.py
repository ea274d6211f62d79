"""The parts of a worker, put together."""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from graphile_worker import __version__
from graphile_worker._db.connect import Pool
from graphile_worker._db.dialled import DialledConnection
from graphile_worker._db.session import Session
from graphile_worker._runtime.abandoned import AbandonedThreads
from graphile_worker._runtime.cancelling import Cancelling
from graphile_worker._runtime.clock import Clock
from graphile_worker._runtime.exchanger import Exchanger
from graphile_worker._runtime.executor import Executor
from graphile_worker._runtime.flags import ForbiddenFlags
from graphile_worker._runtime.handlers import read_handlers, read_specs
from graphile_worker._runtime.health import HealthCheck
from graphile_worker._runtime.in_hand import InHand
from graphile_worker._runtime.job_log import JobLog
from graphile_worker._runtime.lifeline import Lifeline
from graphile_worker._runtime.notifier import Notifier
from graphile_worker._runtime.processes import Processes
from graphile_worker._runtime.relay import Relay
from graphile_worker._runtime.scheduler import Scheduler
from graphile_worker._runtime.sidecar import Sidecar, SidecarEndedError
from graphile_worker._runtime.stale_locks import StaleLocks
from graphile_worker._runtime.sweeping import Sweeping
from graphile_worker._runtime.vitals import Vitals
from graphile_worker._runtime.worker import Worker
from graphile_worker.client import WorkerUtils, find_schema
from graphile_worker.context import Surroundings
from graphile_worker.errors import ConfigurationError
from graphile_worker.events import WorkerPool
from graphile_worker.logs import RelayedLogger, ScopedLogger
from graphile_worker.recovery import Policy, Sweeper

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from graphile_worker._runtime.handlers import Handler, Tasks
    from graphile_worker.options import WorkerOptions

_ID_BYTES = 9
_GOODBYE = 2.0


class Parts:
    """All that a worker consists of.

    Args:
        tasks: The function for each task.
        options: How the worker is to run.
        on_migration: Called when the schema may have been changed.
        check_revisions: Looks whether it was.
    """

    def __init__(
        self,
        tasks: Tasks,
        options: WorkerOptions,
        *,
        on_migration: Callable[[], None],
        check_revisions: Callable[[], Awaitable[None]],
    ) -> None:
        handlers = read_handlers(tasks, on_invalid_payload=options.on_invalid_payload)
        _check_task_leases(options, handlers)
        worker_id = f"python-{secrets.token_hex(_ID_BYTES)}"
        self._options, self._tasks = options, tasks
        self.logger = ScopedLogger(
            options.logger or logging.getLogger("graphile_worker"),
            {"label": "worker", "worker_id": worker_id},
        )
        self.session = _open_session(options, self.logger)
        self._listen_on = Pool(options.listen_dsn, max_size=1) if options.listen_dsn else self.session.pool
        self.pool = WorkerPool(worker_id, self.session.schema.name, options.concurrency, tuple(handlers))
        self.utils = WorkerUtils.on_session(
            self.session, use_local_time=options.use_local_time, middleware=options.middleware
        )
        self._flags = ForbiddenFlags(options.forbidden_flags, self.logger)
        self._vitals = Vitals(options.terms)
        self._sidecar = Sidecar()
        self.worker = self._make_worker(handlers)
        self._lifeline = self._make_lifeline()
        self.worker.on_reconciled = self._lifeline.revive
        self.worker.on_saved = self._leave
        self._sweeping = self._make_sweeping()
        self._cancelling = self._make_cancelling()
        self._scheduler = self._make_scheduler()
        self.notifier = self._make_notifier(on_migration)
        self._stale_locks = self._make_stale_locks(check_revisions)
        found = (self.worker, self._cancelling, self._scheduler, self._stale_locks, self.notifier)
        self._services = [service for service in (*found, self._sweeping) if service is not None]
        self.health = HealthCheck(
            pool=self.pool,
            worker=self.worker,
            notifier=self.notifier,
            vitals=self._vitals,
            flags=self._flags,
            connections=self.session.pool,
            services=self._services,
            revive=self._revive,
            sidecar=self._sidecar,
            address=options.health,
            logger=self.logger,
        )
        # The emitter may be the caller's: it listens there only if there is a worker to close it again.
        self._job_log = JobLog(options.events, self.logger)

    def _make_worker(self, handlers: Mapping[str, Handler]) -> Worker:
        options = self._options
        self._clock = clock = Clock(local=options.use_local_time)
        self.surroundings = surroundings = Surroundings(
            worker_id=self.pool.id,
            utils=self.utils,
            logger=self.logger,
            now=clock.now,
            warned_apart=options.task_leases,
            specs=read_specs(self._tasks),
        )
        self._processes = Processes(
            surroundings,
            most=options.max_task_processes,
            jobs_each=options.max_jobs_per_task_process,
            on_invalid_payload=options.on_invalid_payload,
            vitals=self._vitals,
        )
        in_hand = self._in_hand = InHand(
            pool=self.pool,
            options=options,
            executor=Executor(
                handlers,
                surroundings,
                options.interrupted_delay,
                options.middleware,
                self._processes,
                AbandonedThreads(options.concurrency),
            ),
            vitals=self._vitals,
            events=options.events,
            logger=self.logger,
        )
        return Worker(
            pool=self.pool,
            options=options,
            exchanger=Exchanger(self.session, self.pool.id, handlers),
            in_hand=in_hand,
            vitals=self._vitals,
            flags=self._flags,
            clock=clock,
            events=options.events,
            logger=self.logger,
        )

    def _make_lifeline(self) -> Lifeline:
        return Lifeline(
            pool=self.pool,
            version=__version__,
            beat_on=self._listen_on,
            schema=self.session.schema,
            sidecar=self._sidecar,
            vitals=self._vitals,
            worker=self.worker,
            health=lambda: self.health.read(),  # noqa: PLW0108 - made after this
            may_exit=self._options.exit_if_stuck,
            logger=self.logger,
        )

    def _make_notifier(self, on_migration: Callable[[], None]) -> Notifier:
        return Notifier(
            pool=self.pool,
            listen_on=self._listen_on,
            session=self.session,
            on_jobs=self.worker.look,
            on_migration=on_migration,
            on_cancellation=self._cancelling.wake,
            events=self._options.events,
            logger=self.logger,
        )

    def _make_cancelling(self) -> Cancelling:
        return Cancelling(
            worker_id=self.pool.id,
            in_hand=self._in_hand,
            session=self.session,
            poll_interval=self._options.poll_interval,
            hears=lambda: self.notifier.hears,
            exchanged=lambda: self.worker.answered,
            logger=self.logger,
        )

    def _make_stale_locks(self, check_revisions: Callable[[], Awaitable[None]]) -> StaleLocks:
        return StaleLocks(
            pool=self.pool,
            options=self._options,
            session=self.session,
            check_revisions=check_revisions,
            events=self._options.events,
            logger=self.logger,
        )

    def _make_sweeping(self) -> Sweeping | None:
        options = self._options
        if options.terms is None:
            return None
        relay = Relay()
        policy = Policy(
            delay=options.recovery_delay,
            refund=options.refund_attempt_on_recovery,
            # The user's code expects the worker's event loop.
            on_recovery=options.on_recovery and partial(relay.run, options.on_recovery),
        )
        logger = RelayedLogger(self.logger.logger, self.logger.extra, relay.call)
        connection = DialledConnection(self.session.pool)
        session = Session(self.session.schema, connection, logger)
        return Sweeping(
            pool=self.pool,
            sweeper=Sweeper(session=session, name=self.pool.id, own_id=self.pool.id, policy=policy),
            connection=connection,
            relay=relay,
            events=options.events,
            logger=logger,
        )

    def _make_scheduler(self) -> Scheduler | None:
        options = self._options
        if options.once or not options.cron_items:
            return None
        return Scheduler(
            pool=self.pool,
            items=options.cron_items,
            session=self.session,
            utils=self.utils,
            specs=read_specs(self._tasks),
            clock=self._clock,
            events=options.events,
            logger=self.logger,
        )

    async def connect(self) -> None:
        """Everything that may fail; an error is the caller's."""
        self._sidecar.start()
        await self.health.start()
        await self._lifeline.start()
        if self._sweeping is not None:
            await self._sweeping.find_out()
        await self.worker.connect()
        await self._cancelling.look()  # before we claim what was cancelled while nobody worked
        if self._options.once:
            await self._stale_locks.unlock()
        self._job_log.connected(self.pool.id, self.pool.tasks)

    def start(self) -> None:
        """Begin."""
        self.health.phase = "running"
        self.worker.start()
        self._cancelling.start()
        if self._sweeping is not None:
            self._sidecar.call(self._sweeping.start)
        if not self._options.once:
            self._stale_locks.start()
        if self._scheduler is not None:
            self._scheduler.announce()
            self._scheduler.start()
        if self._options.listen:
            self.notifier.start()

    def _revive(self) -> None:
        """Start services again that have ended, such as one whose task was cancelled by mistake."""
        # If the event loop is being closed all tasks are cancelled, and the worker's too.
        if self.worker.has_ended or self.worker.is_being_cancelled:
            return
        for service in self._services:
            if service.has_ended:
                self.logger.error("The %s ended without being told to, and starts again", service.name)
                if service is self._sweeping:
                    self._sidecar.call(service.start)
                else:
                    service.start()

    def end_schedule(self) -> None:
        """Add no more jobs of recurring tasks."""
        if self._scheduler is not None:
            self._scheduler.cancel()

    async def close(self) -> None:
        """End them, whether or not they began."""
        if self._scheduler is not None:
            await self._scheduler.stop()
        await self.notifier.stop()
        await self._stale_locks.stop()
        await self._cancelling.stop()
        if self._sweeping is not None and self.health.phase != "starting":
            with suppress(SidecarEndedError):  # the event loop is being closed, and took it along
                await self._sidecar.run(self._sweeping.stop())
        await self._flags.close()
        await self.worker.end()
        await self._let_go()
        self._job_log.close()
        if not self.worker.running:
            await self.session.pool.close()
            await self._listen_on.close()

    async def _let_go(self) -> None:
        await self._processes.closed()
        # The last to go: until all is recorded others must not take it.
        await self._lifeline.stop(deregister=self.worker.leaves_nothing)
        self.health.phase = "stopped"
        await self.health.stop()
        await self._sidecar.stop()

    async def _leave(self) -> None:
        """The event loop is being closed, and nobody called `close`."""
        await self._let_go()
        with suppress(TimeoutError):  # somebody has a connection, and does not give it back
            async with asyncio.timeout(_GOODBYE):
                await self.session.pool.close()
                await self._listen_on.close()


def _check_task_leases(options: WorkerOptions, handlers: Mapping[str, Handler]) -> None:
    if unknown := options.task_leases.keys() - handlers.keys():
        names = ", ".join(sorted(map(str, unknown)))
        raise ConfigurationError(f"task_leases names tasks that this worker does not have: {names}.")


def _open_session(options: WorkerOptions, logger: ScopedLogger) -> Session:
    pool = Pool(
        options.dsn,
        pool=options.pool,
        max_size=options.max_pool_size,
        prepared_statements=options.prepared_statements,
        dedicated=options.own_connections,
        timeout=options.pool_timeout,
        logger=logger,
    )
    return Session(find_schema(options.schema), pool, logger, options.max_payload_size)
