"""Waiting for the results of jobs: one query at a time for all that this client waits for.

A job whose caller waits also sends a notification when it has ended. Notifications only shorten the wait:
everything works without them, for example behind a pooler.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from contextvars import ContextVar
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from graphile_worker._base.durations import format_seconds
from graphile_worker._base.payload import decode_payload
from graphile_worker._db.connection.error_mapping import ErrorKind, classify_error, message_of
from graphile_worker._db.connection.listen import listening
from graphile_worker._db.connection.pool_usage import CURRENT_JOB
from graphile_worker._db.queries.results import JobEnd, completed_with, read_results
from graphile_worker.errors import (
    ConfigurationError,
    GraphileWorkerError,
    JobCancelledError,
    JobFailedError,
    ResultTimeoutError,
    ResultUnknownError,
)
from graphile_worker.history import CALLER_FLAG, ENDED_CHANNEL, AttemptOutcome

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from graphile_worker._db.connection.session import Session
    from graphile_worker.job import AwaitedJob, JobSpec

_SHORTEST = 0.02
"""Seconds between two queries, and until the second query about a job."""
_LONGEST = 1.0
"""Seconds between two queries about a job that takes long."""
_LINGER = 60.0
"""Seconds for which to listen after the last call, because the next one may come soon."""
_LISTEN_AGAIN = 5.0
_MAX_EARLY = 256
"""How many results to keep that arrive before their callers wait for them."""


class JobRunner(NamedTuple):
    """Runs the jobs that are due while code waits for a result: in a test, no worker does it."""

    loop: asyncio.AbstractEventLoop
    run: Callable[[], Awaitable[object]]
    running: set[int]
    """The ids of the jobs that run, also for other code that waits."""


JOB_RUNNER: ContextVar[JobRunner | None] = ContextVar("graphile_worker_job_runner", default=None)


class _Completed(msgspec.Struct):
    """A notification that a job is complete."""

    id: int
    result: msgspec.Raw


class _Waiter:
    """Code that waits for the end of a job."""

    __slots__ = ("delay", "due", "future", "job")

    def __init__(self, job: AwaitedJob, due: float) -> None:
        self.job = job
        self.delay = _SHORTEST
        self.due = due
        # An error is a result too: asyncio would log an exception that is not retrieved.
        self.future: asyncio.Future[JobEnd | BaseException] = asyncio.get_running_loop().create_future()

    def resolve(self, end: JobEnd | BaseException) -> None:
        if not self.future.done():  # it may have been cancelled
            self.future.set_result(end)

    def postpone(self, now: float, *, delay: float | None = None) -> None:
        self.due = now + (self.delay if delay is None else delay)
        self.delay = min(2 * self.delay, _LONGEST)


class ResultPoller:
    """Waits for the results of any number of jobs, on one event loop.

    Args:
        session: The connections to the database.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        token = secrets.token_hex(16)
        self.flag = f"{CALLER_FLAG}{token}"
        """The flag of jobs that are called: their workers announce their ends here."""
        self._channel = f"{ENDED_CHANNEL}:{token}"
        self._waiters: dict[int, list[_Waiter]] = {}
        self._notified: set[int] = set()
        self._early: dict[int, JobEnd | None] = {}
        """The ended called jobs that nothing waits for, not yet or not any more; None without the result."""
        self._woken = asyncio.Event()
        self._last_query = 0.0
        self._polling: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._last_call = 0.0
        self.is_listening = False
        self._is_failing = False

    async def wait(self, job: AwaitedJob, limit: float | None) -> Any:
        """Wait until the job has ended, and return its result.

        Args:
            job: The job.
            limit: Seconds to wait; 0 to check once, None for no limit.

        Raises:
            JobError: The job has failed or was cancelled, its result is not known, or it has not ended.
        """
        end: JobEnd | BaseException | None
        if (runner := JOB_RUNNER.get()) is not None:
            end = await self._wait_and_run(job, runner)
        elif limit == 0:
            end = await self._check(job)
        else:
            end = await self._wait(job, limit)
        if end is None:
            raise _not_ended(job, limit)
        if isinstance(end, BaseException):
            raise end
        return _value(job, end)

    async def close(self) -> None:
        """Stop waiting: everything that waits fails."""
        tasks = [task for task in (self._polling, self._listening) if task is not None]
        closed = ConfigurationError(
            "The connections were closed while this code waited for the result of a job. The job is not "
            "affected."
        )
        self._fail(closed)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._polling = self._listening = None
        self._fail(closed)  # waits that began in the meantime

    def listen(self) -> None:
        """Listen for the ends of jobs that are called, now and for some time."""
        self._last_call = monotonic()
        if self._listening is None and self._can_listen():
            self._listening = asyncio.create_task(self._keep_listening(), name="graphile-worker results")

    async def _check(self, job: AwaitedJob) -> JobEnd | None:
        found = await self._session.call(
            lambda on: read_results(on, self._session.schema, {job.id: job.since})
        )
        return found.get(job.id)

    async def _wait_and_run(self, job: AwaitedJob, runner: JobRunner) -> JobEnd | None:
        """Run the jobs that are due if the job has not ended. No other code runs them."""
        end = await self._check(job)
        if end is None:
            if runner.loop is asyncio.get_running_loop():
                await runner.run()
            else:
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_await(runner.run), runner.loop))
            end = await self._check(job)
            while end is None and job.id in runner.running:
                await asyncio.sleep(_SHORTEST)
                end = await self._check(job)
        return end

    async def _wait(self, job: AwaitedJob, limit: float | None) -> JobEnd | BaseException | None:
        # The notification may be faster than the reply to the statement that added the job.
        has_ended, early = job.id in self._early, self._early.pop(job.id, None)
        if early is not None:
            return early
        if has_ended:
            self._notified.add(job.id)
        # A job that was only just added has not ended otherwise.
        waiter = _Waiter(job, monotonic() + (_SHORTEST if job.is_called else 0.0))
        self._waiters.setdefault(job.id, []).append(waiter)
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll(), name="graphile-worker results")
        self._woken.set()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(limit):
                    return await waiter.future
            return None
        finally:
            self._forget(waiter)

    def _forget(self, waiter: _Waiter) -> None:
        waiters = self._waiters.get(waiter.job.id, [])
        if waiter in waiters:
            waiters.remove(waiter)
        if not waiters:
            self._waiters.pop(waiter.job.id, None)
        if not self._waiters:
            self._woken.set()  # nothing is left to poll for

    def _fail(self, error: BaseException, job_ids: Iterable[int] | None = None) -> None:
        for job_id in list(self._waiters) if job_ids is None else job_ids:
            for waiter in self._waiters.get(job_id, ()):
                waiter.resolve(error)

    async def _poll(self) -> None:
        """Query the database while code waits. One query serves all jobs that are due."""
        try:
            while self._waiters:
                self._woken.clear()
                pause = 0.0 if self._notified else self._next_query() - monotonic()
                if pause > 0:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(pause):
                            await self._woken.wait()
                else:
                    await self._query()
        except Exception as error:  # noqa: BLE001 - otherwise everything would wait forever
            self._fail(error)
        finally:
            self._polling = None

    def _next_query(self) -> float:
        due = min(waiter.due for waiters in self._waiters.values() for waiter in waiters)
        return max(due, self._last_query + _SHORTEST)

    async def _query(self) -> None:
        now = self._last_query = monotonic()
        # Jobs that are due soon are part of the same query.
        soon = now + _SHORTEST / 2
        due = [
            waiter
            for job_id, waiters in self._waiters.items()
            for waiter in waiters
            if job_id in self._notified or waiter.due <= soon
        ]
        self._notified.clear()
        since = {waiter.job.id: waiter.job.since for waiter in due}
        if not since:
            return
        try:
            ends = await self._session.call(
                lambda on: read_results(on, self._session.schema, since), attempts=1
            )
        except GraphileWorkerError as error:
            self._handle_failure(error, due)
            return
        if self._is_failing:
            self._is_failing = False
            self._session.logger.info("The database is available again: waiting for results continues")
        now = monotonic()
        for waiter in due:
            if (end := ends.get(waiter.job.id)) is not None:
                waiter.resolve(end)
                # At once: the caller may use the same connection now, so no query about it may follow.
                self._forget(waiter)
            else:
                waiter.postpone(now)

    def _handle_failure(self, error: GraphileWorkerError, due: list[_Waiter]) -> None:
        """Try again later, or stop waiting if that does not help."""
        if classify_error(error.__cause__ or error) is ErrorKind.FATAL:
            self._fail(error, [waiter.job.id for waiter in due])
            return
        if not self._is_failing:
            self._is_failing = True
            self._session.logger.warning(
                "Cannot read the results of jobs (%s). Waiting until the database is available",
                message_of(error),
            )
        now = monotonic()
        for waiter in due:
            waiter.postpone(now, delay=_LONGEST)

    async def _keep_listening(self) -> None:
        try:
            while self._is_called():
                with suppress(Exception):  # it polls meanwhile, and a failed query is reported
                    await self._listen_once()
                await asyncio.sleep(_LISTEN_AGAIN if self._is_called() else 0)
        finally:
            self._listening = None

    async def _listen_once(self) -> None:
        """Listen until the connection is lost, or nothing was called for a while."""
        # What is not recorded by a worker is announced on the channel of all callers.
        channels = [self._channel, ENDED_CHANNEL]
        async with listening(self._session.pool, channels, self._on_notification) as listener:
            # Notifications that were sent before are lost.
            self.is_listening = True
            self._notified |= self._waiters.keys()
            self._woken.set()
            try:
                while self._is_called():
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_LINGER):
                            await listener.closed.wait()
                            return
            finally:
                self.is_listening = False

    def _can_listen(self) -> bool:
        pool = self._session.pool
        return pool.can_spare_one and pool.prepared_statements  # otherwise a pooler may share the session

    def _is_called(self) -> bool:
        """Whether code waits for a job that it called, or did so recently."""
        return monotonic() - self._last_call < _LINGER or any(
            waiter.job.is_called for waiters in self._waiters.values() for waiter in waiters
        )

    def _on_notification(self, channel: str, message: str) -> None:
        end = None
        if message.isdecimal():
            job_id = int(message)
        elif channel != self._channel:
            return
        else:
            completed = msgspec.json.decode(message, type=_Completed)
            job_id, end = completed.id, completed_with(bytes(completed.result).decode())
        waiters = self._waiters.get(job_id)
        if waiters is None:
            if channel == self._channel:
                self._early[job_id] = end
            if len(self._early) > _MAX_EARLY:
                del self._early[next(iter(self._early))]
        elif end is None:
            self._notified.add(job_id)
            self._woken.set()
        else:
            for waiter in waiters:
                waiter.resolve(end)


def reject_waiting_for_itself(job: AwaitedJob) -> None:
    """Reject a job that waits for its own result."""
    current = CURRENT_JOB.get()
    if (
        current is not None
        and current.id == job.id
        and job.task_identifier in {"", current.task_identifier}
        and job.since in {None, current.created_at}
    ):
        raise ConfigurationError(f"{job} waits for its own result, which would never end.")


def reject_waiting_in_queue(spec: JobSpec) -> None:
    """Reject a call of a job that cannot start before the calling job has ended."""
    current = CURRENT_JOB.get()
    if current is not None and spec.queue_name is not None and current.queue_name == spec.queue_name:
        raise ConfigurationError(
            f"Job {current.id} ({current.task_identifier}) calls a job of its own serial queue "
            f"{spec.queue_name!r}, which cannot start before the calling job has ended. Use another queue, "
            "or enqueue the job without waiting for it."
        )


async def _await(function: Callable[[], Awaitable[object]]) -> None:
    await function()


def _value(job: AwaitedJob, end: JobEnd) -> Any:
    """Return the result of a job that has ended, as plain JSON.

    Raises:
        JobError: It has none.
    """
    is_last = end.outcome is not None and end.final
    error = end.last_error if end.is_there else end.error
    if end.is_cancelled:
        raise JobCancelledError(job.id, job.task_identifier, error or "")
    if end.is_there or (is_last and end.outcome is not AttemptOutcome.COMPLETED):
        raise JobFailedError(
            job.id,
            job.task_identifier,
            error or "",
            error_type=end.error_type,
            traceback=end.traceback,
        )
    if end.result is not None and is_last:
        try:
            return decode_payload(end.result)
        except ValueError as why:
            raise ResultUnknownError(f"{job} has a result that cannot be decoded: {why}.", job.id) from None
    raise ResultUnknownError(_why_unknown(job, end, is_last=is_last), job.id)


def _why_unknown(job: AwaitedJob, end: JobEnd, *, is_last: bool) -> str:
    if end.no_result is not None and is_last:
        return f"{job} is complete, but its result is not kept: {end.no_result}."
    if is_last:
        return (
            f"{job} is complete, but its result is not kept. Declare its task with keep_result=True. If that "
            "is so, the job was completed by hand, or another caller has replaced it by its job key."
        )
    if job.was_added_in_transaction:
        return (
            f"{job} is not in the queue. The transaction in which it was added is not committed or was "
            "rolled back: commit it before you wait. If it is committed, a worker that keeps no results has "
            "run the job."
        )
    return (
        f"{job} is not in the queue, and no result is kept. A Node or Rust worker has completed it, it was "
        "removed, its result is older than history_keep, or there is no job with this id."
    )


def _not_ended(job: AwaitedJob, limit: float | None) -> ResultTimeoutError:
    if JOB_RUNNER.get() is not None:
        return ResultTimeoutError(
            f"{job} has not ended, although all jobs that are due have run. It is scheduled for later, or "
            "waits for a retry. Move the test's clock.",
            job.id,
        )
    when = "yet" if not limit else f"within {format_seconds(limit)}"
    return ResultTimeoutError(f"{job} has not ended {when}. It goes on; to stop it, cancel it.", job.id)
