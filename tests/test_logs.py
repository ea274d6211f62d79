"""Log records of a worker: their fields, one line per outcome, and one warning per outage."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
import structlog

from graphile_worker import Cancel, Fail, JobContext, Snooze, WorkerUtils
from graphile_worker.cli.logs import _SCOPE, JsonFormatter
from graphile_worker.embedded import EmbeddedPostgres
from graphile_worker.testing import Databases
from support.jobs import add
from support.pages import Page
from support.postgres import restart
from support.waiting import until
from support.workers import EventRecorder, nothing, running

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


class Lines(logging.Handler):
    """Collects the records of the library as JSON lines."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(JsonFormatter())
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))

    def about_job(self, job_id: int) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("job_id") == job_id]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, logger = Lines(), logging.getLogger("graphile_worker")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


async def outcomes(payload: Any) -> None:
    match payload["do"]:
        case "retry":
            raise ValueError("again")
        case "fail":
            raise Fail("no")
        case "snooze":
            raise Snooze(60)
        case "cancel":
            raise Cancel("no")


async def test_each_outcome_is_one_line_with_the_same_fields(
    db: asyncpg.Connection, database: str, lines: Lines
) -> None:
    recorder = EventRecorder()
    async with running({"task": outcomes}, database, recorder=recorder) as runner:
        expected = {"return": "completed", "retry": "retried", "fail": "failed", "cancel": "cancelled"}
        expected["snooze"] = "snoozed"
        added = {do: (await add(db, payload={"do": do}))["id"] for do in expected}
        await recorder.until("job:complete", 4)
        await recorder.until("job:snoozed")
    for do, outcome in expected.items():
        [line] = lines.about_job(added[do])
        assert line["outcome"] == outcome
        assert (line["task_identifier"], line["attempt"]) == ("task", 1)
        assert (line["worker_id"], line["label"]) == (runner.id, "job")
        assert line["duration"] >= 0
        assert "trace_id" not in line
        assert ("error" in line) == (do == "retry"), "only an unexpected error has a traceback"


@pytest.mark.parametrize(
    "trace",
    [
        pytest.param({"trace_id": TRACE_ID, "span_id": "00f067aa0ba902b7"}, id="of the Rust port"),
        pytest.param({"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}, id="of W3C"),
    ],
)
async def test_records_of_a_job_have_its_trace_id(
    db: asyncpg.Connection, database: str, lines: Lines, trace: dict[str, str]
) -> None:
    async def say(_payload: Any, ctx: JobContext) -> None:
        ctx.logger.info("hello")

    recorder = EventRecorder()
    async with running({"task": say}, database, recorder=recorder):
        job = await add(db, payload={"_trace": trace})
        await recorder.until("job:complete")
    said, completed = lines.about_job(job["id"])
    assert (said["message"], said["trace_id"], said["attempt"]) == ("hello", TRACE_ID, 1)
    assert completed["trace_id"] == TRACE_ID


@pytest.mark.sample(2)
@pytest.mark.parametrize("trace", [7, "x", [], {}, {"traceparent": 3}, {"trace_id": None}])
async def test_odd_trace_data_does_not_break_records(
    db: asyncpg.Connection, database: str, lines: Lines, trace: Any
) -> None:
    recorder = EventRecorder()
    async with running({"task": nothing}, database, recorder=recorder):
        job = await add(db, payload={"_trace": trace})
        await recorder.until("job:complete")
    [line] = lines.about_job(job["id"])
    assert "trace_id" not in line


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_restart_of_the_server_is_one_warning_and_one_recovery(
    short_folder: Path, lines: Lines, mode: str
) -> None:
    recorder = EventRecorder()
    with EmbeddedPostgres(short_folder, remove=True) as server:
        dsn = server.dsn()
        async with WorkerUtils(dsn) as utils:
            await utils.migrate()
        async with running(
            {"task": nothing},
            dsn,
            recorder=recorder,
            poll_interval=0.05,
            heartbeat_interval=0.2,
            crontab="* * * * * task",
        ) as runner:

            async def is_listening() -> bool:
                return runner._parts.notifier.is_receiving

            await until(is_listening, "notifications arrive")
            lines.lines.clear()
            await asyncio.to_thread(restart, server, mode)
            await recorder.until("pool:listen:success", 2)
            await until(is_listening, "notifications arrive again")

            async def has_recovered() -> bool:
                return not runner._parts._outage_log.is_logged and runner.health().ready

            await until(has_recovered, "all parts of the worker can use the database")
    about = [line for line in lines.lines if line["label"] == "worker"]
    warnings = [line["message"] for line in about if line["level"] not in {"debug", "info"}]
    infos = [line["message"] for line in about if line["level"] == "info"]
    assert len(warnings) == 1, warnings
    assert warnings[0].startswith("The database is unavailable: ")
    assert len(infos) == 1, infos
    assert re.fullmatch(r"The database is back after \d+\.\d s", infos[0])


async def test_structlog_recipe_of_the_page_writes_json(
    database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    page = Page("production/logging.md", dsn=database)
    try:
        await page.run()
        page.assert_done()
        recorder = EventRecorder()
        async with running({"task": nothing}, database, recorder=recorder) as runner:
            await runner.add_job("task", {})
            await recorder.until("job:complete")
    finally:
        root.handlers, root.level = before
        structlog.reset_defaults()
        logging.setLoggerClass(logging.Logger)  # structlog sets a class of its own
    written = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    [line] = [line for line in written if line.get("outcome") == "completed"]
    assert (line["task_identifier"], line["attempt"], line["worker_id"]) == ("task", 1, runner.id)
    assert line["level"] == "info"


def test_logging_page_lists_every_field() -> None:
    text = (ROOT / "docs/production/logging.md").read_text()
    for name in (*_SCOPE, "time", "level", "process", "logger", "message", "error"):
        assert re.search(rf"^\| `{name}` \|", text, re.MULTILINE), name
