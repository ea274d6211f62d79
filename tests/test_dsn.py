"""Every form of connection string that Graphile Worker's users write leads to the right place."""

from __future__ import annotations

import shutil
import ssl
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import asyncpg
import pytest

from graphile_worker import ConfigurationError, DatabaseError, WorkerUtils, quick_add_job
from graphile_worker._db.connect import connect
from graphile_worker._db.dsn import find_dsn, parse_dsn
from graphile_worker.embedded import EmbeddedPostgres

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    folder = Path(tempfile.mkdtemp(prefix="gw-"))
    folder.chmod(0o755)
    embedded = EmbeddedPostgres(folder / "pg", port=0)
    with embedded:
        yield embedded
        embedded.close()
    shutil.rmtree(folder)


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("DATABASE_URL", "PGHOST", "PGPORT", "PGUSER", "PGPASSWORD", "PGDATABASE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


async def where(dsn: str | None) -> tuple[str, bool]:
    """The database that the string leads to, and whether by TCP."""
    async with connect(dsn) as connection:
        row = await connection.fetch("select current_database(), inet_server_addr() is not null")
        database, tcp = row[0]
        return database, tcp


async def test_the_forms_of_one_connection(
    server: EmbeddedPostgres, clean_environment: pytest.MonkeyPatch
) -> None:
    tcp = urlsplit(server.dsn(tcp=True))
    folder = server.path / "run"
    credentials = f"{tcp.username}:{tcp.password}"
    address = f"{tcp.hostname}:{tcp.port}"
    # The driver finds by these what a string leaves out.
    clean_environment.setenv("PGHOST", str(folder))
    clean_environment.setenv("PGPORT", str(tcp.port))
    clean_environment.setenv("PGUSER", "postgres")
    by_socket = {
        "postgres",
        "postgres:///postgres",
        f"postgres:///postgres?host={folder}",
        f"postgresql://postgres@/postgres?host={folder}&port={tcp.port}",
        f"socket:{folder}?db=postgres",
        f"socket://{credentials}@{folder}?db=postgres",
        f"embedded:{server.path}",
    }
    by_tcp = {
        f"{scheme}://{credentials}@{address}/postgres{parameters}"
        for scheme in ("postgres", "postgresql", "pg")
        for parameters in ("", "?sslmode=disable", "?sslmode=prefer", "?ssl=0", "?ssl=false")
    }
    for dsn in by_socket:
        assert await where(dsn) == ("postgres", False), dsn
    for dsn in by_tcp:
        assert await where(dsn) == ("postgres", True), dsn


async def test_the_environment_is_asked_in_this_order(
    server: EmbeddedPostgres, clean_environment: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match=r"DATABASE_URL or PGDATABASE"):
        find_dsn(None)
    clean_environment.setenv("PGHOST", str(server.path / "run"))
    clean_environment.setenv("PGUSER", "postgres")
    clean_environment.setenv("PGPORT", str(urlsplit(server.dsn(tcp=True)).port))
    with pytest.raises(ConfigurationError):
        find_dsn(None)
    clean_environment.setenv("PGDATABASE", "template1")
    assert await where(None) == ("template1", False)
    clean_environment.setenv("DATABASE_URL", server.dsn(tcp=True))
    assert await where(None) == ("postgres", True)
    assert await where(server.dsn()) == ("postgres", False)


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://u:se#cret@h/db",
        "postgresql://u:12/secret@h/db",
        "postgresql://u:12?secret@h/db",
        "postgresql://u:secret@h:99999/db",
        "postgresql://u:secret@h:port/db",
        "postgresql://u:sec[ret@h/db",
        "u:secret@h/db",
    ],
)
async def test_what_is_no_connection_string_is_refused_without_being_quoted(dsn: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read") as caught:
        await quick_add_job("t", dsn=dsn)
    assert "cret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("dsn", "says"),
    [
        ("mysql://u:secret@h/db", "mysql:// is not"),
        ("postgresql+asyncpg://u:secret@h/db", r"postgresql\+asyncpg:// is not"),
        ("host=h password=secret", "key=value"),
        ("postgresql://u:secret@h/db?sslmode=sideways", "sslmode"),
        (5, "is a str, not a int"),
        ("", "is empty"),
        (" ", "is empty"),
        ("embedded", "with a colon"),
        ("embeded:", "mean embedded:"),
        ("Embedded:folder/x", "mean embedded:"),
        ("embedded://localhost/x", "takes a folder"),
    ],
)
async def test_what_is_wrong_with_it_is_named_where_that_is_safe(dsn: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as caught:
        await quick_add_job("t", dsn=dsn)
    assert "secret" not in str(caught.value)


async def test_parameters_that_only_libpq_knows_do_no_harm(server: EmbeddedPostgres) -> None:
    dsn = server.dsn(tcp=True) + "?sslmode=disable&channel_binding=prefer&keepalives=1&connect_timeout=5"
    assert await where(dsn) == ("postgres", True)
    assert parse_dsn(dsn).arguments["timeout"] == 5


async def test_parameters_that_nobody_knows_are_named(server: EmbeddedPostgres) -> None:
    with pytest.raises(ConfigurationError, match=r'"pgbouncer"\. Remove it'):
        await where(server.dsn() + "&pgbouncer=true")


async def test_settings_of_the_server_may_be_given(server: EmbeddedPostgres) -> None:
    async with connect(server.dsn() + "&work_mem=7MB") as connection:
        assert await connection.fetchval("show work_mem") == "7MB"


async def test_an_unescaped_at_sign_in_the_password_is_understood(server: EmbeddedPostgres) -> None:
    async with connect(server.dsn()) as connection:
        await connection.execute("drop role if exists at_sign; create role at_sign login password 'p@s:s'")
    parts = urlsplit(server.dsn(tcp=True))
    dsn = f"postgresql://at_sign:p@s:s@{parts.hostname}:{parts.port}/postgres"
    assert await where(dsn) == ("postgres", True)


async def test_a_strange_wish_for_ssl_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="ssl=maybe"):
        await quick_add_job("t", dsn="postgresql://h/db?ssl=maybe")


@pytest.mark.parametrize(
    ("dsn", "url"),
    [
        ("pg://u:p@h:1/db", "postgresql://u:p@h:1/db"),
        ("my_db", "postgresql:///my_db"),
        ("postgres:///my_db", "postgresql:///my_db"),
        ("postgres://h/db?ssl=no-verify", "postgresql://h/db?sslmode=require"),
        ("postgres://h/db?ssl=0", "postgresql://h/db?sslmode=disable"),
        (
            "postgres://h/db?sslmode=verify-full&sslrootcert=/ca",
            "postgresql://h/db?sslmode=verify-full&sslrootcert=/ca",
        ),
        ("postgres://u:p%40ss@h/db", "postgresql://u:p%40ss@h/db"),
        ("postgres://h1:1,h2:2/db", "postgresql://h1:1,h2:2/db"),
        ("socket:/tmp/x?db=y", "postgresql:///y?host=/tmp/x"),
        ("socket://u:p@/tmp/x?db=y", "postgresql://u:p@/y?host=/tmp/x"),
    ],
)
def test_each_form_is_told_to_the_driver_in_its_own_terms(dsn: str, url: str) -> None:
    assert parse_dsn(dsn).arguments == {"dsn": url, "timeout": 15}


@pytest.mark.parametrize("wish", ["true", "1"])
def test_ssl_true_checks_the_certificate_as_node_does(wish: str) -> None:
    context = parse_dsn(f"postgres://h/db?ssl={wish}").arguments["ssl"]
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


def test_a_target_shows_no_password() -> None:
    assert "secret" not in repr(parse_dsn("postgres://u:secret@h/db"))


async def test_a_wrong_password_is_named_as_such(server: EmbeddedPostgres) -> None:
    parts = urlsplit(server.dsn(tcp=True))
    dsn = f"postgresql://postgres:wrong@{parts.hostname}:{parts.port}/postgres"
    with pytest.raises(DatabaseError, match="refuses the user: Password authentication failed") as caught:
        await quick_add_job("t", dsn=dsn)
    assert "No password is given" not in str(caught.value)


async def test_a_password_that_is_not_there_is_named_as_such(
    server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PGPASSWORD", raising=False)
    parts = urlsplit(server.dsn(tcp=True))
    with pytest.raises(DatabaseError, match="No password is given"):
        await quick_add_job("t", dsn=f"postgresql://postgres@{parts.hostname}:{parts.port}/postgres")


async def test_a_missing_socket_is_named(short_folder: Path) -> None:
    with pytest.raises(DatabaseError, match="Cannot reach the database"):
        await quick_add_job("t", dsn=f"socket:{short_folder}?db=x")


async def test_an_embedded_server_lasts_as_long_as_the_utils(short_folder: Path) -> None:
    async with WorkerUtils(dsn=f"embedded:{short_folder}") as utils:
        await utils.migrate()
        assert (await utils.add_job("t")).id == 1
        await utils.add_job("t")
    async with connect(f"embedded:{short_folder}") as connection:
        assert isinstance(connection, asyncpg.Connection)
        assert await connection.fetchval("select count(*) from graphile_worker.jobs") == 2
