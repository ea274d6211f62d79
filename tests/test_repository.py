"""The repository tells the truth about itself."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import subprocess
import sys
import tomllib

import pytest

import graphile_worker
from graphile_worker import testing
from graphile_worker.embedded.binaries import Binaries
from graphile_worker.testing import running_server
from support.postgres import ROOT

sys.path.insert(0, str(ROOT / "tools"))
dump_schema = importlib.import_module("dump_schema")


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=False, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return listed.stdout.split()


def test_the_public_names_are_these() -> None:
    assert graphile_worker.__all__ == [
        *(
            "App",
            "BatchError",
            "Cancel",
            "Cleaned",
            "CleanupTask",
            "ConfigurationError",
            "Cron",
            "CronItem",
            "CrontabError",
            "DatabaseError",
            "Drained",
            "EmbeddedServerError",
            "Events",
            "Fail",
            "GraphileWorkerError",
            "Health",
        ),
        *(
            "InvalidJobError",
            "InvalidPayloadError",
            "Job",
            "JobContext",
            "JobError",
            "JobKeyMode",
            "JobSkippedError",
            "JobSpec",
            "JobState",
            "Middleware",
            "MissingExtraError",
            "PoolTimeoutError",
        ),
        *(
            "Recovered",
            "Recovery",
            "Retry",
            "Runner",
            "SchemaError",
            "SchemaMissingError",
            "SchemaTooNewError",
            "SchemaTooOldError",
            "ShutdownError",
            "Snooze",
            "Stats",
            "Task",
        ),
        *(
            "TaskError",
            "TaskProcessError",
            "TaskStats",
            "TaskTimeoutError",
            "WorkerInfo",
            "WorkerUtils",
            "format_crontab",
            "parse_cron_items",
            "parse_crontab",
            "quick_add_job",
            "run",
            "run_migrations",
            "run_once",
            "task",
        ),
    ]


def test_the_names_for_tests_are_these() -> None:
    assert testing.__all__ == [
        *(
            "Clock",
            "Databases",
            "FakeContext",
            "Summary",
            "assert_enqueued",
            "assert_not_enqueued",
            "context",
        ),
        *("drain", "enqueued", "inline", "job", "running_server", "using"),
    ]
    for name in testing.__all__:
        assert getattr(testing, name).__module__.startswith("graphile_worker.testing")
    assert set(testing.__all__) <= set(dir(testing))
    with pytest.raises(AttributeError, match="has no attribute 'drains'"):
        testing.drains  # noqa: B018


def test_architecture_names_every_module_and_nothing_else() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rows = re.findall(r"^\| (`[^|]+`) \|", text, re.MULTILINE)
    named = {path for row in rows for path in re.findall(r"`([^`]+)`", row)}
    missing = {path for path in named if not (ROOT / path).exists()}
    folders = tuple(path for path in named if path.endswith("/"))
    unnamed = {
        path
        for path in tracked_files()
        if path.startswith("src/") and path.endswith((".py", ".sql"))
        if path not in named and not path.startswith(folders)
    }
    assert (missing, unnamed) == (set(), set())
    in_text = set(re.findall(r"`(\w+)`", text))
    for package in ("_db", "_runtime"):
        modules = {path.stem for path in (ROOT / "src/graphile_worker" / package).glob("*.py")}
        assert modules - in_text - {"__init__", "sql"} == set()
    assert len(text.splitlines()) <= 80, "one page"


def test_every_public_name_can_be_had() -> None:
    for name in graphile_worker.__all__:
        assert getattr(graphile_worker, name).__module__.startswith("graphile_worker")
    assert set(graphile_worker.__all__) <= set(dir(graphile_worker))


def test_the_error_tree_is_drawn_as_it_is() -> None:
    drawn = re.findall(r"([A-Z]\w+Error)\s", graphile_worker.errors.__doc__ or "")
    defined = [name for name in vars(graphile_worker.errors) if name.endswith("Error")]
    assert sorted(drawn) == sorted(defined)


def test_parity_names_tests_that_exist() -> None:
    text = (ROOT / "tests" / "PARITY.md").read_text()
    named = set(re.findall(r"`([\w/]+\.py)::(?:(\w+)::)?(\w+)`", text))
    assert named
    for file, group, test in sorted(named):
        source = (ROOT / "tests" / file).read_text()
        assert f"def {test}(" in source, f"{file}::{test}"
        assert f"class {group}:" in source or not group


def test_the_dump_of_the_schema_is_current() -> None:
    with running_server(binaries=Binaries.of_extra().root) as dsn:
        current = asyncio.run(dump_schema.dump(dsn))
    assert (dump_schema.DUMP.read_text(), dump_schema.CONTRACT.read_text()) == current, "run make db-dump"


def test_no_row_above_20_is_ever_written_to_graphile_workers_ledger() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.sql"))
    writes = re.findall(r"insert into \{schema\}\.migrations .*?;", text, re.DOTALL)
    assert len(writes) == 2
    assert all("20" in write and "21" not in write for write in writes)


def test_every_pinned_version_is_a_plain_one() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert re.fullmatch(r"#.*|[\w.-]+==[\w.]+", line)


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [
        *project["project"]["dependencies"],
        *project["dependency-groups"]["dev"],
        *(name for extra in project["project"]["optional-dependencies"].values() for name in extra),
    ]
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {re.split(r"[<>=\[]", name)[0].lower() for name in wanted} <= pinned


def test_the_readme_begins_with_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.index("make demo") < text.index("make test") < text.index("pip install")


def test_the_demo_runs() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py"], check=True, capture_output=True, text=True
    )
    assert "\nHello, Bobby Tables\n" in done.stdout
    assert "Done: 1, failed: 0" in done.stdout
    assert "Order 7 is charged, at attempt 2" in done.stdout
    invoices = re.findall(r"Invoice (\d begins|\d ends)", done.stdout)
    assert invoices == [f"{number} {what}" for number in (1, 2, 3) for what in ("begins", "ends")]
    assert done.stdout.count("The crontab's job of") >= 2
    assert "hopeless: 0 scheduled, 0 ready, 1 failed for good" in done.stdout
    assert done.stderr == ""
