"""A backend for ``django.tasks`` (Django 6.0 and newer), and for its backport ``django-tasks`` on Django 5.2.

Tasks declared with Django's ``@task`` become tasks of the project's app, so its workers run them. The name of
a job's task is the path of the function with slashes, because a crontab allows no dots.
"""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass, replace
from traceback import format_exception
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.core import checks
from django.utils import timezone
from django.utils.module_loading import import_string

from graphile_worker._tasks.options import as_spec_options
from graphile_worker.context import JobContext  # noqa: TC001 - the annotation is read at run time
from graphile_worker.contrib.django import app as default_app
from graphile_worker.errors import ConfigurationError, InvalidJobError
from graphile_worker.history import AttemptOutcome
from graphile_worker.job import MAX_IDENTIFIER_LENGTH, JobSpec
from graphile_worker.outcome import Cancel, Fail, Snooze

try:
    from django.tasks import signals
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
    from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist
    from django.utils.json import normalize_json
except ImportError:
    try:
        from django_tasks import signals
        from django_tasks.backends.base import BaseTaskBackend
        from django_tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
        from django_tasks.exceptions import InvalidTaskError as InvalidTask, TaskResultDoesNotExist
        from django_tasks.utils import normalize_json
    except ImportError:
        raise ImportError(
            "GraphileWorkerBackend needs django.tasks, which Django has from 6.0 on. On Django 5.2, install "
            "the backport: pip install django-tasks"
        ) from None

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphile_worker.contrib.django.django_app import DjangoApp
    from graphile_worker.job import Job

_OPTIONS = {"database", "results"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphileWorkerTask(Task):
    """A task of Django with options of Graphile Worker: arguments of ``@task``, and of `using`.

    Attributes:
        max_attempts: Maximum number of attempts; by default 25.
        job_key: Key of the job, or a function of the arguments. At most one pending job has the same key.
        job_key_mode: What happens if the key is in use; by default the pending job is replaced.
        serial: Name of a serial queue, whose jobs run one after another.
        timeout: How long an attempt may run, in seconds or as a timedelta.
        retry: The retry policy, as in ``@app.task(retry=...)``.

    Example:
        >>> from shop.tasks import add
        >>> add.using(priority=10, max_attempts=3, serial="sums").max_attempts
        3
    """

    max_attempts: int | None = None
    job_key: str | Callable[..., str | None] | None = None
    job_key_mode: str | None = None
    serial: str | None = None
    timeout: Any = None
    retry: Any = None

    def using(self, **changes: Any) -> Any:
        """Return the task with other options: Django's, or the attributes of this class except `retry`."""
        own = {name: changes.pop(name) for name in _JOB_OPTIONS if name in changes}
        changed = Task.using(self, **changes)
        return replace(changed, **own) if own else changed


_JOB_OPTIONS = ("max_attempts", "job_key", "job_key_mode", "serial", "timeout")


class GraphileWorkerBackend(BaseTaskBackend):
    """Adds the jobs of Django's tasks on Django's connection, and reads their results.

    ``OPTIONS`` may have ``"database"``, the alias of the queue's database, and ``"results"``: whether to keep
    attempts and results, by default if ``GRAPHILE_WORKER["HISTORY"]`` is ``"all"``.

    A task's ``queue_name`` does not matter: any worker of the project runs any task. A queue of Graphile
    Worker runs one job at a time, which is the option ``serial`` of a task.
    """

    task_class = GraphileWorkerTask
    supports_defer = True
    supports_async_task = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        if unknown := self.options.keys() - _OPTIONS:
            raise ConfigurationError(
                f'TASKS[{alias!r}]["OPTIONS"] has no {", ".join(sorted(unknown))}. It may have '
                f"{', '.join(sorted(_OPTIONS))}."
            )
        self.app: DjangoApp = default_app
        self._tasks: dict[str, Any] = {}

    @property
    def database(self) -> str:
        """The alias of the database that has the queue."""
        return str(self.options.get("database") or self.app.database)

    @property
    def supports_get_result(self) -> bool:
        """Whether attempts and results are kept."""
        given = self.options.get("results")
        return bool(self.app.history.keep == "all" if given is None else given)

    def validate_task(self, task: Any) -> None:
        """Check a task, and let workers run it."""
        super().validate_task(task)
        if isinstance(task, GraphileWorkerTask) and callable(task.timeout):
            raise InvalidTask("timeout must be a number of seconds or a timedelta.")
        self._declare(task)

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Add a job on Django's connection, so that it is part of the transaction."""
        self.validate_task(task)
        payload = {"args": normalize_json(list(args)), "kwargs": normalize_json(dict(kwargs))}
        spec = _spec_of(task, payload, args, kwargs)
        job = self.app.add_spec_sync(spec, connection=self.app._quietly(self.options.get("database")))  # noqa: SLF001 - its own
        result = _result(task, str(job.id), payload, self.alias, enqueued_at=job.created_at)
        signals.task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> Any:
        """Return the state of a job, with its result if it is complete.

        Raises:
            NotImplementedError: Results are not kept.
            TaskResultDoesNotExist: There is no such job of a Django task.
        """
        if not self.supports_get_result:
            raise NotImplementedError(
                'Results are not kept. Set GRAPHILE_WORKER["HISTORY"] = "all", or the option "results".'
            )
        from graphile_worker.contrib.django.models import Attempt, Job  # noqa: PLC0415 - apps must be loaded

        if not str(result_id).isdecimal() or int(result_id) >= 2**63:
            raise TaskResultDoesNotExist(result_id)
        # In this order: a job that ends in between has its last attempt in the second list.
        job = Job.objects.using(self.database).select_related("task").filter(pk=int(result_id)).first()
        attempts = list(
            Attempt.objects.using(self.database)
            .select_related("task")
            .filter(job_id=int(result_id))
            .order_by("ended_at")
        )
        row = job or next(reversed(attempts), None)
        task = None if row is None else self._find(row.task.identifier)
        is_known = job is not None or (attempts and attempts[-1].final)
        if row is None or task is None or not is_known:
            raise TaskResultDoesNotExist(result_id)
        return _read_result(task, str(result_id), self.alias, job, attempts)

    def check(self, **_: Any) -> list[Any]:
        """Check that the project has the app of the queue."""
        if apps.is_installed("graphile_worker.contrib.django"):
            return []
        return [
            checks.Error(
                "GraphileWorkerBackend needs the app of the queue.",
                hint='Add "graphile_worker.contrib.django" to INSTALLED_APPS.',
                id="graphile_worker.E003",
            )
        ]

    def _find(self, identifier: str) -> Any:
        """Return the task with this name; None if it is not one of Django's."""
        if identifier in self._tasks:
            return self._tasks[identifier]
        try:
            found = import_string(identifier.replace("/", "."))
        except ImportError:
            return None
        return found if isinstance(found, Task) else None

    def _declare(self, task: Any) -> None:
        """Declare the task in the app, unless it is only a copy with other options."""
        name = identifier_of(task)
        if self._tasks.setdefault(name, task) is not task or name in self.app.tasks:
            return
        keeps: dict[str, Any] = {"history": "all", "keep_result": True} if self.supports_get_result else {}
        run = _run_async if inspect.iscoroutinefunction(task.func) else _run_sync
        self.app.task(name, retry=getattr(task, "retry", None), **keeps)(run(self, task))


def identifier_of(task: Any) -> str:
    """Return the name of the jobs of a Django task: at most 128 characters, and none that a crontab refuses.

    A long path keeps its end, with a digest of the rest.
    """
    name = str(task.module_path).replace(".", "/")
    if len(name) <= MAX_IDENTIFIER_LENGTH:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return f"{digest}/{name[-(MAX_IDENTIFIER_LENGTH - len(digest) - 1) :]}"


def _spec_of(task: Any, payload: Any, args: Any, kwargs: Any) -> JobSpec:
    run_at = task.run_after
    if run_at is not None and timezone.is_naive(run_at):  # with USE_TZ = False
        run_at = timezone.make_aware(run_at, timezone.get_default_timezone())
    options: dict[str, Any] = {"priority": -task.priority, "run_at": run_at}
    if isinstance(task, GraphileWorkerTask):
        key = task.job_key(*args, **kwargs) if callable(task.job_key) else task.job_key
        options |= {
            "max_attempts": task.max_attempts,
            "job_key": key,
            "job_key_mode": task.job_key_mode,
            "queue_name": task.serial,
            "timeout": task.timeout,
        }
    try:
        return JobSpec(identifier_of(task), payload, **as_spec_options(options))
    except InvalidJobError as error:
        raise InvalidTask(str(error)) from error


def _result(task: Any, result_id: str, payload: Any, backend: str, **fields: Any) -> Any:
    defaults: dict[str, Any] = {
        "status": TaskResultStatus.READY,
        "enqueued_at": None,
        "started_at": None,
        "finished_at": None,
        "last_attempted_at": None,
        "errors": [],
        "worker_ids": [],
    }
    args, kwargs = _arguments(payload)
    return TaskResult(
        task=task, id=result_id, args=args, kwargs=kwargs, backend=backend, **{**defaults, **fields}
    )


def _arguments(payload: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments in a payload: none if it is not kept, or comes from a crontab without any."""
    given = payload if isinstance(payload, dict) else {}
    return list(given.get("args") or ()), dict(given.get("kwargs") or {})


def _read_result(task: Any, result_id: str, backend: str, job: Any, attempts: list[Any]) -> Any:
    """Return the result of a job from its row, if it is there, and its attempts."""
    last: Any = attempts[-1] if attempts else None
    ended = last is not None and last.final and (job is None or job.locked_at is None)
    running = not ended and job is not None and job.locked_at is not None
    if running:
        status = TaskResultStatus.RUNNING
    elif ended and last.outcome == AttemptOutcome.COMPLETED.code:
        status = TaskResultStatus.SUCCESSFUL
    elif ended or job.attempts >= job.max_attempts:
        status = TaskResultStatus.FAILED
    else:
        status = TaskResultStatus.READY
    row = last if job is None else job
    starts = [one.started_at for one in attempts if one.started_at is not None]
    starts += [job.locked_at] if running else []
    is_over = status in {TaskResultStatus.SUCCESSFUL, TaskResultStatus.FAILED}
    result = _result(
        task,
        result_id,
        row.payload,
        backend,
        status=status,
        enqueued_at=row.created_at,
        started_at=starts[0] if starts else None,
        last_attempted_at=starts[-1] if starts else None,
        finished_at=last.ended_at if is_over and last is not None else None,
        errors=[_error_of(one) for one in attempts if one.error is not None],
        worker_ids=[one.worker or "" for one in attempts] + ([job.locked_by] if running else []),
    )
    if status == TaskResultStatus.SUCCESSFUL:
        object.__setattr__(result, "_return_value", last.result)
    return result


def _error_of(attempt: Any) -> Any:
    path = attempt.error_type or "graphile_worker.errors.JobError"
    return TaskError(
        exception_class_path=path if "." in path else f"builtins.{path}",
        traceback=attempt.traceback or attempt.error,
    )


def _run_sync(backend: GraphileWorkerBackend, task: Any) -> Callable[..., Any]:
    """Return the function that jobs of a plain function run."""

    def run(payload: dict[str, Any], ctx: JobContext) -> Any:
        result = _start(backend, task, payload, ctx.job, ctx.worker_id)
        signals.task_started.send(type(backend), task_result=result)
        try:
            value = normalize_json(task.func(*_positional(task, result), **result.kwargs))
        except BaseException as error:
            if _fail(result, ctx.job, error):
                signals.task_finished.send(type(backend), task_result=result)
            raise
        _succeed(result, value)
        signals.task_finished.send(type(backend), task_result=result)
        return value

    return run


def _run_async(backend: GraphileWorkerBackend, task: Any) -> Callable[..., Any]:
    """Return the function that jobs of a coroutine function run."""

    async def run(payload: dict[str, Any], ctx: JobContext) -> Any:
        result = _start(backend, task, payload, ctx.job, ctx.worker_id)
        await signals.task_started.asend(type(backend), task_result=result)
        try:
            value = normalize_json(await task.func(*_positional(task, result), **result.kwargs))
        except BaseException as error:
            if _fail(result, ctx.job, error):
                await signals.task_finished.asend(type(backend), task_result=result)
            raise
        _succeed(result, value)
        await signals.task_finished.asend(type(backend), task_result=result)
        return value

    return run


def _start(backend: GraphileWorkerBackend, task: Any, payload: Any, job: Job, worker_id: str) -> Any:
    return _result(
        task,
        str(job.id),
        payload,
        backend.alias,
        status=TaskResultStatus.RUNNING,
        enqueued_at=job.created_at,
        started_at=job.locked_at,
        last_attempted_at=job.locked_at,
        # One for each attempt, because TaskContext counts them. Who made the earlier ones is not known here.
        worker_ids=[worker_id] * job.attempts,
    )


def _positional(task: Any, result: Any) -> list[Any]:
    return [TaskContext(task_result=result), *result.args] if task.takes_context else list(result.args)


def _fail(result: Any, job: Job, error: BaseException) -> bool:
    """Record a failure in the result. Return whether the job is not retried."""
    if isinstance(error, Fail | Cancel):
        is_last = True
    else:
        retries = isinstance(error, Snooze) or not isinstance(error, Exception)  # the second: interrupted
        is_last = not retries and job.attempts >= job.max_attempts
    result.errors.append(
        TaskError(
            exception_class_path=f"{type(error).__module__}.{type(error).__qualname__}",
            traceback="".join(format_exception(error)),
        )
    )
    object.__setattr__(result, "status", TaskResultStatus.FAILED if is_last else TaskResultStatus.READY)
    object.__setattr__(result, "finished_at", timezone.now() if is_last else None)
    return is_last


def _succeed(result: Any, value: Any) -> None:
    object.__setattr__(result, "_return_value", value)
    object.__setattr__(result, "status", TaskResultStatus.SUCCESSFUL)
    object.__setattr__(result, "finished_at", timezone.now())
