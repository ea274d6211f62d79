"""The metrics, each declared once: names, types, labels, buckets, and how several values become one."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

PREFIX = "graphile_worker_"
MAX_TASKS = 200
"""Number of tasks with a label of their own. The others share `OTHER_TASKS`."""
OTHER_TASKS = "_other"
OUTCOMES = ("completed", "retried", "failed", "snoozed", "cancelled", "interrupted", "lost")

DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)
WAIT_BUCKETS = (0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 1800, 7200)
EXCHANGE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 10)
EXCHANGE_JOBS_BUCKETS = (0, 1, 2, 5, 10, 25, 50, 100, 250, 500, 1000)

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Merge: TypeAlias = Literal["sum", "min", "max"]


class Metric(NamedTuple):
    """A metric."""

    name: str
    """Its name without the prefix."""
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    merge: Merge = "sum"
    """How the values of several workers become one."""

    @property
    def full_name(self) -> str:
        """Its name in Prometheus."""
        return PREFIX + self.name


WORKER_METRICS = (
    Metric("jobs_total", "counter", "Runs of jobs, by outcome.", ("task", "outcome")),
    Metric("job_duration_seconds", "histogram", "Duration of runs.", ("task",), DURATION_BUCKETS),
    Metric(
        "job_wait_seconds",
        "histogram",
        "Time from the moment when a job was due until it started.",
        ("task",),
        WAIT_BUCKETS,
    ),
    Metric("jobs_added_total", "counter", "Jobs that this program added.", ("task",)),
    Metric("jobs_running", "gauge", "Running jobs."),
    Metric("slots", "gauge", "Number of jobs that can run at once."),
    Metric("jobs_prefetched", "gauge", "Claimed jobs that wait for a slot."),
    Metric(
        "exchange_duration_seconds",
        "histogram",
        "Duration of exchanges that asked for jobs (claimed) or sent outcomes (recorded); many do both.",
        ("kind",),
        EXCHANGE_BUCKETS,
    ),
    Metric(
        "exchange_jobs",
        "histogram",
        "Jobs that an exchange claimed, and outcomes that it recorded.",
        ("kind",),
        EXCHANGE_JOBS_BUCKETS,
    ),
    Metric("ready", "gauge", "Whether the worker claims jobs: 1 or 0.", merge="min"),
    Metric("listening", "gauge", "Whether notifications of new jobs arrive: 1 or 0.", merge="min"),
    Metric("heartbeat_age_seconds", "gauge", "Time since the last recorded heartbeat.", merge="max"),
    Metric("event_loop_lag_seconds", "gauge", "Time that the event loop takes to respond.", merge="max"),
    Metric("database_errors_total", "counter", "Requests of the worker that the database did not answer."),
    Metric("reconnects_total", "counter", "Outages of the database after which the worker went on."),
    Metric("fenced_total", "counter", "Times that the worker gave up its jobs without a heartbeat."),
    Metric("recovered_jobs_total", "counter", "Jobs of dead workers that this worker released."),
    Metric("cron_added_total", "counter", "Jobs that recurring tasks added.", ("task",)),
    Metric(
        "cron_lateness_seconds",
        "gauge",
        "Time from the minute of a recurring task until its job was added, last time.",
        ("task",),
        merge="max",
    ),
    Metric("info", "gauge", "Always 1.", ("version", "schema", "revision"), merge="max"),
)
"""What a worker, or a program that adds jobs, knows itself."""

QUEUE_METRICS = (
    Metric("queue_jobs", "gauge", "Jobs in the database.", ("task", "state"), merge="max"),
    Metric(
        "queue_oldest_ready_age_seconds",
        "gauge",
        "Time since the ready job that waits longest was due; 0 if none waits.",
        ("task",),
        merge="max",
    ),
    Metric("workers", "gauge", "Workers that the database knows.", ("language", "state"), merge="max"),
    Metric("jobs_table_dead_tuples", "gauge", "Dead rows of the jobs table.", merge="max"),
    Metric(
        "oldest_xmin_age",
        "gauge",
        "Transactions since the oldest one that keeps dead rows from being removed.",
        merge="max",
    ),
    Metric(
        "notification_queue_usage_ratio",
        "gauge",
        "Used part of the server's notification queue, from 0 to 1.",
        merge="max",
    ),
    Metric("exporter_up", "gauge", "Whether the exporter could read the database: 1 or 0.", merge="min"),
)
"""What only the database knows. `graphile-worker exporter` serves these metrics."""

METRICS = {metric.name: metric for metric in (*WORKER_METRICS, *QUEUE_METRICS)}
