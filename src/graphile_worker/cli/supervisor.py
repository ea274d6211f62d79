"""Supervision of worker processes: several with ``--processes``, and new ones for new code with ``--watch``.

The supervisor starts the processes, restarts a process that ends, and forwards signals. With ``--watch``, it
replaces one generation of processes with the next when a file changes. `control` is the protocol between
them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from graphile_worker._base.logs import library_logger as logger
from graphile_worker._worker.service import pause_after
from graphile_worker.cli.control import FINISH, VARIABLE
from graphile_worker.cli.exit_codes import BREAKING_MIGRATION, exit_by_signal
from graphile_worker.cli.fleet_health import FleetHealth
from graphile_worker.cli.settings import HOST

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncGenerator, Sequence

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
_STABLE_AFTER = 60.0
"""Seconds after which a process counts as stable, so that its end does not lengthen the restart delay."""
_RECHECK_INTERVAL = 0.2
_SIGNALS_UNTIL_KILL = 3
_START_TIMEOUT = 10.0
"""Seconds that the slot of a process that could not start waits for another slot's process to start."""


def supervise(count: int, *, once: bool, watched: Sequence[Path], health: str | int | None = None) -> None:
    """Run this command in `count` processes, and exit with their status.

    With an address in `health`, the supervisor serves the health of all processes there.
    """
    status = asyncio.run(_Supervisor(count, once=once, health=health).run(watched))
    if status < 0:
        exit_by_signal(-status)
    sys.exit(status)


class _Child:
    """A worker process.

    The process has its own process group, so that Ctrl-C reaches it only through the supervisor.
    """

    def __init__(
        self, process: Process, write_end: int, read_end: int, health_path: Path | None = None
    ) -> None:
        self._process = process
        self._write_end = write_end
        self._read_end = read_end
        self.pid = process.pid
        self.health_path = health_path
        """The socket on which the process serves its health."""
        self.ready = asyncio.Event()
        asyncio.get_running_loop().add_reader(read_end, self._on_readable)

    @classmethod
    async def start(cls, health: FleetHealth | None) -> _Child:
        """Start a process with the flags of this command.

        The process writes no bytecode, because Python would keep stale bytecode of a file that changes twice
        in a second. The current folder does not come before the standard library in its search path.
        """
        child_read_end, write_end = os.pipe()
        read_end, child_write_end = os.pipe()
        host = HOST.get()
        program = "graphile_worker" if host is None else host.program
        path, health_socket = (None, None) if health is None else health.open_socket()
        passed = [
            child_read_end,
            child_write_end,
            *([] if health_socket is None else [health_socket.fileno()]),
        ]
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-B", "-P", "-m", program, *sys.argv[1:],
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=passed,
                env={**os.environ, VARIABLE: ",".join(map(str, passed))},
                process_group=0,
            )  # fmt: skip
        except BaseException:
            os.close(write_end)
            os.close(read_end)
            raise
        finally:
            os.close(child_read_end)
            os.close(child_write_end)
            if health_socket is not None:
                health_socket.close()
        return cls(process, write_end, read_end, path)

    def _on_readable(self) -> None:
        if os.read(self._read_end, 100):
            self.ready.set()
        else:
            asyncio.get_running_loop().remove_reader(self._read_end)

    def finish(self) -> None:
        """Let the process finish its running jobs and claim no more."""
        with suppress(OSError):
            os.write(self._write_end, FINISH)

    def send(self, number: int) -> None:
        """Send a signal to the process: SIGTERM for Ctrl-C while it is starting, to avoid a traceback."""
        if number == signal.SIGINT and not self.ready.is_set():
            number = signal.SIGTERM
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def wait(self) -> int:
        """Return the exit status, negative if a signal ended the process."""
        try:
            return await self._process.wait()
        finally:
            asyncio.get_running_loop().remove_reader(self._read_end)
            os.close(self._write_end)
            os.close(self._read_end)
            if self.health_path is not None:
                self.health_path.unlink(missing_ok=True)

    def __str__(self) -> str:
        return f"Worker process {self._process.pid}"


class _Generation:
    """Processes with the same code.

    Args:
        count: Number of processes.
        once: Whether they end by themselves when no job is left.
        is_newer: Whether this generation replaces a running one: then all of its processes must start.
        health: Serves the health of the processes, if that is wanted.
    """

    def __init__(self, count: int, *, once: bool, is_newer: bool, health: FleetHealth | None = None) -> None:
        self._once = once
        self._is_newer = is_newer
        self._health = health
        self._children: dict[int, _Child] = {}
        self._count = count
        self._ready: set[int] = set()
        self._failed_slots: set[int] = set()
        self._start_decided = asyncio.Event()
        """Set when a process has started, when none can start, or when none is to start any more."""
        self._ending = asyncio.Event()
        self.started: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether all processes are ready; False if they cannot start."""
        self.status = 0

    @property
    def children(self) -> Sequence[_Child]:
        """The processes that run."""
        return list(self._children.values())

    async def run(self) -> None:
        """Run until all processes have ended and none is to be restarted."""
        try:
            await asyncio.gather(*(self._run_slot(slot) for slot in range(self._count)))
        finally:
            self._set_started(started=False)

    def retire(self) -> None:
        """Let the processes finish their jobs and end, because newer code has started."""
        self._ending.set()
        self._start_decided.set()
        for child in self._children.values():
            child.finish()

    def stop(self, number: int) -> None:
        """Stop the processes with a signal."""
        self._ending.set()
        self._start_decided.set()
        for child in self._children.values():
            child.send(number)

    async def _run_slot(self, slot: int) -> None:
        """Run a process, and restart it whenever it ends, until this generation ends."""
        failures = 0
        while not self._ending.is_set():
            started_at = monotonic()
            self._failed_slots.discard(slot)
            status = await self._run_process(slot)
            if self._ending.is_set() or (self._once and status == 0):
                break
            if status == BREAKING_MIGRATION or self._once or (status > 0 and await self._cannot_start(slot)):
                self.status = self.status or status
                self.stop(signal.SIGTERM)
                break
            if self._ending.is_set():
                break
            failures = 1 if monotonic() - started_at > _STABLE_AFTER else failures + 1
            pause = pause_after(failures)
            logger.error("A worker process %s; restarting in %.1f s", _describe(status), pause)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._ending.wait()

    async def _cannot_start(self, slot: int) -> bool:
        """Return whether an exit ends this generation.

        Newer code must start in all processes, and the first code in at least one.
        """
        if self._is_newer:
            return not self.started.done()
        if not self._ready:
            self._failed_slots.add(slot)
            if len(self._failed_slots) == self._count:
                self._start_decided.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(_START_TIMEOUT):
                    await self._start_decided.wait()
        return not self._ready and len(self._failed_slots) == self._count

    async def _run_process(self, slot: int) -> int:
        try:
            child = self._children[slot] = await _Child.start(self._health)
        except OSError as error:
            logger.error("Cannot start a worker process: %s", error)  # noqa: TRY400 - no traceback
            return 1
        if self._ending.is_set():  # it could not get the signal while it was being started
            child.send(signal.SIGTERM)
        waiting = asyncio.create_task(self._wait_until_ready(slot, child))
        try:
            return await child.wait()
        finally:
            waiting.cancel()
            del self._children[slot]

    async def _wait_until_ready(self, slot: int, child: _Child) -> None:
        await child.ready.wait()
        self._ready.add(slot)
        self._start_decided.set()
        if len(self._ready) == self._count:
            self._set_started(started=True)

    def _set_started(self, *, started: bool) -> None:
        if not self.started.done():
            self.started.set_result(started)


class _Supervisor:
    def __init__(self, count: int, *, once: bool, health: str | int | None) -> None:
        self._count = count
        self._once = once
        # Processes that end by themselves serve no health.
        self._health = None if health is None or once else FleetHealth(health, count, self._children)
        self._running: dict[asyncio.Task[None], _Generation] = {}
        self._signals: list[int] = []
        self._stopping = asyncio.Event()

    async def run(self, watched: Sequence[Path]) -> int:
        """Run until all processes have ended.

        Returns:
            The exit status, negative if a signal ended the supervisor.
        """
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)
        if self._health is None:
            return await self._run_all(watched)
        try:
            await self._health.start()
            return await self._run_all(watched)
        finally:
            await self._health.close()

    async def _run_all(self, watched: Sequence[Path]) -> int:
        if watched:
            await self._watch_until_stopped(watched)
        else:
            self._start_generation(is_newer=False)
        status = 0
        while self._running:
            done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                generation = self._running.pop(task)
                task.result()
                # With --watch, code that does not start is logged, but does not end the command.
                if not watched or generation.status == BREAKING_MIGRATION:
                    status = status or generation.status
        if self._signals:
            return -self._signals[0]
        return status if status >= 0 else 128 - status

    def _start_generation(self, *, is_newer: bool) -> _Generation:
        generation = _Generation(self._count, once=self._once, is_newer=is_newer, health=self._health)
        self._running[asyncio.create_task(self._run(generation))] = generation
        return generation

    def _children(self) -> list[_Child]:
        return [child for generation in self._running.values() for child in generation.children]

    async def _run(self, generation: _Generation) -> None:
        await generation.run()
        if generation.status == BREAKING_MIGRATION:
            self._stop(signal.SIGTERM)

    async def _watch_until_stopped(self, paths: Sequence[Path]) -> None:
        watching = asyncio.create_task(self._watch(paths))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([watching, stopping], return_when=asyncio.FIRST_COMPLETED)
            if watching.done() and not stopping.done():
                logger.error("Cannot watch files any more: %s", watching.exception())
                await stopping
        finally:
            for task in (watching, stopping):
                task.cancel()
            await asyncio.gather(watching, stopping, return_exceptions=True)

    async def _watch(self, paths: Sequence[Path]) -> None:
        file_changes = changes(paths)
        next_change = asyncio.ensure_future(anext(file_changes))  # changes during the start count too
        current: _Generation | None = None
        newer: _Generation | None = self._start_generation(is_newer=False)
        try:
            while True:
                awaited: list[asyncio.Future[Any]] = [next_change]
                if newer is not None:
                    awaited.append(newer.started)
                await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                if newer is not None and newer.started.done():
                    current, newer = self._choose(current, newer), None
                else:
                    logger.info("%s changed", ", ".join(sorted(next_change.result())))
                    next_change = asyncio.ensure_future(anext(file_changes))
                    if newer is not None:  # it is still starting
                        newer.stop(signal.SIGTERM)
                    newer = self._start_generation(is_newer=current is not None)
        finally:
            next_change.cancel()
            await asyncio.gather(next_change, return_exceptions=True)
            await file_changes.aclose()

    def _choose(self, current: _Generation | None, newer: _Generation) -> _Generation | None:
        """Return the generation that runs from now on."""
        if newer.started.result():
            if current is not None:
                current.retire()
            return newer
        if not self._stopping.is_set():
            consequence = "the old code keeps running" if current else "waiting for a change"
            logger.error("The new code does not start; %s", consequence)
        return current

    def _on_signal(self, number: int) -> None:
        self._signals.append(number)
        self._stop(signal.SIGKILL if len(self._signals) >= _SIGNALS_UNTIL_KILL else number)

    def _stop(self, number: int) -> None:
        """Stop all generations with a signal."""
        self._stopping.set()
        for generation in self._running.values():
            generation.stop(number)


async def changes(paths: Sequence[Path]) -> AsyncGenerator[set[str], None]:
    """Yield the names of changed files; a file that another one replaces is watched again."""
    from watchfiles import PythonFilter, awatch  # noqa: PLC0415

    only_python = (
        PythonFilter(extra_extensions=[path.name for path in paths]) if Path.cwd() in paths else None
    )
    while True:
        identities = {path: _identity(path) for path in paths}
        existing = [path for path, identity in identities.items() if identity]
        if not existing:
            await asyncio.sleep(_RECHECK_INTERVAL)
            if any(map(_identity, paths)):
                yield {path.name for path in paths if _identity(path)}
            continue
        async for changed in awatch(*existing, watch_filter=only_python or _is_relevant):
            yield {Path(path).name for _kind, path in changed}
            if identities != {path: _identity(path) for path in paths}:
                break


def _is_relevant(_change: object, path: str) -> bool:
    """Return whether a change matters: executables may have any name, but caches and hidden files don't."""
    name = Path(path).name
    return "__pycache__" not in path and not name.startswith(".") and not name.endswith("~")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _describe(status: int) -> str:
    if status >= 0:
        return f"ended with exit code {status}"
    return f"was killed by {signal.Signals(-status).name}"
