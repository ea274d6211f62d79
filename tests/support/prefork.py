"""Run the command in a fork of a process that has already imported it.

Starting Python and importing the command takes longer than most commands, and the tests run hundreds of them.
A fork is still a separate process, with its own arguments, environment, folder, streams and exit status.
Tests of the command's start use the installed script itself.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_MAX_REQUEST = 100_000
_READ_AT_START = ("PYTHON", "LC_", "LANG")
_COMMAND = str(Path(sys.executable).with_name("graphile-worker"))


class Prefork:
    """A process that runs the command in forks of itself.

    Args:
        environment: The variables that Python reads when it starts, and PATH.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._requests, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(child_end.fileno())],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment, cwd="/",
                pass_fds=[child_end.fileno()],
            )  # fmt: skip

    @staticmethod
    def accepts(arguments: tuple[str, ...], environment: dict[str, str]) -> bool:
        """Return whether a fork behaves like a new process with these arguments and variables."""
        small = sum(map(len, (*arguments, *environment.values()))) < _MAX_REQUEST
        return small and not any(name.startswith(_READ_AT_START) for name in environment)

    def run(
        self,
        arguments: tuple[str, ...],
        *,
        given: str,
        folder: Path,
        environment: dict[str, str],
        timeout: float,
    ) -> subprocess.CompletedProcess[str]:
        """Run the command to its end, as `subprocess.run` does."""
        stdin, to_stdin = os.pipe()
        from_stdout, stdout = os.pipe()
        from_stderr, stderr = os.pipe()
        from_status, status = os.pipe()
        child_ends = [stdin, stdout, stderr, status]
        request = json.dumps([arguments, str(folder), environment]).encode()
        socket.send_fds(self._requests, [request], child_ends)
        for descriptor in child_ends:
            os.close(descriptor)
        with os.fdopen(from_status, encoding="utf-8") as answers, ThreadPoolExecutor(4) as threads:
            threads.submit(_write, to_stdin, given)
            reads = [threads.submit(_read, stream) for stream in (from_stdout, from_stderr)]
            pid = int(answers.readline())
            result = threads.submit(answers.readline)
            try:
                output, errors = (read.result(timeout) for read in reads)
                code = os.waitstatus_to_exitcode(int(result.result(timeout)))
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired([_COMMAND, *arguments], timeout) from None
        return subprocess.CompletedProcess([_COMMAND, *arguments], code, output, errors)

    def close(self) -> None:
        """End the process."""
        self._requests.close()
        self._process.wait()


def _write(descriptor: int, text: str) -> None:
    # A command may not read its standard input.
    with contextlib.suppress(BrokenPipeError), open(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)


def _read(descriptor: int) -> str:
    with open(descriptor, encoding="utf-8") as stream:
        return stream.read()


def _serve(requests: socket.socket) -> None:
    """Fork for each request and return in the fork; exit when no more requests can come."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, 2 * _MAX_REQUEST, 4)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            _become_command(request, descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass


def _become_command(request: bytes, descriptors: list[int]) -> None:
    """Return in a second fork with the request's arguments, environment, folder and streams."""
    *streams, status = descriptors
    if pid := os.fork():
        for descriptor in streams:
            os.close(descriptor)
        os.write(status, f"{pid}\n".encode())
        _, code = os.waitpid(pid, 0)
        os.write(status, f"{code}\n".encode())
        os._exit(0)
    os.close(status)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    arguments, folder, environment = json.loads(request)
    os.chdir(folder)
    coerced = {name: value for name, value in os.environ.items() if name.startswith(_READ_AT_START)}
    os.environ.clear()
    os.environ.update({**coerced, **environment})
    time.tzset()
    sys.argv = [_COMMAND, *arguments]


def _import_command() -> None:
    package = importlib.import_module("graphile_worker.cli")
    importlib.import_module("asyncpg")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


if __name__ == "__main__":
    sys.path[0] = str(Path(_COMMAND).parent)
    _import_command()
    from graphile_worker.cli import main

    _serve(socket.socket(fileno=int(sys.argv[1])))
    main()
