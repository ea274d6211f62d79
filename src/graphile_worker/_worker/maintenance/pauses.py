"""`Pauses`: reads what is paused, so that the worker claims no jobs of it."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

from graphile_worker._base.durations import format_duration
from graphile_worker._db.queries import pauses as queries
from graphile_worker._worker.service import Service
from graphile_worker.errors import DatabaseError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from graphile_worker._base.logs import ScopedLogger
    from graphile_worker._db.connection.session import Session
    from graphile_worker._db.queries.pauses import ActivePause
    from graphile_worker._worker.execution.claimed_jobs import ClaimedJobs

_IDLE_INTERVAL = 60.0
"""Seconds between two reads while notifications arrive."""


class Pauses(Service):
    """Reads the pauses after a notification, when one ends, and regularly.

    It also ends pauses whose time is over, which releases paused queues.

    Args:
        tasks: The worker's tasks.
        claimed_jobs: The worker's claimed jobs.
        session: The connection to the database.
        poll_interval: Seconds between two reads if notifications do not arrive.
        is_notified: Returns whether notifications arrive.
        turn: Held during a read, so that services that read after a notification share a connection.
        on_resume: Called when jobs may be claimed that were paused before.
        logger: The worker's logger.
    """

    name = "pauses"

    def __init__(
        self,
        *,
        tasks: Iterable[str],
        claimed_jobs: ClaimedJobs,
        session: Session,
        poll_interval: float,
        is_notified: Callable[[], bool],
        turn: asyncio.Lock,
        on_resume: Callable[[], None],
        logger: ScopedLogger,
    ) -> None:
        super().__init__(logger)
        self._tasks = frozenset(tasks)
        self._claimed_jobs = claimed_jobs
        self._session = session
        self._poll_interval = poll_interval
        self._is_notified = is_notified
        self._turn = turn
        self._on_resume = on_resume
        self._known: set[tuple[str, str]] = set()
        self._notified = False
        self._due = 0.0

    def wake(self) -> None:
        """Read the pauses now, because they may have changed."""
        self._notified = True
        super().wake()

    async def tick(self) -> float:
        """Read the pauses if that is due. At the start, the worker has just read them."""
        if self._notified or monotonic() >= self._due:
            self._notified, self._due = False, monotonic() + self._poll_interval
            try:
                await self.poll()
            except DatabaseError as error:  # the worker's loop reports the outage
                self.logger.debug("Cannot read the pauses: %s", error)
        return max(0.0, self._due - monotonic())

    async def poll(self) -> None:
        """Read the pauses, obey them, and compute when to read again."""
        schema = self._session.schema
        async with self._turn:
            stored = await self._session.call(lambda on: queries.read_pauses(on, schema))
            found = [pause for pause in stored if pause.seconds is None or pause.seconds > 0]
            held = []
            if len(found) < len(stored):
                held = await self._session.call(lambda on: queries.end_expired(on, schema))
        self._obey(found)
        await self._settle(held)
        delay = _IDLE_INTERVAL if self._is_notified() else self._poll_interval
        ends = [pause.seconds for pause in found if pause.seconds is not None]
        self._due = monotonic() + min([delay, *ends])

    async def _settle(self, held: Iterable[tuple[str, str]]) -> None:
        """Release the queues whose locks Node or Rust workers have got back, unless a job of them runs."""
        await asyncio.gather(*(self._settle_queue(queue, worker) for queue, worker in held))

    async def _settle_queue(self, queue: str, worker: str) -> None:
        schema, call = self._session.schema, self._session.call
        locked_at = await call(lambda on: queries.read_lock(on, schema, queue, worker))
        if locked_at is not None:
            await asyncio.sleep(queries.LATE_STATEMENT)
            await call(lambda on: queries.release_idle_queue(on, schema, queue, worker, locked_at))

    def _obey(self, found: list[ActivePause]) -> None:
        tasks = {pause.name for pause in found if pause.kind == "task"} & self._tasks
        if any(pause.kind == "all" for pause in found):
            tasks = set(self._tasks)
        queues = {pause.name for pause in found if pause.kind == "queue"}
        may_claim_more = bool(self._claimed_jobs.claim_limiter.paused - tasks)
        self._claimed_jobs.pause(frozenset(tasks), frozenset(queues))
        self._log_changes(found)
        if may_claim_more:
            self._on_resume()

    def _log_changes(self, found: list[ActivePause]) -> None:
        now = {(pause.kind, pause.name): pause for pause in found if pause.kind != "queue"}
        for subject in now.keys() - self._known:
            pause = now[subject]
            self.logger.warning(
                "Paused by %s%s: %s%s",
                pause.paused_by,
                "" if pause.seconds is None else f" for {format_duration(pause.seconds)}",
                _words(*subject),
                "" if pause.reason is None else f" ({pause.reason})",
            )
        for subject in self._known - now.keys():
            self.logger.info("No longer paused: %s", _words(*subject))
        self._known = set(now)


def _words(kind: str, name: str) -> str:
    return "all tasks" if kind == "all" else f"the {kind} {name!r}"
