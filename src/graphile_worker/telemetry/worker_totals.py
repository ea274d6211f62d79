"""`WorkerTotals`: counts what a worker does, from its events.

A job of a fast task takes some 15 microseconds, so counting it must take much less than one. So there is no
event for a completed job: those that an exchange has recorded are counted together. Usually all waits of a
batch belong in one bucket. Then only their sum is computed.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from datetime import timedelta
from functools import partial
from itertools import chain, repeat
from operator import sub
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

from graphile_worker import __version__, events as event
from graphile_worker._db.schema.steps import REVISION
from graphile_worker.outcome import Completed
from graphile_worker.telemetry.metric_table import (
    DURATION_BUCKETS,
    EXCHANGE_BUCKETS,
    EXCHANGE_JOBS_BUCKETS,
    MAX_TASKS,
    METRICS,
    OTHER_TASKS,
    WAIT_BUCKETS,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from datetime import datetime

    from graphile_worker._worker.execution.job_events import JobRun
    from graphile_worker.middleware import AttachedWorker

    Sample: TypeAlias = tuple[str, tuple[str, ...], "float | Histogram"]
    Values: TypeAlias = dict[str, dict[tuple[str, ...], "float | Histogram"]]

_FIRST_OUTCOMES = ("completed", "retried", "failed")
"""Outcomes that are reported before they happen: the first one counts as an increase then."""


class Histogram:
    """Counts of values by bucket."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Count many values."""
        if not self.observe_range(min(values), max(values), len(values)):
            for value in values:
                self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += sum(values)

    def observe_range(self, lowest: float, highest: float, count: int) -> bool:
        """Count values by their range, without their sum. Returns False if they need more than one bucket."""
        index = bisect_left(self.bounds, lowest)
        if index < len(self.bounds) and highest > self.bounds[index]:
            return False
        self.counts[index] += count
        return True

    def merge(self, other: Histogram) -> Histogram:
        """Return the sum of both."""
        merged = Histogram(self.bounds)
        merged.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        merged.sum = self.sum + other.sum
        return merged


class TaskLabels:
    """The labels of tasks: their identifiers, but only for so many tasks."""

    def __init__(self, limit: int = MAX_TASKS) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def label(self, task: str) -> str:
        """Return the label of a task."""
        if task in self._known:
            return task
        if len(self._known) >= self._limit:
            return OTHER_TASKS
        self._known.add(task)
        return task


class _TaskTotals:
    __slots__ = ("durations", "outcomes", "waits")

    def __init__(self) -> None:
        self.outcomes = dict.fromkeys(_FIRST_OUTCOMES, 0)
        self.durations = Histogram(DURATION_BUCKETS)
        self.waits = Histogram(WAIT_BUCKETS)


class WorkerTotals:
    """The totals of one worker. Its event loop writes them, and any thread may read them."""

    def __init__(self, worker: AttachedWorker, labels: TaskLabels) -> None:
        self._worker = worker
        self._labels = labels
        self._has_ended = False
        self._by_label: dict[str, _TaskTotals] = {}
        self._wall_clock = worker.now().timestamp() - monotonic()
        """What to add to the monotonic clock for the queue's time. It follows the database's clock."""
        self._exchanges = {kind: Histogram(EXCHANGE_BUCKETS) for kind in ("claimed", "recorded")}
        self._exchange_jobs = {kind: Histogram(EXCHANGE_JOBS_BUCKETS) for kind in ("claimed", "recorded")}
        self._counts = dict.fromkeys(
            ("database_errors_total", "reconnects_total", "fenced_total", "recovered_jobs_total"), 0
        )
        self._cron_added: dict[str, int] = {}
        self._cron_lateness: dict[str, float] = {}
        for task in worker.worker_pool.tasks:
            self._of(task)
        listeners: dict[type[event.Event], Callable[[Any], object]] = {
            event.JobFailure: self._failure,
            event.JobSnoozed: self._snoozed,
            event.JobCancelled: self._cancelled,
            event.JobInterrupted: self._interrupted,
            event.JobLost: self._lost,
            event.PoolExchange: self._exchange,
            event.PoolDatabaseError: lambda _: self._count("database_errors_total"),
            event.PoolDatabaseRecovered: lambda _: self._count("reconnects_total"),
            event.PoolFenced: lambda _: self._count("fenced_total"),
            event.WorkerRecovered: self._recovered,
            event.CronScheduled: self._cron,
        }
        for kind, listener in listeners.items():
            worker.on(kind, listener)
        worker.on_recorded(self._recorded)
        worker.on_end(self._end)

    def _of(self, task: str) -> _TaskTotals:
        label = self._labels.label(task)
        found = self._by_label.get(label)
        if found is None:
            found = self._by_label[label] = _TaskTotals()
        return found

    def _recorded(self, runs: Sequence[JobRun]) -> None:
        # Failed, snoozed and cancelled jobs are counted when they end.
        completed = [run for run in runs if run.outcome is Completed]
        tasks = {run.claimed.job.task_identifier for run in completed}
        for task in tasks:
            group = completed
            if len(tasks) > 1:
                group = [run for run in completed if run.claimed.job.task_identifier == task]
            totals = self._of(task)
            totals.outcomes["completed"] += len(group)
            totals.durations.observe_all([run.duration for run in group])
            started, due = [run.since for run in group], [run.claimed.job.run_at for run in group]
            self._count_waits(totals.waits, started, due)

    def _count_waits(self, waits: Histogram, started: list[float], due: list[datetime]) -> None:
        # Subtracting two datetimes is much cheaper than turning one into a float.
        reference, count = due[0], len(due)
        later = list(map(sub, due, repeat(reference)))
        first = self._wall_clock - reference.timestamp()
        lowest = first + min(started) - max(later).total_seconds()
        highest = first + max(started) - min(later).total_seconds()
        if waits.observe_range(lowest, highest, count):
            total = first * count + sum(started) - sum(later, timedelta()).total_seconds()
            waits.sum += max(0.0, total)  # the clock is estimated, and may be late
        else:
            waits.observe_all(
                [
                    max(0.0, first + start - difference.total_seconds())
                    for start, difference in zip(started, later, strict=True)
                ]
            )

    def _failure(self, failed: event.JobFailure) -> None:
        self._run(failed, "failed" if failed.retry_in is None else "retried", failed.duration)

    def _snoozed(self, snoozed: event.JobSnoozed) -> None:
        self._run(snoozed, "snoozed", snoozed.duration)

    def _cancelled(self, cancelled: event.JobCancelled) -> None:
        # It may have been cancelled before it started.
        self._run(cancelled, "cancelled", cancelled.duration or None)

    def _interrupted(self, interrupted: event.JobInterrupted) -> None:
        self._run(interrupted, "interrupted", None)

    def _lost(self, lost: event.JobLost) -> None:
        self._run(lost, "lost", None)

    def _run(self, about: event.JobEvent, outcome: str, duration: float | None) -> None:
        totals = self._of(about.job.task_identifier)
        totals.outcomes[outcome] = totals.outcomes.get(outcome, 0) + 1
        if duration is not None:
            totals.durations.observe(duration)
            wait = self._wall_clock + monotonic() - duration - about.job.run_at.timestamp()
            totals.waits.observe(max(0.0, wait))

    def _exchange(self, exchange: event.PoolExchange) -> None:
        self._wall_clock = self._worker.now().timestamp() - monotonic()
        if exchange.wanted:
            self._exchanges["claimed"].observe(exchange.duration)
            self._exchange_jobs["claimed"].observe(exchange.claimed)
        if exchange.recorded:
            self._exchanges["recorded"].observe(exchange.duration)
            self._exchange_jobs["recorded"].observe(exchange.recorded)

    def _recovered(self, recovered: event.WorkerRecovered) -> None:
        self._counts["recovered_jobs_total"] += len(recovered.recovered.jobs)

    def _cron(self, scheduled: event.CronScheduled) -> None:
        lateness = max(0.0, (self._worker.now() - scheduled.timestamp).total_seconds())
        for added in scheduled.jobs_and_identifiers:
            label = self._labels.label(added.job.identifier)
            self._cron_added[label] = self._cron_added.get(label, 0) + 1
            self._cron_lateness[label] = lateness

    def _count(self, name: str) -> None:
        self._counts[name] += 1

    def _end(self) -> None:
        self._has_ended = True

    def read(self) -> Iterator[Sample]:
        """Yield the current values. An ended worker has no gauges."""
        for label, totals in list(self._by_label.items()):
            for outcome, count in list(totals.outcomes.items()):
                yield "jobs_total", (label, outcome), count
            if any(totals.durations.counts):
                yield "job_duration_seconds", (label,), totals.durations
                yield "job_wait_seconds", (label,), totals.waits
        for kind, histogram in self._exchanges.items():
            yield "exchange_duration_seconds", (kind,), histogram
            yield "exchange_jobs", (kind,), self._exchange_jobs[kind]
        for name, count in self._counts.items():
            yield name, (), count
        for label, count in list(self._cron_added.items()):
            yield "cron_added_total", (label,), count
        if not self._has_ended:
            yield from self._read_gauges()

    def _read_gauges(self) -> Iterator[Sample]:
        for label, lateness in list(self._cron_lateness.items()):
            yield "cron_lateness_seconds", (label,), lateness
        health = self._worker.health()
        yield "jobs_running", (), health.running
        yield "slots", (), health.concurrency
        yield "jobs_prefetched", (), health.prefetched
        yield "ready", (), float(health.ready)
        yield "listening", (), float(health.listening)
        if health.last_heartbeat is not None:
            yield "heartbeat_age_seconds", (), health.last_heartbeat
        yield "event_loop_lag_seconds", (), health.loop_lag
        yield "info", (__version__, self._worker.worker_pool.schema, str(REVISION)), 1.0


class ProgramTotals:
    """The totals of all workers of a program, and of the jobs that it adds.

    Args:
        labels: The labels of tasks.
    """

    def __init__(self, labels: TaskLabels) -> None:
        self._labels = labels
        self._lock = threading.Lock()
        self._added: Counter[str] = Counter()
        self._workers: list[WorkerTotals] = []
        self._ended: Values = {}
        """The totals of workers that have ended."""

    def attach(self, worker: AttachedWorker) -> None:
        """Count what a worker does."""
        totals = WorkerTotals(worker, self._labels)
        with self._lock:
            self._workers.append(totals)
        worker.on_end(partial(self._retire, totals))

    def _retire(self, totals: WorkerTotals) -> None:
        """Keep the totals of a worker that has ended, because counters must not decrease."""
        with self._lock:
            self._workers.remove(totals)
            self._ended = merge_samples(chain(_samples_of(self._ended), totals.read()))

    def count_added(self, tasks: Iterable[str]) -> None:
        """Count jobs that the program has added."""
        with self._lock:
            for task, count in Counter(tasks).items():
                self._added[self._labels.label(task)] += count

    def read(self) -> Values:
        """Return the current values by metric and labels."""
        with self._lock:
            workers, added, ended = list(self._workers), dict(self._added), self._ended
        return merge_samples(
            chain(
                _samples_of(ended),
                chain.from_iterable(worker.read() for worker in workers),
                (("jobs_added_total", (task,), count) for task, count in added.items()),
            )
        )


def _samples_of(values: Values) -> Iterator[Sample]:
    for name, by_labels in values.items():
        for labels, value in by_labels.items():
            yield name, labels, value


def merge_samples(samples: Iterable[Sample]) -> Values:
    """Return the values by metric and labels. Values of several workers are merged into one."""
    merged: Values = {}
    for name, labels, value in samples:
        values = merged.setdefault(name, {})
        values[labels] = merge_values(METRICS[name].merge, values.get(labels), value)
    return merged


def merge_values(rule: str, one: float | Histogram | None, other: float | Histogram) -> float | Histogram:
    """Return one value for two; the other one if there is only one."""
    if one is None:
        return other
    if isinstance(one, Histogram) and isinstance(other, Histogram):
        return one.merge(other)
    if isinstance(one, Histogram) or isinstance(other, Histogram):
        raise TypeError("A histogram and a number cannot be merged.")
    return {"sum": one + other, "min": min(one, other), "max": max(one, other)}[rule]
