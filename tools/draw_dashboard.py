"""Draw docs/assets/dashboard/: every page of the dashboard in both themes, from the demo.

The pictures are not staged: `graphile_worker.web.demo` fills an embedded database, a real worker runs its
jobs, and Chromium opens each page. Pictures are WebP, which Chromium makes itself, so that they are small.
Run it with ``.venv/bin/python tools/draw_dashboard.py [FOLDER] [WIDTH ...]``.
"""

from __future__ import annotations

import asyncio
import base64
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playwright.async_api import async_playwright

from graphile_worker.testing import Databases, running_server
from graphile_worker.web import Dashboard
from graphile_worker.web.demo import keep_busy, make_app, seed_queue
from graphile_worker.web.server import bind, serving

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

FOLDER = Path(__file__).parent.parent / "docs" / "assets" / "dashboard"
PAGES = {
    "overview": "/?window=24h",
    "jobs": "/jobs?state=failed",
    "failures": "/failures",
    "queues": "/queues",
    "tasks": "/tasks",
    "task": "/tasks/send_email",
    "cron": "/cron",
    "workers": "/workers",
    "operations": "/operations",
    "doctor": "/doctor",
    "add": "/add",
}
THEMES = ("light", "dark")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
HEIGHT = 800
WIDTH = 1280
BUSY_SECONDS = 8.0
"""How long the worker runs before the pictures: its statistics are written every few seconds."""
TO_WEBP = """async png => {
  const image = new Image();
  image.src = "data:image/png;base64," + png;
  await image.decode();
  const canvas = new OffscreenCanvas(image.width, image.height);
  canvas.getContext("2d").drawImage(image, 0, 0);
  const blob = await canvas.convertToBlob({type: "image/webp", quality: 0.7});
  const bytes = new Uint8Array(await blob.arrayBuffer());
  return btoa(Array.from(bytes, byte => String.fromCharCode(byte)).join(""));
}"""


async def save(page: Page, converter: Page, path: Path, *, whole: bool) -> None:
    """Save a picture of the page as WebP."""
    png = await page.screenshot(full_page=whole)
    found: str = await converter.evaluate(TO_WEBP, base64.b64encode(png).decode())
    await asyncio.to_thread(path.write_bytes, base64.b64decode(found))


async def draw(browser: Browser, address: str, folder: Path, width: int) -> None:
    """Draw every page in both themes."""
    converter = await browser.new_page()
    for theme in THEMES:
        settings: dict[str, Any] = {"viewport": {"width": width, "height": HEIGHT}, "color_scheme": theme}
        context = await browser.new_context(**settings, reduced_motion="reduce")
        page = await context.new_page()
        suffix = f"-{theme}" if width == WIDTH else f"-{theme}-{width}"
        for name, path in PAGES.items():
            await page.goto(address + path)
            await page.wait_for_timeout(300)
            await save(page, converter, folder / f"{name}{suffix}.webp", whole=width != WIDTH)
        await page.goto(f"{address}/jobs?state=failed")
        await page.locator("tbody a.number").first.click()
        await page.wait_for_load_state()
        await save(page, converter, folder / f"job{suffix}.webp", whole=width != WIDTH)
        await page.get_by_role("button", name="Retry").click()
        await page.locator("dialog h1").wait_for()
        await save(page, converter, folder / f"confirm{suffix}.webp", whole=False)
        await context.close()


async def main(dsn: str, folder: Path, widths: list[int]) -> None:
    """Fill the database, run its jobs, and draw."""
    app, pace = make_app(dsn)
    await seed_queue(app, pace)
    worker = asyncio.create_task(keep_busy(app, pace))
    await asyncio.sleep(BUSY_SECONDS)
    bound = bind("127.0.0.1", 0)
    address = f"http://127.0.0.1:{bound.getsockname()[1]}"
    with serving(Dashboard(app), bound):
        await draw_all(address, folder, widths)
    worker.cancel()
    with suppress(asyncio.CancelledError):
        await worker
    await app.close()


async def draw_all(address: str, folder: Path, widths: list[int]) -> None:
    """Draw every page in all widths."""
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for width in widths:
            await draw(browser, address, folder, width)
        await browser.close()


if __name__ == "__main__":
    if shutil.which("chromium") is None:
        sys.exit("Chromium is not installed: apt-get install chromium")
    given = sys.argv[1:]
    target = Path(given[0]) if given else FOLDER
    target.mkdir(parents=True, exist_ok=True)
    with running_server() as server, Databases(server) as databases:

        async def run() -> None:
            """Draw on a fresh database."""
            async with databases.fresh(empty=True) as dsn:
                await main(dsn, target, [int(width) for width in given[1:]] or [WIDTH])

        asyncio.run(run())
