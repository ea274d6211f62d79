"""``graphile-worker top``: a live view of a queue."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import click

from graphile_worker.cli.exit_codes import exit_by_signal
from graphile_worker.cli.flags import open_utils, verb
from graphile_worker.cli.times import Period

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphile_worker.cli.settings import Value


@verb("top", "top", "top --interval 5s -c postgresql://me@db/mine")
@click.option(
    "--interval", type=Period(minimum=0.1), default="2s", help="Minimum time between refreshes [2s]."
)
def top(settings: Mapping[str, Value], *, interval: float) -> None:
    """Watch a queue live in the terminal.

    Shows how many jobs are waiting, running and failed, and five tables: tasks and queues with the age of
    their oldest due job, running jobs, workers, and the latest failures. Jobs can be inspected, retried and
    cancelled.

    \b
    Tab, 1 to 5   switch table            ↑ ↓ j k   select a row
    s, o          sort column, order      /, Esc    filter rows, show all
    Enter         show job details        t, c      retry it, cancel it
    space         pause, resume           q         quit

    Slow refreshes make the interval longer: queries take at most about a fiftieth of one session's time.
    """  # noqa: D301 - \b stops click from wrapping those lines
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("top needs a terminal. In a script, use: graphile-worker stats --json")
    number = asyncio.run(_top(settings, interval))
    if number:
        exit_by_signal(number)


async def _top(settings: Mapping[str, Value], interval: float) -> int:
    from graphile_worker.cli.live.loop import Top  # noqa: PLC0415
    from graphile_worker.cli.show_settings import masked  # noqa: PLC0415

    address = masked(settings["connection"].value or "the PG* variables").partition("?")[0]
    async with open_utils(settings) as utils:
        await utils.stats()  # report errors before top takes over the screen
        return await Top(utils, f"{settings['schema'].value} at {address}", interval).run()
