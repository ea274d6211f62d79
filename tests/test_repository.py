"""Documentation, generated files and the list of public names match the code."""

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
write_settings_page = importlib.import_module("write_settings_page")


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=False, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return listed.stdout.split()


PUBLIC_NAMES = """
    Activity App AttemptOutcome BatchError Cancel CleanupResult CleanupTask ConfigurationError Cron
    CronItem CrontabError DatabaseError EmbeddedServerError Events Fail FailureGroup GraphileWorkerError
    Health History HistorySummary InvalidJobError InvalidPayloadError Job JobAttempt JobCancelledError
    JobContext JobCounts JobError JobFailedError JobHandle JobKeyMode JobLostError JobSkippedError JobSpec
    JobState Metric Middleware MissingExtraError Point PoolTimeoutError Progress PrunedHistory
    RecoveredWorker RecoveryAction ResultTimeoutError ResultUnknownError Retry RunSummary Runner
    SchemaError SchemaMissingError SchemaTooNewError SchemaTooOldError Series ShutdownError Snooze Stats
    Task TaskError TaskProcessError TaskStats TaskTimeoutError WorkerInfo WorkerUtils format_crontab
    parse_cron_items parse_crontab quick_add_job quick_add_job_sync run run_migrations run_once task
"""
TESTING_NAMES = """
    Clock Databases FakeContext assert_enqueued assert_not_enqueued context drain enqueued inline job
    override reported_progress running_server
"""
PUBLIC_MEMBERS = {
    "App": """
        add_job add_job_sync add_jobs add_jobs_sync add_spec add_spec_sync bind cancel_job cancel_job_sync
        close close_sync configure cron_items history include migrate migrate_sync run run_once
        run_once_sync run_sync running settings tasks utils
    """,
    "Task": """
        call call_sync enqueue enqueue_many enqueue_many_sync enqueue_sync queue result_of result_of_sync
        spec spec_for using
    """,
    "WorkerUtils": """
        activity activity_sync add_batch_job add_batch_job_sync add_job add_job_sync add_jobs
        add_jobs_sync add_spec add_spec_sync cancel_job cancel_job_sync cleanup cleanup_sync close
        close_sync complete_jobs complete_jobs_sync connection failures failures_sync force_unlock_workers
        force_unlock_workers_sync get_job get_job_sync has_history has_history_sync history
        history_summary history_summary_sync history_sync is_closing job_history job_history_sync
        job_result job_result_sync known_crontabs known_crontabs_sync list_jobs list_jobs_sync many
        migrate migrate_sync pending_migrations pending_migrations_sync permanently_fail_jobs
        permanently_fail_jobs_sync progress progress_sync prune_history prune_history_sync remove_job
        remove_job_sync reschedule_jobs reschedule_jobs_sync schema series series_sync stats stats_sync
        sweep sweep_sync workers workers_sync
    """,
    "JobContext": """
        add_job add_job_sync add_jobs complete complete_sync connection cron deadline extend_deadline job
        logger now progress query queue_name run_sync schema state stop_requested trace transaction utils
        worker_id
    """,
    "Runner": """
        health start stop summary wait
    """,
    "Middleware": """
        attach call claim_limit enqueue execute
    """,
    "JobSpec": """
        flags identifier job_key job_key_mode max_attempts payload priority queue_name replace run_at
    """,
}


def test_public_names_are_complete_and_importable() -> None:
    assert graphile_worker.__all__ == PUBLIC_NAMES.split()
    assert set(graphile_worker.__all__) <= set(dir(graphile_worker))
    for name in graphile_worker.__all__:
        assert getattr(graphile_worker, name).__module__.startswith("graphile_worker")


@pytest.mark.parametrize("name", PUBLIC_MEMBERS)
def test_public_members_of_a_class_are_complete(name: str) -> None:
    members = [member for member in dir(getattr(graphile_worker, name)) if not member.startswith("_")]
    assert members == PUBLIC_MEMBERS[name].split()


def test_testing_names_are_complete_and_importable() -> None:
    assert testing.__all__ == TESTING_NAMES.split()
    for name in testing.__all__:
        assert getattr(testing, name).__module__.startswith("graphile_worker.testing")
    assert set(testing.__all__) <= set(dir(testing))
    with pytest.raises(AttributeError, match="has no attribute 'drains'"):
        getattr(testing, "drains")  # noqa: B009


def test_api_reference_documents_every_public_name() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference" / "api").glob("*.md"))
    documented = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    public = {
        *(f"graphile_worker.{name}" for name in graphile_worker.__all__),
        *(f"graphile_worker.testing.{name}" for name in testing.__all__),
        *(f"graphile_worker.doctor.{name}" for name in graphile_worker.doctor.__all__),
        *(f"graphile_worker.embedded.{name}" for name in graphile_worker.embedded.__all__),
        *(f"graphile_worker.middleware.{name}" for name in graphile_worker.middleware.__all__),
        *(f"graphile_worker.retry.{name}" for name in graphile_worker.retry.__all__),
    }
    # The middleware page documents the class under its shorter name.
    # The events page documents the whole module.
    assert public - documented == {"graphile_worker.middleware.Middleware"}
    assert "graphile_worker.events" in documented


def test_architecture_names_every_package_and_module_of_the_engine() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    package = ROOT / "src" / "graphile_worker"
    packages = {path.parent.relative_to(ROOT).as_posix() + "/" for path in package.rglob("*.py")}
    assert {name for name in packages if name not in text} == set()
    engine = [
        path
        for folder in ("_client", "_recovery", "_tasks", "_worker")
        for path in (package / folder).rglob("*.py")
        if path.stem != "__init__"
    ]
    assert {path.name for path in engine if path.name not in text} == set()


def test_paths_in_architecture_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    paths = set(re.findall(r"`((?:src|tests|docs|chaos|benchmarks|tools|examples)/[^`]*)`", text))
    assert {path for path in paths if "NNN" not in path and not (ROOT / path).exists()} == set()


def test_error_tree_in_the_docstring_is_current() -> None:
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


def test_parity_counts_are_current() -> None:
    text = (ROOT / "tests" / "PARITY.md").read_text()
    counts = {
        status: int(rows) for status, rows in re.findall(r"^\| ([\w :,]+) \| (\d+) \|$", text, re.MULTILINE)
    }
    _, _, rest = text.partition("\n## Open\n")
    opened, _, suites = rest.partition("\n## ")
    covered: list[str] = []
    other: list[str] = []
    for table in re.findall(r"^\|.+\n\|---.*\n((?:\|.*\n)+)", suites, re.MULTILINE):
        for row in table.splitlines():
            tests = re.split(r"(?<!\\)\|", row)[-2]
            (covered if ".py" in tests else other).append(row)
    assert "*open*" not in suites
    missing = len(re.findall(r"^\| The ", opened, re.MULTILINE))
    assert [*counts.values()] == [missing, len(covered), len(other), missing + len(covered) + len(other)]


def test_schema_dump_is_current() -> None:
    with running_server(binaries=Binaries.from_extra().root) as dsn:
        current = asyncio.run(dump_schema.dump(dsn))
    assert (dump_schema.DUMP.read_text(), dump_schema.CONTRACT.read_text()) == current, "run make db-dump"


def test_settings_page_is_current() -> None:
    text = write_settings_page.PAGE.read_text()
    assert write_settings_page.page(text) == text, "run make settings-page"


def test_migrations_table_of_graphile_worker_gets_no_row_above_20() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.sql"))
    writes = re.findall(r"insert into \{schema\}\.migrations .*?;", text, re.DOTALL)
    assert len(writes) == 2
    assert all("20" in write and "21" not in write for write in writes)


def test_constraints_pin_exact_versions() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert re.fullmatch(r"#.*|[\w.-]+==[\w.]+", line)


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [
        *project["project"]["dependencies"],
        *(name for group in project["dependency-groups"].values() for name in group if isinstance(name, str)),
        *(name for extra in project["project"]["optional-dependencies"].values() for name in extra),
    ]
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {re.split(r"[<>=\[]", name)[0].lower() for name in wanted} <= pinned


def test_readme_shows_make_demo_and_make_test_first() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.index("make demo") < text.index("make test") < text.index("pip install")


@pytest.mark.slow
def test_demo_runs() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py"], check=True, capture_output=True, text=True
    )
    assert "\nHello, Bobby Tables\n" in done.stdout
    assert "1, failed: 0" in done.stdout
    assert "Order 7 is charged, at attempt 2" in done.stdout
    invoices = re.findall(r"Invoice (\d starts|\d ends)", done.stdout)
    assert invoices == [f"{number} {event}" for number in (1, 2, 3) for event in ("starts", "ends")]
    assert done.stdout.count("backfilled: True") >= 2
    assert "hopeless: 0 scheduled, 0 ready, 1 failed" in done.stdout
    assert done.stderr == ""
