"""The chaos harness: every job runs despite faults, in a short run and in a longer one."""

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


@pytest.mark.slow
def test_dead_workers_and_broken_connections_lose_no_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--seconds", "15", "--scale", "0.25", "--seed", "7", "--faults", SUDDEN, "--no-comparison"]
    status = main([*arguments, "--output", str(tmp_path)])
    output = capsys.readouterr().out
    assert status == 0, output
    assert "No rule was violated." in output
    [report] = tmp_path.glob("*/README.md")
    text = report.read_text()
    for fault in SUDDEN.split(","):
        assert f"| {fault} |" in text
    assert str(tmp_path) not in text
    assert not list(tmp_path.rglob("*.ledger")), "the ledgers are removed after a run without violations"


@pytest.mark.slow
@pytest.mark.alone
def test_freezes_network_losses_and_outages_lose_no_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["--seconds", "60", "--scale", "0.25", "--seed", "11", "--output", str(tmp_path)])
    output = capsys.readouterr().out
    assert status == 0, output


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_all_started_processes(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "chaos", "--seconds", "60", "--no-comparison", "--output", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stderr is not None
        process.stderr.readline()  # printed when all workers run
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 3
        process.send_signal(number)
        assert process.wait(30) == 130
    assert not psutil.wait_procs(children, timeout=30)[1]


@pytest.mark.slow
def test_workers_do_not_outlive_the_harness(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "chaos", "--seconds", "60", "--no-comparison", "--output", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stderr is not None
        process.stderr.readline()
        children = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not psutil.wait_procs(children, timeout=30)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--faults", "earthquake"], "earthquake"),
        (["--seconds", "10", "--faults", "long freeze"], "10 s"),
        (["--workers", "0"], "must be more than 0"),
    ],
)
def test_invalid_arguments_are_rejected(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err
