"""`StatisticsService`: writes what the worker counted, and takes its turn at upkeep and at sampling."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker._db.queries import statistics as database
from graphile_worker._db.queries.progress import delete_progress
from graphile_worker._worker.maintenance.write_access import WriteAccess
from graphile_worker._worker.service import Service
from graphile_worker.errors import DatabaseError
from graphile_worker.workers import since_boot

if TYPE_CHECKING:
    from graphile_worker._base.logs import ScopedLogger
    from graphile_worker._db.connection.connect import Connection
    from graphile_worker._db.connection.session import Session
    from graphile_worker._worker.execution.tally import Tally

FLUSH_INTERVAL = 10.0
"""Seconds between two writes: what a crash loses of the charts."""
ROLL_UP_INTERVAL = 60.0
SAMPLE_INTERVAL = 15.0
_LONGEST_SAMPLE_INTERVAL = 600.0
_SAMPLE_TIMEOUT = 1.0
_SAMPLE_SHARE = 0.01
"""The share of the time that samples may take. After a slow one, the next is later."""
_FLUSH_TIMEOUT = 2.0
"""Seconds for which a worker that stops waits for its last write."""
_MAX_BATCH_AGE = 86_400.0
"""Seconds after which a batch that may have been written is dropped: see `FLUSHES_KEPT`."""


class _Batch(NamedTuple):
    number: int
    counts: str
    at: float


class StatisticsService(Service):
    """Writes the worker's counts every ten seconds, in rows of its own.

    A batch whose write was interrupted is sent again with the same number, and the database ignores a number
    that it has. So an outage neither loses nor doubles a count. Samples and roll-ups are done by one worker
    of the schema at a time.

    Args:
        worker_id: The worker's id.
        tally: The worker's counts.
        session: The connection to the database.
        logger: The worker's logger.
    """

    name = "statistics"

    def __init__(self, *, worker_id: str, tally: Tally, session: Session, logger: ScopedLogger) -> None:
        super().__init__(logger)
        self._worker_id = worker_id
        self._tally = tally
        self._session = session
        self._started = False
        self._batch: _Batch | None = None
        self._number = 0
        self._writing = asyncio.Lock()
        self._access = WriteAccess(
            session, ("statistics", "flushes", "depths", "turns"), "This worker writes no statistics", logger
        )
        self._sample_at = self._roll_up_at = 0.0

    async def tick(self) -> float:
        """Write the counts, and do what is due. The first tick waits, because many workers may start."""
        if not self._started:
            self._started = True
            return random.uniform(0.0, FLUSH_INTERVAL)  # noqa: S311 - no secret
        try:
            if await self._may_write():
                await self.flush()
                await self._take_turns()
        except DatabaseError as error:  # the worker's loop reports an outage
            self.logger.debug("Cannot write statistics: %s", error)
        return FLUSH_INTERVAL

    async def flush(self) -> None:
        """Write the counts.

        Raises:
            DatabaseError: They are not written, or that is unknown. The next call sends them again.
        """
        async with self._writing:
            while self._batch is not None or self._tally:
                if self._batch is None:
                    self._number += 1
                    counts = database.encode_batch(self._tally.take())
                    self._batch = _Batch(self._number, counts, since_boot())
                if since_boot() - self._batch.at < _MAX_BATCH_AGE:
                    await self._session.call(partial(self._write, self._batch), attempts=1)
                self._batch = None

    async def _write(self, batch: _Batch, on: Connection) -> None:
        await database.flush(on, self._session.schema, self._worker_id, batch.number, batch.counts)

    async def close(self) -> None:
        """Stop, and write what is left, unless the database does not answer soon."""
        await self.stop()
        if not self._tally and self._batch is None:
            return
        try:
            async with asyncio.timeout(_FLUSH_TIMEOUT):
                if await self._may_write():
                    await self.flush()
        except (DatabaseError, TimeoutError) as error:
            self.logger.debug("The last statistics are not written: %s", error)

    async def _may_write(self) -> bool:
        if await self._access.check():
            return True
        self._tally.take()
        return False

    async def _take_turns(self) -> None:
        now = monotonic()
        if now >= self._sample_at:
            self._sample_at = now + SAMPLE_INTERVAL - 1.0
            if await self._take_turn("sample", SAMPLE_INTERVAL):
                await self.sample()
        if now >= self._roll_up_at:
            self._roll_up_at = now + ROLL_UP_INTERVAL / 2
            if await self._take_turn("roll_up", ROLL_UP_INTERVAL):
                await self.roll_up()

    async def _take_turn(self, name: str, interval: float) -> bool:
        schema = self._session.schema
        return await self._session.call(lambda on: database.take_turn(on, schema, name, interval), attempts=1)

    async def sample(self) -> None:
        """Store how many jobs there are. If that takes long, the next sample of any worker is later."""
        schema, started = self._session.schema, monotonic()
        is_stored = await self._session.call(
            lambda on: database.sample_depths(on, schema, _SAMPLE_TIMEOUT), attempts=1
        )
        wait = min((monotonic() - started) / _SAMPLE_SHARE, _LONGEST_SAMPLE_INTERVAL)
        if not is_stored:
            wait = _LONGEST_SAMPLE_INTERVAL
            self.logger.info(
                "Counting the jobs took longer than %g s; the next sample is in %d min",
                _SAMPLE_TIMEOUT,
                wait / 60,
            )
        if wait > SAMPLE_INTERVAL:
            await self._session.call(
                lambda on: database.postpone_turn(on, schema, "sample", wait), attempts=1
            )

    async def roll_up(self) -> None:
        """Merge old rows, delete the oldest, and delete the progress of jobs that no longer exist."""
        schema = self._session.schema
        await self._session.call(lambda on: database.roll_up(on, schema), attempts=1)
        await self._session.call(lambda on: delete_progress(on, schema, None), attempts=1)
