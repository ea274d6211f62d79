"""The worker processes of a run, which the fleet starts, watches, and replaces when they exit."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
from benchmarks.contenders import ROOT, node_program

from chaos.ledger import Ledger, ProcessExited, WorkerReady, now, read_file
from chaos.proxy import proxied
from chaos.waiting import POLL_INTERVAL, until
from chaos.worker import WorkerConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from chaos.campaign import Campaign
    from chaos.proxy import Proxy
    from chaos.server import Server

PYTHON, NODE = "python", "node"
_NODE_SCRIPT = Path(__file__).parent / "node_worker.mjs"
_PREFETCH = 20
_START_TIMEOUT = 30.0


class Slot:
    """A slot for one worker process at a time, with its own proxy to the server."""

    def __init__(self, number: int, program: str, proxy: Proxy, config: WorkerConfig, log: Path) -> None:
        self.number = number
        self.program = program
        self.proxy = proxy
        self.faulted = False
        """Whether a fault that hits this worker alone is active."""
        self._config = config
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._wanted_end = False
        self._ready_pid = 0

    @property
    def pid(self) -> int:
        """The process id. The process must be alive."""
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the slot has a process."""
        return self._process is not None

    @property
    def ready(self) -> bool:
        """Whether the process claims jobs."""
        if self.alive and self._ready_pid != self.pid and self.workers_of(self.pid):
            self._ready_pid = self.pid
        return self.alive and self._ready_pid == self.pid

    def workers_of(self, pid: int) -> list[str]:
        """Return the worker ids of a process, as in the column `locked_by`, once it claims jobs."""
        lines = read_file(Path(self._config.ledger))
        return [line.worker for line in lines if isinstance(line, WorkerReady) and line.pid == pid]

    def start(self) -> None:
        """Start a process."""
        config = msgspec.json.encode(self._config).decode()
        command = [sys.executable, "-m", "chaos.worker", config]
        if self.program == NODE:
            command = [*node_program(_NODE_SCRIPT), config]
        self._wanted_end = False
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the harness; the worker exits when its input ends
            )

    def send(self, number: signal.Signals) -> None:
        """Send the process a signal. An exit by SIGKILL or SIGTERM counts as intended."""
        if number in {signal.SIGKILL, signal.SIGTERM}:
            self._wanted_end = True
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def send_command(self, line: str) -> None:
        """Send the process a command, as `chaos.worker` describes."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.write(f"{line}\n".encode())
                self._process.stdin.flush()

    def exited(self) -> ProcessExited | None:
        """Return a ledger line if the process has exited, and empty the slot."""
        if self._process is None or (status := self._process.poll()) is None:
            return None
        exited = ProcessExited(
            at=now(),
            slot=self.number,
            pid=self.pid,
            program=self.program,
            status=status,
            intended=self._wanted_end,
        )
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process = None
        return exited


class Fleet:
    """All slots. A worker that exits is replaced after a short delay, as by a supervisor."""

    def __init__(self, ledger: Ledger, replacement_delay: float) -> None:
        self.slots: list[Slot] = []
        self.on_node_exit: Callable[[str], Coroutine[None, None, None]] | None = None
        self._exit_tasks: set[asyncio.Task[None]] = set()
        self._ledger = ledger
        self._replacement_delay = replacement_delay
        self._replacing = True
        self._watching: asyncio.Task[None] | None = None
        self._replace_at: dict[int, float] = {}
        self._stack = AsyncExitStack()

    async def add(self, program: str, server: Server, folder: Path, campaign: Campaign) -> None:
        """Add a slot with a worker.

        Of three Python workers, one decides by itself how many jobs to prefetch, one prefetches a fixed
        number and one none. Node workers keep their defaults, unless the run is about both programs.
        """
        number, place = len(self.slots), len(self.of(program)) % 3
        prefetch: int | Literal["auto"] = _PREFETCH if place == 1 else 0
        if program == PYTHON and place == 0:
            prefetch = "auto"
        elif program == NODE and not campaign.mixed:
            prefetch = 0
        proxy, dsn = await self._stack.enter_async_context(proxied(server.dsn(role_of(number))))
        config = WorkerConfig(
            slot=number,
            ledger=str(folder / f"worker-{number}.ledger"),
            dsn=dsn,
            leases=campaign.leases,
            concurrency=campaign.concurrency,
            prefetch=prefetch,
            history=campaign.history,
        )
        slot = Slot(number, program, proxy, config, folder / f"worker-{number}.log")
        slot.start()
        self.slots.append(slot)

    def of(self, *programs: str) -> list[Slot]:
        """Return the slots of these programs."""
        return [slot for slot in self.slots if slot.program in programs]

    def watch(self) -> None:
        """Start to record exits and to replace workers."""
        self._watching = asyncio.create_task(self._watch())

    async def until_ready(self) -> None:
        """Wait until all workers claim jobs."""
        if not await until(lambda: all(slot.ready for slot in self.slots), _START_TIMEOUT):
            raise TimeoutError(f"Not all workers started within {_START_TIMEOUT:g} s. Their logs say why.")

    async def stop(self, slots: list[Slot], limit: float) -> list[Slot]:
        """Stop workers gracefully, without replacement. Kill and return those that miss the limit."""
        self._replacing = False
        for slot in slots:
            if slot.alive:
                slot.send(signal.SIGTERM)
        late = await _wait_for_exits(slots, limit)
        for slot in late:
            slot.send(signal.SIGKILL)
        await _wait_for_exits(late, limit)
        return late

    async def close(self) -> None:
        """Kill the remaining workers."""
        self._replacing = False
        if self._watching is not None:
            for task in (self._watching, *self._exit_tasks):
                task.cancel()
            await asyncio.wait([self._watching, *self._exit_tasks])
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
                    self._replace_at[slot.number] = now() + self._replacement_delay
                    self._after_exit(slot, exited.pid)
                elif not slot.alive and self._replacing and now() >= self._replace_at[slot.number]:
                    slot.start()
            await asyncio.sleep(POLL_INTERVAL)

    def _after_exit(self, slot: Slot, pid: int) -> None:
        if slot.program == NODE and self.on_node_exit is not None:
            for worker in slot.workers_of(pid):
                self._exit_tasks.add(asyncio.create_task(self.on_node_exit(worker)))


def role_of(slot: int) -> str:
    """Return the database role of a slot's workers."""
    return f"worker_{slot}"


async def _wait_for_exits(slots: list[Slot], limit: float) -> list[Slot]:
    """Wait until the workers have exited. Return those that miss the limit."""
    await until(lambda: not any(slot.alive for slot in slots), limit)
    return [slot for slot in slots if slot.alive]
