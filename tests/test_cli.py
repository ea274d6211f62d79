"""The installed command: schema, environment, errors."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest

import graphile_worker
from graphile_worker._db.schema.databases import dsn_of

COMMAND = [str(Path(sys.executable).with_name("graphile-worker"))]
MODULE = [sys.executable, "-m", "graphile_worker"]


def run(
    *arguments: str, environment: dict[str, str] | None = None, command: list[str] = COMMAND
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *arguments],
        check=False,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", **(environment or {})},
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("command", [COMMAND, MODULE])
async def test_schema_only_installs_the_schema(empty_database: str, command: list[str]) -> None:
    done = run("--schema-only", "-c", empty_database, "-s", "mine", command=command)

    assert (done.returncode, done.stdout, done.stderr) == (0, "Schema mine is up to date\n", "")
    connection = await asyncpg.connect(empty_database)
    assert await connection.fetchval("select max(id) from mine.migrations") == 20
    await connection.close()


def test_environment_sets_database_and_schema(empty_database: str) -> None:
    done = run(
        "--schema-only",
        environment={"DATABASE_URL": empty_database, "GRAPHILE_WORKER_SCHEMA": "from_env"},
    )
    assert (done.returncode, done.stdout) == (0, "Schema from_env is up to date\n")


def test_embedded_connection_starts_a_server(short_folder: Path) -> None:
    done = run("--schema-only", "-c", f"embedded:{short_folder}")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schema-only"], "No database was specified."),
        (
            ["--schema-only", "-c", "postgresql://localhost:1/x"],
            "Cannot reach the database (localhost:1, database x)",
        ),
        (
            ["--schema-only", "-c", "postgresql://u:se#cret@h/x"],
            "Invalid connection string.",
        ),
        (["--schema-only", "-c", "mysql://u:secret@h/x"], "unknown scheme mysql://"),
        (["--schema-only", "-c", ""], "The connection string is empty."),
        (["--schema-only", "-c", "postgresql://h/x", "-s", ""], "Invalid schema name ''"),
        (["--schema-only", "-c", "postgresql://h/x", "-s", "x" * 64], "PostgreSQL allows 63"),
    ],
)
def test_error_is_one_line_without_traceback_or_password(arguments: list[str], message: str) -> None:
    done = run(*arguments)

    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert "cret" not in done.stderr


def test_missing_database_is_reported(graphile_worker_server: str) -> None:
    done = run("--schema-only", "-c", dsn_of(graphile_worker_server, "nowhere"))
    assert (done.returncode, done.stderr) == (
        1,
        'Error: Database "nowhere" does not exist. Create it, or use another database.\n',
    )


def test_interrupt_during_start_ends_without_traceback() -> None:
    program = (
        "import os, signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'click': os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from graphile_worker.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_unknown_option_suggests_the_nearest_name() -> None:
    done = run("--shema-only")
    assert done.returncode == 2
    assert "--schema-only" in done.stderr


def test_version_flag_prints_the_version() -> None:
    assert run("--version").stdout == f"{graphile_worker.__version__}\n"
