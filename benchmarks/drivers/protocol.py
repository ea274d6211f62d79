"""What a driver is asked, and how it answers.

A driver is a process that uses one job queue as its users would. It reads a question per line from its
standard input, ``{"ask": "start", "concurrency": 24}``, and answers each with a line on its standard output:
``{"value": ..., "seconds": ...}`` with the time it took, or ``{"error": "why not"}``. The connection is told
by the usual ``PG*`` variables. What it does is what `Driver` says; node.mjs does the same for Node.

The tasks are `trivial` (async, does nothing), `sync` (the same as a plain function), `sleep` (waits for
``payload["seconds"]``), `fail` (raises, and has one attempt only) and `probe`, whose first line notes how
long ago it was sent (``payload["sent"]``, the monotonic clock, which all processes of a machine share) or was
due (``payload["due"]``, seconds since 1970).

The drivers of other queues run in an environment of their own, so this imports nothing but the standard
library.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from abc import ABC, abstractmethod
from typing import Any

PAUSE = 0.005


class Unsupported(Exception):  # noqa: N818 - not an error: the queue has no such thing
    """The queue cannot do that."""


class Probes:
    """What the probes noted."""

    def __init__(self) -> None:
        self._latencies: list[float] = []
        self._arrived = asyncio.Event()

    def note(self, payload: dict[str, float]) -> None:
        """The first line of the task `probe`."""
        if "sent" in payload:
            self._latencies.append(time.monotonic() - payload["sent"])
        else:
            self._latencies.append(time.time() - payload["due"])
        self._arrived.set()

    async def take(self, count: int) -> list[float]:
        """Seconds for each of so many probes, once they have run."""
        while len(self._latencies) < count:
            self._arrived.clear()
            await self._arrived.wait()
        latencies, self._latencies = self._latencies, []
        return latencies


class Completions:
    """How many jobs were completed, and when the last of them was."""

    def __init__(self) -> None:
        self.count = 0
        self.last = 0.0

    def note(self, count: int = 1) -> None:
        """So many more, just now."""
        self.count += count
        self.last = time.monotonic()


class Worker(ABC):
    """What runs jobs."""

    def __init__(self) -> None:
        self.completions = Completions()

    @abstractmethod
    async def start(self, concurrency: int, *, tuned: bool = False) -> None:
        """Begin to work, in this process; `tuned` as the documentation advises for throughput.

        From here on completions are counted anew. A job is complete, whether it succeeded or failed, when
        the queue says so; with a queue that does not say, when its task has ended.
        """

    async def completed(self) -> tuple[int, float]:
        """How many jobs were completed since the start, and the monotonic time of the last."""
        return self.completions.count, self.completions.last

    @abstractmethod
    async def stop(self) -> None:
        """Stop working."""


class Driver(Worker):
    """One job queue, as a benchmark uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.probes = Probes()

    @abstractmethod
    async def install(self) -> None:
        """Make the database ready; harmless if it is."""

    @abstractmethod
    async def clear(self) -> None:
        """Remove all jobs."""

    @abstractmethod
    async def enqueue(
        self, task: str, count: int, how: str = "bulk", queues: int = 0, seconds: float = 0.0
    ) -> None:
        """Add jobs.

        Args:
            task: Its name.
            count: How many.
            how: All at once (`bulk`), one after another (`single`), or so with ten of us at a time (`ten`).
            queues: Spread over so many serial queues, one job after the other; 0 for none.
            seconds: How long the task `sleep` is to wait.
        """

    @abstractmethod
    async def send(self, payload: dict[str, float], *, delay: float | None = None) -> None:
        """Add one job of the task `probe`, to run at once or after a delay."""

    async def probe(self, samples: int) -> list[float]:
        """Latencies of probes, each sent a little after the one before has run: to a worker that is idle."""
        latencies = []
        for _ in range(samples):
            await asyncio.sleep(PAUSE)
            await self.send({"sent": time.monotonic()})
            latencies += await self.probes.take(1)
        return latencies

    async def feed(self, rate: float, count: int) -> None:
        """Send probes evenly, so many per second."""
        start = time.monotonic()
        for number in range(count):
            await asyncio.sleep(max(0.0, start + number / rate - time.monotonic()))
            await self.send({"sent": time.monotonic()})

    async def schedule(self, delays: list[float]) -> None:
        """Send probes that are due later."""
        for delay in delays:
            await self.send({"due": time.time() + delay}, delay=delay)

    async def heard(self, count: int) -> list[float]:
        """The latencies of so many probes that others sent."""
        return await self.probes.take(count)


def serve(make: type[Worker]) -> None:
    """Answer until the input ends."""
    asyncio.run(_serve(make))


async def _serve(make: type[Worker]) -> None:
    driver = make()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        question: dict[str, Any] = json.loads(line)
        start = time.perf_counter()
        try:
            ask = question.pop("ask")
            if not hasattr(driver, ask):
                raise Unsupported(ask)  # noqa: TRY301 - it is told like all else
            value = await getattr(driver, ask)(**question)
            answer = {"value": value, "seconds": time.perf_counter() - start}
        except Exception as error:  # noqa: BLE001 - it is the benchmark's to tell
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
