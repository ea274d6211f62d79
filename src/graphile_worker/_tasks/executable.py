"""Tasks that are programs: executable files in any language.

The program receives the job in environment variables and ``{"payload": ...}`` on standard input. Exit code 0
means success. Its output is logged, and the end of its standard error becomes the job's error message.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from datetime import UTC
from typing import TYPE_CHECKING

from graphile_worker._base.payload import encode_stored
from graphile_worker.errors import TaskError

if TYPE_CHECKING:
    from pathlib import Path

    from graphile_worker._base.logs import ScopedLogger
    from graphile_worker.context import JobContext
    from graphile_worker.job import Job

_DEFAULT_TIMEOUT = 4 * 3600.0
_TIME_TO_END = 2.0
_MAX_LINE_LENGTH = 64 * 1024
_MAX_ERROR_LENGTH = 2000
_STDOUT, _STDERR = 1, 2


class Executable:
    """Task that runs a program once per job, in a separate process group.

    Args:
        path: The program.
        timeout: Seconds after which the program is killed.
    """

    def __init__(self, path: Path, *, timeout: float = _DEFAULT_TIMEOUT) -> None:
        self.path = path
        self._timeout = timeout

    def __repr__(self) -> str:
        return f"Executable({str(self.path)!r})"

    async def __call__(self, payload: object, ctx: JobContext) -> None:
        """Run the program for one job."""
        message = encode_stored({"payload": payload})
        starting = asyncio.ensure_future(
            asyncio.get_running_loop().subprocess_exec(
                lambda: _Process(ctx.logger),
                self.path,
                env=os.environ | job_environment(ctx.job),
                start_new_session=True,
            )
        )
        try:
            transport, process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            await _kill_started(starting)
            raise
        except OSError as error:
            raise TaskError(
                f"{self.path} cannot be run: {error.strerror or error}. Its first line must name an "
                "installed interpreter, for example #!/bin/sh."
            ) from None
        try:
            process.send_input(message)
            async with asyncio.timeout(self._timeout):
                await process.exited.wait()
            # A background process that the program left running may still hold the pipes open.
            with suppress(TimeoutError):
                async with asyncio.timeout(_TIME_TO_END):
                    await process.pipes_closed.wait()
        except TimeoutError:
            raise TaskError(f"{self.path} was killed after {self._timeout:g} s.") from None
        finally:
            try:
                await process.kill()
            finally:  # even if the wait for the process is cancelled
                transport.close()
        if process.status != 0:
            raise TaskError(_failure_message(process.status, process.error_output))


async def _kill_started(starting: asyncio.Future[tuple[asyncio.SubprocessTransport, _Process]]) -> None:
    """Kill a program whose start was cancelled, and the processes that it may have started.

    Without this, the event loop would end the program only.
    """
    with suppress(OSError):
        transport, process = await starting
        try:
            await process.kill()
        finally:
            transport.close()


class _Process(asyncio.SubprocessProtocol):
    """Protocol of a running program that logs its output line by line. Overlong lines are split."""

    def __init__(self, logger: ScopedLogger) -> None:
        self._logger = logger
        self._rest = {_STDOUT: b"", _STDERR: b""}
        self.error_output = ""
        self.exited = asyncio.Event()
        self.pipes_closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport of the started program."""
        assert isinstance(transport, asyncio.SubprocessTransport)  # noqa: S101 - for the type checker
        self._transport = transport

    @property
    def status(self) -> int:
        """The exit code, or the negative number of the signal that killed the program."""
        return self._transport.get_returncode() or 0

    def send_input(self, message: bytes) -> None:
        """Write the program's input. A program that does not read it is not an error."""
        stdin = self._transport.get_pipe_transport(0)
        assert isinstance(stdin, asyncio.WriteTransport)  # noqa: S101 - for the type checker
        stdin.write(message)
        stdin.write_eof()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Log the complete lines of some output."""
        *lines, rest = (self._rest[fd] + data).split(b"\n")
        if len(rest) > _MAX_LINE_LENGTH:
            lines, rest = [*lines, rest], b""
        self._rest[fd] = rest
        for line in lines:
            self._log(fd, line)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002
        """Log the last line of a closed pipe."""
        rest = self._rest.pop(fd, b"")
        if rest:
            self._log(fd, rest)
        if not self._rest:
            self.pipes_closed.set()

    def process_exited(self) -> None:
        """Record that the program has exited."""
        self.exited.set()

    def _log(self, fd: int, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        if fd == _STDERR:
            self._logger.error("%s", text)
            self.error_output = f"{self.error_output}{text}\n"[-_MAX_ERROR_LENGTH - 1 :]
        else:
            self._logger.info("%s", text)

    async def kill(self) -> None:
        """Kill the program and its process group, unless the program has exited."""
        if self.exited.is_set():
            return
        # SIGKILL is sent even if the program ends on SIGTERM, because its child processes may still run.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._transport.get_pid(), number)
            with suppress(TimeoutError):
                async with asyncio.timeout(_TIME_TO_END):
                    await self.exited.wait()


def job_environment(job: Job) -> dict[str, str]:
    """Return the environment variables that describe a job, as in Graphile Worker."""
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


def describe_exit(status: int) -> str:
    """Describe an exit status, which is negative for a signal.

    >>> describe_exit(3), describe_exit(-9)
    ('exited with code 3', 'was killed by SIGKILL')
    """
    return f"exited with code {status}" if status >= 0 else f"was killed by {_signal_name(-status)}"


def _failure_message(status: int, error_output: str) -> str:
    cut = "…" if len(error_output) > _MAX_ERROR_LENGTH else ""
    output = f": {cut}{error_output.strip()}" if error_output.strip() else ""
    return f"Process {describe_exit(status)}{output}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
