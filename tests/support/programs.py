"""Subprocesses started by tests."""

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
    """A running program and the lines that it has printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    async def until(self, text: str, count: int = 1) -> None:
        """Read lines until `count` of them contain the text."""
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
        """Wait for the end and return the exit status, negative if a signal ended the program."""
        async with asyncio.timeout(DEADLINE):
            return await self.end_at_any_time()

    async def end_at_any_time(self) -> int:
        """Do what `end` does, however long it takes."""
        assert self.process.stdout is not None
        rest = await self.process.stdout.read()
        self.lines += rest.decode().split("\n")
        return await self.process.wait()

    def send(self, number: int) -> None:
        self.process.send_signal(number)


def is_alive(pid: int) -> bool:
    """Return whether that process runs. It may end during the call."""
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
    """Run a program, and kill its process group at the end."""
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
