"""Operations on very large numbers of jobs: count, change in batches, list, export and import."""

from __future__ import annotations

from contextlib import aclosing
from datetime import timedelta
from functools import partial
from itertools import islice
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

import msgspec

from graphile_worker._db.connection.error_mapping import translate_errors
from graphile_worker._db.queries import bulk_update, dashboard_queries, jobs, transfer
from graphile_worker._db.queries.progress import read_progress
from graphile_worker.errors import DatabaseError
from graphile_worker.job import MAX_JOB_KEY_LENGTH, check_integer, check_text, read_instant
from graphile_worker.outcome import storable
from graphile_worker.stats import QueueStats, RunningJob

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    from graphile_worker._db.connection.session import Session
    from graphile_worker._db.queries.bulk_update import UnchangedJob
    from graphile_worker._db.queries.transfer import ImportProgress
    from graphile_worker.job import Job, Progress
    from graphile_worker.stats import FailedJob, Writes

T = TypeVar("T")
BATCH = 1000
"""Maximum number of jobs that one transaction changes."""


class JobFilter(msgspec.Struct, frozen=True, kw_only=True):
    """A filter that matches jobs for which all given values match; see `WorkerUtils.list_jobs`."""

    task: str | None = None
    queue_name: str | None = None
    state: str | None = None
    key: str | None = None
    locked_by: str | None = None
    search: str | None = None
    error_type: str | None = None

    def parameters(self) -> dict[str, object]:
        """Return the filter as parameters of the SQL statements."""
        return {
            "having_task": self.task,
            "having_queue_name": self.queue_name,
            "having_state": self.state,
            "having_key": self.key,
            "having_locked_by": self.locked_by,
            "having_text": None if self.search is None else jobs.containing(self.search),
            "having_error_type": self.error_type,
        }


class Change(NamedTuple):
    """A change to apply to jobs."""

    name: str
    arguments: Sequence[object] = ()
    conditions: Sequence[str] = ("not_running",)
    """The conditions that a job must meet to be changed."""

    @classmethod
    def complete(cls) -> Self:
        """Delete the jobs as if they had succeeded."""
        return cls("complete")

    @classmethod
    def delete(cls) -> Self:
        """Delete the jobs, and record nothing in the history."""
        return cls("delete")

    @classmethod
    def run_now(cls) -> Self:
        """Run scheduled jobs now, with the attempts that are left."""
        now = jobs.split_instant(timedelta(0))
        return cls("reschedule", (*now, None, None, None), ("having_state_scheduled",))

    @classmethod
    def remove(cls, key: str) -> Self:
        """Remove the job with this key. A running job loses its key and is not retried."""
        return cls("remove", (key,), ())

    @classmethod
    def fail(cls, reason: str | None = None) -> Self:
        """Fail the jobs permanently."""
        return cls("fail", (reason,))

    @classmethod
    def retry(cls) -> Self:
        """Run failed jobs again now, with all their attempts. Locked jobs are not changed."""
        return cls("retry", (), ("not_locked", "attempted"))

    @classmethod
    def cancel(cls, reason: str = "") -> Self:
        """Cancel the jobs, including those that are running."""
        return cls("cancel", (storable(reason),), ("not_finished",))

    @classmethod
    def reschedule(
        cls,
        *,
        run_at: datetime | timedelta | str | None = None,
        priority: int | None = None,
        attempts: int | None = None,
        max_attempts: int | None = None,
    ) -> Self:
        """Change the given values of the jobs; None leaves a value unchanged."""
        at = None if run_at is None else read_instant("run_at", run_at)
        return cls("reschedule", (*jobs.split_instant(at), priority, attempts, max_attempts))


class BatchResult(NamedTuple):
    """The result of one transaction."""

    seen: int
    """The number of jobs that were selected."""
    changed: Sequence[int]
    """The ids of the jobs that were changed, or will be."""
    requested: int = 0
    """How many of those will change later: they are running, or another transaction has locked them."""
    locked_elsewhere: int = 0
    """How many of the requested jobs are not running, but locked by another transaction."""


class BulkOperations:
    """Operations on more jobs than fit into one transaction or into memory."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._schema = session.schema

    async def check_rows_visible(self) -> None:
        """Check that row level security does not hide the jobs from this role.

        Raises:
            DatabaseError: It does.
        """
        if await self._session.call(lambda on: bulk_update.hides_rows(on, self._schema)):
            raise DatabaseError(
                f"Row level security hides the jobs of the schema {self._schema.name!r} from this role. "
                "Connect as the schema's owner, or as a member of it, or as a role that has BYPASSRLS."
            )

    async def count(self, selection: JobFilter, change: Change) -> int:
        """Count the jobs that the change applies to."""
        filters = {**selection.parameters(), **dict.fromkeys(change.conditions, True)}
        return await self._session.call(lambda on: bulk_update.count(on, self._schema, filters))

    async def find_changeable(self, ids: Iterable[int], change: Change) -> list[int]:
        """Return those of the ids whose jobs the change applies to."""
        found: list[int] = []
        rest = iter(ids)
        while chunk := list(islice(rest, BATCH)):
            filters = {"having_id_any": chunk, **dict.fromkeys(change.conditions, True)}
            found += await self._session.call(
                partial(bulk_update.read_ids, schema=self._schema, filters=filters)
            )
        return found

    async def change(
        self, change: Change, selection: JobFilter | Iterable[int], *, limit: int | None = None
    ) -> AsyncGenerator[BatchResult]:
        """Change all selected jobs, one batch per iteration.

        If the caller stops iterating, the batches so far are changed and the other jobs are not. Jobs that
        are added meanwhile are not changed. With `limit`, at most so many of the jobs that a filter selects
        are changed, those with the lowest ids.
        """
        conditions = dict.fromkeys(change.conditions, True)
        if not isinstance(selection, JobFilter):
            ids = iter(selection)
            while chunk := list(islice(ids, BATCH)):
                _, batch = await self._batch(change, {"having_id_any": chunk, **conditions})
                yield batch._replace(seen=len(chunk))
            return
        highest_id = await self._session.call(lambda on: bulk_update.highest_id(on, self._schema))
        after, left = -1, limit
        while left is None or left > 0:
            filters = {**selection.parameters(), **conditions, "after_id": after, "up_to_id": highest_id}
            last, batch = await self._batch(change, filters, BATCH if left is None else min(BATCH, left))
            if not batch.seen:
                return
            yield batch
            after, left = last, None if left is None else left - batch.seen

    async def _batch(
        self, change: Change, filters: Mapping[str, object], limit: int = BATCH
    ) -> tuple[int, BatchResult]:
        schema = self._schema
        if change.name == "cancel":
            reason = str(change.arguments[0])
            seen, answers = await self._session.call(
                lambda on: bulk_update.cancel_batch(on, schema, filters, reason, limit=limit)
            )
            requested = [one for one in answers.values() if one.answer == "requested"]
            locked_elsewhere = sum(not one.runs for one in requested)
            return max(seen, default=0), BatchResult(
                len(seen), sorted(answers), len(requested), locked_elsewhere
            )
        seen, changed, run = await self._session.call(
            lambda on: bulk_update.change_batch(
                on, schema, change.name, filters, change.arguments, limit=limit
            )
        )
        return max(seen, default=0), BatchResult(len(seen), changed, run)

    async def read_unchanged(self, ids: Iterable[int]) -> list[UnchangedJob]:
        """Return the jobs with these ids that exist, with their state, to explain why they did not change."""
        found: list[UnchangedJob] = []
        rest = iter(ids)
        while chunk := list(islice(rest, BATCH)):
            found += await self._session.call(
                partial(bulk_update.read_unchanged, schema=self._schema, ids=chunk)
            )
        return found

    def pages(
        self, selection: JobFilter, *, after: int | None = None, size: int = BATCH
    ) -> AsyncGenerator[list[Job]]:
        """Return pages of the selected jobs, in the order of their ids.

        The payloads are not decoded: each is a `msgspec.Raw` with the stored JSON.
        """
        return self._paged(bulk_update.read_page, attrgetter("id"), selection, after, size)

    async def find(self, *, id: int | None = None, key: str | None = None) -> Job | None:
        """Return the job with this id or key, its payload as a `msgspec.Raw`; None if it does not exist."""
        if id is not None:
            check_integer("id", id, range(2**63))
        if key is not None:
            check_text("key", key, max_length=MAX_JOB_KEY_LENGTH)
        filters = {"having_id": id, "having_key": key, "first_jobs": 1}
        found = await self._session.call(lambda on: bulk_update.read_page(on, self._schema, filters))
        return found[0] if found else None

    def ids(
        self, selection: JobFilter, *, after: int | None = None, size: int = BATCH
    ) -> AsyncGenerator[list[int]]:
        """Return pages of the ids of the selected jobs. This is much faster than `pages`."""
        return self._paged(bulk_update.read_ids, int, selection, after, size)

    async def export(self, selection: JobFilter) -> AsyncGenerator[list[bytes]]:
        """Yield pages of the selected jobs as lines of JSON, in the order of their ids."""
        async with aclosing(
            self._paged(transfer.export_page, itemgetter(0), selection, None, BATCH)
        ) as pages:
            async for page in pages:
                yield [line for _, line in page]

    async def _paged(
        self,
        read: Callable[..., Awaitable[list[T]]],
        id_of: Callable[[T], int],
        selection: JobFilter,
        after: int | None,
        size: int,
    ) -> AsyncGenerator[list[T]]:
        last = -1 if after is None else after
        while True:
            filters = {**selection.parameters(), "after_id": last, "first_jobs": size}
            page = await self._session.call(partial(read, schema=self._schema, filters=filters))
            if page:
                yield page
            if len(page) < size:
                return
            last = id_of(page[-1])

    async def import_lines(self, lines: Iterable[bytes], *, new_ids: bool) -> AsyncGenerator[ImportProgress]:
        """Import jobs, all of them or none, and yield the progress.

        Args:
            lines: The lines that `export` yielded.
            new_ids: Whether the jobs get new ids. Otherwise no job with one of their ids may exist.
        """
        with translate_errors(self._schema):
            async with self._session.connection() as on:
                async for imported in transfer.import_lines(on, self._schema, lines, new_ids=new_ids):
                    yield imported

    async def queues(
        self, names: Sequence[str] | None = None, *, only_locked: bool = False, limit: int | None = None
    ) -> list[QueueStats]:
        """Return the serial queues, those with the most jobs first. This reads all jobs once."""
        rows = await self._session.call(
            lambda on: jobs.count_queues(on, self._schema, names, only_locked=only_locked, limit=limit)
        )
        return [QueueStats(**dict(row)) for row in rows]

    async def failures(self, limit: int = 50) -> list[FailedJob]:
        """Return jobs whose last attempt failed, the latest failures first. This reads all jobs once."""
        return await self._session.call(lambda on: dashboard_queries.list_failures(on, self._schema, limit))

    async def writes(self) -> Writes:
        """Return how many jobs were ever added and removed, from the server's statistics."""
        return await self._session.call(lambda on: dashboard_queries.count_writes(on, self._schema))

    async def running(self) -> list[RunningJob]:
        """Return all locked jobs, those locked first at the beginning. This reads all jobs once."""
        rows = await self._session.call(lambda on: jobs.list_running(on, self._schema))
        reported = await self.progress([row["id"] for row in rows])
        return [
            RunningJob(
                **{**dict(row), "task_identifier": row["task_identifier"] or ""},
                progress=reported.get(row["id"]),
            )
            for row in rows
        ]

    async def progress(self, job_ids: Sequence[int]) -> dict[int, Progress]:
        """Return the progress of those jobs that have reported any, by job id."""
        if not job_ids:
            return {}
        return await self._session.call(lambda on: read_progress(on, self._schema, job_ids))
