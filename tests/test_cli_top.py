"""The live view of `top`, on a real terminal."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import asyncpg
import psutil
import pytest

from graphile_worker import Fail, Retry, WorkerUtils
from graphile_worker.cli.live.snapshot import Snapshot, take_snapshot
from graphile_worker.cli.live.terminal import Keys, keys_in
from graphile_worker.cli.live.view import Action, View
from graphile_worker.testing import Databases
from support import jobs
from support.commands import COMMAND
from support.waiting import until
from support.workers import running

MARK = "back in the shell"


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


class Tmux:
    """A terminal with a shell in it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def run(self, *arguments: str) -> str:
        command = ["tmux", "-L", self._name, "-f", os.devnull, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def press(self, *keys: str) -> None:
        self.run("send-keys", *keys)

    def screen(self) -> str:
        return self.run("capture-pane", "-p")

    async def until(self, text: str, *, gone: bool = False) -> None:
        async def shown() -> bool:
            return (text in await asyncio.to_thread(self.screen)) is not gone

        try:
            await until(shown, f"{text!r} on the screen")
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{self.screen()}") from None


@contextmanager
def tmux(*command: str, columns: int = 110, lines: int = 24) -> Iterator[Tmux]:
    """Run a command in a shell in tmux; the shell then prints the exit code, and checks the terminal."""
    if shutil.which("tmux") is None:
        pytest.skip("needs tmux")
    name = f"gw-{uuid.uuid4().hex[:8]}"
    terminal = Tmux(name)
    # An interactive shell survives Ctrl-C, so this one must too.
    script = f"""trap : INT; echo shell output; before=$(stty -a); {shlex.join(command)}; echo {MARK} $?
        test "$before" = "$(stty -a)" && echo terminal restored; exec cat"""
    size = ("-x", str(columns), "-y", str(lines))
    subprocess.run(
        ["tmux", "-L", name, "-f", os.devnull, "new-session", "-d", *size, "sh", "-c", script],
        check=True, env={**_without_size(), "TERM": "screen-256color", "LC_ALL": "C.UTF-8"},
    )  # fmt: skip
    try:
        yield terminal
    finally:
        terminal.run("kill-server")


def _without_size() -> dict[str, str]:
    """Return the environment without the size of another terminal."""
    return {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}


async def assert_terminal_restored(terminal: Tmux, status: int) -> None:
    await terminal.until(f"{MARK} {status}")
    await terminal.until("terminal restored")
    assert "shell output" in terminal.screen(), "the shell's screen is restored"
    assert terminal.run("display-message", "-p", "#{alternate_on} #{cursor_flag}").split() == ["0", "1"]


def top(dsn: str, *more: str) -> tuple[str, ...]:
    return (COMMAND, "top", "-c", dsn, "--interval", "200ms", *more)


@pytest.fixture
async def busy(db: asyncpg.Connection) -> asyncpg.Connection:
    """Add jobs in every state."""
    await db.execute("select graphile_worker.add_job('mail', '{}') from generate_series(1, 12)")
    await jobs.add(db, "report", queue_name="reports", run_at=datetime.now(UTC) - timedelta(hours=3))
    failed = await jobs.add(db, "charge", payload={"order": 7})
    await db.execute(
        "update graphile_worker._private_jobs set attempts = max_attempts, last_error = $2 where id = $1",
        failed["id"],
        "The bank says \x1b[2Jno\nTraceback",
    )
    locked = await jobs.add(db, "video")
    await jobs.lock(db, locked["id"], by="pool-1", age="7 minutes")
    await db.execute(
        """insert into graphile_worker._private_python_progress (job_id, locked_at, value, at)
        select id, locked_at, $2, now() from graphile_worker._private_jobs where id = $1""",
        locked["id"],
        json.dumps({"value": 0.4, "message": "frame \x1b[2J4"}),
    )
    return db


class TestTopOnTerminal:
    async def test_top_shows_the_queue_and_restores_the_terminal(
        self, busy: asyncpg.Connection, database: str
    ) -> None:
        with tmux(*top(database)) as terminal:
            await terminal.until("13 ready   0 scheduled   1 running   1 failed")
            await terminal.until("oldest due 3 h ago")
            await terminal.until("mail       12")
            await terminal.until("+0.0/s")
            await jobs.add(busy, "new")
            await terminal.until("14 ready")
            terminal.press("Tab")
            await terminal.until("reports")
            terminal.press("3")
            await terminal.until("7 min")
            await terminal.until("pool-1")
            await terminal.until(r"40 % frame \x1b[2J4")
            terminal.press("4")
            await terminal.until("unknown")
            terminal.press("5")
            await terminal.until("25/25")
            await terminal.until(r"The bank says \x1b[2Jno")
            terminal.press("q")
            await assert_terminal_restored(terminal, 0)

    async def test_slow_refresh_does_not_delay_the_next(
        self, busy: asyncpg.Connection, database: str
    ) -> None:
        with tmux(*top(database)) as terminal:
            await terminal.until("+0.0/s")  # after two refreshes: the first one had to connect
            async with busy.transaction():
                await busy.execute("lock table graphile_worker._private_jobs")
                waiting = "select true from pg_locks where relation = $1::regclass and not granted"
                await until(
                    lambda: busy.fetchval(waiting, "graphile_worker._private_jobs"), "a refresh waits"
                )
                await busy.execute("select pg_sleep(1)")
            for ready in (14, 15):  # the waiting refresh may see the first of them
                await jobs.add(busy, "new")
                await terminal.until(f"{ready} ready")

    async def test_workers_have_the_states_of_other_verbs(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await db.execute(
            """insert into graphile_worker._private_workers (id, last_heartbeat_at, metadata)
            values ('rust-1', now(), '{"pid": 7}'), ('rust-2', now() - interval '3 days', '{"pid": 8}')"""
        )
        with tmux(*top(database)) as terminal:
            await terminal.until("q quit")
            terminal.press("4")
            await terminal.until("silent")
            screen = terminal.screen()
            assert re.search("rust-1 .* alive ", screen)
            assert re.search("rust-2 .* silent ", screen)

    async def test_rows_can_be_sorted_and_filtered(self, busy: asyncpg.Connection, database: str) -> None:  # noqa: ARG002
        with tmux(*top(database)) as terminal:
            await terminal.until("by ready ↓")
            terminal.press("o")
            await terminal.until("by ready ↑")
            terminal.press("s", "s", "s", "s", "s", "s")
            await terminal.until("by task ↑")
            terminal.press("/", "m", "a", "i")
            await terminal.until("Filter: mai")
            await terminal.until("report", gone=True)
            terminal.press("Enter")
            await terminal.until("containing 'mai'")
            terminal.press("Escape")
            await terminal.until("report")

    async def test_job_can_be_shown_retried_and_cancelled(
        self, busy: asyncpg.Connection, database: str
    ) -> None:
        with tmux(*top(database)) as terminal:
            await terminal.until("q quit")
            terminal.press("5")
            await terminal.until("25/25")
            terminal.press("Enter")
            await terminal.until('payload {"order":7}')
            await terminal.until("Traceback")
            terminal.press("t")
            await terminal.until("Retry job 14 now, with all its attempts? y/n")
            terminal.press("n")
            await terminal.until("Retry job 14", gone=True)
            assert await busy.fetchval("select attempts from graphile_worker.jobs where id = 14") == 25
            terminal.press("t", "y")
            await terminal.until("Job 14 will run again.")
            assert await busy.fetchval("select attempts from graphile_worker.jobs where id = 14") == 0
            terminal.press("Escape", "3")
            await terminal.until("video")
            terminal.press("c", "y")
            await terminal.until("Asked the worker to cancel job 15.")
            assert (
                await busy.fetchval("select job_id from graphile_worker._private_python_cancellations") == 15
            )

    async def test_top_adapts_to_a_resized_terminal(self, busy: asyncpg.Connection, database: str) -> None:  # noqa: ARG002
        with tmux(*top(database), columns=140, lines=40) as terminal:
            await terminal.until("c cancel  space pause")
            terminal.run("resize-window", "-x", "40", "-y", "9")
            await terminal.until("c cancel  space pause", gone=True)
            await terminal.until("mail")
            terminal.run("resize-window", "-x", "140", "-y", "40")
            await terminal.until("c cancel  space pause")
            terminal.press("q")
            await assert_terminal_restored(terminal, 0)

    async def test_standard_terminal_shows_rates_and_keys(
        self,
        busy: asyncpg.Connection,  # noqa: ARG002
        database: str,
    ) -> None:
        with tmux(*top(database), columns=80, lines=24) as terminal:
            await terminal.until("done 0.0/s")
            screen = terminal.screen()
            for text in ("oldest due 3 h ago", "added 0.0/s", "q quit", "c cancel", "space pause", "mail"):
                assert text in screen

    async def test_job_details_scroll(self, db: asyncpg.Connection, database: str) -> None:
        words = [f"word-{number}" for number in range(40)]
        job = await jobs.add(db, "charge", payload={"words": words})
        error = "\n".join(f"line {number}" for number in range(60))
        await db.execute(
            "update graphile_worker._private_jobs set attempts = 25, last_error = $2 where id = $1",
            job["id"],
            error,
        )
        with tmux(*top(database), columns=80, lines=24) as terminal:
            await terminal.until("q quit")
            terminal.press("5")
            await terminal.until("25/25")
            terminal.press("Enter")
            await terminal.until("more lines")
            read = terminal.screen()
            assert "Esc back" in read
            for number in range(3):
                terminal.press("NPage")
                await terminal.until(f"line {10 * number + 8}")
                read += terminal.screen()
            assert [word for word in words if word not in read.replace("\n", "")] == []
            terminal.press("End")
            await terminal.until("line 59")
            assert "more lines" not in terminal.screen()
            terminal.press("Home")
            await terminal.until("failed, attempt 25 of 25")
            terminal.press("Escape")
            await terminal.until("Esc back", gone=True)

    async def test_job_details_are_refreshed(self, busy: asyncpg.Connection, database: str) -> None:
        with tmux(*top(database), columns=80, lines=24) as terminal:
            await terminal.until("q quit")
            terminal.press("5")
            await terminal.until("25/25")
            terminal.press("Enter")
            await terminal.until("failed, attempt 25 of 25")
            terminal.press("t", "y")
            await terminal.until("Job 14 will run again.")
            await terminal.until("ready, attempt 0 of 25")
            await busy.execute("update graphile_worker._private_jobs set priority = 77 where id = 14")
            await terminal.until("priority 77")
            terminal.press(" ")
            await terminal.until("Paused")
            terminal.press("c", "y")
            await terminal.until("failed, attempt 25 of 25")
            terminal.press(" ")
            await busy.execute("delete from graphile_worker._private_jobs where id = 14")
            await terminal.until("This job no longer exists: it was completed or removed.")
            await terminal.until("priority 77")

    async def test_confirmation_is_visible_at_any_size(
        self,
        busy: asyncpg.Connection,  # noqa: ARG002
        database: str,
    ) -> None:
        with tmux(*top(database), columns=30, lines=6) as terminal:
            await terminal.until("q quit")
            terminal.press("5")
            await terminal.until("25/25")
            terminal.press("t")
            await terminal.until("y/n")
            terminal.press("n")
            await terminal.until("q quit")

    @pytest.mark.sample(1)
    @pytest.mark.parametrize(("number", "status"), [("INT", 0), ("TERM", 143), ("HUP", 129)])
    async def test_signals_end_top_and_restore_the_terminal(
        self, database: str, number: str, status: int
    ) -> None:
        with tmux(*top(database)) as terminal:
            await terminal.until("q quit")
            [shell] = terminal.run("list-panes", "-F", "#{pane_pid}").split()
            [process] = psutil.Process(int(shell)).children()
            process.send_signal(signal.Signals[f"SIG{number}"])
            await assert_terminal_restored(terminal, status)

    async def test_internal_error_restores_the_terminal(self, database: str) -> None:
        broken = (
            "import graphile_worker.cli.live.view as view, graphile_worker.cli as cli\n"
            "view.View._footer = lambda *_: 1 / 0\n"
            "cli.main()"
        )
        with tmux(sys.executable, "-c", broken, *top(database)[1:]) as terminal:
            await terminal.until("ZeroDivisionError")
            await terminal.until(f"{MARK} 1")
            await terminal.until("terminal restored")
            assert terminal.run("display-message", "-p", "#{alternate_on} #{cursor_flag}").split() == [
                "0",
                "1",
            ]

    async def test_ctrl_c_quits_and_ctrl_z_is_ignored(self, database: str) -> None:
        with tmux(*top(database)) as terminal:
            await terminal.until("q quit")
            terminal.press("C-z")
            terminal.press("4")
            await terminal.until("WORKER", gone=True)
            terminal.press("C-c")
            await assert_terminal_restored(terminal, 0)

    async def test_outage_is_shown_until_the_database_is_back(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        with tmux(*top(database)) as terminal:
            await terminal.until("q quit")
            await db.execute("alter schema graphile_worker rename to away")
            await terminal.until("is not installed in this database")
            await db.execute("alter schema away rename to graphile_worker")
            await terminal.until("q quit")
            terminal.press("q")
            await assert_terminal_restored(terminal, 0)

    async def test_top_shows_the_rate_of_completed_jobs(self, db: asyncpg.Connection, database: str) -> None:
        async def work(_payload: object) -> None: ...

        async with running({"t": work}, database, concurrency=4):
            with tmux(*top(database)) as terminal:
                await terminal.until("done 0.0/s")

                async def shows_rate() -> bool:
                    # A rate is shown until the next refresh, so add jobs before each check.
                    await db.execute("select graphile_worker.add_job('t') from generate_series(1, 50)")
                    screen = await asyncio.to_thread(terminal.screen)
                    return re.search(r"done (?!0\.0)[\d,.]+/s", screen) is not None

                await until(shows_rate, "the rate of completed jobs is shown")
                terminal.press("4")
                await terminal.until("python")


class TestTopFailures:
    @pytest.mark.parametrize(
        "error", [RuntimeError("as usual"), Fail("permanently"), Retry(after=timedelta(days=1))], ids=repr
    )
    async def test_latest_failure_comes_first(
        self, db: asyncpg.Connection, database: str, error: Exception
    ) -> None:
        async def charge(_payload: object) -> None:
            raise error

        long_ago = datetime.now(UTC) - timedelta(days=3)
        old = await jobs.add(db, "charge", run_at=long_ago)
        await db.execute(
            "update graphile_worker._private_jobs set created_at = run_at, updated_at = run_at where id = $1",
            old["id"],
        )
        await db.execute("select graphile_worker.add_job('other') from generate_series(1, 60)")
        await db.execute(
            "update graphile_worker._private_jobs set attempts = 1, last_error = 'oops' where id <> $1",
            old["id"],
        )
        started = await db.fetchval("select now()")
        async with WorkerUtils(database) as utils, running({"charge": charge}, database):

            async def failed() -> bool:
                row = await jobs.existing(db, old["id"])
                return row["locked_at"] is None and row["last_error"] is not None

            await until(failed, "the job has failed")
            first, *others = await utils.many.failures()
            ended = await db.fetchval("select now()")
        assert (first.id, len(others)) == (old["id"], 49)
        assert first.failed_at is not None
        assert started <= first.failed_at <= ended

    async def test_manually_failed_job_is_a_failure(self, db: asyncpg.Connection, database: str) -> None:
        job = await jobs.add(db, "later", run_at=datetime.now(UTC) + timedelta(days=3))
        async with WorkerUtils(database) as utils:
            await utils.permanently_fail_jobs([job["id"]], "not wanted")
            [found] = await utils.many.failures()
        assert found.failed_at == (await jobs.existing(db, job["id"]))["updated_at"]

    async def test_failures_may_have_infinite_times(self, db: asyncpg.Connection, database: str) -> None:
        for moment in ("infinity", "-infinity", "4713-01-01 00:00:00+00 BC", "294276-12-31 00:00:00+00"):
            await db.execute(
                "select (graphile_worker.add_job('t', run_at => $1::text::timestamptz)).id", moment
            )
        await db.execute("update graphile_worker._private_jobs set attempts = 25, last_error = 'oops'")
        async with WorkerUtils(database) as utils:
            assert len(await utils.many.failures()) == 4


async def test_top_needs_a_terminal(database: str) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [*top(database)],
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 2
    assert "top needs a terminal. In a script, use: graphile-worker stats --json" in done.stderr


async def test_start_errors_are_printed_on_the_normal_screen(empty_database: str) -> None:
    with tmux(*top(empty_database)) as terminal:
        await terminal.until("is not installed in this database")
        await assert_terminal_restored(terminal, 1)


class TestView:
    def test_key_sequences_are_decoded_to_names(self) -> None:
        assert keys_in("a\x1b[A\x1bOB\t\r\x7f\x1b[5~\x1b[1;5C\x1b") == [
            "a", "up", "down", "right", "enter", "backspace", "page up", "\x1b[1;5C", "escape",
        ]  # fmt: skip

    def test_key_sequences_may_arrive_in_pieces(self) -> None:
        data = "é\x1b[A日\x1b[5~\x1bOBq\x1b[1;5C".encode()
        for end in range(len(data) + 1):
            keys = Keys()
            found = [*keys.feed(data[:end]), *keys.feed(data[end:])]
            assert found == ["é", "up", "日", "page up", "down", "q", "\x1b[1;5C"]
            assert not keys.has_incomplete
        keys = Keys()
        assert keys.feed(b"x\x1b") == ["x"]
        assert (keys.has_incomplete, keys.end(), keys.end()) == (True, ["escape"], [])

    async def test_cursor_stays_on_existing_rows(self, busy: asyncpg.Connection, database: str) -> None:  # noqa: ARG002
        async with WorkerUtils(database) as utils:
            view = View("mine")
            assert view.press("down") is None
            view.render(80, 10)
            view.snapshot = await take_snapshot(utils, None)
            for key in ("page down", "home", "page up", "end", "left", "right", "x", "\x1b[1;5C"):
                assert view.press(key) is None
                view.render(80, 1)
            view.press("3")
            assert view.press("enter") == Action("show", 15)
            assert view.press("c") is None
            assert view.press("x") is None, "only y confirms"
            view.press("c")
            assert view.press("y") == Action("cancel", 15)
            view.press("1")
            assert view.press("t") is None
            assert "Select a job first" in view.message
            assert view.press("q") == Action("quit")

    async def test_snapshot_has_the_rates_since_the_previous_one(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        async with WorkerUtils(database) as utils:
            first = await take_snapshot(utils, None)
            assert first.added is None
            busy = await asyncpg.connect(database)
            await busy.execute("select graphile_worker.add_job('t') from generate_series(1, 50)")
            await busy.execute("delete from graphile_worker._private_jobs where id <= 20")
            await busy.close()  # a session that ends flushes its statistics

            async def snapshot_with_deletes() -> Snapshot | None:
                found = await take_snapshot(utils, first)
                return found if found.removed else None

            await until(snapshot_with_deletes, "the statistics have the deletes")
            second = await take_snapshot(utils, first)
            assert second.added is not None
            assert second.removed is not None
            assert second.added / second.removed == pytest.approx(2.5)
            await db.execute("select pg_stat_reset()")
            third = await take_snapshot(utils, second)
            assert third.added == 0

    async def test_snapshot_has_the_growth_of_tasks_and_queues(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        for number in range(10):
            await jobs.add(db, "mail", queue_name=f"q{number % 2}")
        async with WorkerUtils(database) as utils:
            first = await take_snapshot(utils, None)
            assert (first.task_growth, first.queue_growth) == ({}, {})
            await db.execute("delete from graphile_worker._private_jobs where id <= 4")
            for _ in range(6):
                await jobs.add(db, "report", queue_name="q1")
            second = await take_snapshot(utils, first)
            seconds = second.writes.at - first.writes.at
            tasks = {name: round(rate * seconds) for name, rate in second.task_growth.items()}
            queues = {name: round(rate * seconds) for name, rate in second.queue_growth.items()}
            assert tasks == {"mail": -4, "report": 6}
            assert queues == {"q0": -2, "q1": 4}
