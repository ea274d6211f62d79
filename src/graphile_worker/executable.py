"""A task that is a program: any file that can be executed, in any language.

It gets the job in its environment, and ``{"payload": ...}`` on its standard input. If it exits with 0 the job
is done. What it prints is logged; the end of what it prints to its standard error says why the job failed.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from datetime import UTC
from typing import TYPE_CHECKING

from graphile_worker.errors import TaskError
from graphile_worker.payload import encode_stored

if TYPE_CHECKING:
    from pathlib import Path

    from graphile_worker.context import JobContext
    from graphile_worker.job import Job
    from graphile_worker.logs import ScopedLogger

_LONGEST = 4 * 3600.0
_TIME_TO_END = 2.0
_LONGEST_LINE = 64 * 1024
_MOST_TOLD = 2000
_STDOUT, _STDERR = 1, 2


class Executable:
    """Runs the program once for each job, in a process group of its own.

    Args:
        path: The file.
        longest: After how many seconds it is killed.
    """

    def __init__(self, path: Path, *, longest: float = _LONGEST) -> None:
        self.path = path
        self._longest = longest

    def __repr__(self) -> str:
        return f"Executable({str(self.path)!r})"

    async def __call__(self, payload: object, ctx: JobContext) -> None:
        """Run it for that job."""
        message = encode_stored({"payload": payload})
        starting = asyncio.ensure_future(
            asyncio.get_running_loop().subprocess_exec(
                lambda: _Process(ctx.logger),
                self.path,
                env=os.environ | environment_of(ctx.job),
                start_new_session=True,
            )
        )
        try:
            transport, process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            await _undo(starting)
            raise
        except OSError as error:
            raise TaskError(
                f"{self.path} cannot be run: {error.strerror or error}. Does its first line name a program "
                "that is here, for example #!/bin/sh?"
            ) from None
        try:
            process.tell(message)
            async with asyncio.timeout(self._longest):
                await process.exited.wait()
            # Something that it left running may have its pipes still.
            with suppress(TimeoutError):
                async with asyncio.timeout(_TIME_TO_END):
                    await process.silent.wait()
        except TimeoutError:
            raise TaskError(f"{self.path} was killed after {self._longest:g} s.") from None
        finally:
            try:
                await process.kill()
            finally:  # also if nobody has the time to wait for that
                transport.close()
        if process.status != 0:
            raise TaskError(_why(process.status, process.complaints))


async def _undo(starting: asyncio.Future[tuple[asyncio.SubprocessTransport, _Process]]) -> None:
    """It runs already, perhaps, and has started others: the event loop would end it alone."""
    with suppress(OSError):
        transport, process = await starting
        try:
            await process.kill()
        finally:
            transport.close()


class _Process(asyncio.SubprocessProtocol):
    """Logs what the program says, line by line; a line that does not end is cut where it gets long."""

    def __init__(self, logger: ScopedLogger) -> None:
        self._logger = logger
        self._rest = {_STDOUT: b"", _STDERR: b""}
        self.complaints = ""
        self.exited = asyncio.Event()
        self.silent = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It was started."""
        assert isinstance(transport, asyncio.SubprocessTransport)  # noqa: S101 - for the type checker
        self._transport = transport

    @property
    def status(self) -> int:
        """Its exit code; negative if it died of a signal."""
        return self._transport.get_returncode() or 0

    def tell(self, message: bytes) -> None:
        """Give it its input. Not to want it is no mistake."""
        stdin = self._transport.get_pipe_transport(0)
        assert isinstance(stdin, asyncio.WriteTransport)  # noqa: S101 - for the type checker
        stdin.write(message)
        stdin.write_eof()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """It says something."""
        *lines, rest = (self._rest[fd] + data).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        self._rest[fd] = rest
        for line in lines:
            self._say(fd, line)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002
        """It will say nothing more there."""
        rest = self._rest.pop(fd, b"")
        if rest:
            self._say(fd, rest)
        if not self._rest:
            self.silent.set()

    def process_exited(self) -> None:
        """It has ended."""
        self.exited.set()

    def _say(self, fd: int, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        if fd == _STDERR:
            self._logger.error("%s", text)
            self.complaints = f"{self.complaints}{text}\n"[-_MOST_TOLD - 1 :]
        else:
            self._logger.info("%s", text)

    async def kill(self) -> None:
        """End it, and whatever it started, if it has not ended by itself."""
        if self.exited.is_set():
            return
        for number in (signal.SIGTERM, signal.SIGKILL):  # the second for what it started, if it ended itself
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._transport.get_pid(), number)
            with suppress(TimeoutError):
                async with asyncio.timeout(_TIME_TO_END):
                    await self.exited.wait()


def environment_of(job: Job) -> dict[str, str]:
    """What tells a program about its job: Graphile Worker's variables."""
    run_at = job.run_at.astimezone(UTC).isoformat(timespec="milliseconds")
    about = {
        "PAYLOAD_FORMAT": "json",
        "TASK_IDENTIFIER": job.task_identifier,
        "JOB_ID": job.id,
        "JOB_KEY": job.key,
        "JOB_ATTEMPTS": job.attempts,
        "JOB_MAX_ATTEMPTS": job.max_attempts,
        "JOB_PRIORITY": job.priority,
        "JOB_RUN_AT": run_at.replace("+00:00", "Z"),
    }
    return {f"GRAPHILE_WORKER_{name}": str(value) for name, value in about.items() if value is not None}


def how_it_ended(status: int) -> str:
    """What an exit status says; it is negative for a signal.

    >>> how_it_ended(3), how_it_ended(-9)
    ('exited with code 3', 'was killed by SIGKILL')
    """
    return f"exited with code {status}" if status >= 0 else f"was killed by {_signal_name(-status)}"


def _why(status: int, complaints: str) -> str:
    cut = "…" if len(complaints) > _MOST_TOLD else ""
    return f"Process {how_it_ended(status)}" + (f": {cut}{complaints.strip()}" if complaints.strip() else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
