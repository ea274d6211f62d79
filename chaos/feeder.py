"""Adds and removes jobs all the time, whatever happens to the database, and writes down what it knows."""

from __future__ import annotations

import asyncio
import json
import random
from datetime import timedelta
from typing import TYPE_CHECKING

from chaos.ledger import Answered, Asked, Ledger, Removed, Removing, now
from chaos.server import Unreachable
from chaos.tasks import ASYNC, FORK, HOLD_CONNECTION, HOLD_GIL, PROCESS, THREAD
from graphile_worker import GraphileWorkerError, WorkerUtils

if TYPE_CHECKING:
    from chaos.server import Server

ROLE = "feeder"
_QUEUES = 6
_KEYS, _KEYS_OF_QUEUE = 12, 2
_AFTER_TROUBLE = 0.2
_BEHIND = 0.1
OFTEN_QUEUED = 0.35
_OFTEN_KEYED, _OFTEN_LONG, _OFTEN_FAILING, _OFTEN_DOOMED = 0.15, 0.08, 0.1, 0.02
_OFTEN_VERY_LONG = 0.004
_OFTEN_IN_SQL, _OFTEN_REMOVED = 0.3, 0.05
_FAILURES = 2
"""At most, for each makes the next wait longer: 2.7 s, 7.4 s, 20 s."""
_DOOMED_ATTEMPTS = 2
_LATEST = 1.5
"""Keyed jobs may be due so many seconds later, so that there is something to replace and to remove."""
_ADD = """
    select id from graphile_worker.add_job(
      $1, $2::text::json, queue_name => $3, job_key => $4, max_attempts => $5,
      run_at => now() + $6::float8 * interval '1 second'
    )"""
_REMOVE = "select id, locked_at is not null as running from graphile_worker.remove_job($1)"


class Feeder:
    """Adds jobs of all kinds, so many in a second.

    Args:
        tasks: Their tasks.
        rate: How many in a second.
        long: Seconds that a long job takes at most.
        very_long: Seconds that some take which cannot be interrupted.
        often_queued: How many of them are in serial queues, from 0 to 1.
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
        often_queued: float = OFTEN_QUEUED,
    ) -> None:
        self._ledger = ledger
        self._chance = random.Random(seed)
        self._tasks = tasks
        self._rate = rate
        self._long = long
        self._very_long = very_long
        self._often_queued = often_queued
        self._utils = WorkerUtils(server.dsn(ROLE))
        self._number = 0
        self.added = 0

    async def feed(self) -> None:
        """Add jobs until this is cancelled."""
        due = now()
        while True:
            asked, later = self._next()
            well = await self.add(asked, later=later)
            if self._chance.random() < _OFTEN_REMOVED:
                well = await self._remove(self._key(self._queue())) and well
            if not well:
                await asyncio.sleep(_AFTER_TROUBLE)
            # What could not be added in time is left out, and not made up for in a burst.
            due = max(due + 1 / self._rate, now() - _BEHIND)
            await asyncio.sleep(max(due - now(), 0))

    async def nuisance(self, task: str, seconds: float) -> str | None:
        """Add one that is a fault; its token, if it is surely there."""
        asked = Asked(at=now(), token=self._token(), task=task, seconds=seconds)
        return asked.token if await self.add(asked) else None

    async def add(self, asked: Asked, *, later: float = 0.0) -> bool:
        """Add that job; whether it is surely there.

        One that nobody knows of is not added again: what comes next takes its place.
        """
        self._ledger.write(asked)
        payload = {
            "token": asked.token,
            "fails": asked.fails,
            "seconds": asked.seconds,
            "queue": asked.queue,
        }
        try:
            add = self._add_in_sql if asked.in_sql else self._add_in_python
            job_id = await add(asked, payload, later)
        except (*Unreachable, GraphileWorkerError) as error:
            self._ledger.write(Answered(at=now(), token=asked.token, problem=repr(error)))
            return False
        self._ledger.write(Answered(at=now(), token=asked.token, job=job_id))
        self.added += 1
        return True

    async def _add_in_python(self, asked: Asked, payload: dict[str, object], later: float) -> int:
        job = await self._utils.add_job(
            asked.task,
            payload,
            queue_name=asked.queue,
            job_key=asked.key,
            max_attempts=asked.max_attempts,
            run_at=timedelta(seconds=later) if later else None,
        )
        return job.id

    async def _add_in_sql(self, asked: Asked, payload: dict[str, object], later: float) -> int:
        async with self._utils.lend_connection() as connection:
            job_id: int = await connection.fetchval(
                _ADD, asked.task, json.dumps(payload), asked.queue, asked.key, asked.max_attempts, later
            )
        return job_id

    async def _remove(self, key: str) -> bool:
        """Remove the job of that key, in SQL; whether it is known what came of it."""
        removing = Removing(at=now(), token=self._token(), key=key)
        self._ledger.write(removing)
        try:
            async with self._utils.lend_connection() as connection:
                row = await connection.fetchrow(_REMOVE, key)
        except (*Unreachable, GraphileWorkerError):
            return False
        job, running = (row["id"], row["running"]) if row and row["id"] else (None, False)
        self._ledger.write(Removed(at=now(), token=removing.token, job=job, running=running))
        return True

    async def close(self) -> None:
        """Disconnect."""
        await self._utils.close()

    def _token(self) -> str:
        self._number += 1
        return f"t{self._number}"

    def _next(self) -> tuple[Asked, float]:
        chance = self._chance
        seconds = chance.uniform(0.002, 0.05)
        if chance.random() < _OFTEN_LONG:
            seconds = chance.uniform(0.25, 1.0) * self._long
        fails, max_attempts = 0, 25
        if chance.random() < _OFTEN_FAILING:
            fails = chance.randint(1, _FAILURES)
        elif chance.random() < _OFTEN_DOOMED:
            fails = max_attempts = _DOOMED_ATTEMPTS
        queue, key, later = self._queue(), None, 0.0
        if queue is not None:
            seconds = min(seconds, self._long / 6)  # or what was blocked for a while never catches up
        if fails == 0 and chance.random() < _OFTEN_KEYED:
            key, later = self._key(queue), chance.uniform(0, _LATEST)
        task = chance.choice(self._tasks)
        if task == THREAD and queue is key is None and chance.random() < _OFTEN_VERY_LONG:
            seconds = self._very_long
        asked = Asked(
            at=now(),
            token=self._token(),
            task=task,
            queue=queue,
            key=key,
            fails=fails,
            max_attempts=max_attempts,
            seconds=round(seconds, 3),
            in_sql=chance.random() < _OFTEN_IN_SQL,
        )
        return asked, later

    def _queue(self) -> str | None:
        chance = self._chance
        return f"queue {chance.randrange(_QUEUES)}" if chance.random() < self._often_queued else None

    def _key(self, queue: str | None) -> str:
        """Always of that queue: npm's workers lock the queue in which a job was when they looked."""
        if queue is None:
            return f"key {self._chance.randrange(_KEYS)}"
        return f"key {self._chance.randrange(_KEYS_OF_QUEUE)} of {queue}"


PYTHON_TASKS = [ASYNC, THREAD, HOLD_CONNECTION, PROCESS]
NODE_TASKS = [ASYNC]
NUISANCES = {"hold gil": HOLD_GIL, "fork": FORK}
