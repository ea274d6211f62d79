"""`Queue`: what a task needs from the app that it belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from graphile_worker._db.connection.drivers import AnyConnection
    from graphile_worker.history import History
    from graphile_worker.job import AwaitedJob, Job, JobSpec, Progress


class Queue(Protocol):
    """The queue that the jobs of a task go to. `App` implements it."""

    async def add_spec(self, spec: JobSpec, *, connection: AnyConnection | None = None) -> Job:
        """Add a job."""

    async def add_jobs(
        self, jobs: Iterable[JobSpec], /, *, connection: AnyConnection | None = None
    ) -> list[Job]:
        """Add many jobs."""

    def add_spec_sync(self, spec: JobSpec, *, connection: AnyConnection | None = None) -> Job:
        """Add a job, from a thread without an event loop."""

    def add_jobs_sync(
        self, jobs: Iterable[JobSpec], /, *, connection: AnyConnection | None = None
    ) -> list[Job]:
        """Add many jobs, from a thread without an event loop."""

    @property
    def history(self) -> History:
        """Which attempts the queue's workers keep."""

    async def _read_result(self, job: AwaitedJob, limit: float | None) -> Any:
        """Wait until a job has ended, and return its result as plain JSON."""

    def _read_result_sync(self, job: AwaitedJob, limit: float | None) -> Any:
        """Wait until a job has ended, from a thread without an event loop."""

    async def _read_progress(self, job_id: int) -> Progress | None:
        """Return what a job has reported last."""

    def _read_progress_sync(self, job_id: int) -> Progress | None:
        """Return what a job has reported last, from a thread without an event loop."""

    async def _call_spec(
        self, spec: JobSpec, limit: float | None, *, connection: AnyConnection | None = None
    ) -> Any:
        """Add a job, and wait for its result."""

    def _call_spec_sync(
        self, spec: JobSpec, limit: float | None, *, connection: AnyConnection | None = None
    ) -> Any:
        """Add a job, and wait for its result, from a thread without an event loop."""
