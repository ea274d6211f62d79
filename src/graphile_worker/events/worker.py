"""Events about the slots of a worker, which Graphile Worker calls workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from graphile_worker.events.base import SlotEvent

if TYPE_CHECKING:
    from collections.abc import Sequence


class WorkerCreate(SlotEvent, frozen=True, kw_only=True):
    """A slot was created."""

    name: ClassVar[str] = "worker:create"
    tasks: Sequence[str]


class WorkerRelease(SlotEvent, frozen=True, kw_only=True):
    """A slot gets no more jobs."""

    name: ClassVar[str] = "worker:release"


class WorkerStop(SlotEvent, frozen=True, kw_only=True):
    """A slot has ended."""

    name: ClassVar[str] = "worker:stop"
    error: BaseException | None = None


class WorkerGetJobStart(SlotEvent, frozen=True, kw_only=True):
    """The worker asks the database for jobs.

    Emitted once per exchange, for all free slots. `worker` is the first of them.
    """

    name: ClassVar[str] = "worker:getJob:start"


class WorkerGetJobError(SlotEvent, frozen=True, kw_only=True):
    """The worker could not ask the database for jobs, and will retry.

    Emitted for each attempt, also during an outage.
    """

    name: ClassVar[str] = "worker:getJob:error"
    error: BaseException


class WorkerGetJobEmpty(SlotEvent, frozen=True, kw_only=True):
    """The database had no job for this worker."""

    name: ClassVar[str] = "worker:getJob:empty"


class WorkerFatalError(SlotEvent, frozen=True, kw_only=True):
    """The outcome of a job cannot be recorded. `job_error` is the job's own error, if it failed."""

    name: ClassVar[str] = "worker:fatalError"
    error: BaseException
    job_error: BaseException | None
