"""The loop of the live view: refresh, draw, and carry out actions."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

from rich.live import Live

from graphile_worker._client.bulk import Change
from graphile_worker.cli.live.details import Details
from graphile_worker.cli.live.snapshot import take_snapshot
from graphile_worker.cli.live.terminal import keyboard, signals
from graphile_worker.cli.live.view import Action, View
from graphile_worker.cli.printing import console
from graphile_worker.errors import GraphileWorkerError

if TYPE_CHECKING:
    from graphile_worker.client import WorkerUtils

PAUSE_FACTOR = 50
"""The pause between refreshes is at least this many times as long as a refresh takes."""


class Top:
    """The live view of a queue.

    Args:
        utils: Utils for the queue.
        title: Title of the view.
        interval: Minimum number of seconds between refreshes.
    """

    def __init__(self, utils: WorkerUtils, title: str, interval: float) -> None:
        self._utils = utils
        self._interval = interval
        self._view = View(title)
        self._actions: asyncio.Queue[Action] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._refresh_now = asyncio.Event()
        self._end_signal = 0

    async def run(self) -> int:
        """Run until the user quits, and return the signal that ended the view, or 0."""
        with (
            Live(console=console(), screen=True, auto_refresh=False) as live,
            signals(self._end, self._changed.set),
            keyboard(self._press),
        ):
            tasks = [asyncio.create_task(coroutine) for coroutine in (self._refresh(), self._draw(live))]
            quitting = asyncio.create_task(self._run_actions())
            try:
                done, _ = await asyncio.wait([*tasks, quitting], return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in (*tasks, quitting):
                    task.cancel()
                    with suppress(asyncio.CancelledError, Exception):
                        await task
        return self._end_signal

    def _end(self, number: int) -> None:
        self._end_signal = 0 if number == signal.SIGINT else number
        self._actions.put_nowait(Action("quit"))

    def _press(self, key: str) -> None:
        action = self._view.press(key)
        if action is not None:
            self._actions.put_nowait(action)
        self._changed.set()

    async def _refresh(self) -> None:
        while True:
            pause = self._interval
            # Clear it before the queries, so that the next refresh shows changes that happen meanwhile.
            self._refresh_now.clear()
            if not self._view.is_paused:
                try:
                    previous = self._view.snapshot
                    self._view.snapshot = snapshot = await take_snapshot(self._utils, previous)
                    await self._read_details()
                    # Large queues are refreshed less often, to keep the load on the server low. The shorter
                    # of two durations counts: the first refresh connects, and any may have had to wait.
                    shorter = min(snapshot.duration, previous.duration if previous else 0.0)
                    pause = max(pause, PAUSE_FACTOR * shorter)
                    self._view.pause, self._view.error = pause, ""
                except GraphileWorkerError as error:
                    self._view.error = str(error)
                self._changed.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._refresh_now.wait()

    async def _read_details(self) -> None:
        """Refresh the job whose details are shown."""
        shown = self._view.detail
        if shown is not None:
            job = await self._utils.get_job(id=shown.job.id)
            shown.job, shown.is_gone = job or shown.job, job is None
            if job is not None:
                shown.progress = await self._utils.progress(job.id)

    async def _draw(self, live: Live) -> None:
        while True:
            self._changed.clear()
            width, height = live.console.size
            live.update(self._view.render(width, height), refresh=True)
            await self._changed.wait()

    async def _run_actions(self) -> None:
        while (action := await self._actions.get()).name != "quit":
            try:
                self._view.message = await self._run_action(action)
            except GraphileWorkerError as error:
                self._view.message = str(error)
            self._changed.set()

    async def _run_action(self, action: Action) -> str:
        """Carry out an action, and return the message for the user."""
        job_id = action.job_id
        if action.name == "show":
            job = await self._utils.get_job(id=job_id)
            self._view.detail = None
            if job is not None:
                self._view.detail = Details(job, await self._utils.progress(job.id))
            return "" if job else f"Job {job_id} no longer exists."
        change = Change.retry() if action.name == "retry" else Change.cancel("By graphile-worker top")
        batches = [batch async for batch in self._utils.many.change(change, [job_id])]
        changed = any(batch.changed for batch in batches)
        await self._read_details()
        self._refresh_now.set()
        if action.name == "retry":
            return (
                f"Job {job_id} will run again."
                if changed
                else f"Job {job_id} was not changed: it is running, or no longer exists."
            )
        if any(batch.requested for batch in batches):
            return f"Asked the worker to cancel job {job_id}."
        return f"Job {job_id} is cancelled." if changed else f"Job {job_id} was not changed: it has ended."
