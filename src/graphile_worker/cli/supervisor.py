"""A process that runs worker processes: several, and with ``--watch`` new ones for new code."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from graphile_worker._runtime.service import pause_after
from graphile_worker.cli.control import FINISH, VARIABLE
from graphile_worker.cli.exits import BREAKING_MIGRATION, end_by

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncGenerator, Sequence

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
_LONG_LIFE = 60.0
logger = logging.getLogger("graphile_worker")


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

        It writes no bytecode: of a file that is changed twice in a second the first one would be kept.
        """
        its_end, to = os.pipe()
        of, its_other_end = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-B", "-m", "graphile_worker", *sys.argv[1:],
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
        """Send it a signal."""
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
    """Processes with the same code."""

    def __init__(self, supervisor: _Supervisor, count: int, *, once: bool) -> None:
        self._supervisor = supervisor
        self._once = once
        self._slots: list[_Child | None] = [None] * count
        self._count = count
        self._ready = 0
        self.retired = False
        self.begun: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether all of them take jobs; False if they cannot even start."""
        self.status = 0

    @property
    def children(self) -> list[_Child]:
        """Those that live."""
        return [child for child in self._slots if child is not None]

    def _is_over(self) -> bool:
        return self.retired or self._supervisor.stopping.is_set()

    async def run(self) -> None:
        """Until all have ended, and none is to be started again."""
        try:
            await asyncio.gather(*(self._keep(slot) for slot in range(self._count)))
        finally:
            self._begin(begun=False)

    def retire(self) -> None:
        """There is newer code: finish, and be gone."""
        self.retired = True
        for child in self.children:
            child.finish()

    async def _keep(self, slot: int) -> None:
        """One process after another, until it is enough."""
        failures = 0
        while not self._is_over():
            child = self._slots[slot] = await _Child.start()
            if self._is_over():  # nobody could tell it while it was being started
                child.send(signal.SIGTERM)
            announcing = asyncio.create_task(self._announce(child))
            status = await child.wait()
            announcing.cancel()
            self._slots[slot] = None
            if self._is_over() or (self._once and status == 0):
                break
            could_not_start = status > 0 and not self.begun.done()
            if status == BREAKING_MIGRATION or self._once or could_not_start:
                self._fail(status)
                break
            failures = 1 if monotonic() - child.since > _LONG_LIFE else failures + 1
            pause = pause_after(failures)
            logger.error("%s %s; another one in %.1f s", child, _how(status), pause)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._supervisor.stopping.wait()

    async def _announce(self, child: _Child) -> None:
        await child.ready.wait()
        self._ready += 1
        if self._ready >= self._count:
            self._begin(begun=True)

    def _fail(self, status: int) -> None:
        self.status = self.status or status
        self.retired = True
        for child in self.children:
            child.send(signal.SIGTERM)
        self._begin(begun=False)
        if status == BREAKING_MIGRATION:
            self._supervisor.stop(signal.SIGTERM)

    def _begin(self, *, begun: bool) -> None:
        if not self.begun.done():
            self.begun.set_result(begun)


class _Supervisor:
    def __init__(self, count: int, *, once: bool) -> None:
        self._count = count
        self._once = once
        self._running: dict[asyncio.Task[None], _Generation] = {}
        self._signal = 0
        self.stopping = asyncio.Event()

    async def run(self, watched: Sequence[Path]) -> int:
        """Until all have ended; returns an exit status, negative if we were ended by a signal."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._signalled, number)
        if watched:
            await self._watch_until_told(watched)
        else:
            self._begin()
        status = 0
        while self._running:
            done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                generation = self._running.pop(task)
                task.result()
                if not watched or generation.status == BREAKING_MIGRATION:
                    status = status or generation.status
        return -self._signal or (status if status >= 0 else 128 - status)

    def _begin(self) -> _Generation:
        generation = _Generation(self, self._count, once=self._once)
        self._running[asyncio.create_task(generation.run())] = generation
        return generation

    async def _watch_until_told(self, paths: Sequence[Path]) -> None:
        tasks = [asyncio.create_task(self._watch(paths)), asyncio.create_task(self.stopping.wait())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0] in done:
                self.stop(signal.SIGTERM)
                tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, paths: Sequence[Path]) -> None:
        occasions = changes(paths)
        occasion = asyncio.ensure_future(anext(occasions))  # what changes during the start counts too
        try:
            current = await self._renew(None)
            while True:
                logger.info("%s changed", ", ".join(sorted(await occasion)))
                occasion = asyncio.ensure_future(anext(occasions))
                current = await self._renew(current)
        finally:
            occasion.cancel()
            await asyncio.gather(occasion, return_exceptions=True)

    async def _renew(self, current: _Generation | None) -> _Generation | None:
        """Start the code as it is now; if that works it replaces what runs."""
        newer = self._begin()
        if await newer.begun:
            if current is not None:
                current.retire()
            return newer
        if not self.stopping.is_set():
            what_now = "the old one goes on" if current else "waiting for a change"
            logger.error("The new code does not start; %s", what_now)
        return current

    def _signalled(self, number: int) -> None:
        self._signal = self._signal or number
        self.stop(number)

    def stop(self, number: int) -> None:
        """Tell all to stop, as we were told."""
        self.stopping.set()
        for generation in self._running.values():
            for child in generation.children:
                child.send(number)


async def changes(paths: Sequence[Path]) -> AsyncGenerator[set[str], None]:
    """Names of files that changed, again and again."""
    from watchfiles import awatch  # noqa: PLC0415

    async for changed in awatch(*paths):
        yield {Path(path).name for _kind, path in changed}


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with exit code {status}"
    return f"was killed by {signal.Signals(-status).name}"
