"""Very many jobs: counting them, changing them batch by batch, taking them out and putting them in."""

from __future__ import annotations

from contextlib import aclosing
from functools import partial
from itertools import islice
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

import msgspec

from graphile_worker._db import glance, many, queries, transfer
from graphile_worker._db.failures import translated
from graphile_worker.errors import DatabaseError
from graphile_worker.job import MOST_JOB_KEY, check_integer, check_text, read_instant
from graphile_worker.outcome import storable
from graphile_worker.stats import QueueStats, RunningJob

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
    from datetime import datetime, timedelta

    from graphile_worker._db.many import Left
    from graphile_worker._db.session import Session
    from graphile_worker._db.transfer import Imported
    from graphile_worker.job import Job
    from graphile_worker.stats import FailedJob, Writes

T = TypeVar("T")
BATCH = 1000
"""Jobs that are changed in one transaction."""


class JobFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs for which all holds that is given; see `WorkerUtils.list_jobs`."""

    task: str | None = None
    queue_name: str | None = None
    state: str | None = None
    key: str | None = None
    locked_by: str | None = None
    text: str | None = None

    def parts(self) -> dict[str, object]:
        """As the statements have it."""
        return {
            "having_task": self.task,
            "having_queue_name": self.queue_name,
            "having_state": self.state,
            "having_key": self.key,
            "having_locked_by": self.locked_by,
            "having_text": None if self.text is None else queries.containing(self.text),
        }


class Change(NamedTuple):
    """What is to be done with jobs."""

    name: str
    arguments: Sequence[object] = ()
    among: Sequence[str] = ("not_running",)
    """Which jobs it can be done with."""

    @classmethod
    def complete(cls) -> Self:
        """Delete them, as if they had succeeded."""
        return cls("complete")

    @classmethod
    def remove(cls, key: str) -> Self:
        """Remove the one with that key; if it runs, it loses the key and is not tried again."""
        return cls("remove", (key,), ())

    @classmethod
    def fail(cls, reason: str | None = None) -> Self:
        """Let them not be tried again."""
        return cls("fail", (reason,))

    @classmethod
    def retry(cls) -> Self:
        """Let those that failed run again, now and with all attempts; never those that run."""
        return cls("retry", (), ("not_locked", "tried"))

    @classmethod
    def cancel(cls, reason: str = "") -> Self:
        """Cancel them, also those that run."""
        return cls("cancel", (storable(reason),), ("not_over",))

    @classmethod
    def reschedule(
        cls,
        *,
        run_at: datetime | timedelta | str | None = None,
        priority: int | None = None,
        attempts: int | None = None,
        max_attempts: int | None = None,
    ) -> Self:
        """Change what is given."""
        at = None if run_at is None else read_instant("run_at", run_at)
        return cls("reschedule", (*queries.split_instant(at), priority, attempts, max_attempts))


class Batch(NamedTuple):
    """What one transaction did."""

    seen: int
    changed: Sequence[int]
    requested: int = 0
    """Of those changed: jobs that run, or that somebody has, to which it will happen later."""
    held: int = 0
    """Of those requested: jobs that do not run, but that somebody's transaction has locked."""


class ManyJobs:
    """Does things with more jobs than fit into one transaction, or into memory."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._schema = session.schema

    async def insist_on_sight(self) -> None:
        """Refuse to go on if the role sees no jobs because row level security hides them."""
        if await self._session.call(lambda on: many.hides_rows(on, self._schema)):
            raise DatabaseError(
                f"Row level security hides the jobs of the schema {self._schema.name!r} from this role. "
                "Connect as the schema's owner, or as a member of it, or as a role that has BYPASSRLS."
            )

    async def count(self, chosen: JobFilter, change: Change) -> int:
        """How many jobs the change can be done with."""
        filters = {**chosen.parts(), **dict.fromkeys(change.among, True)}
        return await self._session.call(lambda on: many.count(on, self._schema, filters))

    async def taken(self, ids: Iterable[int], change: Change) -> list[int]:
        """Those of the ids whose jobs the change can be done with."""
        found: list[int] = []
        rest = iter(ids)
        while some := list(islice(rest, BATCH)):
            filters = {"having_id_any": some, **dict.fromkeys(change.among, True)}
            found += await self._session.call(partial(many.read_ids, schema=self._schema, filters=filters))
        return found

    async def change(self, change: Change, chosen: JobFilter | Iterable[int]) -> AsyncGenerator[Batch]:
        """Change all that are chosen, a batch whenever the next is asked for.

        Whoever stops in between has changed the jobs of some batches, and none of the others. Jobs that are
        added meanwhile are not chased.
        """
        among = dict.fromkeys(change.among, True)
        if not isinstance(chosen, JobFilter):
            ids = iter(chosen)
            while some := list(islice(ids, BATCH)):
                _, batch = await self._batch(change, {"having_id_any": some, **among})
                yield batch._replace(seen=len(some))
            return
        upto = await self._session.call(lambda on: many.highest_id(on, self._schema))
        after = -1
        while True:
            filters = {**chosen.parts(), **among, "after_id": after, "up_to_id": upto}
            last, batch = await self._batch(change, filters)
            if not batch.seen:
                return
            yield batch
            after = last

    async def _batch(self, change: Change, filters: Mapping[str, object]) -> tuple[int, Batch]:
        schema = self._schema
        if change.name == "cancel":
            reason = str(change.arguments[0])
            seen, answers = await self._session.call(
                lambda on: many.cancel_batch(on, schema, filters, reason, limit=BATCH)
            )
            requested = [one for one in answers.values() if one.answer == "requested"]
            held = sum(not one.runs for one in requested)
            return max(seen, default=0), Batch(len(seen), sorted(answers), len(requested), held)
        seen, changed, run = await self._session.call(
            lambda on: many.change_batch(on, schema, change.name, filters, change.arguments, limit=BATCH)
        )
        return max(seen, default=0), Batch(len(seen), changed, run)

    async def explain_left(self, ids: Iterable[int]) -> list[Left]:
        """Of jobs that were not changed: those that are there, and where they stand."""
        found: list[Left] = []
        rest = iter(ids)
        while some := list(islice(rest, BATCH)):
            found += await self._session.call(partial(many.explain_left, schema=self._schema, ids=some))
        return found

    def pages(
        self, chosen: JobFilter, *, after: int | None = None, size: int = BATCH
    ) -> AsyncGenerator[list[Job]]:
        """All that are chosen, some at a time, in the order of their ids.

        Their payloads are not decoded: each is a `msgspec.Raw` with the JSON that is stored.
        """
        return self._paged(many.read_page, attrgetter("id"), chosen, after, size)

    async def find(self, *, id: int | None = None, key: str | None = None) -> Job | None:
        """The one with that id or key; its payload is not decoded either."""
        if id is not None:
            check_integer("id", id, range(2**63))
        if key is not None:
            check_text("key", key, most=MOST_JOB_KEY)
        filters = {"having_id": id, "having_key": key, "first_jobs": 1}
        found = await self._session.call(lambda on: many.read_page(on, self._schema, filters))
        return found[0] if found else None

    def ids(
        self, chosen: JobFilter, *, after: int | None = None, size: int = BATCH
    ) -> AsyncGenerator[list[int]]:
        """The same, but only their ids, which is much faster."""
        return self._paged(many.read_ids, int, chosen, after, size)

    async def export(self, chosen: JobFilter) -> AsyncGenerator[list[bytes]]:
        """All that are chosen, as lines of JSON, some at a time and in the order of their ids."""
        async with aclosing(self._paged(transfer.export_page, itemgetter(0), chosen, None, BATCH)) as pages:
            async for page in pages:
                yield [line for _, line in page]

    async def _paged(
        self,
        read: Callable[..., Awaitable[list[T]]],
        id_of: Callable[[T], int],
        chosen: JobFilter,
        after: int | None,
        size: int,
    ) -> AsyncGenerator[list[T]]:
        last = -1 if after is None else after
        while True:
            filters = {**chosen.parts(), "after_id": last, "first_jobs": size}
            page = await self._session.call(partial(read, schema=self._schema, filters=filters))
            if page:
                yield page
            if len(page) < size:
                return
            last = id_of(page[-1])

    async def import_lines(self, lines: Iterable[bytes], *, new_ids: bool) -> AsyncGenerator[Imported]:
        """Put jobs in, all of them or none; yields how far it came.

        Args:
            lines: Those that `export` gave.
            new_ids: Whether they get other ids; otherwise there must be none with these.
        """
        with translated(self._schema):
            async with self._session.connection() as on:
                async for imported in transfer.import_lines(on, self._schema, lines, new_ids=new_ids):
                    yield imported

    async def queues(
        self, names: Sequence[str] | None = None, *, only_locked: bool = False, limit: int | None = None
    ) -> list[QueueStats]:
        """Serial queues, those with most jobs first: one pass over the jobs."""
        rows = await self._session.call(
            lambda on: queries.count_queues(on, self._schema, names, only_locked=only_locked, limit=limit)
        )
        return [QueueStats(**dict(row)) for row in rows]

    async def failures(self, limit: int = 50) -> list[FailedJob]:
        """Jobs whose last attempt failed, the last ones first: one pass over the jobs."""
        return await self._session.call(lambda on: glance.list_failures(on, self._schema, limit))

    async def writes(self) -> Writes:
        """How many jobs were ever added and removed, by the server's statistics."""
        return await self._session.call(lambda on: glance.count_writes(on, self._schema))

    async def running(self) -> list[RunningJob]:
        """All jobs that somebody has locked, those locked first at the beginning: one pass over the jobs."""
        rows = await self._session.call(lambda on: queries.list_running(on, self._schema))
        return [RunningJob(**{**dict(row), "task_identifier": row["task_identifier"] or ""}) for row in rows]
