"""Run Graphile Worker for Node, as published on npm."""

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
    """The result of a command."""

    status: int
    output: str


def missing(what: str) -> NoReturn:
    """Skip the test, or fail it if PEERS_REQUIRED is set."""
    if os.environ.get("PEERS_REQUIRED"):
        pytest.fail(f"{what}, and PEERS_REQUIRED is set")
    pytest.skip(what)


def command(version: str) -> str:
    """Return the path of that version's command, or skip the test if it is missing."""
    if shutil.which("node") is None:
        missing("Node is not installed")
    path = PEERS / f"graphile-worker-{version}" / "node_modules" / ".bin" / "graphile-worker"
    if not path.exists():
        missing(f"npm's graphile-worker@{version} is not installed; run: make peers")
    return str(path)


def release() -> str | None:
    """Return Node's own version, or None if it is not installed."""
    if shutil.which("node") is None:
        return None
    return subprocess.run(["node", "--version"], check=True, capture_output=True, text=True).stdout.strip()


def environment(dsn: str) -> dict[str, str]:
    """Return the environment variables of Node's command."""
    return {"PATH": os.environ["PATH"], **connection_variables(dsn)}


async def run(version: str, dsn: str, *arguments: str, cwd: str = "/") -> Finished:
    """Run the command to its end, and return its status and output."""
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


def script(version: str, text: str, argument: Any) -> Any:
    """Run a script that can require the npm package; its input and its output are JSON."""
    command(version)
    done = subprocess.run(
        ["node", "-e", text],
        cwd=PEERS / f"graphile-worker-{version}",
        input=json.dumps(argument),
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)


async def install(version: str, dsn: str, *, schema: str = "graphile_worker") -> None:
    """Install the schema with Node's command."""
    finished = await run(version, dsn, "--schema-only", "--schema", schema)
    assert finished.status == 0, finished.output
