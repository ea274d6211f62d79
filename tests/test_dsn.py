"""Every form of connection string that Graphile Worker accepts connects to the right database."""

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
from graphile_worker._db.connection.connect import connect
from graphile_worker._db.connection.dsn import find_dsn, parse_dsn
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


async def connect_and_describe(dsn: str | None) -> tuple[str, bool]:
    """Return the name of the connected database, and whether the connection uses TCP."""
    async with connect(dsn) as connection:
        row = await connection.fetch("select current_database(), inet_server_addr() is not null")
        database, tcp = row[0]
        return database, tcp


async def test_all_forms_of_a_connection_string_connect(
    server: EmbeddedPostgres, clean_environment: pytest.MonkeyPatch
) -> None:
    tcp = urlsplit(server.dsn(tcp=True))
    folder = server.path / "run"
    credentials = f"{tcp.username}:{tcp.password}"
    address = f"{tcp.hostname}:{tcp.port}"
    # The driver reads from the environment what a connection string leaves out.
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
        assert await connect_and_describe(dsn) == ("postgres", False), dsn
    for dsn in by_tcp:
        assert await connect_and_describe(dsn) == ("postgres", True), dsn


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("graphile-worker.toml", 'connection = "postgresql://u:secret@h/x"'),
        ("pyproject.toml", '[tool.graphile-worker]\nconnection = "postgresql://u:secret@h/x"'),
    ],
)
def test_error_without_a_database_names_a_settings_file_with_a_connection(
    file: str, text: str, tmp_path: Path, clean_environment: pytest.MonkeyPatch
) -> None:
    clean_environment.chdir(tmp_path)
    for other in ("", "jobs = 10", "[tool]", "tool = 1", "not toml"):
        (tmp_path / file).write_text(other)
        with pytest.raises(ConfigurationError, match=r"DATABASE_URL or PGDATABASE\.$"):
            find_dsn(None)
    (tmp_path / file).write_text(text)
    with pytest.raises(
        ConfigurationError, match=rf"connection in {file} .* In Python, pass it to App"
    ) as error:
        find_dsn(None)
    assert "secret" not in str(error.value)


def test_error_for_a_sqlalchemy_url_says_what_to_remove() -> None:
    with pytest.raises(ConfigurationError, match=r"Use postgresql://\. The \+asyncpg part .*: remove it\."):
        parse_dsn("postgresql+asyncpg://u:secret@h/x")
    with pytest.raises(ConfigurationError, match=r"Use postgresql://\.$"):
        parse_dsn("mysql+pymysql://u:secret@h/x")


async def test_environment_variables_are_used_in_order(
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
    assert await connect_and_describe(None) == ("template1", False)
    clean_environment.setenv("DATABASE_URL", server.dsn(tcp=True))
    assert await connect_and_describe(None) == ("postgres", True)
    assert await connect_and_describe(server.dsn()) == ("postgres", False)


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
async def test_unreadable_connection_string_is_rejected_without_quoting_it(dsn: str) -> None:
    with pytest.raises(ConfigurationError, match=r"(?i)connection string.*percent-encode") as caught:
        await quick_add_job("t", dsn=dsn)
    assert "cret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("dsn", "message"),
    [
        ("mysql://u:secret@h/db", "mysql://"),
        ("postgresql+asyncpg://u:secret@h/db", r"postgresql\+asyncpg://"),
        ("host=h password=secret", "key=value"),
        ("postgresql://u:secret@h/db?sslmode=sideways", "sslmode"),
        (5, r"\bstr, not (a )?int\b"),
        ("", "is empty"),
        (" ", "is empty"),
        ("embedded", "with a colon"),
        ("embeded:", "mean embedded:"),
        ("Embedded:folder/x", "mean embedded:"),
        ("embedded://localhost/x", "takes a folder"),
    ],
)
async def test_invalid_connection_string_is_rejected_with_the_reason(dsn: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        await quick_add_job("t", dsn=dsn)
    assert "secret" not in str(caught.value)


async def test_libpq_parameters_are_accepted(server: EmbeddedPostgres) -> None:
    dsn = server.dsn(tcp=True) + "?sslmode=disable&channel_binding=prefer&keepalives=1&connect_timeout=5"
    assert await connect_and_describe(dsn) == ("postgres", True)
    assert parse_dsn(dsn).arguments["timeout"] == 5


async def test_unknown_parameter_is_rejected_by_name(server: EmbeddedPostgres) -> None:
    with pytest.raises(ConfigurationError, match=r'"pgbouncer"\. Remove it'):
        await connect_and_describe(server.dsn() + "&pgbouncer=true")


async def test_server_settings_in_the_connection_string_are_applied(server: EmbeddedPostgres) -> None:
    async with connect(server.dsn() + "&work_mem=7MB") as connection:
        assert await connection.fetchval("show work_mem") == "7MB"


async def test_unescaped_at_sign_in_the_password_is_accepted(server: EmbeddedPostgres) -> None:
    async with connect(server.dsn()) as connection:
        await connection.execute("drop role if exists at_sign; create role at_sign login password 'p@s:s'")
    parts = urlsplit(server.dsn(tcp=True))
    dsn = f"postgresql://at_sign:p@s:s@{parts.hostname}:{parts.port}/postgres"
    assert await connect_and_describe(dsn) == ("postgres", True)


async def test_unknown_ssl_value_is_rejected() -> None:
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
def test_each_form_is_translated_for_the_driver(dsn: str, url: str) -> None:
    assert parse_dsn(dsn).arguments == {"dsn": url, "timeout": 15}


@pytest.mark.parametrize("value", ["true", "1"])
def test_ssl_true_checks_the_certificate_as_node_does(value: str) -> None:
    context = parse_dsn(f"postgres://h/db?ssl={value}").arguments["ssl"]
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


def test_repr_of_a_parsed_dsn_hides_the_password() -> None:
    assert "secret" not in repr(parse_dsn("postgres://u:secret@h/db"))


async def test_wrong_password_is_reported(server: EmbeddedPostgres) -> None:
    parts = urlsplit(server.dsn(tcp=True))
    dsn = f"postgresql://postgres:wrong@{parts.hostname}:{parts.port}/postgres"
    with pytest.raises(DatabaseError, match=r"(?i)password authentication failed") as caught:
        await quick_add_job("t", dsn=dsn)
    assert "No password is given" not in str(caught.value)


async def test_missing_password_is_reported(
    server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PGPASSWORD", raising=False)
    parts = urlsplit(server.dsn(tcp=True))
    with pytest.raises(DatabaseError, match="No password is given"):
        await quick_add_job("t", dsn=f"postgresql://postgres@{parts.hostname}:{parts.port}/postgres")


async def test_missing_socket_is_reported_as_unreachable(short_folder: Path) -> None:
    with pytest.raises(DatabaseError, match="Cannot reach the database"):
        await quick_add_job("t", dsn=f"socket:{short_folder}?db=x")


async def test_embedded_server_runs_until_the_utils_are_closed(short_folder: Path) -> None:
    async with WorkerUtils(dsn=f"embedded:{short_folder}") as utils:
        await utils.migrate()
        assert (await utils.add_job("t")).id == 1
        await utils.add_job("t")
    async with connect(f"embedded:{short_folder}") as connection:
        assert isinstance(connection, asyncpg.Connection)
        assert await connection.fetchval("select count(*) from graphile_worker.jobs") == 2
