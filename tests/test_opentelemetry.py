"""OpenTelemetry: spans, their links and attributes, metrics, and the trace in payloads."""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
from opentelemetry import trace
from opentelemetry.instrumentation.asyncpg import AsyncPGInstrumentor
from opentelemetry.instrumentation.utils import suppress_instrumentation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import messaging_attributes
from opentelemetry.semconv._incubating.metrics import messaging_metrics
from opentelemetry.semconv.attributes import error_attributes, server_attributes
from opentelemetry.trace import SpanKind, StatusCode

from graphile_worker import (
    App,
    Cancel,
    ConfigurationError,
    Fail,
    JobContext,
    JobSpec,
    Middleware,
    MissingExtraError,
    Retry,
    Snooze,
    WorkerUtils,
    run_once,
)
from graphile_worker.telemetry import conventions
from graphile_worker.telemetry.metric_table import WORKER_METRICS
from graphile_worker.telemetry.opentelemetry import OpenTelemetry
from graphile_worker.telemetry.otel_metrics import instrument_name
from graphile_worker.telemetry.trace_carrier import read_carriers
from graphile_worker.testing import drain
from support import computing
from support.jobs import add
from support.pages import Page
from support.postgres import ROOT
from support.workers import EventRecorder, nothing, running

if TYPE_CHECKING:
    from collections.abc import Iterator

RUST = {"trace_id": "0af7651916cd43dd8448eb211c80319c", "span_id": "b7ad6b7169203331", "flags": 1}
"""What the Rust port writes."""
NODE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=1"}
"""What a Node program writes that passes its propagator a carrier."""


class Telemetry:
    """An SDK whose spans and metrics stay in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracer_provider = TracerProvider()
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self._reader = InMemoryMetricReader()
        self.meter_provider = MeterProvider([self._reader])
        self.tracer = self.tracer_provider.get_tracer("test")

    def middleware(self, **options: Any) -> OpenTelemetry:
        return OpenTelemetry(
            tracer_provider=self.tracer_provider, meter_provider=self.meter_provider, **options
        )

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def named(self, name: str) -> ReadableSpan:
        [span] = [span for span in self.spans if span.name == name]
        return span

    def metrics(self) -> dict[str, list[Any]]:
        data = self._reader.get_metrics_data()
        assert data is not None
        return {
            metric.name: list(metric.data.data_points)
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    found = Telemetry()
    yield found
    found.tracer_provider.shutdown()
    found.meter_provider.shutdown()


@contextmanager
def traced_statements(telemetry: Telemetry) -> Iterator[None]:
    instrumentor: Any = AsyncPGInstrumentor  # it has no type annotations
    instrumentor = instrumentor()
    instrumentor.instrument(tracer_provider=telemetry.tracer_provider)
    try:
        yield
    finally:
        instrumentor.uninstrument()


def ids(span: ReadableSpan) -> tuple[int, int]:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id, context.span_id


def linked(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


def carried(payload: Any) -> list[tuple[int, int]]:
    return [(span.trace_id, span.span_id) for span in read_carriers(payload)]


class TestConventions:
    def test_attributes_have_the_names_of_the_semantic_conventions(self) -> None:
        modules = (messaging_attributes, error_attributes, server_attributes)
        known = {value for module in modules for value in vars(module).values() if isinstance(value, str)}
        own = "messaging.graphile_worker."
        used = {
            value
            for name, value in vars(conventions).items()
            if name.isupper() and isinstance(value, str) and "." in value and name != "SCHEMA_URL"
        }
        metrics = {
            conventions.PROCESS_DURATION,
            conventions.OPERATION_DURATION,
            conventions.SENT_MESSAGES,
            conventions.CONSUMED_MESSAGES,
        }
        assert {name for name in used - metrics if not name.startswith(own)} <= known
        assert metrics <= {value for value in vars(messaging_metrics).values() if isinstance(value, str)}

    async def test_a_job_has_a_send_span_and_a_linked_process_span(
        self, database: str, telemetry: Telemetry
    ) -> None:
        middleware = telemetry.middleware()
        app = App(dsn=database, middleware=[middleware])

        @app.task
        async def hello(name: str) -> None: ...

        with telemetry.tracer.start_as_current_span("request") as request:
            job = await app.add_job("hello", {"name": "Ann"}, job_key="k", priority=3, queue_name="q")
        await app.run_once()
        await app.close()
        send, process = telemetry.named("send hello"), telemetry.named("process hello")
        assert send.parent is not None
        assert send.parent.span_id == request.get_span_context().span_id
        assert (send.kind, process.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
        assert process.parent is None
        assert ids(process)[0] != ids(send)[0]
        assert linked(process) == [ids(send)]
        assert process.instrumentation_scope is not None
        assert process.instrumentation_scope.schema_url == conventions.SCHEMA_URL
        assert process.status.status_code is StatusCode.UNSET
        attributes = dict(process.attributes or {})
        assert attributes.pop("messaging.client.id", "").__class__ is str
        assert attributes.pop("messaging.graphile_worker.wait_seconds", -1.0) >= 0  # type: ignore[operator]
        assert str(attributes.pop("server.address")) in database
        attributes.pop("server.port", None)
        common = {
            "messaging.system": "graphile-worker",
            "messaging.destination.name": "hello",
            "messaging.message.id": str(job.id),
            "messaging.graphile_worker.queue_name": "q",
            "messaging.graphile_worker.priority": 3,
            "messaging.graphile_worker.job_key": "k",
        }
        assert attributes == {
            **common,
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.graphile_worker.attempt": 1,
            "messaging.graphile_worker.max_attempts": 25,
            "messaging.graphile_worker.outcome": "completed",
        }
        assert dict(send.attributes or {}) == {
            **common,
            "messaging.operation.name": "send",
            "messaging.operation.type": "send",
        }


class TestAdding:
    async def test_many_jobs_share_one_send_span(self, database: str, telemetry: Telemetry) -> None:
        middleware = telemetry.middleware()
        async with WorkerUtils(database, middleware=[middleware]) as utils:
            jobs = await utils.add_jobs([JobSpec("a", {"n": n}) for n in range(3)])
            mixed = await utils.add_jobs([JobSpec("a"), JobSpec("b")])
        alike, different = telemetry.named("send a"), telemetry.named("send")
        assert (alike.attributes or {})["messaging.batch.message_count"] == 3
        assert [carried(job.payload) for job in jobs] == [[ids(alike)]] * 3
        assert [carried(job.payload) for job in mixed] == [[ids(different)]] * 2
        assert "messaging.destination.name" not in (different.attributes or {})

    async def test_carrier_is_readable_for_rust_and_for_w3c_propagators(
        self, database: str, telemetry: Telemetry
    ) -> None:
        async with WorkerUtils(database, middleware=[telemetry.middleware()]) as utils:
            job = await utils.add_job("a", {"n": 1})
        trace, span = ids(telemetry.named("send a"))
        trace_id, span_id = f"{trace:032x}", f"{span:016x}"
        flags = job.payload["_trace"]["flags"]
        assert flags & 1, "sampled"
        assert job.payload == {
            "n": 1,
            "_trace": {
                "trace_id": trace_id,
                "span_id": span_id,
                "flags": flags,
                "traceparent": f"00-{trace_id}-{span_id}-{flags:02x}",
            },
        }

    @pytest.mark.parametrize(
        "payload", [[1, {"a": 2}], "text", 7, True, {"_trace": RUST}, {"_trace": None}], ids=repr
    )
    async def test_other_payloads_and_the_callers_own_trace_stay_as_they_are(
        self, database: str, telemetry: Telemetry, payload: Any
    ) -> None:
        async with WorkerUtils(database, middleware=[telemetry.middleware()]) as utils:
            assert (await utils.add_job("a", payload)).payload == payload

    async def test_tasks_without_carrier_get_their_payload_unchanged(
        self, database: str, telemetry: Telemetry
    ) -> None:
        middleware = telemetry.middleware(without_carrier=["strict"])
        async with WorkerUtils(database, middleware=[middleware]) as utils:
            assert (await utils.add_job("strict", {"n": 1})).payload == {"n": 1}
            assert "_trace" in (await utils.add_job("other")).payload

    async def test_failure_to_add_is_an_error_of_the_send_span(
        self, database: str, telemetry: Telemetry
    ) -> None:
        class Refuse(Middleware):
            async def enqueue(self, specs: Any, proceed: Any) -> Any:  # noqa: ARG002
                raise PermissionError("no")

        async with WorkerUtils(database, middleware=[telemetry.middleware(), Refuse()]) as utils:
            with pytest.raises(PermissionError):
                await utils.add_job("a")
        span = telemetry.named("send a")
        assert span.status.status_code is StatusCode.ERROR
        assert (span.attributes or {})["error.type"] == "PermissionError"
        [point] = telemetry.metrics()["messaging.client.sent.messages"]
        assert point.attributes["error.type"] == "PermissionError"

    async def test_suppressed_code_gets_no_span(self, database: str, telemetry: Telemetry) -> None:
        async with WorkerUtils(database, middleware=[telemetry.middleware()]) as utils:
            with suppress_instrumentation():
                job = await utils.add_job("a", {"n": 1})
        assert job.payload == {"n": 1}
        assert telemetry.spans == []


async def outcomes(payload: Any) -> None:
    match payload:
        case {"do": "raise"}:
            raise ValueError("broken")
        case {"do": "retry"}:
            raise Retry("later", after=60) from LookupError("cause")
        case {"do": "fail"}:
            raise Fail("no")
        case {"do": "snooze"}:
            raise Snooze(60)
        case {"do": "cancel"}:
            raise Cancel("no")


class TestRunning:
    @pytest.mark.parametrize("drained", [False, True], ids=["worker", "drained in a test"])
    async def test_outcome_of_each_attempt_is_in_its_span(
        self, database: str, telemetry: Telemetry, *, drained: bool
    ) -> None:
        middleware = telemetry.middleware()
        async with WorkerUtils(database) as utils:
            for do in ("return", "raise", "retry", "fail", "snooze", "cancel"):
                await utils.add_job("task", {"do": do}, job_key=do)
            await utils.add_job("task", {"do": "raise"}, job_key="last", max_attempts=1)
        if drained:
            app = App(dsn=database, middleware=[middleware])

            @app.task
            async def task(payload: dict[str, Any]) -> None:
                await outcomes(payload)

            await drain(app)
            await app.close()
        else:
            await run_once({"task": outcomes}, database, middleware=[middleware])
        found = {}
        for span in telemetry.spans:
            attributes = span.attributes or {}
            found[attributes["messaging.graphile_worker.job_key"]] = (
                attributes["messaging.graphile_worker.outcome"],
                span.status.status_code is StatusCode.ERROR,
                attributes.get("error.type"),
            )
        assert found == {
            "return": ("completed", False, None),
            "raise": ("retried", True, "ValueError"),
            "retry": ("retried", True, "LookupError"),
            "fail": ("failed", True, "Fail"),
            "snooze": ("snoozed", False, None),
            "cancel": ("cancelled", False, None),
            "last": ("failed", True, "ValueError"),
        }

    async def test_outcome_is_the_one_that_the_retry_policy_chose(
        self, database: str, telemetry: Telemetry
    ) -> None:
        def never(_failure: object) -> float:
            raise Fail

        app = App(dsn=database, middleware=[telemetry.middleware()])

        @app.task(retry=never)
        async def once() -> None:
            raise ValueError

        await once.enqueue()
        await app.run_once()
        await app.close()
        attributes = telemetry.named("process once").attributes or {}
        assert attributes["messaging.graphile_worker.outcome"] == "failed"

    @pytest.mark.parametrize("carrier", [RUST, NODE, {**RUST, **NODE}], ids=["rust", "node", "both"])
    @pytest.mark.parametrize("propagation", ["link", "parent"])
    async def test_traces_of_rust_and_node_programs_are_continued(
        self, db: asyncpg.Connection, database: str, telemetry: Telemetry, carrier: Any, propagation: str
    ) -> None:
        await add(db, payload={"_trace": carrier})
        middleware = telemetry.middleware(propagation=propagation)
        await run_once({"task": nothing}, database, middleware=[middleware])
        span = telemetry.named("process task")
        sender = (int(RUST["trace_id"], 16), int(RUST["span_id"], 16))  # type: ignore[call-overload]
        if propagation == "link":
            assert (span.parent, linked(span)) == (None, [sender])
            assert ids(span)[0] != sender[0]
        else:
            assert span.parent is not None
            assert (span.parent.trace_id, span.parent.span_id, span.parent.is_remote) == (*sender, True)
            assert linked(span) == []

    @pytest.mark.parametrize(
        "trace",
        [1, "x", [], {}, {"trace_id": 1}, {"trace_id": "0" * 32, "span_id": "0" * 16},
         {"traceparent": "00-1"}, {"traceparent": 5}, {**RUST, "flags": "x"}, {**RUST, "flags": -1}],
        ids=repr,
    )  # fmt: skip
    def test_odd_trace_data_is_ignored(self, trace: Any) -> None:
        assert carried({"_trace": trace}) == []

    async def test_batch_has_one_span_with_a_link_per_item(self, database: str, telemetry: Telemetry) -> None:
        app = App(dsn=database, middleware=[telemetry.middleware()])

        @app.task(batch=True)
        async def many(items: list[Any]) -> None: ...

        senders = [{**RUST, "span_id": f"{number:016x}"} for number in (1, 2)]
        await app.add_job("many", [{"_trace": sender} for sender in senders] + [{"n": 1}])
        await app.run_once()
        await app.close()
        span = telemetry.named("process many")
        assert [span_id for _, span_id in linked(span)] == [1, 2]
        assert (span.attributes or {})["messaging.batch.message_count"] == 3

    async def test_context_is_carried_into_threads_processes_and_the_jobs_they_add(
        self, database: str, telemetry: Telemetry
    ) -> None:
        app = App(dsn=database, middleware=[telemetry.middleware()])
        seen: dict[str, Any] = {}

        @app.task
        def on_thread(ctx: JobContext) -> None:
            seen["thread"] = trace.get_current_span().get_span_context().span_id
            ctx.add_job_sync("added")

        app.include(computing.add_in_process)

        @app.task
        async def added() -> None: ...

        await app.add_job("on_thread")
        await app.add_job("add_in_process")
        await app.run_once()
        await app.close()
        thread, process = telemetry.named("process on_thread"), telemetry.named("process add_in_process")
        assert seen["thread"] == ids(thread)[1]
        parents = {
            span.parent.span_id for span in telemetry.spans if span.name == "send added" and span.parent
        }
        assert parents == {ids(thread)[1], ids(process)[1]}

    async def test_recurring_task_has_its_own_send_span(
        self, db: asyncpg.Connection, database: str, telemetry: Telemetry
    ) -> None:
        await db.execute(
            """insert into graphile_worker._private_known_crontabs
            values ('task', now() - interval '1 day', null)"""
        )
        middleware, recorder = telemetry.middleware(), EventRecorder()
        with telemetry.tracer.start_as_current_span("startup"):
            async with running(
                {"task": nothing},
                database,
                recorder=recorder,
                middleware=[middleware],
                crontab="* * * * * task ?fill=2m",
            ):
                await recorder.until("job:complete", 1)
        sends = [span for span in telemetry.spans if span.name in {"send task", "send"}]
        assert sends
        assert all(span.parent is None for span in sends), "the trace of the start is not theirs"


class TestOwnStatements:
    async def test_only_statements_of_tasks_and_callers_are_traced(
        self, database: str, telemetry: Telemetry
    ) -> None:
        middleware, recorder = telemetry.middleware(), EventRecorder()

        async def query(_payload: Any, ctx: JobContext) -> None:
            async with ctx.connection() as connection:
                await connection.fetchval("select 42 -- task")

        with traced_statements(telemetry):
            async with running(
                {"query": query}, database, recorder=recorder, middleware=[middleware], poll_interval=0.02
            ) as runner:
                await runner.add_job("query", {})
                await recorder.until("job:complete")
                await recorder.until("worker:getJob:empty", 3)
        process, send = telemetry.named("process query"), telemetry.named("send query")
        roots = [span.name for span in telemetry.spans if span.parent is None]
        assert sorted(roots) == ["process query", "send query"], "the worker's own statements are not traced"
        inside = [span for span in telemetry.spans if span.parent and span.parent.span_id == ids(process)[1]]
        texts = [(span.attributes or {}).get("db.statement") for span in inside]
        assert "select 42 -- task" in texts
        children = {span.parent.span_id for span in telemetry.spans if span.parent}
        assert children <= {ids(process)[1], ids(send)[1]}

    async def test_flags_function_is_not_suppressed(self, database: str, telemetry: Telemetry) -> None:
        seen: list[bool] = []

        def flags() -> list[str]:
            from opentelemetry.instrumentation.utils import is_instrumentation_enabled  # noqa: PLC0415

            seen.append(is_instrumentation_enabled())
            return []

        async with WorkerUtils(database) as utils:
            await utils.add_job("task")
        await run_once(
            {"task": nothing}, database, middleware=[telemetry.middleware()], forbidden_flags=flags
        )
        assert seen
        assert all(seen)


class TestMetrics:
    async def test_metrics_have_the_conventions_and_the_own_names(
        self, database: str, telemetry: Telemetry
    ) -> None:
        recorder = EventRecorder()
        async with WorkerUtils(database) as utils:
            await utils.add_job("task", {"do": "return"})
            await utils.add_job("task", {"do": "raise"})
        async with running(
            {"task": outcomes}, database, recorder=recorder, middleware=[telemetry.middleware()]
        ) as runner:
            await recorder.until("job:complete", 2)
            await runner.add_job("task", {"do": "snooze"})
            await recorder.until("job:snoozed")
            found = telemetry.metrics()
        durations = {
            point.attributes.get("error.type"): point.count for point in found["messaging.process.duration"]
        }
        assert durations == {None: 2, "ValueError": 1}
        assert sum(point.value for point in found["messaging.client.consumed.messages"]) == 3
        [sent] = found["messaging.client.sent.messages"]
        assert (sent.value, sent.attributes["messaging.destination.name"]) == (1, "task")
        assert {
            p.attributes["messaging.operation.name"] for p in found["messaging.client.operation.duration"]
        } == {
            "send",
            "receive",
        }
        jobs = {point.attributes["outcome"]: point.value for point in found["graphile_worker.jobs"]}
        assert (jobs["completed"], jobs["retried"], jobs["snoozed"]) == (1, 1, 1)
        [wait] = found["graphile_worker.job_wait"]
        assert wait.count == 3
        quiet = {"cron_added_total", "cron_lateness_seconds", "heartbeat_age_seconds"}
        assert {instrument_name(metric) for metric in WORKER_METRICS if metric.name not in quiet} <= set(
            found
        )

    async def test_traces_and_metrics_can_be_used_alone(self, database: str, telemetry: Telemetry) -> None:
        async with WorkerUtils(database) as utils:
            await utils.add_job("task")
        await run_once({"task": nothing}, database, middleware=[telemetry.middleware(traces=False)])
        assert telemetry.spans == []
        assert "messaging.process.duration" in telemetry.metrics()


async def test_examples_of_the_tracing_page_run(
    database: str, telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(provider: TracerProvider) -> None:
        provider.add_span_processor(SimpleSpanProcessor(telemetry.exporter))
        monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)

    monkeypatch.setattr(trace, "set_tracer_provider", install)
    page = Page("production/tracing.md", dsn=database)
    names = await page.run()
    page.assert_done()
    await names["app"].close()
    assert (telemetry.named("process send_email").attributes or {})["to"] == "ann@example.com"
    assert linked(telemetry.named("process send_email")) == [ids(telemetry.named("send send_email"))]


def test_tracing_page_lists_every_attribute_and_metric() -> None:
    text = (ROOT / "docs/production/tracing.md").read_text()
    used = [value for name, value in vars(conventions).items() if name.isupper() and isinstance(value, str)]
    own = "messaging.graphile_worker"
    for name in used:
        assert f"`{name}`" in text or f"`{name.removeprefix(own)}`" in text or "://" in name, name


def test_missing_extra_of_opentelemetry_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "graphile_worker.telemetry.opentelemetry")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'graphile-worker\[otel\]'"):
        importlib.import_module("graphile_worker.telemetry.opentelemetry")


@pytest.mark.parametrize("options", [{"propagation": "both"}, {"without_carrier": "task"}], ids=repr)
def test_wrong_options_of_opentelemetry_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        OpenTelemetry(**options)


async def test_trace_is_in_the_log_lines_of_its_job(
    database: str, telemetry: Telemetry, caplog: pytest.LogCaptureFixture
) -> None:
    middleware = telemetry.middleware()
    caplog.set_level("INFO", "graphile_worker")
    async with WorkerUtils(database, middleware=[middleware]) as utils:
        await utils.add_job("task")
    await run_once({"task": nothing}, database, middleware=[middleware])
    [line] = [record for record in caplog.records if getattr(record, "outcome", None) == "completed"]
    assert line.__dict__["trace_id"] == f"{ids(telemetry.named('send task'))[0]:032x}"
