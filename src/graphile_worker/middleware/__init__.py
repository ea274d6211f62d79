"""Middleware: what stands around the running and the adding of jobs, and may change what comes of it."""

from graphile_worker.middleware.base import Adding, Middleware, Running
from graphile_worker.middleware.blocked_loop import BlockedLoop
from graphile_worker.middleware.concurrency import ConcurrencyLimits
from graphile_worker.middleware.slow_jobs import SlowJobs

__all__ = ["Adding", "BlockedLoop", "ConcurrencyLimits", "Middleware", "Running", "SlowJobs"]
