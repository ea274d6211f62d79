"""Jobs and contexts without a worker, for unit tests."""

from __future__ import annotations

import asyncio
import logging
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar, overload

import msgspec

from graphile_worker._db.connect import Pool
from graphile_worker._db.session import Session
from graphile_worker._runtime.handlers import timeout_of
from graphile_worker.client import find_schema
from graphile_worker.context import JobContext, Stopping, Surroundings
from graphile_worker.durations import seconds
from graphile_worker.errors import ConfigurationError
from graphile_worker.job import Job, JobSpec, JobState
from graphile_worker.logs import ScopedLogger
from graphile_worker.specs import Specs
from graphile_worker.testing.places import Place

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from graphile_worker._db.connect import Connection
    from graphile_worker.durations import Duration
    from graphile_worker.testing.clocks import Clock

S = TypeVar("S")
T = TypeVar("T")
_WORKER = "python-test"


def job(task_identifier: str = "test", payload: Any = None, **fields: Any) -> Job:
    """A job that runs, in its first attempt, as no database has it: for whatever takes one.

    Args:
        task_identifier: Of which task it is.
        payload: What it carries; None means ``{}``.
        fields: What else is to be different: attempts, max_attempts, key, queue_name, flags, …

    Example:
        >>> from graphile_worker.retry import Exponential, Failure
        >>> from graphile_worker.testing import job
        >>> Exponential(first=1, factor=2)(Failure(job(attempts=3), ValueError("no")))
        4.0
    """
    now = datetime.now(UTC)
    usual = Job(
        id=1,
        task_identifier=task_identifier,
        queue_name=None,
        payload={} if payload is None else payload,
        priority=0,
        run_at=now,
        attempts=1,
        max_attempts=25,
        last_error=None,
        created_at=now,
        updated_at=now,
        key=None,
        locked_at=now,
        locked_by=_WORKER,
        revision=0,
        flags=frozenset(),
        is_available=False,
        task_id=1,
        job_queue_id=None,
        state=JobState.RUNNING,
    )
    if unknown := fields.keys() - set(Job.__struct_fields__):
        raise ConfigurationError(f"A job has no {', '.join(sorted(unknown))}.")
    return msgspec.structs.replace(usual, **fields)


_usual_job = job  # for where the name is taken


class FakeContext(JobContext[S]):
    """A `JobContext` without a worker. Made by `context`.

    Attributes:
        added: The jobs that the task has added, if it has no connection to add them on.
    """

    __slots__ = ("added",)

    def __init__(
        self, job: Job, surroundings: _Surroundings, added: list[JobSpec], limit: _Limit | None = None
    ) -> None:
        super().__init__(job, surroundings, limit)
        self.added = added


@overload
def context(
    job: Job | None = None,
    *,
    timeout: Duration | None = None,
    connection: Connection | None = None,
    clock: Clock | None = None,
) -> FakeContext[Any]: ...


@overload
def context(
    job: Job | None = None,
    *,
    state: S,
    timeout: Duration | None = None,
    connection: Connection | None = None,
    clock: Clock | None = None,
) -> FakeContext[S]: ...


def context(
    job: Job | None = None,
    *,
    state: Any = None,
    timeout: Duration | None = None,
    connection: Connection | None = None,
    clock: Clock | None = None,
) -> FakeContext[Any]:
    """A `JobContext` to call a task with, in a unit test.

    Args:
        job: Which job runs; by default one in its first attempt.
        state: What the application's lifespan would have opened.
        timeout: How long the job may run, for `JobContext.deadline`: nothing happens when that is over. By
            default what the job says by itself, as one does that was added with a timeout.
        connection: A connection of asyncpg's, for what the task does with the database. Without one, jobs
            that it adds are only noted, in `FakeContext.added`, and anything else is refused.
        clock: What time it is.

    Example:
        >>> import asyncio
        >>> from graphile_worker import JobContext, JobSpec
        >>> from graphile_worker.testing import context
        >>> async def greet(payload: dict, ctx: JobContext) -> None:
        ...     await ctx.add_job("farewell", payload)
        >>> ctx = context()
        >>> asyncio.run(greet({"name": "Ann"}, ctx))
        >>> ctx.added == [JobSpec("farewell", {"name": "Ann"})]
        True
    """
    added: list[JobSpec] = []
    utils = _Notes.into(added) if connection is None else Place.on_connection(connection, None)
    utils.clock = clock
    job, surroundings = job or _usual_job(), _Surroundings(utils, state)
    length = timeout_of(job) if timeout is None else seconds("timeout", timeout, "more than 0")
    limit = None if length is None else _Limit(surroundings.now, length, surroundings.stopping_of(job))
    return FakeContext(job, surroundings, added, limit)


class _Surroundings(Surroundings):
    """What the jobs of a worker share, without a worker and maybe without an event loop."""

    loop: asyncio.AbstractEventLoop | None  # type: ignore[assignment]

    def __init__(self, utils: Place, state: Any) -> None:
        self._specs = Specs({}, of_others=True)
        self._stopping, self._apart = Stopping(), {}
        self.state, self.worker_id, self.utils = state, _WORKER, utils
        self.logger = ScopedLogger(
            logging.getLogger("graphile_worker"), {"label": "worker", "worker_id": _WORKER}
        )
        self.now = utils.real_clock().now if utils.clock is None else utils.clock.now
        self.loop = asyncio._get_running_loop()  # noqa: SLF001 - the other one raises
        self.loop_thread = threading.get_ident()

    def stopping_of(self, job: Job, told: Stopping | None = None) -> Stopping:  # noqa: ARG002
        """There is one job."""
        return self._stopping

    def blocking(self, awaitable: Awaitable[T]) -> T:
        """Wait for it, on an event loop of its own if there is none."""
        if self.loop is not None:
            return super().blocking(awaitable)

        async def waited() -> T:
            return await awaitable

        return asyncio.run(waited())


class _Limit:
    """How long the job may run, as its task sees it."""

    def __init__(self, now: Callable[[], datetime], timeout: float, stopping: Stopping) -> None:
        self._now = now
        self.at = now() + timedelta(seconds=timeout)
        self.stopping = stopping

    def extend(self, duration: Duration) -> None:
        """So long from now."""
        self.at = self._now() + timedelta(seconds=seconds("extend_deadline", duration, "more than 0"))


class _NoDatabase(Pool):
    """Says so."""

    def connection(self) -> Any:
        """Refused."""
        raise ConfigurationError(
            "This context has no database. Give it one: testing.context(connection=...)."
        )

    lend = dedicated = connection


class _Notes(Place):
    """Adds jobs to a list."""

    added: list[JobSpec]

    @classmethod
    def into(cls, added: list[JobSpec]) -> _Notes:
        """That list."""
        session = Session(find_schema(None), _NoDatabase(), logging.getLogger("graphile_worker"))
        notes = cls.on_session(session, use_local_time=False)
        notes.added = added
        return notes

    async def add_spec(self, spec: JobSpec, *, connection: Connection | None = None) -> Job:  # noqa: ARG002
        """Note it."""
        self.added.append(spec)
        return job(
            spec.identifier,
            spec.payload,
            id=len(self.added),
            attempts=0,
            queue_name=spec.queue_name,
            key=spec.job_key,
            priority=spec.priority or 0,
            locked_at=None,
            locked_by=None,
            is_available=True,
            state=JobState.READY,
        )

    async def add_jobs(self, specs: Iterable[JobSpec], *, connection: Connection | None = None) -> list[Job]:
        """Note them."""
        return [await self.add_spec(spec, connection=connection) for spec in specs]
