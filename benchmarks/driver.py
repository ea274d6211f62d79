"""A driver process, from the side that asks; drivers/protocol.py says what it answers."""

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
_CLOSING = 10.0


class Refused(Exception):  # noqa: N818 - it is an answer
    """The driver answered that it cannot do that; it is ready for the next question."""


class Broken(Exception):  # noqa: N818 - named for the driver's state
    """The driver died, or gave no answer in time; it cannot be asked any more."""


class Answer(NamedTuple):
    """What the driver found, and how long it took by its own clock."""

    value: Any
    seconds: float


class DriverProcess:
    """One driver, running."""

    def __init__(self, name: str, process: Process, complaints: IO[bytes]) -> None:
        self.name = name
        self._process = process
        self._complaints = complaints
        self._last_words = "it said nothing"
        self._turn = asyncio.Lock()

    @classmethod
    async def start(cls, name: str, command: Sequence[str], environment: Mapping[str, str]) -> DriverProcess:
        """Start the process; whether it works, the first question shows."""
        complaints = tempfile.TemporaryFile()  # noqa: SIM115 - open for as long as the process is
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=environment,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=complaints,
                limit=_LONGEST_LINE,
                start_new_session=True,  # Ctrl-C is for us; it ends when its input does
            )
        except OSError as error:
            complaints.close()
            raise Broken(f"{name} does not start: {error}") from error
        return cls(name, process, complaints)

    async def ask(self, ask: str, *, limit: float = _LIMIT, **question: Any) -> Answer:
        """Put a question and await the answer, for so many seconds at most.

        Raises:
            Refused: The driver says why it cannot.
            Broken: It died or hangs; it is killed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        async with self._turn:
            try:
                self._process.stdin.write(json.dumps({"ask": ask, **question}).encode() + b"\n")
                await self._process.stdin.drain()
                line = await asyncio.wait_for(self._process.stdout.readline(), limit)
            except TimeoutError:
                await self.kill()
                raise Broken(f"{self.name} gave no answer to {ask!r} in {limit:.0f} s") from None
            except (BrokenPipeError, ConnectionResetError):
                line = b""
            except asyncio.CancelledError:
                await self.kill()  # nobody will read its answer
                raise
            if not line:
                await self.kill()
                raise Broken(f"{self.name} ended when asked to {ask!r}: {self._last_words}")
        answer = json.loads(line)
        if "error" in answer:
            raise Refused(answer["error"])
        return Answer(answer["value"], answer["seconds"])

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.returncode is None

    def cpu(self) -> float:
        """Seconds of processor time that it has used."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def memory(self) -> int:
        """Bytes of memory that it has now."""
        return int(psutil.Process(self._process.pid).memory_info().rss)

    async def close(self) -> None:
        """Let it end, or else kill it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _CLOSING)
        await self.kill()

    async def kill(self) -> None:
        """End it at once."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        if not self._complaints.closed:
            self._complaints.seek(0)
            lines = self._complaints.read().decode(errors="replace").splitlines()
            self._last_words = next(filter(str.strip, reversed(lines)), self._last_words).strip()
            self._complaints.close()
