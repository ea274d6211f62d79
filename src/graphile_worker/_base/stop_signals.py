"""`StopSignal` and `StopSignals`: how a worker asks its jobs to stop."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from datetime import datetime

    from graphile_worker.job import Job


class StopSignal:
    """Whether a job is asked to stop: a truth value that can also be awaited.

    Use ``if ctx.stop_requested``, ``await ctx.stop_requested`` or, on a thread,
    ``ctx.stop_requested.wait(seconds)``.

    Attributes:
        cancelled: Whether the job is asked to stop because it was cancelled.
    """

    def __init__(self) -> None:
        self.cancelled = False
        self._for_threads = threading.Event()
        self._for_tasks = asyncio.Event()

    def __bool__(self) -> bool:
        return self._for_threads.is_set()

    def __await__(self) -> Generator[Any, None, None]:
        yield from self._for_tasks.wait().__await__()

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until the job is asked to stop, or for `timeout` seconds.

        Returns:
            Whether the job is asked to stop.
        """
        return self._for_threads.wait(timeout)

    def set(self) -> None:
        """Ask the job to stop. Must be called on the event loop."""
        self._for_threads.set()
        self._for_tasks.set()


class StopSignals:
    """The stop signals of all jobs of a worker.

    Jobs start with a shared signal. Most tasks share one. A task with its own lease has another, because
    its jobs may be fenced at another time. A job gets its own signal when it has a timeout, when its task
    reads `JobContext.stop_requested`, or when it is cancelled.

    Args:
        separate_tasks: Tasks whose jobs do not share the signal of the others.
    """

    def __init__(self, separate_tasks: Iterable[str] = ()) -> None:
        self._lock = threading.Lock()
        self._shared = StopSignal()
        self._shared_by_task = {task: StopSignal() for task in separate_tasks}
        self._tasks_of_own: WeakKeyDictionary[StopSignal, str] = WeakKeyDictionary()
        self._own: WeakValueDictionary[tuple[int, datetime | None], StopSignal] = WeakValueDictionary()
        self._superseded: WeakSet[StopSignal] = WeakSet()

    def shared(self, task: str) -> StopSignal:
        """Return the signal that jobs of the task start with."""
        return self._shared_by_task.get(task, self._shared)

    def add(self, task: str, signal: StopSignal) -> None:
        """Add the signal of one job, which has a timeout."""
        with self._lock:
            self._tasks_of_own[signal] = task
        if self.shared(task):
            signal.set()

    def of_job(self, job: Job, initial: StopSignal | None = None) -> StopSignal:
        """Return the signal of this job alone. May be called from any thread.

        The signal is created here, because most jobs never need one.

        Args:
            job: The job.
            initial: The signal that the job started with, if that is known.
        """
        with self._lock:
            if initial is not None and initial in self._superseded:
                return initial  # read by a thread of an earlier run; the later run has its own signal
            key = job.id, job.locked_at
            own = self._own.get(key)
            if own is None:
                own = initial if initial is not None and initial in self._tasks_of_own else StopSignal()
                self._own[key] = own
                self._tasks_of_own[own] = job.task_identifier
                if initial:
                    own.set()
            return own

    def renew(self, job: Job, initial: StopSignal) -> StopSignal:
        """Return a signal for another run of a job after its timeout.

        A thread of the earlier run keeps its signal. If the worker is stopping or the job is cancelled, that
        holds for the new run too, and the signal stays the same.
        """
        with self._lock:
            key = job.id, job.locked_at
            own = self._own.get(key, initial)
            if not initial or self.shared(job.task_identifier) or initial.cancelled or own.cancelled:
                return initial
            self._own.pop(key, None)
            self._superseded.add(initial)
            new = StopSignal()
            self._tasks_of_own[new] = job.task_identifier
        return new

    def set(self, applies_to: Callable[[str | None], bool]) -> None:
        """Ask running jobs to stop.

        Args:
            applies_to: Whether the jobs of a task are to stop. It is called with None for all tasks that
                share a signal.
        """
        for task, signal in [(None, self._shared), *self._shared_by_task.items()]:
            if applies_to(task):
                signal.set()
        with self._lock:
            own = list(self._tasks_of_own.items())
        for signal, name in own:
            if applies_to(name if name in self._shared_by_task else None):
                signal.set()

    def reset(self) -> None:
        """Give jobs that start from now on signals that are not set."""
        if self._shared:
            self._shared = StopSignal()
        self._shared_by_task = {
            task: StopSignal() if signal else signal for task, signal in self._shared_by_task.items()
        }
