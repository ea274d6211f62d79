"""`JobReader`: lists of jobs, and everything about one job."""

from __future__ import annotations

import asyncio
import base64
import binascii
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from graphile_worker._base.payload import as_one_line, encode_payload
from graphile_worker._db.queries import bulk_update, web_reads
from graphile_worker.errors import InvalidJobError
from graphile_worker.web.errors import QueryTimeoutError
from graphile_worker.web.filters import FilterError, read_ids
from graphile_worker.web.models import (
    Attempt,
    Count,
    JobDetail,
    JobPage,
    JobRow,
    ProgressReport,
    Searched,
    Tab,
)
from graphile_worker.web.reading import MAX_RUNNING, Reader

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphile_worker._client.bulk import Change
    from graphile_worker._db.connection.connect import Connection
    from graphile_worker._db.sql_files import Schema
    from graphile_worker.client import WorkerUtils
    from graphile_worker.history import JobAttempt
    from graphile_worker.job import Progress
    from graphile_worker.web.auth import Access
    from graphile_worker.web.filters import Filter

MAX_PAGE = 200
MAX_COUNTED = 10_000
"""Counting the jobs that match a filter stops after this many."""
SEARCHED = 100_000
"""How many of the newest jobs are searched if each of them has to be read."""
_EARLIER_RUNS = 10
_LARGE = 20_000
"""Jobs of a table that is large enough to remember which of them have failed."""
_CANDIDATES = 2 * MAX_PAGE
_MAX_ATTEMPTS = 200
_SORTS = ("newest", "oldest")


class Cursor(NamedTuple):
    """Where a page begins."""

    sort: str
    is_back: bool
    id: int

    def encode(self) -> str:
        """Return it as text for an address."""
        text = msgspec.json.encode([self.sort, self.is_back, str(self.id)])
        return base64.urlsafe_b64encode(text).decode().rstrip("=")

    @classmethod
    def decode(cls, text: str) -> Cursor:
        """Return the cursor that a text stands for.

        Raises:
            FilterError: It is none.
        """
        try:
            padded = text + "=" * (-len(text) % 4)
            document = base64.b64decode(padded, altchars=b"-_", validate=True)
            sort, is_back, identifier = msgspec.json.decode(document, type=tuple[str, bool, str])
            if sort in _SORTS:
                return cls(sort, is_back, read_ids([identifier])[0])
        except (binascii.Error, msgspec.MsgspecError, ValueError, FilterError):
            pass
        raise FilterError("The cursor is not from this dashboard. Begin at the first page.")


class JobReader(Reader):
    """The part of `QueueData` that reads jobs."""

    async def jobs(
        self,
        selected: Filter,
        access: Access,
        *,
        cursor: str | None = None,
        limit: int = 50,
        sort: str = "newest",
    ) -> JobPage:
        """Return a page of jobs, newest first.

        Args:
            selected: Which jobs.
            access: What the viewer may do.
            cursor: `JobPage.next` or `JobPage.prev` of another page with the same filter.
            limit: Jobs of a page, at most 200.
            sort: ``newest`` or ``oldest``. A cursor carries it.

        Raises:
            FilterError: The cursor is invalid, or the viewer may not search in payloads.
        """
        if sort not in _SORTS:
            raise FilterError(f"Unknown sort {sort[:60]!r}: it must be one of {', '.join(_SORTS)}.")
        place = Cursor.decode(cursor) if cursor else None
        bounded, searched = await self.bound(selected, access)
        filters = await self._page_filters(bounded)
        notices: list[str] = []
        # Counting may take longer than reading a page, and then the page is shown without the number.
        placed, size = _placed(filters, place, sort), min(limit, MAX_PAGE)
        rows, count = await asyncio.gather(
            self._read_rows(bounded, placed, size), self._count(bounded, notices)
        )
        items, following, previous = _cut(rows, place, sort, size)
        progress = await self._progress([int(row["id"]) for row in items if row["state"] == "running"])
        return JobPage(
            items=[job_row(row, progress.get(row["id"])) for row in items],
            next=following,
            prev=previous,
            count=count,
            searched=searched,
            notices=notices,
        )

    async def _read_rows(self, selected: Filter, placed: dict[str, object], size: int) -> list[Any]:
        """Return the rows of a page, and one more if there is another page."""
        ids, are_all = await self._failed_candidates(selected, placed)
        if ids is not None:
            found = await self._query(
                partial(_read_page, filters={**placed, "having_id_any": ids}, limit=size)
            )
            if are_all or len(found) > size:
                return found
        return await self._query(partial(_read_page, filters=placed, limit=size))

    async def _failed_candidates(
        self, selected: Filter, placed: dict[str, object]
    ) -> tuple[list[int] | None, bool]:
        """Return ids among which a page of failed jobs is likely found, and whether there are no others.

        No index has the failed jobs, so a page of them would be a pass over a large table. The ids are from
        one such pass, which all viewers share.
        """
        if selected.tab is not Tab.FAILED or selected.ids or (await self.look()).total.total < _LARGE:
            return None, False
        find = partial(web_reads.find_failed, limit=MAX_COUNTED)
        ids = await self._share("failed ids", partial(self._query, find)).get()
        before, after = placed.get("before_id"), placed.get("after_id")
        chosen = [
            one
            for one in (ids if placed["descends"] else reversed(ids))
            if (not isinstance(before, int) or one < before) and (not isinstance(after, int) or one > after)
        ]
        if not placed["descends"] and len(ids) >= MAX_COUNTED:
            return None, False  # the oldest ones are not known
        if selected.is_empty and len(chosen) > _CANDIDATES:
            return chosen[:_CANDIDATES], False
        return chosen, len(ids) < MAX_COUNTED

    async def bound(self, selected: Filter, access: Access) -> tuple[Filter, Searched]:
        """Return the filter as it applies to a viewer, and how much of the table it sees.

        Raises:
            FilterError: The viewer may not search in payloads.
        """
        sees_payloads = access.allows("view_payload") and self._redact is None
        if selected.payload and not sees_payloads:
            raise FilterError(
                "You may not see payloads, and so you cannot search in them."
                if self._redact is None
                else "Payloads are redacted here, and so they cannot be searched."
            )
        bounded = selected.replace(search_payload=sees_payloads)
        if not bounded.is_slow:
            return bounded, Searched(all=True)
        first = await self._query(partial(web_reads.newest_id, place=SEARCHED))
        if first is None:
            return bounded, Searched(all=True)
        return bounded.replace(above_id=first), Searched(all=False, newest=SEARCHED)

    async def sample(self, filters: Mapping[str, object], limit: int) -> list[JobRow]:
        """Return the newest jobs that match parameters of a filter."""
        rows = await self._query(partial(_read_page, filters={**filters, "descends": True}, limit=limit - 1))
        return [job_row(row) for row in rows]

    async def count_changeable(self, selected: Filter, change: Change) -> int:
        """Return how many jobs a change applies to."""
        return await self._ask(lambda utils: utils.many.count(selected, change))

    async def find_changeable(self, ids: Sequence[int], change: Change) -> list[int]:
        """Return those of the ids to whose jobs a change applies."""
        return await self._ask(lambda utils: utils.many.find_changeable(ids, change))

    async def ids_to_change(self, selected: Filter, change: Change, limit: int) -> list[int]:
        """Return the lowest ids of jobs to which a change applies."""
        filters = {**selected.parameters(), **dict.fromkeys(change.conditions, True), "first_jobs": limit}
        return await self._query(partial(bulk_update.read_ids, filters=filters))

    async def estimate(self, selected: Filter) -> int:
        """Return the planner's estimate of how many jobs match."""
        return await self._query(partial(web_reads.estimate_jobs, filters=selected.parameters()))

    async def count_locks(self, worker_ids: Sequence[str]) -> tuple[int, int]:
        """Return how many jobs and queues these workers have locked."""
        return await self._query(partial(web_reads.count_locks, worker_ids=list(worker_ids)))

    async def count_unused_queues(self) -> int:
        """Return how many serial queues have no jobs."""
        return await self._query(web_reads.count_unused_queues)

    async def _page_filters(self, selected: Filter) -> dict[str, object]:
        filters = selected.parameters()
        if (selected.tab is Tab.RUNNING or selected.locked_by is not None) and not selected.ids:
            # No index has the locked jobs. The last look at the table found their ids.
            look = await self.look()
            if look.look.exact and len(look.running) < MAX_RUNNING:
                filters["having_id_any"] = list(look.running)
        return filters

    async def _count(self, selected: Filter, notices: list[str]) -> Count | None:
        if selected.is_empty and selected.above_id is None:
            look = await self.look()
            counts = look.total
            if selected.tab is None:
                return Count(value=counts.total, exact=look.look.exact)
            value = getattr(counts, selected.tab)
            capped = selected.tab is Tab.BLOCKED and value >= MAX_COUNTED
            return Count(value=value, exact=look.look.exact and not capped, at_least=capped)
        shared = self._share(("count", selected), partial(self._count_up_to, selected))
        try:
            return await shared.get()
        except QueryTimeoutError:
            notices.append("The number of jobs is not known, because counting them took too long.")
            return None

    async def _count_up_to(self, selected: Filter) -> Count:
        filters = await self._page_filters(selected)
        try:
            found = await self._query(partial(web_reads.count_jobs, filters=filters, limit=MAX_COUNTED + 1))
        except QueryTimeoutError:
            estimate = await self._query(partial(web_reads.estimate_jobs, filters=filters))
            return Count(value=estimate, exact=False)
        if found > MAX_COUNTED:
            return Count(value=MAX_COUNTED, exact=False, at_least=True)
        return Count(value=found)

    async def _progress(self, ids: Sequence[int]) -> Mapping[int, Progress]:
        if not ids:
            return {}

        async def read(utils: WorkerUtils) -> Mapping[int, Progress]:
            return await utils.many.progress(ids)

        return await self._optional("Progress", self._ask(read), {}, [])

    async def job(self, job_id: str, access: Access) -> JobDetail | None:
        """Return everything about a job; None if nothing is known about it."""
        try:
            [number] = read_ids([job_id])
        except FilterError:
            return None
        row = await self._query(partial(web_reads.read_job, job_id=number))
        notices: list[str] = []
        no_attempts: list[JobAttempt] = []
        history = await self._optional(
            "The history", self._ask(lambda utils: _history_of(utils, number)), no_attempts, notices
        )
        keeps = await self._optional(
            "The history", self._ask(lambda utils: utils.has_history()), default=False, notices=notices
        )
        if row is None and not history:
            return None
        detail = self._detail(row, access) if row is not None else self._gone(history, access)
        earlier: list[JobAttempt] = []
        if detail.key is not None and keeps:
            earlier = await self._optional(
                "Earlier runs",
                self._ask(partial(_earlier, task=detail.task, key=detail.key, but=number)),
                no_attempts,
                notices,
            )
        progress = await self._progress([number]) if row is not None else {}
        return msgspec.structs.replace(
            detail,
            history=[self._attempt(one, access) for one in history],
            earlier=[self._attempt(one, access) for one in earlier],
            earlier_ids=[str(one.job_id) for one in earlier],
            keeps_history=keeps,
            progress=_report(progress.get(number)),
            notices=notices,
        )

    def _detail(self, row: Mapping[str, Any], access: Access) -> JobDetail:
        payload, hidden = self._show_payload(row["task"] or "", as_one_line(row["payload"]), access)
        locked_at = row["locked_at"]
        return JobDetail(
            id=str(row["id"]),
            task=row["task"] or "",
            state=row["state"],
            queue=row["queue"],
            key=row["key"],
            priority=row["priority"],
            attempts=row["attempts"],
            max_attempts=row["max_attempts"],
            run_at=row["run_at"],
            created_at=row["created_at"],
            updated_at=row["updated_at"],
            locked_at=locked_at,
            worker=row["worker"],
            flags=list(row["flags"] or ()),
            revision=row["revision"],
            blocked_by=row["blocked_by"],
            error=row["error"],
            error_type=row.get("error_type"),
            traceback=row.get("traceback"),
            failed_at=row.get("failed_at"),
            fingerprint=row["fingerprint"],
            runs_for=None if locked_at is None else max(0.0, (row["now"] - locked_at).total_seconds()),
            payload=payload,
            payload_hidden=hidden,
            now=row["now"],
        )

    def _gone(self, history: Sequence[JobAttempt], access: Access) -> JobDetail:
        """Return a job whose row is gone, as its last attempt knew it."""
        last = history[-1]
        ends = {"completed": "completed", "cancelled": "cancelled"}
        kept = next((one.payload for one in reversed(history) if one.payload is not None), None)
        payload: msgspec.Raw | None = None
        hidden: str | None = "The history does not have the payload."
        if kept is not None:
            payload, hidden = self._show_payload(last.task_identifier, _raw(kept), access)
        return JobDetail(
            id=str(last.job_id),
            exists=False,
            task=last.task_identifier,
            state=ends.get(last.outcome, "gone") if last.is_final else "gone",  # type: ignore[arg-type]
            queue=last.queue_name,
            key=last.key,
            attempts=last.attempt,
            run_at=last.run_at,
            created_at=last.created_at,
            error=last.error,
            error_type=last.error_type,
            traceback=last.traceback,
            payload=payload,
            payload_hidden=hidden,
            now=datetime.now(UTC),
        )

    def _attempt(self, one: JobAttempt, access: Access) -> Attempt:
        result = _raw(one.result) if one.has_result and access.allows("view_payload") else None
        if result is not None and self._redact is not None:
            result = None
        return Attempt(
            attempt=one.attempt,
            outcome=str(one.outcome),
            is_final=one.is_final,
            run_at=one.run_at,
            started_at=one.started_at,
            ended_at=one.ended_at,
            duration=one.duration,
            wait=one.wait,
            worker=one.worker,
            error=one.error,
            error_type=one.error_type,
            traceback=one.traceback,
            result=result,
            no_result="hidden" if one.has_result and result is None else one.no_result,
        )


def job_row(row: Mapping[str, Any], progress: Progress | None = None) -> JobRow:
    """Return a job for a list."""
    error = row["error"]
    return JobRow(
        id=str(row["id"]),
        task=row["task"] or "",
        state=row["state"],
        queue=row["queue"],
        key=row["key"],
        priority=row["priority"],
        attempts=row["attempts"],
        max_attempts=row["max_attempts"],
        run_at=row["run_at"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        locked_at=row["locked_at"],
        worker=row["worker"],
        flags=list(row["flags"] or ()),
        error=None if error is None else (error.splitlines() or [""])[0][:300],
        blocked_by=row["blocked_by"],
        progress=None if progress is None else progress.value,
    )


def _placed(filters: dict[str, object], place: Cursor | None, sort: str) -> dict[str, object]:
    """Return the filters of the page that begins at a cursor."""
    sort = sort if place is None else place.sort
    descends = (sort == "newest") != (place is not None and place.is_back)
    where: dict[str, object] = {}
    if place is not None:
        where = {"before_id" if descends else "after_id": place.id}
    return {**filters, **where, "descends": descends}


async def _read_page(
    connection: Connection, schema: Schema, *, filters: dict[str, object], limit: int
) -> list[Any]:
    filters = dict(filters)
    order = "last_jobs" if filters.pop("descends") else "first_jobs"
    return await web_reads.list_jobs(connection, schema, {**filters, order: limit + 1})


def _cut(
    rows: Sequence[Any], place: Cursor | None, sort: str, limit: int
) -> tuple[list[Any], str | None, str | None]:
    """Return the rows of the page, and the cursors of the next and the previous page."""
    sort = sort if place is None else place.sort
    is_back = place is not None and place.is_back
    has_more = len(rows) > limit
    page = list(rows[:limit])
    if is_back:
        page.reverse()
    has_next = bool(page) and (has_more or is_back)
    has_previous = bool(page) and (has_more if is_back else place is not None)
    following = Cursor(sort, False, page[-1]["id"]).encode() if has_next else None
    previous = Cursor(sort, True, page[0]["id"]).encode() if has_previous else None
    return page, following, previous


async def _history_of(utils: WorkerUtils, job_id: int) -> list[JobAttempt]:
    return await utils.job_history(job_id, limit=_MAX_ATTEMPTS)


async def _earlier(utils: WorkerUtils, *, task: str, key: str, but: int) -> list[JobAttempt]:
    found = await utils.history(task=task, key=key, limit=_EARLIER_RUNS * 3)
    return [one for one in found if one.job_id != but][:_EARLIER_RUNS]


def _report(progress: Progress | None) -> ProgressReport | None:
    if progress is None:
        return None
    return ProgressReport(value=progress.value, message=progress.message, at=progress.at)


def _raw(value: Any) -> msgspec.Raw:
    if isinstance(value, msgspec.Raw):
        return value
    try:
        return msgspec.Raw(encode_payload(value).encode())
    except InvalidJobError:
        return msgspec.Raw(b"null")
