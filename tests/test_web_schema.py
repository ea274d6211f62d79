"""Requests that schemathesis makes from the API's OpenAPI description: all answers are as described."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.generation import GenerationMode

from graphile_worker import App
from graphile_worker.testing import Databases
from graphile_worker.web import Dashboard, token_auth
from graphile_worker.web.server import address_of, bind, serving

TOKEN = "a-long-random-secret"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
SKIPPED = {
    "positive_data_acceptance",  # a schema cannot say what a filter or a cursor looks like
    "use_after_free",
    "ensure_resource_availability",
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture
def address(database: str) -> Iterator[str]:
    """The address of a served dashboard of a queue with some jobs."""
    app = App(dsn=database)
    app.migrate_sync()
    for number in range(5):
        app.add_job_sync("hello", {"n": number}, queue_name="q" if number % 2 else None)
    bound = bind("127.0.0.1", 0)
    with bound, serving(Dashboard(app, auth=token_auth(TOKEN)), bound):
        yield address_of(bound)
    app.close_sync()


def test_schemathesis_finds_nothing(address: str) -> None:
    found: list[str] = []
    called, statuses = set[str](), set[int]()
    load_all_checks()
    checks = [check for name, check in CHECKS._items.items() if name not in SKIPPED]
    schema = schemathesis.openapi.from_url(f"{address}api/v1/openapi.json", headers=HEADERS)

    def examine() -> None:
        for result in schema.get_all_operations():
            operation: Any = result.ok()  # type: ignore[union-attr] # the description is valid
            # A stream does not end, and a sweep takes seconds.
            if operation.path in {"/events", "/maintenance/{what}", "/doctor"}:
                continue

            called.add(operation.label)

            @settings(
                max_examples=20,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.explicit, Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(
                case=operation.as_strategy() | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
            )
            def one(case: Any) -> None:
                case.call_and_validate(headers=HEADERS, checks=checks)
                statuses.add(case.call(headers=HEADERS).status_code)

            try:
                one()
            except BaseException as error:  # noqa: BLE001 - all operations are examined before the test fails
                found.append(f"{operation.method} {operation.path}: {error}")

    thread = threading.Thread(target=examine)
    thread.start()
    thread.join()
    assert not found, "\n\n".join(found)
    assert len(called) > 15
    assert {200, 400, 404} <= statuses <= {200, 201, 202, 400, 404, 405, 409, 429}, statuses
