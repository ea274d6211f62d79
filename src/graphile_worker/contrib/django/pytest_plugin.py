"""Fixtures for pytest-django: ``pytest_plugins = ["graphile_worker.contrib.django.pytest_plugin"]``.

The test asks for the database itself, with ``@pytest.mark.django_db`` or one of pytest-django's fixtures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def run_jobs() -> Callable[..., Any]:
    """Return a function that runs the jobs that are due, in the test's transaction."""
    from graphile_worker.contrib.django import testing  # noqa: PLC0415 - Django must be set up

    return testing.run_jobs


@pytest.fixture
def arun_jobs() -> Callable[..., Any]:
    """Return a coroutine function that does the same in an async test."""
    from graphile_worker.contrib.django import testing  # noqa: PLC0415

    return testing.arun_jobs
