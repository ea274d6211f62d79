"""The driver of the soak test: graphile_worker under a long load, with a count of each job's runs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from protocol import serve
from python import PythonDriver

from graphile_worker import JobSpec, WorkerUtils

if TYPE_CHECKING:
    from typing import Any

_MOST_MESSAGES = 10
# None of these numbers divides another, so some jobs in queues fail too.
_IN_QUEUE, _FAILS, _QUEUES = 5, 19, 50


class IntendedError(Exception):
    """The failure of a job that is meant to fail once."""


class FirstMessages(logging.Handler):
    """The first warnings and errors that the worker logs, except for intended failures."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the first messages."""
        intended = record.exc_info and isinstance(record.exc_info[1], IntendedError)
        if not intended and len(self.messages) < _MOST_MESSAGES:
            self.messages.append(record.getMessage())


class Soak(PythonDriver):
    """The driver of a process that adds jobs, or of one that runs them."""

    def __init__(self) -> None:
        super().__init__()
        self._app.task("work")(self._work)
        self._adding = WorkerUtils()
        self._runs = self._successes = bytearray()
        self._finished = 0
        self._first_messages = FirstMessages()
        logger = logging.getLogger("graphile_worker")
        logger.addHandler(self._first_messages)
        logger.propagate = False

    async def expect(self, jobs: int) -> None:
        """Allocate the memory to count a number of jobs now, so that it does not grow during the run."""
        self._runs, self._successes = bytearray(jobs), bytearray(jobs)

    async def _work(self, number: int) -> None:
        self._runs[number] += 1
        if number % _FAILS == 0 and self._runs[number] == 1:
            raise IntendedError
        self._successes[number] += 1
        self._finished += 1

    async def add(self, first: int, count: int) -> None:
        """Add jobs, numbered from the first."""
        await self._adding.add_jobs(
            JobSpec(
                "work",
                {"number": number},
                queue_name=f"queue {number // _IN_QUEUE % _QUEUES}" if number % _IN_QUEUE == 0 else None,
            )
            for number in range(first, first + count)
        )

    async def disconnect(self) -> None:
        """Close the connection that adds jobs, so that the server counts all of its inserts."""
        await self._adding.close()

    async def finished(self) -> int:
        """Return the number of jobs that succeeded so far."""
        return self._finished

    async def latencies(self, count: int = 0) -> list[float]:
        """Return the latencies of the probes since the last call. Wait until there are at least `count`."""
        return await self.probes.take(count)

    async def tally(self) -> dict[str, Any]:
        """Return how often the jobs ran."""
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
            "log_messages": self._first_messages.messages,
        }


if __name__ == "__main__":
    serve(Soak)
