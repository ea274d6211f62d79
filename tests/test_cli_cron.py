"""`graphile-worker cron`, run as people run it."""

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


class TestListing:
    async def test_each_item_with_its_next_runs_and_what_is_known_of_it(
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
            "  not known: no worker has had it",
        ]
        assert {line[12:23] for line in midnight[2:]} == {" 15:00 UTC "}
        assert {line[-24:] for line in midnight[2:]} == {" 00:00 JST in Asia/Tokyo"}
        assert often[:2] == [
            "often: * * * * *, adds often",
            "  known since 2029-12-31 04:00 UTC, last run 2030-01-01 04:00 UTC",
        ]
        assert len(often) == len(midnight) == 7
        assert never == ["not_ever: 0 0 31 2 *, adds never", "  not known: no worker has had it", "  never"]
        assert others == [
            [f"{one}: known to the database, but not to this crontab"] for one in ("alone", "before", "old")
        ]

    async def test_as_json(self, db: asyncpg.Connection, database: str, tmp_path: Path) -> None:
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

    async def test_of_an_app_with_a_crontab_of_its_own(self, database: str, tmp_path: Path) -> None:
        """Then the file beside it is not read, unless it is asked for: it may be the same."""
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
        hint = "There is no command 'shop:app'. Did you mean: graphile-worker cron --app shop:app?"
        assert hint in command(tmp_path, "shop:app").stderr

    async def test_a_function_that_fails_and_one_that_is_never_true_are_told_of(
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

    async def test_without_the_schema_nothing_is_known_but_the_items_are_shown(
        self, db: asyncpg.Connection, database: str, tmp_path: Path
    ) -> None:
        await db.execute("drop schema graphile_worker cascade")
        (tmp_path / "crontab").write_text("* * * * * often\n")
        done = command(tmp_path, "-c", database)
        assert done.returncode == 0
        assert done.stderr.startswith("Nothing is known of them: ")
        [often] = _paragraphs(done.stdout)
        assert often[1] == "  not known: no worker has had it"
        assert len(often) == 7

    async def test_the_crontab_is_the_one_beside_the_folder_of_the_tasks(
        self, database: str, tmp_path: Path
    ) -> None:
        (tmp_path / "crontab").write_text("* * * * * here\n")
        (tmp_path / "shop").mkdir()
        (tmp_path / "graphile-worker.toml").write_text('tasks = "shop/tasks"\n')
        assert command(tmp_path, "-c", database).stdout.startswith("here: ")
        (tmp_path / "shop" / "crontab").write_text("* * * * * beside\n")
        assert command(tmp_path, "-c", database).stdout.startswith("beside: ")
        (tmp_path / "graphile-worker.toml").unlink()
        assert command(tmp_path, "-c", database).stdout.startswith("here: ")
        told = command(tmp_path, "-c", database, "--tasks", "shop/tasks")
        assert told.stdout.startswith("beside: ")

    async def test_if_there_are_none(self, database: str, tmp_path: Path) -> None:
        done = command(tmp_path, "-c", database)
        assert done.stdout == "There are no recurring tasks: no file 'crontab', and no @app.cron.\n"


class TestChecking:
    def test_a_good_one(self, tmp_path: Path) -> None:
        (tmp_path / "crontab").write_text("* * * * * a\n* * * * * b\n")
        done = command(tmp_path, "check", "crontab")
        assert (done.returncode, done.stdout, done.stderr) == (0, "crontab: 2 items\n", "")

    def test_all_that_is_wrong_is_told(self, tmp_path: Path) -> None:
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

    def test_of_standard_input(self, tmp_path: Path) -> None:
        assert command(tmp_path, "check", "-", given="* * * * * a\n").stdout == "-: 1 item\n"
        done = command(tmp_path, "check", "-", given="60 * * * * a\n")
        assert (done.returncode, done.stderr) == (
            1,
            "-:1:1: the minute '60' is too large; expected 0 to 59\n",
        )

    def test_it_needs_a_file(self, tmp_path: Path) -> None:
        assert command(tmp_path, "check").returncode == 2


class TestNext:
    def test_when_a_pattern_fits(self, tmp_path: Path) -> None:
        done = command(tmp_path, "next", "0 0 29 2 *", "-n", "2")
        assert (done.returncode, done.stderr) == (0, "")
        assert [line[5:] for line in done.stdout.splitlines()] == ["02-29 00:00 UTC"] * 2

    @pytest.mark.parametrize(("pattern", "count"), [("0 0 29 2 *", 40), ("@yearly", 100)])
    def test_as_many_as_asked_for_however_far_away(self, tmp_path: Path, pattern: str, count: int) -> None:
        done = command(tmp_path, "next", pattern, "-n", str(count))
        assert len(done.stdout.splitlines()) == count

    def test_utc_needs_no_time_zones_of_the_machine(self, tmp_path: Path) -> None:
        """Where tzdata is installed it has one, all the same; here it is not found."""
        (tmp_path / "tzdata.py").write_text("raise ImportError\n")
        done = command(
            tmp_path, *("next", "@daily", "--tz", "UTC"), PYTHONTZPATH="", PYTHONPATH=str(tmp_path)
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[0].endswith(" 00:00 UTC in UTC")

    def test_in_a_zone(self, tmp_path: Path) -> None:
        done = command(tmp_path, "next", "30 9 1 1 *", "--tz", "Asia/Tokyo", "--count", "1")
        assert done.stdout[4:] == "-01-01 00:30 UTC  " + done.stdout[:4] + "-01-01 09:30 JST in Asia/Tokyo\n"

    def test_one_that_never_fits(self, tmp_path: Path) -> None:
        assert command(tmp_path, "next", "0 0 31 2 *").stdout == "never\n"

    def test_what_is_no_pattern(self, tmp_path: Path) -> None:
        done = command(tmp_path, "next", "soon")
        assert done.returncode == 1
        assert "The pattern 'soon' is wrong: it has 1 fields; expected 5" in done.stderr
        assert "There is no time zone 'Mars'" in command(tmp_path, "next", "* * * * *", "--tz", "Mars").stderr


def _paragraphs(text: str) -> list[list[str]]:
    """Lines that begin with a blank belong to the one before."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith(" "):
            found[-1].append(line)
        else:
            found.append([line])
    return found
