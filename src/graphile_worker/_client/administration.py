"""The part of `WorkerUtils` that manages jobs, workers and the schema."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from graphile_worker._base.checked_connection import CheckedConnection
from graphile_worker._base.durations import seconds
from graphile_worker._client.bulk import BulkOperations
from graphile_worker._client.history import HistoryOperations
from graphile_worker._client.limiting import LimitOperations
from graphile_worker._client.pausing import PauseOperations
from graphile_worker._client.statistics import StatisticsReader
from graphile_worker._client.sync_twins import sync_twin
from graphile_worker._db.connection.any_connection import run_own
from graphile_worker._db.queries import caller_jobs, crontabs, jobs, workers as worker_queries
from graphile_worker._db.queries.cancellations import cancel_many, cancelling
from graphile_worker._db.queries.cleanup import delete_permafailed_jobs, delete_unused
from graphile_worker._db.schema.migrate import find_pending
from graphile_worker._recovery.sweeper import RecoveryPolicy, Sweeper
from graphile_worker.errors import ConfigurationError, InvalidJobError
from graphile_worker.job import (
    MAX_JOB_KEY_LENGTH,
    SMALLINT,
    Job,
    JobState,
    check_integer,
    check_text,
    read_instant,
)
from graphile_worker.outcome import storable
from graphile_worker.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from graphile_worker._base.durations import Duration
    from graphile_worker._db.connection.any_connection import Operation
    from graphile_worker._db.connection.connect import Connection
    from graphile_worker._db.connection.drivers import AnyConnection
    from graphile_worker._db.connection.session import Session
    from graphile_worker._db.queries.cancellations import CancelAnswer
    from graphile_worker._db.queries.crontabs import KnownCrontab
    from graphile_worker._db.schema.migrate import Pending
    from graphile_worker.workers import OnRecovery, RecoveredWorker, WorkerInfo

T = TypeVar("T")
_SWEEP_INTERVAL = 0.25
_MAX_TEXT_LENGTH = 10_000_000


class CleanupTask(StrEnum):
    """The kinds of rows that `WorkerUtils.cleanup` can remove."""

    DELETE_PERMAFAILED_JOBS = "DELETE_PERMAFAILED_JOBS"
    """Jobs without attempts left."""
    GC_TASK_IDENTIFIERS = "GC_TASK_IDENTIFIERS"
    """Task identifiers that no job uses. Running workers remember the ids of their tasks. Stop the workers
    first, or keep the identifiers of their tasks."""
    GC_JOB_QUEUES = "GC_JOB_QUEUES"
    """Queues without jobs."""


class CleanupResult(NamedTuple):
    """The number of rows of each kind that `WorkerUtils.cleanup` removed."""

    jobs: int = 0
    task_identifiers: int = 0
    queues: int = 0


class Administration(HistoryOperations, LimitOperations, PauseOperations, StatisticsReader):
    """The part of `WorkerUtils` that manages existing jobs."""

    def __init__(self, session: Session, *, use_local_time: bool, require_transaction: bool = False) -> None:
        self._session = session
        self._use_local_time = use_local_time
        self._require_transaction = require_transaction

    @property
    def many(self) -> BulkOperations:
        """Operations on very large numbers of jobs, in batches."""
        return BulkOperations(self._session)

    async def pending_migrations(self, *, connection: Connection | None = None) -> Pending:
        """Return what `migrate` would do, in words and as SQL. The words are empty if nothing is pending."""
        schema = self._session.schema
        return await self._session.call(lambda on: find_pending(on, schema), connection)

    async def remove_job(self, job_key: str, *, connection: AnyConnection | None = None) -> Job | None:
        """Remove the job with this key.

        A running job is not stopped. It loses its key, and is not retried.

        Args:
            job_key: Key of the job.
            connection: The caller's connection or session, as for `WorkerUtils.add_job`.

        Returns:
            The removed job; None if no job has the key.

        Raises:
            InvalidJobError: The key is invalid.
        """
        check_text("job_key", job_key, max_length=MAX_JOB_KEY_LENGTH, code="GWBJK")
        schema = self._session.schema

        async def remove(on: Connection) -> Job | None:
            removed = await jobs.change_jobs(on, schema, "remove_job", job_key)
            return removed[0] if removed else None

        return await self._run(remove, lambda: caller_jobs.removing_job(schema, job_key), connection)

    async def complete_jobs(
        self, job_ids: Iterable[int], *, connection: AnyConnection | None = None
    ) -> list[Job]:
        """Delete jobs as if they had succeeded. Running jobs are not changed.

        Args:
            job_ids: Ids of the jobs.
            connection: The caller's connection or session, as for `WorkerUtils.add_job`.

        Returns:
            The deleted jobs.
        """
        ids, schema = _check_ids(job_ids), self._session.schema
        return await self._run(
            lambda on: jobs.complete_jobs(on, schema, ids),
            lambda: caller_jobs.completing_jobs(schema, ids),
            connection,
        )

    async def permanently_fail_jobs(
        self, job_ids: Iterable[int], reason: str | None = None, *, connection: AnyConnection | None = None
    ) -> list[Job]:
        """Fail jobs permanently, so that they are not retried. Running jobs are not changed.

        Args:
            job_ids: Ids of the jobs.
            reason: Text to store in `last_error`.
            connection: The caller's connection or session, as for `WorkerUtils.add_job`.

        Returns:
            The changed jobs.
        """
        _check_texts(reason=reason)
        ids, schema = _check_ids(job_ids), self._session.schema
        return await self._run(
            lambda on: jobs.permanently_fail_jobs(on, schema, ids, reason),
            lambda: caller_jobs.failing_jobs(schema, ids, reason),
            connection,
        )

    async def cancel_job(
        self, job_id: int, reason: str | None = None, *, connection: AnyConnection | None = None
    ) -> CancelAnswer | None:
        """Cancel a job, even if it is running.

        Args:
            job_id: Id of the job.
            reason: The reason, stored in `last_error`.
            connection: The caller's connection or session, as for `WorkerUtils.add_job`.

        Returns:
            ``"cancelled"`` if the job had not started. ``"requested"`` if it is running: its worker is
            notified, but the job may still succeed. None if the job does not exist or has failed permanently.
        """
        _check_ids([job_id])
        _check_texts(reason=reason)
        schema, why = self._session.schema, storable(reason or "")
        results = await self._run(
            lambda on: cancel_many(on, schema, [job_id], why),
            lambda: cancelling(schema, [job_id], why),
            connection,
        )
        return results[job_id].answer if job_id in results else None

    async def reschedule_jobs(
        self,
        job_ids: Iterable[int],
        *,
        run_at: datetime | timedelta | str | None = None,
        priority: int | None = None,
        attempts: int | None = None,
        max_attempts: int | None = None,
        connection: AnyConnection | None = None,
    ) -> list[Job]:
        """Change when jobs run, and how often. Running jobs are not changed.

        To run failed jobs again with all their attempts, use
        ``reschedule_jobs(ids, run_at=timedelta(0), attempts=0)``.

        Args:
            job_ids: Ids of the jobs.
            run_at: Earliest start, as for `WorkerUtils.add_job`; None leaves it unchanged.
            priority: New priority; None leaves it unchanged.
            attempts: New number of attempts made so far; None leaves it unchanged.
            max_attempts: New maximum number of attempts; None leaves it unchanged.
            connection: The caller's connection or session, as for `WorkerUtils.add_job`.

        Returns:
            The changed jobs.

        Raises:
            InvalidJobError: An argument is invalid. Nothing was changed.
        """
        at = None if run_at is None else read_instant("run_at", run_at)
        if at is not None and self._use_local_time:
            at = by_local_clock(at)
        for name, value, allowed in (
            ("priority", priority, SMALLINT),
            ("attempts", attempts, range(SMALLINT.stop)),
            ("max_attempts", max_attempts, range(1, SMALLINT.stop)),
        ):
            if value is not None:
                check_integer(name, value, allowed, code="GWBMA" if name == "max_attempts" else None)
        ids, schema = _check_ids(job_ids), self._session.schema
        changes = {"priority": priority, "attempts": attempts, "max_attempts": max_attempts}
        return await self._run(
            lambda on: jobs.change_jobs(
                on, schema, "reschedule_jobs", ids, *jobs.split_instant(at), *changes.values()
            ),
            lambda: caller_jobs.rescheduling_jobs(schema, ids, at, changes),
            connection,
        )

    async def force_unlock_workers(
        self, worker_ids: Iterable[str], *, connection: AnyConnection | None = None
    ) -> None:
        """Release all jobs and queues that these workers have locked.

        Only use it for workers that have ended. The jobs of a running worker would run twice.

        Args:
            worker_ids: Ids of the workers, as in the column ``locked_by``.
            connection: The caller's connection or session, as for `WorkerUtils.add_job`.
        """
        ids, schema = _check_names("worker_ids", worker_ids), self._session.schema
        await self._run(
            lambda on: jobs.force_unlock_workers(on, schema, ids),
            lambda: caller_jobs.unlocking_workers(schema, ids),
            connection,
        )

    async def workers(
        self, *, include_locks: bool = True, connection: AnyConnection | None = None
    ) -> list[WorkerInfo]:
        """List the known workers.

        Python workers and workers of the Rust port send heartbeats. Node workers do not; they are listed only
        while they hold locks.

        Args:
            include_locks: Whether to count the locks of each worker, with one pass over the jobs.
            connection: The caller's connection or session, as for `WorkerUtils.add_job`.
        """
        schema = self._session.schema
        return await self._read(
            lambda: worker_queries.listing_workers(schema, include_locks=include_locks), connection
        )

    async def sweep(
        self,
        *,
        recovery_delay: Duration = 0.0,
        refund_attempt_on_recovery: bool = False,
        on_recovery: OnRecovery | None = None,
        dry_run: bool = False,
    ) -> list[RecoveredWorker]:
        """Release the jobs and queues of dead workers, as running workers do continually.

        Only Python workers can be declared dead, because only their heartbeats carry a lease. The sweep takes
        as long as the lease of a silent worker, by default 8 or 38 seconds. If all workers are alive, it
        takes until each has sent a heartbeat, by default 3 seconds.

        Args:
            recovery_delay: How long released jobs wait before they run again, as for `run`.
            refund_attempt_on_recovery: Whether the interrupted attempt of a job does not count.
            on_recovery: A hook that chooses the `RecoveryAction` of each job.
            dry_run: Whether to release nothing, and only return what would be released.

        Returns:
            The dead workers, with the released jobs and queues.
        """
        policy = RecoveryPolicy(
            delay=seconds("recovery_delay", recovery_delay),
            refund=refund_attempt_on_recovery,
            on_recovery=on_recovery,
        )
        schema = self._session.schema
        if not await self._session.call(lambda on: worker_queries.keeps_heartbeats(on, schema)):
            return []  # no Python worker has ever run on this schema
        sweeper = Sweeper(session=self._session, name="sweep", policy=policy, dry_run=dry_run)
        found = {one.worker.id: one for one in await sweeper.sweep(all_dead=True)}
        while sweeper.undecided - found.keys():
            await asyncio.sleep(_SWEEP_INTERVAL)
            found |= {one.worker.id: one for one in await sweeper.sweep()}
        return list(found.values())

    async def cleanup(
        self,
        tasks: CleanupTask | str | Iterable[CleanupTask | str] = (CleanupTask.GC_JOB_QUEUES,),
        *,
        keep_task_identifiers: Iterable[str] = (),
        connection: Connection | None = None,
    ) -> CleanupResult:
        """Remove rows that are not needed any more: see `CleanupTask`.

        While task identifiers and queues are removed, calls that add or claim jobs wait for a moment.

        Args:
            tasks: What to remove; by default queues without jobs.
            keep_task_identifiers: Task identifiers to keep, above all those of running workers.
            connection: The caller's asyncpg connection, not one from another driver. The locks then last
                until its transaction ends.

        Returns:
            How many rows of each kind were removed.

        Raises:
            ConfigurationError: A cleanup task is unknown.
        """
        allowed = [task.value for task in CleanupTask]
        wanted = {str(task) for task in ([tasks] if isinstance(tasks, str) else tasks)}
        if unknown := sorted(wanted - set(allowed)):
            raise ConfigurationError(
                f"Unknown cleanup task {', '.join(unknown)}: it must be one of {', '.join(allowed)}."
            )
        keep = _check_names("keep_task_identifiers", keep_task_identifiers)
        schema, call = self._session.schema, self._session.call
        jobs = identifiers = queues = 0
        # The order matters: removing jobs leaves more task identifiers and queues unused.
        if CleanupTask.DELETE_PERMAFAILED_JOBS in wanted:
            jobs = await call(lambda on: delete_permafailed_jobs(on, schema), connection)
        if CleanupTask.GC_TASK_IDENTIFIERS in wanted:
            identifiers = await call(
                lambda on: delete_unused(on, schema, "task_identifiers", keep), connection
            )
        if CleanupTask.GC_JOB_QUEUES in wanted:
            queues = await call(lambda on: delete_unused(on, schema, "queues"), connection)
        return CleanupResult(jobs, identifiers, queues)

    async def known_crontabs(self, *, connection: AnyConnection | None = None) -> dict[str, KnownCrontab]:
        """Return the stored schedules of recurring tasks, by identifier."""
        schema = self._session.schema
        return await self._read(lambda: crontabs.listing_schedules(schema), connection)

    async def get_job(
        self, *, id: int | None = None, key: str | None = None, connection: AnyConnection | None = None
    ) -> Job | None:
        """Return the job with this id or key; None if it does not exist.

        Args:
            id: Id of the job.
            key: Key of the job, instead of its id.
            connection: The caller's connection or session, as for `WorkerUtils.add_job`.

        Raises:
            ConfigurationError: Neither or both of `id` and `key` are given.
        """
        if (id is None) == (key is None):
            raise ConfigurationError("Pass either id or key.")
        if id is not None:
            _check_ids([id])
        _check_texts(key=key)
        schema = self._session.schema
        return await self._session.run(
            lambda on: jobs.get_job(on, schema, having_id=id, having_key=key),
            lambda: caller_jobs.getting_job(schema, id, key),
            connection,
        )

    async def list_jobs(
        self,
        *,
        task: str | None = None,
        queue_name: str | None = None,
        state: JobState | str | None = None,
        key: str | None = None,
        locked_by: str | None = None,
        search: str | None = None,
        error_type: str | None = None,
        limit: int = 100,
        after_id: int | None = None,
        connection: AnyConnection | None = None,
    ) -> list[Job]:
        """Return the jobs that match all given filters, in the order of their ids.

        `Job.failed_at` is the time of the failure that `last_error` describes. It is None if another program
        recorded that failure, for example a Node worker.

        Args:
            task: Identifier of the task.
            queue_name: Name of the serial queue.
            state: State of the job.
            key: Key of the job.
            locked_by: Id of the worker that runs the job.
            search: Text that the payload, the last error, the key or the worker contains, ignoring case.
            error_type: Type of the exception that the last attempt failed with, with or without its module.
            limit: Maximum number of jobs to return.
            after_id: Return only jobs with a higher id. Pass the last id of a page to get the next page. Jobs
                that are added or removed meanwhile do not shift the pages.
            connection: The caller's connection or session, as for `WorkerUtils.add_job`.

        Raises:
            ConfigurationError: The state is unknown.
            InvalidJobError: Another argument is invalid.

        Example:
            >>> import asyncio
            >>> from graphile_worker import JobState, WorkerUtils
            >>> async def main():
            ...     async with WorkerUtils(dsn=dsn) as utils:
            ...         await utils.migrate()
            ...         await utils.add_job("greet", {"name": "Ann"})
            ...         jobs = await utils.list_jobs(task="greet", state=JobState.READY, search="ann")
            ...         return [job.payload["name"] for job in jobs]
            >>> asyncio.run(main())
            ['Ann']
        """
        check_integer("limit", limit, range(1, 2**31))
        if after_id is not None:
            check_integer("after_id", after_id, range(2**63))
        texts = {"task": task, "queue_name": queue_name, "key": key, "locked_by": locked_by}
        _check_texts(**texts, search=search, error_type=error_type)
        if state is not None and state not in set(JobState):
            raise ConfigurationError(f"Unknown state {state!r}: it must be one of {', '.join(JobState)}.")
        schema = self._session.schema
        filters = {
            "having_task": task,
            "having_queue_name": queue_name,
            "having_state": None if state is None else str(state),
            "having_key": key,
            "having_locked_by": locked_by,
            "having_text": None if search is None else jobs.containing(search),
            "having_error_type": error_type,
            "after_id": after_id,
        }
        return await self._session.run(
            lambda on: jobs.list_jobs(on, schema, **filters, limit=limit),
            lambda: caller_jobs.listing_jobs(schema, **filters, first_jobs=limit),
            connection,
        )

    async def stats(self, *, connection: AnyConnection | None = None) -> Stats:
        """Count the jobs in each state, in total and by task. This reads all jobs once."""
        schema = self._session.schema
        return Stats.of_rows(await self._read(lambda: caller_jobs.counting_jobs(schema), connection))

    pending_migrations_sync = sync_twin(pending_migrations)
    remove_job_sync = sync_twin(remove_job)
    complete_jobs_sync = sync_twin(complete_jobs, listed="job_ids")
    permanently_fail_jobs_sync = sync_twin(permanently_fail_jobs, listed="job_ids")
    cancel_job_sync = sync_twin(cancel_job)
    reschedule_jobs_sync = sync_twin(reschedule_jobs, listed="job_ids")
    force_unlock_workers_sync = sync_twin(force_unlock_workers, listed="worker_ids")
    workers_sync = sync_twin(workers)
    sweep_sync = sync_twin(sweep)
    cleanup_sync = sync_twin(cleanup)
    known_crontabs_sync = sync_twin(known_crontabs)
    get_job_sync = sync_twin(get_job)
    list_jobs_sync = sync_twin(list_jobs)
    stats_sync = sync_twin(stats)
    history_sync = sync_twin(HistoryOperations.history)
    job_history_sync = sync_twin(HistoryOperations.job_history)
    history_summary_sync = sync_twin(HistoryOperations.history_summary)
    prune_history_sync = sync_twin(HistoryOperations.prune_history)
    has_history_sync = sync_twin(HistoryOperations.has_history)
    failures_sync = sync_twin(HistoryOperations.failures)

    async def _run(
        self,
        own: Callable[[Connection], Awaitable[T]],
        operation: Callable[[], Operation[T]],
        connection: AnyConnection | None,
    ) -> T:
        """Change jobs on a connection from the pool, or on the caller's connection in a transaction."""
        checked = None
        if connection is not None:
            checked = CheckedConnection(connection, require=self._require_transaction)
        return await self._session.run(own, operation, checked)

    async def _read(self, operation: Callable[[], Operation[T]], connection: AnyConnection | None) -> T:
        """Run an operation that changes nothing on a connection from the pool, or on the caller's."""
        return await self._session.run(lambda on: run_own(on, operation()), operation, connection)


def by_local_clock(instant: datetime | timedelta) -> datetime:
    """Return the absolute time, with this machine's clock as the base of a timedelta."""
    return datetime.now(UTC) + instant if isinstance(instant, timedelta) else instant


def _check_ids(job_ids: Iterable[int]) -> list[int]:
    try:
        ids = list(job_ids)
    except TypeError as error:
        raise InvalidJobError(
            f"job_ids is {job_ids!r}; it must be a list of integers.", argument="job_ids"
        ) from error
    for job_id in ids:
        if isinstance(job_id, Job):
            raise InvalidJobError(
                "job_ids holds a Job; it must be a list of integers. Pass job.id.", argument="job_ids"
            )
        check_integer("A job's id", job_id, range(2**63))
    return ids


def _check_names(argument: str, names: Iterable[str]) -> list[str]:
    try:
        # A string is iterable too, but its letters are not meant as names.
        found = None if isinstance(names, str) else list(names)
    except TypeError:
        found = None
    if found is None or not all(isinstance(name, str) for name in found):
        raise ConfigurationError(f"{argument} is {names!r}; it must be a list of strings.")
    return found


def _check_texts(**texts: str | None) -> None:
    for argument, value in texts.items():
        if value is not None:
            check_text(argument, value, max_length=_MAX_TEXT_LENGTH)
