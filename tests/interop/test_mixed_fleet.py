"""Node's workers and ours on one queue, killed, stopped and frozen at random; and audited afterwards."""

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
def test_whoever_is_killed_no_job_is_lost_and_no_serial_queue_has_two_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node.command("0.18.0")
    arguments = ["--mixed", "--workers", "2", "--seconds", "45", "--scale", "0.25", "--seed", "12"]
    status = main([*arguments, "--output", str(tmp_path)])
    said = capsys.readouterr().out
    assert status == 0, said
    assert "Nothing was violated." in said
    [report] = tmp_path.glob("*/README.md")
    page = report.read_text()
    added, runs = counted(page, "jobs surely added"), counted(page, "runs")
    assert added > 1000
    assert counted(page, "runs in serial queues") > 0.4 * runs
    # Without keys that are added again and removed, in serial queues too, it would show nothing.
    assert counted(page, "of these in a serial queue and with a key") > 0.03 * added
    assert counted(page, "of these added in SQL") > 0.2 * added
    assert counted(page, "jobs removed by their key before they ran") > 0.005 * added
    assert counted(page, "runs by npm's workers") > 0
    assert counted(page, "runs by our workers") > 0
    # All of them are stopped at the end, too.
    assert counted(page, "npm's workers that were killed or stopped") > 2
    assert counted(page, "our workers that were killed or stopped") > 2
