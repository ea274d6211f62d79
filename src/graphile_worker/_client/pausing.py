"""The part of `WorkerUtils` that pauses and resumes tasks, queues and everything."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from graphile_worker._base.checked_connection import CheckedConnection
from graphile_worker._client.sync_twins import sync_twin
from graphile_worker._db.connection.any_connection import run_own
from graphile_worker._db.queries import pauses as queries
from graphile_worker.errors import ConfigurationError
from graphile_worker.job import check_text, read_instant

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from graphile_worker._db.connection.drivers import AnyConnection
    from graphile_worker._db.connection.session import Session
    from graphile_worker.limits import Pause

_MAX_NAME_LENGTH = 128
_MAX_REASON_LENGTH = 1000


class PauseOperations:
    """The part of `WorkerUtils` that pauses and resumes."""

    _session: Session
    _require_transaction: bool

    async def pause(
        self,
        *,
        task: str | None = None,
        queue: str | None = None,
        until: datetime | timedelta | str | None = None,
        reason: str | None = None,
        paused_by: str | None = None,
        connection: AnyConnection | None = None,
    ) -> Pause:
        """Pause a task, a serial queue, or everything: no more of its jobs start.

        Jobs can still be added. Jobs that run are not stopped. The pause is stored in the database, so it
        survives restarts and new deployments. A second call changes the pause.

        Python workers obey a pause within milliseconds if they receive notifications, otherwise at their next
        poll. Node and Rust workers obey only the pause of a queue.

        Args:
            task: Identifier of the task to pause.
            queue: Name of the queue to pause. It may be unknown so far. Without `task` and `queue`,
                everything is paused.
            until: When the pause ends by itself: an aware datetime, ISO 8601 text with an offset from UTC, or
                a timedelta from now. A running Python worker ends it. By default `resume` ends it.
            reason: Why, for people.
            paused_by: Who, for people; by default the database role.
            connection: The caller's connection or session, as for `WorkerUtils.add_job`. The pause takes
                effect at the commit. Until then, workers leave the queue alone.

        Returns:
            The pause.

        Raises:
            ConfigurationError: Both `task` and `queue` are given.
            InvalidJobError: An argument is invalid.

        Example:
            >>> import asyncio
            >>> from datetime import timedelta
            >>> from graphile_worker import WorkerUtils
            >>> async def main():
            ...     async with WorkerUtils(dsn=dsn) as utils:
            ...         await utils.migrate()
            ...         pause = await utils.pause(queue="tenant:7", until=timedelta(hours=1))
            ...         assert await utils.resume(queue="tenant:7")
            ...         return pause.subject
            >>> asyncio.run(main())
            "queue 'tenant:7'"
        """
        kind, name = _read_subject(task, queue)
        end = None if until is None else read_instant("until", until)
        for argument, text in (("reason", reason), ("paused_by", paused_by)):
            if text is not None:
                check_text(argument, text, max_length=_MAX_REASON_LENGTH)
        schema = self._session.schema
        return await self._session.run(
            lambda on: run_own(on, queries.pausing(schema, kind, name, end, reason, paused_by)),
            lambda: queries.pausing(schema, kind, name, end, reason, paused_by),
            self._checked(connection),
        )

    async def resume(
        self,
        *,
        task: str | None = None,
        queue: str | None = None,
        connection: AnyConnection | None = None,
    ) -> bool:
        """End a pause.

        Each pause is ended by itself: without `task` and `queue`, only the pause of everything ends. If a job
        of a paused queue still runs, the next one starts after it.

        Args:
            task: Identifier of the paused task.
            queue: Name of the paused queue.
            connection: The caller's connection or session, as for `pause`.

        Returns:
            Whether there was a pause.

        Raises:
            ConfigurationError: Both `task` and `queue` are given.
            InvalidJobError: An argument is invalid.
        """
        kind, name = _read_subject(task, queue)
        schema = self._session.schema
        holder = await self._session.run(
            lambda on: run_own(on, queries.resuming(schema, kind, name)),
            lambda: queries.resuming(schema, kind, name),
            self._checked(connection),
        )
        if connection is None and holder and not holder.startswith(queries.PYTHON_WORKER):
            await self._settle(name, holder)
        return holder is not None

    async def pauses(self, *, connection: AnyConnection | None = None) -> list[Pause]:
        """Return what is paused.

        Args:
            connection: The caller's connection or session, as for `pause`.
        """
        schema = self._session.schema
        return await self._session.run(
            lambda on: run_own(on, queries.listing_pauses(schema)),
            lambda: queries.listing_pauses(schema),
            connection,
        )

    async def _settle(self, queue: str, holder: str) -> None:
        """Make sure that a queue, whose lock a Node or Rust worker has got back, is not locked forever."""
        schema, call = self._session.schema, self._session.call
        locked_at = await call(lambda on: queries.read_lock(on, schema, queue, holder))
        if locked_at is not None:
            await asyncio.sleep(queries.LATE_STATEMENT)
            await call(lambda on: queries.release_idle_queue(on, schema, queue, holder, locked_at))

    def _checked(self, connection: AnyConnection | None) -> CheckedConnection | None:
        if connection is None:
            return None
        return CheckedConnection(connection, require=self._require_transaction)

    pause_sync = sync_twin(pause)
    resume_sync = sync_twin(resume)
    pauses_sync = sync_twin(pauses)


def _read_subject(task: str | None, queue: str | None) -> tuple[str, str]:
    """Return the kind and the name of what to pause."""
    if task is not None and queue is not None:
        raise ConfigurationError("Pass task or queue, not both. Without them, everything is paused.")
    for argument, name in (("task", task), ("queue", queue)):
        if name is not None:
            check_text(argument, name, max_length=_MAX_NAME_LENGTH)
            return argument, name
    return "all", ""
