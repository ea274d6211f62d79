"""Programs in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

DEADLINE = 30.0


class Program:
    """A program that runs, and what it printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    async def until(self, text: str, count: int = 1) -> None:
        """Until so many lines contain that."""
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(DEADLINE):
                while sum(text in line for line in self.lines) < count:
                    read = await self.process.stdout.readline()
                    assert read, f"ended before {text!r}: {self.text}"
                    self.lines.append(read.decode().rstrip("\n"))
        except TimeoutError:
            pytest.fail(f"no {text!r} in time: {self.text}")

    async def end(self) -> int:
        """Its exit status; negative if it died of a signal."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE):
            rest = await self.process.stdout.read()
            self.lines += rest.decode().split("\n")
            return await self.process.wait()

    def send(self, number: int) -> None:
        self.process.send_signal(number)


def lives(pid: int) -> bool:
    """Whether that process runs. It may end while we ask."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextlib.asynccontextmanager
async def program(
    *command: str | Path,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    with_errors: bool = False,
) -> AsyncIterator[Program]:
    """Run it; what is left of it at the end is killed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT if with_errors else asyncio.subprocess.PIPE,
        cwd=folder,
        env=environment,
        start_new_session=True,
    )
    try:
        yield Program(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()
