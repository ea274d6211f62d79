"""The PostgreSQL that everybody uses in a run, and what it spent."""

from __future__ import annotations

import asyncio
import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import asyncpg
import psutil

from graphile_worker.testing import running_server

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEBIAN = Path("/usr/lib/postgresql")
_SAMPLING = 0.05
_PARAMETERS = {
    "max_connections": "200",
    "shared_buffers": "512MB",
    "max_wal_size": "8GB",
    "autovacuum_naptime": "5s",
}


def find_binaries() -> Path | None:
    """Debian's newest PostgreSQL, because it brings pg_stat_statements; None if there is none."""
    versions = [found for found in _DEBIAN.glob("*") if (found / "bin" / "initdb").exists()]
    return max(versions, key=lambda found: int(found.name), default=None)


@contextmanager
def server() -> Iterator[str]:
    """The connection string of a server for the run."""
    binaries = find_binaries()
    parameters = dict(_PARAMETERS)
    if binaries is not None:
        parameters["shared_preload_libraries"] = "pg_stat_statements"
    with running_server(parameters=parameters, binaries=binaries) as dsn:
        yield dsn


def environment(dsn: str) -> dict[str, str]:
    """The same connection as PG* variables: those every driver reads."""
    parts = urlsplit(dsn)
    query = {key: values[0] for key, values in parse_qs(parts.query).items()}
    return {
        **os.environ,
        "PGHOST": query.get("host") or parts.hostname or "localhost",
        "PGPORT": query.get("port") or str(parts.port or 5432),
        "PGUSER": parts.username or "postgres",
        "PGPASSWORD": parts.password or "",
        "PGDATABASE": parts.path.removeprefix("/"),
        "NO_LOG_SUCCESS": "1",
    }


@dataclass(frozen=True, slots=True)
class Spent:
    """What the server spent, up to a moment or between two."""

    cpu: float
    """Seconds, of all its processes."""
    transactions: int
    wal: int
    statements: int | None
    """As sent by clients; None without pg_stat_statements."""

    def __sub__(self, earlier: Spent) -> Spent:
        """What was spent between the two."""
        statements = None
        if self.statements is not None and earlier.statements is not None:
            statements = self.statements - earlier.statements
        return Spent(
            self.cpu - earlier.cpu,
            self.transactions - earlier.transactions,
            self.wal - earlier.wal,
            statements,
        )


class Gauge:
    """Reads what the server spends, on a connection of its own."""

    def __init__(self, connection: asyncpg.Connection, postmaster: psutil.Process | None) -> None:
        self._connection = connection
        self._postmaster = postmaster
        self._statements = False

    @classmethod
    async def connect(cls, dsn: str) -> Gauge:
        """Connect, and find the server's processes if it runs here."""
        connection = await asyncpg.connect(dsn, server_settings={"application_name": "benchmark gauge"})
        gauge = cls(connection, _postmaster(connection.get_server_pid()))
        preloaded = await connection.fetchval("show shared_preload_libraries")
        if "pg_stat_statements" in preloaded:
            await connection.execute("create extension if not exists pg_stat_statements")
            gauge._statements = True
        return gauge

    async def close(self) -> None:
        """Disconnect."""
        await self._connection.close()

    async def version(self) -> str:
        """The server's version."""
        return str(await self._connection.fetchval("show server_version"))

    async def spent(self) -> Spent:
        """Up to now, but for the last moments: servers count with a little delay."""
        row = await self._connection.fetchrow(
            "select xact_commit + xact_rollback as transactions, pg_current_wal_insert_lsn() - '0/0' as wal"
            " from pg_stat_database where datname = current_database()"
        )
        statements = None
        if self._statements:
            statements = await self._connection.fetchval(
                "select sum(calls)::bigint from pg_stat_statements"
                " where dbid = (select oid from pg_database where datname = current_database())"
            )
        return Spent(self._cpu(), row["transactions"], int(row["wal"]), statements)

    async def most_connections(self, until: asyncio.Event) -> int:
        """The most connections to this database that were seen at once, without ours."""
        most = 0
        while not until.is_set():
            seen = await self._connection.fetchval(
                "select count(*) from pg_stat_activity where datname = current_database()"
                " and pid <> pg_backend_pid() and backend_type = 'client backend'"
            )
            most = max(most, seen)
            try:
                await asyncio.wait_for(until.wait(), _SAMPLING)
            except TimeoutError:
                continue
        return most

    def _cpu(self) -> float:
        if self._postmaster is None:
            return 0.0
        own = self._postmaster.cpu_times()
        # Of those that have ended the postmaster's own figures tell.
        total = own.user + own.system + own.children_user + own.children_system
        for child in self._postmaster.children():
            try:
                times = child.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return float(total)


def _postmaster(backend: int) -> psutil.Process | None:
    try:
        return psutil.Process(backend).parent()
    except psutil.Error:
        return None
