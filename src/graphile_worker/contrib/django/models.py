"""Read-only models of the queue's tables, for the admin and for queries.

Their tables belong to the library: jobs are added by tasks, and changed by ``app.utils``.

Example:
    >>> from graphile_worker.contrib.django.models import Job
    >>> Job.objects.filter(task__identifier="send_email").count()
    0
"""

from __future__ import annotations

from typing import Any, NoReturn

from django.db import models
from django.db.models import F
from django.utils import timezone

from graphile_worker.client import find_schema
from graphile_worker.contrib.django import app, configuration
from graphile_worker.contrib.django.fields import JSONTextField
from graphile_worker.history import OUTCOMES
from graphile_worker.job import JobState


def table(name: str) -> str:
    """Return the name of a table in the queue's schema, as ``db_table`` takes it."""
    return f'{find_schema(configuration.read_setting("SCHEMA")).quoted}."{name}"'


class ReadOnlyError(TypeError):
    """Code tried to change a table of the queue through its model."""

    def __init__(self) -> None:
        super().__init__(
            "The queue's tables are read-only here. Add jobs with a task, and change them with app.utils: "
            "app.utils.reschedule_jobs_sync(...), for example."
        )


def _refuse(*_: object, **__: object) -> NoReturn:
    raise ReadOnlyError


class ReadOnlyQuerySet(models.QuerySet[Any]):
    """A query set that only reads."""

    create = bulk_create = bulk_update = get_or_create = update_or_create = update = delete = _refuse
    acreate = abulk_create = abulk_update = aget_or_create = aupdate_or_create = aupdate = adelete = _refuse


class QueueManager(models.Manager.from_queryset(ReadOnlyQuerySet)):  # type: ignore[misc]
    """A manager that reads the queue's database, if the code names no other one."""

    def get_queryset(self) -> Any:
        """Return a query set on the queue's database."""
        queryset = super().get_queryset()
        return queryset if self._db is not None else queryset.using(app.database)


class ReadOnlyModel(models.Model):
    """A table of the queue."""

    objects = QueueManager()

    class Meta:
        abstract = True
        managed = False
        default_permissions: tuple[str, ...] = ("view",)

    save = delete = asave = adelete = _refuse


class Task(ReadOnlyModel):
    """A task for which jobs were added."""

    id = models.IntegerField(primary_key=True)
    identifier = models.TextField()

    class Meta(ReadOnlyModel.Meta):
        db_table = table("_private_tasks")

    def __str__(self) -> str:
        return str(self.identifier)


class JobQueue(ReadOnlyModel):
    """A serial queue."""

    id = models.IntegerField(primary_key=True)
    queue_name = models.TextField("name")
    locked_at = models.DateTimeField(null=True)
    locked_by = models.TextField(null=True)
    is_available = models.BooleanField()

    class Meta(ReadOnlyModel.Meta):
        db_table = table("_private_job_queues")
        verbose_name = "queue"

    def __str__(self) -> str:
        return str(self.queue_name)


class JobQuerySet(ReadOnlyQuerySet):
    """Jobs, with filters for their states."""

    def in_state(self, state: JobState | str) -> Any:
        """Return the jobs in a state."""
        match JobState(state):
            case JobState.RUNNING:
                return self.filter(locked_at__isnull=False)
            case JobState.FAILED:
                return self.filter(locked_at__isnull=True, attempts__gte=F("max_attempts"))
            case JobState.SCHEDULED:
                return self.filter(is_available=True, run_at__gt=timezone.now())
            case JobState.READY:
                return self.filter(is_available=True, run_at__lte=timezone.now())


class JobManager(QueueManager.from_queryset(JobQuerySet)):  # type: ignore[misc]
    """The manager of jobs."""


class Job(ReadOnlyModel):
    """A job that waits, runs or has failed. Completed jobs are deleted."""

    id = models.BigIntegerField(primary_key=True)
    task = models.ForeignKey(Task, models.DO_NOTHING, db_constraint=False)
    job_queue = models.ForeignKey(
        JobQueue, models.DO_NOTHING, null=True, db_constraint=False, verbose_name="queue"
    )
    payload = JSONTextField()
    priority = models.SmallIntegerField()
    run_at = models.DateTimeField()
    attempts = models.SmallIntegerField()
    max_attempts = models.SmallIntegerField()
    last_error = models.TextField(null=True)
    created_at = models.DateTimeField()
    updated_at = models.DateTimeField()
    key = models.TextField(null=True)
    locked_at = models.DateTimeField(null=True)
    locked_by = models.TextField(null=True)
    revision = models.IntegerField()
    flags = models.JSONField(null=True)
    is_available = models.BooleanField()

    objects = JobManager()

    class Meta(ReadOnlyModel.Meta):
        db_table = table("_private_jobs")
        default_permissions = ("view", "change", "delete")

    def __str__(self) -> str:
        return f"job {self.pk}"

    @property
    def state(self) -> JobState:
        """The state of the job, by this machine's clock."""
        if self.locked_at is not None:
            return JobState.RUNNING
        if self.attempts >= self.max_attempts:
            return JobState.FAILED
        return JobState.SCHEDULED if self.run_at > timezone.now() else JobState.READY


class Worker(ReadOnlyModel):
    """A worker that sends heartbeats."""

    id = models.TextField(primary_key=True)
    last_heartbeat_at = models.DateTimeField()
    started_at = models.DateTimeField()
    metadata = models.JSONField(null=True)

    class Meta(ReadOnlyModel.Meta):
        db_table = table("_private_workers")

    def __str__(self) -> str:
        return str(self.pk)


class Crontab(ReadOnlyModel):
    """A recurring task, and when it was last added."""

    identifier = models.TextField(primary_key=True)
    known_since = models.DateTimeField()
    last_execution = models.DateTimeField(null=True)

    class Meta(ReadOnlyModel.Meta):
        db_table = table("_private_known_crontabs")
        verbose_name = "recurring task"

    def __str__(self) -> str:
        return str(self.identifier)


class Attempt(ReadOnlyModel):
    """An attempt to run a job, if the history keeps it. Several may have the same ``job_id``."""

    job_id = models.BigIntegerField("job", primary_key=True)
    attempt = models.SmallIntegerField()
    outcome = models.SmallIntegerField(choices=[(code, str(outcome)) for code, outcome in OUTCOMES.items()])
    final = models.BooleanField()
    ended_at = models.DateTimeField()
    started_at = models.DateTimeField(null=True)
    duration = models.FloatField(null=True)
    run_at = models.DateTimeField()
    created_at = models.DateTimeField()
    task = models.ForeignKey(Task, models.DO_NOTHING, db_constraint=False)
    queue_name = models.TextField(null=True)
    worker = models.TextField(null=True)
    key = models.TextField(null=True)
    error = models.TextField(null=True)
    error_type = models.TextField(null=True)
    traceback = models.TextField(null=True)
    result = JSONTextField(null=True)
    no_result = models.TextField(null=True)
    payload = JSONTextField(null=True)

    class Meta(ReadOnlyModel.Meta):
        db_table = table("_private_python_runs")
        verbose_name = "attempt"
        verbose_name_plural = "history"

    def __str__(self) -> str:
        return f"attempt {self.attempt} of job {self.job_id}"
