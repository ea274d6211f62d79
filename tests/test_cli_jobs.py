"""The verbs `add`, `list` and `show`, and the formats of times and tables."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
import pytest

from graphile_worker.cli.printing import Column, escape, fit_columns
from graphile_worker.cli.times import format_iso, format_relative, format_time, read_moment
from graphile_worker.testing import Databases
from support.commands import COMMAND, Cli
from support.jobs import add, count, existing, lock, put_in_state


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture
def cli(database: str, tmp_path: Path) -> Cli:
    return Cli(database, tmp_path)


class TestAdd:
    async def test_add_prints_the_id(self, db: asyncpg.Connection, cli: Cli) -> None:
        job_id = int(await cli.out("add", "hello", '{"name": "Ann"}'))
        job = await existing(db, job_id)
        assert json.loads(job["payload"]) == {"name": "Ann"}
        assert (await existing(db, int(await cli.out("add", "hello"))))["payload"] == "{}"

    async def test_add_flags_set_the_options_of_the_job(self, db: asyncpg.Connection, cli: Cli) -> None:
        added = await cli.json(
            "add", "hello", "[1]", "--queue", "q", "--run-at", "2h", "--max-attempts", "3",
            "--key", "k", "--key-mode", "preserve-run-at", "--priority", "-5", "--flag", "b", "--flag", "a",
        )  # fmt: skip
        job = await existing(db, added["id"])
        assert {**added, "run_at": 0, "created_at": 0, "updated_at": 0} == {
            "id": job["id"],
            "task_identifier": "hello",
            "queue_name": "q",
            "state": "scheduled",
            "payload": [1],
            "priority": -5,
            "run_at": 0,
            "attempts": 0,
            "max_attempts": 3,
            "last_error": None,
            "error_type": None,
            "failed_at": None,
            "key": "k",
            "locked_by": None,
            "locked_at": None,
            "flags": ["a", "b"],
            "revision": 0,
            "created_at": 0,
            "updated_at": 0,
        }
        assert job["run_at"] - job["created_at"] == timedelta(hours=2)

    @pytest.mark.sample(2)
    @pytest.mark.parametrize(
        ("delay", "seconds"), [("5", 5), ("0", 0), ("90s", 90), ("1.5h", 5400), ("2d", 172_800)]
    )
    async def test_add_with_a_delay_schedules_the_job(
        self, db: asyncpg.Connection, cli: Cli, delay: str, seconds: int
    ) -> None:
        job = await existing(db, int(await cli.out("add", "hello", "--delay", delay)))
        assert job["run_at"] - job["created_at"] == timedelta(seconds=seconds)

    async def test_add_reads_the_payload_from_a_file_or_standard_input(
        self, db: asyncpg.Connection, cli: Cli
    ) -> None:
        (cli.folder / "payload.json").write_text('{"ä": 12345678901234567890}')
        job = await existing(db, int(await cli.out("add", "hello", "@payload.json")))
        assert json.loads(job["payload"]) == {"ä": 12345678901234567890}
        job = await existing(db, int(await cli.out("add", "hello", "-", given='"x"\n')))
        assert job["payload"] == '"x"'

    async def test_existing_key_updates_the_job(self, db: asyncpg.Connection, cli: Cli) -> None:
        first = await cli.out("add", "hello", "1", "--key", "k")
        assert await cli.out("add", "hello", "2", "--key", "k") == first
        assert await cli.out("add", "hello", "3", "--key", "k", "--key-mode", "unsafe_dedupe") == first
        assert (await existing(db, int(first)))["payload"] == "2"

    @pytest.mark.sample(3)
    @pytest.mark.parametrize(
        ("arguments", "code", "message"),
        [
            (["hello", "--key-mode", "replace"], 2, "--key-mode needs --key"),
            (["hello", "--key", "k", "--key-mode", "other"], 2, "'other' is not one of"),
            (["hello", "{name: Ann}"], 2, "PAYLOAD is not valid JSON"),
            (["hello", "-"], 2, "Standard input is not valid JSON"),
            (["hello", "@nowhere.json"], 1, "Cannot read nowhere.json: No such file or directory."),
            (["hello", "--run-at", "2030-01-01T12:00"], 2, "2030-01-01T12:00Z in UTC"),
            (["hello", "--run-at", "soon"], 2, "must be now, a time from now (90s, 5m, 2h, 1d)"),
            (
                ["hello", "--delay", "soon"],
                2,
                "must be a number of seconds, or a number with a unit (90s, 5m",
            ),
            (["hello", "--delay", "-5"], 2, "must be a number of seconds"),
            (["hello", "--delay", "5", "--run-at", "2h"], 2, "--run-at and --delay cannot be combined."),
            (["hello", "--max-attempts", "0"], 2, "is not in the range 1<=x<=32767"),
            (["hello", "--priority", "40000"], 2, "is not in the range"),
            (["x" * 129], 1, "identifier is"),
            (["hello", "--queue", ""], 1, "1 to 128 characters"),
            ([], 2, "Missing argument 'TASK'."),
        ],
    )
    async def test_invalid_add_arguments_are_rejected(
        self, db: asyncpg.Connection, cli: Cli, arguments: list[str], code: int, message: str
    ) -> None:
        done = await cli("add", *arguments)
        assert (done.returncode, done.stdout) == (code, "")
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        assert await count(db) == 0

    async def test_add_prints_a_sentence_on_a_terminal(self, cli: Cli) -> None:
        with cli.terminal("add", "hello", "--run-at", "2h") as terminal:
            assert await terminal.end() == 0
        assert "Added job 1: hello, due 20" in terminal.text
        assert re.search(r"\(in 1\d\d min\)", terminal.text)

    async def test_add_without_a_schema_says_how_to_install_it(
        self, empty_database: str, tmp_path: Path
    ) -> None:
        done = await Cli(empty_database, tmp_path)("add", "hello")
        assert done.returncode == 1
        assert "is not installed in this database" in done.stderr
        assert "graphile-worker migrate" in done.stderr


async def add_jobs_in_all_states(db: asyncpg.Connection) -> dict[str, int]:
    """Add a job in each state, and return their ids by name."""
    ids = {
        "ready": (await add(db, "mail", payload={"to": "Ann"}))["id"],
        "later": (await add(db, "mail", run_at=datetime(2040, 1, 1, tzinfo=UTC)))["id"],
        "queued": (await add(db, "report", queue_name="q", payload={"a": "50%_off"}))["id"],
        "keyed": (await add(db, "report", job_key="k"))["id"],
        "failed": (await add(db, "report", max_attempts=1))["id"],
        "running": (await add(db, "report"))["id"],
    }
    await put_in_state(db, "failed", ids["failed"])
    await lock(db, ids["running"], by="pool-1")
    return ids


class TestList:
    @pytest.mark.sample(3)
    @pytest.mark.parametrize(
        ("flags", "expected"),
        [
            ([], ["ready", "later", "queued", "keyed", "failed", "running"]),
            (["--task", "mail"], ["ready", "later"]),
            (["--queue", "q"], ["queued"]),
            (["--state", "ready"], ["ready", "queued", "keyed"]),
            (["--state", "scheduled"], ["later"]),
            (["--state", "running"], ["running"]),
            (["--state", "failed"], ["failed"]),
            (["--key", "k"], ["keyed"]),
            (["--worker", "pool-1"], ["running"]),
            (["--search", "ann"], ["ready"]),
            (["--search", "50%_"], ["queued"]),
            (["--search", "oops"], ["failed"]),
            (["--task", "report", "--state", "ready"], ["queued", "keyed"]),
            (["--task", "nothing"], []),
            (["--after", "3", "--limit", "2"], ["keyed", "failed"]),
        ],
    )
    async def test_list_applies_filters(
        self, db: asyncpg.Connection, cli: Cli, flags: list[str], expected: list[str]
    ) -> None:
        ids = await add_jobs_in_all_states(db)
        printed = await cli.out("list", "--ids", *flags)
        assert printed.split() == [str(ids[name]) for name in expected]

    async def test_list_into_a_pipe_has_tabs(self, db: asyncpg.Connection, cli: Cli) -> None:
        run_at = datetime(2030, 1, 1, 12, 0, 0, 5, tzinfo=UTC)
        payload = {"text": "x" * 500}
        job = await add(db, "mail\t\x1b[2J", payload=payload, queue_name="q\nr", run_at=run_at, job_key="k")
        await db.execute("update graphile_worker._private_jobs set last_error = E'one\\ntwo', attempts = 2")
        assert await cli.out("list") == (
            f"{job['id']}\tscheduled\tmail\\t\\x1b[2J\tq\\nr\t2030-01-01T12:00:00.000005Z\t2/25\t0\tk\t\t"
            f"{json.dumps(payload)}\t\tone\\ntwo\n"
        )

    async def test_list_prints_pages_and_says_how_to_continue(self, db: asyncpg.Connection, cli: Cli) -> None:
        await db.execute("select graphile_worker.add_job('x') from generate_series(1, 2100)")
        assert len((await cli.out("list")).splitlines()) == 2100
        assert len(await cli.json("list")) == 2100
        done = await cli("list", "--limit", "2000", "--ids")
        assert done.stdout.split()[-1] == "2000"
        assert done.stderr == "There are more: continue with --after 2000, or raise --limit.\n"
        done = await cli("list", "--after", "2000", "--limit", "100", "--ids")
        assert (done.stdout.split()[0], done.stdout.split()[-1], done.stderr) == ("2001", "2100", "")
        assert len(await cli.json("list", "--limit", "1")) == 1

    async def test_list_prints_a_table_on_a_terminal(self, db: asyncpg.Connection, cli: Cli) -> None:
        await add_jobs_in_all_states(db)
        await db.execute("select graphile_worker.add_job('x', json_build_object('l', repeat('long', 50)))")
        with cli.terminal("list") as terminal:
            assert await terminal.end() == 0
        lines = terminal.text.splitlines()
        assert lines[0].split() == [
            "ID",
            "STATE",
            "TASK",
            "QUEUE",
            "DUE",
            "TRIES",
            "KEY",
            "WORKER",
            "PAYLOAD",
            "ERROR",
        ]
        assert lines[1].split()[:3] == ["1", "ready", "mail"]
        assert "(in " in lines[2]
        assert lines[7].rstrip().endswith("…"), "payloads are truncated"
        assert "\x1b[31mfailed" in terminal.raw, "with colours"

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("flags", [(), ("--ids",)], ids=["table", "ids"])
    async def test_empty_list_is_stated_on_a_terminal_only(self, cli: Cli, flags: tuple[str, ...]) -> None:
        with cli.terminal("list", *flags) as terminal:
            assert await terminal.end() == 0
        assert terminal.text == "No jobs found.\n"
        done = await cli("list", *flags)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    async def test_list_on_a_terminal_has_a_limit(self, db: asyncpg.Connection, cli: Cli) -> None:
        await db.execute("select graphile_worker.add_job('x') from generate_series(1, 60)")
        with cli.terminal("list") as terminal:
            assert await terminal.end() == 0
        assert len(terminal.text.splitlines()) == 52
        assert "continue with --after 50" in terminal.text

    @pytest.mark.slow
    async def test_closed_pipe_ends_by_sigpipe(self, db: asyncpg.Connection, cli: Cli) -> None:
        await db.execute("select graphile_worker.add_job('x') from generate_series(1, 20000)")
        process = await asyncio.create_subprocess_shell(
            f"bash -c '{COMMAND} list | head -1; exit ${{PIPESTATUS[0]}}'",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=cli.environment,
            cwd=cli.folder,
        )
        out, error = await process.communicate()
        assert (out.split()[0], error) == (b"1", b"")
        assert process.returncode == 128 + signal.SIGPIPE, "like any other program"

    @pytest.mark.sample(2)
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--limit", "0"], "is not in the range x>=1"),
            (["--limit", "-1"], "is not in the range x>=1"),
            (["--after", "-1"], "is not in the range x>=0"),
            (["--after", "abc"], "'abc' is not a valid integer."),
            (["--state", "locked"], "is not one of 'ready', 'scheduled', 'running', 'failed'"),
            (["--ids", "--json"], "--ids and --json cannot be combined."),
            (["--tsak", "x"], "'--task'"),
        ],
    )
    async def test_invalid_list_arguments_are_rejected(
        self, cli: Cli, arguments: list[str], message: str
    ) -> None:
        done = await cli("list", *arguments)
        assert done.returncode == 2
        assert message in done.stderr


class TestShow:
    async def test_show_prints_all_fields(self, db: asyncpg.Connection, cli: Cli) -> None:
        job = await add(db, "mail", payload={"to": ["Ann", "x" * 300]}, job_key="k", flags=["b", "a"])
        await db.execute("update graphile_worker._private_jobs set last_error = E'one\\ntwo\\x1b[2J'")
        text = await cli.out("show", str(job["id"]))
        assert "x" * 300 in text
        fields = dict(line.split("  ", 1) for line in text.splitlines() if line[0] != " " and "  " in line)
        assert fields["id"].strip() == str(job["id"])
        assert fields["flags"].strip() == "a, b"
        assert fields["run_at"].strip() == format_iso(job["run_at"])
        assert "one\n" in text
        assert " two\\x1b[2J\n" in text
        [shown] = await cli.json("show", "--key", "k")
        assert shown["payload"] == {"to": ["Ann", "x" * 300]}
        with cli.terminal("show", "1") as terminal:
            assert await terminal.end() == 0
        assert " ago)" in terminal.text or "(now)" in terminal.text

    async def test_show_reads_ids_from_standard_input(self, db: asyncpg.Connection, cli: Cli) -> None:
        await add_jobs_in_all_states(db)
        ids = await cli.out("list", "--ids", "--task", "mail")
        assert [job["id"] for job in await cli.json("show", "-", given=ids)] == [1, 2]

    async def test_show_reports_missing_jobs(self, db: asyncpg.Connection, cli: Cli) -> None:
        await add(db)
        done = await cli("show", "1", "7", "--json")
        assert (done.returncode, done.stderr) == (1, "There is no job 7.\n")
        assert [job["id"] for job in json.loads(done.stdout)] == [1]
        done = await cli("show", "--key", "k")
        assert (done.returncode, done.stderr) == (1, "There is no job with the key 'k'.\n")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "Give either job ids or --key."),
            (["1", "--key", "k"], "Give either job ids or --key."),
            (["seven"], "'seven' is not a job id: ids are numbers, such as 42."),
            (["9223372036854775808"], "is not a job id"),
        ],
    )
    async def test_invalid_show_arguments_are_rejected(
        self, cli: Cli, arguments: list[str], message: str
    ) -> None:
        done = await cli("show", *arguments)
        assert done.returncode == 2
        assert message in done.stderr


class TestNarrowTerminals:
    async def test_narrow_terminal_drops_columns(self, db: asyncpg.Connection, cli: Cli) -> None:
        await add_jobs_in_all_states(db)
        titles = {}
        for columns in (60, 80, 100, 160):
            with cli.terminal("list", columns=columns) as terminal:
                assert await terminal.end() == 0
            lines = terminal.text.splitlines()
            assert max(map(len, lines)) <= columns
            assert lines[1].split()[:3] == ["1", "ready", "mail"], "ids and states are not cut"
            titles[columns] = lines[0].split()
        assert "WORKER" not in titles[60]
        assert "ERROR" in titles[60]
        assert titles[60] != titles[160]

    def test_columns_are_cut_then_dropped(self) -> None:
        columns: list[Column[None]] = [
            Column(title="A", value=str),
            Column(title="B", value=str, min_width=5),
            Column(title="C", value=str, drop_order=1),
        ]
        assert fit_columns(columns, [10, 20, 10], 100) == {0: 10, 1: 20, 2: 10}
        assert fit_columns(columns, [10, 20, 10], 34) == {0: 10, 1: 10, 2: 10}
        assert fit_columns(columns, [10, 20, 10], 29) == {0: 10, 1: 5, 2: 10}
        assert fit_columns(columns, [10, 20, 10], 28) == {0: 10, 1: 16}
        assert fit_columns(columns, [10, 20, 10], 5) == {0: 10, 1: 5}


class TestTimes:
    @pytest.mark.parametrize(
        ("text", "moment"),
        [
            ("now", timedelta(0)),
            ("90s", timedelta(seconds=90)),
            ("+1.5h", timedelta(minutes=90)),
            ("2d", timedelta(days=2)),
            ("1w", timedelta(days=7)),
            ("2030-01-31T12:00Z", datetime(2030, 1, 31, 12, tzinfo=UTC)),
            ("2030-01-31 13:00+01:00", datetime(2030, 1, 31, 12, tzinfo=UTC)),
        ],
    )
    def test_valid_times_are_read(self, text: str, moment: object) -> None:
        assert read_moment(text) == moment

    @pytest.mark.parametrize("text", ["", "5", "-5m", "tomorrow", "2030-01-31", "99999999w", "12:00"])
    def test_invalid_times_are_rejected(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"."):
            read_moment(text)

    def test_times_at_the_ends_of_the_calendar_are_formatted(self) -> None:
        for moment in (datetime.max.replace(tzinfo=UTC), datetime.min.replace(tzinfo=UTC)):
            assert "(" in format_time(moment)
            assert escape(format_relative(moment))
