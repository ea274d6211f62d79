"""Node workers and Python workers on one queue, killed, stopped and frozen at random, then audited."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from chaos.__main__ import main

from support import node

if TYPE_CHECKING:
    from pathlib import Path


def counted(page: str, name: str) -> int:
    found = re.search(rf"\| {name} \| ([\d,]+) \|", page)
    assert found is not None, name
    return int(found[1].replace(",", ""))


@pytest.mark.slow
@pytest.mark.alone
def test_mixed_fleet_loses_no_job_and_keeps_queues_serial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node.command("0.18.0")
    arguments = ["--mixed", "--workers", "2", "--seconds", "45", "--scale", "0.25", "--seed", "12"]
    status = main([*arguments, "--output", str(tmp_path)])
    output = capsys.readouterr().out
    assert status == 0, output
    assert "No rule was violated." in output
    [report] = tmp_path.glob("*/README.md")
    page = report.read_text()
    added, runs = counted(page, "jobs added for certain"), counted(page, "runs")
    assert added > 1000
    assert counted(page, "runs in serial queues") > 0.4 * runs
    # Without keys that are added again and removed, in serial queues too, the audit would prove little.
    assert counted(page, "jobs with a key in a serial queue") > 0.03 * added
    assert counted(page, "jobs added in SQL") > 0.2 * added
    assert counted(page, "jobs removed by their key before they ran") > 0.005 * added
    assert counted(page, "runs by Node workers") > 0
    assert counted(page, "runs by Python workers") > 0
    # All workers are also stopped at the end.
    assert counted(page, "Node workers killed or stopped") > 2
    assert counted(page, "Python workers killed or stopped") > 2
