"""The command, run as people run it: from a script, or on a terminal."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMAND = str(Path(sys.executable).with_name("graphile-worker"))
DEADLINE = 30.0


class Cli:
    """Runs the command on one database."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self.environment = {"PATH": os.environ["PATH"], "DATABASE_URL": dsn, "TZ": "UTC", "TERM": "xterm"}
        self.folder = folder

    async def __call__(self, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
        """From a script, to its end."""
        return await asyncio.to_thread(
            subprocess.run,
            [COMMAND, *arguments],
            check=False, capture_output=True, text=True, input=given, cwd=self.folder, env=self.environment,
            timeout=DEADLINE,
        )  # fmt: skip

    async def out(self, *arguments: str, given: str = "") -> str:
        """What it prints, if all is well."""
        done = await self(*arguments, given=given)
        assert done.returncode == 0, done.stderr
        return done.stdout

    async def json(self, *arguments: str, given: str = "") -> Any:
        """The same, read as JSON."""
        return json.loads(await self.out(*arguments, "--json", given=given))

    @contextmanager
    def terminal(self, *arguments: str, columns: int = 200, lines: int = 40) -> Iterator[Terminal]:
        """On a terminal of that size."""
        controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        process = subprocess.Popen(
            [COMMAND, *arguments],
            stdin=terminal, stdout=terminal, stderr=terminal, cwd=self.folder, env=self.environment,
            start_new_session=True,
        )  # fmt: skip
        os.close(terminal)
        try:
            yield Terminal(process, controller)
        finally:
            process.kill()
            process.wait()
            os.close(controller)


class Terminal:
    """A program on a terminal, and what it showed."""

    def __init__(self, process: subprocess.Popen[bytes], controller: int) -> None:
        self.process = process
        self._controller = controller
        self.raw = ""

    @property
    def text(self) -> str:
        """Without colours and other commands to the terminal."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw).replace("\r\n", "\n")

    def _read(self) -> bool:
        assert select.select([self._controller], [], [], DEADLINE)[0], f"nothing more came: {self.text}"
        try:
            read = os.read(self._controller, 65536)
        except OSError:  # so a terminal says that nobody is there any more
            return False
        self.raw += read.decode(errors="replace")
        return bool(read)

    async def until(self, text: str) -> None:
        """Until it shows that; a program that goes on showing other things is not waited for any longer."""
        deadline = monotonic() + DEADLINE

        def read() -> None:
            while text not in self.text:
                assert self._read(), f"ended without {text!r}: {self.text}"
                assert monotonic() < deadline, f"{text!r} did not come: {self.text[-5000:]}"

        await asyncio.to_thread(read)

    def type(self, keys: str) -> None:
        """As somebody at the keyboard does."""
        os.write(self._controller, keys.encode())

    def interrupt(self) -> None:
        """What Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)

    async def end(self) -> int:
        """Its exit status, after all that it shows."""

        def read() -> int:
            while self._read():
                pass
            return self.process.wait(DEADLINE)

        return await asyncio.to_thread(read)


INTERRUPTED = -signal.SIGINT
