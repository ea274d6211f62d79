"""`QueueExporter`: metrics of the whole queue for Prometheus, read from the database now and then.

Counting jobs is a pass over the jobs table, so the exporter counts in the background, and every scrape gets
the last counts. Run one exporter per queue, not one per worker.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from time import monotonic
from typing import TYPE_CHECKING

from graphile_worker._base.durations import seconds
from graphile_worker._base.logs import library_logger as logger
from graphile_worker._db.queries import diagnostics
from graphile_worker._db.sql_files import Schema
from graphile_worker.errors import ConfigurationError, GraphileWorkerError
from graphile_worker.telemetry.metric_table import MAX_TASKS, OTHER_TASKS, QUEUE_METRICS
from graphile_worker.telemetry.prometheus import make_family, make_registry, render
from graphile_worker.telemetry.worker_totals import merge_samples

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family

    from graphile_worker._base.durations import Duration
    from graphile_worker.client import WorkerUtils
    from graphile_worker.stats import Stats, TaskStats
    from graphile_worker.telemetry.worker_totals import Histogram, Sample
    from graphile_worker.workers import WorkerInfo

MIN_INTERVAL = 15.0
"""The shortest time between two passes over the jobs table, in seconds."""
_PAUSE_FACTOR = 20
"""The pause is at least this many times as long as a pass, so that a large table is not read all the time."""


class QueueExporter:
    """Metrics of the whole queue: jobs by task and state, ages, workers, and the state of the jobs table.

    Args:
        utils: Connects to the queue.
        interval: Time between two passes over the jobs table, at least 15 seconds. For a large table it is
            longer: at least 20 times as long as a pass.
        registry: The registry to add the metrics to. By default the metrics have a registry of their own.
        max_tasks: The number of tasks with a label of their own: those with the most jobs. The others share
            the label ``_other``.
    """

    def __init__(
        self,
        utils: WorkerUtils,
        *,
        interval: Duration = MIN_INTERVAL,
        registry: CollectorRegistry | None = None,
        max_tasks: int = MAX_TASKS,
    ) -> None:
        self._utils = utils
        self._interval = seconds("interval", interval)
        if self._interval < MIN_INTERVAL:
            raise ConfigurationError(
                f"interval is {self._interval:g} s; it must be at least {MIN_INTERVAL:g} s, because each "
                "time is a pass over the jobs table."
            )
        self._max_tasks = max_tasks
        self._values: Mapping[str, Mapping[tuple[str, ...], float | Histogram]] = {"exporter_up": {(): 0.0}}
        self.is_up = False
        """Whether the last pass succeeded."""
        self.registry = make_registry(registry, self)
        """The registry that has the metrics."""

    async def run(self) -> None:
        """Read the database now and then, until cancelled."""
        while True:
            started = monotonic()
            await self.refresh()
            await asyncio.sleep(max(self._interval, _PAUSE_FACTOR * (monotonic() - started)))

    async def refresh(self) -> None:
        """Read the database now. If that fails, the metrics disappear until it succeeds again."""
        try:
            stats = await self._utils.stats()
            workers = await self._utils.workers(include_locks=False)
            async with self._utils.connection() as connection:
                upkeep = await diagnostics.read_upkeep(connection, Schema(self._utils.schema))
        except (GraphileWorkerError, OSError) as error:
            if self.is_up:
                logger.warning("Cannot read the queue: %s", error)
            self.is_up, self._values = False, {"exporter_up": {(): 0.0}}
            return
        if not self.is_up:
            logger.info("Reading the queue every %.0f s", self._interval)
        self.is_up = True
        self._values = merge_samples(
            [
                *self._task_samples(stats, upkeep.now),
                *_worker_samples(workers),
                ("jobs_table_dead_tuples", (), upkeep.dead_tuples),
                ("oldest_xmin_age", (), upkeep.oldest_xmin_age),
                ("notification_queue_usage_ratio", (), upkeep.notification_queue_usage),
                ("exporter_up", (), 1.0),
            ]
        )

    def _task_samples(self, stats: Stats, now: datetime) -> Iterator[Sample]:
        by_size = sorted(stats.tasks.items(), key=lambda item: -item[1].total)
        labelled = dict(by_size[: self._max_tasks])
        if others := [task for _, task in by_size[self._max_tasks :]]:
            labelled[OTHER_TASKS] = stats.of_tasks(others)
        for label, task in labelled.items():
            for state in ("ready", "scheduled", "running", "failed"):
                yield "queue_jobs", (label, state), getattr(task, state)
            yield "queue_oldest_ready_age_seconds", (label,), _age(task, now)

    def page(self) -> tuple[str, bytes]:
        """Return the content type and the text of the registry's metrics, for an HTTP response."""
        return render(self.registry)

    def describe(self) -> list[Family]:
        """Return the metrics without values. The registry calls this method."""
        return [make_family(metric, {}) for metric in QUEUE_METRICS]

    def collect(self) -> Iterator[Family]:
        """Yield the metrics with the values of the last pass. The registry calls this method."""
        values = self._values
        for metric in QUEUE_METRICS:
            yield make_family(metric, values.get(metric.name, {}))


def _age(task: TaskStats, now: datetime) -> float:
    return 0.0 if task.oldest_due is None else max(0.0, (now - task.oldest_due).total_seconds())


def _worker_samples(workers: Sequence[WorkerInfo]) -> list[Sample]:
    counts = Counter((worker.language or "unknown", worker.status) for worker in workers)
    return [("workers", labels, count) for labels, count in counts.items()]
