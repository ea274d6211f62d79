"""`BlockedLoop`: warns about jobs that block the event loop, with the place in the code.

A thread samples the event loop while jobs run. A task that is running in several consecutive samples blocks
the loop.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from graphile_worker._base.durations import format_seconds, seconds
from graphile_worker._base.logs import library_logger as logger
from graphile_worker._base.tracebacks import format_stack
from graphile_worker.middleware.base import Middleware

if TYPE_CHECKING:
    from contextvars import Context
    from types import FrameType

    from graphile_worker._base.durations import Duration
    from graphile_worker.context import JobContext
    from graphile_worker.middleware.base import Running

_MAX_FRAMES = 5
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_SAMPLES = 4
"""Number of samples within the threshold."""
_JOB: ContextVar[JobContext[Any] | None] = ContextVar("graphile_worker_job_on_the_loop", default=None)
"""The running job. The asyncio tasks that a job starts inherit it."""


class BlockedLoop(Middleware):
    """Middleware that warns about a job that blocks the event loop, and so all other jobs of the worker.

    The first warning comes while the loop is blocked, with the place in the code. A second one tells how long
    it took. asyncio tasks that a job started, for example with ``asyncio.gather``, count as the job. Other
    code that blocks the event loop while jobs run is reported too. Move blocking work to a thread (a plain
    ``def``) or to a process.

    Args:
        threshold: How long a job may block the loop without a warning, in seconds or as a timedelta.

    Example:
        >>> from graphile_worker import App
        >>> from graphile_worker.middleware import BlockedLoop
        >>> app = App(dsn=dsn, middleware=[BlockedLoop(0.5)])
    """

    def __init__(self, threshold: Duration = 0.5) -> None:
        self._threshold = seconds("threshold", threshold, "more than 0")
        self._loops: dict[asyncio.AbstractEventLoop, _WatchedLoop] = {}
        self._watching = threading.Lock()

    async def execute(self, ctx: JobContext[Any], proceed: Running) -> Any:
        """Run the job while a thread samples its event loop."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - for the type checker
        running = task.get_loop()
        loop = self._loops.get(running)
        if loop is None:
            loop = self._loops[running] = _WatchedLoop(running)
        loop.jobs[task] = ctx
        _JOB.set(ctx)
        if self._watching.acquire(blocking=False):
            self._start_thread()
        try:
            return await proceed()
        finally:
            loop.jobs.pop(task, None)  # already removed if the same middleware is in the list twice
            if not loop.jobs:
                self._loops.pop(running, None)

    def _start_thread(self) -> None:
        threading.Thread(target=self._sample_loops, name="graphile-worker blocked loop", daemon=True).start()

    def _sample_loops(self) -> None:
        pause = threading.Event()
        try:
            while self._loops:
                for running, loop in tuple(self._loops.items()):
                    loop.sample()
                    if running.is_closed():
                        self._loops.pop(running, None)
                pause.wait(self._threshold / _SAMPLES)
        finally:
            self._watching.release()
        # A job may have started after the loop above ended and before the lock was released.
        if self._loops and self._watching.acquire(blocking=False):
            self._start_thread()


class _Step:
    """What runs on the event loop between two awaits: an asyncio task, or a callback."""

    def __init__(self, task: asyncio.Task[Any] | None) -> None:
        self.task = task
        self.since = monotonic()
        self.samples = 0
        self.job: JobContext[Any] | None = None

    def end(self) -> None:
        """Report the duration of a step that blocked the loop and has ended, or is about to."""
        if self.samples >= _SAMPLES:
            self.warn("blocked the event loop for about ", format_seconds(monotonic() - self.since))

    def warn(self, problem: str, detail: str) -> None:
        """Log a warning about the step."""
        if self.job is None:
            logger.warning("Code outside of any job %s%s", problem, detail)
        else:
            job = self.job.job
            self.job.logger.warning("Job %d (%s) %s%s", job.id, job.task_identifier, problem, detail)


class _WatchedLoop:
    """An event loop that runs jobs, as the sampling thread sees it.

    The thread schedules a callback on the loop. Until the callback runs, the loop is busy with work that was
    already there. If that is the same task in each sample, the task blocks the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.jobs: dict[asyncio.Task[Any], JobContext[Any]] = {}
        self._loop = loop
        self._thread = threading.get_ident()
        self._step: _Step | None = None
        self._changing = threading.Lock()

    def sample(self) -> None:
        """Take a sample. Called on the sampling thread."""
        task = asyncio.current_task(self._loop)
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001
        with self._changing:
            step = self._step
            if step is None:
                self._step = _Step(task)
                with suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._on_callback)
            elif step.task is not task:
                step.end()
                self._step = _Step(task)
            else:
                # Samples are counted instead of seconds: a paused process takes none.
                step.samples += 1
                if step.samples == _SAMPLES:
                    step.job = None if task is None else self.jobs.get(task) or _job_of(task, frame)
                    step.warn(
                        "is blocking the event loop, and all other jobs with it, at:\n", format_stack(frame)
                    )

    def _on_callback(self) -> None:
        with self._changing:
            step, self._step = self._step, None
        if step is not None:
            step.end()


def _job_of(task: asyncio.Task[Any], frame: FrameType | None) -> JobContext[Any] | None:
    """Return the job that started the asyncio task."""
    context = task.get_context() if hasattr(task, "get_context") else _context_at(frame)
    return None if context is None else context.get(_JOB)


def _context_at(frame: FrameType | None) -> Context | None:
    """Return the context variables of the running asyncio handle. Other event loops do not expose them."""
    while frame is not None:
        if frame.f_code is asyncio.Handle._run.__code__:  # noqa: SLF001
            found: Context = frame.f_locals["self"]._context  # noqa: SLF001
            return found
        frame = frame.f_back
    return None
