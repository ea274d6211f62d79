"""The PostgreSQL server of a run, and its resource usage."""

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
_DISK = Path("/var/tmp")  # on disk even if /tmp is in memory
_SAMPLE_INTERVAL = 0.05
_SETTLE_INTERVAL = 0.2
_SETTLE_TIMEOUT = 3.0
_PARAMETERS = {
    "max_connections": "200",
    "shared_buffers": "512MB",
    "max_wal_size": "8GB",
    "autovacuum_naptime": "5s",
}


def find_binaries() -> Path | None:
    """Return Debian's newest PostgreSQL, which includes pg_stat_statements, or None if there is none."""
    versions = [found for found in _DEBIAN.glob("*") if (found / "bin" / "initdb").exists()]
    return max(versions, key=lambda found: int(found.name), default=None)


@contextmanager
def server(*, durable: bool = False) -> Iterator[str]:
    """Start a server, in memory without fsync or durable on disk. Yield its connection string."""
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
    """Start a server on disk with these settings, and otherwise initdb's. Yield its connection string."""
    folder = _DISK / f"graphile-worker-{secrets.token_hex(8)}"
    with EmbeddedPostgres(folder, parameters=parameters, binaries=binaries, remove=True) as embedded:
        yield embedded.dsn()


def environment(dsn: str) -> dict[str, str]:
    """Return the environment variables of a driver."""
    return {**os.environ, **connection_variables(dsn), "NO_LOG_SUCCESS": "1"}


def connection_variables(dsn: str) -> dict[str, str]:
    """Return the connection as PG* variables, because not every driver reads all of libpq's URLs."""
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
class ServerUsage:
    """The server's resource usage, in total or between two moments."""

    cpu: float
    """The CPU time of all server processes, in seconds."""
    transactions: int
    wal: int
    statements: int | None
    """The statements that clients sent, or None without pg_stat_statements."""

    def __sub__(self, earlier: ServerUsage) -> ServerUsage:
        """Return the usage between two moments."""
        statements = None
        if self.statements is not None and earlier.statements is not None:
            statements = self.statements - earlier.statements
        return ServerUsage(
            self.cpu - earlier.cpu,
            self.transactions - earlier.transactions,
            self.wal - earlier.wal,
            statements,
        )


class UsageMeter:
    """A reader of the server's resource usage. It uses another database, so as not to count itself."""

    def __init__(self, connection: asyncpg.Connection, postmaster: psutil.Process | None) -> None:
        self._connection = connection
        self._postmaster = postmaster
        self._statements = False

    @classmethod
    async def connect(cls, dsn: str) -> UsageMeter:
        """Connect, and find the server's processes if they run on this machine."""
        connection = await asyncpg.connect(dsn, server_settings={"application_name": "benchmark meter"})
        meter = cls(connection, _postmaster(connection.get_server_pid()))
        preloaded = await connection.fetchval("show shared_preload_libraries")
        if "pg_stat_statements" in preloaded:
            await connection.execute("create extension if not exists pg_stat_statements")
            meter._statements = True
        return meter

    async def close(self) -> None:
        """Disconnect."""
        await self._connection.close()

    async def version(self) -> str:
        """Return the server's version."""
        return str(await self._connection.fetchval("show server_version"))

    async def now(self) -> datetime:
        """Return the time by the server's clock."""
        now: datetime = await self._connection.fetchval("select clock_timestamp()")
        return now

    async def usage(self, database: str) -> ServerUsage:
        """Return the usage so far, once the counters are stable: servers update them with a short delay."""
        deadline = time.monotonic() + _SETTLE_TIMEOUT
        counted = await self._counted(database)
        while time.monotonic() < deadline:
            await asyncio.sleep(_SETTLE_INTERVAL)
            before, counted = counted, await self._counted(database)
            if counted == before:
                break
        return ServerUsage(self._cpu(), *counted)

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
        """Return the number of connections to the database that were opened since a moment."""
        seen: int = await self._connection.fetchval(
            "select count(*) from pg_stat_activity where datname = $1 and backend_start >= $2"
            " and backend_type = 'client backend'",
            database,
            since,
        )
        return seen

    async def most_connections(self, database: str, since: datetime, until: asyncio.Event) -> int:
        """Return the highest number of such connections at once."""
        most = 0
        while not until.is_set():
            most = max(most, await self.connections(database, since))
            try:
                await asyncio.wait_for(until.wait(), _SAMPLE_INTERVAL)
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
                # The postmaster's own figures include ended children. A child that ended between the two
                # readings would be counted in neither, so the loop repeats if they differ.
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
