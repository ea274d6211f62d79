# The public names, listed once: for type checkers, and for lazy_names, which imports each on first use.

from graphile_worker import (
    cron as cron,
    doctor as doctor,
    embedded as embedded,
    errors as errors,
    events as events,
    middleware as middleware,
    retry as retry,
    testing as testing,
)
from graphile_worker._client.administration import CleanupResult as CleanupResult, CleanupTask as CleanupTask
from graphile_worker._tasks.decorator import task as task
from graphile_worker.app import App as App
from graphile_worker.client import (
    WorkerUtils as WorkerUtils,
    quick_add_job as quick_add_job,
    quick_add_job_sync as quick_add_job_sync,
    run_migrations as run_migrations,
)
from graphile_worker.context import JobContext as JobContext
from graphile_worker.cron import (
    Cron as Cron,
    CronItem as CronItem,
    format_crontab as format_crontab,
    parse_cron_items as parse_cron_items,
    parse_crontab as parse_crontab,
)
from graphile_worker.errors import (
    BatchError as BatchError,
    ConfigurationError as ConfigurationError,
    CrontabError as CrontabError,
    DatabaseError as DatabaseError,
    EmbeddedServerError as EmbeddedServerError,
    GraphileWorkerError as GraphileWorkerError,
    InvalidJobError as InvalidJobError,
    InvalidPayloadError as InvalidPayloadError,
    JobCancelledError as JobCancelledError,
    JobError as JobError,
    JobFailedError as JobFailedError,
    JobLostError as JobLostError,
    JobSkippedError as JobSkippedError,
    MissingExtraError as MissingExtraError,
    PoolTimeoutError as PoolTimeoutError,
    ResultTimeoutError as ResultTimeoutError,
    ResultUnknownError as ResultUnknownError,
    SchemaError as SchemaError,
    SchemaMissingError as SchemaMissingError,
    SchemaTooNewError as SchemaTooNewError,
    SchemaTooOldError as SchemaTooOldError,
    ShutdownError as ShutdownError,
    TaskError as TaskError,
    TaskProcessError as TaskProcessError,
    TaskTimeoutError as TaskTimeoutError,
)
from graphile_worker.events.emitter import Events as Events
from graphile_worker.history import (
    AttemptOutcome as AttemptOutcome,
    History as History,
    HistorySummary as HistorySummary,
    JobAttempt as JobAttempt,
    PrunedHistory as PrunedHistory,
)
from graphile_worker.job import (
    Job as Job,
    JobHandle as JobHandle,
    JobKeyMode as JobKeyMode,
    JobSpec as JobSpec,
    JobState as JobState,
    Progress as Progress,
)
from graphile_worker.limits import Limit as Limit, LimitState as LimitState, Pause as Pause
from graphile_worker.middleware import Middleware as Middleware
from graphile_worker.outcome import (
    Cancel as Cancel,
    Fail as Fail,
    Retry as Retry,
    RunSummary as RunSummary,
    Snooze as Snooze,
)
from graphile_worker.runner import Runner as Runner, run as run, run_once as run_once
from graphile_worker.stats import (
    Activity as Activity,
    FailureGroup as FailureGroup,
    JobCounts as JobCounts,
    Metric as Metric,
    Point as Point,
    Series as Series,
    Stats as Stats,
    TaskStats as TaskStats,
)
from graphile_worker.tasks import Task as Task
from graphile_worker.workers import (
    Health as Health,
    RecoveredWorker as RecoveredWorker,
    RecoveryAction as RecoveryAction,
    WorkerInfo as WorkerInfo,
)

__version__: str
__all__: list[str]  # noqa: PYI035 - lazy_names fills it
