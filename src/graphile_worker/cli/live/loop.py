"""Looking at a queue again and again, until somebody has seen enough."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

from rich.live import Live

from graphile_worker.cli.live.details import Details
from graphile_worker.cli.live.snapshot import look
from graphile_worker.cli.live.terminal import keyboard, signals
from graphile_worker.cli.live.view import View, Wish
from graphile_worker.cli.printing import console
from graphile_worker.errors import GraphileWorkerError
from graphile_worker.many_jobs import Change

if TYPE_CHECKING:
    from graphile_worker.client import WorkerUtils

SHARE = 50
"""Looks may take about one part of so many of the time."""


class Top:
    """The view, and what keeps it current.

    Args:
        utils: The queue.
        title: What it is.
        interval: Seconds between looks, at least.
    """

    def __init__(self, utils: WorkerUtils, title: str, interval: float) -> None:
        self._utils = utils
        self._interval = interval
        self._view = View(title)
        self._wishes: asyncio.Queue[Wish] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._again = asyncio.Event()
        self._ended_by = 0

    async def run(self) -> int:
        """Until it is quit; the signal that ended it, or 0."""
        with (
            Live(console=console(), screen=True, auto_refresh=False) as live,
            signals(self._end, self._changed.set),
            keyboard(self._press),
        ):
            tasks = [asyncio.create_task(work) for work in (self._look(), self._show(live))]
            quitting = asyncio.create_task(self._obey())
            try:
                done, _ = await asyncio.wait([*tasks, quitting], return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in (*tasks, quitting):
                    task.cancel()
                    with suppress(asyncio.CancelledError, Exception):
                        await task
        return self._ended_by

    def _end(self, number: int) -> None:
        self._ended_by = 0 if number == signal.SIGINT else number
        self._wishes.put_nowait(Wish("quit"))

    def _press(self, key: str) -> None:
        wish = self._view.press(key)
        if wish is not None:
            self._wishes.put_nowait(wish)
        self._changed.set()

    async def _look(self) -> None:
        while True:
            pause = self._interval
            self._again.clear()  # before it: what is changed while we look is to be seen by the next one
            if not self._view.stands_still:
                try:
                    before = self._view.snapshot
                    self._view.snapshot = seen = await look(self._utils, before)
                    await self._read_details()
                    # The larger the queue the rarer the look, so that it costs the server next to nothing.
                    # One alone does not tell: the first has to connect, and any may have had to wait.
                    pause = max(pause, SHARE * min(seen.took, before.took if before else 0.0))
                    self._view.pause, self._view.trouble = pause, ""
                except GraphileWorkerError as error:
                    self._view.trouble = str(error)
                self._changed.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._again.wait()

    async def _read_details(self) -> None:
        """Of the job that somebody looks at, as it is now."""
        shown = self._view.detail
        if shown is not None:
            job = await self._utils.get_job(id=shown.job.id)
            shown.job, shown.is_gone = job or shown.job, job is None

    async def _show(self, live: Live) -> None:
        while True:
            self._changed.clear()
            width, height = live.console.size
            live.update(self._view.render(width, height), refresh=True)
            await self._changed.wait()

    async def _obey(self) -> None:
        while (wish := await self._wishes.get()).what != "quit":
            try:
                self._view.message = await self._grant(wish)
            except GraphileWorkerError as error:
                self._view.message = str(error)
            self._changed.set()

    async def _grant(self, wish: Wish) -> str:
        job_id = wish.job_id
        if wish.what == "look":
            job = await self._utils.get_job(id=job_id)
            self._view.detail = None if job is None else Details(job)
            return "" if job else f"Job {job_id} is gone."
        change = Change.retry() if wish.what == "retry" else Change.cancel("By graphile-worker top")
        done = [batch async for batch in self._utils.many.change(change, [job_id])]
        changed = any(batch.changed for batch in done)
        await self._read_details()
        self._again.set()
        if wish.what == "retry":
            return (
                f"Job {job_id} runs again."
                if changed
                else f"Job {job_id} was not changed: it runs, or is gone."
            )
        if any(batch.requested for batch in done):
            return f"The worker of job {job_id} was asked to cancel it."
        return f"Job {job_id} is cancelled." if changed else f"Job {job_id} was not changed: it is over."
