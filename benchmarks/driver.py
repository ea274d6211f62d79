"""The benchmark's side of a driver process. drivers/protocol.py describes the protocol."""

from __future__ import annotations

import asyncio
import json
import tempfile
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import psutil

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import Mapping, Sequence

_LONGEST_LINE = 64 * 1024**2
_LIMIT = 60.0
_CLOSE_TIMEOUT = 10.0


class RequestRejectedError(Exception):
    """The driver answered with an error. It is ready for the next request."""


class DriverBrokenError(Exception):
    """The driver exited, or did not answer in time. It takes no more requests."""


class Answer(NamedTuple):
    """The value that a driver returned, and the seconds that it took by its own clock."""

    value: Any
    seconds: float


class DriverProcess:
    """A running driver."""

    def __init__(self, name: str, process: Process, stderr: IO[bytes]) -> None:
        self.name = name
        self._process = process
        self._stderr = stderr
        self._last_error = "no error output"
        self._requesting = asyncio.Lock()

    @classmethod
    async def start(cls, name: str, command: Sequence[str], environment: Mapping[str, str]) -> DriverProcess:
        """Start the process. Only the first request shows whether the driver works."""
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process runs
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=environment,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                limit=_LONGEST_LINE,
                start_new_session=True,  # Ctrl-C is for the benchmark; the driver exits when its input ends
            )
        except OSError as error:
            stderr.close()
            raise DriverBrokenError(f"{name} does not start: {error}") from error
        return cls(name, process, stderr)

    async def request(self, command: str, *, limit: float = _LIMIT, **arguments: Any) -> Answer:
        """Send a command and wait for the answer, up to a limit in seconds.

        Raises:
            RequestRejectedError: The driver answered with an error.
            DriverBrokenError: The driver exited or hangs. It is killed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        async with self._requesting:
            try:
                self._process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
                await self._process.stdin.drain()
                line = await asyncio.wait_for(self._process.stdout.readline(), limit)
            except TimeoutError:
                await self.kill()
                raise DriverBrokenError(f"{self.name} did not answer {command!r} in {limit:.0f} s") from None
            except (BrokenPipeError, ConnectionResetError):
                line = b""
            except asyncio.CancelledError:
                await self.kill()  # its answer would confuse the next request
                raise
            if not line:
                await self.kill()
                raise DriverBrokenError(f"{self.name} exited during {command!r}: {self._last_error}")
        answer = json.loads(line)
        if "error" in answer:
            raise RequestRejectedError(answer["error"])
        return Answer(answer["value"], answer["seconds"])

    @property
    def alive(self) -> bool:
        """Whether the driver takes requests."""
        return self._process.returncode is None

    def cpu(self) -> float:
        """Return the CPU time of the process, in seconds."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def memory(self) -> int:
        """Return the resident memory of the process, in bytes."""
        return int(psutil.Process(self._process.pid).memory_info().rss)

    async def close(self) -> None:
        """Let the process exit, and kill it if it does not."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _CLOSE_TIMEOUT)
        await self.kill()

    async def kill(self) -> None:
        """Kill the process, and read the last line of its error output."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        if not self._stderr.closed:
            self._stderr.seek(0)
            lines = self._stderr.read().decode(errors="replace").splitlines()
            self._last_error = next(filter(str.strip, reversed(lines)), self._last_error).strip()
            self._stderr.close()
