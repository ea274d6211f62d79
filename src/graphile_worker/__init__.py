"""Graphile Worker for Python: a PostgreSQL job queue shared with Node, Rust and plain SQL."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphile_worker.administration import Cleaned, CleanupTask
    from graphile_worker.app import App
    from graphile_worker.client import WorkerUtils, quick_add_job, run_migrations
    from graphile_worker.context import JobContext
    from graphile_worker.cron import Cron, CronItem, format_crontab, parse_cron_items, parse_crontab
    from graphile_worker.decorator import task
    from graphile_worker.emitter import Events
    from graphile_worker.errors import (
        BatchError,
        ConfigurationError,
        CrontabError,
        DatabaseError,
        EmbeddedServerError,
        GraphileWorkerError,
        InvalidJobError,
        InvalidPayloadError,
        JobError,
        JobSkippedError,
        MissingExtraError,
        PoolTimeoutError,
        SchemaError,
        SchemaMissingError,
        SchemaTooNewError,
        SchemaTooOldError,
        ShutdownError,
        TaskError,
        TaskProcessError,
        TaskTimeoutError,
    )
    from graphile_worker.job import Job, JobKeyMode, JobSpec, JobState
    from graphile_worker.liveness import Health, Recovered, Recovery, WorkerInfo
    from graphile_worker.middleware import Middleware
    from graphile_worker.outcome import Cancel, Fail, Retry, Snooze
    from graphile_worker.runner import Drained, Runner, run, run_once
    from graphile_worker.stats import Stats, TaskStats
    from graphile_worker.tasks import Task

__version__ = "0.1.0"

__all__ = [
    "App",
    "BatchError",
    "Cancel",
    "Cleaned",
    "CleanupTask",
    "ConfigurationError",
    "Cron",
    "CronItem",
    "CrontabError",
    "DatabaseError",
    "Drained",
    "EmbeddedServerError",
    "Events",
    "Fail",
    "GraphileWorkerError",
    "Health",
    "InvalidJobError",
    "InvalidPayloadError",
    "Job",
    "JobContext",
    "JobError",
    "JobKeyMode",
    "JobSkippedError",
    "JobSpec",
    "JobState",
    "Middleware",
    "MissingExtraError",
    "PoolTimeoutError",
    "Recovered",
    "Recovery",
    "Retry",
    "Runner",
    "SchemaError",
    "SchemaMissingError",
    "SchemaTooNewError",
    "SchemaTooOldError",
    "ShutdownError",
    "Snooze",
    "Stats",
    "Task",
    "TaskError",
    "TaskProcessError",
    "TaskStats",
    "TaskTimeoutError",
    "WorkerInfo",
    "WorkerUtils",
    "format_crontab",
    "parse_cron_items",
    "parse_crontab",
    "quick_add_job",
    "run",
    "run_migrations",
    "run_once",
    "task",
]

# Imported when they are used: the command's --help need not wait for a database driver.
_HOMES = {
    name: module
    for module, names in {
        "administration": (
            "Cleaned",
            "CleanupTask",
        ),
        "app": ("App",),
        "client": (
            "WorkerUtils",
            "quick_add_job",
            "run_migrations",
        ),
        "context": ("JobContext",),
        "cron": (
            "Cron",
            "CronItem",
            "format_crontab",
            "parse_cron_items",
            "parse_crontab",
        ),
        "emitter": ("Events",),
        "decorator": ("task",),
        "errors": (
            "BatchError",
            "ConfigurationError",
            "CrontabError",
            "DatabaseError",
            "EmbeddedServerError",
            "GraphileWorkerError",
            "InvalidJobError",
            "InvalidPayloadError",
            "JobError",
            "JobSkippedError",
            "MissingExtraError",
            "PoolTimeoutError",
            "SchemaError",
            "SchemaMissingError",
            "SchemaTooNewError",
            "SchemaTooOldError",
            "ShutdownError",
            "TaskError",
            "TaskProcessError",
            "TaskTimeoutError",
        ),
        "job": (
            "Job",
            "JobKeyMode",
            "JobSpec",
            "JobState",
        ),
        "liveness": (
            "Health",
            "Recovered",
            "Recovery",
            "WorkerInfo",
        ),
        "middleware": ("Middleware",),
        "outcome": (
            "Cancel",
            "Fail",
            "Retry",
            "Snooze",
        ),
        "runner": (
            "Drained",
            "Runner",
            "run",
            "run_once",
        ),
        "stats": ("Stats", "TaskStats"),
        "tasks": ("Task",),
    }.items()
    for name in names
}


def __getattr__(name: str) -> object:
    if name in _HOMES.values():
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
