"""The worker processes of a run: started, watched, and replaced when they are gone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from benchmarks.contenders import ROOT, node_program

from chaos.ledger import Exited, Ledger, Ready, now, read_file
from chaos.proxy import proxied
from chaos.waiting import LOOK, until
from chaos.worker import Orders

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from chaos.leases import Leases
    from chaos.proxy import Proxy
    from chaos.server import Server

PYTHON, NODE = "python", "node"
_NODE_SCRIPT = Path(__file__).parent / "node_worker.mjs"
_PREFETCH = 20
_STARTING = 30.0


class Slot:
    """A place for one worker process at a time, with a proxy of its own to the server."""

    def __init__(self, number: int, program: str, proxy: Proxy, orders: Orders, log: Path) -> None:
        self.number = number
        self.program = program
        self.proxy = proxy
        self.troubled = False
        """Whether a fault that hits this worker alone is going on."""
        self._orders = orders
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._wanted_end = False
        self._ready_pid = 0

    @property
    def pid(self) -> int:
        """The process, which must be there."""
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether there is one."""
        return self._process is not None

    @property
    def ready(self) -> bool:
        """Whether it takes jobs."""
        if self.alive and self._ready_pid != self.pid and self.workers_of(self.pid):
            self._ready_pid = self.pid
        return self.alive and self._ready_pid == self.pid

    def workers_of(self, pid: int) -> list[str]:
        """The worker of that process, as in the column locked_by, once it takes jobs."""
        lines = read_file(Path(self._orders.ledger))
        return [line.worker for line in lines if isinstance(line, Ready) and line.pid == pid]

    def start(self) -> None:
        """Start a process."""
        orders = msgspec.json.encode(self._orders).decode()
        command = [sys.executable, "-m", "chaos.worker", orders]
        if self.program == NODE:
            command = [*node_program(_NODE_SCRIPT), orders]
        self._wanted_end = False
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us; it ends when its input does
            )

    def send(self, number: signal.Signals) -> None:
        """Send the process a signal; one that ends it is our doing."""
        if number in {signal.SIGKILL, signal.SIGTERM}:
            self._wanted_end = True
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def order(self, line: str) -> None:
        """Tell the process something, as chaos/worker.py has it."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.write(f"{line}\n".encode())
                self._process.stdin.flush()

    def exited(self) -> Exited | None:
        """What is to be said of the process if it is gone; the slot is empty then."""
        if self._process is None or (status := self._process.poll()) is None:
            return None
        exited = Exited(
            at=now(),
            slot=self.number,
            pid=self.pid,
            program=self.program,
            status=status,
            wanted=self._wanted_end,
        )
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process = None
        return exited


class Fleet:
    """All slots. A worker that is gone is replaced after a moment, as by a supervisor."""

    def __init__(self, ledger: Ledger, replacement: float) -> None:
        self.slots: list[Slot] = []
        self.on_node_exit: Callable[[str], Coroutine[None, None, None]] | None = None
        self._tidying: set[asyncio.Task[None]] = set()
        self._ledger = ledger
        self._replacement = replacement
        self._replacing = True
        self._watching: asyncio.Task[None] | None = None
        self._due: dict[int, float] = {}
        self._stack = AsyncExitStack()

    async def add(
        self, program: str, server: Server, folder: Path, leases: Leases, concurrency: int, *, ahead: bool
    ) -> None:
        """One more slot, with a worker; of those that may claim ahead every third of a kind does."""
        number = len(self.slots)
        proxy, dsn = await self._stack.enter_async_context(proxied(server.dsn(role_of(number))))
        orders = Orders(
            slot=number,
            ledger=str(folder / f"worker-{number}.ledger"),
            dsn=dsn,
            leases=leases,
            concurrency=concurrency,
            prefetch=_PREFETCH if ahead and len(self.of(program)) % 3 == 1 else 0,
        )
        slot = Slot(number, program, proxy, orders, folder / f"worker-{number}.log")
        slot.start()
        self.slots.append(slot)

    def of(self, *programs: str) -> list[Slot]:
        """The slots for workers of these kinds."""
        return [slot for slot in self.slots if slot.program in programs]

    def watch(self) -> None:
        """Begin to write down who is gone, and to replace them."""
        self._watching = asyncio.create_task(self._watch())

    async def until_ready(self) -> None:
        """Until all take jobs."""
        if not await until(lambda: all(slot.ready for slot in self.slots), _STARTING):
            raise TimeoutError("Not all workers started. Their logs say why.")

    async def stop(self, slots: list[Slot], limit: float) -> list[Slot]:
        """End these in order, for good; those that did not in time are killed, and returned."""
        self._replacing = False
        for slot in slots:
            if slot.alive:
                slot.send(signal.SIGTERM)
        late = await _gone(slots, limit)
        for slot in late:
            slot.send(signal.SIGKILL)
        await _gone(late, limit)
        return late

    async def close(self) -> None:
        """Kill what is left."""
        self._replacing = False
        if self._watching is not None:
            for task in (self._watching, *self._tidying):
                task.cancel()
            await asyncio.wait([self._watching, *self._tidying])
        for slot in self.slots:
            if slot.alive:
                slot.send(signal.SIGKILL)
                await until(slot.exited)
        await self._stack.aclose()

    async def _watch(self) -> None:
        while True:
            for slot in self.slots:
                if exited := slot.exited():
                    self._ledger.write(exited)
                    self._due[slot.number] = now() + self._replacement
                    self._tidy_up(slot, exited.pid)
                elif not slot.alive and self._replacing and now() >= self._due[slot.number]:
                    slot.start()
            await asyncio.sleep(LOOK)

    def _tidy_up(self, slot: Slot, pid: int) -> None:
        if slot.program == NODE and self.on_node_exit is not None:
            for worker in slot.workers_of(pid):
                self._tidying.add(asyncio.create_task(self.on_node_exit(worker)))


def role_of(slot: int) -> str:
    """The role that the slot's workers connect as."""
    return f"worker_{slot}"


async def _gone(slots: list[Slot], limit: float) -> list[Slot]:
    """Wait until they are gone; those that are not in time."""
    await until(lambda: not any(slot.alive for slot in slots), limit)
    return [slot for slot in slots if slot.alive]
