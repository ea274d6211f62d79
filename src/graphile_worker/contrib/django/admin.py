"""The queue in Django's admin: jobs with actions, and lists of everything else.

The lists stay fast with a million jobs: they read the newest rows by the primary key, count up to a limit,
and offer no filter with many values.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.contrib import admin, messages
from django.core.paginator import Paginator
from django.utils.functional import cached_property
from django.utils.translation import ngettext

from graphile_worker.contrib.django import app
from graphile_worker.contrib.django.models import Attempt, Crontab, Job, JobQueue, Task, Worker
from graphile_worker.errors import GraphileWorkerError
from graphile_worker.job import JobState

MAX_COUNT = 10_000
"""How many rows are counted and can be paged through. Filters find the others."""
MAX_CHOICES = 100


class BoundedPaginator(Paginator):
    """A paginator over the first rows of a table of any size."""

    @cached_property
    def count(self) -> int:
        """Return the number of rows, up to a limit."""
        return int(self.object_list.order_by()[:MAX_COUNT].count())


class ReadOnlyAdmin(admin.ModelAdmin):
    """Lists and shows rows that the admin must not change."""

    paginator = BoundedPaginator
    show_full_result_count = False
    list_per_page = 50
    sortable_by = ()  # most columns have no index

    def has_add_permission(self, request: Any) -> bool:  # noqa: ARG002 - Django's signature
        """Return that rows cannot be added."""
        return False

    def has_change_permission(self, request: Any, obj: Any = None) -> bool:  # noqa: ARG002
        """Return that rows cannot be changed."""
        return False

    def has_delete_permission(self, request: Any, obj: Any = None) -> bool:  # noqa: ARG002
        """Return that rows cannot be deleted."""
        return False


class StateFilter(admin.SimpleListFilter):
    """The state of a job."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return the states."""
        return [(str(state), str(state)) for state in JobState]

    def queryset(self, request: Any, queryset: Any) -> Any:  # noqa: ARG002
        """Return the jobs in the chosen state."""
        states = {str(state) for state in JobState}
        return queryset.in_state(self.value()) if self.value() in states else queryset


class TaskFilter(admin.SimpleListFilter):
    """The task of a job or an attempt."""

    title = "task"
    parameter_name = "task"

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return the first tasks by name."""
        rows = Task.objects.order_by("identifier").values_list("pk", "identifier")[:MAX_CHOICES]
        return [(str(pk), identifier) for pk, identifier in rows]

    def queryset(self, request: Any, queryset: Any) -> Any:  # noqa: ARG002
        """Return the rows of the chosen task."""
        value = self.value()
        return queryset.filter(task_id=int(value)) if value and value.isdecimal() else queryset


@admin.register(Job)
class JobAdmin(ReadOnlyAdmin):
    """Jobs, and what can be done with them."""

    list_display = ("id", "task", "queue", "state", "attempt", "priority", "run_at", "key", "error")
    list_filter = (StateFilter, TaskFilter)
    list_select_related = ("task", "job_queue")
    ordering = ("-id",)
    search_fields = ("key",)
    search_help_text = "The id or the key of a job, exactly"
    actions = ("retry", "run_now", "cancel", "fail", "remove")

    @admin.display(description="queue", empty_value="")
    def queue(self, job: Any) -> str | None:
        """Return the name of the job's serial queue."""
        return None if job.job_queue is None else job.job_queue.queue_name

    @admin.display(description="state")
    def state(self, job: Any) -> str:
        """Return the job's state."""
        return str(job.state)

    @admin.display(description="attempts")
    def attempt(self, job: Any) -> str:
        """Return the number of attempts so far, and the maximum."""
        return f"{job.attempts} of {job.max_attempts}"

    @admin.display(description="error", empty_value="")
    def error(self, job: Any) -> str | None:
        """Return the first line of the last error."""
        return None if not job.last_error else job.last_error.splitlines()[0][:100]

    def get_search_results(self, request: Any, queryset: Any, search_term: str) -> tuple[Any, bool]:  # noqa: ARG002
        """Return the job with this id or key. Both have an index."""
        term = search_term.strip()
        if not term:
            return queryset, False
        found = queryset.filter(key=term)
        if term.isdecimal() and len(term) < len(str(2**63)):
            found = queryset.filter(pk=int(term)) | found
        return found, False

    def has_retry_permission(self, request: Any) -> bool:
        """Return whether the user may change jobs."""
        return bool(request.user.has_perm("graphile_worker.change_job"))

    def has_remove_permission(self, request: Any) -> bool:
        """Return whether the user may remove jobs."""
        return bool(request.user.has_perm("graphile_worker.delete_job"))

    @admin.action(description="Retry the selected jobs, with all attempts", permissions=["retry"])
    def retry(self, request: Any, queryset: Any) -> None:
        """Run jobs again, now and with all their attempts."""
        self._change(
            request,
            queryset,
            lambda ids: len(
                app.utils.reschedule_jobs_sync(ids, run_at=timedelta(0), attempts=0, connection=app.database)
            ),
            "will be retried",
        )

    @admin.action(description="Run the selected jobs now", permissions=["retry"])
    def run_now(self, request: Any, queryset: Any) -> None:
        """Run waiting jobs now."""
        self._change(
            request,
            queryset,
            lambda ids: len(
                app.utils.reschedule_jobs_sync(ids, run_at=timedelta(0), connection=app.database)
            ),
            "will run now",
        )

    @admin.action(description="Cancel the selected jobs, also running ones", permissions=["retry"])
    def cancel(self, request: Any, queryset: Any) -> None:
        """Cancel jobs, even running ones."""
        reason = f"by {request.user.get_username()}"
        self._change(
            request,
            queryset,
            lambda ids: sum(app.cancel_job_sync(job_id, reason) is not None for job_id in ids),
            "cancelled, or asked to stop if running",
        )

    @admin.action(description="Fail the selected jobs permanently", permissions=["retry"])
    def fail(self, request: Any, queryset: Any) -> None:
        """Fail waiting jobs permanently."""
        reason = f"Failed by {request.user.get_username()}"
        self._change(
            request,
            queryset,
            lambda ids: len(app.utils.permanently_fail_jobs_sync(ids, reason, connection=app.database)),
            "failed permanently",
        )

    @admin.action(description="Remove the selected jobs", permissions=["remove"])
    def remove(self, request: Any, queryset: Any) -> None:
        """Delete waiting and failed jobs."""
        self._change(
            request,
            queryset,
            lambda ids: len(app.utils.complete_jobs_sync(ids, connection=app.database)),
            "removed",
        )

    def _change(self, request: Any, queryset: Any, change: Any, done: str) -> None:
        """Change the selected jobs, and say how many were changed."""
        ids = list(queryset.order_by().values_list("pk", flat=True)[: MAX_COUNT + 1])
        if len(ids) > MAX_COUNT:
            self.message_user(
                request,
                f"More than {MAX_COUNT:,} jobs are selected. Change so many on the command line: manage.py "
                "graphile_worker retry --help",
                messages.ERROR,
            )
            return
        try:
            changed = change(ids)
        except GraphileWorkerError as error:
            self.message_user(request, str(error), messages.ERROR)
            return
        text = ngettext("%(count)d job %(done)s.", "%(count)d jobs %(done)s.", changed)
        self.message_user(request, text % {"count": changed, "done": done})
        if changed < len(ids):
            self.message_user(
                request,
                f"{len(ids) - changed} of the selected jobs were not changed, because they are running, or "
                "have ended meanwhile.",
                messages.WARNING,
            )


@admin.register(JobQueue)
class JobQueueAdmin(ReadOnlyAdmin):
    """Serial queues."""

    list_display = ("queue_name", "locked_by", "locked_at")
    ordering = ("-id",)
    search_fields = ("=queue_name",)

    def get_search_results(self, request: Any, queryset: Any, search_term: str) -> tuple[Any, bool]:  # noqa: ARG002
        """Return the queue with this name."""
        return (queryset.filter(queue_name=search_term.strip()) if search_term.strip() else queryset), False


@admin.register(Worker)
class WorkerAdmin(ReadOnlyAdmin):
    """Workers that send heartbeats."""

    list_display = ("id", "started_at", "last_heartbeat_at")
    ordering = ("-started_at",)


@admin.register(Crontab)
class CrontabAdmin(ReadOnlyAdmin):
    """Recurring tasks."""

    list_display = ("identifier", "known_since", "last_execution")
    ordering = ("identifier",)


@admin.register(Attempt)
class AttemptAdmin(ReadOnlyAdmin):
    """The history: attempts that were kept."""

    list_display = ("job_id", "task", "attempt", "outcome", "ended_at", "duration", "worker", "error_type")
    list_display_links = None
    list_select_related = ("task",)
    list_filter = (TaskFilter,)
    ordering = ("-job_id",)
    search_fields = ("=job_id",)
    search_help_text = "The id of a job"

    def get_search_results(self, request: Any, queryset: Any, search_term: str) -> tuple[Any, bool]:  # noqa: ARG002
        """Return the attempts of the job with this id."""
        term = search_term.strip()
        if not term:
            return queryset, False
        return (queryset.filter(job_id=int(term)) if term.isdecimal() else queryset.none()), False
