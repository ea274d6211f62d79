"""TLS is really on when asked for, and a PgBouncer in transaction mode is no obstacle."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import asyncpg
import pytest

from graphile_worker import DatabaseError, JobSpec, WorkerUtils, run_migrations
from graphile_worker._db.connect import Pool, connect
from graphile_worker._runtime import notifier
from graphile_worker.embedded import EmbeddedPostgres
from graphile_worker.embedded.binaries import ServerUser
from support.workers import Heard, running

if TYPE_CHECKING:
    from collections.abc import Iterator


class Secure(NamedTuple):
    """A server that speaks TLS, and the certificate that it shows."""

    dsn: str
    certificate: Path


def debian_postgres() -> Path:
    """The wheel's PostgreSQL is built without TLS; Debian's has it."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not found:
        pytest.skip("there is no PostgreSQL of Debian's here")
    return found[-1].parent.parent


@pytest.fixture(scope="module")
def secure() -> Iterator[Secure]:
    binaries = debian_postgres()
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here to make a certificate")
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
        yield Secure(server.dsn(tcp=True).replace("127.0.0.1", "localhost"), certificate)
        server.close()
    shutil.rmtree(folder)


async def uses_tls(dsn: str) -> bool:
    async with connect(dsn) as connection:
        return bool(await connection.fetchval("select ssl from pg_stat_ssl where pid = pg_backend_pid()"))


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
async def test_tls_is_on_when_asked_for(secure: Secure, parameters: str, on: bool) -> None:
    assert await uses_tls(f"{secure.dsn}?{parameters.format(certificate=secure.certificate)}") is on


@pytest.mark.parametrize("parameters", ["ssl=true", "ssl=1"])
async def test_a_certificate_that_nobody_vouches_for_is_refused(secure: Secure, parameters: str) -> None:
    with pytest.raises(DatabaseError, match="certificate verify failed"):
        await uses_tls(f"{secure.dsn}?{parameters}")


async def test_a_server_without_tls_is_refused_when_tls_is_asked_for(short_folder: Path) -> None:
    with EmbeddedPostgres(short_folder, port=0) as server, pytest.raises(DatabaseError, match="SSL"):
        await uses_tls(f"{server.dsn(tcp=True)}?sslmode=require")


@contextmanager
def pgbouncer(server_dsn: str, folder: Path) -> Iterator[str]:
    """A PgBouncer in transaction mode with two connections to the server."""
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if program is None:
        pytest.skip("there is no PgBouncer here")
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
        entry = pwd.getpwnam("nobody")
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


async def test_pgbouncer_in_transaction_mode(short_folder: Path) -> None:
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


@pytest.mark.parametrize("whose", ["ours", "callers"])
async def test_pgbouncers_sessions_keep_no_setting_of_ours(short_folder: Path, whose: str) -> None:
    """Whether or not it was told of the PgBouncer, which refuses parameters that it doesn't know."""
    with (
        EmbeddedPostgres(short_folder, port=0) as server,
        pgbouncer(server.dsn(tcp=True), short_folder.parent) as dsn,
    ):
        await run_migrations(dsn=dsn)
        async with AsyncExitStack() as stack:
            if whose == "ours":
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


async def test_a_worker_behind_pgbouncer(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []

    async def task(n: int) -> None:
        ran.append(n)

    with (
        EmbeddedPostgres(short_folder, port=0) as server,
        pgbouncer(server.dsn(tcp=True), short_folder.parent) as dsn,
    ):
        heard = Heard()
        async with running(
            {"t": task}, dsn, heard=heard, prepared_statements=False, listen_dsn=server.dsn(),
            poll_interval=3600, concurrency=4, prefetch=5,
        ) as runner:  # fmt: skip
            for n in range(5):
                await runner.add_job("t", n)
                await heard.until("job:complete", n + 1)
            await runner.utils.add_jobs(JobSpec("t", n, queue_name=f"q{n % 3}") for n in range(5, 200))
            await heard.until("job:complete", 200)
        assert sorted(ran) == list(range(200))

        # Without a way around it nothing is heard; the worker notices, and polls.
        monkeypatch.setattr(notifier, "_PROBE_TIMEOUT", 0.5)
        heard = Heard()
        async with running(
            {"t": task}, dsn, heard=heard, prepared_statements=False, poll_interval=0.1
        ) as runner:
            await heard.until("pool:listen:error")
            await runner.add_job("t", 200)
            await heard.until("job:complete")
        assert any("pass listen_dsn" in record.message for record in caplog.records)
        async with WorkerUtils(server.dsn()) as utils:
            assert (await utils.stats()).total == 0
