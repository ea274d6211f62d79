"""A worker without a loop, which claims, runs and records one job per call."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

from msgspec import structs

from graphile_worker import events as event
from graphile_worker._db.connection.connect import read_committed
from graphile_worker._db.connection.error_mapping import is_about_data
from graphile_worker._db.queries import exchange as database
from graphile_worker._db.queries.cancellations import settle
from graphile_worker._db.queries.exchange import NOTHING, ClaimRequest, Result
from graphile_worker._db.queries.jobs import read_now
from graphile_worker._worker.claiming.claim_limits import ClaimLimiter
from graphile_worker._worker.execution.attempts import AttemptRecorder
from graphile_worker._worker.execution.completion import Completions
from graphile_worker._worker.execution.executor import Executor
from graphile_worker._worker.execution.handlers import read_handlers, read_specs
from graphile_worker._worker.execution.job_log import JobLog
from graphile_worker._worker.execution.slots import Slots
from graphile_worker.context import WorkerEnvironment
from graphile_worker.errors import DatabaseError
from graphile_worker.outcome import Cancel, Failed, Returned, Snooze, Snoozed, as_cancelled, default_delay
from graphile_worker.testing.progress import RecordedProgress

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    from graphile_worker._base.logs import ScopedLogger
    from graphile_worker._db.connection.connect import Connection
    from graphile_worker._db.queries.cancellations import Request
    from graphile_worker._db.queries.exchange import AttemptRecord, ClaimedJob, ExchangeReply
    from graphile_worker._worker.execution.handlers import Handler, Tasks
    from graphile_worker._worker.execution.job_events import JobRun
    from graphile_worker._worker.execution.threads import Threads
    from graphile_worker._worker.options import WorkerOptions
    from graphile_worker.middleware import Middleware
    from graphile_worker.outcome import Outcome
    from graphile_worker.testing.overrides import ClockedUtils

_RETRY_INTERVAL = 0.005
_MAX_CLAIM_WAIT = 0.25
"""Seconds to wait for jobs that another statement has locked; afterwards they count as claimed by it."""
_MAX_RECORD_WAIT = 10.0
"""Seconds for which another transaction may lock the row of a job that has run here."""


THREADS: ContextVar[Callable[[], Threads] | None] = ContextVar("threads", default=None)
"""Returns what runs plain functions, instead of threads of their own."""


class SingleJobWorker:
    """Claims, runs and records jobs with the same code as a worker.

    Args:
        tasks: The function for each task.
        utils: The client for the jobs' database.
        options: The worker's options.
        state: The state that the application's lifespan has yielded.
        logger: The logger; its scope has the worker's id.
    """

    def __init__(
        self, tasks: Tasks, utils: ClockedUtils, options: WorkerOptions, state: Any, logger: ScopedLogger
    ) -> None:
        self._session = utils.session
        self._handlers = handlers = read_handlers(tasks, on_invalid_payload=options.on_invalid_payload)
        self._worker_id = str(logger.extra["worker_id"])
        self._clock, self._real_clock = utils.clock, utils.real_clock()
        self._attempts = AttemptRecorder(options.history, tasks, self._real_clock)
        completions = Completions(utils.session, self._worker_id)
        completions.keep_attempt = self._attempts.record_completion
        environment = WorkerEnvironment(
            worker_id=self._worker_id,
            utils=utils,
            logger=logger,
            now=self._real_clock.now if self._clock is None else self._clock.now,
            specs=read_specs(tasks),
            completions=completions,
        )
        environment.state = state
        self._progress = environment.progress = RecordedProgress(utils.session, self._worker_id)
        self._executor = _CancellableExecutor(handlers, environment, self._cancellation, options.middleware)
        pool = event.WorkerPool(self._worker_id, utils.schema, 1, tuple(handlers))
        self._slots = Slots(pool, 1, self._executor, options.events, self._on_outcome)
        self._outcome: asyncio.Future[tuple[JobRun, Outcome]] | None = None
        self._claim_limiter = ClaimLimiter(
            options.middleware, tuple(handlers), logger, self._executor.abandoned
        )
        self._job_log = JobLog(options.events, logger)
        self._tasks: dict[int, str] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        self._job_log.close()
        self._executor.close()
        await self._executor.processes.closed()

    async def claim(self) -> ClaimedJob | None:
        """Claim the next job that is due; return None if none is."""
        await self._read_task_ids()
        await self._settle_cancellations()
        allowance = self._claim_limiter.allow(1, ())
        if not allowance.wanted:
            return None
        request = ClaimRequest(wanted=allowance.wanted, rooms=allowance.rooms)
        until = monotonic() + _MAX_CLAIM_WAIT
        while True:
            reply = await self._exchange([], request)
            self._real_clock.observe(reply.now)
            if reply.claimed:
                return reply.claimed[0]
            if reply.next_queue:  # so many serial queues are locked that the claim did not visit all
                request = structs.replace(request, after_queue=reply.next_queue)
            elif reply.contended and monotonic() < until:
                await asyncio.sleep(_RETRY_INTERVAL)
            else:
                return None

    async def _read_task_ids(self) -> None:
        """Read the ids of the tasks; in a transaction, a task gets its id when its first job is added."""
        if len(self._tasks) == len(self._handlers):
            return
        schema = self._session.schema

        async def read(on: Connection) -> dict[int, str]:
            # A task registered in a transaction would block every other caller that adds a job of that task.
            query = database.read_tasks if on.is_in_transaction() else database.register_tasks
            return await query(on, schema, self._handlers)

        self._tasks = await self._session.call(read)

    async def _settle_cancellations(self) -> Sequence[Request]:
        """Settle cancellations of waiting jobs; return those that concern running jobs."""
        return await self._session.call(partial(settle, schema=self._session.schema))

    async def _cancellation(self, claimed: ClaimedJob) -> Cancel | None:
        """Return the job's cancellation, if it was cancelled."""
        for request in await self._settle_cancellations():
            if (request.job_id, request.locked_by) == (claimed.job.id, self._worker_id):
                return Cancel(request.reason)
        return None

    async def run(self, claimed: ClaimedJob) -> Outcome | None:
        """Run the job and record its outcome; return None if the job was lost."""
        self._outcome = asyncio.get_running_loop().create_future()
        caller = asyncio.current_task()
        self._slots.watch_worker(lambda: caller is not None and caller.cancelling() > 0)
        self._slots.start(claimed)
        try:
            # A cancelled caller interrupts the job, as a stopped worker does.
            await asyncio.shield(self._outcome)
        except asyncio.CancelledError:
            self._slots.interrupt()
            await self._record(claimed, (await self._outcome)[1])
            raise
        run, outcome = self._outcome.result()
        attempt = None if claimed.is_recorded else self._attempts.record(run, outcome)
        return outcome if await self._record(claimed, outcome, attempt) else None

    async def release(self, claimed: ClaimedJob) -> None:
        """Return a claimed job to the queue without running it."""
        await self._record(claimed, Returned())

    def _on_outcome(self, run: JobRun, outcome: Outcome) -> None:
        if self._outcome is not None:
            self._outcome.set_result((run, outcome))

    async def _record(
        self, claimed: ClaimedJob, outcome: Outcome, attempt: AttemptRecord | None = None
    ) -> bool:
        """Record the outcome; return False if another worker has the job by now, or it is gone."""
        has_progress = await self._progress.store(claimed)
        is_recorded = await self._record_outcome(claimed, outcome, attempt)
        if has_progress:
            await self._progress.delete(claimed)
        return is_recorded

    async def _record_outcome(
        self, claimed: ClaimedJob, outcome: Outcome, attempt: AttemptRecord | None
    ) -> bool:
        until = monotonic() + _MAX_RECORD_WAIT
        while True:
            reply = await self._exchange([Result(claimed, outcome, claimed.queue, attempt=attempt)], NOTHING)
            if not reply.busy:
                # If the task has completed the job, this exchange has only released its queue.
                is_lost = bool(reply.lost) and not claimed.is_recorded
                self._slots.settle([claimed], event.JobLost if is_lost else event.JobComplete)
                return not is_lost
            if monotonic() > until:
                raise DatabaseError(
                    f"Cannot record the outcome of job {claimed.job.id}: another transaction has locked it, "
                    "perhaps by adding its key again. End that transaction first."
                )
            await asyncio.sleep(_RETRY_INTERVAL)

    async def _exchange(self, results: Sequence[Result], request: ClaimRequest) -> ExchangeReply:
        try:
            return await self._session.call(partial(self._exchange_on, results, request))
        except DatabaseError as error:
            if not is_about_data(error.__cause__):
                raise
            results = [structs.replace(result, plain=True) for result in results]
            return await self._session.call(partial(self._exchange_on, results, request))

    async def _exchange_on(
        self, results: Sequence[Result], request: ClaimRequest, on: Connection
    ) -> ExchangeReply:
        schema = self._session.schema
        # One transaction, so that the database's time is the same in all statements.
        async with read_committed(on):
            if self._clock is None:
                request = structs.replace(request, as_of=self._real_clock.as_of)
            else:
                now, moved = await read_now(on, schema), self._clock.now()
                request = structs.replace(request, as_of=moved)
                results = [
                    structs.replace(result, outcome=_with_clock_delay(moved, now, result))
                    for result in results
                ]
            reply = await database.exchange(on, schema, self._worker_id, results, request, self._tasks)
        return reply.read()


class _CancellableExecutor(Executor):
    """An executor that checks at a job's end whether the job was cancelled meanwhile."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        environment: WorkerEnvironment,
        cancellation: Callable[[ClaimedJob], Awaitable[Cancel | None]],
        middleware: Iterable[Middleware],
    ) -> None:
        super().__init__(handlers, environment, 0.0, middleware)
        self._cancellation = cancellation
        if (make_threads := THREADS.get()) is not None:
            self._threads = make_threads()

    async def execute(self, run: JobRun) -> Outcome:
        """Run the job to its end."""
        outcome = await super().execute(run)
        try:
            cancel = await self._cancellation(run.claimed)
        except (Exception, asyncio.CancelledError):  # noqa: BLE001
            # A lasting error is raised again when the outcome is recorded. A cancellation may come from a
            # task that has cancelled itself and returned.
            return outcome
        return outcome if cancel is None else as_cancelled(cancel, outcome)


class _MovedSnooze(Snooze):
    """A snooze with another delay and the original message."""

    def __init__(self, choice: Snooze, delay: float) -> None:
        super().__init__(choice.delay, choice.reason)
        self.__cause__ = choice.__cause__
        self._text = str(choice)
        self.delay = delay

    def __str__(self) -> str:
        return self._text


def _with_clock_delay(moved: datetime, now: datetime, result: Result) -> Outcome:
    """Return the outcome with delays that lead from the database's time to the test clock's.

    The database delays a failed job from now, or from the job's ``run_at`` if that is later.
    """
    outcome, job = result.outcome, result.held.job
    match outcome:
        case Failed():
            own = default_delay(job.attempts) if outcome.delay is None else outcome.delay
            at = None if outcome.at is None else max(outcome.at, moved)
            base = max(now, job.run_at)
            delay = (moved - base).total_seconds() + own if at is None else (at - base).total_seconds()
            return Failed(
                outcome.error,
                delay=delay,
                final=outcome.final,
                left=outcome.left,
                batch_errors=outcome.batch_errors,
            )
        case Snoozed(choice=choice):
            return Snoozed(_MovedSnooze(choice, (moved - now).total_seconds() + choice.delay))
        case _:
            return outcome
