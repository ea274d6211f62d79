"""The pages on tasks: their examples do what the text says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.postgres import ROOT
from support.tutorial import Reader

if TYPE_CHECKING:
    from pathlib import Path

    from graphile_worker.testing import Databases


@pytest.fixture(scope="session")
def databases(default_databases: Databases) -> Databases:
    return default_databases


def test_the_tutorial(tmp_path: Path, short_folder: Path) -> None:
    with Reader(tmp_path, {"embedded:": f"embedded:{short_folder}"}) as reader:
        reader.follow(ROOT / "docs" / "tutorial.md")
