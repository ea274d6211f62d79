"""The values that pages and the API show.

Ids are strings, because a job's id may be larger than the integers that JavaScript keeps exactly. Times are
aware datetimes. Payloads are `msgspec.Raw`, the JSON as it is stored, so that every digit survives.
"""

from __future__ import annotations

from datetime import datetime  # noqa: TC003 - msgspec reads the annotations
from enum import StrEnum
from typing import Any, Literal

import msgspec


class Model(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base of all values that are shown."""


class Tab(StrEnum):
    """The states by which jobs are listed.

    A job is in one of the first five. `BLOCKED` jobs are those of the ready ones whose serial queue is busy.
    """

    READY = "ready"
    SCHEDULED = "scheduled"
    """Due later, for the first time."""
    RETRYING = "retrying"
    """Due later, after a failed attempt."""
    RUNNING = "running"
    FAILED = "failed"
    """No attempts are left."""
    BLOCKED = "blocked"


State = Literal["ready", "scheduled", "retrying", "running", "failed"]


class Count(Model, frozen=True, kw_only=True, gc=False):
    """A number of jobs that is not always counted to its end."""

    value: int
    exact: bool = True
    at_least: bool = False
    """Counting stopped at `value`: there are more. Other inexact values are estimates."""


class StateCounts(Model, frozen=True, kw_only=True, gc=False):
    """Jobs by state, of all tasks or of one."""

    ready: int = 0
    scheduled: int = 0
    retrying: int = 0
    running: int = 0
    failed: int = 0
    blocked: int = 0
    """How many of the ready jobs wait for their serial queue."""

    @property
    def total(self) -> int:
        """The number of jobs in any state."""
        return self.ready + self.scheduled + self.retrying + self.running + self.failed


class Look(Model, frozen=True, kw_only=True, gc=False):
    """One pass over the jobs table, which all viewers share."""

    at: datetime
    """When the pass was made, by the database's clock."""
    exact: bool = True
    """False if a sample of a very large table was scaled."""
    seconds: float = 0.0
    """How long the pass took."""


class TaskAge(Model, frozen=True, kw_only=True, gc=False):
    """How long the longest waiting ready job of a task is due."""

    task: str
    seconds: float
    ready: int


class ActivityWindow(Model, frozen=True, kw_only=True, gc=False):
    """What Python workers did in a period."""

    window: str
    """``1h``, ``24h`` or ``7d``."""
    done: int
    failed: int
    run_p50: float | None = None
    run_p95: float | None = None
    wait_p50: float | None = None
    wait_p95: float | None = None


class Rates(Model, frozen=True, kw_only=True, gc=False):
    """Jobs per second, over the last moments. `added` and `removed` count the work of all workers."""

    added: float | None = None
    removed: float | None = None
    """Jobs that left the table: completed or removed."""
    done: float | None = None
    """Jobs that Python workers completed, over the last five minutes."""
    failed: float | None = None
    """Attempts that failed on Python workers, over the last five minutes."""


class FailedJobRow(Model, frozen=True, kw_only=True, gc=False):
    """A job whose last attempt failed."""

    id: str
    task: str
    attempts: int
    max_attempts: int
    error: str
    """The first line, shortened."""
    failed_at: datetime | None = None


class DoctorFinding(Model, frozen=True, kw_only=True, gc=False):
    """What a check of the doctor found."""

    check: str
    level: Literal["ok", "note", "warning", "error"]
    message: str
    advice: str | None = None


class DoctorReport(Model, frozen=True, kw_only=True, gc=False):
    """What all checks found, the severe ones first."""

    at: datetime
    findings: list[DoctorFinding]


class DeployMark(Model, frozen=True, kw_only=True, gc=False):
    """When the first of the workers that are known started with a version."""

    at: datetime
    version: str
    language: str | None
    workers: int


class Overview(Model, frozen=True, kw_only=True, gc=False):
    """The state of the queue. A part that could not be read in time is empty, and `notices` says so."""

    schema: str
    now: datetime
    """The database's time."""
    counts: StateCounts
    look: Look | None
    oldest: list[TaskAge]
    """The tasks with the longest waiting jobs, at most ten."""
    rates: Rates
    windows: list[ActivityWindow]
    has_statistics: bool
    """False if no Python worker has written statistics: then `windows` says nothing."""
    other_languages: list[str]
    """Languages of known workers that do not write statistics: their work is counted in the table only."""
    workers_alive: int
    workers_known: int
    failures: list[FailedJobRow]
    findings: list[DoctorFinding]
    """Warnings and errors only."""
    deploys: list[DeployMark]
    notices: list[str]


class JobRow(Model, frozen=True, kw_only=True, gc=False):
    """A job in a list, without its payload."""

    id: str
    task: str
    state: State
    queue: str | None
    key: str | None
    priority: int
    attempts: int
    max_attempts: int
    run_at: datetime
    created_at: datetime
    updated_at: datetime
    locked_at: datetime | None = None
    worker: str | None = None
    flags: list[str] = []
    error: str | None = None
    """The first line of the last error, shortened."""
    blocked_by: str | None = None
    """The worker that holds the job's serial queue, if the job is ready and has to wait for it."""
    progress: float | None = None
    """From 0 to 1."""


class Searched(Model, frozen=True, kw_only=True, gc=False):
    """How much of the table a search has seen."""

    all: bool
    newest: int | None = None
    """If not all: only so many of the newest jobs."""


class JobPage(Model, frozen=True, kw_only=True, gc=False):
    """A page of jobs."""

    items: list[JobRow]
    next: str | None = None
    """Cursor of the next page; None on the last one."""
    prev: str | None = None
    count: Count | None = None
    """The number of matching jobs; None if it could not be counted in time."""
    searched: Searched
    notices: list[str] = []


class Attempt(Model, frozen=True, kw_only=True, gc=False):
    """An attempt to run a job, from the history."""

    attempt: int
    outcome: str
    """``completed``, ``failed``, ``cancelled``, ``snoozed`` or ``worker_died``."""
    is_final: bool
    run_at: datetime
    started_at: datetime | None
    ended_at: datetime
    duration: float | None
    wait: float | None
    worker: str | None
    error: str | None
    error_type: str | None
    traceback: str | None
    result: msgspec.Raw | None = None
    no_result: str | None = None


class ProgressReport(Model, frozen=True, kw_only=True, gc=False):
    """What a job has reported about itself."""

    value: float | None
    message: str | None
    at: datetime


class JobDetail(Model, frozen=True, kw_only=True, gc=False):
    """Everything about one job."""

    id: str
    exists: bool = True
    """False if the job is gone and only its history is known."""
    task: str
    state: State | Literal["completed", "cancelled", "gone"]
    """A job that is gone has the state of its last attempt, if the history has it."""
    queue: str | None
    key: str | None
    priority: int = 0
    attempts: int = 0
    max_attempts: int = 0
    run_at: datetime
    created_at: datetime
    updated_at: datetime | None = None
    locked_at: datetime | None = None
    worker: str | None = None
    flags: list[str] = []
    revision: int = 0
    blocked_by: str | None = None
    error: str | None = None
    """The whole last error."""
    error_type: str | None = None
    traceback: str | None = None
    failed_at: datetime | None = None
    fingerprint: str | None = None
    """The error without its numbers: see `FailureGroup`."""
    runs_for: float | None = None
    """Seconds since it was locked, if it is running."""
    payload: msgspec.Raw | None = None
    """JSON as it is stored; None if it is hidden."""
    payload_hidden: str | None = None
    """Why the payload is hidden."""
    progress: ProgressReport | None = None
    history: list[Attempt] = []
    """The attempts of this job, the first one first."""
    earlier: list[Attempt] = []
    """The last runs of the same task with the same key, the newest first."""
    earlier_ids: list[str] = []
    """The ids of the jobs of `earlier`, in the same order."""
    keeps_history: bool = True
    now: datetime
    notices: list[str] = []


class FailureGroup(Model, frozen=True, kw_only=True, gc=False):
    """Jobs of one task whose last attempts failed with the same error: equal except for numbers."""

    task: str
    error_type: str | None
    fingerprint: str
    """The first line of the error, with ``#`` for numbers, hexadecimal digits and UUIDs."""
    jobs: int
    permanent: int
    """How many of the jobs have no attempts left."""
    windows: dict[str, int]
    """Jobs whose last failure was within ``1h``, ``3h``, ``24h``, ``3d``, ``7d``; and ``all``."""
    last_failed_at: datetime | None
    example_id: str


class FailurePage(Model, frozen=True, kw_only=True, gc=False):
    """Failures by task and error, the largest groups first."""

    window: str
    groups: list[FailureGroup]
    look: Look | None = None
    truncated: bool = False
    """Whether there are more groups than were returned."""
    timed: bool = True
    """False if no times of failures are recorded, because only Node workers ran: all windows are ``all``."""
    notices: list[str] = []


class QueueRow(Model, frozen=True, kw_only=True, gc=False):
    """A serial queue."""

    queue: str
    locked_by: str | None = None
    locked_at: datetime | None = None
    jobs: int = 0
    ready: int = 0
    failed: int = 0
    oldest_due: datetime | None = None


class QueuePage(Model, frozen=True, kw_only=True, gc=False):
    """The busiest serial queues."""

    items: list[QueueRow]
    total: int
    """The number of queue names, at most `total_limit`."""
    total_is_exact: bool = True
    look: Look | None = None
    notices: list[str] = []


class TaskRow(Model, frozen=True, kw_only=True, gc=False):
    """A task: its jobs, and what Python workers did with them in the last hour."""

    task: str
    counts: StateCounts
    oldest_seconds: float | None = None
    done: int = 0
    failed: int = 0
    failure_ratio: float | None = None
    """Failed attempts among those that ended in the last hour; None if none ended."""
    run_p50: float | None = None
    run_p95: float | None = None
    wait_p95: float | None = None
    last_error: str | None = None
    served_by: list[str] = []
    """Ids of live workers that say that they serve this task."""
    is_served: bool | None = None
    """None if that cannot be known, because a worker that is alive does not publish its tasks."""


class TaskPage(Model, frozen=True, kw_only=True, gc=False):
    """All tasks that have jobs, statistics or workers."""

    items: list[TaskRow]
    look: Look | None = None
    notices: list[str] = []


class TaskDetail(Model, frozen=True, kw_only=True, gc=False):
    """One task."""

    row: TaskRow
    windows: list[ActivityWindow]
    failures: list[FailureGroup]
    notices: list[str] = []


class CronRun(Model, frozen=True, kw_only=True, gc=False):
    """A job that a recurring task added."""

    at: datetime
    outcome: str
    job_id: str
    duration: float | None = None


class CronRow(Model, frozen=True, kw_only=True, gc=False):
    """A recurring task."""

    id: str
    """Its identifier."""
    task: str | None
    """None if the schedule is known to the database only, because another program declares it."""
    expression: str | None
    english: str | None
    """The schedule in words, for example "at 04:00 every day"."""
    zone: str | None
    next_runs: list[datetime] = []
    last_run: datetime | None = None
    known_since: datetime | None = None
    lateness: float | None = None
    """Seconds by which the last job started late; None if unknown."""
    runs: list[CronRun] = []
    """The last runs in the history, the newest first, at most 20."""
    can_run: bool = False
    """Whether it can be run now from here: its declaration is known."""
    is_overdue: bool = False
    """Whether a run was due and no worker has added its job."""


class CronPage(Model, frozen=True, kw_only=True, gc=False):
    """All recurring tasks."""

    items: list[CronRow]
    now: datetime
    notices: list[str] = []


class WorkerJob(Model, frozen=True, kw_only=True, gc=False):
    """A job that a worker runs."""

    id: str
    task: str
    seconds: float


class WorkerRow(Model, frozen=True, kw_only=True, gc=False):
    """A worker that the database knows."""

    id: str
    language: str | None
    host: str | None
    pid: int | None
    version: str | None
    status: str
    """One word, for example ``ready``, ``silent`` or ``dead``; ``unknown`` without heartbeats, as in Node."""
    is_alive: bool
    slots: int | None
    jobs: int
    queues: int
    running: list[WorkerJob]
    """At most 20 of them."""
    started_at: datetime | None
    heartbeat_seconds: float | None
    """Seconds since the last heartbeat."""
    tasks: list[str] | None = None
    reason: str | None = None


class WorkerPage(Model, frozen=True, kw_only=True, gc=False):
    """All workers."""

    items: list[WorkerRow]
    look: Look | None = None
    notices: list[str] = []


class SeriesPoint(Model, frozen=True, kw_only=True, gc=False):
    """The value of a metric in one step."""

    at: datetime
    value: float | None


class Series(Model, frozen=True, kw_only=True, gc=False):
    """A metric over time."""

    metric: str
    task: str | None
    step: int
    """Seconds."""
    points: list[SeriesPoint]
    estimated: bool = False
    source: Literal["python", "table"]
    """``python``: counted by Python workers only. ``table``: counted in the table, for all workers."""


class Scaling(Model, frozen=True, kw_only=True, gc=False):
    """How much work there is, for autoscalers."""

    ready: int
    running: int
    blocked: int
    """Ready jobs that wait for their serial queue: further workers do not help them."""
    claimable: int
    """Ready jobs of which further workers could begin one now: a serial queue counts once."""
    desired: int
    """`claimable` plus `running`: the number of slots that would be busy."""
    oldest_ready_seconds: float
    at: datetime
    exact: bool


Action = Literal["retry", "run_now", "reschedule", "cancel", "fail", "complete", "remove"]
"""What can be done to jobs. ``run_now`` changes `run_at` only; ``retry`` also restores all attempts."""


class ActionPreview(Model, frozen=True, kw_only=True, gc=False):
    """What an action would change."""

    action: str
    count: Count
    """The jobs that the action applies to."""
    sample: list[JobRow]
    skipped: int = 0
    """Of given ids: jobs that the action does not apply to."""
    notices: list[str] = []


class ActionResult(Model, frozen=True, kw_only=True, gc=False):
    """What an action changed at once."""

    action: str
    changed: int
    requested: int = 0
    """Of those, running jobs that their workers were asked to stop."""
    unchanged: int = 0
    ids: list[str] = []
    """The changed jobs, at most 1,000."""
    operation: str | None = None
    """The id of the operation that goes on in the background, if there are too many jobs for one request."""


class Operation(Model, frozen=True, kw_only=True, gc=False):
    """A change of many jobs in the background."""

    id: str
    action: str
    filter: str
    """The filter as text, as in the search field."""
    user: str
    status: Literal["running", "done", "failed", "stopped"]
    total: Count
    seen: int
    changed: int
    requested: int
    started_at: datetime
    ended_at: datetime | None = None
    error: str | None = None

    @property
    def part(self) -> float:
        """How much is done, from 0 to 1."""
        if self.status == "done":
            return 1.0
        return min(1.0, self.seen / self.total.value) if self.total.value else 0.0


class Problem(Model, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """An error, as RFC 9457 has it."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str | None = None
    code: str | None = None
    """A word for programs, for example ``query_timeout``; Graphile's own code for a job that it refuses."""
    instance: str | None = None
    errors: dict[str, Any] | None = None
