"""`Slots`: the slots in which jobs run, as many as the worker's concurrency."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from operator import attrgetter
from time import monotonic
from typing import TYPE_CHECKING

from graphile_worker import events as event
from graphile_worker._base.logs import library_logger as logger
from graphile_worker._worker.execution.job_events import (
    JobRun,
    emit_ended,
    emit_settled,
    emit_started,
    emit_unrecorded,
)
from graphile_worker.outcome import Cancelled, Completed, Failed, RunSummary, Snoozed, as_cancelled

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    from graphile_worker._db.queries.exchange import ClaimedJob
    from graphile_worker._worker.execution.abandoned_threads import AbandonedThreads
    from graphile_worker._worker.execution.executor import Executor
    from graphile_worker._worker.execution.tally import Tally
    from graphile_worker.events import WorkerPool
    from graphile_worker.events.emitter import Events
    from graphile_worker.outcome import Cancel, Outcome

_outcome = attrgetter("outcome")


class Slots:
    """Runs each job in a slot, and emits the events about it.

    Args:
        pool: The worker's identity.
        concurrency: The number of slots.
        executor: Runs a job.
        events: The event emitter.
        on_end: Called with a run that has ended, and its outcome.
        tally: Counts recorded outcomes for the statistics; None if there are none.
    """

    def __init__(
        self,
        pool: WorkerPool,
        concurrency: int,
        executor: Executor,
        events: Events,
        on_end: Callable[[JobRun, Outcome], None],
        tally: Tally | None = None,
    ) -> None:
        self._pool = pool
        self._tally = tally
        self._executor = executor
        self._events = events
        self._on_end = on_end
        self._create_task = _task_maker(asyncio.get_running_loop())
        self.free_slots = [
            event.Worker(f"{pool.id}-{number}", number, pool.id) for number in range(concurrency, 0, -1)
        ]
        """The slots that run no job."""
        self._running: dict[ClaimedJob, JobRun] = {}
        self._ended: dict[ClaimedJob, JobRun] = {}
        self.recorded_listeners: list[Callable[[Sequence[JobRun]], object]] = []
        """Called with the runs whose outcomes an exchange has recorded. An event for each costs more."""
        self._outcomes: Counter[type[Outcome]] = Counter()
        """The number of recorded outcomes of each kind."""

    @property
    def free(self) -> int:
        """The number of free slots."""
        return len(self.free_slots)

    @property
    def running(self) -> Sequence[ClaimedJob]:
        """Running jobs."""
        return tuple(self._running)

    @property
    def abandoned(self) -> AbandonedThreads:
        """Threads that still run after the timeouts of their jobs."""
        return self._executor.abandoned

    @property
    def any(self) -> event.Worker:
        """Any slot, for events that concern all of them."""
        return self.free_slots[-1] if self.free_slots else next(iter(self._running.values())).slot

    def watch_worker(self, is_cancelled: Callable[[], bool]) -> None:
        """Set a function that returns whether the worker itself is cancelled, which interrupts its jobs."""
        self._executor.is_cancelled = is_cancelled

    def announce(self) -> None:
        """Emit the creation of each slot."""
        for slot in reversed(self.free_slots):
            self._events.emit(event.WorkerCreate(worker=slot, tasks=self._pool.tasks))

    def start(self, claimed: ClaimedJob) -> None:
        """Run the job in a free slot."""
        run = JobRun(claimed, self.free_slots.pop(), monotonic())
        self._running[claimed] = run
        emit_started(self._events, run)
        task = self._create_task(
            self._run(run), name=claimed.job.task_identifier, context=self._executor.context()
        )
        if not task.done():
            run.task = task
            if run.stopped:  # during its first step, when the run had no task yet
                task.cancel()

    async def _run(self, run: JobRun) -> None:
        self._end(run, await self._executor.execute(run))

    def _end(self, run: JobRun, outcome: Outcome) -> None:
        if run.cancel is not None:
            outcome = as_cancelled(run.cancel, outcome)
        run.duration = monotonic() - run.since
        run.task = None
        del self._running[run.claimed]
        self._ended[run.claimed] = run
        self.free_slots.append(run.slot)
        run.outcome = type(outcome)
        try:
            emit_ended(self._events, run, outcome)
        finally:  # otherwise the job would stay locked, although the worker has forgotten it
            self._on_end(run, outcome)

    def fence(self, may_work: Callable[[str | None], bool]) -> None:
        """Stop running jobs that other workers may claim.

        Args:
            may_work: Whether the worker may still run jobs of a task.
        """
        self._executor.request_stop(lambda task: not may_work(task))
        kept = {claimed for claimed in self._running if may_work(claimed.job.task_identifier)}
        self.fence_all_except(kept)

    def fence_all_except(self, kept: Container[ClaimedJob]) -> None:
        """Stop running jobs that are not in `kept`, each once."""
        for claimed, run in self._running.items():
            if not run.fenced and claimed not in kept:
                run.fenced = True
                self._cancel(run, "the worker's heartbeat is not recorded")

    def stuck(self, may_work: Callable[[str | None], bool]) -> Sequence[ClaimedJob]:
        """Return running jobs that `fence` has stopped, or would stop if the event loop were not blocked."""
        return [
            run.claimed
            for run in tuple(self._running.values())
            if run.fenced or not may_work(run.claimed.job.task_identifier)
        ]

    def unfence(self, *, forgive: bool) -> None:
        """Let jobs that start from now on run.

        Args:
            forgive: Whether the jobs that still run are still locked by this worker.
        """
        self._executor.reset_stop_signals()
        if forgive:
            for run in self._running.values():
                run.fenced = False

    def release(self) -> None:
        """Ask running jobs to stop, and emit the release of each slot, because no more jobs will start."""
        self._executor.request_stop()
        for slot in (*reversed(self.free_slots), *(run.slot for run in self._running.values())):
            self._events.emit(event.WorkerRelease(worker=slot))

    def interrupt(self) -> None:
        """Interrupt running jobs."""
        for run in self._running.values():
            self._cancel(run, "the worker is stopping")

    def cancel(self, claimed: ClaimedJob, choice: Cancel) -> None:
        """Stop a running job, because it was cancelled. A second call does nothing."""
        run = self._running.get(claimed)
        if run is not None and run.cancel is None:
            run.cancel = choice
            run.stop_signal = self._executor.request_cancel(claimed)
            self._cancel(run, str(choice))

    def skip(self, claimed: ClaimedJob, outcome: Outcome) -> None:
        """Emit the outcome of a job that was not started."""
        run = self._ended[claimed] = JobRun(claimed, self.any, monotonic())
        emit_ended(self._events, run, outcome)

    def _cancel(self, run: JobRun, reason: str) -> None:
        run.stopped = True
        if run.task is not None:
            # A task that is cancelled before its first step never calls `_end`.
            run.task.add_done_callback(partial(self._on_exit, run))
            run.task.cancel(reason)

    def _on_exit(self, run: JobRun, _task: asyncio.Task[None]) -> None:
        if run.claimed in self._running:
            self._end(run, self._executor.interrupted)

    @property
    def summary(self) -> RunSummary:
        """The recorded outcomes of the jobs that ran here."""
        counts = self._outcomes
        return RunSummary(counts[Completed], counts[Failed], counts[Snoozed], counts[Cancelled])

    def settle(self, jobs: Iterable[ClaimedJob], kind: type[event.JobComplete | event.JobLost]) -> None:
        """Emit that the outcomes of jobs are recorded, or lost because this worker no longer holds them."""
        ended = [run for claimed in jobs if (run := self._ended.pop(claimed, None)) is not None]
        # The others were returned without having run.
        if kind is event.JobComplete:
            recorded = [run for run in ended if run.outcome is not None]
            self._outcomes.update(map(_outcome, recorded))
            if self._tally is not None:
                self._tally.add(recorded)
            if recorded and self.recorded_listeners:
                self._call_listeners(recorded)
        if self._events.wants(kind):
            for run in ended:
                emit_settled(self._events, run, kind)

    def _call_listeners(self, recorded: Sequence[JobRun]) -> None:
        for listener in self.recorded_listeners:
            try:
                listener(recorded)
            except Exception:  # an integration must not stop the worker
                logger.exception("A listener for recorded jobs failed")

    def give_up(self, error: BaseException) -> None:
        """Emit that the outcomes of ended jobs will not be recorded."""
        for run in self._ended.values():
            emit_unrecorded(self._events, run, error)

    def close(self, error: BaseException | None) -> None:
        """Close the executor, and emit the stop of each slot."""
        self._executor.close()
        for slot in reversed(self.free_slots):
            self._events.emit(event.WorkerStop(worker=slot, error=error))


def _task_maker(loop: asyncio.AbstractEventLoop) -> Callable[..., asyncio.Task[None]]:
    """Return a function that creates the tasks of jobs: with the loop's task factory, if it has one.

    They do not start eagerly. Short jobs would all run before the next exchange is sent, and the server would
    do nothing in the meantime.
    """
    if loop.get_task_factory() is not None:
        return loop.create_task
    return partial(asyncio.Task, loop=loop)  # less work than loop.create_task
