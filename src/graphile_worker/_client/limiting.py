"""The part of `WorkerUtils` that reads and changes limits."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from graphile_worker._client.sync_twins import sync_twin
from graphile_worker._db.connection.any_connection import run_own
from graphile_worker._db.queries.limits import listing_limits, setting_limit
from graphile_worker.errors import ConfigurationError
from graphile_worker.limits import check_concurrency, check_limit_name

if TYPE_CHECKING:
    from graphile_worker._db.connection.drivers import AnyConnection
    from graphile_worker._db.connection.session import Session
    from graphile_worker.limits import LimitState


class LimitOperations:
    """The part of `WorkerUtils` that reads and changes limits."""

    _session: Session

    async def limits(self, *, connection: AnyConnection | None = None) -> list[LimitState]:
        """Return the named limits that workers have declared, and how much of them is used.

        Args:
            connection: The caller's connection or session, as for `WorkerUtils.add_job`.
        """
        schema = self._session.schema
        return await self._session.run(
            lambda on: run_own(on, listing_limits(schema)), lambda: listing_limits(schema), connection
        )

    async def set_limit(
        self, name: str, concurrency: int | None, *, connection: AnyConnection | None = None
    ) -> None:
        """Change a named limit while workers run. The value holds until it is changed again.

        Jobs that run are not stopped: if more run than the new limit allows, no job starts until enough have
        ended.

        Args:
            name: Name of the limit. A worker must have declared it.
            concurrency: Maximum number of jobs that run at once; 0 stops them all. None returns to the value
                in the code.
            connection: The caller's connection or session, as for `WorkerUtils.add_job`.

        Raises:
            ConfigurationError: There is no such limit, or a value is invalid.

        Example:
            >>> import asyncio
            >>> from graphile_worker import App, Limit
            >>> app = App(dsn=dsn)
            >>> @app.task(limit=Limit("stripe", concurrency=10))
            ... async def charge(order: int) -> None: ...
            >>> async def main():
            ...     await app.run_once()  # a worker declares the limit
            ...     await app.utils.set_limit("stripe", 5)
            ...     [limit] = await app.utils.limits()
            ...     return limit.concurrency, limit.declared
            >>> asyncio.run(main())
            (5, 10)
        """
        check_limit_name(name)
        if concurrency is not None:
            check_concurrency("concurrency", concurrency, 0)
        schema = self._session.schema
        if not await self._session.run(
            lambda on: run_own(on, setting_limit(schema, name, concurrency)),
            lambda: setting_limit(schema, name, concurrency),
            connection,
        ):
            known = [limit.name for limit in await self.limits(connection=connection)]
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known limits: {', '.join(known) or 'none'}."
            raise ConfigurationError(
                f"There is no limit {name!r}. {hint} A worker declares a limit when it starts."
            )

    limits_sync = sync_twin(limits)
    set_limit_sync = sync_twin(set_limit)
