"""The examples of the pages on results, history, statistics and progress run."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from graphile_worker import App
from graphile_worker.testing import drain, reported_progress
from support.pages import Page, python_blocks
from support.postgres import ROOT

if TYPE_CHECKING:
    import pytest

GUIDES = ROOT / "docs" / "guides"


async def run_on_thread(code: str, names: dict[str, Any]) -> None:
    """Run an example that has no event loop, or its own."""
    await asyncio.to_thread(exec, compile(code, "<docs>", "exec", dont_inherit=True), names)


async def test_results_page_examples_print_the_results(
    database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program, without_loop = python_blocks(GUIDES / "results.md")
    names: dict[str, Any] = {"dsn": database}
    await run_on_thread(program, names)
    async with names["app"] as app, app.running():
        await run_on_thread(without_loop, names)
    app.close_sync()
    assert capsys.readouterr().out == 2 * "7\n11\n"


async def test_history_page_examples_read_what_is_kept(database: str) -> None:
    page = Page("guides/history.md", dsn=database)
    first = (await page.run())["app"]
    assert (first.settings["history"].keep, first.settings["history_keep"]) == ("failures", 14 * 86_400)
    names = await page.run(2)
    redact = names["redact"]
    assert redact("pay", {"card": "4242", "cents": 5}) == {"card": "***", "cents": 5}
    assert redact("pay", [1]) == [1]
    names["app"] = first  # which has the task
    first.configure(dsn=database)
    async with first:
        names["job"] = await names["total"].enqueue(order=7)
        await first.run_once()
        assert (await page.run())["failed"] == []
        assert [attempt.outcome for attempt in names["attempts"]] == ["completed"]
        await run_on_thread(page.skip(), names)
        assert [attempt.job_id for attempt in names["attempts"]] == [names["job"].id]
        page.assert_done()
        first.close_sync()


async def test_statistics_page_examples_read_charts_and_report_progress(
    database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with App(dsn=database) as app:
        page = Page("guides/statistics.md", app=app)
        names = await page.run(2)
        page.assert_done()
        assert len(capsys.readouterr().out.splitlines()) == len(names["chart"].points) > 0
        job = await names["render"].enqueue(pages=4)
        await drain(app)
        assert [report.message for report in reported_progress(job)][-1] == "page 4 of 4"
