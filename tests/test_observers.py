"""Errors in loggers, filters, handlers, event listeners and stderr do not break a worker."""

from __future__ import annotations

import asyncio
import io
import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from graphile_worker import Events
from graphile_worker._base import logs
from graphile_worker._base.logs import ScopedLogger
from graphile_worker.events import Stop
from graphile_worker.testing import Databases
from support.jobs import add, count
from support.waiting import until
from support.workers import EventRecorder, locked, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    import asyncpg

EXITS: list[type[BaseException]] = [OSError, asyncio.CancelledError, SystemExit, KeyboardInterrupt]


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture(autouse=True)
def _no_earlier_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_last_report_at", None, raising=False)


class BrokenHandler(logging.Handler):
    """A handler for a log server that is down."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error
        self.calls = 0
        self.is_down = True

    def emit(self, _record: logging.LogRecord) -> None:
        self.calls += 1
        if self.is_down:
            raise self.error("the log server is down")

    def attached(self) -> logging.Logger:
        """Return a logger that uses this handler."""
        logger: logging.Logger = logging.Logger("broken", logging.DEBUG)  # noqa: LOG001 - for one test
        logger.addHandler(self)
        return logger


class BrokenFilter(logging.Filter):
    def filter(self, _record: logging.LogRecord) -> bool:
        raise OSError("the filter is broken")


class BrokenFormatter(logging.Formatter):
    def format(self, _record: logging.LogRecord) -> str:
        raise OSError("the formatter is broken")


class BrokenLogger(logging.Logger):
    """A logger whose isEnabledFor raises."""

    def isEnabledFor(self, _level: int) -> bool:  # noqa: N802 - the name in logging
        raise OSError("the logger is broken")


@contextmanager
def broken_logger(how: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    logger: logging.Logger = (BrokenLogger if how == "logger" else logging.Logger)(
        f"broken {how}", logging.DEBUG
    )
    if how in {"formatter", "closed stderr"}:
        # logging reports errors of a handler on stderr, and raises if stderr is closed.
        closed = io.StringIO()
        closed.close()
        monkeypatch.setattr(sys, "stderr", closed)
        handler: logging.Handler = logging.StreamHandler(closed if how == "closed stderr" else io.StringIO())
        if how == "formatter":
            handler.setFormatter(BrokenFormatter())
        logger.addHandler(handler)
    elif how == "filter":
        logger.addFilter(BrokenFilter())
    elif how == "handler":
        logger = BrokenHandler(OSError).attached()
    yield logger


@contextmanager
def library_handler(handler: BrokenHandler) -> Iterator[BrokenHandler]:
    """Attach the handler to the default logger of the library."""
    logger = logging.getLogger("graphile_worker")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


async def check_ten_jobs(db: asyncpg.Connection, dsn: str, **options: Any) -> None:
    """Check that ten jobs run, the worker stays ready, and nothing stays locked."""
    ran: list[int] = []

    async def task(payload: int) -> None:
        ran.append(payload)
        if payload % 2:
            raise ValueError("oops")

    async def recorded() -> bool:
        failed = await db.fetchval(
            "select count(*) from graphile_worker._private_jobs where attempts >= max_attempts"
        )
        return bool(failed == 5 and await count(db) == 5 and await locked(db) == [])

    async with running({"task": task}, dsn, concurrency=2, poll_interval=0.1, **options) as runner:
        for number in range(10):
            await add(db, payload=number, max_attempts=1)
        await until(recorded, f"all jobs are recorded, of which {ran} ran")
        assert sorted(ran) == list(range(10))
        assert runner.health().ready
    assert await locked(db) == []


class TestLogging:
    @pytest.mark.sample(2)
    @pytest.mark.parametrize("how", ["handler", "filter", "formatter", "closed stderr", "logger"])
    async def test_broken_logger_does_not_affect_jobs(
        self, db: asyncpg.Connection, database: str, how: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with broken_logger(how, monkeypatch) as logger:
            await check_ten_jobs(db, database, logger=logger)

    @pytest.mark.parametrize("error", EXITS)
    async def test_broken_handler_on_the_library_logger_does_not_affect_jobs(
        self, db: asyncpg.Connection, database: str, error: type[BaseException]
    ) -> None:
        with library_handler(BrokenHandler(error)) as handler:
            await check_ten_jobs(db, database)
        assert handler.calls > 10

    async def test_log_server_outage_does_not_affect_jobs(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        ran: list[int] = []

        async def task(payload: int) -> None:
            ran.append(payload)

        async def idle() -> bool:
            return await count(db) == 0

        with library_handler(BrokenHandler(OSError)) as handler:
            handler.is_down = False
            async with running({"task": task}, database) as runner:
                for is_down in (False, True, False):
                    handler.is_down = is_down
                    for number in range(10):
                        await add(db, payload=number)
                    await until(idle, f"all jobs are recorded, of which {ran} ran")
                    assert runner.health().ready
        assert len(ran) == 30

    def test_lost_log_records_are_reported_once_on_stderr(self, capsys: pytest.CaptureFixture[str]) -> None:
        logger = BrokenHandler(OSError).attached()
        log = ScopedLogger(logger, {})
        for number in range(5):
            log.info("Job %d", number)
        reported = capsys.readouterr().err
        assert reported.count("\n") == 1
        assert "the log server is down" in reported

    def test_log_record_names_the_function_that_logged_it(self, caplog: pytest.LogCaptureFixture) -> None:
        log = ScopedLogger(logging.getLogger("here"), {"label": "job"})
        for write in (log.error, log.exception, log.scope(order=7).warning):
            write("hello")
        ScopedLogger(log, {"order": 8}).error("hello")
        log.log(logging.ERROR, "hello")
        assert {record.funcName for record in caplog.records} == {
            "test_log_record_names_the_function_that_logged_it"
        }
        assert len(caplog.records) == 5


class TestListeners:
    @pytest.mark.sample(2)
    @pytest.mark.parametrize("error", EXITS)
    async def test_listeners_that_raise_do_not_affect_jobs(
        self, db: asyncpg.Connection, database: str, error: type[BaseException]
    ) -> None:
        recorder = EventRecorder()

        def fail(_event: object) -> None:
            raise error("a listener")

        recorder.events.on("*", fail)
        await check_ten_jobs(db, database, recorder=recorder)
        assert recorder.counts["job:success"] == 5

    @pytest.mark.parametrize("error", EXITS)
    def test_listener_that_raises_does_not_hide_the_event_from_others(
        self, error: type[BaseException], caplog: pytest.LogCaptureFixture
    ) -> None:
        events, recorder = Events(), list[object]()

        def fail(_event: object) -> None:
            raise error("a listener")

        events.on(Stop, fail)
        events.on(Stop, recorder.append)
        events.emit(Stop())
        assert len(recorder) == 1
        assert "A listener for 'stop' failed" in caplog.text
