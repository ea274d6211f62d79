"""Says so when a job blocks the event loop: which one, and where."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from graphile_worker.durations import seconds, shown
from graphile_worker.logs import library_logger as logger
from graphile_worker.middleware.base import Middleware

if TYPE_CHECKING:
    from contextvars import Context
    from types import FrameType

    from graphile_worker.context import JobContext
    from graphile_worker.durations import Duration
    from graphile_worker.middleware.base import Running

_MOST_FRAMES = 5
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LOOKS = 4
"""How often to look in the time for which the event loop may be blocked."""
_JOB: ContextVar[JobContext[Any] | None] = ContextVar("graphile_worker_job_on_the_loop", default=None)
"""The job, for the tasks of asyncio's that it starts, too."""


class BlockedLoop(Middleware):
    """Warns of a job that keeps the event loop to itself, and with it all other jobs of the worker.

    It warns while it does, with the place in the code, and says afterwards how long it took. What the job has
    started, such as by ``asyncio.gather``, counts as the job. Whatever else blocks the event loop while jobs
    run is told too, as being none of them. Work of that kind belongs on a thread (a plain ``def``), or into a
    process.

    Args:
        threshold: For how long it may.

    Example:
        >>> from graphile_worker import App
        >>> from graphile_worker.middleware import BlockedLoop
        >>> app = App(dsn=dsn, middleware=[BlockedLoop(0.5)])
    """

    def __init__(self, threshold: Duration = 0.5) -> None:
        self._threshold = seconds("threshold", threshold, "more than 0")
        self._loops: dict[asyncio.AbstractEventLoop, _Loop] = {}
        self._watching = threading.Lock()

    async def execute(self, ctx: JobContext[Any], proceed: Running) -> Any:
        """Have somebody look on, for as long as there are jobs."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - for the type checker
        running = task.get_loop()
        loop = self._loops.get(running)
        if loop is None:
            loop = self._loops[running] = _Loop(running)
        loop.jobs[task] = ctx
        _JOB.set(ctx)
        if self._watching.acquire(blocking=False):
            self._watch()
        try:
            return await proceed()
        finally:
            loop.jobs.pop(task, None)  # none if it stands around itself
            if not loop.jobs:
                self._loops.pop(running, None)

    def _watch(self) -> None:
        threading.Thread(target=self._look_on, name="graphile-worker blocked loop", daemon=True).start()

    def _look_on(self) -> None:
        pause = threading.Event()
        try:
            while self._loops:
                for running, loop in tuple(self._loops.items()):
                    loop.look()
                    if running.is_closed():
                        self._loops.pop(running, None)
                pause.wait(self._threshold / _LOOKS)
        finally:
            self._watching.release()
        # Of one that began meanwhile, and took us for watching.
        if self._loops and self._watching.acquire(blocking=False):
            self._watch()


class _Step:
    """What has the event loop, from one await to the next: a task of asyncio's, or something else."""

    def __init__(self, task: asyncio.Task[Any] | None) -> None:
        self.task = task
        self.since = monotonic()
        self.looks = 0
        self.job: JobContext[Any] | None = None

    def end(self) -> None:
        """It is over, or nearly so."""
        if self.looks >= _LOOKS:
            self.warn("blocked the event loop for about ", shown(monotonic() - self.since))

    def warn(self, does: str, detail: str) -> None:
        """Say that of it."""
        if self.job is None:
            logger.warning("Something that is no job %s%s", does, detail)
        else:
            job = self.job.job
            self.job.logger.warning("Job %d (%s) %s%s", job.id, job.task_identifier, does, detail)


class _Loop:
    """An event loop that has jobs, as a thread beside it sees it.

    The thread asks it to answer. Until it does, it is not through with what it had to do when it was asked;
    and if that is the same task at each look, that blocks it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.jobs: dict[asyncio.Task[Any], JobContext[Any]] = {}
        self._loop = loop
        self._thread = threading.get_ident()
        self._step: _Step | None = None
        self._changing = threading.Lock()

    def look(self) -> None:
        """See what it does. Called on the other thread."""
        task = asyncio.current_task(self._loop)
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001
        with self._changing:
            step = self._step
            if step is None:
                self._step = _Step(task)
                with suppress(RuntimeError):  # it is closed
                    self._loop.call_soon_threadsafe(self._answer)
            elif step.task is not task:
                step.end()
                self._step = _Step(task)
            else:
                # Counted, and not by the clock: whoever was stopped for long has not been looking.
                step.looks += 1
                if step.looks == _LOOKS:
                    step.job = None if task is None else self.jobs.get(task) or _job_of(task, frame)
                    step.warn("is blocking the event loop, and all other jobs with it, at:\n", _where(frame))

    def _answer(self) -> None:
        with self._changing:
            step, self._step = self._step, None
        if step is not None:
            step.end()


def _job_of(task: asyncio.Task[Any], frame: FrameType | None) -> JobContext[Any] | None:
    """The job that started the task."""
    context = task.get_context() if hasattr(task, "get_context") else _context_at(frame)
    return None if context is None else context.get(_JOB)


def _context_at(frame: FrameType | None) -> Context | None:
    """The context variables with which asyncio runs that; other event loops do not show it."""
    while frame is not None:
        if frame.f_code is asyncio.Handle._run.__code__:  # noqa: SLF001
            found: Context = frame.f_locals["self"]._context  # noqa: SLF001
            return found
        frame = frame.f_back
    return None


def _where(frame: FrameType | None) -> str:
    """The innermost places, as a traceback shows them; those of this library tell nothing of the job."""
    steps = [] if frame is None else traceback.extract_stack(frame)
    theirs = [step for step in steps if not step.filename.startswith(_PACKAGE)]
    return "".join(traceback.format_list((theirs or steps)[-_MOST_FRAMES:])).rstrip()
