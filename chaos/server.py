"""The PostgreSQL server of a run, which faults can stop and start."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import asyncpg

from graphile_worker import DatabaseError, WorkerUtils
from graphile_worker.embedded import EmbeddedPostgres
from graphile_worker.embedded.binaries import Binaries, ServerUser
from graphile_worker.testing.servers import fastest_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_CONNECTIONS = 80
# An immediate stop loses unflushed commits, so commits are flushed, but to memory, which needs no fsync.
_PARAMETERS = {
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": str(MOST_CONNECTIONS),
    "log_min_messages": "fatal",
}
_QUERY_TIMEOUT, _RETRY_DELAY = 2.0, 0.2
_RETRIES = 5
_LOCKED_JOBS = """
    select locked_by, array_agg(id order by id) as ids from graphile_worker._private_jobs
    where locked_by is not null group by locked_by"""
_REMAINING_JOBS = """
    select id as job, coalesce(payload->>'token', '') as token, attempts, max_attempts, locked_by, last_error
    from graphile_worker._private_jobs order by id"""
_LOCKED_QUEUES = """
    select queue_name as queue, locked_by from graphile_worker._private_job_queues
    where locked_by is not null order by queue_name"""
_KEPT_ATTEMPTS = """
    select job_id as job, attempt,
      (array['completed', 'failed', 'cancelled', 'snoozed', 'worker_died'])[outcome] as outcome, worker
    from graphile_worker._private_python_runs where worker is not null order by ended_at, job_id"""
_SESSIONS_OF_ROLES = """
    select pid, usename from pg_stat_activity
    where backend_type = 'client backend' and pid <> pg_backend_pid() and usename = any ($1)"""

Unreachable = (
    *(OSError, TimeoutError, DatabaseError),
    # asyncpg raises InternalClientError if a connection breaks in the middle of its own protocol steps.
    *(asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError),
)
"""The errors of a query during a fault."""


class Server:
    """The server of a run. Each client has its own role, which identifies its sessions."""

    def __init__(self, embedded: EmbeddedPostgres) -> None:
        self._embedded = embedded
        self.whole_server_fault = asyncio.Lock()
        """Held by a fault that makes the whole server unusable."""

    def dsn(self, role: str = "postgres") -> str:
        """Return the connection string of a role."""
        return self._embedded.dsn().replace("postgres@", f"{role}@", 1)

    async def prepare(self, roles: list[str]) -> None:
        """Create the roles and install the schema."""
        connection = await asyncpg.connect(self.dsn())
        for role in roles:
            await connection.execute(f"create role {role} superuser login")
        await connection.close()
        async with WorkerUtils(self.dsn()) as utils:
            await utils.migrate()

    async def restart(self, mode: str, *, away: float = 0.0) -> None:
        """Stop the server in a mode, and start it after some seconds."""
        if away:
            await asyncio.to_thread(self._pg_ctl, "stop", mode)
            await asyncio.sleep(away)
        # If the server is stopped, pg_ctl restart starts it.
        await asyncio.to_thread(self._pg_ctl, "restart", mode)

    async def version(self) -> str:
        """Return the server's version."""
        return str((await self.fetch_with_retries("show server_version"))[0][0])

    async def fetch(self, statement: str, *arguments: object) -> list[asyncpg.Record]:
        """Return the rows of a query. Each query opens a new connection, because an old one may be broken."""
        async with asyncio.timeout(_QUERY_TIMEOUT):
            connection = await asyncpg.connect(self.dsn())
            try:
                return await connection.fetch(statement, *arguments)
            finally:
                connection.terminate()

    async def fetch_with_retries(self, statement: str, *arguments: object) -> list[asyncpg.Record]:
        """Return the rows of a query, with retries for a slow machine. For use while no fault is active."""
        for _ in range(_RETRIES):
            with suppress(*Unreachable):
                return await self.fetch(statement, *arguments)
            await asyncio.sleep(_RETRY_DELAY)
        return await self.fetch(statement, *arguments)

    async def locks(self) -> dict[str, list[int]]:
        """Return the jobs that each worker holds, or an empty dict if the server is unreachable."""
        try:
            return {row["locked_by"]: row["ids"] for row in await self.fetch(_LOCKED_JOBS)}
        except Unreachable:
            return {}

    async def sessions(self, roles: list[str]) -> list[tuple[int, str]]:
        """Return the process id and role of each session of these roles."""
        return [(row["pid"], row["usename"]) for row in await self.fetch(_SESSIONS_OF_ROLES, roles)]

    async def remaining_jobs(self) -> list[dict[str, Any]]:
        """Return all jobs in the database."""
        return [dict(row) for row in await self.fetch_with_retries(_REMAINING_JOBS)]

    async def locked_queues(self) -> list[dict[str, Any]]:
        """Return all locked queues."""
        return [dict(row) for row in await self.fetch_with_retries(_LOCKED_QUEUES)]

    async def kept_attempts(self) -> list[dict[str, Any]]:
        """Return all attempts in the history."""
        return [dict(row) for row in await self.fetch_with_retries(_KEPT_ATTEMPTS)]

    def _pg_ctl(self, action: str, mode: str) -> None:
        data, user = self._embedded.path / "data", ServerUser.find()
        program = Binaries.from_extra().reachable_by(user).program("pg_ctl")
        command = [program, action, "-w", "-m", mode, "-D", str(data)]
        if action == "restart":
            command += ["-l", str(self._embedded.log)]
        subprocess.run(
            command,
            check=True,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            **user.run_as,
        )


@contextmanager
def running_server() -> Iterator[Server]:
    """Start a server for one run, and remove it at the end, also after an error."""
    folder = fastest_folder() / f"graphile-worker-{secrets.token_hex(8)}"
    with EmbeddedPostgres(folder, parameters=_PARAMETERS, remove=True) as embedded:
        yield Server(embedded)
