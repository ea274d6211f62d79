"""graphile_worker under a long load: it counts how often each job ran."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ours import Ours
from protocol import serve

from graphile_worker import JobSpec, WorkerUtils

if TYPE_CHECKING:
    from typing import Any

_MOST_COMPLAINTS = 10
# Of these numbers none divides another, so some jobs of queues fail too.
_IN_QUEUE, _FAILS, _QUEUES = 5, 19, 50


class OnPurpose(Exception):  # noqa: N818 - it says all
    """The failure of a job that is to fail once."""


class Complaints(logging.Handler):
    """What the worker has to say, but for failures that we caused."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the first ones."""
        ours = record.exc_info and isinstance(record.exc_info[1], OnPurpose)
        if not ours and len(self.messages) < _MOST_COMPLAINTS:
            self.messages.append(record.getMessage())


class Soak(Ours):
    """One process that adds jobs, or one that runs them."""

    def __init__(self) -> None:
        super().__init__()
        self._app.task("work")(self._work)
        self._adding = WorkerUtils()
        self._runs = self._successes = bytearray()
        self._finished = 0
        self._complaints = Complaints()
        logger = logging.getLogger("graphile_worker")
        logger.addHandler(self._complaints)
        logger.propagate = False

    async def expect(self, jobs: int) -> None:
        """So many jobs will come; all memory for counting them is taken now, so that it does not grow."""
        self._runs, self._successes = bytearray(jobs), bytearray(jobs)

    async def _work(self, number: int) -> None:
        self._runs[number] += 1
        if number % _FAILS == 0 and self._runs[number] == 1:
            raise OnPurpose
        self._successes[number] += 1
        self._finished += 1

    async def add(self, first: int, count: int) -> None:
        """Add the jobs from that number on."""
        await self._adding.add_jobs(
            JobSpec(
                "work",
                {"number": number},
                queue_name=f"queue {number // _IN_QUEUE % _QUEUES}" if number % _IN_QUEUE == 0 else None,
            )
            for number in range(first, first + count)
        )

    async def hang_up(self) -> None:
        """Add no more: the server then has counted what was added."""
        await self._adding.close()

    async def finished(self) -> int:
        """How many jobs succeeded so far."""
        return self._finished

    async def latencies(self, count: int = 0) -> list[float]:
        """Of the probes that ran since this was asked last: those that there are, but so many at least."""
        return await self.probes.take(count)

    async def tally(self) -> dict[str, Any]:
        """How often the jobs ran."""
        jobs = len(self._successes)
        never, once = self._successes.count(0), self._successes.count(1)
        return {
            "jobs": jobs,
            "never": never,
            "once": once,
            "more": jobs - never - once,
            "runs": sum(self._runs),
            "failures": sum(runs > 0 for runs in self._runs[::_FAILS]),
            "recorded": self.completions.count,
            "complaints": self._complaints.messages,
        }


if __name__ == "__main__":
    serve(Soak)
