"""Middleware: code that is called around running and adding jobs, and before jobs are claimed.

`base` defines the class to derive from, and `adding` calls the middleware around adding jobs. The other
modules are built-in middleware. The worker calls the middleware around running jobs and before claims.
"""

from graphile_worker.middleware.attached import AttachedWorker
from graphile_worker.middleware.base import Adding, Middleware, Running
from graphile_worker.middleware.blocked_loop import BlockedLoop
from graphile_worker.middleware.concurrency import ConcurrencyLimits
from graphile_worker.middleware.slow_jobs import SlowJobs

__all__ = [
    "Adding",
    "AttachedWorker",
    "BlockedLoop",
    "ConcurrencyLimits",
    "Middleware",
    "Running",
    "SlowJobs",
]
