"""The dashboard in a real Chromium: scripts, keys, live updates, themes, accessibility, and attacks."""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.responses import HTMLResponse
from starlette.routing import Route

from graphile_worker import App
from graphile_worker.testing import Databases
from graphile_worker.web import Access, Dashboard
from graphile_worker.web.auth import OneTimeLinks
from support.jobs import add, count, existing
from support.node import missing
from support.postgres import PEERS
from support.proxy import proxied
from support.waiting import until
from support.web import NASTY, PAGES, add_failed, fill

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP *.test 127.0.0.1",
]
AXE = PEERS / "axe-core-4.14.0" / "node_modules" / "axe-core" / "axe.min.js"
PATIENCE = 60_000.0
"""Milliseconds that an action in the browser may take on a loaded machine."""


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@asynccontextmanager
async def served(asgi: Any, *, root_path: str = "") -> AsyncIterator[str]:
    """Serve a program on a thread of its own, and return its address."""
    config = uvicorn.Config(
        asgi, host="127.0.0.1", port=0, log_level="critical", root_path=root_path, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()

    async def has_started() -> bool:
        return server.started or not thread.is_alive()

    try:
        await until(has_started, "the server listens", within=60)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await asyncio.to_thread(thread.join, 30)
        assert not thread.is_alive()


class Tab:
    """A tab of the browser, and what went wrong in it."""

    def __init__(self, page: Any, address: str) -> None:
        self.page = page
        self.address = address
        self.problems: list[str] = []
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("dialog", self._on_dialog)

    def _on_console(self, message: Any) -> None:
        if message.type in {"error", "warning"}:
            self.problems.append(f"{message.type}: {message.text} at {self.page.url}")

    async def _on_dialog(self, dialog: Any) -> None:
        self.problems.append(f"a script opened a dialog: {dialog.message}")
        await dialog.dismiss()

    async def open(self, path: str) -> int:
        answer = await self.page.goto(self.address + path)
        status: int = answer.status
        return status

    async def sees(self, text: str, within: str = "body") -> None:
        """Wait until the page shows a text."""
        await self.page.locator(within).get_by_text(text).first.wait_for()


class Browser:
    """Opens tabs, each with cookies of its own."""

    def __init__(self, chromium: Any) -> None:
        self._chromium = chromium

    async def tab(self, address: str, **options: Any) -> Tab:
        settings = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce", **options}
        context = await self._chromium.new_context(**settings)
        context.set_default_timeout(PATIENCE)
        return Tab(await context.new_page(), address)


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with playwright.async_playwright() as driver:
        chromium = await driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield Browser(chromium)
        await chromium.close()


@pytest.fixture
async def address(database: str) -> AsyncIterator[str]:
    async with served(Dashboard(App(dsn=database))) as found:
        yield found


@pytest.mark.parametrize("scripts", [True, False], ids=["with scripts", "without scripts"])
async def test_every_page_keeps_the_policy_and_logs_no_error(
    browser: Browser, address: str, db: asyncpg.Connection, *, scripts: bool
) -> None:
    ids = await fill(db)
    tab = await browser.tab(address, java_script_enabled=scripts)
    for path in (
        *PAGES,
        *(f"/jobs/{one}" for one in ids.values()),
        f"/jobs/confirm?action=cancel&id={ids['ready']}",
    ):
        assert await tab.open(path) == 200, path
        assert await tab.page.locator("h1").count() == 1, path
    assert tab.problems == []


async def test_texts_of_jobs_run_no_scripts(browser: Browser, address: str, db: asyncpg.Connection) -> None:
    ids = await fill(db)
    tab = await browser.tab(address)
    for path in ("/jobs", "/failures", "/queues", "/tasks", "/workers", f"/jobs/{ids['failed']}"):
        await tab.open(path)
        assert await tab.page.locator("img").count() == 0, path
        assert await tab.page.locator("main script").count() == 0, path
    await tab.page.goto(f"{address}/jobs?q={NASTY}")
    assert tab.problems == []


async def test_retry_in_a_dialog(browser: Browser, address: str, db: asyncpg.Connection) -> None:
    ids = await add_failed(db, "mail", "no such host", 3)
    tab = await browser.tab(address)
    await tab.open("/jobs?state=failed")
    retry = tab.page.locator(".selection button[value=retry]")
    assert await retry.is_disabled()
    await tab.page.locator(f'input[name=id][value="{ids[0]}"]').check()
    await tab.sees("1 selected")
    await retry.click()
    await tab.sees("Retry 1 job?", within="dialog")
    await tab.page.locator("dialog [data-close]").click()
    assert not await tab.page.locator("dialog").is_visible()
    await tab.page.locator("[data-select-page]").check()
    await tab.sees("3 selected")
    await retry.click()
    await tab.page.locator("dialog").get_by_role("button", name="Retry 3 jobs").click()
    await tab.sees("3 jobs will be retried.")
    assert await db.fetchval("select max(attempts) from graphile_worker._private_jobs") == 0
    assert tab.problems == []


async def test_retry_without_scripts(browser: Browser, address: str, db: asyncpg.Connection) -> None:
    ids = await add_failed(db, "mail", "no such host", 2)
    tab = await browser.tab(address, java_script_enabled=False)
    await tab.open("/")
    await tab.page.get_by_role("link", name="Failed").first.click()
    await tab.page.locator(f'input[name=id][value="{ids[0]}"]').check()
    await tab.page.locator(".selection button[value=retry]").click()
    await tab.page.get_by_role("button", name="Retry 1 job").click()
    await tab.sees("1 job will be retried.")
    assert "state=failed" in tab.page.url
    rows = await db.fetch("select id, attempts from graphile_worker._private_jobs order by id")
    assert [row["attempts"] for row in rows] == [0, 3]


async def test_job_is_found_opened_and_rescheduled(
    browser: Browser, address: str, db: asyncpg.Connection
) -> None:
    job = await add(db, "invoices/send", payload={"customer": 7})
    await add(db, "mail")
    tab = await browser.tab(address)
    await tab.open("/")
    await tab.page.keyboard.press("/")
    await tab.page.keyboard.type("payload.customer:7")
    await tab.page.keyboard.press("Enter")
    await tab.page.wait_for_url(re.compile(r"/jobs\?q=payload.customer(%3A|:)7"))
    assert await tab.page.locator("tbody tr").count() == 1
    await tab.page.locator(f'tbody a[href="/jobs/{job["id"]}"]').click()
    await tab.page.get_by_role("button", name="Reschedule").click()
    await tab.page.locator("dialog").get_by_label("Run in").fill("2 h")
    await tab.page.locator("dialog button.primary").click()
    await tab.sees("1 job rescheduled.")
    await tab.sees("Due")
    assert tab.page.url.endswith(f"/jobs/{job['id']}")
    due = await db.fetchval(
        "select run_at > now() + interval '1 hour' from graphile_worker._private_jobs where id = $1",
        job["id"],
    )
    assert due


async def test_job_is_added_again_with_an_edited_payload(
    browser: Browser, address: str, db: asyncpg.Connection
) -> None:
    job = await add(db, "mail", payload={"to": "Ann"})
    tab = await browser.tab(address)
    await tab.open(f"/jobs/{job['id']}")
    await tab.page.get_by_role("link", name="Add again").click()
    await tab.page.get_by_label("Payload").fill('{"to": "Bo", "n": 12345678901234567890}')
    await tab.page.get_by_role("button", name="Add job").click()
    await tab.sees("was added.")
    await tab.sees("12345678901234567890")
    assert await count(db) == 2


async def test_five_thousand_jobs_are_retried_in_the_background(
    browser: Browser, address: str, db: asyncpg.Connection
) -> None:
    await add_failed(db, "mail", "no", 5000)
    await add_failed(db, "other", "no", 3)
    tab = await browser.tab(address)
    await tab.open("/jobs?state=failed&q=task:mail")
    await tab.page.locator("input[name=all]").check()
    await tab.page.locator(".selection button[value=retry]").click()
    await tab.sees("Retry 5,000 jobs?", within="dialog")
    await tab.page.get_by_role("button", name="Retry 5,000 jobs").click()
    await tab.page.wait_for_url(re.compile("/operations/"))
    await tab.sees("100 %")
    await tab.sees("5,000 of 5,000")
    assert await db.fetchval("select count(*) from graphile_worker._private_jobs where attempts = 0") == 5000
    assert tab.problems == []


async def test_pages_follow_a_running_worker_without_loading_again(
    browser: Browser, database: str, address: str
) -> None:
    gate = asyncio.Event()
    app = App(dsn=database)

    @app.task("mail")
    async def mail(n: int) -> None:
        if n == 2:
            await gate.wait()

    await mail.enqueue_many([{"n": number} for number in range(3)])
    tab = await browser.tab(address)
    await tab.open("/jobs?state=ready")
    await tab.page.evaluate("window.loadedOnce = true")
    ready = tab.page.locator("#tabs a", has_text="Ready").locator(".number")
    assert await ready.inner_text() == "3"
    async with app.running(concurrency=2):
        await playwright.expect(ready).to_have_text("0", timeout=PATIENCE)
        running = tab.page.locator("#tabs a", has_text="Running").locator(".number")
        await playwright.expect(running).to_have_text("1", timeout=PATIENCE)
        await tab.sees("Nothing waits")
        gate.set()
        await playwright.expect(running).to_have_text("0", timeout=PATIENCE)
    assert await tab.page.evaluate("window.loadedOnce")
    assert tab.problems == []
    await app.close()


async def test_pages_are_polled_without_the_event_stream_and_not_while_hidden(
    browser: Browser, address: str, db: asyncpg.Connection
) -> None:
    tab = await browser.tab(address)
    await tab.page.route("**/api/v1/events", lambda route: route.abort())
    await tab.open("/jobs?state=failed")
    await tab.sees("Nothing has failed")
    await tab.page.locator("#refresh").select_option("1")
    ids = await add_failed(db, "mail", "no")
    await tab.page.locator(f'input[name=id][value="{ids[0]}"]').wait_for()
    hidden = "Object.defineProperty(document, 'hidden', {configurable: true, get: () => %s});"
    shown = "document.dispatchEvent(new Event('visibilitychange'))"
    await tab.page.evaluate(hidden % "true" + shown)
    await tab.page.wait_for_load_state("networkidle")
    requests: list[str] = []
    tab.page.on("request", lambda request: requests.append(request.url))
    await db.execute("delete from graphile_worker._private_jobs")
    await tab.page.wait_for_timeout(3000)
    assert requests == []
    await tab.page.evaluate(hidden % "false" + shown)
    await tab.sees("Nothing has failed")


async def test_refresh_keeps_focus_ticks_and_open_parts(
    browser: Browser, address: str, db: asyncpg.Connection
) -> None:
    ids = await add_failed(db, "mail", "no", 2)
    tab = await browser.tab(address)
    await tab.open("/jobs?state=failed")
    await tab.page.locator(f'input[name=id][value="{ids[0]}"]').check()
    await tab.page.locator(f'a[href="/jobs/{ids[0]}"]').focus()
    more = await add_failed(db, "mail", "no")
    await tab.page.keyboard.press("r")
    await tab.page.locator(f'input[name=id][value="{more[0]}"]').wait_for()
    assert await tab.page.locator(f'input[name=id][value="{ids[0]}"]').is_checked()
    assert await tab.page.evaluate("document.activeElement.getAttribute('href')") == f"/jobs/{ids[0]}"
    await tab.sees("1 selected")


async def test_keys_move_select_open_and_explain(
    browser: Browser, address: str, db: asyncpg.Connection
) -> None:
    ids = sorted(await add_failed(db, "mail", "no", 3), reverse=True)
    tab = await browser.tab(address)
    await tab.open("/jobs?state=failed")
    for key in ("j", "j", "k", "x"):
        await tab.page.keyboard.press(key)
    await tab.sees("1 selected")
    assert await tab.page.locator(f'input[name=id][value="{ids[0]}"]').is_checked()
    await tab.page.keyboard.press("j")
    await tab.page.keyboard.press("Enter")
    await tab.page.wait_for_url(f"**/jobs/{ids[1]}")
    await tab.page.keyboard.press("?")
    await tab.sees("Show these keys", within="dialog")
    await tab.page.keyboard.press("Escape")
    await tab.page.locator("dialog").wait_for(state="hidden")
    await tab.page.keyboard.press("/")
    assert await tab.page.evaluate("document.activeElement.id") == "search"
    await tab.page.keyboard.type("t")
    assert await tab.page.locator("#search").input_value() == "t"


async def test_whole_page_can_be_used_with_the_tab_key(
    browser: Browser, address: str, db: asyncpg.Connection
) -> None:
    await add_failed(db, "mail", "no")
    tab = await browser.tab(address)
    await tab.open("/jobs?state=failed")
    await tab.page.keyboard.press("Tab")
    assert await tab.page.evaluate("document.activeElement.textContent") == "Skip to the content"
    reached = set()
    for _ in range(60):
        await tab.page.keyboard.press("Tab")
        reached.add(
            await tab.page.evaluate(
                "document.activeElement.name || document.activeElement.textContent.trim()"
            )
        )
    assert {"id", "refresh", "theme", "q"} <= reached


async def test_theme_follows_the_system_and_can_be_chosen(browser: Browser, address: str) -> None:
    tab = await browser.tab(address, color_scheme="dark")
    await tab.open("/")
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = await tab.page.evaluate(paper)
    async with tab.page.expect_response("**/preferences"):
        await tab.page.locator("#theme").select_option("light")
    light = await tab.page.evaluate(paper)
    assert light != dark
    await tab.open("/tasks")
    assert await tab.page.evaluate(paper) == light
    async with tab.page.expect_response("**/preferences"):
        await tab.page.keyboard.press("t")
    assert await tab.page.locator("html").get_attribute("data-theme") == "dark"
    assert await tab.page.evaluate(paper) == dark
    assert tab.problems == []


async def test_outage_shows_a_banner_and_ends_by_itself(browser: Browser, database: str) -> None:
    async with proxied(database) as (proxy, dsn), served(Dashboard(App(dsn=dsn))) as address:
        tab = await browser.tab(address)
        await tab.open("/jobs")
        await tab.page.locator("#refresh").select_option("1")
        proxy.refusing = True
        proxy.cut_all()
        await tab.page.locator("#banner .attention").wait_for()
        assert await tab.page.locator("#tabs").count() == 1, "the last known page stays"
        proxy.refusing = False
        await tab.page.locator("#banner .attention").wait_for(state="detached")
        proxy.refusing = True
        proxy.cut_all()
        await tab.open("/tasks")
        await tab.page.locator("#banner .attention").wait_for()
        proxy.refusing = False
        await tab.sees("No tasks")


async def test_dashboard_mounted_in_fastapi_and_behind_a_proxy_path(
    browser: Browser, database: str, db: asyncpg.Connection
) -> None:
    [job] = await add_failed(db, "mail", "no")
    site = FastAPI()
    dashboard = Dashboard(App(dsn=database))
    site.mount("/ops/queue", dashboard)
    async with served(site) as address:
        tab = await browser.tab(f"{address}/ops/queue")
        await tab.open("/")
        await tab.page.locator("#navigation").get_by_role("link", name="Failed").click()
        await tab.page.wait_for_url("**/ops/queue/jobs?state=failed")
        await tab.page.locator(f'tbody a[href$="/jobs/{job}"]').click()
        await tab.page.get_by_role("button", name="Retry").click()
        await tab.page.locator("dialog button.primary").click()
        await tab.sees("1 job will be retried.")
        assert tab.problems == []
    await dashboard.close()


async def test_forged_forms_of_other_sites_are_refused(
    browser: Browser, address: str, db: asyncpg.Connection
) -> None:
    [job] = await add_failed(db, "mail", "no")

    async def forge(_: Any) -> HTMLResponse:
        return HTMLResponse(
            f'<form method="post" action="{address}/jobs/actions"><input name="action" value="remove">'
            f'<input name="id" value="{job}"><button>Win a prize</button></form>'
        )

    async with served(Starlette(routes=[Route("/", forge)])) as evil:
        tab = await browser.tab(evil)
        await tab.open("/")
        async with tab.page.expect_navigation() as navigation:
            await tab.page.get_by_role("button").click()
        assert (await navigation.value).status == 403
    assert await count(db) == 1


async def test_name_that_points_here_is_refused(browser: Browser, database: str) -> None:
    dashboard = Dashboard(App(dsn=database), allowed_hosts=["127.0.0.1"])
    async with served(dashboard) as address:
        tab = await browser.tab(address.replace("127.0.0.1", "rebinding.test"))
        assert await tab.open("/") in {400, 403, 421}
        assert "mail" not in await tab.page.content()


async def test_one_time_link_of_another_site_signs_in_and_forms_work_over_plain_http(
    browser: Browser, database: str, db: asyncpg.Connection
) -> None:
    [job] = await add_failed(db, "mail", "no")
    links = OneTimeLinks(Access(user="local"))
    dashboard = Dashboard(App(dsn=database), auth=links, allowed_hosts=["rebinding.test"])
    async with served(dashboard) as address:
        # A name that is not this machine's: the browser sends no Sec-Fetch-Site over plain HTTP.
        named = address.replace("127.0.0.1", "rebinding.test")

        async def link(_: Any) -> HTMLResponse:
            return HTMLResponse(f'<a href="{named}/jobs/{job}?token={links.token}">Dashboard</a>')

        async with served(Starlette(routes=[Route("/", link)])) as chat:
            tab = await browser.tab(chat, java_script_enabled=False)
            await tab.open("/")
            await tab.page.get_by_role("link").click()
            await tab.page.wait_for_url(f"{named}/jobs/{job}")
            await tab.page.get_by_role("button", name="Retry").click()
            await tab.page.locator("button.primary").click()
            await tab.sees("1 job will be retried.")
    assert (await existing(db, job))["attempts"] == 0
    await dashboard.close()


async def test_change_of_a_read_only_dashboard_is_refused_without_a_button(
    browser: Browser, database: str, db: asyncpg.Connection
) -> None:
    [job] = await add_failed(db, "mail", "no")
    async with served(Dashboard(App(dsn=database), read_only=True)) as address:
        tab = await browser.tab(address)
        await tab.open("/jobs?state=failed")
        assert await tab.page.locator(".selection").count() == 0
        status = await tab.page.evaluate(
            "id => fetch('/jobs/actions', "
            "{method: 'POST', body: new URLSearchParams({action: 'remove', id})})"
            ".then(answer => answer.status)",
            str(job),
        )
        assert status == 403
    assert await count(db) == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_page_is_accessible(
    browser: Browser, address: str, db: asyncpg.Connection, scheme: str
) -> None:
    if not AXE.exists():
        missing("npm's axe-core is not installed; run: make peers")
    ids = await fill(db)
    script = Path(AXE).read_text()
    found: dict[str, list[str]] = {}
    for width in (1280, 360):
        tab = await browser.tab(address, color_scheme=scheme, viewport={"width": width, "height": 900})
        # A refresh would replace elements while axe looks at them, and it judges what has left the page too.
        await tab.page.context.add_cookies([{"name": "gw_refresh", "value": "off", "url": address}])
        for path in (
            *PAGES,
            f"/jobs/{ids['running']}",
            f"/jobs/{ids['failed']}",
            f"/jobs/confirm?action=reschedule&id={ids['ready']}",
        ):
            await tab.open(path)
            await tab.page.evaluate(script)
            result = await tab.page.evaluate("axe.run()")
            for violation in result["violations"]:
                places = [node["html"][:160] for node in violation["nodes"][:3]]
                found.setdefault(violation["id"], []).append(f"{path} {width}: {places}")
    assert not found, "\n".join(f"{name}: {place}" for name, places in found.items() for place in places[:3])


@pytest.mark.parametrize("width", [320, 640, 1280, 2560])
async def test_no_page_is_wider_than_the_window(
    browser: Browser, address: str, db: asyncpg.Connection, width: int
) -> None:
    ids = await fill(db)
    tab = await browser.tab(address, viewport={"width": width, "height": 900})
    wide = []
    for path in (*PAGES, f"/jobs/{ids['failed']}", f"/jobs/{ids['running']}"):
        await tab.open(path)
        root = "document.documentElement"
        over = await tab.page.evaluate(f"{root}.scrollWidth - {root}.clientWidth")
        if over > 0:
            wide.append((path, over))
    assert wide == []
