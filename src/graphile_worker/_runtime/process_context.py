"""What a task has around it in a process that is not the worker's own."""

from __future__ import annotations

import asyncio
import io
import itertools
import logging
import pickle
import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from graphile_worker._runtime.references import IMPORTED_MAIN, MAIN, refuse_while_importing
from graphile_worker._runtime.wire import Asked, Extended
from graphile_worker.context import Stopping, refuse_to_block
from graphile_worker.durations import seconds
from graphile_worker.errors import TaskError
from graphile_worker.logs import ScopedLogger
from graphile_worker.payload import as_decoded
from graphile_worker.specs import Specs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine, Generator, Iterable

    from graphile_worker._db.connect import Connection
    from graphile_worker._runtime.references import Program
    from graphile_worker._runtime.wire import Answer, Line, Setup
    from graphile_worker.client import WorkerUtils
    from graphile_worker.durations import Duration
    from graphile_worker.job import Job, JobSpec
    from graphile_worker.specs import Named
    from graphile_worker.task_options import JobOptions
    from graphile_worker.tasks import HandlerClass

T = TypeVar("T")


class StoppingHere(Stopping):
    """The same as in the worker, but told on a thread that has no event loop."""

    _loop: asyncio.AbstractEventLoop | None = None

    def __await__(self) -> Generator[Any, None, None]:
        # In this order, for it may be told in between.
        self._loop = asyncio.get_running_loop()
        if not self:
            yield from super().__await__()

    def set(self) -> None:
        """It is."""
        self._for_threads.set()
        loop = self._loop
        with suppress(RuntimeError):  # the loop may be closed by now
            if loop is not None:
                loop.call_soon_threadsafe(self._for_tasks.set)


class Limits:
    """How long the job may run. It is the worker that sees to it.

    Args:
        line: To the worker.
        timeout: Seconds from now.
    """

    def __init__(self, line: Line, timeout: float) -> None:
        self._line = line
        self._when = monotonic() + timeout
        self._over = False
        self._ending = threading.Lock()
        self.stopping: Stopping = StoppingHere()

    @property
    def at(self) -> datetime:
        """The moment, by this machine's clock."""
        return datetime.now(UTC) + timedelta(seconds=max(0.0, self._when - monotonic()))

    def extend(self, duration: Duration) -> None:
        """So long from now, whatever it was."""
        timeout = seconds("extend_deadline", duration, "more than 0")
        self._line.refuse_in_fork()  # before the lock, which another thread may have held when it forked
        with self._ending:
            if not self._over:  # or it would be another job's that runs now
                self._when = monotonic() + timeout
                self._line.send(Extended(timeout))

    def end(self) -> None:
        """It has ended, though a thread of it may go on."""
        with self._ending:
            self._over = True


class ThroughWorker:
    """Has the worker add jobs: in its database, with its connections and its middleware.

    Args:
        line: To the worker.
        schema: The name of the schema.
    """

    is_closing = False

    def __init__(self, line: Line, schema: str) -> None:
        self._line = line
        self.schema = schema
        self._specs = Specs({}, of_others=True)
        self._numbers = itertools.count()
        self._asked: dict[int, Future[Any]] = {}

    async def add_job(
        self, job: Named, payload: Any = None, *, connection: Connection | None = None, **options: Any
    ) -> Job:
        """Add a job; what a task of the worker's says of its jobs holds."""
        if not isinstance(job, str):
            spec = self._specs.of(job, payload, cast("JobOptions", options))
            return await self.add_spec(spec, connection=connection)
        added: Job = await self._ask("add_job", job, _plain(payload), connection=connection, **options)
        return added

    async def add_spec(self, spec: JobSpec, **options: Any) -> Job:
        """Add the job that the spec describes, as it is."""
        job: Job = await self._ask("add_spec", _plain_spec(spec), **options)
        return job

    async def add_jobs(self, jobs: Iterable[JobSpec | HandlerClass], **options: Any) -> list[Job]:
        """Add many jobs."""
        specs = [_plain_spec(spec) for spec in self._specs.each(jobs)]
        added: list[Job] = await self._ask("add_jobs", specs, **options)
        return added

    def blocking(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for it where there is no event loop."""
        return blocking(coroutine)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        what = "connection" if name == "lend_connection" else f"utils.{name}"
        raise TaskError(
            f"ctx.{what} cannot be had in a process: jobs can be added there, and the worker's connections "
            "stay with it. Do it in a task that runs on the event loop or on a thread, or open a "
            "WorkerUtils of its own."
        )

    async def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        refuse_while_importing()
        if options.pop("connection", None) is not None:
            raise TaskError(
                "From a process jobs cannot be added on a connection of the task's: the worker adds them, on "
                "one of its own. Use a WorkerUtils of your own."
            )
        self._line.refuse_in_fork()
        number = next(self._numbers)
        answer = self._asked[number] = Future()
        self._line.send(Asked(number, method, arguments, options))
        return await asyncio.wrap_future(answer)

    def answered(self, answer: Answer) -> None:
        """What came of it."""
        asked = self._asked.pop(answer.number, None)
        if asked is None:
            return
        with suppress(InvalidStateError):  # nobody waits for it any more
            if answer.error is None:
                asked.set_result(answer.value)
            else:
                asked.set_exception(answer.error.error())


class Shared:
    """What all jobs of this process share.

    Args:
        setup: What the worker says of it.
        utils: To add jobs.
    """

    def __init__(self, setup: Setup, utils: ThroughWorker) -> None:
        self.worker_id = setup.worker_id
        self.utils = cast("WorkerUtils", utils)
        self.add_job = utils.add_job
        self.add_jobs = utils.add_jobs
        self.logger = ScopedLogger(
            logging.getLogger(setup.logger), {"label": "worker", "worker_id": setup.worker_id}
        )
        self._setup = setup
        self._state: Any = None
        self._has_state = False
        self._now = datetime.now(UTC), monotonic()
        self._stopping: Stopping = StoppingHere()

    @property
    def state(self) -> Any:
        """What the lifespan has opened, as it was when this process was started."""
        if self._setup.stateless:
            raise TaskError(
                f"ctx.state cannot be had in a process: {self._setup.stateless}. Let it hold only what "
                "can be, or leave out the rest by a __getstate__; what the task needs of it, it can open."
            )
        if not self._has_state and self._setup.state is not None:
            self._state = _Here(self._setup.state, self._setup.program).load()
        self._has_state = True
        return self._state

    def now(self) -> datetime:
        """The time as the queue sees it."""
        told, at = self._now
        return told + timedelta(seconds=monotonic() - at)

    def begin(self, now: datetime, limits: Limits | None) -> None:
        """A job begins."""
        self._now = now, monotonic()
        self._stopping = StoppingHere() if limits is None else limits.stopping

    def stop(self) -> None:
        """It is to stop."""
        self._stopping.set()

    def stopping(self, _task: str) -> Stopping:
        """What the job is warned by."""
        return self._stopping

    def stopping_of(self, _job: Job, _told: Stopping | None = None) -> Stopping:
        """The same: here is one job at a time."""
        return self._stopping

    def blocking(self, awaitable: Awaitable[T]) -> T:
        """Wait for it where there is no event loop."""
        return blocking(awaitable)


def blocking(awaitable: Awaitable[T]) -> T:
    """Wait for it, on an event loop of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_waited(awaitable))
    return refuse_to_block(awaitable)


async def _waited(awaitable: Awaitable[T]) -> T:
    return await awaitable


class _Here(pickle.Unpickler):
    """What is of the program's own file is looked for there."""

    def __init__(self, pickled: bytes, program: Program) -> None:
        super().__init__(io.BytesIO(pickled))
        self._program = program

    def find_class(self, module: str, name: str) -> Any:
        if module in {MAIN, IMPORTED_MAIN}:
            self._program.import_main()
        return super().find_class(module, name)


def _plain(payload: Any) -> Any:
    """As JSON's own values, which the worker knows too."""
    return None if payload is None else as_decoded(payload)


def _plain_spec(spec: JobSpec) -> JobSpec:
    return msgspec.structs.replace(spec, payload=_plain(spec.payload))
