"""Looking after the jobs of a queue."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker._db import crontabs, queries
from graphile_worker._db import workers as worker_queries
from graphile_worker._db.cancellations import cancel
from graphile_worker._db.cleanup import delete_permafailed_jobs, delete_unused
from graphile_worker._db.migrate import find_pending
from graphile_worker.durations import seconds
from graphile_worker.errors import ConfigurationError, InvalidJobError
from graphile_worker.job import (
    MOST_JOB_KEY,
    SMALLINT,
    Job,
    JobState,
    check_integer,
    check_text,
    read_instant,
)
from graphile_worker.many_jobs import ManyJobs
from graphile_worker.outcome import storable
from graphile_worker.recovery import Policy, Sweeper
from graphile_worker.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Iterable

    from graphile_worker._db.cancellations import CancelAnswer
    from graphile_worker._db.connect import Connection
    from graphile_worker._db.crontabs import KnownCrontab
    from graphile_worker._db.migrate import Pending
    from graphile_worker._db.session import Session
    from graphile_worker.durations import Duration
    from graphile_worker.liveness import OnRecovery, Recovered, WorkerInfo

_LOOK = 0.25
_LONGEST_TEXT = 10_000_000


class CleanupTask(StrEnum):
    """What `WorkerUtils.cleanup` can remove."""

    DELETE_PERMAFAILED_JOBS = "DELETE_PERMAFAILED_JOBS"
    """Jobs that are out of attempts."""
    GC_TASK_IDENTIFIERS = "GC_TASK_IDENTIFIERS"
    """Names of tasks that no job uses. Workers remember the numbers of theirs: stop those first, or keep
    the names that they serve."""
    GC_JOB_QUEUES = "GC_JOB_QUEUES"
    """Queues without a job."""


class Cleaned(NamedTuple):
    """How many of each `WorkerUtils.cleanup` removed."""

    jobs: int = 0
    task_identifiers: int = 0
    queues: int = 0


class Administration:
    """The part of `WorkerUtils` that looks after jobs which are there."""

    def __init__(self, session: Session, *, use_local_time: bool) -> None:
        self._session = session
        self._use_local_time = use_local_time

    @property
    def many(self) -> ManyJobs:
        """For what is to be done with very many jobs, batch by batch."""
        return ManyJobs(self._session)

    async def pending_migrations(self, *, connection: Connection | None = None) -> Pending:
        """What `migrate` would do: in words, none if nothing is to be done, and in SQL."""
        schema = self._session.schema
        return await self._session.call(lambda on: find_pending(on, schema), connection)

    async def remove_job(self, job_key: str, *, connection: Connection | None = None) -> Job | None:
        """Remove the job with that key; None if there is none.

        A job that runs is not stopped, but loses its key and will not be tried again.
        """
        check_text("job_key", job_key, most=MOST_JOB_KEY, code="GWBJK")
        jobs = await self._change("remove_job", job_key, connection=connection)
        return jobs[0] if jobs else None

    async def complete_jobs(
        self, job_ids: Iterable[int], *, connection: Connection | None = None
    ) -> list[Job]:
        """Delete jobs as if they had succeeded. Returns them; those that run now are left alone."""
        return await self._change("complete_jobs", _ids(job_ids), connection=connection)

    async def permanently_fail_jobs(
        self, job_ids: Iterable[int], reason: str | None = None, *, connection: Connection | None = None
    ) -> list[Job]:
        """Let jobs not be tried again. Returns them; those that run now are left alone."""
        _check_texts(reason=reason)
        return await self._change("permanently_fail_jobs", _ids(job_ids), reason, connection=connection)

    async def cancel_job(
        self, job_id: int, reason: str | None = None, *, connection: Connection | None = None
    ) -> CancelAnswer | None:
        """Let a job not run any more, also if it runs now; `last_error` then has the reason.

        Returns:
            ``"cancelled"`` if it had not begun; ``"requested"`` if it runs, for then its worker is told, and
            it may end well all the same; None if it is gone, or has failed for good.
        """
        _ids([job_id])
        _check_texts(reason=reason)
        schema, why = self._session.schema, storable(reason or "")
        return await self._session.call(lambda on: cancel(on, schema, job_id, why), connection)

    async def reschedule_jobs(
        self,
        job_ids: Iterable[int],
        *,
        run_at: datetime | timedelta | str | None = None,
        priority: int | None = None,
        attempts: int | None = None,
        max_attempts: int | None = None,
        connection: Connection | None = None,
    ) -> list[Job]:
        """Change what is given, and nothing else. Returns the jobs; those that run now are left alone.

        Example:
            Run failed jobs again, with all their attempts: ``reschedule_jobs(ids, run_at=timedelta(0),
            attempts=0)``.
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
        return await self._change(
            "reschedule_jobs",
            _ids(job_ids),
            *queries.split_instant(at),
            priority,
            attempts,
            max_attempts,
            connection=connection,
        )

    async def force_unlock_workers(
        self, worker_ids: Iterable[str], *, connection: Connection | None = None
    ) -> None:
        """Free all jobs and queues that these workers hold, by the names in ``locked_by``.

        Only for workers that are gone for good: what a live one holds would run twice.
        """
        ids = _names("worker_ids", worker_ids)
        await self._session.call(
            lambda on: queries.force_unlock_workers(on, self._session.schema, ids), connection
        )

    async def workers(
        self, *, and_locks: bool = True, connection: Connection | None = None
    ) -> list[WorkerInfo]:
        """All workers that are known.

        Workers of ours and of the Rust port say by heartbeats that they live. Node's do not, and are known
        only by what they hold.

        Args:
            and_locks: Whether to count what each holds, with one pass over the jobs.
            connection: A connection of the caller's.
        """
        schema = self._session.schema
        return await self._session.call(
            lambda on: worker_queries.list_workers(on, schema, and_locks=and_locks), connection
        )

    async def sweep(
        self,
        *,
        recovery_delay: Duration = 0.0,
        refund_attempt_on_recovery: bool = False,
        on_recovery: OnRecovery | None = None,
        dry_run: bool = False,
    ) -> list[Recovered]:
        """Free what dead workers hold, as running workers do all the time. Returns what was freed.

        Only workers that send heartbeats of ours can be seen to be dead, and that takes as long as their
        lease says: 8 or 38 seconds by default. If all live it takes until each was heard from, 3 seconds.

        Args:
            recovery_delay: As for `run`, and so the next two.
            refund_attempt_on_recovery: Whether jobs get their attempt back.
            on_recovery: Decides what becomes of a job.
            dry_run: Free nothing, and return what would be.
        """
        policy = Policy(
            delay=seconds("recovery_delay", recovery_delay),
            refund=refund_attempt_on_recovery,
            on_recovery=on_recovery,
        )
        schema = self._session.schema
        if not await self._session.call(lambda on: worker_queries.keeps_heartbeats(on, schema)):
            return []  # no worker of ours was ever here
        sweeper = Sweeper(session=self._session, name="sweep", policy=policy, dry_run=dry_run)
        found = {one.worker.id: one for one in await sweeper.look(all_dead=True)}
        while sweeper.undecided - found.keys():
            await asyncio.sleep(_LOOK)
            found |= {one.worker.id: one for one in await sweeper.look()}
        return list(found.values())

    async def cleanup(
        self,
        tasks: CleanupTask | str | Iterable[CleanupTask | str] = (CleanupTask.GC_JOB_QUEUES,),
        *,
        keep_task_identifiers: Iterable[str] = (),
        connection: Connection | None = None,
    ) -> Cleaned:
        """Remove what nobody needs any more: see `CleanupTask`.

        While names are removed, whoever adds or takes jobs waits for a moment.

        Args:
            tasks: What to remove; by default queues without a job.
            keep_task_identifiers: Names of tasks to keep, above all those that running workers serve.
            connection: A connection of the caller's. Its locks then last to the end of the transaction.
        """
        allowed = [task.value for task in CleanupTask]
        wanted = {str(task) for task in ([tasks] if isinstance(tasks, str) else tasks)}
        if unknown := sorted(wanted - set(allowed)):
            raise ConfigurationError(
                f"cleanup does not know {', '.join(unknown)}. It knows {', '.join(allowed)}."
            )
        keep = _names("keep_task_identifiers", keep_task_identifiers)
        schema, call = self._session.schema, self._session.call
        jobs = identifiers = queues = 0
        # In this order: what one step removes, the next finds unused.
        if CleanupTask.DELETE_PERMAFAILED_JOBS in wanted:
            jobs = await call(lambda on: delete_permafailed_jobs(on, schema), connection)
        if CleanupTask.GC_TASK_IDENTIFIERS in wanted:
            identifiers = await call(
                lambda on: delete_unused(on, schema, "task_identifiers", keep), connection
            )
        if CleanupTask.GC_JOB_QUEUES in wanted:
            queues = await call(lambda on: delete_unused(on, schema, "queues"), connection)
        return Cleaned(jobs, identifiers, queues)

    async def known_crontabs(self, *, connection: Connection | None = None) -> dict[str, KnownCrontab]:
        """The schedules of recurring tasks that workers have had, by their identifiers."""
        session = self._session
        return await session.call(lambda on: crontabs.list_schedules(on, session.schema), connection)

    async def get_job(
        self, *, id: int | None = None, key: str | None = None, connection: Connection | None = None
    ) -> Job | None:
        """The job with that id or key; None if there is none (any more)."""
        if (id is None) == (key is None):
            raise ConfigurationError("Pass id or key, one of them.")
        if id is not None:
            _ids([id])
        _check_texts(key=key)
        schema = self._session.schema
        return await self._session.call(
            lambda on: queries.get_job(on, schema, having_id=id, having_key=key), connection
        )

    async def list_jobs(
        self,
        *,
        task: str | None = None,
        queue_name: str | None = None,
        state: JobState | str | None = None,
        key: str | None = None,
        locked_by: str | None = None,
        text: str | None = None,
        limit: int = 100,
        after: int | None = None,
        connection: Connection | None = None,
    ) -> list[Job]:
        """Jobs for which all that is given holds, in the order of their ids.

        When a job failed is not stored: `run_at` of a failed job is when it would have been tried again, and
        workers do not change `updated_at`. The log and the event ``job:failed`` have the time.

        Args:
            task: The identifier of their task.
            queue_name: Their queue.
            state: Where they stand.
            key: Their key.
            locked_by: The worker that runs them.
            text: Something that their payload, last error, key or worker contains, in upper or lower case.
            limit: How many at most.
            after: Only ids above this one. Pass the last id of one page to get the next; jobs that come or
                go meanwhile do not shift the pages.
            connection: A connection of the caller's.
        """
        check_integer("limit", limit, range(1, 2**31))
        if after is not None:
            check_integer("after", after, range(2**63))
        _check_texts(task=task, queue_name=queue_name, key=key, locked_by=locked_by, text=text)
        if state is not None and state not in set(JobState):
            raise ConfigurationError(f"There is no state {state!r}, but {', '.join(JobState)}.")
        schema = self._session.schema
        return await self._session.call(
            lambda on: queries.list_jobs(
                on,
                schema,
                having_task=task,
                having_queue_name=queue_name,
                having_state=state,
                having_key=key,
                having_locked_by=locked_by,
                having_text=None if text is None else queries.containing(text),
                after_id=after,
                limit=limit,
            ),
            connection,
        )

    async def stats(self, *, connection: Connection | None = None) -> Stats:
        """How many jobs there are in each state, in all and by task: one pass over the jobs."""
        schema = self._session.schema
        return Stats.of_rows(await self._session.call(lambda on: queries.count_jobs(on, schema), connection))

    async def _change(self, function: str, *arguments: object, connection: Connection | None) -> list[Job]:
        schema = self._session.schema
        return await self._session.call(
            lambda on: queries.change_jobs(on, schema, function, *arguments), connection
        )


def by_local_clock(instant: datetime | timedelta) -> datetime:
    """The moment that this machine's clock means."""
    return datetime.now(UTC) + instant if isinstance(instant, timedelta) else instant


def _ids(job_ids: Iterable[int]) -> list[int]:
    try:
        ids = list(job_ids)
    except TypeError as error:
        raise InvalidJobError(
            f"job_ids is {job_ids!r}; it must be a list of integers.", argument="job_ids"
        ) from error
    for job_id in ids:
        if isinstance(job_id, Job):
            raise InvalidJobError("job_ids must be integers: pass job.id.", argument="job_ids")
        check_integer("A job's id", job_id, range(2**63))
    return ids


def _names(argument: str, names: Iterable[str]) -> list[str]:
    try:
        # A string is iterable too, and was meant as one name.
        found = None if isinstance(names, str) else list(names)
    except TypeError:
        found = None
    if found is None or not all(isinstance(name, str) for name in found):
        raise ConfigurationError(f"{argument} is {names!r}; it must be a list of strings.")
    return found


def _check_texts(**texts: str | None) -> None:
    for argument, value in texts.items():
        if value is not None:
            check_text(argument, value, most=_LONGEST_TEXT)
