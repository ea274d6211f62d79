"""fetch_peers retries npm, and a missing peer skips or fails the tests that need it."""

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


def write_failing_npm(folder: Path, times: int) -> None:
    """Write an `npm` program that fails so many times and logs each call."""
    program = folder / "npm"
    program.write_text(
        f'#!/bin/sh\necho called >> "{folder}/calls"\n'
        f'[ "$(wc -l < "{folder}/calls")" -gt {times} ] || {{ echo "no network" >&2; exit 1; }}\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(("times", "problem"), [(2, None), (3, "peer@1: no network")])
def test_fetch_calls_npm_up_to_three_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, problem: str | None
) -> None:
    write_failing_npm(tmp_path, times)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(fetch_peers, "PEERS", tmp_path / "peers")
    monkeypatch.setattr(fetch_peers, "PAUSES", (0, 0))
    monkeypatch.setenv("PEERS_REQUIRED", "1")
    assert fetch_peers.fetch("peer@1") == problem
    assert (tmp_path / "peers" / "peer-1" / ".done").exists() is (problem is None)
    assert (tmp_path / "calls").read_text() == "called\n" * 3


def test_missing_peer_skips_the_test_or_fails_it_if_peers_are_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PEERS_REQUIRED", raising=False)
    with pytest.raises(pytest.skip.Exception):
        node.command("0.0.0")
    monkeypatch.setenv("PEERS_REQUIRED", "1")
    with pytest.raises(pytest.fail.Exception, match="PEERS_REQUIRED"):
        node.command("0.0.0")
