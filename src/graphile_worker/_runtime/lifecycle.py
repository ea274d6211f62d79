"""A worker from its start to its stop."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from graphile_worker import events as event
from graphile_worker._db.migrate import check_revisions
from graphile_worker._runtime.lifespan import Lifespan
from graphile_worker._runtime.parts import Parts
from graphile_worker._runtime.references import refuse_while_importing
from graphile_worker._runtime.signals import SignalSubscriber
from graphile_worker._runtime.worker import GIVE_UP_AFTER
from graphile_worker.durations import seconds
from graphile_worker.errors import GraphileWorkerError, SchemaTooNewError, ShutdownError

if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence

    from graphile_worker._db.exchange import Held
    from graphile_worker._runtime.handlers import Tasks
    from graphile_worker.durations import Duration
    from graphile_worker.liveness import Health
    from graphile_worker.options import WorkerOptions

_STEP = 0.1
_MOST_SHOWN = 20


class Drained(NamedTuple):
    """What `run_once` did. A job that was lost while it ran is neither done nor failed."""

    done: int
    failed: int


class Runner:
    """A worker that runs. Made by `run`.

    Attributes:
        id: Under which name it locks jobs.
        events: Where listeners can be added.
        utils: A `WorkerUtils` on the worker's connections.
        add_job: Add a job, as `WorkerUtils.add_job` does.
    """

    def __init__(self, tasks: Tasks, options: WorkerOptions) -> None:
        refuse_while_importing()
        if os.environ.get("GRAPHILE_LOGGER_DEBUG"):
            logging.getLogger("graphile_worker").setLevel(logging.DEBUG)
        self._options = options
        self._parts = parts = Parts(
            tasks, options, on_migration=self._check_revisions_soon, check_revisions=self._check_revisions
        )
        self._worker, self._pool = parts.worker, parts.pool
        self.id, self.events, self.logger = parts.pool.id, options.events, parts.logger
        self.utils = parts.utils
        self.add_job = self.utils.add_job
        self._lifespan = Lifespan(options.lifespan, self.logger)
        self._signals = SignalSubscriber(self._on_signal)
        self._interrupt = asyncio.Event()
        self._hurry = asyncio.Event()
        self._process_ends = False
        self._error: GraphileWorkerError | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watching: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._check_wanted = False
        self._stopping: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Runner(id={self.id!r}, schema={self._pool.schema!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, _error: object, _traceback: object) -> None:
        # Whatever went wrong before is more interesting than what could not be recorded because of it.
        with suppress(ShutdownError):
            await self.stop()
        if kind is None:
            await self.wait()

    async def start(self) -> None:
        """Install the schema, connect, begin. `run` has done it."""
        try:
            await self._start()
        except BaseException:
            if self._watching is None:
                await self._close()
            else:  # somebody stopped waiting for us to listen
                await self.stop(grace=0)
            raise

    async def _start(self) -> None:
        self.events.emit(event.PoolCreate(worker_pool=self._pool))
        self._worker.announce()
        if self._options.migrate:
            await self.utils.migrate()
        await self._open_lifespan()
        await self._parts.connect()
        self._watching = asyncio.create_task(self._watch(), name="graphile-worker runner")
        if self._options.handle_signals:
            self._signals.subscribe()
        self._parts.start()
        if self._options.listen:
            listening = asyncio.ensure_future(self._parts.notifier.tried.wait())
            try:
                await _any([listening, self._ended])
            finally:
                listens = listening.done()
                listening.cancel()
            if not listens:  # it came to an end before that
                await self.wait()

    async def _open_lifespan(self) -> None:
        try:
            self._parts.surroundings.state = await self._lifespan.open()
        except Exception as error:
            self.events.emit(event.PoolFatalError(worker_pool=self._pool, error=error, action="lifespan"))
            raise

    async def wait(self) -> None:
        """Return when the worker has stopped; raises the error that stopped it, if it was one."""
        await asyncio.shield(self._ended)

    async def stop(self, grace: Duration | None = None) -> None:
        """Stop: claim nothing more, wait for the jobs that run, record everything. May be called again.

        Args:
            grace: After how long jobs that still run are interrupted; by default never. Those that are
                ``async def`` are cancelled, and will run again. A thread cannot be stopped, and is waited
                for.

        Raises:
            ShutdownError: Not everything could be recorded, because the database could not be reached.
        """
        if grace is not None:
            self._limit(seconds("grace", grace), GIVE_UP_AFTER)
        # Whoever stops waiting for it does not stop it.
        await asyncio.shield(self._begin_stop("The runner was told to stop"))

    def health(self) -> Health:
        """How the worker is; may be called from any thread."""
        return self._parts.health.read()

    @property
    def drained(self) -> Drained:
        """What it did until now."""
        return Drained(*self._worker.ended)

    def _limit(self, grace: float, more: float) -> None:
        """Interrupt jobs that still run after so long, and a lifespan that still closes so much later."""
        loop = asyncio.get_running_loop()
        loop.call_later(grace, self._interrupt.set)
        loop.call_later(grace + more, self._hurry.set)

    def _begin_stop(self, message: str) -> asyncio.Task[None]:
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(message), name="graphile-worker stop")
            self._stopping.add_done_callback(_noticed)
        return self._stopping

    async def _stop(self, message: str) -> None:
        self._parts.health.phase = "stopping"
        self.events.emit(event.Stop())
        self.events.emit(event.PoolGracefulShutdown(worker_pool=self._pool, message=message))
        self._parts.end_schedule()
        self._worker.begin_stop()
        try:
            await self._until_recorded()
            if self._interrupt.is_set():
                self.events.emit(event.PoolForcefulShutdownComplete(worker_pool=self._pool))
            self.events.emit(event.PoolGracefulShutdownComplete(worker_pool=self._pool))
        except ShutdownError as error:
            self._report_unrecorded(error)
            self._error = self._error or error
            raise
        finally:
            await self._close()

    async def _until_recorded(self) -> None:
        """Wait until nothing is in hand; interrupt what runs when it is time to."""
        worker, interrupted_at, named = self._worker, None, False
        last_ran = last_reached = monotonic()
        while not worker.idle.is_set():
            now = monotonic()
            if self._interrupt.is_set() and interrupted_at is None:
                interrupted_at = now
                message = "Jobs that still run are interrupted"
                self.events.emit(event.PoolForcefulShutdown(worker_pool=self._pool, message=message))
                worker.interrupt()
            if worker.fatal.done():
                worker.interrupt()
                if not worker.running and worker.in_hand:
                    raise _unrecorded(worker.in_hand)
                if not worker.running:
                    return
            if worker.running and interrupted_at not in {None, now} and not named:
                named = True
                ids = ", ".join(str(held.job.id) for held in worker.running)
                self.logger.warning("Waiting for jobs that cannot be interrupted: %s", ids)
            last_ran = now if worker.running else last_ran
            last_reached = now if worker.reachable else last_reached
            patience = now - GIVE_UP_AFTER
            unreachable = max(last_ran, last_reached) < patience
            too_late = interrupted_at is not None and max(last_ran, interrupted_at) < patience
            # A thread of ours would go on running a job that others take; if the process ends it does not.
            dying = self._process_ends and interrupted_at is not None and interrupted_at < patience
            if unreachable or too_late or dying:
                raise _unrecorded(worker.in_hand)
            await _first_of(worker.idle, self._interrupt, seconds=_STEP)
        if worker.in_hand:  # the server refuses to record their outcomes
            raise _unrecorded(worker.in_hand)

    def _report_unrecorded(self, error: ShutdownError) -> None:
        self._worker.give_up(error)
        for held in self._worker.in_hand:
            self.events.emit(
                event.PoolGracefulShutdownWorkerError(worker_pool=self._pool, error=error, job=held.job)
            )
        if self._interrupt.is_set():
            self.events.emit(event.PoolForcefulShutdownError(worker_pool=self._pool, error=error))
        self.events.emit(event.PoolGracefulShutdownError(worker_pool=self._pool, error=error))
        self.logger.error("%s", error)

    async def _close(self) -> None:
        for task in (self._watching, self._checking):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        await self._lifespan.close(self._hurry)
        await self._parts.close()
        self.events.emit(event.PoolRelease(worker_pool=self._pool))
        if not self._ended.done():
            if self._error is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(self._error)
                self._ended.exception()  # whoever does not wait for it does not want to know
        self._signals.unsubscribe()

    async def _watch(self) -> None:
        """Stop by ourselves, when nothing is left or something cannot be mended."""
        idle = asyncio.ensure_future(self._worker.idle.wait())
        try:
            await _any([idle, self._worker.fatal, self._lifespan.lost])
        finally:
            idle.cancel()
        if self._worker.fatal.done():
            self._fail(self._worker.fatal.exception())
        elif self._lifespan.lost.done():
            error = self._lifespan.lost.result()
            self.events.emit(event.PoolFatalError(worker_pool=self._pool, error=error, action="lifespan"))
            self._fail(error)
            self._interrupt.set()  # what runs has nothing to work with any more
        elif self._worker.complaint is not None:
            self._fail(self._worker.complaint)
        self._begin_stop("Nothing is left to do")

    def _fail(self, error: BaseException | None) -> None:
        if not isinstance(error, GraphileWorkerError):
            # Not foreseen, so with everything that can be known about it.
            self.logger.error("The worker ends: %r", error, exc_info=error)
            notes = getattr(error, "__notes__", ())
            failure = GraphileWorkerError(" ".join([f"The worker ended because of {error!r}.", *notes]))
            failure.__cause__ = error
            error = failure
        else:
            self.logger.error("The worker ends: %s", error)
        self._error = self._error or error

    def _check_revisions_soon(self) -> None:
        self._check_wanted = True
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check_while_wanted())

    async def _check_while_wanted(self) -> None:
        while self._check_wanted:  # what is told while one looks may be what it has just missed
            self._check_wanted = False
            await self._check_revisions()

    async def _check_revisions(self) -> None:
        """The schema may have been changed: go on only if we know how."""
        try:
            session = self._parts.session
            await session.call(lambda on: check_revisions(on, session.schema))
        except SchemaTooNewError as error:
            if isinstance(self._error, SchemaTooNewError):
                return  # it was told already, and is told again with each migration
            self._fail(error)
            self._process_ends = self._process_ends or self._options.exit_if_stuck
            self._stop_within(self._options.shutdown_grace, GIVE_UP_AFTER, "Breaking migration")
        except GraphileWorkerError as error:
            self.logger.debug("The revision of the schema could not be read: %s", error)

    def _on_signal(self, number: signal.Signals, count: int) -> None:
        grace, more = (self._options.shutdown_grace, GIVE_UP_AFTER) if count == 1 else (0.0, 0.0)
        kind = event.GracefulShutdown if count == 1 else event.ForcefulShutdown
        self.events.emit(kind(signal=number.name))
        self._process_ends = True
        then = ", or until the next signal" if count == 1 else "; the next signal kills this process"
        self._stop_within(grace, more, number.name, then)

    def _stop_within(self, grace: float, more: float, why: str, then: str = "") -> None:
        self.logger.info("%s: stopping; running jobs have %.1f s%s", why, grace, then)
        self._limit(grace, more)
        self._begin_stop(f"The worker was told to stop: {why}")


def _noticed(task: asyncio.Task[None]) -> None:
    """What went wrong was logged, and is raised by `wait`."""
    if not task.cancelled():
        task.exception()


def _unrecorded(in_hand: Sequence[Held]) -> ShutdownError:
    ids = [held.job.id for held in in_hand]
    if not ids:
        return ShutdownError(
            "The worker stopped while the database could not be asked whether its last question claimed "
            "jobs. If it did, they are locked, and will run when another worker frees them."
        )
    shown = ", ".join(map(str, ids[:_MOST_SHOWN]))
    if len(ids) > _MOST_SHOWN:
        shown += f" and {len(ids) - _MOST_SHOWN} more"
    return ShutdownError(
        f"The worker stopped before the outcome of {len(ids)} of its jobs was recorded: {shown}. "
        "They are locked, and will run again when another worker frees them.",
        ids,
    )


async def _first_of(*flags: asyncio.Event, seconds: float) -> None:
    """Until one of them is set, or for so long."""
    waiting = [asyncio.ensure_future(flag.wait()) for flag in flags if not flag.is_set()]
    try:
        await _any(waiting, timeout=seconds)
    finally:
        for task in waiting:
            task.cancel()


async def _any(futures: Sequence[asyncio.Future[Any]], *, timeout: float | None = None) -> None:  # noqa: ASYNC109
    """Until one of them is done, whatever it came to."""
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
