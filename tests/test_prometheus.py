"""Metrics for Prometheus, of workers, supervisors and queues; and the dashboard and alerts that use them."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
import yaml
from prometheus_client import REGISTRY, CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from graphile_worker import (
    App,
    Cancel,
    ConfigurationError,
    Events,
    Fail,
    JobSpec,
    Middleware,
    Snooze,
    WorkerUtils,
    events as event,
    run,
)
from graphile_worker.middleware import AttachedWorker
from graphile_worker.telemetry.exporter import QueueExporter
from graphile_worker.telemetry.metric_table import METRICS, PREFIX, QUEUE_METRICS, WORKER_METRICS
from graphile_worker.telemetry.prometheus import PrometheusMetrics
from graphile_worker.telemetry.prometheus_merge import MergedMetrics
from graphile_worker.testing import Databases
from support.jobs import add
from support.proxy import proxied
from support.supervising import children, command
from support.waiting import until
from support.workers import EventRecorder, Gate, nothing, running

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture
def port() -> Iterator[int]:
    """A free port. It stays bound, so other programs do not get it, but a server may reuse the address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]


class Page:
    """A page of metrics, read by the client library's parser."""

    def __init__(self, text: bytes) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text.decode())}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        [value] = [
            sample.value
            for sample in self.samples
            if sample.name == PREFIX + name and sample.labels == labels
        ]
        return value


def read(metrics: PrometheusMetrics) -> Page:
    return Page(metrics.page()[1])


def download(port: int, path: str = "/metrics") -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read()
    finally:
        connection.close()


async def outcomes(payload: Any) -> None:
    match payload:
        case "retry":
            raise ValueError(payload)
        case "fail":
            raise Fail("no")
        case "snooze":
            raise Snooze(60)
        case "cancel":
            raise Cancel("no")
        case _:
            await asyncio.sleep(0.02)


class TestWorkers:
    async def test_runs_are_counted_by_task_and_outcome(self, db: asyncpg.Connection, database: str) -> None:
        metrics = PrometheusMetrics()
        recorder = EventRecorder()
        async with running({"task": outcomes}, database, recorder=recorder, middleware=[metrics]) as runner:
            for payload in ("", "", "retry", "fail", "snooze", "cancel"):
                await add(db, payload=payload)
            await recorder.until("job:complete", 5)
            await recorder.until("job:snoozed")
            page = read(metrics)
            for outcome, count in {"completed": 2, "retried": 1, "failed": 1, "snoozed": 1}.items():
                assert page.value("jobs_total", task="task", outcome=outcome) == count
            assert page.value("jobs_total", task="task", outcome="cancelled") == 1
            assert page.value("job_duration_seconds_count", task="task") == 6
            assert page.value("job_duration_seconds_bucket", task="task", le="0.01") == 4
            assert page.value("job_duration_seconds_sum", task="task") >= 0.04
            assert page.value("job_wait_seconds_count", task="task") == 6
            assert page.value("exchange_jobs_sum", kind="claimed") == 6
            assert runner.id not in metrics.page()[1].decode()
        after = read(metrics)
        assert after.value("jobs_total", task="task", outcome="completed") == 2, "counters outlive the worker"
        assert "graphile_worker_ready" not in {sample.name for sample in after.samples}, "gauges do not"

    async def test_wait_is_measured_from_when_the_job_was_due(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await db.execute(
            "select graphile_worker.add_job('task', run_at => now() - interval '20 minutes', payload => '1')"
        )
        metrics, recorder = PrometheusMetrics(), EventRecorder()
        async with running({"task": nothing}, database, recorder=recorder, middleware=[metrics]):
            await recorder.until("job:complete")
            assert 1200 <= read(metrics).value("job_wait_seconds_sum", task="task") < 1800

    async def test_gauges_show_the_state_of_the_worker(self, db: asyncpg.Connection, database: str) -> None:
        metrics, gate, recorder = PrometheusMetrics(), Gate(), EventRecorder()
        async with running(
            {"task": gate}, database, recorder=recorder, middleware=[metrics], concurrency=2, prefetch=3
        ):
            for _ in range(5):
                await add(db)
            await gate.until_started(2)

            async def has_prefetched() -> bool:
                return read(metrics).value("jobs_prefetched") == 3

            await until(has_prefetched, "three jobs wait for a slot")
            page = read(metrics)
            assert (page.value("slots"), page.value("jobs_running")) == (2, 2)
            assert (page.value("ready"), page.value("listening")) == (1, 1)
            assert page.value("heartbeat_age_seconds") >= 0
            assert page.value("event_loop_lag_seconds") >= 0
            [info] = page.families["graphile_worker_info"].samples
            assert info.labels["schema"] == "graphile_worker"
            assert info.labels["revision"] == "20"
            gate.open()
            await recorder.until("job:complete", 5)

    async def test_outages_are_counted(self, database: str) -> None:
        metrics, recorder = PrometheusMetrics(), EventRecorder()
        async with (
            proxied(database) as (proxy, dsn),
            running({"task": nothing}, dsn, recorder=recorder, middleware=[metrics], poll_interval=0.1),
        ):
            assert read(metrics).value("database_errors_total") == 0
            proxy.cut_all()
            await recorder.until("pool:database:error")
            assert read(metrics).value("database_errors_total") >= 1
            recovered = await recorder.until("pool:database:recovered")
            assert recovered.outage > 0
            assert read(metrics).value("reconnects_total") >= 1

    async def test_added_jobs_are_counted_in_programs_without_a_worker(self, database: str) -> None:
        metrics = PrometheusMetrics()
        app = App(dsn=database, middleware=[metrics])
        async with app:
            await app.add_job("mail")
            await app.add_jobs([JobSpec("mail"), JobSpec("report")])
        assert read(metrics).value("jobs_added_total", task="mail") == 2
        assert read(metrics).value("jobs_added_total", task="report") == 1

    async def test_recurring_tasks_are_counted_with_their_lateness(self, database: str) -> None:
        metrics = PrometheusMetrics()
        async with running(
            {"task": nothing}, database, middleware=[metrics], crontab="0 0 1 1 * task"
        ) as runner:
            now = runner._parts._clock.now()
            job = event.CronJob("task", JobSpec("task"))
            pool = runner._pool
            runner.events.emit(
                event.CronScheduled(worker_pool=pool, timestamp=now, jobs_and_identifiers=[job, job])
            )
            page = read(metrics)
            assert page.value("cron_added_total", task="task") == 2
            assert 0 <= page.value("cron_lateness_seconds", task="task") < 60

    async def test_tasks_beyond_the_limit_share_one_label(self, database: str) -> None:
        metrics = PrometheusMetrics()
        tasks = {f"task{number}": nothing for number in range(203)}
        recorder = EventRecorder()
        async with running(tasks, database, recorder=recorder, middleware=[metrics]) as runner:
            await runner.utils.add_jobs([JobSpec(name) for name in tasks])
            await recorder.until("job:complete", 203)
            page = read(metrics)
            labels = {sample.labels["task"] for sample in page.samples if "task" in sample.labels}
            assert len(labels) == 201
            assert page.value("jobs_total", task="_other", outcome="completed") == 3

    async def test_metrics_join_a_given_registry_once(self) -> None:
        registry = CollectorRegistry()
        Gauge("orders", "Open orders.", registry=registry).set(7)
        metrics = PrometheusMetrics(registry=registry)
        assert b"orders 7.0" in metrics.page()[1]
        with pytest.raises(ConfigurationError, match="already has such metrics"):
            PrometheusMetrics(registry=registry)
        assert PrometheusMetrics().registry is not REGISTRY

    async def test_health_port_serves_metrics_while_a_worker_runs(self, database: str, port: int) -> None:
        async with running({"task": nothing}, database, health=port, middleware=[PrometheusMetrics()]):
            status, content_type, body = await asyncio.to_thread(download, port)
            assert (status, content_type.split(";")[0]) == (200, "text/plain")
            assert Page(body).value("slots") == 1
        async with running({"task": nothing}, database, health=port):
            assert (await asyncio.to_thread(download, port))[0] == 404

    async def test_failing_collector_of_the_user_answers_500(self, database: str, port: int) -> None:
        class Broken:
            broken = False

            def collect(self) -> list[Any]:
                if self.broken:
                    raise ValueError("broken")
                return []

        metrics, collector = PrometheusMetrics(), Broken()
        metrics.registry.register(collector)
        async with running({"task": nothing}, database, health=port, middleware=[metrics]):
            collector.broken = True
            assert (await asyncio.to_thread(download, port))[0] == 500
            assert (await asyncio.to_thread(download, port, "/ready"))[0] == 200

    async def test_worker_without_metrics_creates_no_exchange_events(self, database: str) -> None:
        events = Events()
        async with await run({"task": nothing}, database, events=events, handle_signals=False):
            assert not events.wants(event.PoolExchange)
            assert not events.wants(event.JobStart)
            assert events.wants(event.JobComplete), "otherwise this test shows nothing"


class TestSupervisor:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        (tmp_path / "tasks").mkdir()
        (tmp_path / "tasks/work.py").write_text("async def work(payload): pass\n")
        return tmp_path

    async def test_supervisor_merges_the_metrics_of_its_processes(
        self, database: str, folder: Path, port: int
    ) -> None:
        flags = ("--processes", "2", "-j", "3", "--health", str(port), "--metrics", "prometheus")
        async with command(folder, database, *flags) as program, WorkerUtils(database) as utils:
            await program.until("Worker connected", 2)

            async def page(condition: Any) -> Page:
                found: list[Page] = []

                async def is_true() -> bool:
                    status, _, body = await asyncio.to_thread(download, port)
                    if status == 200:
                        found.append(Page(body))
                    return bool(found) and bool(condition(found[-1]))

                await until(is_true, "the metrics have the expected values")
                return found[-1]

            def completed(found: Page) -> float:
                names = {sample.name for sample in found.samples}
                if f"{PREFIX}jobs_total" not in names:
                    return -1
                return found.value("jobs_total", task="work", outcome="completed")

            await page(lambda found: f"{PREFIX}slots" in str(found.samples) and found.value("slots") == 6)
            await utils.add_jobs([JobSpec("work")] * 50)
            both = await page(lambda found: completed(found) == 50)
            assert both.value("ready") == 1, "the minimum of both, not their sum"
            assert both.value("job_duration_seconds_count", task="work") == 50
            assert both.families["graphile_worker_jobs"].type == "counter"

            children(program)[0].kill()
            await program.until("killed by SIGKILL; restarting in")
            await program.until("Worker connected", 3)
            await utils.add_jobs([JobSpec("work")] * 50)
            again = await page(lambda found: completed(found) >= 100)
            assert completed(again) == 100, "counters do not decrease when a process ends"

    async def test_metrics_flag_needs_a_port(self, database: str, folder: Path) -> None:
        async with command(folder, database, "--metrics", "prometheus") as program:
            assert await program.end() == 2
        assert "--metrics needs a port: pass --health too." in program.text

    def test_gauges_of_the_user_are_added_up_except_start_times(self) -> None:
        pages = {}
        for pid in (1, 2):
            registry = CollectorRegistry()
            Gauge("orders", "Open orders.", registry=registry).set(pid)
            Gauge("process_start_time_seconds", "Start.", registry=registry).set(pid)
            pages[pid] = PrometheusMetrics(registry=registry).page()[1]
        merged = Page(MergedMetrics().page(pages, {1, 2})[1])
        values = {sample.name: sample.value for sample in merged.samples}
        assert (values["orders"], values["process_start_time_seconds"]) == (3, 1)


class TestExporter:
    async def test_exporter_shows_jobs_workers_and_the_state_of_the_table(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await db.execute("select graphile_worker.add_job('mail', run_at => now() - interval '1 hour')")
        await add(db, "mail")
        await db.execute("select graphile_worker.add_job('later', run_at => now() + interval '1 hour')")
        async with WorkerUtils(database) as utils, running({"task": nothing}, database):
            exporter = QueueExporter(utils)
            assert Page(exporter.page()[1]).value("exporter_up") == 0
            await exporter.refresh()
            page = Page(exporter.page()[1])
            assert page.value("queue_jobs", task="mail", state="ready") == 2
            assert page.value("queue_jobs", task="later", state="scheduled") == 1
            assert 3600 <= page.value("queue_oldest_ready_age_seconds", task="mail") < 4000
            assert page.value("queue_oldest_ready_age_seconds", task="later") == 0
            states = {
                sample.labels["state"]
                for sample in page.families["graphile_worker_workers"].samples
                if sample.labels["language"] == "python" and sample.value == 1
            }
            assert states <= {"starting", "ready"}
            assert len(states) == 1
            assert page.value("oldest_xmin_age") >= 0
            assert page.value("jobs_table_dead_tuples") >= 0
            assert page.value("notification_queue_usage_ratio") >= 0
            assert page.value("exporter_up") == 1

    async def test_scrapes_read_the_last_counts_and_not_the_database(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        async with WorkerUtils(database) as utils:
            exporter = QueueExporter(utils)
            await exporter.refresh()
            await add(db, "mail")
            assert b"mail" not in exporter.page()[1]
            await exporter.refresh()
            assert b"mail" in exporter.page()[1]
            with pytest.raises(ConfigurationError, match="at least 15 s"):
                QueueExporter(utils, interval=5)

    async def test_metrics_disappear_while_the_database_cannot_be_read(self, database: str) -> None:
        async with proxied(database) as (proxy, dsn), WorkerUtils(dsn, pool_timeout=1) as utils:
            exporter = QueueExporter(utils)
            await exporter.refresh()
            assert exporter.is_up
            await proxy.stop()
            await exporter.refresh()
            assert not exporter.is_up
            samples = Page(exporter.page()[1]).samples
            assert [(sample.name, sample.value) for sample in samples] == [(f"{PREFIX}exporter_up", 0)]

    async def test_small_tasks_beyond_the_limit_share_one_label(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        for task, count in {"big": 3, "small": 1, "tiny": 1}.items():
            for _ in range(count):
                await add(db, task)
        async with WorkerUtils(database) as utils:
            exporter = QueueExporter(utils, max_tasks=1)
            await exporter.refresh()
        page = Page(exporter.page()[1])
        assert page.value("queue_jobs", task="big", state="ready") == 3
        assert page.value("queue_jobs", task="_other", state="ready") == 2

    async def test_command_serves_metrics_and_health(self, database: str, tmp_path: Path, port: int) -> None:
        async with command(tmp_path, database, "exporter", "--health", str(port)) as program:
            await program.until("Serving metrics at")
            status, _, body = await asyncio.to_thread(download, port)
            assert (status, Page(body).value("exporter_up")) == (200, 1)
            assert (await asyncio.to_thread(download, port, "/ready"))[0] == 200
            assert (await asyncio.to_thread(download, port, "/live"))[0] == 200


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"graphile_worker_\w+", expression))


def exported_names() -> set[str]:
    """Return the names of all samples that the metrics can have."""
    found: set[str] = set()
    for metric in METRICS.values():
        suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        found |= {metric.full_name + suffix for suffix in suffixes}
    return found


class TestDeployedFiles:
    def test_alerts_use_metrics_that_exist(self) -> None:
        [group] = yaml.safe_load((ROOT / "deploy/alerts.yaml").read_text())["groups"]
        assert len(group["rules"]) >= 10
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in {"warning", "critical"}
            assert rule["annotations"]["summary"]
            assert names_in(rule["expr"]), rule["alert"]
            assert names_in(rule["expr"]) <= exported_names(), rule["alert"]

    def test_alerts_use_labels_and_outcomes_that_exist(self) -> None:
        text = (ROOT / "deploy/alerts.yaml").read_text()
        for name, label, value in re.findall(r'(graphile_worker_\w+)\{(\w+)=~?"([^"]+)"\}', text):
            metric = METRICS[name.removeprefix(PREFIX)]
            assert label in metric.labels
            known = {
                "outcome": "completed retried failed snoozed cancelled interrupted lost",
                "state": "ready",
            }
            assert set(value.split("|")) <= set(known[label].split())

    def test_dashboard_shows_every_metric_and_only_those(self) -> None:
        dashboard = json.loads((ROOT / "deploy/grafana-dashboard.json").read_text())
        queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
        used = set().union(*map(names_in, queries))
        assert used <= exported_names()
        for metric in METRICS.values():
            assert any(name.startswith(metric.full_name) for name in used), f"no panel shows {metric.name}"
        places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
        assert len(set(places)) == len(places)

    def test_dashboard_is_written_by_the_tool(self) -> None:
        from tools.write_dashboard import dashboard  # noqa: PLC0415

        assert json.loads((ROOT / "deploy/grafana-dashboard.json").read_text()) == dashboard()

    def test_page_of_metrics_lists_every_metric(self) -> None:
        text = (ROOT / "docs/production/metrics.md").read_text()
        for metric in (*WORKER_METRICS, *QUEUE_METRICS):
            [row] = re.findall(rf"^\| `{metric.name}` \|.*$", text, re.MULTILINE)
            assert f"| {metric.kind} |" in row
            for label in metric.labels:
                assert f"`{label}`" in row


async def test_failing_listener_for_recorded_jobs_does_not_stop_the_worker(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Middleware):
        def attach(self, worker: AttachedWorker) -> None:
            worker.on_recorded(self.fail)

        @staticmethod
        def fail(_runs: Any) -> None:
            raise ValueError("cannot count")

    recorder = EventRecorder()
    async with running({"task": nothing}, database, recorder=recorder, middleware=[Broken()]) as runner:
        for _ in range(2):
            await runner.add_job("task", {})
        await recorder.until("job:complete", 2)
    assert "A listener for recorded jobs failed" in caplog.text
