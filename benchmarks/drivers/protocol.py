"""The protocol between the benchmark and its drivers.

A driver is a process that uses one job queue as its users would. It reads one command per line from its
standard input, ``{"command": "start", "concurrency": 24}``, and answers each with a line on its standard
output: ``{"value": ..., "seconds": ...}`` with the time it took, or ``{"error": "the reason"}``. The ``PG*``
environment variables configure the connection. `Driver` defines the commands; node.mjs implements them for
Node.

The tasks are `trivial` (async, does nothing), `sync` (the same as a plain function), `sleep` (waits for
``payload["seconds"]``), `fail` (raises, and has one attempt only) and `probe`. The first line of `probe`
records how long ago it was sent (``payload["sent"]``, the monotonic clock, which all processes of a machine
share) or was due (``payload["due"]``, seconds since 1970).

The drivers of other queues run in their own environment, so this module imports only the standard library.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from abc import ABC, abstractmethod
from typing import Any

PAUSE = 0.005


class UnsupportedError(Exception):
    """The driver does not support the command."""


class Probes:
    """The latencies that the probes recorded."""

    def __init__(self) -> None:
        self._latencies: list[float] = []
        self._arrived = asyncio.Event()

    def note(self, payload: dict[str, float]) -> None:
        """Record a latency, in the first line of the task `probe`."""
        if "sent" in payload:
            self._latencies.append(time.monotonic() - payload["sent"])
        else:
            self._latencies.append(time.time() - payload["due"])
        self._arrived.set()

    async def take(self, count: int) -> list[float]:
        """Return the latencies in seconds, once a number of probes have run."""
        while len(self._latencies) < count:
            self._arrived.clear()
            await self._arrived.wait()
        latencies, self._latencies = self._latencies, []
        return latencies


class Completions:
    """The number of completed jobs, and the time of the last completion."""

    def __init__(self) -> None:
        self.count = 0
        self.last = 0.0

    def note(self, count: int = 1) -> None:
        """Count completions, and record their time."""
        self.count += count
        self.last = time.monotonic()


class Worker(ABC):
    """A worker of one job queue."""

    def __init__(self) -> None:
        self.completions = Completions()

    @abstractmethod
    async def start(self, concurrency: int, *, tuned: bool = False) -> None:
        """Start a worker in this process, and reset the completions.

        `tuned` means the settings that the queue's documentation advises for throughput. A job is complete,
        whether it succeeded or failed, when the queue reports it. If the queue has no such event, the job is
        complete when its task ends.
        """

    async def completed(self) -> tuple[int, float]:
        """Return the number of jobs completed since the start, and the monotonic time of the last."""
        return self.completions.count, self.completions.last

    @abstractmethod
    async def stop(self) -> None:
        """Stop the worker."""


class Driver(Worker):
    """The commands of a driver."""

    def __init__(self) -> None:
        super().__init__()
        self.probes = Probes()

    @abstractmethod
    async def install(self) -> None:
        """Install the queue's schema, unless it is installed."""

    @abstractmethod
    async def clear(self) -> None:
        """Remove all jobs."""

    @abstractmethod
    async def enqueue(
        self, task: str, count: int, how: str = "bulk", queues: int = 0, seconds: float = 0.0
    ) -> None:
        """Add jobs.

        Args:
            task: The name of the task.
            count: The number of jobs.
            how: All at once (`bulk`), one after another (`single`), or the same in ten loops (`ten`).
            queues: The number of serial queues to spread the jobs over in turn, or 0 for none.
            seconds: The duration of the task `sleep`.
        """

    @abstractmethod
    async def send(self, payload: dict[str, float], *, delay: float | None = None) -> None:
        """Add one job of the task `probe`, to run at once or after a delay."""

    async def probe(self, samples: int) -> list[float]:
        """Return the latencies of probes to an idle worker: each is sent shortly after the last one ran."""
        latencies = []
        for _ in range(samples):
            await asyncio.sleep(PAUSE)
            await self.send({"sent": time.monotonic()})
            latencies += await self.probes.take(1)
        return latencies

    async def feed(self, rate: float, count: int) -> None:
        """Send probes at an even rate per second."""
        start = time.monotonic()
        for number in range(count):
            await asyncio.sleep(max(0.0, start + number / rate - time.monotonic()))
            await self.send({"sent": time.monotonic()})

    async def schedule(self, delays: list[float]) -> None:
        """Send probes that are due later."""
        for delay in delays:
            await self.send({"due": time.time() + delay}, delay=delay)

    async def received(self, count: int) -> list[float]:
        """Return the latencies of a number of probes that another process sent."""
        return await self.probes.take(count)


def serve(make: type[Worker]) -> None:
    """Answer commands until the input ends."""
    asyncio.run(_serve(make))


async def _serve(make: type[Worker]) -> None:
    driver = make()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        arguments: dict[str, Any] = json.loads(line)
        start = time.perf_counter()
        try:
            command = arguments.pop("command")
            if not hasattr(driver, command):
                raise UnsupportedError(command)  # noqa: TRY301 - reported like any other error
            value = await getattr(driver, command)(**arguments)
            answer = {"value": value, "seconds": time.perf_counter() - start}
        except Exception as error:  # noqa: BLE001 - the benchmark reports it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
