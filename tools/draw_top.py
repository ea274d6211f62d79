"""Draw docs/assets/top.svg: ``graphile-worker top`` on a terminal, while a real worker runs jobs.

The picture is not staged. A worker runs the tasks below on an embedded PostgreSQL, `top` watches it on a
pseudo-terminal, and the last screen that `top` printed is the picture.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import pty
import random
import re
import struct
import subprocess
import sys
import tempfile
import termios
import time
from datetime import timedelta
from pathlib import Path

from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.terminal_theme import TerminalTheme

from graphile_worker import App, Fail, Retry

PICTURE = Path(__file__).parent.parent / "docs" / "assets" / "top.svg"
COLUMNS, LINES = 108, 18
SECONDS = 20.0
"""How long to watch. The rates come from PostgreSQL's statistics, which lag by some seconds."""
THEME = TerminalTheme(
    (24, 27, 38),
    (205, 211, 230),
    [
        (24, 27, 38),
        (240, 113, 120),
        (145, 203, 130),
        (230, 192, 110),
        (110, 165, 240),
        (190, 140, 230),
        (100, 200, 205),
        (205, 211, 230),
    ],
)
DSN = "embedded:./shop"
HOME = "\x1b[H"
"""How each screen of `top` begins."""

app = App()


@app.task
async def send_email(to: int) -> None:
    """Send most emails at once. Sometimes the server is busy."""
    await asyncio.sleep(random.uniform(0.01, 0.06))
    if to % 97 == 0:
        raise Retry("421 Too many connections", after=30)


@app.task
async def resize_image(image: int) -> None:  # noqa: ARG001 - a payload for the picture
    """Take longer than the rest."""
    await asyncio.sleep(random.uniform(0.2, 0.5))


@app.task(retry=[60, 300], max_attempts=5)
async def charge_card(order: int) -> None:
    """Fail permanently when the card is declined."""
    await asyncio.sleep(0.1)
    if order % 40 == 0:
        raise Fail("The card was declined")
    if order % 9 == 0:
        raise ConnectionError("The bank does not answer")


@app.task(queue_name="search-index")
async def reindex(article: int) -> None:  # noqa: ARG001 - the same
    """Run one at a time, because of the queue."""
    await asyncio.sleep(0.05)


@app.task(queue_name="reports")
async def build_report(month: int) -> None:  # noqa: ARG001 - the same
    """Run for long, one at a time."""
    await asyncio.sleep(4)


@app.task
async def push_notification(device: int) -> None:  # noqa: ARG001 - the same
    """Run for a moment."""
    await asyncio.sleep(0.005)


@app.task
async def sync_customer(customer: int) -> None:
    """Wait for another service, which sometimes does not answer."""
    await asyncio.sleep(random.uniform(0.1, 0.3))
    if customer % 20 == 0:
        raise TimeoutError("The CRM did not answer within 10 s")


@app.task
async def remind(customer: int) -> None:
    """Run tomorrow."""


async def add_jobs() -> None:
    """Keep the queue busy."""
    await build_report.enqueue_many({"month": month} for month in range(1, 13))
    await resize_image.enqueue_many({"image": image} for image in range(300))
    await send_email.using(priority=10).enqueue_many({"to": to} for to in range(1, 3000))
    await reindex.enqueue_many({"article": article} for article in range(80))
    await remind.using(run_at=timedelta(days=1)).enqueue_many({"customer": n} for n in range(310))
    for tick in range(1, 10_000):
        await push_notification.enqueue_many({"device": n} for n in range(random.randrange(10, 20)))
        await sync_customer.enqueue(customer=tick)
        await send_email.enqueue_many({"to": tick * 100 + n} for n in range(random.randrange(15, 30)))
        await resize_image.enqueue_many({"image": tick * 10 + n} for n in range(random.randrange(1, 5)))
        await charge_card.enqueue_many({"order": tick * 2 + n} for n in range(2))
        await reindex.enqueue(article=tick)
        await reindex.enqueue(article=-tick)
        await asyncio.sleep(0.2)


def watch(folder: str) -> str:
    """Return the last screen that ``graphile-worker top`` prints."""
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    program = str(Path(sys.executable).parent / "graphile-worker")
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "", "FORCE_COLOR": "1"}
    printed = b""
    with subprocess.Popen(
        [program, "top", "-c", DSN],
        cwd=folder,
        env=environment,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    ) as process:
        os.close(terminal)
        os.set_blocking(screen, False)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and process.poll() is None:
            try:
                printed += os.read(screen, 65536)
            except BlockingIOError:
                time.sleep(0.05)
        os.write(screen, b"q")
        process.wait(10)
    os.close(screen)
    screens = [part for part in printed.decode().split(HOME) if "READY" in part]
    if not screens:
        sys.exit(f"top printed no table:\n{printed.decode()}")
    return re.sub(r"\x1b\[\?\w+", "", screens[-1]).replace("\r", "")


def draw(screen: str) -> None:
    """Write the picture."""
    with Path(os.devnull).open("w", encoding="utf-8") as devnull:
        console = Console(
            record=True, width=COLUMNS, file=devnull, force_terminal=True, color_system="truecolor"
        )
        for line in AnsiDecoder().decode(screen.rstrip()):
            console.print(line, soft_wrap=True)
        text = console.export_svg(title="graphile-worker top", theme=THEME, unique_id="top")
    # Rich refers to a font on another server. These fonts are installed, and have the same width.
    text = re.sub(r"@font-face \{.*?\}", "", text, flags=re.DOTALL)
    text = text.replace(
        "Fira Code, monospace", "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
    )
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text("\n".join(line.rstrip() for line in text.splitlines() if line.strip()) + "\n")


async def run_and_watch(folder: str) -> str:
    """Run a worker, and return the last screen of `top`."""
    app.configure(dsn=DSN)
    async with app.running(concurrency=20):
        adding = asyncio.create_task(add_jobs())
        screen = await asyncio.to_thread(watch, folder)
        adding.cancel()
    return screen


def main() -> None:
    """Draw the picture."""
    logging.disable()  # the failures belong to the picture, not to this terminal
    with tempfile.TemporaryDirectory(prefix="top-") as folder:
        Path(folder).chmod(0o755)  # for root, whose server runs as another user
        os.chdir(folder)
        screen = asyncio.run(run_and_watch(folder))
        os.chdir(PICTURE.parent)
    draw(screen)


if __name__ == "__main__":
    main()
