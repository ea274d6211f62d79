"""The PostgreSQL of a run: one that can be stopped and started, and looked into."""

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
# An immediate stop loses what is not flushed, so commits are flushed; to memory, which needs no fsync.
_PARAMETERS = {
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": str(MOST_CONNECTIONS),
    "log_min_messages": "fatal",
}
_LONGEST_ANSWER, _BETWEEN = 2.0, 0.2
_PATIENCE = 5
"""How often to ask again."""
_LOCKED_JOBS = """
    select locked_by, array_agg(id order by id) as ids from graphile_worker._private_jobs
    where locked_by is not null group by locked_by"""
_LEFT_JOBS = """
    select id as job, coalesce(payload->>'token', '') as token, attempts, max_attempts, locked_by, last_error
    from graphile_worker._private_jobs order by id"""
_LEFT_LOCKS = """
    select queue_name as queue, locked_by from graphile_worker._private_job_queues
    where locked_by is not null order by queue_name"""
_ANYBODY_BUT_US = """
    select pid, usename from pg_stat_activity
    where backend_type = 'client backend' and pid <> pg_backend_pid() and usename = any ($1)"""

Unreachable = (
    *(OSError, TimeoutError, DatabaseError),
    # The last is what the driver says when it is surprised in the middle of its own steps.
    *(asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError),
)
"""What asking a server may come to that somebody is breaking."""


class Server:
    """A server of our own. Each who connects has a role, by which the sessions are told apart."""

    def __init__(self, embedded: EmbeddedPostgres) -> None:
        self._embedded = embedded
        self.changing = asyncio.Lock()
        """Held by whoever makes the server as a whole unusable."""

    def dsn(self, role: str = "postgres") -> str:
        """The connection string for that role."""
        return self._embedded.dsn().replace("postgres@", f"{role}@", 1)

    async def prepare(self, roles: list[str]) -> None:
        """Install the schema, make the roles."""
        connection = await asyncpg.connect(self.dsn())
        for role in roles:
            await connection.execute(f"create role {role} superuser login")
        await connection.close()
        async with WorkerUtils(self.dsn()) as utils:
            await utils.migrate()

    async def restart(self, mode: str, *, away: float = 0.0) -> None:
        """Stop it in that mode, and start it after so long."""
        if away:
            await asyncio.to_thread(self._pg_ctl, "stop", mode)
            await asyncio.sleep(away)
        # Of a server that is stopped it says so, and starts it.
        await asyncio.to_thread(self._pg_ctl, "restart", mode)

    async def version(self) -> str:
        """The server's version."""
        return str((await self.ask_patiently("show server_version"))[0][0])

    async def ask(self, statement: str, *arguments: object) -> list[asyncpg.Record]:
        """The rows, on a connection of its own: those of before may be gone."""
        async with asyncio.timeout(_LONGEST_ANSWER):
            connection = await asyncpg.connect(self.dsn())
            try:
                return await connection.fetch(statement, *arguments)
            finally:
                connection.terminate()

    async def ask_patiently(self, statement: str, *arguments: object) -> list[asyncpg.Record]:
        """The same while nothing is being broken: only the machine may be slow."""
        for _ in range(_PATIENCE):
            with suppress(*Unreachable):
                return await self.ask(statement, *arguments)
            await asyncio.sleep(_BETWEEN)
        return await self.ask(statement, *arguments)

    async def locks(self) -> dict[str, list[int]]:
        """Which worker holds which jobs; nothing if nobody can be asked."""
        try:
            return {row["locked_by"]: row["ids"] for row in await self.ask(_LOCKED_JOBS)}
        except Unreachable:
            return {}

    async def sessions(self, roles: list[str]) -> list[tuple[int, str]]:
        """The sessions of these roles: process and role."""
        return [(row["pid"], row["usename"]) for row in await self.ask(_ANYBODY_BUT_US, roles)]

    async def left_jobs(self) -> list[dict[str, Any]]:
        """All jobs that there are."""
        return [dict(row) for row in await self.ask_patiently(_LEFT_JOBS)]

    async def left_locks(self) -> list[dict[str, Any]]:
        """All locked queues that there are."""
        return [dict(row) for row in await self.ask_patiently(_LEFT_LOCKS)]

    def _pg_ctl(self, action: str, mode: str) -> None:
        data, user = self._embedded.path / "data", ServerUser.find()
        program = Binaries.of_extra().reachable_by(user).program("pg_ctl")
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
    """A server for one run; nothing is left of it at the end, however that comes."""
    folder = fastest_folder() / f"graphile-worker-{secrets.token_hex(8)}"
    with EmbeddedPostgres(folder, parameters=_PARAMETERS, remove=True) as embedded:
        yield Server(embedded)
