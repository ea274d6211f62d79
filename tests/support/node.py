"""Node's Graphile Worker, run as it comes from npm."""

from __future__ import annotations

import asyncio
import os
import shutil
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest

from support.postgres import PEERS


class Finished(NamedTuple):
    """How a command ended."""

    status: int
    output: str


def command(version: str) -> str:
    """The path of the command of that version; skips the test where it is missing."""
    if shutil.which("node") is None:
        pytest.skip("there is no Node here")
    path = PEERS / f"graphile-worker-{version}" / "node_modules" / ".bin" / "graphile-worker"
    if not path.exists():
        pytest.skip(f"npm did not bring graphile-worker@{version}")
    return str(path)


def environment(dsn: str) -> dict[str, str]:
    """PG* variables: Node's driver does not read every connection string that libpq reads."""
    parts = urlsplit(dsn)
    query = {key: values[0] for key, values in parse_qs(parts.query).items()}
    return {
        "PATH": os.environ["PATH"],
        "PGHOST": query.get("host") or parts.hostname or "localhost",
        "PGPORT": query.get("port") or str(parts.port or 5432),
        "PGUSER": parts.username or "postgres",
        "PGPASSWORD": parts.password or "",
        "PGDATABASE": parts.path.removeprefix("/"),
    }


async def run(version: str, dsn: str, *arguments: str, cwd: str = "/") -> Finished:
    """Run the command to its end."""
    process = await asyncio.create_subprocess_exec(
        command(version),
        *arguments,
        cwd=cwd,
        env=environment(dsn),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return Finished(process.returncode, output.decode())


async def install(version: str, dsn: str, *, schema: str = "graphile_worker") -> None:
    """Let Node install the schema."""
    finished = await run(version, dsn, "--schema-only", "--schema", schema)
    assert finished.status == 0, finished.output
