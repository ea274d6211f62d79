"""A worker without a loop of its own: it claims, runs and records one job when it is told to."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

from msgspec import structs

from graphile_worker import events as event
from graphile_worker._db import exchange as database
from graphile_worker._db.cancellations import settle
from graphile_worker._db.connect import read_committed
from graphile_worker._db.exchange import NOTHING, Result, Wish
from graphile_worker._db.failures import is_about_data
from graphile_worker._db.queries import read_now
from graphile_worker._runtime.executor import Executor
from graphile_worker._runtime.gates import Gates
from graphile_worker._runtime.handlers import read_handlers, read_specs
from graphile_worker._runtime.job_log import JobLog
from graphile_worker._runtime.slots import Slots
from graphile_worker.context import Surroundings
from graphile_worker.errors import DatabaseError
from graphile_worker.outcome import Cancel, Failed, Returned, Snooze, Snoozed, as_cancelled, default_delay

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    from graphile_worker._db.cancellations import Request
    from graphile_worker._db.connect import Connection
    from graphile_worker._db.exchange import Held, Reply
    from graphile_worker._runtime.handlers import Handler, Tasks
    from graphile_worker._runtime.runs import Run
    from graphile_worker.logs import ScopedLogger
    from graphile_worker.middleware import Middleware
    from graphile_worker.options import WorkerOptions
    from graphile_worker.outcome import Outcome
    from graphile_worker.testing.places import Place

_LOOK_AGAIN = 0.005
_CONTENDED = 0.25
"""Seconds for which jobs that somebody's statement has locked are waited for; then they are theirs."""
_BUSY = 10.0
"""Seconds for which somebody's transaction may keep the row of a job that we have run."""


class Hands:
    """Does with jobs what a worker does, in the same way.

    Args:
        tasks: The function for each task.
        place: Where the jobs are.
        options: How a worker would run.
        state: What the application has opened for its tasks.
        logger: Where to tell; its scope has the worker's id.
    """

    def __init__(
        self, tasks: Tasks, place: Place, options: WorkerOptions, state: Any, logger: ScopedLogger
    ) -> None:
        self._place, self._session = place, place.session
        self._handlers = handlers = read_handlers(tasks, on_invalid_payload=options.on_invalid_payload)
        self._worker_id = str(logger.extra["worker_id"])
        self._clock, self._real_clock = place.clock, place.real_clock()
        surroundings = Surroundings(
            worker_id=self._worker_id,
            utils=place,
            logger=logger,
            now=self._real_clock.now if self._clock is None else self._clock.now,
            specs=read_specs(tasks),
        )
        surroundings.state = state
        self._executor = _Executor(handlers, surroundings, self._cancellation, options.middleware)
        pool = event.WorkerPool(self._worker_id, place.schema, 1, tuple(handlers))
        self._slots = Slots(pool, 1, self._executor, options.events, self._ended)
        self._outcome: asyncio.Future[Outcome] | None = None
        self._gates = Gates(options.middleware, tuple(handlers), logger, self._executor.abandoned)
        self._job_log = JobLog(options.events, logger)
        self._tasks: dict[int, str] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        self._job_log.close()
        self._executor.close()
        await self._executor.processes.closed()

    async def claim(self) -> Held | None:
        """The next job that is due; None if there is none."""
        await self._learn_tasks()
        await self._requests()
        passage = self._gates.pass_through(1, ())
        if not passage.wanted:
            return None
        wish, until = Wish(wanted=passage.wanted, tasks=passage.tasks), monotonic() + _CONTENDED
        while True:
            reply = await self._ask([], wish)
            self._real_clock.observe(reply.now)
            if reply.claimed:
                return reply.claimed[0]
            if reply.next_queue:  # so many serial queues are locked that not all of them were visited
                wish = replace(wish, after_queue=reply.next_queue)
            elif reply.contended and monotonic() < until:
                await asyncio.sleep(_LOOK_AGAIN)
            else:
                return None

    async def _learn_tasks(self) -> None:
        """Know what jobs call our tasks; in a transaction, names come with the jobs that need them."""
        if len(self._tasks) == len(self._handlers):
            return
        schema = self._session.schema

        async def learn(on: Connection) -> dict[int, str]:
            # Others who add such a job would wait for the transaction because of a name that is new in it.
            ask = database.read_tasks if on.is_in_transaction() else database.register_tasks
            return await ask(on, schema, self._handlers)

        self._tasks = await self._session.call(learn)

    async def _requests(self) -> Sequence[Request]:
        """Settle what was cancelled; returns what is to be done by whoever runs it."""
        return await self._session.call(partial(settle, schema=self._session.schema))

    async def _cancellation(self, held: Held) -> Cancel | None:
        """Why the job is not wanted any more, if that is so."""
        for request in await self._requests():
            if (request.job_id, request.locked_by) == (held.job.id, self._worker_id):
                return Cancel(request.reason)
        return None

    async def run(self, held: Held) -> Outcome | None:
        """Run the job, and record what it came to; None if that could not be, because the job was lost."""
        self._outcome = asyncio.get_running_loop().create_future()
        caller = asyncio.current_task()
        self._slots.watch_worker(lambda: caller is not None and caller.cancelling() > 0)
        self._slots.start(held)
        try:
            # Whoever does not want to wait for it any more interrupts it, as a worker that is stopped does.
            await asyncio.shield(self._outcome)
        except asyncio.CancelledError:
            self._slots.interrupt()
            await self._record(held, await self._outcome)
            raise
        outcome = self._outcome.result()
        return outcome if await self._record(held, outcome) else None

    async def give_back(self, held: Held) -> None:
        """It was claimed, and is not to run."""
        await self._record(held, Returned())

    def _ended(self, _held: Held, outcome: Outcome) -> None:
        if self._outcome is not None:
            self._outcome.set_result(outcome)

    async def _record(self, held: Held, outcome: Outcome) -> bool:
        """Whether the outcome is recorded: not if the job is another's by now, or gone."""
        until = monotonic() + _BUSY
        while True:
            reply = await self._ask([Result(held, outcome, held.queue)], NOTHING)
            if not reply.busy:
                self._slots.settle([held], event.JobLost if reply.lost else event.JobComplete)
                return not reply.lost
            if monotonic() > until:
                raise DatabaseError(
                    f"What became of job {held.job.id} cannot be recorded: a transaction has locked it, "
                    "perhaps by adding its key again. End that first."
                )
            await asyncio.sleep(_LOOK_AGAIN)

    async def _ask(self, results: Sequence[Result], wish: Wish) -> Reply:
        try:
            return await self._session.call(partial(self._exchange, results, wish))
        except DatabaseError as error:
            if not is_about_data(error.__cause__):
                raise
            results = [structs.replace(result, plain=True) for result in results]
            return await self._session.call(partial(self._exchange, results, wish))

    async def _exchange(self, results: Sequence[Result], wish: Wish, on: Connection) -> Reply:
        schema = self._session.schema
        # One transaction, so that the time of the database is the same for all of it.
        async with read_committed(on):
            if self._clock is None:
                wish = replace(wish, as_of=self._real_clock.as_of)
            else:
                now, moved = await read_now(on, schema), self._clock.now()
                wish = replace(wish, as_of=moved)
                results = [structs.replace(one, outcome=_counted_from(moved, now, one)) for one in results]
            answer = await database.exchange(on, schema, self._worker_id, results, wish, self._tasks)
        return answer.read()


class _Executor(Executor):
    """One that looks when a job has ended whether it was cancelled meanwhile."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        surroundings: Surroundings,
        cancellation: Callable[[Held], Awaitable[Cancel | None]],
        middleware: Iterable[Middleware],
    ) -> None:
        super().__init__(handlers, surroundings, 0.0, middleware)
        self._cancellation = cancellation

    async def execute(self, run: Run) -> Outcome:
        """Run the job to its end."""
        outcome = await super().execute(run)
        try:
            choice = await self._cancellation(run.held)
        except (Exception, asyncio.CancelledError):  # noqa: BLE001
            # An error is raised again when the outcome is recorded, or has passed by then. A cancellation may
            # come from a task that has cancelled itself and returned.
            return outcome
        return outcome if choice is None else as_cancelled(choice, outcome)


class _Moved(Snooze):
    """One that says what it said, and takes another time."""

    def __init__(self, choice: Snooze, delay: float) -> None:
        super().__init__(choice.delay, choice.reason)
        self.__cause__ = choice.__cause__
        self._said = str(choice)
        self.delay = delay

    def __str__(self) -> str:
        return self._said


def _counted_from(moved: datetime, now: datetime, result: Result) -> Outcome:
    """The outcome with delays that lead from the database's time to where the test's clock says.

    The database puts off a job that failed from now on, or from the time that it was due, if that is later.
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
            return Snoozed(_Moved(choice, (moved - now).total_seconds() + choice.delay))
        case _:
            return outcome
