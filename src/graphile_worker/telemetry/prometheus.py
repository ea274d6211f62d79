"""`PrometheusMetrics`: metrics of workers for Prometheus. Needs the extra ``graphile-worker[prometheus]``."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from graphile_worker.errors import ConfigurationError, MissingExtraError
from graphile_worker.middleware import Middleware
from graphile_worker.telemetry.metric_table import MAX_TASKS, WORKER_METRICS
from graphile_worker.telemetry.worker_totals import Histogram, ProgramTotals, TaskLabels

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.exposition import CONTENT_TYPE_LATEST
except ImportError as error:
    raise MissingExtraError(
        "Metrics for Prometheus need an extra package: pip install 'graphile-worker[prometheus]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.registry import Collector

    from graphile_worker.job import Job, JobSpec
    from graphile_worker.middleware import Adding, AttachedWorker
    from graphile_worker.telemetry.metric_table import Metric


class PrometheusMetrics(Middleware):
    """Metrics of workers, and of programs that add jobs, for Prometheus.

    Pass it as middleware. A worker with a health port serves the metrics there, at ``/metrics``. See
    docs/production/metrics.md for the metrics.

    Args:
        registry: The registry to add the metrics to, such as ``prometheus_client.REGISTRY``. By default the
            metrics have a registry of their own.
        max_tasks: The number of tasks with a label of their own. The others share the label ``_other``.

    Example:
        >>> import asyncio
        >>> from graphile_worker import App
        >>> from graphile_worker.telemetry.prometheus import PrometheusMetrics
        >>> metrics = PrometheusMetrics()
        >>> app = App(dsn=dsn, middleware=[metrics])
        >>> @app.task
        ... async def hello(name: str) -> None:
        ...     pass
        >>> async def main():
        ...     await app.migrate()
        ...     await hello.enqueue(name="Ann")
        ...     await app.run_once()
        >>> asyncio.run(main())
        >>> labels = {"task": "hello", "outcome": "completed"}
        >>> metrics.registry.get_sample_value("graphile_worker_jobs_total", labels)
        1.0
    """

    def __init__(self, *, registry: CollectorRegistry | None = None, max_tasks: int = MAX_TASKS) -> None:
        self._totals = ProgramTotals(TaskLabels(max_tasks))
        self.registry = make_registry(registry, self)
        """The registry that has the metrics."""

    def attach(self, worker: AttachedWorker) -> None:
        """Count what the worker does, and serve the metrics on its health port."""
        self._totals.attach(worker)
        worker.serve("/metrics", self.page)

    async def enqueue(self, specs: Sequence[JobSpec], proceed: Adding) -> Sequence[Job]:  # noqa: ARG002
        """Count added jobs."""
        jobs = await proceed()
        self._totals.count_added(job.task_identifier for job in jobs)
        return jobs

    def page(self) -> tuple[str, bytes]:
        """Return the content type and the text of the registry's metrics, for an HTTP response."""
        return render(self.registry)

    def describe(self) -> list[Family]:
        """Return the metrics without values. The registry calls this method."""
        return [make_family(metric, {}) for metric in WORKER_METRICS]

    def collect(self) -> Iterator[Family]:
        """Yield the metrics with their values. The registry calls this method."""
        values = self._totals.read()
        for metric in WORKER_METRICS:
            yield make_family(metric, values.get(metric.name, {}))


def make_registry(given: CollectorRegistry | None, collector: Collector) -> CollectorRegistry:
    """Add the collector to the given registry, or to a new one, and return the registry.

    Raises:
        ConfigurationError: The registry already has these metrics.
    """
    registry = CollectorRegistry() if given is None else given
    try:
        registry.register(collector)
    except ValueError as error:
        raise ConfigurationError(
            f"The registry already has such metrics: {error}. Use one {type(collector).__name__}."
        ) from None
    return registry


def render(registry: CollectorRegistry) -> tuple[str, bytes]:
    """Return the content type and the text of all metrics in the registry."""
    return CONTENT_TYPE_LATEST, generate_latest(registry)


def make_family(metric: Metric, values: Mapping[tuple[str, ...], float | Histogram]) -> Family:
    """Return a metric with its values, in the form that the client library writes."""
    if metric.kind == "histogram":
        histograms = HistogramMetricFamily(metric.full_name, metric.help, labels=metric.labels)
        for labels, value in values.items():
            if isinstance(value, Histogram):
                bounds = [*(repr(float(bound)) for bound in value.bounds), "+Inf"]
                buckets = list(zip(bounds, map(float, accumulate(value.counts)), strict=True))
                histograms.add_metric(labels, buckets, value.sum)
        return histograms
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.full_name, metric.help, labels=metric.labels)
    for labels, value in values.items():
        if not isinstance(value, Histogram):
            family.add_metric(labels, float(value))
    return family
