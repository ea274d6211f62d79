"""The load: adds and removes jobs continuously, also during outages, and records what it knows of each."""

from __future__ import annotations

import asyncio
import json
import random
from datetime import timedelta
from typing import TYPE_CHECKING

from chaos.ledger import AddRequest, AddResult, JobRemoved, Ledger, RemoveRequest, now
from chaos.server import Unreachable
from chaos.tasks import ASYNC, FORK, HOLD_CONNECTION, HOLD_GIL, PROCESS, THREAD
from graphile_worker import GraphileWorkerError, WorkerUtils

if TYPE_CHECKING:
    from chaos.server import Server

ROLE = "feeder"
_QUEUES = 6
_KEYS, _KEYS_OF_QUEUE = 12, 2
_ERROR_DELAY = 0.2
_MOST_BEHIND = 0.1
# The shares of jobs with each property, from 0 to 1.
QUEUED_SHARE = 0.35
_KEYED_SHARE, _LONG_SHARE, _FAILING_SHARE, _DOOMED_SHARE = 0.15, 0.08, 0.1, 0.02
_VERY_LONG_SHARE = 0.004
_IN_SQL_SHARE, _REMOVED_SHARE = 0.3, 0.05
_MOST_FAILURES = 2
"""Few, because each failure makes the next delay longer: 2.7 s, 7.4 s, 20 s."""
_DOOMED_ATTEMPTS = 2
_LONGEST_DELAY = 1.5
"""The longest delay of keyed jobs, in seconds, so that there are jobs to replace and to remove."""
_ADD = """
    select id from graphile_worker.add_job(
      $1, $2::text::json, queue_name => $3, job_key => $4, max_attempts => $5,
      run_at => now() + $6::float8 * interval '1 second'
    )"""
_REMOVE = "select id, locked_at is not null as running from graphile_worker.remove_job($1)"


class Feeder:
    """The producer of jobs of all kinds, at a given rate.

    Args:
        server: The server.
        ledger: The ledger of added and removed jobs.
        seed: The seed of the job properties.
        tasks: The tasks of the jobs.
        rate: Jobs per second.
        long: The longest duration of a long job, in seconds.
        very_long: The duration of the few very long jobs, in seconds. They cannot be interrupted.
        queued_share: The share of jobs in serial queues, from 0 to 1.
    """

    def __init__(
        self,
        server: Server,
        ledger: Ledger,
        *,
        seed: int,
        tasks: list[str],
        rate: float,
        long: float,
        very_long: float,
        queued_share: float = QUEUED_SHARE,
    ) -> None:
        self._ledger = ledger
        self._chance = random.Random(seed)
        self._tasks = tasks
        self._rate = rate
        self._long = long
        self._very_long = very_long
        self._queued_share = queued_share
        self._utils = WorkerUtils(server.dsn(ROLE))
        self._number = 0
        self.added = 0

    async def feed(self) -> None:
        """Add jobs until cancelled."""
        due = now()
        while True:
            request, delay = self._next()
            reached = await self.add(request, delay=delay)
            if self._chance.random() < _REMOVED_SHARE:
                reached = await self._remove(self._key(self._queue())) and reached
            if not reached:
                await asyncio.sleep(_ERROR_DELAY)
            # Jobs that could not be added in time are skipped, not added in a burst later.
            due = max(due + 1 / self._rate, now() - _MOST_BEHIND)
            await asyncio.sleep(max(due - now(), 0))

    async def add_disruptive(self, task: str, seconds: float) -> str | None:
        """Add a job that is a fault. Return its token if it was added for certain."""
        request = AddRequest(at=now(), token=self._token(), task=task, seconds=seconds)
        return request.token if await self.add(request) else None

    async def add(self, request: AddRequest, *, delay: float = 0.0) -> bool:
        """Add a job. Return whether it was added for certain.

        A job whose fate is unknown is not added again: the feeder continues with the next one.
        """
        self._ledger.write(request)
        payload = {
            "token": request.token,
            "fails": request.fails,
            "seconds": request.seconds,
            "queue": request.queue,
        }
        try:
            add = self._add_in_sql if request.in_sql else self._add_in_python
            job_id = await add(request, payload, delay)
        except (*Unreachable, GraphileWorkerError) as error:
            self._ledger.write(AddResult(at=now(), token=request.token, problem=repr(error)))
            return False
        self._ledger.write(AddResult(at=now(), token=request.token, job=job_id))
        self.added += 1
        return True

    async def _add_in_python(self, request: AddRequest, payload: dict[str, object], delay: float) -> int:
        job = await self._utils.add_job(
            request.task,
            payload,
            queue_name=request.queue,
            job_key=request.key,
            max_attempts=request.max_attempts,
            run_at=timedelta(seconds=delay) if delay else None,
        )
        return job.id

    async def _add_in_sql(self, request: AddRequest, payload: dict[str, object], delay: float) -> int:
        async with self._utils.connection() as connection:
            job_id: int = await connection.fetchval(
                _ADD,
                request.task,
                json.dumps(payload),
                request.queue,
                request.key,
                request.max_attempts,
                delay,
            )
        return job_id

    async def _remove(self, key: str) -> bool:
        """Remove the job with a key, in SQL. Return whether the outcome is known."""
        removing = RemoveRequest(at=now(), token=self._token(), key=key)
        self._ledger.write(removing)
        try:
            async with self._utils.connection() as connection:
                row = await connection.fetchrow(_REMOVE, key)
        except (*Unreachable, GraphileWorkerError):
            return False
        job, running = (row["id"], row["running"]) if row and row["id"] else (None, False)
        self._ledger.write(JobRemoved(at=now(), token=removing.token, job=job, running=running))
        return True

    async def close(self) -> None:
        """Disconnect."""
        await self._utils.close()

    def _token(self) -> str:
        self._number += 1
        return f"t{self._number}"

    def _next(self) -> tuple[AddRequest, float]:
        chance = self._chance
        seconds = chance.uniform(0.002, 0.05)
        if chance.random() < _LONG_SHARE:
            seconds = chance.uniform(0.25, 1.0) * self._long
        fails, max_attempts = 0, 25
        if chance.random() < _FAILING_SHARE:
            fails = chance.randint(1, _MOST_FAILURES)
        elif chance.random() < _DOOMED_SHARE:
            fails = max_attempts = _DOOMED_ATTEMPTS
        queue, key, delay = self._queue(), None, 0.0
        if queue is not None:
            seconds = min(seconds, self._long / 6)  # so that a queue catches up after it was blocked
        if fails == 0 and chance.random() < _KEYED_SHARE:
            key, delay = self._key(queue), chance.uniform(0, _LONGEST_DELAY)
        task = chance.choice(self._tasks)
        if task == THREAD and queue is key is None and chance.random() < _VERY_LONG_SHARE:
            seconds = self._very_long
        request = AddRequest(
            at=now(),
            token=self._token(),
            task=task,
            queue=queue,
            key=key,
            fails=fails,
            max_attempts=max_attempts,
            seconds=round(seconds, 3),
            in_sql=chance.random() < _IN_SQL_SHARE,
        )
        return request, delay

    def _queue(self) -> str | None:
        chance = self._chance
        return f"queue {chance.randrange(_QUEUES)}" if chance.random() < self._queued_share else None

    def _key(self, queue: str | None) -> str:
        """Return a key of that queue only, because a Node worker locks the queue it read with the job."""
        if queue is None:
            return f"key {self._chance.randrange(_KEYS)}"
        return f"key {self._chance.randrange(_KEYS_OF_QUEUE)} of {queue}"


PYTHON_TASKS = [ASYNC, THREAD, HOLD_CONNECTION, PROCESS]
NODE_TASKS = [ASYNC]
DISRUPTIVE_TASKS = {"hold gil": HOLD_GIL, "fork": FORK}
