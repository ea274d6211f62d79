"""Measure what integrations cost a worker: ``python -m benchmarks.telemetry``.

Two workers with a concurrency of 24 run trivial jobs, one with an integration and one without, in turns on
one database. The result is the ratio of the processor time that they take, because that of the clock depends
on what else the machine does. For Prometheus it should be at most 1.03. OpenTelemetry is measured with and
without its SDK, and Sentry without a DSN.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from statistics import median
from time import process_time
from typing import TYPE_CHECKING

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from graphile_worker import JobSpec, Middleware, WorkerUtils, run_once
from graphile_worker.telemetry.opentelemetry import OpenTelemetry
from graphile_worker.telemetry.prometheus import PrometheusMetrics
from graphile_worker.telemetry.sentry import Sentry
from graphile_worker.testing import Databases, running_server

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opentelemetry.sdk.trace import ReadableSpan

_CONCURRENCY = 24


async def _trivial(_payload: object) -> None:
    """Do nothing."""


async def _seconds(dsn: str, jobs: int, middleware: list[Middleware]) -> float:
    async with WorkerUtils(dsn) as utils:
        await utils.add_jobs([JobSpec("trivial")] * jobs)
    started = process_time()
    summary = await run_once({"trivial": _trivial}, dsn, concurrency=_CONCURRENCY, middleware=middleware)
    taken = process_time() - started
    if summary.succeeded != jobs:
        raise RuntimeError(f"{summary.succeeded} of {jobs} jobs succeeded")
    return taken


def _otel_with_sdk(*, traces: bool, metrics: bool) -> OpenTelemetry:
    """Return OpenTelemetry with an SDK that drops what it exports."""
    tracer_provider = TracerProvider()
    tracer_provider.add_span_processor(BatchSpanProcessor(_Drop()))
    return OpenTelemetry(
        traces=traces,
        metrics=metrics,
        tracer_provider=tracer_provider,
        meter_provider=MeterProvider([InMemoryMetricReader()]),
    )


class _Drop(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:  # noqa: ARG002
        return SpanExportResult.SUCCESS


INTEGRATIONS: dict[str, Callable[[], Middleware]] = {
    "prometheus": PrometheusMetrics,
    "otel": OpenTelemetry,
    "otel-sdk-metrics": lambda: _otel_with_sdk(traces=False, metrics=True),
    "otel-sdk-traces": lambda: _otel_with_sdk(traces=True, metrics=False),
    "sentry": Sentry,
}


async def measure(dsn: str, jobs: int, rounds: int, make: Callable[[], Middleware]) -> float:
    """Return how many times as long the jobs take with an integration: the median of all rounds."""
    ratios = []
    await _seconds(dsn, jobs, [])  # the first run is slower
    for number in range(rounds):
        is_first = number % 2 == 0
        first = await _seconds(dsn, jobs, [make()] if is_first else [])
        second = await _seconds(dsn, jobs, [] if is_first else [make()])
        ratio = first / second if is_first else second / first
        each = [f"{seconds / jobs * 1e6:.1f}" for seconds in (first, second)]
        print(f"round {number + 1}: {' and '.join(each)} µs per job, ratio {ratio:.3f}")
        ratios.append(ratio)
    return median(ratios)


async def _measure_on_new_database(
    server: str, jobs: int, rounds: int, make: Callable[[], Middleware]
) -> float:
    with Databases(server) as databases:
        async with databases.fresh() as dsn:
            return await measure(dsn, jobs, rounds, make)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the ratio."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.telemetry", description=__doc__)
    parser.add_argument("--jobs", type=int, default=20_000, metavar="N", help="jobs per run [20000]")
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="pairs of runs [8]")
    parser.add_argument("--only", choices=INTEGRATIONS, help="measure one integration [all]")
    given = parser.parse_args(arguments)
    os.environ["NO_LOG_SUCCESS"] = ""
    found = {}
    with running_server() as server:
        for name in [given.only] if given.only else INTEGRATIONS:
            print(f"{name}:")
            found[name] = asyncio.run(
                _measure_on_new_database(server, given.jobs, given.rounds, INTEGRATIONS[name])
            )
    print(f"Processor time per job at concurrency {_CONCURRENCY}:")
    for name, ratio in found.items():
        print(f"  {name:18} {(ratio - 1) * 100:+.1f} %")


if __name__ == "__main__":
    main()
