"""What the tests compare with is fetched though npm has its moments, and is not missed in silence."""

from __future__ import annotations

import importlib
import os
import stat
import sys
from pathlib import Path

import pytest

from support import node
from support.postgres import ROOT

sys.path.insert(0, str(ROOT / "tools"))
fetch_peers = importlib.import_module("fetch_peers")


def npm_that_fails(folder: Path, times: int) -> None:
    """A program of that name, which says how often it was asked."""
    program = folder / "npm"
    program.write_text(
        f'#!/bin/sh\necho asked >> "{folder}/asked"\n'
        f'[ "$(wc -l < "{folder}/asked")" -gt {times} ] || {{ echo "no network" >&2; exit 1; }}\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(("times", "problem"), [(2, None), (3, "peer@1: no network")])
def test_npm_is_asked_three_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, problem: str | None
) -> None:
    npm_that_fails(tmp_path, times)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(fetch_peers, "PEERS", tmp_path / "peers")
    monkeypatch.setattr(fetch_peers, "PAUSES", (0, 0))
    monkeypatch.setenv("PEERS_REQUIRED", "1")
    assert fetch_peers.fetch("peer@1") == problem
    assert (tmp_path / "peers" / "peer-1" / ".done").exists() is (problem is None)
    assert (tmp_path / "asked").read_text() == "asked\n" * 3


def test_what_is_missing_skips_a_test_and_fails_it_where_nothing_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PEERS_REQUIRED", raising=False)
    with pytest.raises(pytest.skip.Exception):
        node.command("0.0.0")
    monkeypatch.setenv("PEERS_REQUIRED", "1")
    with pytest.raises(pytest.fail.Exception, match=r"and PEERS_REQUIRED is set"):
        node.command("0.0.0")
