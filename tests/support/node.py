"""Node's Graphile Worker, run as it comes from npm."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from typing import Any, NamedTuple, NoReturn

import pytest
from benchmarks.server import connection_variables

from support.postgres import PEERS


class Finished(NamedTuple):
    """How a command ended."""

    status: int
    output: str


def missing(what: str) -> NoReturn:
    """Skip the test; or fail it, where somebody has seen to it that nothing is missing."""
    if os.environ.get("PEERS_REQUIRED"):
        pytest.fail(f"{what}, and PEERS_REQUIRED is set")
    pytest.skip(what)


def command(version: str) -> str:
    """The path of the command of that version; skips the test where it is missing."""
    if shutil.which("node") is None:
        missing("there is no Node here")
    path = PEERS / f"graphile-worker-{version}" / "node_modules" / ".bin" / "graphile-worker"
    if not path.exists():
        missing(f"npm did not bring graphile-worker@{version}")
    return str(path)


def release() -> str | None:
    """Node's own version, if there is one."""
    if shutil.which("node") is None:
        return None
    return subprocess.run(["node", "--version"], check=True, capture_output=True, text=True).stdout.strip()


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


def script(version: str, text: str, given: Any) -> Any:
    """What a script of ours prints, as JSON, that can require npm's package; `given` is its input."""
    command(version)
    done = subprocess.run(
        ["node", "-e", text],
        cwd=PEERS / f"graphile-worker-{version}",
        input=json.dumps(given),
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)


async def install(version: str, dsn: str, *, schema: str = "graphile_worker") -> None:
    """Let Node install the schema."""
    finished = await run(version, dsn, "--schema-only", "--schema", schema)
    assert finished.status == 0, finished.output
