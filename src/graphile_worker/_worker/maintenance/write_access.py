"""`WriteAccess`: whether the worker's role may write to tables that the worker can do without."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from graphile_worker._db.queries.statistics import may_write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphile_worker._base.logs import ScopedLogger
    from graphile_worker._db.connection.session import Session

_CHECK_INTERVAL = 300.0
"""Seconds between two checks while the role may not write."""


class WriteAccess:
    """Checks whether tables exist and can be written, and warns once if not.

    Args:
        session: The connection to the database.
        tables: The names of the tables, without the prefix ``_private_python_``.
        consequence: What the worker does not do without them, for the warning.
        logger: The worker's logger.
    """

    def __init__(
        self, session: Session, tables: Sequence[str], consequence: str, logger: ScopedLogger
    ) -> None:
        self._session = session
        self._tables = tables
        self._consequence = consequence
        self._logger = logger
        self._granted: bool | None = None
        self._check_at = 0.0

    async def check(self) -> bool:
        """Return whether the worker may write.

        Raises:
            DatabaseError: The database is unavailable.
        """
        if self._granted or (self._granted is False and monotonic() < self._check_at):
            return self._granted
        is_first = self._granted is None
        schema = self._session.schema
        self._granted = await self._session.call(lambda on: may_write(on, schema, self._tables), attempts=1)
        self._check_at = monotonic() + _CHECK_INTERVAL
        if is_first and not self._granted:
            self._logger.warning(
                "%s: the schema %r lacks tables, or this role may not write to them. Run graphile-worker "
                "migrate, or grant select, insert, update and delete on %s",
                self._consequence,
                schema.name,
                ", ".join(f"_private_python_{table}" for table in self._tables),
            )
        return self._granted
