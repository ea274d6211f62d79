"""The verb `cron` with its commands `check` and `next`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import asyncpg
import pytest

from graphile_worker.testing import Databases

COMMAND = str(Path(sys.executable).with_name("graphile-worker"))
APP = """
from graphile_worker import App
app = App()
@app.cron("@daily", tz="Asia/Tokyo")
@app.task
def midnight() -> None: ...
"""


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


def command(
    folder: Path, *arguments: str, given: str | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, "cron", *arguments],
        cwd=folder,
        env={"PATH": os.environ["PATH"], **variables},
        input=given,
        check=False,
        capture_output=True,
        text=True,
    )


class TestCron:
    async def test_items_are_listed_with_next_runs_and_last_run(
        self, db: asyncpg.Connection, database: str, tmp_path: Path
    ) -> None:
        (tmp_path / "crontab").write_text("* * * * * often\n0 0 31 2 * never ?id=not_ever\n")
        (tmp_path / "shop.py").write_text(APP)
        last = datetime(2030, 1, 1, 4, tzinfo=UTC)
        await db.execute(
            "insert into graphile_worker._private_known_crontabs values "
            "('often', $1, $2), ('old', $1, null), ('alone', $1, null), ('before', $1, null)",
            last - timedelta(days=1),
            last,
        )
        done = command(tmp_path, "-c", database, "--app", "shop:app")
        assert (done.returncode, done.stderr) == (0, "")
        midnight, often, never, *others = _paragraphs(done.stdout)
        assert midnight[:2] == [
            "midnight: @daily (Asia/Tokyo), adds midnight",
            "  not in the database: no worker has registered it",
        ]
        assert {line[12:23] for line in midnight[2:]} == {" 15:00 UTC "}
        assert {line[-24:] for line in midnight[2:]} == {" 00:00 JST in Asia/Tokyo"}
        assert often[:2] == [
            "often: * * * * *, adds often",
            "  known since 2029-12-31 04:00 UTC, last run 2030-01-01 04:00 UTC",
        ]
        assert len(often) == len(midnight) == 7
        assert never == [
            "not_ever: 0 0 31 2 *, adds never",
            "  not in the database: no worker has registered it",
            "  never",
        ]
        assert others == [
            [f"{name}: in the database, but not in this crontab"] for name in ("alone", "before", "old")
        ]

    async def test_cron_json_has_items_and_next_runs(
        self, db: asyncpg.Connection, database: str, tmp_path: Path
    ) -> None:
        since = datetime(2030, 1, 1, tzinfo=UTC)
        await db.execute(
            "insert into graphile_worker._private_known_crontabs values ('old', $1, null)", since
        )
        (tmp_path / "mine").write_text(
            "# graphile-worker: extended\n*/5 * * * * often ?fill=1h&overlap=skip&tz=Asia/Tokyo\n"
        )
        done = command(tmp_path, "-c", database, "--crontab", "mine", "--json")
        item, old = json.loads(done.stdout)
        assert old == {"identifier": "old", "known_since": since.isoformat(), "last_execution": None}
        local = item.pop("next_local")
        runs = [datetime.fromisoformat(at) for at in item.pop("next")]
        assert {later - earlier for earlier, later in pairwise(runs)} == {timedelta(minutes=5)}
        assert [datetime.fromisoformat(at) for at in local] == runs
        assert {at[-6:] for at in local} == {"+09:00"}
        assert item == {
            "identifier": "often",
            "task": "often",
            "match": "*/5 * * * *",
            "tz": "Asia/Tokyo",
            "fill": 3600,
            "overlap": "skip",
            "error": None,
            "known_since": None,
            "last_execution": None,
        }

    async def test_app_with_its_own_crontab_ignores_the_default_file(
        self, database: str, tmp_path: Path
    ) -> None:
        """The file crontab is then read only with --crontab, because it may be the same one."""
        (tmp_path / "crontab").write_text("0 8 * * * report\n")
        (tmp_path / "other").write_text("0 9 * * * later\n")
        (tmp_path / "shop.py").write_text(
            "from graphile_worker import App\n\napp = App(crontab_file='crontab')\n\n"
            "@app.task\ndef report() -> None: ...\n"
        )
        done = command(tmp_path, "--app", "shop:app", "-c", database, "--json")
        assert [item["identifier"] for item in json.loads(done.stdout)] == ["report"]
        done = command(tmp_path, "--app", "shop:app", "-c", database, "--json", "--crontab", "other")
        assert [item["identifier"] for item in json.loads(done.stdout)] == ["report", "later"]
        hint = "Unknown command 'shop:app'. Did you mean: graphile-worker cron --app shop:app?"
        assert hint in command(tmp_path, "shop:app").stderr

    async def test_failing_and_never_matching_functions_are_reported(
        self, database: str, tmp_path: Path
    ) -> None:
        (tmp_path / "shop.py").write_text(
            "from graphile_worker import App, CronItem\n"
            "def broken(at): raise ValueError('oh no')\n"
            "def never(at): return False\n"
            "app = App(cron_items=[CronItem('broken', broken), CronItem('never', never),\n"
            "                      CronItem('good', '@yearly')])\n"
        )
        done = command(tmp_path, "--app", "shop:app", "-c", database)
        assert (done.returncode, done.stderr) == (0, "")
        broken, never, good = _paragraphs(done.stdout)
        assert broken[2:] == ["  broken fails: ValueError: oh no"]
        assert never[2:] == ["  never"]
        assert len(good) == 7
        as_json = json.loads(command(tmp_path, "--app", "shop:app", "-c", database, "--json").stdout)
        assert [item["error"] for item in as_json] == ["broken fails: ValueError: oh no", None, None]

    async def test_items_are_listed_without_a_schema(
        self, db: asyncpg.Connection, database: str, tmp_path: Path
    ) -> None:
        await db.execute("drop schema graphile_worker cascade")
        (tmp_path / "crontab").write_text("* * * * * often\n")
        done = command(tmp_path, "-c", database)
        assert done.returncode == 0
        assert done.stderr.startswith("Cannot read their last runs: ")
        [often] = _paragraphs(done.stdout)
        assert often[1] == "  not in the database: no worker has registered it"
        assert len(often) == 7

    async def test_crontab_next_to_the_tasks_folder_is_used(self, database: str, tmp_path: Path) -> None:
        (tmp_path / "crontab").write_text("* * * * * here\n")
        (tmp_path / "shop").mkdir()
        (tmp_path / "graphile-worker.toml").write_text('tasks = "shop/tasks"\n')
        assert command(tmp_path, "-c", database).stdout.startswith("here: ")
        (tmp_path / "shop" / "crontab").write_text("* * * * * next_to_tasks\n")
        assert command(tmp_path, "-c", database).stdout.startswith("next_to_tasks: ")
        (tmp_path / "graphile-worker.toml").unlink()
        assert command(tmp_path, "-c", database).stdout.startswith("here: ")
        done = command(tmp_path, "-c", database, "--tasks", "shop/tasks")
        assert done.stdout.startswith("next_to_tasks: ")

    async def test_cron_without_items_says_so(self, database: str, tmp_path: Path) -> None:
        done = command(tmp_path, "-c", database)
        assert done.stdout == "No recurring tasks: there is no file 'crontab', and no @app.cron.\n"


class TestCronCheck:
    def test_valid_crontab_passes(self, tmp_path: Path) -> None:
        (tmp_path / "crontab").write_text("* * * * * a\n* * * * * b\n")
        done = command(tmp_path, "check", "crontab")
        assert (done.returncode, done.stdout, done.stderr) == (0, "crontab: 2 items\n", "")

    def test_every_error_is_reported(self, tmp_path: Path) -> None:
        (tmp_path / "good").write_text("* * * * * a\n")
        (tmp_path / "bad").write_text("60 * * * * a\n* * * * * b ?maxx=3\n")
        (tmp_path / "worse").write_text("* * * * * a ?max=0\n")
        done = command(tmp_path, "check", "bad", "worse", "missing", "good")
        assert (done.returncode, done.stdout) == (1, "good: 1 item\n")
        assert done.stderr.splitlines() == [
            "bad:1:1: the minute '60' is too large; expected 0 to 59",
            "bad:2:14: there is no option 'maxx'; did you mean 'max'?",
            "worse:1:14: the option 'max' cannot be used: max_attempts is 0; it must be from 1 to 32767",
            "The crontab 'missing' cannot be read: [Errno 2] No such file or directory: 'missing'.",
        ]

    def test_check_reads_a_crontab_from_standard_input(self, tmp_path: Path) -> None:
        assert command(tmp_path, "check", "-", given="* * * * * a\n").stdout == "-: 1 item\n"
        done = command(tmp_path, "check", "-", given="60 * * * * a\n")
        assert (done.returncode, done.stderr) == (
            1,
            "-:1:1: the minute '60' is too large; expected 0 to 59\n",
        )

    def test_check_needs_a_file(self, tmp_path: Path) -> None:
        assert command(tmp_path, "check").returncode == 2


class TestCronNext:
    def test_cron_next_prints_the_next_runs_of_a_pattern(self, tmp_path: Path) -> None:
        done = command(tmp_path, "next", "0 0 29 2 *", "-n", "2")
        assert (done.returncode, done.stderr) == (0, "")
        assert [line[5:] for line in done.stdout.splitlines()] == ["02-29 00:00 UTC"] * 2

    @pytest.mark.parametrize(("pattern", "count"), [("0 0 29 2 *", 40), ("@yearly", 100)])
    def test_count_reaches_far_into_the_future(self, tmp_path: Path, pattern: str, count: int) -> None:
        done = command(tmp_path, "next", pattern, "-n", str(count))
        assert len(done.stdout.splitlines()) == count

    def test_utc_needs_no_time_zone_data(self, tmp_path: Path) -> None:
        """The package tzdata has the zone UTC too, so the test hides it."""
        (tmp_path / "tzdata.py").write_text("raise ImportError\n")
        done = command(
            tmp_path, *("next", "@daily", "--tz", "UTC"), PYTHONTZPATH="", PYTHONPATH=str(tmp_path)
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[0].endswith(" 00:00 UTC in UTC")

    def test_cron_next_prints_utc_and_the_time_zone(self, tmp_path: Path) -> None:
        done = command(tmp_path, "next", "30 9 1 1 *", "--tz", "Asia/Tokyo", "--count", "1")
        assert done.stdout[4:] == "-01-01 00:30 UTC  " + done.stdout[:4] + "-01-01 09:30 JST in Asia/Tokyo\n"

    def test_cron_next_prints_never_for_a_pattern_that_never_matches(self, tmp_path: Path) -> None:
        assert command(tmp_path, "next", "0 0 31 2 *").stdout == "never\n"

    def test_invalid_pattern_or_time_zone_is_reported(self, tmp_path: Path) -> None:
        done = command(tmp_path, "next", "soon")
        assert done.returncode == 1
        assert "Invalid pattern 'soon': it has 1 fields; expected 5" in done.stderr
        assert "There is no time zone 'Mars'" in command(tmp_path, "next", "* * * * *", "--tz", "Mars").stderr


def _paragraphs(text: str) -> list[list[str]]:
    """Return the lines in groups: an indented line belongs to the line before it."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith(" "):
            found[-1].append(line)
        else:
            found.append([line])
    return found
