"""The slots in which jobs run."""

from __future__ import annotations

import asyncio
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from graphile_worker import events as event
from graphile_worker._runtime.runs import Run, tell_ended, tell_settled, tell_started, tell_unrecorded
from graphile_worker.outcome import Completed, Failed, as_cancelled

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    from graphile_worker._db.exchange import Held
    from graphile_worker._runtime.abandoned import AbandonedThreads
    from graphile_worker._runtime.executor import Executor
    from graphile_worker.emitter import Events
    from graphile_worker.events import WorkerPool
    from graphile_worker.outcome import Cancel, Outcome


class Slots:
    """Runs each job in a slot, and tells about it.

    Args:
        pool: Whose slots they are.
        concurrency: How many there are.
        executor: Runs a job.
        events: Where to tell.
        ended: Called with a job that has ended, and what it came to.
    """

    def __init__(
        self,
        pool: WorkerPool,
        concurrency: int,
        executor: Executor,
        events: Events,
        ended: Callable[[Held, Outcome], None],
    ) -> None:
        self._pool = pool
        self._executor = executor
        self._events = events
        self._on_end = ended
        self._loop = asyncio.get_running_loop()  # to ask for it each time is a call to the system
        self._free = [
            event.Worker(f"{pool.id}-{number}", number, pool.id) for number in range(concurrency, 0, -1)
        ]
        self._running: dict[Held, Run] = {}
        self._ended: dict[Held, Run] = {}
        self.done = self.failed = 0
        """How many jobs were recorded as such."""

    @property
    def free(self) -> int:
        """How many are free."""
        return len(self._free)

    @property
    def running(self) -> Sequence[Held]:
        """Jobs that run now."""
        return tuple(self._running)

    @property
    def abandoned(self) -> AbandonedThreads:
        """Threads that go on though their jobs are over."""
        return self._executor.abandoned

    @property
    def any(self) -> event.Worker:
        """One of them, to have a name for what all do together."""
        return self._free[-1] if self._free else next(iter(self._running.values())).slot

    def watch_worker(self, is_cancelled: Callable[[], bool]) -> None:
        """Take a cancellation for an interruption if that says that the worker itself is cancelled."""
        self._executor.is_cancelled = is_cancelled

    def announce(self) -> None:
        """Tell that they are there."""
        for slot in reversed(self._free):
            self._events.emit(event.WorkerCreate(worker=slot, tasks=self._pool.tasks))

    def start(self, held: Held) -> None:
        """Run the job in a free slot."""
        run = Run(held, self._free.pop(), monotonic())
        self._running[held] = run
        tell_started(self._events, run)
        task = self._loop.create_task(
            self._run(run), name=held.job.task_identifier, context=self._executor.context()
        )
        run.task = None if task.done() else task

    async def _run(self, run: Run) -> None:
        self._end(run, await self._executor.execute(run))

    def _end(self, run: Run, outcome: Outcome) -> None:
        if run.cancel is not None:
            outcome = as_cancelled(run.cancel, outcome)
        run.duration = monotonic() - run.since
        run.task = None
        del self._running[run.held]
        self._ended[run.held] = run
        self._free.append(run.slot)
        run.outcome = type(outcome)
        try:
            tell_ended(self._events, run, outcome)
        finally:  # or the job would stay locked by a worker that has forgotten it
            self._on_end(run.held, outcome)

    def fence(self, ours: Callable[[str | None], bool]) -> None:
        """Stop what runs and is not ours any more: jobs of tasks for which that does not hold."""
        self._executor.warn(lambda task: not ours(task))
        self.stop_all_but({held for held in self._running if ours(held.job.task_identifier)})

    def stop_all_but(self, ours: Container[Held]) -> None:
        """Stop what runs and is not among these, each once."""
        for held, run in self._running.items():
            if not run.fenced and held not in ours:
                run.fenced = True
                self._cancel(run, "the worker cannot say that it lives")

    def stuck(self, ours: Callable[[str | None], bool]) -> Sequence[Held]:
        """What runs and was to stop, or would have been if the event loop were not blocked."""
        return [
            run.held
            for run in tuple(self._running.values())
            if run.fenced or not ours(run.held.job.task_identifier)
        ]

    def unfence(self, *, forgive: bool) -> None:
        """What begins from now on is ours; and what runs still, if nobody has taken it."""
        self._executor.calm()
        if forgive:
            for run in self._running.values():
                run.fenced = False

    def release(self) -> None:
        """Tell that there will be no more jobs."""
        self._executor.warn()
        for slot in (*reversed(self._free), *(run.slot for run in self._running.values())):
            self._events.emit(event.WorkerRelease(worker=slot))

    def interrupt(self) -> None:
        """Stop what runs."""
        for run in self._running.values():
            self._cancel(run, "the worker is stopping")

    def cancel(self, held: Held, choice: Cancel) -> None:
        """Stop that one, if it runs; it is told once."""
        run = self._running.get(held)
        if run is not None and run.cancel is None:
            run.cancel = choice
            run.told = self._executor.warn_one(held)
            self._cancel(run, str(choice))

    def skip(self, held: Held, outcome: Outcome) -> None:
        """That one has come to something without having run."""
        run = self._ended[held] = Run(held, self.any, monotonic())
        tell_ended(self._events, run, outcome)

    def _cancel(self, run: Run, why: str) -> None:
        run.stopped = True
        if run.task is not None:
            # One that is cancelled before its first step never gets to say that it has ended.
            run.task.add_done_callback(partial(self._bury, run))
            run.task.cancel(why)

    def _bury(self, run: Run, _task: asyncio.Task[None]) -> None:
        if run.held in self._running:
            self._end(run, self._executor.interrupted)

    def settle(self, jobs: Iterable[Held], kind: type[event.JobComplete | event.JobLost]) -> None:
        """What became of them is recorded, or cannot be because they are not ours any more."""
        for held in jobs:
            run = self._ended.pop(held, None)  # none if it was given back without having run
            if run is not None:
                if kind is event.JobComplete:
                    self.done += run.outcome is Completed
                    self.failed += run.outcome is Failed
                tell_settled(self._events, run, kind)

    def give_up(self, error: BaseException) -> None:
        """What has ended will not be recorded."""
        for run in self._ended.values():
            tell_unrecorded(self._events, run, error)

    def close(self, error: BaseException | None) -> None:
        """Nothing more will run."""
        self._executor.close()
        for slot in reversed(self._free):
            self._events.emit(event.WorkerStop(worker=slot, error=error))
