"""The examples in the guide on middleware run and do what the text says."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from graphile_worker import App
from support.pages import Page

if TYPE_CHECKING:
    from graphile_worker.testing import Databases


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


async def test_middleware_guide_examples_run(database: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = Page("guides/middleware.md", dsn=database)
    names = await page.run()
    assert re.fullmatch(r"Hello, Ann\nhello took \d+ s\n", capsys.readouterr().out)
    await names["app"].close()

    names = await page.run()
    maintenance = names["Maintenance"]()
    maintenance.on = True
    async with App(database, middleware=[maintenance]) as app:
        app.task(_hello)
        await app.add_job("_hello")
        await app.add_job("_hello", flags=["urgent"])
        summary = await app.run_once()
        assert (summary.succeeded, summary.failed) == (1, 0)
        [snoozed] = await app.utils.list_jobs()
        assert (snoozed.attempts, snoozed.last_error) == (0, "Snoozed for 600 s: maintenance")
        await app.utils.complete_jobs([snoozed.id])

    names = await page.run()
    await check_tenant_middleware(database, names)

    capsys.readouterr()
    names = await page.run()
    assert capsys.readouterr().out == "Hello, Ann\n"
    await names["polite"].close()

    names = await page.run()
    quiet = names["QuietHours"]()
    for hour, limit in ((0, 0), (5, 0), (6, None), (23, None)):
        names["time"] = SimpleNamespace(localtime=lambda hour=hour: SimpleNamespace(tm_hour=hour))
        assert quiet.claim_limit("newsletter", 0) == limit
        assert quiet.claim_limit("other", 0) is None

    names = await page.run()
    assert len(names["careful"].utils.middleware) == 0
    await names["careful"].close()
    page.assert_done()


async def _hello() -> None: ...


async def check_tenant_middleware(database: str, names: dict[str, Any]) -> None:
    seen: list[Any] = []
    tenant = names["tenant"]
    async with App(database, middleware=[names["Tenant"]()]) as app:

        @app.task
        async def first(n: int) -> None:
            seen.append((n, tenant.get()))
            if n < 3:
                await first.enqueue(n=n + 1)

        token = tenant.set(7)
        await first.enqueue(n=1)
        tenant.reset(token)
        await first.enqueue(n=3)
        await app.run_once()
    assert sorted(seen, key=str) == [(1, 7), (2, 7), (3, 7), (3, None)]
