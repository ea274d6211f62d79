"""The part of `WorkerUtils` that reads the history, and failures of jobs that are still there."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from graphile_worker._base.durations import seconds
from graphile_worker._db.queries import history as queries
from graphile_worker._db.queries.failures import list_groups
from graphile_worker.errors import ConfigurationError, InvalidJobError
from graphile_worker.history import AttemptOutcome, HistorySummary, JobAttempt, PrunedHistory
from graphile_worker.job import read_instant

if TYPE_CHECKING:
    from collections.abc import Iterable

    from graphile_worker._base.durations import Duration
    from graphile_worker._db.connection.connect import Connection
    from graphile_worker._db.connection.session import Session
    from graphile_worker.stats import FailureGroup

_MAX_LIMIT = 100_000
_PRUNE_TRIES = 20
_PRUNE_PAUSE = 0.5


class HistoryOperations:
    """The part of `WorkerUtils` that reads the history."""

    _session: Session

    async def history(
        self,
        *,
        task: str | None = None,
        outcome: AttemptOutcome | str | Iterable[AttemptOutcome | str] | None = None,
        since: datetime | timedelta | str | None = None,
        until: datetime | timedelta | str | None = None,
        key: str | None = None,
        error_type: str | None = None,
        before: JobAttempt | None = None,
        limit: int = 100,
        connection: Connection | None = None,
    ) -> list[JobAttempt]:
        """Return attempts from the history, the latest first.

        The history has the attempts that Python workers kept: see ``App(history=...)``. Jobs that Node or
        Rust workers ran are not in it.

        Args:
            task: Only attempts of this task.
            outcome: Only attempts with this outcome, or with one of these.
            since: Only attempts that ended then or later. A timedelta is that long ago.
            until: Only attempts that ended before then.
            key: Only attempts of jobs with this key.
            error_type: Only attempts that failed with an exception of this type, with or without its module.
            before: Only attempts after this one in the list, to read page by page.
            limit: Maximum number of attempts.
            connection: An asyncpg connection of the caller.

        Raises:
            InvalidJobError: An argument is invalid.

        Example:
            >>> import asyncio
            >>> from graphile_worker import App
            >>> app = App(dsn=dsn, history="all")
            >>> @app.task
            ... async def hello(name: str) -> None:
            ...     print(f"Hello, {name}")
            >>> async def main():
            ...     await app.migrate()
            ...     await hello.enqueue(name="Ann")
            ...     await app.run_once()
            ...     [attempt] = await app.utils.history(task="hello")
            ...     return attempt
            >>> print(asyncio.run(main()).outcome)
            Hello, Ann
            completed
        """
        _check_limit(limit)
        schema, outcomes = self._session.schema, _read_outcomes(outcome)
        place = None if before is None else (before.ended_at, before.job_id)
        return await self._session.call(
            lambda on: queries.list_attempts(
                on,
                schema,
                task=task,
                outcomes=outcomes,
                since=_ago("since", since),
                until=_ago("until", until),
                key=key,
                error_type=error_type,
                before=place,
                limit=limit,
            ),
            connection,
        )

    async def job_history(
        self, job_id: int, *, limit: int = 1000, connection: Connection | None = None
    ) -> list[JobAttempt]:
        """Return the attempts of one job from the history, the first one first.

        The list is empty if no attempt was kept, for example because a Node worker ran the job.
        """
        _check_limit(limit)
        schema = self._session.schema
        return await self._session.call(
            lambda on: queries.list_attempts_of_job(on, schema, job_id, limit), connection
        )

    async def has_history(self, *, connection: Connection | None = None) -> bool:
        """Return whether the schema has a history that this role may read."""
        schema = self._session.schema
        return await self._session.call(lambda on: queries.can_read(on, schema), connection)

    async def history_summary(
        self, *, since: datetime | timedelta | str | None = None, connection: Connection | None = None
    ) -> list[HistorySummary]:
        """Return the numbers of attempts in the history and their durations, by task.

        Args:
            since: Only attempts that ended then or later. A timedelta is that long ago.
            connection: An asyncpg connection of the caller.
        """
        schema, start = self._session.schema, _ago("since", since)
        return await self._session.call(lambda on: queries.summarize(on, schema, start), connection)

    async def prune_history(self, older_than: Duration) -> PrunedHistory:
        """Remove old attempts from the history. Workers do so by themselves after ``history_keep``.

        Attempts are removed by the day: a day is removed if all of it is older.

        Args:
            older_than: The age in seconds, or as a timedelta.

        Raises:
            ConfigurationError: The role may not drop partitions, or a long transaction reads the history.
        """
        age, schema, session = seconds("older_than", older_than), self._session.schema, self._session
        found = await session.call(lambda on: queries.inspect_partitions(on, schema))
        days = 0
        names = [] if found is None else found.expired(age)
        if found is not None and names and not found.may_create:
            raise ConfigurationError(
                f"The role {found.role!r} may not drop partitions of the history. Connect as their owner, "
                f"{found.owner!r}."
            )
        for number in range(_PRUNE_TRIES):
            if found is None or not names:
                break
            await asyncio.sleep(_PRUNE_PAUSE if number else 0)
            left = names
            dropped = await session.call(lambda on: queries.drop_partitions(on, schema, found, left))  # noqa: B023
            days += len(dropped)
            names = [name for name in names if name not in dropped]
        if names:
            raise ConfigurationError(
                f"{len(names)} days of the history could not be removed, because another transaction reads "
                "them. Try again later."
            )
        attempts = 0
        limit = None if found is None else found.now - timedelta(seconds=age)
        while limit is not None and (
            deleted := await session.call(lambda on: queries.delete_old_rows(on, schema, limit))
        ):
            attempts += deleted
        return PrunedHistory(days=days, attempts=attempts)

    async def failures(
        self, *, task: str | None = None, limit: int = 100, connection: Connection | None = None
    ) -> list[FailureGroup]:
        """Return the jobs whose last attempts failed, grouped by task and error, the largest groups first.

        These are jobs that are still there: they wait for a retry, or have no attempts left. This reads all
        of them, and does not need the history. Failures that other programs recorded are included.

        Args:
            task: Only jobs of this task.
            limit: Maximum number of groups.
            connection: An asyncpg connection of the caller.

        Example:
            >>> import asyncio
            >>> from graphile_worker import App, Fail
            >>> app = App(dsn=dsn)
            >>> @app.task
            ... async def charge(order: int) -> None:
            ...     raise Fail(f"order {order} has no card")
            >>> async def main():
            ...     await app.migrate()
            ...     await charge.enqueue_many([{"order": 7}, {"order": 8}])
            ...     await app.run_once()
            ...     [group] = await app.utils.failures()
            ...     return group.jobs, group.fingerprint
            >>> asyncio.run(main())
            (2, 'order # has no card')
        """
        _check_limit(limit)
        schema = self._session.schema
        return await self._session.call(lambda on: list_groups(on, schema, task, limit), connection)


def _read_outcomes(
    given: AttemptOutcome | str | Iterable[AttemptOutcome | str] | None,
) -> list[AttemptOutcome] | None:
    if given is None:
        return None
    names = [given] if isinstance(given, str) else list(given)
    known = [outcome.value for outcome in AttemptOutcome]
    if wrong := [name for name in names if name not in known]:
        raise InvalidJobError(
            f"outcome is {wrong[0]!r}; it must be one of {', '.join(known)}.", argument="outcome"
        )
    return [AttemptOutcome(name) for name in names]


def _ago(argument: str, value: datetime | timedelta | str | None) -> datetime | None:
    """Return a point in time. A timedelta is that long ago."""
    if value is None:
        return None
    instant = read_instant(argument, value)
    return datetime.now(UTC) - instant if isinstance(instant, timedelta) else instant


def _check_limit(limit: object) -> None:
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= _MAX_LIMIT:
        raise InvalidJobError(
            f"limit is {limit!r}; it must be an integer from 1 to {_MAX_LIMIT:,}.", argument="limit"
        )
