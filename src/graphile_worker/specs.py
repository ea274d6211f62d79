"""The specs of jobs, however people name what is to be added."""

from __future__ import annotations

import inspect
import reprlib
from typing import TYPE_CHECKING, Any, TypeAlias

from graphile_worker.errors import InvalidJobError
from graphile_worker.job import JobSpec
from graphile_worker.task_options import JobOptions, check_job_options, check_many, with_timeout
from graphile_worker.tasks import HandlerClass, Task, task_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    AnyTask: TypeAlias = Task[Any, Any, Any]
    Named: TypeAlias = str | AnyTask | HandlerClass


class Specs:
    """Makes specs: for an app, and for what runs in a worker.

    Args:
        tasks: Those that are known here, by their identifiers.
        of_others: Whether instances of classes that are tasks elsewhere will do, too.
    """

    def __init__(self, tasks: Mapping[str, AnyTask], *, of_others: bool = False) -> None:
        self._tasks = tasks
        self._of_others = of_others

    def of(self, job: Named, payload: Any, options: JobOptions) -> JobSpec:
        """The spec of a job; checked, if its task is known here.

        Args:
            job: The name of a task, a task, or an instance of a class that is one.
            payload: What the task gets; None means ``{}``. An instance is a payload itself.
            options: What else is said of the job.
        """
        check_job_options("add_job", options)
        if isinstance(job, str):
            known = self._tasks.get(job)
            if known is None:
                return JobSpec(job, payload, **with_timeout(options))
            spec = known.spec_for({} if payload is None else payload, options)
            # A worker may have it by another name.
            return spec if spec.identifier == job else spec.replace(identifier=job)
        if isinstance(job, Task):
            known = self._tasks.get(job.identifier, job)
            return known.spec_for({} if payload is None else payload, options)
        handler = self._handler_of(job)
        if payload is not None:
            raise InvalidJobError(
                f"A {type(job).__name__} is a payload itself; there cannot be another.", argument="payload"
            )
        return handler.make_spec((job,), {}, options)

    def each(self, jobs: Iterable[JobSpec | HandlerClass]) -> Iterable[JobSpec]:
        """The specs of many. Of a list they are a list, which can be sent again if the server wants that."""
        check_many("add_jobs", "specs", jobs)
        specs = map(self._spec, jobs)
        return list(specs) if isinstance(jobs, list | tuple) else specs

    def _spec(self, job: Any) -> JobSpec:
        if isinstance(job, JobSpec):
            return job
        if isinstance(job, str | bytes) or type(job) is tuple:
            raise InvalidJobError(
                f"add_jobs takes specs, and instances of classes that are tasks, not {reprlib.repr(job)}. "
                "Task.spec(...) makes a spec, and so does JobSpec(identifier, payload).",
                argument="job",
            )
        return self.of(job, None, {})

    def _handler_of(self, job: Any) -> AnyTask:
        kind = type(job)
        found = next((task for task in self._tasks.values() if task.handler_class is kind), None)
        if found is None and self._of_others:
            found = task_of(kind)
        if found is None:
            raise InvalidJobError(_why_not(job), argument="job")
        return found


def _why_not(job: Any) -> str:
    """What is wrong about something that is no job, and what was meant, perhaps."""
    kind = job if isinstance(job, type) else type(job)
    name = kind.__name__
    if _could_be_handler(kind):
        if job is kind:
            return f"{name} is a class. Pass an instance of it, which is the payload: {name}(...)."
        return f"{name} is no task of this app. Declare it: app.task({name})."
    if inspect.isroutine(job):
        return f"{job.__name__} is a function, and no task. Declare it: app.task({job.__name__})."
    shown = reprlib.repr(job)
    return f"{shown} is neither the name of a task, nor a task, nor an instance of a class that is one."


def _could_be_handler(kind: type[Any]) -> bool:
    return task_of(kind) is not None or (hasattr(kind, "identifier") and hasattr(kind, "run"))
