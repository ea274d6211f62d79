"""The job context in a task process: its environment, deadline and stop signal."""

from __future__ import annotations

import asyncio
import io
import itertools
import logging
import math
import pickle
import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import msgspec

from graphile_worker._base import context_carrier
from graphile_worker._base.durations import seconds
from graphile_worker._base.logs import ScopedLogger
from graphile_worker._base.payload import as_decoded
from graphile_worker._base.stop_signals import StopSignal, StopSignals
from graphile_worker._tasks.specs import Specs
from graphile_worker._tasks.task_reference import IMPORTED_MAIN, MAIN, reject_while_importing
from graphile_worker._worker.processes.protocol import Extended, MethodCall, Progressed
from graphile_worker.context import refuse_to_block
from graphile_worker.errors import TaskError
from graphile_worker.history import History

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine, Generator, Iterable

    from graphile_worker._base.durations import Duration
    from graphile_worker._db.connection.drivers import AnyConnection
    from graphile_worker._tasks.options import JobOptions
    from graphile_worker._tasks.specs import JobLike
    from graphile_worker._tasks.task_reference import Program
    from graphile_worker._worker.processes.protocol import Channel, MethodResult, Setup
    from graphile_worker.client import WorkerUtils
    from graphile_worker.job import AwaitedJob, Job, JobSpec, Progress
    from graphile_worker.tasks import HandlerClass

T = TypeVar("T")
_PROGRESS_INTERVAL = 0.2


class LocalStopSignal(StopSignal):
    """A stop signal that is set on a thread without an event loop."""

    _loop: asyncio.AbstractEventLoop | None = None

    def __await__(self) -> Generator[Any, None, None]:
        # In this order, because another thread may set the signal in between.
        self._loop = asyncio.get_running_loop()
        if not self:
            yield from super().__await__()

    def set(self) -> None:
        """Ask the job to stop. May be called from any thread."""
        self._for_threads.set()
        loop = self._loop
        with suppress(RuntimeError):  # the loop may be closed by now
            if loop is not None:
                loop.call_soon_threadsafe(self._for_tasks.set)


class ProcessStopSignals(StopSignals):
    """The stop signal of the one job that runs in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.current: StopSignal = LocalStopSignal()

    def shared(self, task: str) -> StopSignal:  # noqa: ARG002
        """Return the signal of the current job."""
        return self.current

    def of_job(self, job: Job, initial: StopSignal | None = None) -> StopSignal:  # noqa: ARG002
        """Return the signal of the current job."""
        return self.current


class RemoteDeadline:
    """The deadline of the job, inside its process. The worker enforces it.

    Args:
        channel: The connection to the worker.
        timeout: Seconds from now.
    """

    def __init__(self, channel: Channel, timeout: float) -> None:
        self._channel = channel
        self._when = monotonic() + timeout
        self._ended = False
        self._ending = threading.Lock()
        self.stop_requested: StopSignal = LocalStopSignal()

    @property
    def at(self) -> datetime:
        """The time of the deadline, by this machine's clock."""
        return datetime.now(UTC) + timedelta(seconds=max(0.0, self._when - monotonic()))

    def extend(self, duration: Duration) -> None:
        """Replace the deadline with one this long from now."""
        timeout = seconds("extend_deadline", duration, "more than 0")
        # Checked before the lock is acquired: in a forked child, a thread that exists only in the parent may
        # hold the lock forever.
        self._channel.refuse_in_fork()
        with self._ending:
            if not self._ended:  # otherwise the worker would extend the deadline of the next job
                self._when = monotonic() + timeout
                self._channel.send(Extended(timeout))

    def end(self) -> None:
        """Ignore later extensions: the job has ended, even if one of its threads still runs."""
        with self._ending:
            self._ended = True


class RemoteProgress:
    """Sends the progress of the current job to the worker, a few times a second at most.

    Args:
        channel: The connection to the worker.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._sent_at = -math.inf
        self._latest: Progressed | None = None
        self._timer: threading.Timer | None = None

    def report(self, job: Job, progress: Progress) -> None:
        """Send the progress now, or together with later reports. May be called from any thread."""
        self._channel.refuse_in_fork()  # before the lock, as in `RemoteDeadline.extend`
        with self._lock:
            self._latest = Progressed(job.id, job.attempts, progress)
            delay = self._sent_at + _PROGRESS_INTERVAL - monotonic()
            if delay <= 0:
                self._send()
            elif self._timer is None:
                self._timer = threading.Timer(delay, self.flush)
                self._timer.daemon = True
                self._timer.start()

    def flush(self) -> None:
        """Send the report that waits. Called when it is due, and at the end of the job."""
        with self._lock, suppress(OSError):  # the worker may have closed the connection
            self._send()

    def _send(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        latest, self._latest = self._latest, None
        if latest is not None:
            self._sent_at = monotonic()
            self._channel.send(latest)


class WorkerProxy:
    """Adds jobs through the worker: in its database, with its connections and its middleware.

    Args:
        channel: The connection to the worker.
        schema: The name of the schema.
    """

    is_closing = False
    history = History("none")  # not known here, and nothing waits for a result

    def __init__(self, channel: Channel, schema: str) -> None:
        self._channel = channel
        self.schema = schema
        self._specs = Specs({}, allow_unregistered=True)
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Any]] = {}

    async def add_job(
        self,
        job: JobLike,
        payload: Any = None,
        *,
        connection: AnyConnection | None = None,
        require_transaction: bool = False,
        **options: Any,
    ) -> Job:
        """Add a job. If it names a task of the worker, the task's job options apply."""
        on: dict[str, Any] = {"connection": connection, "require_transaction": require_transaction}
        if not isinstance(job, str):
            spec = self._specs.build(job, payload, cast("JobOptions", options))
            return await self.add_spec(spec, **on)
        added: Job = await self._call("add_job", job, _plain(payload), **on, **options)
        return added

    def add_job_sync(self, job: JobLike, payload: Any = None, **options: Any) -> Job:
        """Add a job like `add_job`, in a task that is a plain function."""
        return self.run_sync(self.add_job(job, payload, **options))

    async def add_spec(self, spec: JobSpec, **options: Any) -> Job:
        """Add the job that the spec describes, without a task's options."""
        job: Job = await self._call("add_spec", _plain_spec(spec), **options)
        return job

    def add_spec_sync(self, spec: JobSpec, **options: Any) -> Job:
        """Add the job that the spec describes, in a task that is a plain function."""
        return self.run_sync(self.add_spec(spec, **options))

    def add_jobs_sync(self, jobs: Iterable[JobSpec | HandlerClass], **options: Any) -> list[Job]:
        """Add many jobs, in a task that is a plain function."""
        return self.run_sync(self.add_jobs(jobs, **options))

    async def add_jobs(self, jobs: Iterable[JobSpec | HandlerClass], **options: Any) -> list[Job]:
        """Add many jobs."""
        specs = [_plain_spec(spec) for spec in self._specs.build_many(jobs)]
        added: list[Job] = await self._call("add_jobs", specs, **options)
        return added

    async def _add_called(self, spec: JobSpec, **options: Any) -> NoReturn:  # noqa: ARG002
        """Reject the call."""
        _reject_waiting()

    async def _read_result(self, job: AwaitedJob, limit: float | None) -> NoReturn:  # noqa: ARG002
        """Reject the call."""
        _reject_waiting()

    async def _call_spec(self, spec: JobSpec, limit: float | None, **options: Any) -> NoReturn:  # noqa: ARG002
        """Reject the call."""
        _reject_waiting()

    def _read_result_sync(self, job: AwaitedJob, limit: float | None) -> NoReturn:  # noqa: ARG002
        """Reject the call."""
        _reject_waiting()

    def _call_spec_sync(self, spec: JobSpec, limit: float | None, **options: Any) -> NoReturn:  # noqa: ARG002
        """Reject the call."""
        _reject_waiting()

    async def _read_progress(self, job_id: int) -> Progress | None:
        """Return what a job has reported last."""
        found: Progress | None = await self._call("progress", job_id)
        return found

    def _read_progress_sync(self, job_id: int) -> Progress | None:
        """Return what a job has reported last, in a task that is a plain function."""
        return self.run_sync(self._read_progress(job_id))

    def run_sync(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine on a new event loop."""
        return run_sync(coroutine)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        what = "connection" if name == "connection" else f"utils.{name}"
        raise TaskError(
            f"ctx.{what} is not available in a process: the task can add jobs, but the worker's connections "
            "stay in the worker. Use a task that runs on the event loop or on a thread, or open a "
            "WorkerUtils in the task."
        )

    async def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        reject_while_importing()
        connection = options.pop("connection", None)
        if options.pop("require_transaction", False) or connection is not None:
            raise TaskError(
                "A task in a process cannot add jobs on its own connection, because the worker adds them. "
                "Open a WorkerUtils in the task instead."
            )
        self._channel.refuse_in_fork()
        number = next(self._numbers)
        pending = self._pending[number] = Future()
        carried = context_carrier.capture() or None
        self._channel.send(MethodCall(number, method, arguments, options, carried))
        return await asyncio.wrap_future(pending)

    def resolve(self, result: MethodResult) -> None:
        """Pass the worker's reply to the code that waits for it."""
        pending = self._pending.pop(result.number, None)
        if pending is None:
            return
        with suppress(InvalidStateError):  # the task has stopped waiting
            if result.error is None:
                pending.set_result(result.value)
            else:
                pending.set_exception(result.error.rebuild())


def _reject_waiting() -> NoReturn:
    raise TaskError(
        "A task in a process cannot wait for the result of another job, because the worker's connections "
        "stay in the worker. Wait in a task that runs on the event loop or on a thread."
    )


class NoCompletions:
    """Explains why a task in a process cannot complete its job: the worker holds the job."""

    def transaction(self, job: Job) -> NoReturn:  # noqa: ARG002
        """Reject the call."""
        _reject_completion("transaction")

    async def complete(self, job: Job, connection: Any) -> NoReturn:  # noqa: ARG002
        """Reject the call."""
        _reject_completion("complete")

    def complete_sync(self, job: Job, connection: Any) -> NoReturn:  # noqa: ARG002
        """Reject the call."""
        _reject_completion("complete_sync")


def _reject_completion(method: str) -> NoReturn:
    raise TaskError(
        f"ctx.{method} is not available in a process, because the job's lock stays in the worker. Let the "
        "process only compute, and store the result in a task that runs on the event loop or on a thread."
    )


class ProcessEnvironment:
    """What the contexts of all jobs of this process share.

    Args:
        setup: The worker's first message.
        utils: Adds jobs.
        progress: Sends the progress of jobs.
    """

    def __init__(self, setup: Setup, utils: WorkerProxy, progress: RemoteProgress) -> None:
        self.worker_id = setup.worker_id
        self.utils = cast("WorkerUtils", utils)
        self.completions = NoCompletions()
        self.progress = progress
        self.add_job = utils.add_job
        self.add_job_sync = utils.add_job_sync
        self.add_jobs = utils.add_jobs
        self.logger = ScopedLogger(
            logging.getLogger(setup.logger), {"label": "worker", "worker_id": setup.worker_id}
        )
        self._setup = setup
        self._state: Any = None
        self._has_state = False
        self._started = datetime.now(UTC), monotonic()
        self.stop_signals = ProcessStopSignals()

    @property
    def state(self) -> Any:
        """The state that the lifespan had opened when this process was started."""
        if self._setup.state_error:
            raise TaskError(
                f"ctx.state is not available in a process: {self._setup.state_error}. Remove what cannot be "
                "pickled, or leave it out in __getstate__, and let the task open what it needs."
            )
        if not self._has_state and self._setup.state is not None:
            self._state = _StateUnpickler(self._setup.state, self._setup.program).load()
        self._has_state = True
        return self._state

    def now(self) -> datetime:
        """Return the time of the queue's clock: the worker's time at the job's start, plus the time since."""
        queue_time, received_at = self._started
        return queue_time + timedelta(seconds=monotonic() - received_at)

    def start_job(self, now: datetime, deadline: RemoteDeadline | None) -> None:
        """Prepare for a new job.

        Args:
            now: The time of the queue's clock.
            deadline: The job's deadline, if it has a timeout.
        """
        self._started = now, monotonic()
        self.stop_signals.current = LocalStopSignal() if deadline is None else deadline.stop_requested

    def stop_job(self) -> None:
        """Ask the current job to stop."""
        self.stop_signals.current.set()

    def run_sync(self, awaitable: Awaitable[T]) -> T:
        """Run the awaitable on a new event loop."""
        return run_sync(awaitable)


def run_sync(awaitable: Awaitable[T]) -> T:
    """Run the awaitable on a new event loop, and return its result."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_await(awaitable))
    return refuse_to_block(awaitable)


async def _await(awaitable: Awaitable[T]) -> T:
    return await awaitable


class _StateUnpickler(pickle.Unpickler):
    """Finds classes of the worker's main module in that file, imported under another name."""

    def __init__(self, pickled: bytes, program: Program) -> None:
        super().__init__(io.BytesIO(pickled))
        self._program = program

    def find_class(self, module: str, name: str) -> Any:
        if module in {MAIN, IMPORTED_MAIN}:
            self._program.import_main()
        return super().find_class(module, name)


def _plain(payload: Any) -> Any:
    """Return the payload as plain JSON values, because the worker may not know its classes."""
    return None if payload is None else as_decoded(payload)


def _plain_spec(spec: JobSpec) -> JobSpec:
    return msgspec.structs.replace(spec, payload=_plain(spec.payload))
