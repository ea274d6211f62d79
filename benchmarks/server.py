"""The PostgreSQL that everybody uses in a run, and what it spent."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import asyncpg
import psutil

from graphile_worker.embedded import EmbeddedPostgres
from graphile_worker.testing import running_server

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import datetime

_DEBIAN = Path("/usr/lib/postgresql")
_DISK = Path("/var/tmp")  # where there is memory behind /tmp, this is a disk all the same
_SAMPLING = 0.05
_SETTLING = 0.2
_LONGEST_SETTLING = 3.0
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
def server(*, durable: bool = False) -> Iterator[str]:
    """The connection string of a server for the run: in memory and careless, or durable on disk."""
    binaries = find_binaries()
    parameters = dict(_PARAMETERS)
    if binaries is not None:
        parameters["shared_preload_libraries"] = "pg_stat_statements"
    if not durable:
        with running_server(parameters=parameters, binaries=binaries) as dsn:
            yield dsn
        return
    with durable_server(parameters, binaries) as dsn:
        yield dsn


@contextmanager
def durable_server(parameters: Mapping[str, str], binaries: Path | None) -> Iterator[str]:
    """The connection string of a server on disk that has these settings, and else those of `initdb`."""
    folder = _DISK / f"graphile-worker-{secrets.token_hex(8)}"
    with EmbeddedPostgres(folder, parameters=parameters, binaries=binaries, remove=True) as embedded:
        yield embedded.dsn()


def environment(dsn: str) -> dict[str, str]:
    """What a driver runs with."""
    return {**os.environ, **connection_variables(dsn), "NO_LOG_SUCCESS": "1"}


def connection_variables(dsn: str) -> dict[str, str]:
    """The connection as PG* variables: not every driver reads every connection string that libpq reads."""
    parts = urlsplit(dsn)
    query = {key: values[0] for key, values in parse_qs(parts.query).items()}
    return {
        "PGHOST": query.get("host") or parts.hostname or "localhost",
        "PGPORT": query.get("port") or str(parts.port or 5432),
        "PGUSER": parts.username or "postgres",
        "PGPASSWORD": parts.password or "",
        "PGDATABASE": parts.path.removeprefix("/"),
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
    """Reads what the server spends, from a database of its own so as not to count itself."""

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

    async def now(self) -> datetime:
        """By the server's clock."""
        now: datetime = await self._connection.fetchval("select clock_timestamp()")
        return now

    async def spent(self, database: str) -> Spent:
        """Up to now, once it keeps still: servers count with a little delay."""
        deadline = time.monotonic() + _LONGEST_SETTLING
        counted = await self._counted(database)
        while time.monotonic() < deadline:
            await asyncio.sleep(_SETTLING)
            before, counted = counted, await self._counted(database)
            if counted == before:
                break
        return Spent(self._cpu(), *counted)

    async def _counted(self, database: str) -> tuple[int, int, int | None]:
        row = await self._connection.fetchrow(
            "select xact_commit + xact_rollback as transactions, pg_current_wal_insert_lsn() - '0/0' as wal"
            " from pg_stat_database where datname = $1",
            database,
        )
        assert row is not None
        statements = None
        if self._statements:
            statements = await self._connection.fetchval(
                "select coalesce(sum(calls), 0)::bigint from pg_stat_statements"
                " where dbid = (select oid from pg_database where datname = $1)",
                database,
            )
        return row["transactions"], int(row["wal"]), statements

    async def connections(self, database: str, since: datetime) -> int:
        """How many connections to the database there are that were made since then."""
        seen: int = await self._connection.fetchval(
            "select count(*) from pg_stat_activity where datname = $1 and backend_start >= $2"
            " and backend_type = 'client backend'",
            database,
            since,
        )
        return seen

    async def most_connections(self, database: str, since: datetime, until: asyncio.Event) -> int:
        """The most of them that were seen at once."""
        most = 0
        while not until.is_set():
            most = max(most, await self.connections(database, since))
            try:
                await asyncio.wait_for(until.wait(), _SAMPLING)
            except TimeoutError:
                continue
        return most

    def _cpu(self) -> float:
        if self._postmaster is None:
            return 0.0
        while True:
            before = self._postmaster.cpu_times()
            total = before.user + before.system + before.children_user + before.children_system
            with suppress(psutil.NoSuchProcess):
                for child in self._postmaster.children():
                    times = child.cpu_times()
                    total += times.user + times.system
                # Of those that have ended the postmaster's own figures tell. One that did so in between
                # would be counted in neither place.
                after = self._postmaster.cpu_times()
                if (
                    before.children_user + before.children_system
                    == after.children_user + after.children_system
                ):
                    return float(total)


def _postmaster(backend: int) -> psutil.Process | None:
    try:
        return psutil.Process(backend).parent()
    except psutil.Error:
        return None
