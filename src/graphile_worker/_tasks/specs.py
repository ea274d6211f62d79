"""Builds job specs from everything that `add_job` accepts: names, tasks and instances of handler classes."""

from __future__ import annotations

import inspect
import reprlib
from typing import TYPE_CHECKING, Any, TypeAlias

from graphile_worker._tasks.options import JobOptions, as_spec_options, check_iterable, check_job_options
from graphile_worker.errors import InvalidJobError
from graphile_worker.job import JobSpec
from graphile_worker.tasks import HandlerClass, Task, task_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    AnyTask: TypeAlias = Task[Any, Any, Any]
    JobLike: TypeAlias = str | AnyTask | HandlerClass


class Specs:
    """Builder of job specs, for apps and for job contexts.

    Args:
        tasks: The known tasks, by identifier.
        allow_unregistered: Whether to accept instances of handler classes that are not among `tasks`.
    """

    def __init__(self, tasks: Mapping[str, AnyTask], *, allow_unregistered: bool = False) -> None:
        self._tasks = tasks
        self._allow_unregistered = allow_unregistered

    def build(self, job: JobLike, payload: Any, options: JobOptions) -> JobSpec:
        """Build the spec of a job. The payload is validated if the task is known.

        Args:
            job: The identifier of a task, a task, or an instance of a handler class.
            payload: The payload; None means ``{}``. An instance of a handler class is its own payload.
            options: The job's options.
        """
        check_job_options("add_job", options)
        if isinstance(job, str):
            known = self._tasks.get(job)
            if known is None:
                return JobSpec(job, payload, **as_spec_options(options))
            spec = known.spec_for({} if payload is None else payload, options)
            # A worker may run the task under another name.
            return spec if spec.identifier == job else spec.replace(identifier=job)
        if isinstance(job, Task):
            attached: AnyTask = self._tasks.get(job.identifier, job)
            return attached.spec_for({} if payload is None else payload, options)
        task = self._find_task(job)
        if payload is not None:
            raise InvalidJobError(
                f"An instance of {type(job).__name__} is already a payload. Omit the payload argument.",
                argument="payload",
            )
        return task._make_spec((job,), {}, options)

    def build_many(self, jobs: Iterable[JobSpec | HandlerClass]) -> Iterable[JobSpec]:
        """Build the specs of many jobs. A list gives a list, which can be sent again if the server asks."""
        check_iterable("add_jobs", "specs", jobs)
        specs = map(self._build_one, jobs)
        return list(specs) if isinstance(jobs, list | tuple) else specs

    def _build_one(self, job: Any) -> JobSpec:
        if isinstance(job, JobSpec):
            return job
        if isinstance(job, str | bytes) or type(job) is tuple:
            raise InvalidJobError(
                f"add_jobs takes specs and instances of handler classes, not {reprlib.repr(job)}. Create a "
                "spec with Task.spec(...) or JobSpec(identifier, payload).",
                argument="job",
            )
        return self.build(job, None, {})

    def _find_task(self, job: Any) -> AnyTask:
        kind = type(job)
        found = next((task for task in self._tasks.values() if task.handler_class is kind), None)
        if found is None and self._allow_unregistered:
            found = task_of(kind)
        if found is None:
            raise InvalidJobError(_invalid_job_message(job), argument="job")
        return found


def _invalid_job_message(job: Any) -> str:
    """Explain why an object is not a job, with a hint at what the caller may have meant."""
    kind = job if isinstance(job, type) else type(job)
    name = kind.__name__
    if _looks_like_handler_class(kind):
        if job is kind:
            return f"{name} is a class. Pass an instance, which is the payload: {name}(...)."
        return f"{name} is not a task of this app. Declare it: app.task({name})."
    if inspect.isroutine(job):
        return f"{job.__name__} is a function, not a task. Declare it: app.task({job.__name__})."
    shown = reprlib.repr(job)
    return f"{shown} is not a task's name, a task, or an instance of a handler class."


def _looks_like_handler_class(kind: type[Any]) -> bool:
    return task_of(kind) is not None or (hasattr(kind, "identifier") and hasattr(kind, "run"))
