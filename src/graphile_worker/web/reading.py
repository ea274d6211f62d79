"""`Reader`: runs queries within limits of time, and looks at the jobs table once for all viewers."""

from __future__ import annotations

import asyncio
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from graphile_worker._base.payload import decode_or_raw, encode_payload
from graphile_worker._db.connection.error_mapping import ErrorKind, classify_error, is_timeout
from graphile_worker._db.queries import web_reads
from graphile_worker._db.queries.web_reads import LimitedSession
from graphile_worker.client import WorkerUtils
from graphile_worker.errors import DatabaseError, PoolTimeoutError, SchemaMissingError
from graphile_worker.web.errors import QueryTimeoutError
from graphile_worker.web.models import Look, StateCounts
from graphile_worker.web.shared import Shared

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from datetime import datetime

    from graphile_worker._db.connection.connect import Connection
    from graphile_worker._db.sql_files import Schema
    from graphile_worker.app import App
    from graphile_worker.web.auth import Access
    from graphile_worker.web.dashboard import Queue

T = TypeVar("T")
MAX_RUNNING = 10_000
MAX_BLOCKED = 10_000
_MAX_COUNTED = 3_000_000
"""Jobs. Of a larger table a sample is counted."""
_SAMPLED = 300_000
"""About how many jobs a sample has."""
_SMALL = 8_000_000
"""Bytes. A smaller table is read for each viewer."""
_GRACE = 2.0
"""Seconds that connecting may take, besides the query."""


class QueueLook(NamedTuple):
    """What one pass over the jobs table found."""

    look: Look
    total: StateCounts
    tasks: Mapping[str, StateCounts]
    oldest: Mapping[str, datetime]
    """The `run_at` of the ready job that has waited longest, by task."""
    running: Sequence[int]
    """Ids of locked jobs, at most 10,000."""


class Reader:
    """Base of `QueueData`.

    Args:
        queue: The schema, and its client.
        app: The app, for its tasks and recurring tasks.
        redact: Changes payloads before they are shown.
        timeout: How long a query may take, in seconds.
    """

    def __init__(
        self, queue: Queue, app: App, *, redact: Callable[[str, Any], Any] | None, timeout: float
    ) -> None:
        self.schema = queue.schema
        self._queue = queue
        self._app = app
        self._redact = redact
        self._timeout = timeout
        self._utils: tuple[WorkerUtils, WorkerUtils] | None = None
        self._is_visible = False
        self._has_few_jobs = False
        self._look = Shared(self._read_look, is_small=lambda: self._has_few_jobs)
        self._shared: dict[object, Shared[Any]] = {"look": self._look}

    async def look(self) -> QueueLook:
        """Return the last look at the jobs table."""
        return await self._look.get()

    async def counts(self) -> StateCounts:
        """Return the jobs by state, from the last look."""
        return (await self.look()).total

    def outdate(self) -> None:
        """Read everything again when it is asked for next, because a viewer has changed something."""
        for shared in self._shared.values():
            shared.outdate()

    async def close(self) -> None:
        """Stop reading in the background."""
        for shared in list(self._shared.values()):
            await shared.close()

    def _share(self, key: object, read: Callable[[], Awaitable[T]], *, min_age: float = 0.0) -> Shared[T]:
        """Return what all viewers share under this key."""
        if len(self._shared) > 200:  # noqa: PLR2004 - more than any dashboard shows; filters differ without end
            self._shared = {"look": self._look}
        shared: Shared[T] = self._shared.setdefault(
            key, Shared(read, min_age=min_age, is_small=lambda: self._has_few_jobs)
        )
        return shared

    def _limited_utils(self) -> WorkerUtils:
        base = self._queue.utils
        if self._utils is None or self._utils[0] is not base:
            session = LimitedSession(base._session, self._timeout)  # noqa: SLF001 - the library's own
            self._utils = base, WorkerUtils._on_session(session, use_local_time=False)
        return self._utils[1]

    async def _ask(self, question: Callable[[WorkerUtils], Awaitable[T]]) -> T:
        """Ask the limited client.

        Raises:
            QueryTimeoutError: It took too long.
            DatabaseError: The database cannot be reached or used.
        """
        utils = self._limited_utils()
        try:
            async with asyncio.timeout(self._timeout + _GRACE):
                if not self._is_visible:
                    await utils.many.check_rows_visible()
                    self._is_visible = True
                return await question(utils)
        except (TimeoutError, PoolTimeoutError) as error:
            raise self._timeout_error() from error
        except DatabaseError as error:
            if is_timeout(error.__cause__):
                raise self._timeout_error() from error
            raise

    def _timeout_error(self) -> QueryTimeoutError:
        return QueryTimeoutError(
            f"The query was stopped after {self._timeout:g} s, so that it does not slow down the workers. "
            "Use a filter that selects fewer jobs."
        )

    async def _query(self, read: Callable[[Connection, Schema], Awaitable[T]]) -> T:
        """Run a query on one connection, in one transaction."""

        async def question(utils: WorkerUtils) -> T:
            session = utils._session  # noqa: SLF001 - the library's own
            return await session.call(lambda on: read(on, session.schema))

        return await self._ask(question)

    async def _optional(self, what: str, reading: Awaitable[T], default: T, notices: list[str]) -> T:
        """Return what a page can do without: the default, and a notice, if it cannot be read."""
        try:
            return await reading
        except SchemaMissingError:
            return default  # only Node has used this schema
        except QueryTimeoutError:
            notices.append(f"{what} took longer than {self._timeout:g} s to read.")
        except DatabaseError as error:
            cause = error.__cause__
            if cause is None or classify_error(cause) is not ErrorKind.FATAL:  # not about privileges
                raise
            notices.append(f"{what} cannot be read: {error}")
        return default

    async def _read_look(self) -> QueueLook:
        started = monotonic()
        size = await self._query(web_reads.read_size)
        self._has_few_jobs = size.bytes < _SMALL
        percent = None
        if size.jobs > _MAX_COUNTED:
            percent = 100.0 * _SAMPLED / size.jobs
        try:
            rows = await self._query(partial(_count, percent=percent))
        except QueryTimeoutError:
            if percent is not None:
                raise
            percent = max(0.1, min(100.0, 100.0 * _SAMPLED / max(size.jobs, 1.0)))
            rows = await self._query(partial(_count, percent=percent))
        scale = 1.0 if percent is None else 100.0 / percent
        notices: list[str] = []
        no_ids: list[int] = []
        running, blocked = await asyncio.gather(
            self._optional("Running jobs", self._find_running(rows, percent), no_ids, notices),
            self._optional("Blocked jobs", self._query(_blocked), 0, notices),
        )
        tasks = {row["task"]: _states(row, scale) for row in rows}
        total = StateCounts(
            **{
                state: sum(getattr(counts, state) for counts in tasks.values())
                for state in ("ready", "scheduled", "retrying", "running", "failed")
            },
            blocked=blocked,
        )
        return QueueLook(
            look=Look(at=size.now, exact=percent is None, seconds=monotonic() - started),
            total=total,
            tasks=tasks,
            oldest={row["task"]: row["oldest_due"] for row in rows if row["ready"]},
            running=running,
        )

    async def _find_running(self, rows: Sequence[Any], percent: float | None) -> list[int]:
        """Return the ids of locked jobs: those that the count found, unless it was one of a sample."""
        if percent is not None:
            return await self._query(_running)
        return [job_id for row in rows for job_id in row["running_ids"] or ()][:MAX_RUNNING]

    def _show_payload(
        self, task: str, raw: msgspec.Raw, access: Access
    ) -> tuple[msgspec.Raw | None, str | None]:
        """Return a payload as the viewer may see it, or the reason why it is hidden."""
        if not access.allows("view_payload"):
            return None, "You may not see payloads."
        if self._redact is None:
            return raw, None
        try:
            shown = self._redact(task, decode_or_raw(bytes(raw).decode()))
            return msgspec.Raw(encode_payload(shown).encode()), None
        except Exception:  # noqa: BLE001 - a hook that fails must not reveal anything
            return None, "The payload could not be redacted."


async def _count(connection: Connection, schema: Schema, *, percent: float | None) -> list[Any]:
    return await web_reads.count_states(connection, schema, percent)


async def _running(connection: Connection, schema: Schema) -> list[int]:
    return await web_reads.find_running(connection, schema, MAX_RUNNING)


async def _blocked(connection: Connection, schema: Schema) -> int:
    return await web_reads.count_up_to(connection, schema, "blocked", MAX_BLOCKED)


def _states(row: Any, scale: float) -> StateCounts:
    return StateCounts(
        **{
            state: round(row[state] * scale)
            for state in ("ready", "scheduled", "retrying", "running", "failed")
        }
    )
