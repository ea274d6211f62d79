"""Dashboards for tests: pages through httpx, what is in them, and a queue with jobs in every state."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import asyncpg
import httpx

from graphile_worker import App
from graphile_worker.web import Dashboard
from support.jobs import add

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HOST = "127.0.0.1:8900"
NASTY = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
"""A text that runs a script wherever it is not escaped."""
PAGES = (
    "/",
    "/?window=24h",
    "/?window=7d",
    "/jobs",
    "/jobs?state=ready",
    "/jobs?state=scheduled",
    "/jobs?state=retrying",
    "/jobs?state=running",
    "/jobs?state=failed",
    "/jobs?state=blocked",
    "/jobs?q=nothing-has-this-text",
    "/failures",
    "/queues",
    "/tasks",
    "/tasks?sort=p95",
    "/cron",
    "/workers",
    "/operations",
    "/doctor",
    "/add",
    "/maintenance/sweep",
    "/maintenance/cleanup",
    "/maintenance/unlock?worker=w",
)
_VOID = {"meta", "link", "input", "img", "br", "hr"}
_DRAWN = {"path", "rect", "circle", "line"}


class Page(HTMLParser):
    """What a page has: its texts, links, forms, and mistakes in its markup."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = ""
        self.links: list[str] = []
        self.fields: dict[str, list[str]] = {}
        self.buttons: list[str] = []
        self.mistakes: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.mistakes += [f"<{name}> is not closed" for name in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.mistakes += [
            f"<{tag} {name}>" for name in found if name == "style" or (name.startswith("on") and name != "on")
        ]
        if tag == "style" or (tag == "script" and not found.get("src")):
            self.mistakes.append(f"inline <{tag}>")
        for name in ("href", "action", "src"):
            if found.get(name) is not None:
                self.links.append(str(found[name]))
        if tag == "input" and found.get("name"):
            self.fields.setdefault(str(found["name"]), []).append(found.get("value") or "")
        if tag == "button" and found.get("value"):
            self.buttons.append(str(found["value"]))
        if tag not in _VOID and tag not in _DRAWN:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID and tag not in _DRAWN:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag in _DRAWN:
            return
        if not self._open or self._open[-1] != tag:
            self.mistakes.append(f"</{tag}> closes {self._open[-1:]}")
        elif self._open:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data


@asynccontextmanager
async def serving(
    app: App, *, client: str = "127.0.0.1", prefix: str = "", **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Make a dashboard, and a client that asks as a browser on the same page does."""
    dashboard = Dashboard(app, **options)
    transport = httpx.ASGITransport(app=dashboard, client=(client, 50_000), root_path=prefix)
    headers = {"Sec-Fetch-Site": "same-origin", "Accept": "text/html,*/*"}
    async with httpx.AsyncClient(
        transport=transport, base_url=f"http://{HOST}{prefix}", headers=headers, timeout=30
    ) as browser:
        try:
            yield browser
        finally:
            await dashboard.close()
            await app.close()


async def fill(db: asyncpg.Connection) -> dict[str, int]:
    """Add a job in each state, with texts that must be escaped, and return their ids by state."""
    name = NASTY[:100]
    found: dict[str, int] = {}
    payload = {"id": 12345678901234567890123, name: [name, {"deep": {"er": None}}], "ok": True}
    for state in ("ready", "scheduled", "retrying", "running", "failed", "blocked"):
        row = await add(
            db,
            f"{name}/{state}",
            payload=payload,
            queue_name=f"{name}-{state}" if state in {"running", "blocked"} else None,
            job_key=f"{name}-{state}",
            flags=[name],
        )
        found[state] = row["id"]
    jobs = "graphile_worker._private_jobs"
    await db.execute(
        f"update {jobs} set run_at = now() + interval '2 hours' where id = $1", found["scheduled"]
    )
    await db.execute(
        f"update {jobs} set run_at = now() + interval '5 min', attempts = 3, last_error = $2 where id = $1",
        found["retrying"],
        f"card 4711 of {NASTY} was declined",
    )
    await db.execute(
        f"update {jobs} set attempts = max_attempts, last_error = $2 where id = $1",
        found["failed"],
        f"no customer 7\n{NASTY}",
    )
    await db.execute(
        f"update {jobs} set locked_at = now(), locked_by = $2, attempts = 1 where id = $1",
        found["running"],
        NASTY,
    )
    await db.execute(
        "update graphile_worker._private_job_queues set locked_at = now(), locked_by = $1", NASTY
    )
    return found


async def add_failed(db: asyncpg.Connection, task: str, error: str, number: int = 1) -> list[int]:
    """Add jobs that have no attempts left."""
    specs = json.dumps(
        [{"identifier": task, "payload": {"n": index}, "max_attempts": 3} for index in range(number)]
    )
    rows = await db.fetch(
        "select id from graphile_worker.add_jobs(array(select json_populate_recordset("
        "null::graphile_worker.job_spec, $1::json)))",
        specs,
    )
    ids = [row["id"] for row in rows]
    await db.execute(
        "update graphile_worker._private_jobs set attempts = max_attempts, last_error = $2 "
        "where id = any($1)",
        ids,
        error,
    )
    return ids
