"""`Meters`: the metrics of `OpenTelemetry`, those of the conventions and those of `metric_table`."""

from __future__ import annotations

import threading
from collections import Counter
from functools import cache, partial
from time import monotonic
from typing import TYPE_CHECKING

from opentelemetry.metrics import Observation

from graphile_worker import events as event
from graphile_worker.telemetry import conventions as names
from graphile_worker.telemetry.metric_table import WORKER_METRICS
from graphile_worker.telemetry.outcomes import reported_type
from graphile_worker.telemetry.worker_totals import Histogram, ProgramTotals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TypeAlias

    from opentelemetry.metrics import CallbackOptions, Histogram as Recorder, Meter

    from graphile_worker.job import JobSpec
    from graphile_worker.middleware import AttachedWorker
    from graphile_worker.telemetry.metric_table import Metric
    from graphile_worker.telemetry.worker_totals import TaskLabels, Values

    Attributes: TypeAlias = dict[str, str]

_FRESH = 0.5
"""Seconds for which totals are used again: all instruments are read one after the other."""


class Meters:
    """The instruments of a program.

    Counters and gauges are read from totals when OpenTelemetry collects them. OpenTelemetry has no such
    instrument for histograms, so they are recorded event by event.

    Args:
        meter: Makes the instruments.
        labels: The labels of tasks.
    """

    def __init__(self, meter: Meter, labels: TaskLabels) -> None:
        self._labels = labels
        self._totals = ProgramTotals(labels)
        self._reading = threading.Lock()
        self._values: Values = {}
        self._read_at = float("-inf")
        self._recorders: dict[str, Recorder] = {}
        self._attributes_of = cache(self._make_attributes)
        buckets = list(names.DURATION_BUCKETS)
        self._process_duration = meter.create_histogram(
            names.PROCESS_DURATION,
            "s",
            "Duration of processing a job.",
            explicit_bucket_boundaries_advisory=buckets,
        )
        self._operation_duration = meter.create_histogram(
            names.OPERATION_DURATION,
            "s",
            "Duration of adding jobs, and of exchanges that claim some.",
            explicit_bucket_boundaries_advisory=buckets,
        )
        self._sent = meter.create_counter(names.SENT_MESSAGES, "{message}", "Jobs that this program added.")
        self._consumed = meter.create_counter(names.CONSUMED_MESSAGES, "{message}", "Jobs that ran.")
        for metric in WORKER_METRICS:
            self._create(meter, metric)

    def _create(self, meter: Meter, metric: Metric) -> None:
        name, unit = instrument_name(metric), "s" if metric.name.endswith("_seconds") else ""
        if metric.kind == "histogram":
            self._recorders[metric.name] = meter.create_histogram(
                name, unit, metric.help, explicit_bucket_boundaries_advisory=list(metric.buckets)
            )
            return
        is_counter = metric.kind == "counter"
        create = meter.create_observable_counter if is_counter else meter.create_observable_gauge
        create(name, [partial(self._observe, metric)], unit, metric.help)

    def _observe(self, metric: Metric, _options: CallbackOptions) -> Iterator[Observation]:
        with self._reading:
            if monotonic() - self._read_at > _FRESH:
                self._values, self._read_at = self._totals.read(), monotonic()
            values = self._values.get(metric.name, {})
        for labels, value in values.items():
            if not isinstance(value, Histogram):
                yield Observation(value, dict(zip(metric.labels, labels, strict=True)))

    def attach(self, worker: AttachedWorker) -> None:
        """Record what a worker does."""
        self._totals.attach(worker)
        for kind in (event.JobSuccess, event.JobSnoozed, event.JobCancelled):
            worker.on(kind, partial(self._ran, worker, None))
        worker.on(event.JobFailure, lambda failed: self._ran(worker, failed.error, failed))
        worker.on(event.PoolExchange, self._exchanged)

    def _ran(
        self,
        worker: AttachedWorker,
        error: BaseException | None,
        run: event.JobSuccess | event.JobFailure | event.JobSnoozed | event.JobCancelled,
    ) -> None:
        job, duration = run.job, run.duration
        if isinstance(run, event.JobCancelled) and not duration:
            return  # it had not started
        label = self._labels.label(job.task_identifier)
        attributes = self._attributes_of(
            names.PROCESS, label, None if error is None else reported_type(error)
        )
        self._process_duration.record(duration, attributes)
        self._consumed.add(1, attributes)
        task = {"task": label}
        self._recorders["job_duration_seconds"].record(duration, task)
        wait = (worker.now() - job.run_at).total_seconds() - duration
        self._recorders["job_wait_seconds"].record(max(0.0, wait), task)

    def _exchanged(self, exchange: event.PoolExchange) -> None:
        for kind, asked, jobs in (
            ("claimed", exchange.wanted, exchange.claimed),
            ("recorded", exchange.recorded, exchange.recorded),
        ):
            if asked:
                self._recorders["exchange_duration_seconds"].record(exchange.duration, {"kind": kind})
                self._recorders["exchange_jobs"].record(jobs, {"kind": kind})
        if exchange.wanted:
            attributes = self._attributes_of(names.RECEIVE, None, None)
            self._operation_duration.record(exchange.duration, attributes)

    def record_sent(
        self, specs: Sequence[JobSpec], task: str | None, duration: float, error: BaseException | None
    ) -> None:
        """Record that jobs were added, or could not be.

        Args:
            specs: The jobs.
            task: The task of all of them; None if they have several.
            duration: The time that it took, in seconds.
            error: Why they could not be added.
        """
        kind = None if error is None else reported_type(error)
        label = None if task is None else self._labels.label(task)
        self._operation_duration.record(duration, self._attributes_of(names.SEND, label, kind))
        for identifier, count in Counter(spec.identifier for spec in specs).items():
            attributes = self._attributes_of(names.SEND, self._labels.label(identifier), kind)
            self._sent.add(count, attributes)
        if error is None:
            self._totals.count_added(spec.identifier for spec in specs)

    @staticmethod
    def _make_attributes(operation: str, task: str | None, error: str | None) -> Attributes:
        attributes = {
            names.SYSTEM: names.SYSTEM_NAME,
            names.OPERATION_NAME: operation,
            names.OPERATION_TYPE: operation,
        }
        if task is not None:
            attributes[names.DESTINATION_NAME] = task
        if error is not None:
            attributes[names.ERROR_TYPE] = error
        return attributes


def instrument_name(metric: Metric) -> str:
    """Return a metric's name in OpenTelemetry. Converted for Prometheus, it is the name in `metric_table`."""
    return "graphile_worker." + metric.name.removesuffix("_total").removesuffix("_seconds")
