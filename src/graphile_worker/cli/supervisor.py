"""A process that runs worker processes: several, and with ``--watch`` new ones for new code."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from graphile_worker._runtime.service import pause_after
from graphile_worker.cli.control import FINISH, VARIABLE
from graphile_worker.cli.exits import BREAKING_MIGRATION, end_by
from graphile_worker.logs import library_logger as logger

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncGenerator, Sequence

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
_LONG_LIFE = 60.0
_LOOK_AGAIN = 0.2
_DEADLY = 3
_START = 10.0
"""Seconds for which a process that could not start waits to see whether another one can."""


def supervise(count: int, *, once: bool, watched: Sequence[Path]) -> None:
    """Run this command in so many processes, and end as they end."""
    status = asyncio.run(_Supervisor(count, once=once).run(watched))
    if status < 0:
        end_by(-status)
    sys.exit(status)


class _Child:
    """A worker process. It is in a process group of its own, so that Ctrl-C reaches it through us alone."""

    def __init__(self, process: Process, to: int, of: int) -> None:
        self._process = process
        self._to = to
        self._of = of
        self.since = monotonic()
        self.ready = asyncio.Event()
        asyncio.get_running_loop().add_reader(of, self._hear)

    @classmethod
    async def start(cls) -> _Child:
        """Start one, with the flags that we were given.

        It writes no bytecode: of a file that is changed twice in a second the first one would be kept. And
        the current folder is not the first place where it looks for modules of the standard library.
        """
        its_end, to = os.pipe()
        of, its_other_end = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-B", "-P", "-m", "graphile_worker", *sys.argv[1:],
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(its_end, its_other_end),
                env={**os.environ, VARIABLE: f"{its_end},{its_other_end}"},
                process_group=0,
            )  # fmt: skip
        except BaseException:
            os.close(to)
            os.close(of)
            raise
        finally:
            os.close(its_end)
            os.close(its_other_end)
        return cls(process, to, of)

    def _hear(self) -> None:
        if os.read(self._of, 100):
            self.ready.set()
        else:
            asyncio.get_running_loop().remove_reader(self._of)

    def finish(self) -> None:
        """Let it run its jobs to their end, and claim no more."""
        with suppress(OSError):
            os.write(self._to, FINISH)

    def send(self, number: int) -> None:
        """Send it a signal; one that is only starting has no better answer to Ctrl-C than a traceback."""
        if number == signal.SIGINT and not self.ready.is_set():
            number = signal.SIGTERM
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def wait(self) -> int:
        """Its exit status: negative if it died of a signal."""
        try:
            return await self._process.wait()
        finally:
            asyncio.get_running_loop().remove_reader(self._of)
            os.close(self._to)
            os.close(self._of)

    def __str__(self) -> str:
        return f"Worker process {self._process.pid}"


class _Generation:
    """Processes with the same code.

    Args:
        count: How many.
        once: Whether they end by themselves.
        is_newer: Whether others run that it is to replace: then all of them must start.
    """

    def __init__(self, count: int, *, once: bool, is_newer: bool) -> None:
        self._once = once
        self._is_newer = is_newer
        self._children: dict[int, _Child] = {}
        self._count = count
        self._ready: set[int] = set()
        self._unable: set[int] = set()
        self._decided = asyncio.Event()
        """Set when a process has started, none can, or there is nothing more to start."""
        self._over = asyncio.Event()
        self.begun: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether all of them take jobs; False if they cannot even start."""
        self.status = 0

    async def run(self) -> None:
        """Until all have ended, and none is to be started again."""
        try:
            await asyncio.gather(*(self._keep(slot) for slot in range(self._count)))
        finally:
            self._begin(begun=False)

    def retire(self) -> None:
        """There is newer code: finish, and be gone."""
        self._over.set()
        self._decided.set()
        for child in self._children.values():
            child.finish()

    def stop(self, number: int) -> None:
        """Stop them with that signal."""
        self._over.set()
        self._decided.set()
        for child in self._children.values():
            child.send(number)

    async def _keep(self, slot: int) -> None:
        """One process after another, until it is enough."""
        failures = 0
        while not self._over.is_set():
            since = monotonic()
            self._unable.discard(slot)
            status = await self._run_one(slot)
            if self._over.is_set() or (self._once and status == 0):
                break
            if status == BREAKING_MIGRATION or self._once or (status > 0 and await self._cannot_start(slot)):
                self.status = self.status or status
                self.stop(signal.SIGTERM)
                break
            if self._over.is_set():
                break
            failures = 1 if monotonic() - since > _LONG_LIFE else failures + 1
            pause = pause_after(failures)
            logger.error("A worker process %s; another one in %.1f s", _how(status), pause)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._over.wait()

    async def _cannot_start(self, slot: int) -> bool:
        """Return whether an exit is the end: newer code must start in all processes, the first in one."""
        if self._is_newer:
            return not self.begun.done()
        if not self._ready:
            self._unable.add(slot)
            if len(self._unable) == self._count:
                self._decided.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(_START):
                    await self._decided.wait()
        return not self._ready and len(self._unable) == self._count

    async def _run_one(self, slot: int) -> int:
        try:
            child = self._children[slot] = await _Child.start()
        except OSError as error:
            logger.error("A worker process cannot be started: %s", error)  # noqa: TRY400 - no traceback
            return 1
        if self._over.is_set():  # nobody could tell it while it was being started
            child.send(signal.SIGTERM)
        announcing = asyncio.create_task(self._announce(slot, child))
        try:
            return await child.wait()
        finally:
            announcing.cancel()
            del self._children[slot]

    async def _announce(self, slot: int, child: _Child) -> None:
        await child.ready.wait()
        self._ready.add(slot)
        self._decided.set()
        if len(self._ready) == self._count:
            self._begin(begun=True)

    def _begin(self, *, begun: bool) -> None:
        if not self.begun.done():
            self.begun.set_result(begun)


class _Supervisor:
    def __init__(self, count: int, *, once: bool) -> None:
        self._count = count
        self._once = once
        self._running: dict[asyncio.Task[None], _Generation] = {}
        self._signals: list[int] = []
        self._stopping = asyncio.Event()

    async def run(self, watched: Sequence[Path]) -> int:
        """Until all have ended; returns an exit status, negative if we were ended by a signal."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._signalled, number)
        if watched:
            await self._watch_until_told(watched)
        else:
            self._begin(is_newer=False)
        status = 0
        while self._running:
            done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                generation = self._running.pop(task)
                task.result()
                # Under --watch code that does not start is reported, and is no reason to end.
                if not watched or generation.status == BREAKING_MIGRATION:
                    status = status or generation.status
        if self._signals:
            return -self._signals[0]
        return status if status >= 0 else 128 - status

    def _begin(self, *, is_newer: bool) -> _Generation:
        generation = _Generation(self._count, once=self._once, is_newer=is_newer)
        self._running[asyncio.create_task(self._run(generation))] = generation
        return generation

    async def _run(self, generation: _Generation) -> None:
        await generation.run()
        if generation.status == BREAKING_MIGRATION:
            self._stop(signal.SIGTERM)

    async def _watch_until_told(self, paths: Sequence[Path]) -> None:
        watching = asyncio.create_task(self._watch(paths))
        told = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([watching, told], return_when=asyncio.FIRST_COMPLETED)
            if watching.done() and not told.done():
                logger.error("Files are not watched any more: %s", watching.exception())
                await told
        finally:
            for task in (watching, told):
                task.cancel()
            await asyncio.gather(watching, told, return_exceptions=True)

    async def _watch(self, paths: Sequence[Path]) -> None:
        occasions = changes(paths)
        occasion = asyncio.ensure_future(anext(occasions))  # what changes during the start counts too
        current: _Generation | None = None
        newer: _Generation | None = self._begin(is_newer=False)
        try:
            while True:
                awaited: list[asyncio.Future[Any]] = [occasion]
                if newer is not None:
                    awaited.append(newer.begun)
                await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                if newer is not None and newer.begun.done():
                    current, newer = self._replaced(current, newer), None
                else:
                    logger.info("%s changed", ", ".join(sorted(occasion.result())))
                    occasion = asyncio.ensure_future(anext(occasions))
                    if newer is not None:  # it has not even started
                        newer.stop(signal.SIGTERM)
                    newer = self._begin(is_newer=current is not None)
        finally:
            occasion.cancel()
            await asyncio.gather(occasion, return_exceptions=True)
            await occasions.aclose()

    def _replaced(self, current: _Generation | None, newer: _Generation) -> _Generation | None:
        """What is to run from now on."""
        if newer.begun.result():
            if current is not None:
                current.retire()
            return newer
        if not self._stopping.is_set():
            what_now = "the old one goes on" if current else "waiting for a change"
            logger.error("The new code does not start; %s", what_now)
        return current

    def _signalled(self, number: int) -> None:
        self._signals.append(number)
        self._stop(signal.SIGKILL if len(self._signals) >= _DEADLY else number)

    def _stop(self, number: int) -> None:
        """Tell all to stop, as we were told."""
        self._stopping.set()
        for generation in self._running.values():
            generation.stop(number)


async def changes(paths: Sequence[Path]) -> AsyncGenerator[set[str], None]:
    """Names of files that changed, again and again; what is replaced by another is watched anew."""
    from watchfiles import PythonFilter, awatch  # noqa: PLC0415

    only_python = (
        PythonFilter(extra_extensions=[path.name for path in paths]) if Path.cwd() in paths else None
    )
    while True:
        identities = {path: _identity(path) for path in paths}
        existing = [path for path, identity in identities.items() if identity]
        if not existing:
            await asyncio.sleep(_LOOK_AGAIN)
            if any(map(_identity, paths)):
                yield {path.name for path in paths if _identity(path)}
            continue
        async for changed in awatch(*existing, watch_filter=only_python or _anything):
            yield {Path(path).name for _kind, path in changed}
            if identities != {path: _identity(path) for path in paths}:
                break


def _anything(_change: object, path: str) -> bool:
    """Programs may have any name; what Python and editors write beside them is nothing."""
    name = Path(path).name
    return "__pycache__" not in path and not name.startswith(".") and not name.endswith("~")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with exit code {status}"
    return f"was killed by {signal.Signals(-status).name}"
