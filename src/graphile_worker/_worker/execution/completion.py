"""`Completions`: jobs that their tasks complete in a transaction, together with what they write.

The job's row is deleted at the end of the transaction, under its fence. If the commit is certain, the outcome
is recorded, and the worker only has to release the job's serial queue. If it is not certain, because the
connection was lost or is the caller's, the server is asked for the state of the transaction and of the row.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from graphile_worker._base.logs import library_logger as logger
from graphile_worker._db.connection.transactions import SHORT, UnknownCommitError, commit, uncommitted
from graphile_worker._db.queries import completion as database
from graphile_worker._db.queries.completion import AlreadyCompletedError, Fence
from graphile_worker._db.queries.exchange import Completion
from graphile_worker.errors import (
    ConfigurationError,
    DatabaseError,
    GraphileWorkerError,
    JobLostError,
    TaskError,
)
from graphile_worker.outcome import Cancelled, Completed, Failed, Snoozed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator

    from graphile_worker._db.connection.connect import Connection
    from graphile_worker._db.connection.session import Session
    from graphile_worker._db.queries.exchange import AttemptRecord, ClaimedJob
    from graphile_worker._db.sql_files import Schema
    from graphile_worker.job import Job
    from graphile_worker.outcome import Outcome

COMPLETED = Completed()
_SHORTEST_DELAY = 0.005
_LONGEST_DELAY = 1.0
_LIMIT = 10.0
"""Seconds to wait for the end of a transaction that has deleted the job. Then the exchange waits for it."""


class Completions:
    """Completes the running jobs of a worker in transactions of their tasks.

    Args:
        session: The connections to the database.
        worker_id: The name under which the worker locks jobs.
    """

    def __init__(self, session: Session, worker_id: str) -> None:
        self._session = session
        self._worker_id = worker_id
        self._running: dict[object, ClaimedJob] = {}
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self.wait_for_renewal: Callable[[], Coroutine[Any, Any, None]] = _do_nothing
        """Waits until the worker knows the new times of locks that it is renewing."""
        self.keep_attempt: Callable[[ClaimedJob], AttemptRecord | None] = lambda _claimed: None
        """Returns what the history keeps about an attempt that completes its job now, on any thread."""

    def begin(self, claimed: ClaimedJob) -> None:
        """Let the task of this job complete it."""
        self._running[_key(claimed.job)] = claimed

    def end(self, claimed: ClaimedJob) -> None:
        """Reject later completions: the job has ended, even if one of its threads still runs."""
        self._running.pop(_key(claimed.job), None)

    @asynccontextmanager
    async def transaction(self, job: Job) -> AsyncIterator[Connection]:
        """Open a transaction on a connection for tasks. At its end the job is completed in it."""
        claimed = self._find(job)
        try:
            async with self._session.pool.lend() as connection:
                # A test's transaction around this one stays as it is.
                idle = None if connection.is_in_transaction() else SHORT
                async with uncommitted(connection) as own:
                    yield connection
                    with _refusing_another_completion(job):
                        deleted = await self._delete(
                            claimed,
                            _transaction_of(claimed),
                            partial(database.complete, connection, idle=idle),
                        )
                    claimed.completion = Completion(deleted)
                    try:
                        cancelled = await commit(connection, own)
                    except (UnknownCommitError, asyncio.CancelledError):
                        raise
                    except BaseException:
                        claimed.completion = None  # the server rejected the commit
                        raise
                    claimed.completion.is_committed = True
                    if cancelled is not None:
                        raise cancelled
        except UnknownCommitError as unknown:
            await self._resolve(claimed, unknown)

    async def complete(self, job: Job, connection: Any) -> None:
        """Complete the job in the transaction of the caller's connection."""
        claimed = self._find(job)
        before = _transaction_of(claimed)
        with _completing(claimed) as completion:
            completion.transaction = await self._delete(
                claimed, before, partial(database.complete_for_caller, connection)
            )

    def complete_sync(self, job: Job, connection: Any) -> None:
        """Complete the job in the transaction of the caller's connection, which blocks."""
        claimed = self._find(job)
        schema, before = self._session.schema, _transaction_of(claimed)
        with _completing(claimed) as completion:
            while (
                deleted := database.complete_for_caller_sync(
                    connection, schema, fence := self._fence(claimed, before)
                )
            ) is None:
                if threading.get_ident() != self._loop_thread:  # a blocked event loop renews nothing
                    asyncio.run_coroutine_threadsafe(self.wait_for_renewal(), self._loop).result()
                _check_renewed(claimed, fence)
            completion.transaction = deleted

    async def settle(self, claimed: ClaimedJob, outcome: Outcome) -> Outcome:
        """Return the outcome to record for a job that its task has completed in a transaction.

        The function may have ended with another outcome after that. If the transaction is committed, that
        outcome has no effect, because the job is done.
        """
        # Cancelled if the worker gives up the job. Then the exchange decides, under the job's fence.
        with suppress(asyncio.CancelledError):
            await self._find_out(claimed)
        if claimed.is_recorded:
            _log_ignored(claimed.job, outcome)
            return COMPLETED
        if not isinstance(outcome, Completed):
            return outcome
        return Failed(
            TaskError(
                "The task called ctx.complete, but the transaction was not committed. Commit it before the "
                "task returns."
            )
        )

    def _find(self, job: Job) -> ClaimedJob:
        claimed = self._running.get(_key(job))
        if claimed is None:
            raise JobLostError(
                f"Job {job.id} ({job.task_identifier}) has already ended, so it cannot be completed."
            )
        if claimed.is_recorded:
            raise already_complete(job)
        return claimed

    def _fence(self, claimed: ClaimedJob, before: int | None) -> Fence:
        attempt = self.keep_attempt(claimed)
        return Fence(claimed.job.id, self._worker_id, claimed.locked_at, attempt, before)

    async def _delete(
        self,
        claimed: ClaimedJob,
        before: int | None,
        delete: Callable[[Schema, Fence], Awaitable[int | None]],
    ) -> int:
        """Delete the job under its fence, and return the id of the transaction."""
        schema = self._session.schema
        while (deleted := await delete(schema, fence := self._fence(claimed, before))) is None:
            await self.wait_for_renewal()
            _check_renewed(claimed, fence)
        return deleted

    async def _resolve(self, claimed: ClaimedJob, unknown: UnknownCommitError) -> None:
        """Find out whether the transaction was committed. If not, raise an error."""
        found = await self._find_out(claimed)
        if found:
            return
        result = "It is still unknown whether the transaction is committed"
        if found is not None:
            claimed.completion = None
            result = "The transaction is rolled back"
        raise DatabaseError(
            f"The connection to the database was lost during the commit of job {claimed.job.id} "
            f"({claimed.job.task_identifier}). {result}."
        ) from unknown.__cause__

    async def _find_out(self, claimed: ClaimedJob) -> bool | None:
        """Return whether the transaction has completed the job; None if that is not known in time."""
        completion, delay = claimed.completion, _SHORTEST_DELAY
        if completion is None or completion.is_committed:
            return completion is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(_LIMIT):
                while True:
                    with suppress(GraphileWorkerError):  # an outage
                        found = await self._session.call(
                            lambda on: database.was_completed(
                                on, self._session.schema, claimed.job.id, completion.transaction
                            ),
                            attempts=1,
                        )
                        if found is not None:
                            completion.is_committed = found
                            return found
                    await asyncio.sleep(delay)
                    delay = min(2 * delay, _LONGEST_DELAY)
        return None


@contextmanager
def _completing(claimed: ClaimedJob) -> Iterator[Completion]:
    """Let the outcome be uncertain from now on, unless the job's row was certainly not deleted."""
    before, claimed.completion = claimed.completion, (completion := Completion())
    try:
        with _refusing_another_completion(claimed.job):
            yield completion
    except (JobLostError, ConfigurationError, TaskError):
        claimed.completion = before
        raise


@contextmanager
def _refusing_another_completion(job: Job) -> Iterator[None]:
    try:
        yield
    except AlreadyCompletedError as error:
        raise already_complete(job, error.where) from None


def _transaction_of(claimed: ClaimedJob) -> int | None:
    """Return the id of the transaction in which the task has already completed the job."""
    return None if claimed.completion is None else claimed.completion.transaction


def _check_renewed(claimed: ClaimedJob, fence: Fence) -> None:
    """Raise an error, unless the worker has renewed the job's lock since the fence was read."""
    if claimed.locked_at == fence.locked_at:
        raise JobLostError(
            f"Job {fence.id} ({claimed.job.task_identifier}) cannot be completed: its worker does not hold "
            "it any more, and another worker may run it. Roll back the transaction."
        )


def already_complete(job: Job, where: Literal["this", "open", "committed"] = "committed") -> TaskError:
    """Return the error for a job that its task has already completed, in which transaction."""
    job_name = f"Job {job.id} ({job.task_identifier})"
    match where:
        case "this":
            return TaskError(
                f"{job_name} is already completed in this transaction. Complete it once, and commit. "
                "ctx.transaction() does both at the end of its block."
            )
        case "open":
            return TaskError(
                f"{job_name} is already completed in another transaction, which is still open. Commit that "
                "transaction, or roll it back first."
            )
        case _:
            return TaskError(
                f"{job_name} is already complete. A task can complete its job once: use ctx.connection() for "
                "what follows."
            )


def _key(job: Job) -> object:
    return job.id, job.locked_at


async def _do_nothing() -> None:
    pass


def _log_ignored(job: Job, outcome: Outcome) -> None:
    """Log what the function did after it had completed the job."""
    match outcome:
        case Completed():
            pass
        case Failed(error=error):
            logger.error(
                "Job %d (%s) is complete, but its task failed after that: %s",
                job.id,
                job.task_identifier,
                error,
                exc_info=error,
            )
        case Snoozed(choice=choice) | Cancelled(choice=choice):
            logger.warning(
                "Job %d (%s) is complete, so what its task raised after that has no effect: %s",
                job.id,
                job.task_identifier,
                choice,
            )
        case _:
            logger.info(
                "Job %d (%s) is complete. The worker stopped what its task did after that",
                job.id,
                job.task_identifier,
            )
