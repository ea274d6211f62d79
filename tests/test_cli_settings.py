"""Settings of the command: from the file, the environment and the flags, in this order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from graphile_worker.cli.settings import gather
from graphile_worker.cli.show_settings import masked
from graphile_worker.errors import ConfigurationError

COMMAND = str(Path(sys.executable).with_name("graphile-worker"))


def config(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments],
        check=False, capture_output=True, text=True, cwd=folder,
        env={"PATH": os.environ["PATH"], **environment},
    )  # fmt: skip


def test_flags_override_the_environment_which_overrides_the_file(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.graphile-worker]\njobs = 2\npoll-interval = "3s"\nschema = "file"\nlisten = false\n'
    )
    done = config(
        tmp_path, "-j", "9", "config", "--json", GRAPHILE_WORKER_SCHEMA="env", GRAPHILE_WORKER_JOBS="4"
    )
    found = json.loads(done.stdout)
    assert found["jobs"] == {"value": 9, "source": "--jobs"}
    assert found["schema"] == {"value": "env", "source": "GRAPHILE_WORKER_SCHEMA"}
    assert found["poll_interval"] == {"value": "3s", "source": "pyproject.toml"}
    assert found["listen"] == {"value": False, "source": "pyproject.toml"}
    assert found["prefetch"] == {"value": "auto", "source": "default"}


def test_config_prints_no_passwords(tmp_path: Path) -> None:
    done = config(tmp_path, "config", DATABASE_URL="postgresql://me:s3cret@h/x?password=s3cret")
    line = next(line for line in done.stdout.splitlines() if line.startswith("connection"))
    assert line.split() == ["connection", "postgresql://me:***@h/x?password=***", "DATABASE_URL"]
    assert "s3cret" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("dsn", "shown"),
    [
        ("postgresql://me:a:b@c@host:1/x", "postgresql://me:***@host:1/x"),
        ("postgresql://host/x", "postgresql://host/x"),
        ("postgresql://me@host/x", "postgresql://me@host/x"),
        ("embedded:", "embedded:"),
        ("mine", "mine"),
        ("postgresql://h/x?sslpassword=s3cret&a=b", "postgresql://h/x?sslpassword=***&a=b"),
        ("postgresql://h/x?PASSWORD=s3cret@x", "postgresql://h/x?PASSWORD=***"),
        ("postgresql://[::1]:5432/x", "***"),
        ("host=h password=s3cret", "***"),
        ("postgres:/u:s3cret@h/x", "***"),
        ("postgresql://u:p/w@h/x", "postgresql://u:***@h/x"),
        ("socket:///run/pg?db=x", "socket:///run/pg?db=x"),
    ],
)
def test_masked_connection_string_has_no_password(dsn: str, shown: str) -> None:
    assert masked(dsn) == shown


def test_graphile_worker_toml_wins_over_pyproject_and_a_named_file_over_both(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.graphile-worker]\njobs = 2\n")
    (tmp_path / "graphile-worker.toml").write_text("jobs = 3\n")
    (tmp_path / "other.toml").write_text("jobs = 4\n")
    assert gather({}, environment={}, folder=tmp_path)["jobs"] == (3, "graphile-worker.toml")
    other = str(tmp_path / "other.toml")
    assert gather({}, other, environment={}, folder=tmp_path)["jobs"] == (4, other)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("concurrency = 3", "unknown setting 'concurrency'. Did you mean jobs?"),
        ("[tool.graphile-worker]", "Write the keys without [tool.graphile-worker]"),
        ("poll_interval = 0", "poll_interval is 0; it must be more than 0."),
        (
            "shutdown_grace = 5",
            "shutdown_grace is 5; it must be a number with a unit: 500ms, 2s, 5m, 1h or 14d.",
        ),
        ("job = 3", "graphile-worker.toml: unknown setting 'job'. Did you mean jobs?"),
        ("colour = 3", "unknown setting 'colour'. Settings: app, connection, crontab, fast_lease"),
        ("jobs = 0", "graphile-worker.toml: jobs is 0; it must be an integer from 1 to 100,000."),
        ("jobs = 1.5", "jobs is 1.5; it must be an integer"),
        ("jobs = true", "jobs is True; it must be an integer"),
        (
            "poll_interval = '2 weeks'",
            "poll_interval is '2 weeks'; it must be milliseconds, or a number",
        ),
        ("listen = 'maybe'", "listen is 'maybe'; it must be true or false."),
        ("log_format = 'xml'", "log_format is 'xml'; it must be text or json or pretty."),
        ("connection = 3", "connection is ***; it must be a string."),
        ("jobs = ", "graphile-worker.toml is not TOML: "),
    ],
)
def test_invalid_configuration_file_names_key_and_value(tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / "graphile-worker.toml").write_text(file)
    with pytest.raises(ConfigurationError) as caught:
        gather({}, environment={}, folder=tmp_path)
    assert message in str(caught.value)


def test_pyproject_without_graphile_worker_table_is_ignored_unless_named(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text("[tool.other]\n")
    assert gather({}, environment={}, folder=tmp_path)["jobs"].source == "default"
    with pytest.raises(ConfigurationError, match=r"has no table \[tool.graphile-worker\]"):
        gather({}, str(file), environment={}, folder=tmp_path)
    file.write_text("[tool.graphile_worker]\njobs = 2\n")
    with pytest.raises(ConfigurationError, match="with a hyphen"):
        gather({}, environment={}, folder=tmp_path)


def test_invalid_value_names_the_environment_variable(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="GRAPHILE_WORKER_JOBS: jobs is 'many'"):
        gather({}, environment={"GRAPHILE_WORKER_JOBS": "many"}, folder=tmp_path)


@pytest.mark.parametrize(
    ("raw", "seconds"),
    [("2000", 2.0), (500, 0.5), ("500ms", 0.5), ("2s", 2.0), ("1.5m", 90.0), ("1h", 3600.0)],
)
def test_poll_interval_is_milliseconds_or_has_a_unit(tmp_path: Path, raw: object, seconds: float) -> None:
    (tmp_path / "graphile-worker.toml").write_text(f"poll_interval = {json.dumps(raw)}")
    assert gather({}, environment={}, folder=tmp_path)["poll_interval"].value == seconds


def test_unknown_graphile_worker_variable_is_warned_about(tmp_path: Path) -> None:
    done = config(
        tmp_path, "config", GRAPHILE_WORKER_JOB="3", GRAPHILE_WORKER_JOB_ID="7", GRAPHILE_WORKER_POLL="1"
    )
    assert "GRAPHILE_WORKER_POLL is ignored: unknown setting." in done.stderr
    assert (
        "GRAPHILE_WORKER_JOB is ignored: unknown setting. Did you mean GRAPHILE_WORKER_JOBS?" in done.stderr
    )
    assert "GRAPHILE_WORKER_JOB_ID" not in done.stderr, "a variable of a program that runs as a task"
