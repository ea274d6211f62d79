"""`Executor`: runs one claimed job to its outcome."""

from __future__ import annotations

import asyncio
import inspect
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

from graphile_worker._base.logs import library_logger as logger
from graphile_worker._db.connection.pool_usage import CURRENT_JOB
from graphile_worker._worker.execution.abandoned_threads import AbandonedThreads
from graphile_worker._worker.execution.batch import close_coroutines
from graphile_worker._worker.execution.completion import COMPLETED
from graphile_worker._worker.execution.deadline import Deadline
from graphile_worker._worker.execution.middleware_chain import wrap
from graphile_worker._worker.execution.threads import Threads
from graphile_worker._worker.processes.pool import Processes
from graphile_worker.errors import TaskError, TaskProcessError
from graphile_worker.middleware.base import around_call, overriding
from graphile_worker.outcome import Failed, Interrupted, unwrap_control_flow

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
    from contextvars import Context

    from graphile_worker._base.stop_signals import StopSignal
    from graphile_worker._db.queries.exchange import ClaimedJob
    from graphile_worker._worker.execution.handlers import Call, Handler
    from graphile_worker._worker.execution.job_events import JobRun
    from graphile_worker.context import WorkerEnvironment
    from graphile_worker.job import Job
    from graphile_worker.middleware import Middleware
    from graphile_worker.outcome import Outcome


class Executor:
    """Runs tasks: coroutine functions on the event loop, plain functions on threads, some in processes.

    Args:
        handlers: The tasks' handlers by task identifier.
        environment: What the contexts of all jobs share.
        interrupted_delay: Seconds until an interrupted job is available again.
        middleware: Wraps the call of each job's function.
        processes: Runs the tasks that are declared with ``executor="process"``.
        abandoned: Counts threads that still run after the timeouts of their jobs.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        environment: WorkerEnvironment,
        interrupted_delay: float,
        middleware: Iterable[Middleware] = (),
        processes: Processes | None = None,
        abandoned: AbandonedThreads | None = None,
    ) -> None:
        self._handlers = handlers
        self._environment = environment
        self.interrupted = Interrupted(interrupted_delay)
        self._threads = Threads()
        self.processes = processes or Processes(environment)
        self._closed = False
        self.abandoned = abandoned or AbandonedThreads()
        self.is_cancelled: Callable[[], bool] = lambda: False
        """Whether the event loop is being closed, which cancels the worker and its jobs."""
        self.context: Callable[[], Context] = copy_context().copy
        """Returns a copy of the context variables with which the worker was started, for a job."""
        middleware = list(middleware)
        layers = overriding(middleware, "execute")
        self._perform = wrap(layers, self._call, environment)
        self._call_layers = overriding(middleware, "call")
        # Most tasks are coroutine functions that need nothing around them. Each coroutine in between would
        # cost time whenever a job starts and whenever it continues.
        self._direct = {
            identifier for identifier, handler in handlers.items() if handler.is_direct and not layers
        }
        self._without_context = {
            identifier for identifier in self._direct if not handlers[identifier].takes_context
        }

    def request_stop(self, applies_to: Callable[[str | None], bool] = lambda _task: True) -> None:
        """Ask running jobs to stop: see `StopSignals.set`."""
        self._environment.stop_signals.set(applies_to)

    def request_cancel(self, claimed: ClaimedJob) -> StopSignal:
        """Ask a cancelled job to stop, and return its signal.

        The caller must keep the signal until the job has ended, because the job's context may read it later.
        """
        signal = self._environment.stop_signals.of_job(claimed.job)
        signal.cancelled = True
        signal.set()
        return signal

    def reset_stop_signals(self) -> None:
        """Renew the stop signals, so that jobs that start from now on are not asked to stop."""
        self._environment.stop_signals.reset()

    def close(self) -> None:
        """End idle threads and all processes. Nothing runs after that."""
        self._closed = True
        self._threads.close()
        self.processes.close()

    def execute(self, run: JobRun) -> Coroutine[Any, Any, Outcome]:
        """Run the job to its end, and return its outcome. An error in the task affects only this job."""
        if run.claimed.job.task_identifier in self._without_context:
            return self._execute(run)  # nothing else can complete the job
        return self._execute_completable(run)

    async def _execute_completable(self, run: JobRun) -> Outcome:
        claimed = run.claimed
        claimed.since = run.since
        completions = self._environment.completions
        completions.begin(claimed)
        try:
            outcome = await self._execute(run)
            return outcome if claimed.completion is None else await completions.settle(claimed, outcome)
        finally:
            completions.end(claimed)

    async def _execute(self, run: JobRun) -> Outcome:
        claimed = run.claimed
        job = claimed.job
        CURRENT_JOB.set(job)  # for this job alone, because it runs in a copy of the context
        handler = self._handlers.get(job.task_identifier)
        try:
            if handler is None:
                raise TaskError(f"This worker has no task {job.task_identifier!r}.")  # noqa: TRY301
            if claimed.unreadable is not None:
                raise TaskError(f"{claimed.unreadable}.") from claimed.unreadable  # noqa: TRY301
            deadline = self._deadline(handler, job) if handler.may_time_out or job.flags else None
            if deadline is None and job.task_identifier in self._direct:
                call = handler.call(job, self._environment)
                value = await handler.function(*call.args, **call.kwargs)
                if value is not None:
                    await handler.check_result(job, call, value)
                    run.value = value
            else:
                run.value = await self._perform(handler, job, deadline)
        except asyncio.CancelledError as error:
            # Only a cancellation by the worker is an interruption. Otherwise a task that cancels itself
            # would get its attempt back and run again at once, forever.
            stopped = run.stopped or self.is_cancelled()
            return self.interrupted if stopped else _failure_outcome(handler, job, error)
        except BaseException as error:  # noqa: BLE001 - a task that calls sys.exit() must not end the worker
            if _is_interruption(error):
                return self.interrupted
            return _failure_outcome(handler, job, unwrap_control_flow(error))
        return COMPLETED

    async def _call(self, handler: Handler, job: Job, deadline: Deadline | None) -> Any:
        """Call the task's function on the event loop, a thread or a process, and return its result."""
        call = handler.call(job, self._environment, deadline)
        value = None
        try:
            if call.batch is not None and not call.batch.valid_items:
                pass  # every item has the wrong type
            elif handler.reference is not None:
                value = await self.processes.run(handler.reference, job, deadline)
            elif handler.is_async:
                value = await _within(deadline, handler.function(*call.args, **call.kwargs))
            else:
                value = await self._call_on_thread(handler.function, call, job, deadline)
            if value is not None or call.batch is not None:
                await _within(deadline, handler.check_result(job, call, value))
        except Exception as error:
            if deadline is None or not deadline.overrules(error):
                raise
            raise deadline.over(error) from error
        if deadline is not None and deadline.expired and not call.covers_all_items(value):
            raise deadline.over()  # the task was asked to stop, so it may have returned early
        return value

    def _deadline(self, handler: Handler, job: Job) -> Deadline | None:
        timeout = handler.timeout(job)
        if timeout is None:
            return None
        deadline = Deadline(timeout)
        self._environment.stop_signals.add(job.task_identifier, deadline.stop_requested)
        return deadline

    async def _call_on_thread(
        self, function: Callable[..., Any], call: Call, job: Job, deadline: Deadline | None
    ) -> Any:
        future = self._threads.run(
            copy_context(), around_call(self._call_layers, partial(function, *call.args, **call.kwargs))
        )
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
                    raise  # the worker has given up, and the thread ends with the process
                # A thread cannot be stopped. Until it ends, this worker keeps the job and its queue locked.
                interrupted = cancelled
        value, error = future.result()
        if error is not None:
            raise error
        if not inspect.isawaitable(value):
            return value
        # The plain function returned a coroutine, as a decorated coroutine function may. It is not started
        # if the job was asked to stop in the meantime.
        late = deadline.over() if deadline is not None and deadline.expired else None
        if (reason := interrupted or late) is not None:
            close_coroutines([value])
            raise reason
        return await _within(deadline, value)

    def _abandon(self, job: Job, future: asyncio.Future[Any]) -> None:
        """Stop waiting for a thread, which keeps running."""
        logger.warning(
            "Job %d (%s) exceeded its timeout, but its thread does not end. The worker abandons the thread. "
            "Abandoned threads: %d",
            job.id,
            job.task_identifier,
            self.abandoned.total + 1,
        )
        self.abandoned.add(job.task_identifier)

        def ended(future: asyncio.Future[Any]) -> None:
            value, _error = future.result()
            close_coroutines([value])
            logger.info("The abandoned thread of job %d (%s) has ended", job.id, job.task_identifier)
            self.abandoned.remove(job.task_identifier)

        future.add_done_callback(ended)


def _within(deadline: Deadline | None, work: Awaitable[Any]) -> Awaitable[Any]:
    return work if deadline is None else deadline.watch(work)


def _is_interruption(error: BaseException) -> bool:
    """Return whether the job's process ended because of the worker, and not because of the task."""
    # A task group in a middleware wraps the error.
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return isinstance(error, TaskProcessError) and error.interrupted


def _failure_outcome(handler: Handler | None, job: Job, error: BaseException) -> Outcome:
    """Return the outcome for the error. The user's code may choose it, and that code may fail too."""
    try:
        return Failed(error) if handler is None else handler.failure_outcome(job, error)
    except BaseException:
        logger.exception("Cannot choose the outcome of a failed job of task %r", job.task_identifier)
        return Failed(error)
