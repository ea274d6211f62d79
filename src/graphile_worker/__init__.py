"""Graphile Worker for Python: a PostgreSQL job queue shared with Node, Rust and plain SQL."""

from graphile_worker.administration import Cleaned, CleanupTask, Stats, TaskStats
from graphile_worker.client import WorkerUtils, quick_add_job, run_migrations
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
)
from graphile_worker.job import Job, JobKeyMode, JobSpec, JobState

__version__ = "0.1.0"

__all__ = [
    "Cleaned",
    "CleanupTask",
    "ConfigurationError",
    "DatabaseError",
    "EmbeddedServerError",
    "GraphileWorkerError",
    "InvalidJobError",
    "Job",
    "JobError",
    "JobKeyMode",
    "JobSpec",
    "JobState",
    "MissingExtraError",
    "SchemaError",
    "SchemaMissingError",
    "SchemaTooNewError",
    "SchemaTooOldError",
    "Stats",
    "TaskStats",
    "WorkerUtils",
    "quick_add_job",
    "run_migrations",
]
