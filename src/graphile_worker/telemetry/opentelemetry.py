"""`OpenTelemetry`: traces and metrics. Needs the extra ``graphile-worker[otel]``, which is the API only.

The program configures OpenTelemetry's SDK. Without one, the API does nothing.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from graphile_worker import __version__, events as event
from graphile_worker._base import context_carrier
from graphile_worker.errors import ConfigurationError, MissingExtraError
from graphile_worker.middleware import Middleware
from graphile_worker.outcome import describe_error
from graphile_worker.telemetry import conventions as names
from graphile_worker.telemetry.outcomes import reported_error, reported_type
from graphile_worker.telemetry.run_ends import RunEnds
from graphile_worker.telemetry.worker_totals import TaskLabels

try:
    from opentelemetry import context, metrics as metrics_api, trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, NonRecordingSpan, SpanKind, Status, StatusCode, set_span_in_context
except ImportError as error:
    raise MissingExtraError(
        "OpenTelemetry needs an extra package: pip install 'graphile-worker[otel]'"
    ) from error

from graphile_worker.telemetry import otel_context
from graphile_worker.telemetry.otel_metrics import Meters
from graphile_worker.telemetry.trace_carrier import make_carrier, read_carriers, with_carrier

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, TracerProvider

    from graphile_worker.context import JobContext
    from graphile_worker.job import Job, JobSpec
    from graphile_worker.middleware import Adding, AttachedWorker, Running

    Attributes: TypeAlias = dict[str, str | int | float]

_MAX_DESCRIPTION = 500
_MAX_LINKS = 128
"""As many links as the SDK keeps by default."""


class OpenTelemetry(Middleware):
    """Traces and metrics of workers, and of programs that add jobs, for OpenTelemetry.

    Pass it as middleware. Adding jobs makes a span ``send {task}``, and running a job a span
    ``process {task}`` that is linked to it. See docs/production/tracing.md.

    Args:
        propagation: ``"link"`` begins a new trace for each run and links it to the trace that added the job.
            ``"parent"`` continues that trace.
        without_carrier: Tasks whose payloads must not get the key ``_trace``: tasks in other languages that
            refuse unknown keys.
        traces: Whether to make spans.
        metrics: Whether to record metrics.
        tracer_provider: Provides the tracer, by default the global provider.
        meter_provider: Provides the meter, by default the global provider.
        server_address: The database's host, for the spans of programs that only add jobs. A worker knows it.
        server_port: The database's port.

    Example:
        >>> import asyncio
        >>> from graphile_worker import App
        >>> from graphile_worker.telemetry.opentelemetry import OpenTelemetry
        >>> from opentelemetry import trace
        >>> app = App(dsn=dsn, middleware=[OpenTelemetry()])
        >>> @app.task
        ... async def hello(name: str) -> None:
        ...     trace.get_current_span().set_attribute("name", name)
        >>> async def main():
        ...     await app.migrate()
        ...     await hello.enqueue(name="Ann")
        ...     return await app.run_once()
        >>> asyncio.run(main()).succeeded
        1
    """

    def __init__(
        self,
        *,
        propagation: Literal["link", "parent"] = "link",
        without_carrier: Iterable[str] = (),
        traces: bool = True,
        metrics: bool = True,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        server_address: str | None = None,
        server_port: int | None = None,
    ) -> None:
        if propagation not in {"link", "parent"}:
            raise ConfigurationError(f"propagation is {propagation!r}; it must be 'link' or 'parent'.")
        if isinstance(without_carrier, str):
            raise ConfigurationError(
                f"without_carrier is {without_carrier!r}; it must be a list of tasks: [{without_carrier!r}]."
            )
        self._is_parent = propagation == "parent"
        self._without_carrier = frozenset(without_carrier)
        self._traces = traces
        self._tracer = trace.get_tracer(
            "graphile_worker", __version__, tracer_provider, schema_url=names.SCHEMA_URL
        )
        self._labels = TaskLabels()
        self._meters: Meters | None = None
        if metrics:
            meter = metrics_api.get_meter(
                "graphile_worker", __version__, meter_provider, schema_url=names.SCHEMA_URL
            )
            self._meters = Meters(meter, self._labels)
        self._ends = RunEnds()
        self._server: Attributes = _server_attributes(server_address, server_port)
        self._knows_server = server_address is not None

    def attach(self, worker: AttachedWorker) -> None:
        """Observe a worker, suppress the spans of its own statements, and carry traces into its processes."""
        context_carrier.carry(otel_context.__name__)
        worker.around_own_work(otel_context.own_work)
        if self._meters is not None:
            self._meters.attach(worker)
        if not self._traces:
            return
        self._ends.attach(worker)
        worker.on(event.PoolExchange, lambda _: None if self._knows_server else self._read_server(worker))

    def _read_server(self, worker: AttachedWorker) -> None:
        self._knows_server = True
        self._server = _server_attributes(*worker.server())

    # Adding jobs

    async def enqueue(self, specs: Sequence[JobSpec], proceed: Adding) -> Sequence[Job]:
        """Add jobs inside a span ``send``, whose context they get."""
        if not specs or otel_context.is_suppressed():
            return await proceed()
        task = specs[0].identifier
        name = task if all(spec.identifier == task for spec in specs) else None
        started, error = monotonic(), None
        token = context.attach(otel_context.without_own_work())
        try:
            if not self._traces:
                return await proceed()
            return await self._send(specs, name, proceed)
        except BaseException as raised:
            error = raised
            raise
        finally:
            context.detach(token)
            if self._meters is not None:
                self._meters.record_sent(specs, name, monotonic() - started, error)

    async def _send(self, specs: Sequence[JobSpec], task: str | None, proceed: Adding) -> Sequence[Job]:
        attributes = self._attributes(names.SEND, task)
        if len(specs) > 1:
            attributes[names.BATCH_MESSAGE_COUNT] = len(specs)
        else:
            attributes |= _job_attributes(specs[0])
        with self._tracer.start_as_current_span(
            names.SEND if task is None else f"{names.SEND} {task}",
            kind=SpanKind.PRODUCER,
            attributes=attributes,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                jobs = await proceed(self._with_carriers(specs, span))
            except BaseException as error:
                _record_error(span, error)
                raise
            if len(specs) == 1 and jobs:
                span.set_attribute(names.MESSAGE_ID, str(jobs[0].id))
            return jobs

    def _with_carriers(self, specs: Sequence[JobSpec], span: Span) -> list[JobSpec]:
        carrier = make_carrier(span.get_span_context())
        if carrier is None:
            return list(specs)
        return [
            spec
            if spec.identifier in self._without_carrier
            else spec.replace(payload=with_carrier(spec.payload, carrier))
            for spec in specs
        ]

    # Running jobs

    async def execute(self, ctx: JobContext[Any], proceed: Running) -> Any:
        """Run a job inside a span ``process``."""
        if not self._traces or otel_context.is_suppressed():
            return await proceed()
        span, error = self._start(ctx), None
        token = context.attach(set_span_in_context(span))
        try:
            return await proceed()
        except BaseException as raised:
            error = raised
            raise
        finally:
            context.detach(token)
            self._ends.add(ctx, error, partial(_end, span))

    def _start(self, ctx: JobContext[Any]) -> Span:
        job, parent = ctx.job, Context()
        senders = list(islice(read_carriers(job.payload), _MAX_LINKS))
        if self._is_parent and len(senders) == 1 and not isinstance(job.payload, list):
            parent = set_span_in_context(NonRecordingSpan(senders.pop()), parent)
        attributes = self._attributes(names.PROCESS, job.task_identifier)
        attributes |= _job_attributes(job)
        attributes[names.MESSAGE_ID] = str(job.id)
        attributes[names.CLIENT_ID] = ctx.worker_id
        attributes[names.ATTEMPT] = job.attempts
        attributes[names.WAIT_SECONDS] = round(max(0.0, (ctx.now() - job.run_at).total_seconds()), 6)
        if isinstance(job.payload, list):
            attributes[names.BATCH_MESSAGE_COUNT] = len(job.payload)
        return self._tracer.start_span(
            f"{names.PROCESS} {job.task_identifier}",
            parent,
            SpanKind.CONSUMER,
            attributes,
            [Link(sender) for sender in senders],
        )

    def _attributes(self, operation: str, task: str | None) -> Attributes:
        attributes: Attributes = {
            names.SYSTEM: names.SYSTEM_NAME,
            names.OPERATION_NAME: operation,
            names.OPERATION_TYPE: operation,
            **self._server,
        }
        if task is not None:
            attributes[names.DESTINATION_NAME] = task
        return attributes


def _job_attributes(job: Job | JobSpec) -> Attributes:
    found = {
        names.QUEUE_NAME: job.queue_name,
        names.MAX_ATTEMPTS: job.max_attempts,
        names.PRIORITY: job.priority,
        names.JOB_KEY: getattr(job, "job_key", None) or getattr(job, "key", None),
    }
    return {name: value for name, value in found.items() if value is not None}


def _server_attributes(address: str | None, port: int | None) -> Attributes:
    found = {names.SERVER_ADDRESS: address, names.SERVER_PORT: port}
    return {name: value for name, value in found.items() if value is not None}


def _end(span: Span, outcome: str, error: BaseException | None) -> None:
    """End the span. A job that was snoozed, cancelled or interrupted has not failed."""
    span.set_attribute(names.OUTCOME, outcome)
    if error is not None:
        _record_error(span, error)
    span.end()


def _record_error(span: Span, error: BaseException) -> None:
    if not span.is_recording():
        return
    cause = reported_error(error)
    span.record_exception(cause)
    span.set_attribute(names.ERROR_TYPE, reported_type(error))
    span.set_status(Status(StatusCode.ERROR, describe_error(error)[:_MAX_DESCRIPTION]))
