"""The command with several worker processes."""

from __future__ import annotations

import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from support.programs import Program, program

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

COMMAND = str(Path(sys.executable).with_name("graphile-worker"))


@asynccontextmanager
async def command(folder: Path, dsn: str, *arguments: str, **more: str) -> AsyncIterator[Program]:
    """Run the command, with `more` variables in its environment."""
    environment = {"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1", "DATABASE_URL": dsn, **more}
    async with program(
        COMMAND, *arguments, folder=folder, environment=environment, with_errors=True
    ) as running:
        try:
            yield running
        finally:
            for child in children(running):
                child.kill()


def children(running: Program) -> list[psutil.Process]:
    try:
        return psutil.Process(running.process.pid).children()
    except psutil.NoSuchProcess:
        return []
