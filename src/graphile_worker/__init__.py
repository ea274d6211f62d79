"""Graphile Worker for Python: a PostgreSQL job queue shared with Node, Rust and plain SQL."""

from graphile_worker.administration import Cleaned, CleanupTask, Stats, TaskStats
from graphile_worker.client import WorkerUtils, quick_add_job, run_migrations
from graphile_worker.context import JobContext
from graphile_worker.emitter import Events
from graphile_worker.errors import (
    ConfigurationError,
    DatabaseError,
    EmbeddedServerError,
    GraphileWorkerError,
    InvalidJobError,
    JobError,
    MissingExtraError,
    SchemaError,
    SchemaMissingError,
    SchemaTooNewError,
    SchemaTooOldError,
    ShutdownError,
    TaskError,
)
from graphile_worker.job import Job, JobKeyMode, JobSpec, JobState
from graphile_worker.runner import Drained, Runner, run, run_once

__version__ = "0.1.0"

__all__ = [
    "Cleaned",
    "CleanupTask",
    "ConfigurationError",
    "DatabaseError",
    "Drained",
    "EmbeddedServerError",
    "Events",
    "GraphileWorkerError",
    "InvalidJobError",
    "Job",
    "JobContext",
    "JobError",
    "JobKeyMode",
    "JobSpec",
    "JobState",
    "MissingExtraError",
    "Runner",
    "SchemaError",
    "SchemaMissingError",
    "SchemaTooNewError",
    "SchemaTooOldError",
    "ShutdownError",
    "Stats",
    "TaskError",
    "TaskStats",
    "WorkerUtils",
    "quick_add_job",
    "run",
    "run_migrations",
    "run_once",
]
