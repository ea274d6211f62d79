"""From a claimed job to its outcome."""

from __future__ import annotations

import asyncio
import inspect
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

from graphile_worker._db.pool_usage import CURRENT_JOB
from graphile_worker._runtime.abandoned import AbandonedThreads
from graphile_worker._runtime.around import around
from graphile_worker._runtime.batch import discard
from graphile_worker._runtime.deadline import Deadline
from graphile_worker._runtime.processes import Processes
from graphile_worker._runtime.threads import Threads
from graphile_worker.errors import TaskError, TaskProcessError
from graphile_worker.logs import library_logger as logger
from graphile_worker.middleware.base import overriding
from graphile_worker.outcome import Completed, Failed, Interrupted, unwrapped

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping
    from contextvars import Context

    from graphile_worker._db.exchange import Held
    from graphile_worker._runtime.handlers import Call, Handler
    from graphile_worker._runtime.runs import Run
    from graphile_worker.context import Stopping, Surroundings
    from graphile_worker.job import Job
    from graphile_worker.middleware import Middleware
    from graphile_worker.outcome import Outcome

COMPLETED = Completed()


class Executor:
    """Runs tasks: on the event loop, on threads if they are plain functions, or in processes.

    Args:
        handlers: The tasks.
        surroundings: What all jobs share.
        interrupted_delay: Seconds until a job that was interrupted is available again.
        middleware: What stands around each job.
        processes: For tasks that are to run in some.
        abandoned: Counts threads whose jobs are over.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        surroundings: Surroundings,
        interrupted_delay: float,
        middleware: Iterable[Middleware] = (),
        processes: Processes | None = None,
        abandoned: AbandonedThreads | None = None,
    ) -> None:
        self._handlers = handlers
        self._surroundings = surroundings
        self.interrupted = Interrupted(interrupted_delay)
        self._threads = Threads()
        self.processes = processes or Processes(surroundings)
        self._closed = False
        self.abandoned = abandoned or AbandonedThreads()
        self.is_cancelled: Callable[[], bool] = lambda: False
        """Whether the worker itself is cancelled, as when its event loop is closed, and its jobs with it."""
        self._context = copy_context()
        self._perform = around(overriding(middleware, "execute"), self._call, surroundings)

    def context(self) -> Context:
        """The context variables that a job starts with: those of whoever started the worker."""
        return self._context.copy()

    def warn(self, concerned: Callable[[str | None], bool] = lambda _task: True) -> None:
        """Let running tasks know that they are to stop: see `Surroundings.warn`."""
        self._surroundings.warn(concerned)

    def warn_one(self, held: Held) -> Stopping:
        """Let that job know that it was cancelled. It does, as long as somebody keeps what is returned."""
        stopping = self._surroundings.stopping_of(held.job)
        stopping.cancelled = True
        stopping.set()
        return stopping

    def calm(self) -> None:
        """Tasks that begin from now on need not stop."""
        self._surroundings.calm()

    def close(self) -> None:
        """Nothing more will run."""
        self._closed = True
        self._threads.close()
        self.processes.close()

    async def execute(self, run: Run) -> Outcome:
        """Run the job to its end. Whatever is raised belongs to this job alone."""
        held = run.held
        job = held.job
        CURRENT_JOB.set(job)  # of this job alone: it runs in a copy of the context
        handler = self._handlers.get(job.task_identifier)
        try:
            if handler is None:
                raise TaskError(f"This worker has no task {job.task_identifier!r}.")  # noqa: TRY301
            if held.unreadable is not None:
                raise TaskError(f"{held.unreadable}.") from held.unreadable  # noqa: TRY301
            deadline = self._deadline(handler, job) if handler.may_time_out or job.flags else None
            await self._perform(handler, job, deadline)
        except asyncio.CancelledError as error:
            # Only what the worker asked for is an interruption. A task that cancels itself would otherwise
            # get its attempt back, and run again at once, for ever.
            stopped = run.stopped or self.is_cancelled()
            return self.interrupted if stopped else _failed(handler, job, error)
        except BaseException as error:  # noqa: BLE001 - a task that calls sys.exit() must not end the worker
            return self.interrupted if _is_interruption(error) else _failed(handler, job, unwrapped(error))
        return COMPLETED

    async def _call(self, handler: Handler, job: Job, deadline: Deadline | None) -> Any:
        """Call the task's function, wherever it runs; returns what it returned."""
        call = handler.call(job, self._surroundings, deadline)
        value = None
        try:
            if call.batch is not None and not call.batch.good:
                pass  # none of its items can be run
            elif handler.reference is not None:
                value = await self.processes.run(handler.reference, job, deadline)
            elif handler.is_async:
                value = await _within(deadline, handler.function(*call.args, **call.kwargs))
            else:
                value = await self._call_on_thread(handler.function, call, job, deadline)
            if value is not None or call.batch is not None:
                await _within(deadline, handler.conclude(job, call, value))
        except Exception as error:
            if deadline is None or not deadline.overrules(error):
                raise
            raise deadline.over(error) from error
        if deadline is not None and deadline.expired and not call.answered_by(value):
            raise deadline.over()  # it was told to stop, so what it returned need not be all of its work
        return value

    def _deadline(self, handler: Handler, job: Job) -> Deadline | None:
        timeout = handler.timeout(job)
        if timeout is None:
            return None
        deadline = Deadline(timeout)
        self._surroundings.warn_alone(job.task_identifier, deadline.stopping)
        return deadline

    async def _call_on_thread(
        self, function: Callable[..., Any], call: Call, job: Job, deadline: Deadline | None
    ) -> Any:
        future = self._threads.run(copy_context(), partial(function, *call.args, **call.kwargs))
        interrupted: asyncio.CancelledError | None = None
        while not future.done():
            try:
                if deadline is None:
                    await asyncio.wait([future])
                elif not await deadline.watch_thread(future):
                    self._abandon(job, future)
                    raise deadline.over()
            except asyncio.CancelledError as cancelled:
                if self._closed:
                    raise  # the worker was given up, and the process is to end, with the thread in it
                # A thread cannot be stopped. Until it ends the job is ours, and its queue.
                interrupted = cancelled
        value, error = future.result()
        if error is not None:
            raise error
        if not inspect.isawaitable(value):
            return value
        # As from an async def with a plain function around it. What was to stop need not begin with that.
        late = deadline.over() if deadline is not None and deadline.expired else None
        if (why := interrupted or late) is not None:
            discard([value])
            raise why
        return await _within(deadline, value)

    def _abandon(self, job: Job, future: asyncio.Future[Any]) -> None:
        """Go on without the thread: it goes on too, and nobody waits for it any more."""
        logger.warning(
            "Job %d (%s) is over its timeout, and its thread does not end: going on without it. Threads like "
            "that: %d",
            *(job.id, job.task_identifier, self.abandoned.total + 1),
        )
        self.abandoned.add(job.task_identifier)

        def ended(future: asyncio.Future[Any]) -> None:
            value, _error = future.result()
            discard([value])
            logger.info("The thread of job %d (%s) has ended after all", job.id, job.task_identifier)
            self.abandoned.remove(job.task_identifier)

        future.add_done_callback(ended)


def _within(deadline: Deadline | None, work: Awaitable[Any]) -> Awaitable[Any]:
    return work if deadline is None else deadline.watch(work)


def _is_interruption(error: BaseException) -> bool:
    """Whether the process of the job ended for a reason that is the worker's, and not the task's."""
    while (
        isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1
    ):  # of a middleware's task group
        error = error.exceptions[0]
    return isinstance(error, TaskProcessError) and error.interrupted


def _failed(handler: Handler | None, job: Job, error: BaseException) -> Outcome:
    """What the error comes to. It may be of the user's making, and so may be what decides about it."""
    try:
        return Failed(error) if handler is None else handler.failed(job, error)
    except BaseException:
        logger.exception("What to do about a failure of %r could not be found out", job.task_identifier)
        return Failed(error)
