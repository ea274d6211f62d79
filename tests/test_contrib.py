"""The integrations as a whole: frameworks are the user's own."""

from __future__ import annotations

import importlib
import sys

import pytest

from graphile_worker import ConfigurationError
from graphile_worker.errors import MissingExtraError

NEEDS = {
    "alembic": "alembic",
    "fastapi": "fastapi",
    "flask": "flask",
    "litestar": "litestar",
    "starlette": "starlette.responses",
}


@pytest.mark.parametrize("name", NEEDS)
def test_integration_without_its_framework_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"graphile_worker.contrib.{name}"
    importlib.import_module(module)  # so that the patch below restores it
    monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, NEEDS[name], None)
    with pytest.raises(MissingExtraError, match=f"pip install '?{name}"):
        importlib.import_module(module)
    assert issubclass(MissingExtraError, ConfigurationError)
