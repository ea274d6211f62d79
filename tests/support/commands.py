"""Run the command as users do: from a script, or on a terminal."""

from __future__ import annotations

import asyncio
import atexit
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
from functools import cache
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from support.prefork import Prefork

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMAND = str(Path(sys.executable).with_name("graphile-worker"))
DEADLINE = 30.0


@cache
def _prefork() -> Prefork:
    prefork = Prefork({"PATH": os.environ["PATH"], "TZ": "UTC"})
    atexit.register(prefork.close)
    return prefork


class Cli:
    """Runs the command on one database."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self.environment = {"PATH": os.environ["PATH"], "DATABASE_URL": dsn, "TZ": "UTC", "TERM": "xterm"}
        self.folder = folder

    async def __call__(self, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
        """Run the command to its end, as from a script."""
        if Prefork.accepts(arguments, self.environment):
            return await asyncio.to_thread(
                _prefork().run,
                arguments, given=given, folder=self.folder, environment=self.environment, timeout=DEADLINE,
            )  # fmt: skip
        return await asyncio.to_thread(
            subprocess.run,
            [COMMAND, *arguments],
            check=False, capture_output=True, text=True, input=given, cwd=self.folder, env=self.environment,
            timeout=DEADLINE,
        )  # fmt: skip

    async def out(self, *arguments: str, given: str = "") -> str:
        """Return the output of a command that must succeed."""
        done = await self(*arguments, given=given)
        assert done.returncode == 0, done.stderr
        return done.stdout

    async def json(self, *arguments: str, given: str = "") -> Any:
        """Return the JSON output of a command that must succeed."""
        return json.loads(await self.out(*arguments, "--json", given=given))

    @contextmanager
    def terminal(self, *arguments: str, columns: int = 200, lines: int = 40) -> Iterator[Terminal]:
        """Run the command on a terminal of that size."""
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
    """A program on a terminal, and its output."""

    def __init__(self, process: subprocess.Popen[bytes], controller: int) -> None:
        self.process = process
        self._controller = controller
        self.raw = ""

    @property
    def text(self) -> str:
        """The output without colours and other control sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw).replace("\r\n", "\n")

    def _read(self) -> bool:
        assert select.select([self._controller], [], [], DEADLINE)[0], f"no more output: {self.text}"
        try:
            read = os.read(self._controller, 65536)
        except OSError:  # a terminal reports the end of its program this way
            return False
        self.raw += read.decode(errors="replace")
        return bool(read)

    async def until(self, text: str) -> None:
        """Wait until the program shows the text; fail after a deadline, even if it shows other text."""
        deadline = monotonic() + DEADLINE

        def read() -> None:
            while text not in self.text:
                assert self._read(), f"ended without {text!r}: {self.text}"
                assert monotonic() < deadline, f"{text!r} did not appear: {self.text[-5000:]}"

        await asyncio.to_thread(read)

    def type(self, keys: str) -> None:
        """Send keys, as a user at the keyboard does."""
        os.write(self._controller, keys.encode())

    def interrupt(self) -> None:
        """Send the signal of Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    async def end(self) -> int:
        """Read the rest of the output, and return the exit status."""

        def read() -> int:
            while self._read():
                pass
            return self.process.wait(DEADLINE)

        return await asyncio.to_thread(read)


INTERRUPTED = -signal.SIGINT
