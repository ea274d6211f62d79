"""The results of a task's jobs: their type, and the way to wait for them."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from graphile_worker._base.durations import seconds
from graphile_worker._tasks.conversion import MisfitError, converter, unsupported_reason
from graphile_worker._tasks.parameters import UnresolvedTypeError, read_return_type, type_name
from graphile_worker.errors import ConfigurationError, ResultTimeoutError, ResultUnknownError

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphile_worker._base.durations import Duration
    from graphile_worker.job import AwaitedJob, Progress
    from graphile_worker.tasks import Task

V = TypeVar("V")


class ResultType:
    """The type of what a task returns.

    Args:
        function: The task's function.
        batch: Whether the task is a batch task.
    """

    def __init__(self, function: Callable[..., Any], *, batch: bool) -> None:
        self.kind: Any = Any
        self.problem: str | None = None
        """Why results cannot be kept; None if they can."""
        if batch:
            self.problem = "a batch task has no result, because its items end one by one"
            return
        try:
            self.kind = read_return_type(function)
        except UnresolvedTypeError as error:
            self.problem = f"its return type cannot be resolved: {error}"

    @cached_property
    def _unsupported(self) -> str | None:
        reason = unsupported_reason(self.kind)
        return None if reason is None else f"it returns {type_name(self.kind)}: {reason}"

    def check(self, identifier: str) -> None:
        """Raise an error if results cannot be kept."""
        if (problem := self.problem or self._unsupported) is not None:
            raise ConfigurationError(
                f"The results of task {identifier!r} cannot be kept, because {problem}. Annotate the "
                "function with a return type that JSON can carry."
            )

    @cached_property
    def _convert(self) -> Callable[[Any], Any]:
        return converter(self.kind)

    def convert(self, job_id: int | None, identifier: str, value: Any) -> Any:
        """Convert plain JSON to the type.

        Raises:
            ResultUnknownError: The value does not match the type.
        """
        try:
            return self._convert(value)
        except MisfitError as error:
            raise ResultUnknownError(
                f"The task {identifier!r} returned a value that does not match its return type "
                f"{type_name(self.kind)}: {error}.",
                job_id,
            ) from None


class TaskResults(Generic[V]):
    """Waits for the results of a task's jobs.

    Args:
        task: The task.
    """

    def __init__(self, task: Task[Any, Any, Any, V]) -> None:
        self._task = task

    async def read(self, job: AwaitedJob, limit: Duration | None) -> V:
        """Wait for a job's result."""
        try:
            value = await self._task.queue._read_result(job, self._limit(limit))  # noqa: SLF001 - the library's own
        except ResultTimeoutError:
            self._reject_unkept(job)
            raise
        return self._convert(job, value)

    def read_sync(self, job: AwaitedJob, limit: Duration | None) -> V:
        """Wait for a job's result, from code without an event loop."""
        try:
            value = self._task.queue._read_result_sync(job, self._limit(limit))  # noqa: SLF001 - the library's own
        except ResultTimeoutError:
            self._reject_unkept(job)
            raise
        return self._convert(job, value)

    async def progress(self, job: AwaitedJob) -> Progress | None:
        """Return what a job has reported last."""
        return await self._task.queue._read_progress(job.id)  # noqa: SLF001 - the library's own

    def progress_sync(self, job: AwaitedJob) -> Progress | None:
        """Return what a job has reported last, from code without an event loop."""
        return self._task.queue._read_progress_sync(job.id)  # noqa: SLF001 - the library's own

    def _limit(self, timeout: Duration | None) -> float | None:
        self._task.result_type.check(self._task.identifier)
        if not self._are_kept:
            return 0.0  # a look, because the job may have ended, or its caller waits for it
        return None if timeout is None else seconds("timeout", timeout)

    @property
    def _are_kept(self) -> bool:
        """Whether workers with the options of this app keep the results."""
        task, history = self._task, self._task.queue.history
        if task.keep_result is not None:
            return task.keep_result
        return history.results and (task.history or history.keep) == "all"

    def _reject_unkept(self, job: AwaitedJob) -> None:
        if not self._are_kept:
            raise ResultUnknownError(
                f"{job} has not ended, and its result will not be kept. Declare the task with "
                f"@app.task(keep_result=True), or use await {self._task.identifier}.call(...).",
                job.id,
            ) from None

    def _convert(self, job: AwaitedJob, value: Any) -> V:
        converted: V = self._task.result_type.convert(job.id, self._task.identifier, value)
        return converted
