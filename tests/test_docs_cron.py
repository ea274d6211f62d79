"""The examples in the guide on recurring tasks run and do what the text says."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest

from graphile_worker import CronItem, parse_crontab
from graphile_worker.cli.schedules import _format_run
from support.pages import Page
from support.postgres import ROOT

PAGE = ROOT / "docs" / "guides" / "cron.md"


def texts() -> list[str]:
    """Return the blocks without a language: crontabs and output."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [text for language, text in blocks if not language]


def test_cron_guide_shows_the_output_of_cron_next() -> None:
    paris = CronItem("t", "30 2 * * *", tz="Europe/Paris")
    runs = paris.occurrences(datetime(2030, 3, 30, 12, tzinfo=UTC), datetime(2030, 4, 1, 12, tzinfo=UTC))
    shown = "".join(f"{_format_run(paris, at)}\n" for at in runs)
    assert f"--tz Europe/Paris -n 2\n{shown}```" in PAGE.read_text()


async def test_cron_guide_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = Page("guides/cron.md", dsn="postgresql://localhost/mine")
    names = await page.run()
    assert [(item.identifier, item.payload) for item in names["app"].cron.items] == [
        ("clean_up_more", {"days": 7}),
        ("clean_up", {}),
    ]
    assert {item.queue_name for item in names["app"].cron.items} == {"housekeeping"}
    names = await page.run()
    assert [item.match for item in names["items"][:2]] == ["0 4 * * *", "30 8 * * 1,4"]
    assert names["items"][2].next_after(datetime(2030, 1, 2, tzinfo=UTC)) == datetime(2030, 4, 1, tzinfo=UTC)
    names = await page.run()
    assert names["following"] == datetime(2030, 1, 3, 8, 30, tzinfo=UTC)
    assert [at.day for at in names["week"]] == [3, 7]
    assert names["text"] == '0 4 * * * clean_up ?fill=1d\n30 8 * * 1,4 send_report {"full":true}\n'
    await page.run()
    assert capsys.readouterr().out in texts()
    names = await page.run()
    assert names["spring"] == datetime(2030, 3, 31, 1, tzinfo=UTC)
    assert names["autumn"] == datetime(2030, 10, 27, 0, 30, tzinfo=UTC)
    page.assert_done()


def test_cron_guide_crontabs_are_valid() -> None:
    plain, extended = (text for text in texts() if "clean_up" in text and "crontab:" not in text)
    assert [item.identifier for item in parse_crontab(plain)] == ["sync_orders", "clean_up", "morning"]
    assert [item.identifier for item in parse_crontab(extended, strict=None)] == [
        *("send_report", "sync_orders", "clean_up"),
    ]


def test_cron_guide_lists_every_crontab_option() -> None:
    named = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    with pytest.raises(
        Exception, match=r"expected id, fill, max, queue, jobKey, jobKeyMode or priority$"
    ) as raised:
        parse_crontab("* * * * * t ?zzzz=1")
    for name in ("id", "fill", "max", "queue", "jobKey", "jobKeyMode", "priority"):
        assert name in str(raised.value)
        assert name in named
