"""Says so when a task blocks the event loop: which one, and where."""

from __future__ import annotations

import sys
import threading
import traceback
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from graphile_worker.durations import seconds, shown
from graphile_worker.middleware.base import Middleware

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator
    from types import FrameType

    from graphile_worker.context import JobContext
    from graphile_worker.durations import Duration
    from graphile_worker.middleware.base import Running

_MOST_FRAMES = 5


class _Step(NamedTuple):
    """What a job does from one await to the next."""

    ctx: JobContext[Any]
    thread: int
    since: float


class BlockedLoop(Middleware):
    """Warns of a job that keeps the event loop to itself, and with it all other jobs of the worker.

    It warns while it does, with the place in the code, and says afterwards how long it took. Work of that
    kind belongs on a thread (a plain ``def``), or into a process.

    Args:
        threshold: For how long it may.

    Example:
        >>> from graphile_worker import App
        >>> from graphile_worker.middleware import BlockedLoop
        >>> app = App(dsn=dsn, middleware=[BlockedLoop(0.5)])
    """

    def __init__(self, threshold: Duration = 0.5) -> None:
        self._threshold = seconds("threshold", threshold, "more than 0")
        self._steps: dict[int, _Step] = {}  # by threads, for each may have an event loop with a worker
        self._jobs = 0
        self._watching = threading.Lock()

    async def execute(self, ctx: JobContext[Any], proceed: Running) -> Any:
        """Look at the clock before and after each step."""
        self._jobs += 1
        self._watch()
        try:
            return await _Stepwise(proceed(), self, ctx)
        finally:
            self._jobs -= 1

    def begin(self, ctx: JobContext[Any]) -> None:
        """It has the event loop."""
        self._steps[threading.get_ident()] = _Step(ctx, threading.get_ident(), monotonic())

    def end(self) -> None:
        """It gave it back."""
        step = self._steps.pop(threading.get_ident(), None)
        if step is not None and (took := monotonic() - step.since) >= self._threshold:
            job = step.ctx.job
            step.ctx.logger.warning(
                "Job %d (%s) blocked the event loop for %s", job.id, job.task_identifier, shown(took)
            )

    def _watch(self) -> None:
        """Have a thread that looks on, for as long as there are jobs."""
        if self._watching.acquire(blocking=False):
            threading.Thread(target=self._look_on, name="graphile-worker blocked loop", daemon=True).start()

    def _look_on(self) -> None:
        told: dict[int, _Step] = {}
        pause = threading.Event()
        try:
            while self._jobs:
                pause.wait(self._threshold / 2)
                for thread, step in tuple(self._steps.items()):
                    if told.get(thread) is not step and monotonic() - step.since >= self._threshold:
                        told[thread] = step
                        self._tell(step)
        finally:
            self._watching.release()
        if self._jobs:  # one that began meanwhile took us for watching
            self._watch()

    def _tell(self, step: _Step) -> None:
        where = _where(sys._current_frames().get(step.thread))  # noqa: SLF001
        if self._steps.get(step.thread) is step:  # and so it was when we saw the frame
            step.ctx.logger.warning(
                "Job %d (%s) is blocking the event loop, and all other jobs with it, at:\n%s",
                *(step.ctx.job.id, step.ctx.job.task_identifier, where),
            )


class _Stepwise:
    """Awaits something step by step."""

    def __init__(self, inner: Awaitable[Any], watcher: BlockedLoop, ctx: JobContext[Any]) -> None:
        self._inner, self._watcher, self._ctx = inner, watcher, ctx

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._inner.__await__()
        advance: Callable[..., Any] = steps.__next__
        value: tuple[Any, ...] = ()
        while True:
            self._watcher.begin(self._ctx)
            try:
                waits_for = advance(*value)
            except StopIteration as end:
                return end.value
            finally:
                self._watcher.end()
            try:
                advance, value = steps.send, ((yield waits_for),)
            except BaseException as error:  # noqa: BLE001 - thrown in, as by a cancellation
                advance, value = steps.throw, (error,)


def _where(frame: FrameType | None) -> str:
    """The innermost places, as a traceback shows them."""
    return "" if frame is None else "".join(traceback.format_stack(frame)[-_MOST_FRAMES:]).rstrip()
