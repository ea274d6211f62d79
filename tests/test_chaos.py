"""Whatever breaks, every job runs: a short run of the chaos harness, and a longer one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from chaos.__main__ import main

from support.postgres import ROOT

SUDDEN = "kill,term,terminate,cut,restart immediate,refuse"


def test_workers_that_die_and_connections_that_break_cost_no_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--seconds", "15", "--scale", "0.25", "--seed", "7", "--faults", SUDDEN, "--no-comparison"]
    status = main([*arguments, "--output", str(tmp_path)])
    said = capsys.readouterr().out
    assert status == 0, said
    assert "Nothing was violated." in said
    [report] = tmp_path.glob("*/README.md")
    text = report.read_text()
    for fault in SUDDEN.split(","):
        assert f"| {fault} |" in text
    assert str(tmp_path) not in text
    assert not list(tmp_path.rglob("*.ledger")), "what nobody needs is removed"


@pytest.mark.slow
def test_neither_do_freezes_darkness_and_outages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--seconds", "60", "--scale", "0.25", "--seed", "11", "--output", str(tmp_path)])
    said = capsys.readouterr().out
    assert status == 0, said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_that_was_started(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "chaos", "--seconds", "60", "--no-comparison", "--output", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stderr is not None
        process.stderr.readline()  # all workers are there
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 3
        process.send_signal(number)
        assert process.wait(30) == 130
    assert not psutil.wait_procs(children, timeout=30)[1]


def test_workers_do_not_outlive_whoever_started_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "chaos", "--seconds", "60", "--no-comparison", "--output", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stderr is not None
        process.stderr.readline()
        children = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not psutil.wait_procs(children, timeout=30)[1]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--faults", "earthquake"], "there is no fault earthquake"),
        (["--seconds", "10", "--faults", "long freeze"], "none of these faults has room"),
        (["--workers", "0"], "must be more than 0"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert complaint in capsys.readouterr().err
