"""Node's Graphile Worker, run as it comes from npm."""

from __future__ import annotations

import asyncio
import os
import shutil
from typing import NamedTuple

import pytest
from benchmarks.server import connection_variables

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
    """What Node's command runs with, and nothing else."""
    return {"PATH": os.environ["PATH"], **connection_variables(dsn)}


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
