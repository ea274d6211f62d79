"""Sentry: errors of jobs, their scopes, and check-ins of recurring tasks."""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
import sentry_sdk
from sentry_sdk.integrations.dedupe import DedupeIntegration
from sentry_sdk.integrations.logging import LoggingIntegration
from sentry_sdk.transport import Transport

from graphile_worker import (
    App,
    ConfigurationError,
    CronItem,
    Fail,
    MissingExtraError,
    Retry,
    Snooze,
    run_once,
)
from graphile_worker.telemetry.sentry import Sentry
from graphile_worker.testing import drain
from support.jobs import add
from support.pages import Page
from support.workers import EventRecorder, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sentry_sdk.envelope import Envelope


class KeptEvents(Transport):
    """A transport that keeps what would be sent."""

    def __init__(self) -> None:
        super().__init__({"dsn": "http://key@localhost/1"})
        self.errors: list[dict[str, Any]] = []
        self.check_ins: list[dict[str, Any]] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        for item in envelope.items:
            if item.type == "event":
                self.errors.append(item.payload.json or {})
            elif item.type == "check_in":
                self.check_ins.append(item.payload.json or {})


@pytest.fixture
def sent() -> Iterator[KeptEvents]:
    transport = KeptEvents()
    with sentry_sdk.isolation_scope(), sentry_sdk.new_scope():
        # Without the integrations that patch the standard library, which other tests use.
        sentry_sdk.init(
            "http://key@localhost/1",
            transport=transport,
            default_integrations=False,
            integrations=[LoggingIntegration(), DedupeIntegration()],
        )
        yield transport
        sentry_sdk.get_global_scope().set_client(None)


def types_of(event: dict[str, Any]) -> list[str]:
    return [value["type"] for value in event["exception"]["values"]]


class TestErrors:
    async def test_error_has_its_task_attempt_and_worker_but_no_payload(
        self, db: asyncpg.Connection, database: str, sent: KeptEvents
    ) -> None:
        job = await add(db, payload={"secret": 1}, queue_name="q")

        async def task(_payload: object) -> None:
            sentry_sdk.set_tag("order", "7")
            raise ValueError("broken")

        recorder = EventRecorder()
        async with running({"task": task}, database, recorder=recorder, middleware=[Sentry()]) as runner:
            await recorder.until("job:complete")
        [error] = sent.errors
        assert types_of(error) == ["ValueError"]
        assert error["transaction"] == "task"
        assert error["tags"] == {
            "graphile_worker.task": "task",
            "graphile_worker.worker": runner.id,
            "graphile_worker.outcome": "retried",
            "order": "7",
        }
        assert error["contexts"]["graphile_worker"] == {
            "task": "task",
            "job_id": job["id"],
            "attempt": 1,
            "max_attempts": 25,
            "worker_id": runner.id,
            "queue_name": "q",
        }
        assert error["exception"]["values"][0]["mechanism"]["handled"] is False

    async def test_payload_is_sent_if_asked_for(
        self, db: asyncpg.Connection, database: str, sent: KeptEvents
    ) -> None:
        await add(db, payload={"n": 1})

        async def task(_payload: object) -> None:
            raise ValueError

        await run_once({"task": task}, database, middleware=[Sentry(payloads=True)])
        assert sent.errors[0]["contexts"]["graphile_worker"]["payload"] == {"n": 1}

    @pytest.mark.parametrize(
        ("errors", "expected"), [("all", {"raise", "cause", "fail", "last"}), ("final", {"fail", "last"})]
    )
    async def test_only_failures_are_reported(
        self, database: str, sent: KeptEvents, errors: Any, expected: set[str]
    ) -> None:
        app = App(dsn=database, middleware=[Sentry(errors=errors)])

        @app.task
        async def work(what: str) -> None:
            match what:
                case "raise" | "last":
                    raise ValueError(what)
                case "retry":
                    raise Retry("later", after=60)
                case "cause":
                    raise Retry("later", after=60) from LookupError(what)
                case "fail":
                    raise Fail(what)
                case "snooze":
                    raise Snooze(60)

        for what in ("raise", "retry", "cause", "fail", "snooze", "return"):
            await work.enqueue(what)
        await app.add_job("work", {"what": "last"}, max_attempts=1)
        await app.run_once()
        await app.close()
        found = {event["exception"]["values"][-1]["value"] for event in sent.errors}
        assert {text.strip("'") for text in found} == expected

    async def test_scopes_of_jobs_that_run_at_once_are_separate(
        self, db: asyncpg.Connection, database: str, sent: KeptEvents
    ) -> None:
        for number in (1, 2):
            await add(db, payload=number)
        both = asyncio.Barrier(2)

        async def task(payload: int) -> None:
            sentry_sdk.add_breadcrumb(message=f"step of {payload}")
            await both.wait()
            raise ValueError(str(payload))

        await run_once({"task": task}, database, middleware=[Sentry()], concurrency=2)
        found = {
            event["exception"]["values"][0]["value"]: [
                crumb["message"] for crumb in event["breadcrumbs"]["values"] if "step" in crumb["message"]
            ]
            for event in sent.errors
        }
        assert found == {"1": ["step of 1"], "2": ["step of 2"]}

    async def test_errors_of_batch_items_are_one_event(self, database: str, sent: KeptEvents) -> None:
        app = App(dsn=database, middleware=[Sentry()])

        @app.task(batch=True)
        async def many(items: list[int]) -> list[Any]:
            return [ValueError(f"item {item}") if item else None for item in items]

        await app.add_job("many", [0, 1, 2])
        await app.run_once()
        await app.close()
        [error] = sent.errors
        assert {value["value"] for value in error["exception"]["values"]} >= {"item 1", "item 2"}

    async def test_error_in_a_drained_queue_is_reported(self, database: str, sent: KeptEvents) -> None:
        app = App(dsn=database, middleware=[Sentry()])

        @app.task
        async def broken() -> None:
            raise ValueError

        await broken.enqueue()
        await drain(app)
        await app.close()
        assert [types_of(error) for error in sent.errors] == [["ValueError"]]

    async def test_error_logs_of_the_worker_itself_are_still_reported(
        self, database: str, sent: KeptEvents
    ) -> None:
        async with running({"task": asyncio.sleep}, database, middleware=[Sentry()]):
            logging.getLogger("graphile_worker").error("The worker gave up its jobs")
        assert [event["logentry"]["message"] for event in sent.errors] == ["The worker gave up its jobs"]


class TestCheckIns:
    async def run(self, database: str, payload: Any, error: Exception | None, **options: Any) -> None:
        async def report(_payload: object) -> None:
            if error is not None:
                raise error

        recorder = EventRecorder()
        items = [CronItem("report", "0 8 * * 1", "Weekly report!", tz="Europe/Paris")]
        items.append(CronItem("report", "0 9 1 * *", "monthly"))
        async with running(
            {"report": report}, database, recorder=recorder, middleware=[Sentry(**options)], cron_items=items
        ) as runner:
            await runner.add_job("report", payload)
            await recorder.until("job:complete")

    async def test_recurring_job_checks_in_with_the_monitor_of_its_schedule(
        self, database: str, sent: KeptEvents
    ) -> None:
        payload = {
            "_cron": {"ts": "2030-01-07T07:00:00.000Z", "backfilled": False}
        }  # a Monday, 8:00 in Paris
        await self.run(database, payload, None, monitor={"checkin_margin": 5})
        begun, ended = sent.check_ins
        assert (begun["status"], ended["status"]) == ("in_progress", "ok")
        assert begun["check_in_id"] == ended["check_in_id"]
        assert begun["monitor_slug"] == ended["monitor_slug"] == "weekly-report"
        assert begun["monitor_config"] == {
            "schedule": {"type": "crontab", "value": "0 8 * * 1"},
            "timezone": "Europe/Paris",
            "checkin_margin": 5,
        }
        assert ended["duration"] >= 0

    async def test_failed_recurring_job_checks_in_with_an_error(
        self, database: str, sent: KeptEvents
    ) -> None:
        payload = {"_cron": {"ts": "2030-01-01T09:00:00.000Z", "backfilled": False}}
        await self.run(database, payload, ValueError("no"))
        assert [(c["monitor_slug"], c["status"]) for c in sent.check_ins] == [
            ("monthly", "in_progress"),
            ("monthly", "error"),
        ]

    @pytest.mark.parametrize(
        ("payload", "options"),
        [
            ({}, {}),
            ({"_cron": {"ts": "2030-01-01T09:00:00.000Z", "backfilled": True}}, {}),
            ({"_cron": {"ts": "2030-01-01T09:00:00.000Z", "backfilled": False}}, {"check_ins": False}),
        ],
        ids=["no cron job", "backfilled", "off"],
    )
    async def test_other_jobs_do_not_check_in(
        self, database: str, sent: KeptEvents, payload: Any, options: Any
    ) -> None:
        await self.run(database, payload, None, **options)
        assert sent.check_ins == []


async def test_examples_of_the_sentry_page_run(
    database: str, sent: KeptEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentry_sdk, "init", lambda: None)  # the fixture has called it
    page = Page("production/sentry.md", dsn=database)
    names = await page.run(2)
    page.assert_done()
    await names["app"].close()
    [error] = sent.errors
    assert types_of(error) == ["LookupError"]
    assert error["tags"]["order"] == 7


def test_wrong_options_of_sentry_are_refused() -> None:
    options: Any = {"errors": "some"}
    with pytest.raises(ConfigurationError, match="errors is 'some'"):
        Sentry(**options)


def test_missing_extra_of_sentry_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "graphile_worker.telemetry.sentry")
    monkeypatch.setitem(sys.modules, "sentry_sdk", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'graphile-worker\[sentry\]'"):
        importlib.import_module("graphile_worker.telemetry.sentry")
