"""`Parts`: builds a worker from its parts, and starts and closes them in the right order."""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from graphile_worker import __version__
from graphile_worker._base.background_thread import BackgroundThread, BackgroundThreadEndedError
from graphile_worker._base.logs import RelayedLogger, ScopedLogger
from graphile_worker._db.connection.connect import Pool
from graphile_worker._db.connection.dedicated import SingleConnectionPool
from graphile_worker._db.connection.session import Session
from graphile_worker._recovery.sweeper import RecoveryPolicy, Sweeper
from graphile_worker._worker.claiming.claim_planner import ClaimPlanner
from graphile_worker._worker.claiming.clock import Clock
from graphile_worker._worker.claiming.exchange_client import ExchangeClient
from graphile_worker._worker.claiming.forbidden_flags import ForbiddenFlags
from graphile_worker._worker.claiming.named_limits import NamedLimits
from graphile_worker._worker.claiming.outage import OutageLog
from graphile_worker._worker.execution.abandoned_threads import AbandonedThreads
from graphile_worker._worker.execution.attempts import AttemptRecorder
from graphile_worker._worker.execution.claimed_jobs import ClaimedJobs
from graphile_worker._worker.execution.completion import Completions
from graphile_worker._worker.execution.executor import Executor
from graphile_worker._worker.execution.handlers import read_handlers, read_specs
from graphile_worker._worker.execution.job_log import JobLog
from graphile_worker._worker.execution.tally import Tally
from graphile_worker._worker.liveness.fencing import Fencing
from graphile_worker._worker.liveness.health_server import HealthCheck
from graphile_worker._worker.liveness.lease_state import LeaseState
from graphile_worker._worker.liveness.loop_relay import LoopRelay
from graphile_worker._worker.loop import Worker
from graphile_worker._worker.maintenance.cancellations import Cancellations
from graphile_worker._worker.maintenance.cron_scheduler import Scheduler
from graphile_worker._worker.maintenance.history_partitions import HistoryPartitions
from graphile_worker._worker.maintenance.notifier import Notifier
from graphile_worker._worker.maintenance.pauses import Pauses
from graphile_worker._worker.maintenance.progress_service import ProgressService
from graphile_worker._worker.maintenance.queue_watch import QueueWatch
from graphile_worker._worker.maintenance.stale_locks import StaleLocks
from graphile_worker._worker.maintenance.statistics_service import StatisticsService
from graphile_worker._worker.maintenance.sweep_service import SweepService
from graphile_worker._worker.processes.pool import Processes
from graphile_worker.client import WorkerUtils, find_schema
from graphile_worker.context import WorkerEnvironment
from graphile_worker.errors import ConfigurationError
from graphile_worker.events import WorkerPool
from graphile_worker.middleware import BlockedLoop
from graphile_worker.middleware.attached import AttachedWorker
from graphile_worker.tasks import task_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from contextlib import AbstractContextManager

    from graphile_worker._worker.execution.handlers import Handler, Tasks
    from graphile_worker._worker.options import WorkerOptions
    from graphile_worker._worker.service import Service

_ID_BYTES = 9
_CLOSE_TIMEOUT = 2.0
"""Seconds to wait for connections that tasks still hold, while the event loop is being closed."""


class Parts:
    """The parts of a worker.

    Args:
        tasks: The functions by task identifier.
        options: The worker's options.
        on_migration: Called when a migration may have changed the schema.
        check_revisions: Checks whether this version still supports the schema.
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
        self._limits = _read_limits(options, tasks)
        worker_id = f"python-{secrets.token_hex(_ID_BYTES)}"
        self._options, self._tasks = options, tasks
        self.logger = ScopedLogger(
            options.logger or logging.getLogger("graphile_worker"),
            {"label": "worker", "worker_id": worker_id},
        )
        self.session = _open_session(options, self.logger)
        self._listen_pool = Pool(options.listen_dsn, max_size=1) if options.listen_dsn else self.session.pool
        self.pool = WorkerPool(worker_id, self.session.schema.name, options.concurrency, tuple(handlers))
        self.utils = _make_client(options, self.session)
        self._flags = ForbiddenFlags(options.forbidden_flags, self.logger)
        self._lease_state = LeaseState(options.terms)
        self._background_thread = BackgroundThread()
        self._outage_log = OutageLog(self.logger)
        self.worker = self._make_worker(handlers)
        self._fencing = self._make_fencing()
        self.worker.on_reconciled = self._fencing.revive
        self.worker.on_saved = self._close_with_loop
        self._sweep_service = self._make_sweep_service()
        self._cancellations = self._make_cancellations()
        self._pauses = self._make_pauses()
        self._scheduler = self._make_scheduler()
        self.notifier = self._make_notifier(on_migration)
        self.worker.is_notified = lambda: self.notifier.is_receiving
        self._stale_locks = self._make_stale_locks(check_revisions)
        self._history = self._make_history()
        self._statistics = self._make_statistics()
        self._queue_watch = self._make_queue_watch()
        self._progress = self.environment.progress = self._make_progress()
        self._services = self._all_services()
        self.health = self._make_health()
        # Last, because the emitter may be the caller's: if an error occurs above, no listener stays in it.
        # Integrations report an error before it is logged, because they may report logged errors too.
        self._attached = self._attach_middleware()
        self._job_log = JobLog(options.events, self.logger)

    def _make_health(self) -> HealthCheck:
        return HealthCheck(
            pool=self.pool,
            worker=self.worker,
            claimed_jobs=self._claimed_jobs,
            notifier=self.notifier,
            lease_state=self._lease_state,
            flags=self._flags,
            connections=self.session.pool,
            services=self._services,
            restart_services=self._restart_services,
            background_thread=self._background_thread,
            address=self._options.health,
            logger=self.logger,
            # It warns earlier, and names the job.
            logs_blocked_loop=not any(isinstance(one, BlockedLoop) for one in self._options.middleware),
        )

    def _attach_middleware(self) -> AttachedWorker:
        pages: dict[str, Callable[[], tuple[str, bytes]]] = {}
        attached = AttachedWorker(
            self.pool,
            self._options.events,
            self.health.read,
            self._clock.now,
            pages,
            lambda: self.session.pool.server,
            self._options.cron_items or (),
            self._claimed_jobs.slots.recorded_listeners,
        )
        try:
            for middleware in self._options.middleware:
                middleware.attach(attached)
        except BaseException:
            attached.detach()
            raise
        for path, page in pages.items():
            self.health.serve(path, page)
        return attached

    def own_work(self) -> AbstractContextManager[object]:
        """Return the context in which the worker does its own work: what middleware wants around it."""
        return self._attached.own_work()

    def _all_services(self) -> list[Service]:
        services = (
            self.worker,
            self._cancellations,
            self._pauses,
            self._scheduler,
            self._stale_locks,
            self._history,
            self._statistics,
            self._queue_watch,
            self._progress,
            self.notifier,
            self._sweep_service,
        )
        return [service for service in services if service is not None]

    def _make_worker(self, handlers: Mapping[str, Handler]) -> Worker:
        options = self._options
        self._clock = clock = Clock(local=options.use_local_time)
        exchange_client = ExchangeClient(self.session, self.pool.id, handlers, self._limits)
        completions = Completions(self.session, self.pool.id)
        completions.wait_for_renewal = exchange_client.wait_for_renewal
        self._attempts = AttemptRecorder(options.history, self._tasks, clock)
        completions.keep_attempt = self._attempts.record_completion
        self.environment = environment = WorkerEnvironment(
            worker_id=self.pool.id,
            utils=self.utils,
            logger=self.logger,
            now=clock.now,
            separate_tasks=options.task_leases,
            specs=read_specs(self._tasks),
            completions=completions,
        )
        self._processes = Processes(
            environment,
            max_processes=options.max_task_processes,
            max_jobs_each=options.max_jobs_per_task_process,
            on_invalid_payload=options.on_invalid_payload,
            lease_state=self._lease_state,
        )
        self._tally = Tally(clock.database_now, clock.now) if options.statistics else None
        claimed_jobs = self._claimed_jobs = ClaimedJobs(
            pool=self.pool,
            options=options,
            executor=Executor(
                handlers,
                environment,
                options.interrupted_delay,
                options.middleware,
                self._processes,
                AbandonedThreads(options.concurrency),
            ),
            attempts=self._attempts,
            lease_state=self._lease_state,
            logger=self.logger,
            tally=self._tally,
            worker_limits=_read_worker_limits(self._tasks),
        )
        return Worker(
            pool=self.pool,
            options=options,
            exchange_client=exchange_client,
            claimed_jobs=claimed_jobs,
            planner=ClaimPlanner(
                poll_interval=options.poll_interval,
                prefetch=claimed_jobs.prefetch,
                limiter=claimed_jobs.claim_limiter,
                has_named_limits=bool(self._limits),
            ),
            lease_state=self._lease_state,
            flags=self._flags,
            clock=clock,
            outage_log=self._outage_log,
            logger=self.logger,
            limits=self._limits,
        )

    def _make_fencing(self) -> Fencing:
        return Fencing(
            pool=self.pool,
            version=__version__,
            heartbeat_pool=self._listen_pool,
            schema=self.session.schema,
            background_thread=self._background_thread,
            lease_state=self._lease_state,
            worker=self.worker,
            health=lambda: self.health.read(),  # noqa: PLW0108 - created later
            may_exit=self._options.exit_if_stuck,
            outage_log=self._outage_log,
            logger=self.logger,
        )

    def _make_notifier(self, on_migration: Callable[[], None]) -> Notifier:
        return Notifier(
            pool=self.pool,
            listen_on=self._listen_pool,
            session=self.session,
            on_jobs=self.worker.notify,
            on_migration=on_migration,
            on_cancellation=self._cancellations.wake,
            on_pause=self._pauses.wake,
            events=self._options.events,
            outage_log=self._outage_log,
            logger=self.logger,
        )

    def _make_cancellations(self) -> Cancellations:
        return Cancellations(
            worker_id=self.pool.id,
            claimed_jobs=self._claimed_jobs,
            session=self.session,
            poll_interval=self._options.poll_interval,
            is_notified=lambda: self.notifier.is_receiving,
            last_exchange=lambda: self.worker.last_exchange_sent_at,
            logger=self.logger,
        )

    def _make_pauses(self) -> Pauses:
        return Pauses(
            tasks=self.pool.tasks,
            claimed_jobs=self._claimed_jobs,
            session=self.session,
            poll_interval=self._options.poll_interval,
            is_notified=lambda: self.notifier.is_receiving,
            turn=self._cancellations.turn,
            on_resume=self.worker.notify,
            logger=self.logger,
        )

    def _make_stale_locks(self, check_revisions: Callable[[], Awaitable[None]]) -> StaleLocks:
        return StaleLocks(
            pool=self.pool,
            options=self._options,
            session=self.session,
            check_revisions=check_revisions,
            logger=self.logger,
        )

    def _make_statistics(self) -> StatisticsService | None:
        if self._tally is None:
            return None
        return StatisticsService(
            worker_id=self.pool.id, tally=self._tally, session=self.session, logger=self.logger
        )

    def _make_queue_watch(self) -> QueueWatch | None:
        if self._statistics is None or self._options.once:
            return None
        return QueueWatch(
            pool=self.pool, session=self.session, now=self._clock.database_now, logger=self.logger
        )

    def _make_progress(self) -> ProgressService:
        return ProgressService(
            worker_id=self.pool.id, session=self.session, claimed=self._claimed_jobs.all, logger=self.logger
        )

    def _make_history(self) -> HistoryPartitions:
        keep_for = self._options.history_keep
        return HistoryPartitions(
            attempts=self._attempts, keep_for=keep_for, session=self.session, logger=self.logger
        )

    def _make_sweep_service(self) -> SweepService | None:
        options = self._options
        if options.terms is None:
            return None
        relay = LoopRelay()
        policy = RecoveryPolicy(
            delay=options.recovery_delay,
            refund=options.refund_attempt_on_recovery,
            # The user's code expects the worker's event loop.
            on_recovery=options.on_recovery and partial(relay.run, options.on_recovery),
            keep_attempt=self._attempts.record_death,
        )
        logger = RelayedLogger(self.logger.logger, self.logger.extra, relay.call)
        connection = SingleConnectionPool(self.session.pool)
        session = Session(self.session.schema, connection, logger)
        return SweepService(
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
            outage_log=self._outage_log,
        )

    async def connect(self) -> None:
        """Connect the parts to the database. Everything that may fail at the start happens here."""
        with self._attached.own_work():
            await self._connect()

    async def _connect(self) -> None:
        self._background_thread.start()
        await self.health.start()
        await self._fencing.start()
        if self._sweep_service is not None:
            await self._sweep_service.prepare()
        await self._history.prepare()
        await self.worker.connect()
        await (
            self._cancellations.poll()
        )  # before the first claim: jobs may have been cancelled while no worker ran
        await self._pauses.poll()
        if self._options.once:
            await self._stale_locks.unlock()
        self._job_log.connected(self.pool.id, self.pool.tasks)

    def start(self) -> None:
        """Start the services."""
        with self._attached.own_work():
            self._start_services()

    def _start_services(self) -> None:
        self.health.phase = "running"
        self.worker.start()
        self._cancellations.start()
        self._pauses.start()
        self._progress.start()
        if self._statistics is not None:
            self._statistics.start()
        if self._queue_watch is not None:
            self._queue_watch.start()
        if self._sweep_service is not None:
            self._background_thread.call(self._sweep_service.start)
        if not self._options.once:
            self._stale_locks.start()
            self._history.start()
        if self._scheduler is not None:
            self._scheduler.announce()
            self._scheduler.start()
        if self._options.listen:
            self.notifier.start()

    def _restart_services(self) -> None:
        """Restart services that have ended, for example because the user's code cancelled their tasks."""
        # While the event loop is being closed, all tasks are cancelled, among them the worker's.
        if self.worker.has_ended or self.worker.is_being_cancelled:
            return
        for service in self._services:
            if service.has_ended:
                self.logger.error("The %s ended unexpectedly. Restarting it", service.name)
                if service is self._sweep_service:
                    self._background_thread.call(service.start)
                else:
                    service.start()

    def stop_scheduler(self) -> None:
        """Stop adding the jobs of recurring tasks."""
        if self._scheduler is not None:
            self._scheduler.cancel()

    async def close(self) -> None:
        """Close all parts, whether or not they were started."""
        with self._attached.own_work():
            await self._close()

    async def _close(self) -> None:
        if self._scheduler is not None:
            await self._scheduler.stop()
        await self.notifier.stop()
        await self._stale_locks.stop()
        await self._history.stop()
        await self._cancellations.stop()
        if self._queue_watch is not None:
            await self._queue_watch.stop()
        await self._pauses.stop()
        if self._sweep_service is not None and self.health.phase != "starting":
            with suppress(BackgroundThreadEndedError):  # the event loop is being closed
                await self._background_thread.run(self._sweep_service.stop())
        await self._flags.close()
        await self.worker.end()
        await self._write_last()
        await self._stop_liveness()
        for part in ("listener", "heartbeat"):  # they need not connect again
            self._outage_log.end(part)
        self._job_log.close()
        self._attached.detach()
        await self.session.close_services()
        if not self.worker.running:
            await self.session.pool.close()
            await self._listen_pool.close()

    async def _write_last(self) -> None:
        """Write the last progress and statistics, if the worker was started."""
        if self.health.phase != "starting":
            await self._progress.close()
            if self._statistics is not None:
                await self._statistics.close()

    async def _stop_liveness(self) -> None:
        await self._processes.closed()
        # The heartbeat stops last: until all outcomes are recorded, no other worker may claim these jobs.
        await self._fencing.stop(deregister=self.worker.holds_no_locks)
        self.health.phase = "stopped"
        await self.health.stop()
        await self._background_thread.stop()

    async def _close_with_loop(self) -> None:
        """Close what can be closed while the event loop is being closed and `close` was not called."""
        await self._write_last()
        await self._stop_liveness()
        await self.session.close_services()
        with suppress(TimeoutError):  # a task still holds a connection
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await self.session.pool.close()
                await self._listen_pool.close()


def _check_task_leases(options: WorkerOptions, handlers: Mapping[str, Handler]) -> None:
    if unknown := options.task_leases.keys() - handlers.keys():
        names = ", ".join(sorted(map(str, unknown)))
        raise ConfigurationError(f"task_leases names tasks that this worker does not have: {names}.")


def _read_limits(options: WorkerOptions, tasks: Tasks) -> NamedLimits:
    limits = {
        name: task.limit
        for name, function in tasks.items()
        if (task := task_of(function)) is not None and task.limit is not None
    }
    if limits and not options.recovery:
        names = ", ".join(sorted(limits))
        raise ConfigurationError(
            f"These tasks have a limit, and recovery is off: {names}. Without recovery, the share of a dead "
            "worker would never be free again. Remove recovery=False (--no-recovery), or use worker_limit "
            "instead of limit."
        )
    return NamedLimits(limits)


def _read_worker_limits(tasks: Tasks) -> dict[str, int]:
    return {
        name: task.worker_limit
        for name, function in tasks.items()
        if (task := task_of(function)) is not None and task.worker_limit is not None
    }


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


def _make_client(options: WorkerOptions, session: Session) -> WorkerUtils:
    return WorkerUtils._on_session(
        session,
        use_local_time=options.use_local_time,
        require_transaction=options.require_transaction,
        middleware=options.middleware,
    )
