"""`Runner`: a worker from its start to its stop."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

from graphile_worker import events as event
from graphile_worker._base.durations import seconds
from graphile_worker._base.text import pluralize
from graphile_worker._db.schema.migrate import check_revisions
from graphile_worker._tasks.task_reference import reject_while_importing
from graphile_worker._worker.assembly import Parts
from graphile_worker._worker.lifespan import Lifespan
from graphile_worker._worker.loop import GIVE_UP_AFTER
from graphile_worker._worker.signals import SignalSubscriber
from graphile_worker.errors import GraphileWorkerError, SchemaTooNewError, ShutdownError

if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence

    from graphile_worker._base.durations import Duration
    from graphile_worker._db.queries.exchange import ClaimedJob
    from graphile_worker._worker.execution.handlers import Tasks
    from graphile_worker._worker.options import WorkerOptions
    from graphile_worker.outcome import RunSummary
    from graphile_worker.workers import Health

_CHECK_INTERVAL = 0.1
"""Seconds between two checks whether a stopping worker has to give up."""
_MAX_IDS_SHOWN = 20


class Runner:
    """A running worker, returned by `run`.

    Attributes:
        id: The worker's id. Jobs that it claims are locked by this name.
        events: The event emitter. Add listeners here.
        utils: A `WorkerUtils` on the worker's connections.
        add_job: Adds a job: the method of `utils`.
    """

    def __init__(self, tasks: Tasks, options: WorkerOptions) -> None:
        reject_while_importing()
        if os.environ.get("GRAPHILE_LOGGER_DEBUG"):
            logging.getLogger("graphile_worker").setLevel(logging.DEBUG)
        self._options = options
        self._parts = parts = Parts(
            tasks, options, on_migration=self._request_check, check_revisions=self._check_revisions
        )
        self._worker, self._pool = parts.worker, parts.pool
        self.id, self.events, self.logger = parts.pool.id, options.events, parts.logger
        self.utils = parts.utils
        self.add_job = self.utils.add_job
        self._lifespan = Lifespan(options.lifespan, self.logger)
        self._signals = SignalSubscriber(self._on_signal)
        self._interrupt = asyncio.Event()
        self._out_of_time = asyncio.Event()
        self._process_will_exit = False
        self._error: GraphileWorkerError | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watch_task: asyncio.Task[None] | None = None
        self._check_task: asyncio.Task[None] | None = None
        self._check_requested = False
        self._stop_task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Runner(id={self.id!r}, schema={self._pool.schema!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, _error: object, _traceback: object) -> None:
        # An error in the block matters more than the outcomes that could not be recorded because of it.
        with suppress(ShutdownError):
            await self.stop()
        if kind is None:
            await self.wait()

    async def start(self) -> None:
        """Install the schema, connect, and start to work. `run` calls this method."""
        try:
            await self._start()
        except BaseException:
            if self._watch_task is None:
                await self._close()
            else:  # the caller was cancelled while the worker was starting to listen
                await self.stop(grace=0)
            raise

    async def _start(self) -> None:
        self.events.emit(event.PoolCreate(worker_pool=self._pool))
        self._worker.announce()
        if self._options.migrate:
            with self._parts.own_work():
                await self.utils.migrate()
        await self._open_lifespan()
        await self._parts.connect()
        self._watch_task = asyncio.create_task(self._watch(), name="graphile-worker runner")
        if self._options.handle_signals:
            self._signals.subscribe()
        self._parts.start()
        if self._options.listen:
            listening = asyncio.ensure_future(self._parts.notifier.first_attempt.wait())
            try:
                await _wait_for_first([listening, self._ended])
            finally:
                has_tried = listening.done()
                listening.cancel()
            if not has_tried:  # the worker has ended before that
                await self.wait()

    async def _open_lifespan(self) -> None:
        try:
            self._parts.environment.state = await self._lifespan.open()
        except Exception as error:
            self.events.emit(event.PoolFatalError(worker_pool=self._pool, error=error, action="lifespan"))
            raise

    async def wait(self) -> None:
        """Wait until the worker has stopped. If an error stopped it, raise that error."""
        await asyncio.shield(self._ended)

    async def stop(self, grace: Duration | None = None) -> None:
        """Stop the worker: claim nothing more, wait for running jobs, and record all outcomes.

        May be called again, for example with a shorter grace.

        Args:
            grace: Time until running jobs are interrupted; by default they never are. ``async def`` tasks
                are cancelled, and their jobs run again. A thread cannot be interrupted, so the worker waits
                for it.

        Raises:
            ShutdownError: Not all outcomes were recorded, because the database was unavailable or refused
                them.
        """
        if grace is not None:
            self._schedule_interrupt(seconds("grace", grace), GIVE_UP_AFTER)
        # A caller that is cancelled stops waiting, but the worker still stops.
        await asyncio.shield(self._begin_stop("Runner.stop was called"))

    def health(self) -> Health:
        """Return the worker's health. May be called from any thread."""
        return self._parts.health.read()

    @property
    def summary(self) -> RunSummary:
        """The recorded outcomes of this worker's jobs so far."""
        return self._worker.summary

    def _schedule_interrupt(self, grace: float, more: float) -> None:
        """Interrupt running jobs after `grace` seconds, and a closing lifespan `more` seconds later."""
        loop = asyncio.get_running_loop()
        loop.call_later(grace, self._interrupt.set)
        loop.call_later(grace + more, self._out_of_time.set)

    def _begin_stop(self, message: str) -> asyncio.Task[None]:
        if self._stop_task is None:
            self._stop_task = asyncio.create_task(self._stop(message), name="graphile-worker stop")
            self._stop_task.add_done_callback(_retrieve_exception)
        return self._stop_task

    async def _stop(self, message: str) -> None:
        self._parts.health.phase = "stopping"
        self.events.emit(event.Stop())
        self.events.emit(event.PoolGracefulShutdown(worker_pool=self._pool, message=message))
        self._parts.stop_scheduler()
        self._worker.begin_stop()
        try:
            await self._wait_until_recorded()
            if self._interrupt.is_set():
                self.events.emit(event.PoolForcefulShutdownComplete(worker_pool=self._pool))
            self.events.emit(event.PoolGracefulShutdownComplete(worker_pool=self._pool))
        except ShutdownError as error:
            self._report_unrecorded(error)
            self._error = self._error or error
            raise
        finally:
            await self._close()

    async def _wait_until_recorded(self) -> None:
        """Wait until all outcomes are recorded, and interrupt running jobs when their grace has passed."""
        worker, interrupted_at, has_warned = self._worker, None, False
        last_ran = last_reached = monotonic()
        while not worker.idle.is_set():
            now = monotonic()
            if self._interrupt.is_set() and interrupted_at is None:
                interrupted_at = now
                message = "Interrupting the jobs that still run"
                self.events.emit(event.PoolForcefulShutdown(worker_pool=self._pool, message=message))
                worker.interrupt()
            if worker.fatal.done():
                worker.interrupt()
                if not worker.running and worker.unrecorded:
                    raise _unrecorded_error(worker.unrecorded)
                if not worker.running:
                    return
            if worker.running and interrupted_at not in {None, now} and not has_warned:
                has_warned = True
                ids = ", ".join(str(claimed.job.id) for claimed in worker.running)
                self.logger.warning("Waiting for jobs that cannot be interrupted: %s", ids)
            last_ran = now if worker.running else last_ran
            last_reached = now if worker.reachable else last_reached
            deadline = now - GIVE_UP_AFTER
            is_unreachable = max(last_ran, last_reached) < deadline
            is_too_late = interrupted_at is not None and max(last_ran, interrupted_at) < deadline
            # The process ends its threads when it exits. In a process that goes on, a thread would keep
            # running a job that another worker claims, so the worker waits for the thread.
            must_exit = self._process_will_exit and interrupted_at is not None and interrupted_at < deadline
            if is_unreachable or is_too_late or must_exit:
                raise _unrecorded_error(worker.unrecorded)
            await _wait_for_any(worker.idle, self._interrupt, seconds=_CHECK_INTERVAL)
        if worker.unrecorded:  # the server refuses to record their outcomes
            raise _unrecorded_error(worker.unrecorded)

    def _report_unrecorded(self, error: ShutdownError) -> None:
        self._worker.give_up(error)
        for claimed in self._worker.unrecorded:
            self.events.emit(
                event.PoolGracefulShutdownWorkerError(worker_pool=self._pool, error=error, job=claimed.job)
            )
        if self._interrupt.is_set():
            self.events.emit(event.PoolForcefulShutdownError(worker_pool=self._pool, error=error))
        self.events.emit(event.PoolGracefulShutdownError(worker_pool=self._pool, error=error))
        self.logger.error("%s", error)

    async def _close(self) -> None:
        for task in (self._watch_task, self._check_task):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        await self._lifespan.close(self._out_of_time)
        await self._parts.close()
        self.events.emit(event.PoolRelease(worker_pool=self._pool))
        if not self._ended.done():
            if self._error is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(self._error)
                self._ended.exception()  # retrieved, because not every caller waits
        self._signals.unsubscribe()

    async def _watch(self) -> None:
        """Stop the worker when no job is left to run, or after an error that ends it."""
        idle = asyncio.ensure_future(self._worker.idle.wait())
        try:
            await _wait_for_first([idle, self._worker.fatal, self._lifespan.ended_early])
        finally:
            idle.cancel()
        if self._worker.fatal.done():
            self._fail(self._worker.fatal.exception())
        elif self._lifespan.ended_early.done():
            error = self._lifespan.ended_early.result()
            self.events.emit(event.PoolFatalError(worker_pool=self._pool, error=error, action="lifespan"))
            self._fail(error)
            self._interrupt.set()  # running jobs have no state to work with
        elif self._worker.stop_error is not None:
            self._fail(self._worker.stop_error)
        self._begin_stop("No job is left to run")

    def _fail(self, error: BaseException | None) -> None:
        if not isinstance(error, GraphileWorkerError):
            # An unexpected error is logged with its traceback.
            self.logger.error("The worker ends: %r", error, exc_info=error)
            notes = getattr(error, "__notes__", ())
            failure = GraphileWorkerError(" ".join([f"The worker ended because of {error!r}.", *notes]))
            failure.__cause__ = error
            error = failure
        else:
            self.logger.error("The worker ends: %s", error)
        self._error = self._error or error

    def _request_check(self) -> None:
        """Check the schema's revision soon, because a migration was announced."""
        self._check_requested = True
        if self._check_task is None or self._check_task.done():
            self._check_task = asyncio.create_task(self._check_while_requested())

    async def _check_while_requested(self) -> None:
        while self._check_requested:  # a check may miss a migration that is announced while it runs
            self._check_requested = False
            await self._check_revisions()

    async def _check_revisions(self) -> None:
        """Stop the worker if a migration has made the schema too new for this version."""
        try:
            session = self._parts.session
            await session.call(lambda on: check_revisions(on, session.schema))
        except SchemaTooNewError as error:
            if isinstance(self._error, SchemaTooNewError):
                return  # the worker is already stopping; each migration is announced
            self._fail(error)
            self._process_will_exit = self._process_will_exit or self._options.exit_if_stuck
            self._stop_within(self._options.shutdown_grace, GIVE_UP_AFTER, "Breaking migration")
        except GraphileWorkerError as error:
            self.logger.debug("Cannot read the schema's revision: %s", error)

    def _on_signal(self, number: signal.Signals, count: int) -> None:
        grace, more = (self._options.shutdown_grace, GIVE_UP_AFTER) if count == 1 else (0.0, 0.0)
        kind = event.GracefulShutdown if count == 1 else event.ForcefulShutdown
        self.events.emit(kind(signal=number.name))
        self._process_will_exit = True
        then = ", or until the next signal" if count == 1 else "; the next signal kills this process"
        self._stop_within(grace, more, number.name, then)

    def _stop_within(self, grace: float, more: float, why: str, then: str = "") -> None:
        self.logger.info("%s: stopping; running jobs have %.1f s%s", why, grace, then)
        self._schedule_interrupt(grace, more)
        self._begin_stop(f"The worker stops: {why}")


def _retrieve_exception(task: asyncio.Task[None]) -> None:
    """Mark the task's exception as retrieved: it is logged, and `wait` raises it."""
    if not task.cancelled():
        task.exception()


def _unrecorded_error(jobs: Sequence[ClaimedJob]) -> ShutdownError:
    ids = [claimed.job.id for claimed in jobs]
    if not ids:
        return ShutdownError(
            "The worker stopped while the database was unavailable, so it does not know whether its last "
            "exchange claimed jobs. If it did, the jobs stay locked until another worker releases them."
        )
    shown = ", ".join(map(str, ids[:_MAX_IDS_SHOWN]))
    if len(ids) > _MAX_IDS_SHOWN:
        shown += f" and {len(ids) - _MAX_IDS_SHOWN} more"
    return ShutdownError(
        f"The worker stopped before it could record the outcomes of {pluralize(len(ids), 'job')}: {shown}. "
        "Each stays locked, and runs again when another worker releases it.",
        ids,
    )


async def _wait_for_any(*flags: asyncio.Event, seconds: float) -> None:
    """Wait until one of the events is set, or the time has passed."""
    waiting = [asyncio.ensure_future(flag.wait()) for flag in flags if not flag.is_set()]
    try:
        await _wait_for_first(waiting, timeout=seconds)
    finally:
        for task in waiting:
            task.cancel()


async def _wait_for_first(futures: Sequence[asyncio.Future[Any]], *, timeout: float | None = None) -> None:  # noqa: ASYNC109
    """Wait until one of the futures is done, with any result, or the timeout has passed."""
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
