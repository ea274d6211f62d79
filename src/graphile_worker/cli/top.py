"""``graphile-worker top``: watching a queue."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import click

from graphile_worker.cli.exits import end_by
from graphile_worker.cli.flags import queue_of, verb
from graphile_worker.cli.times import Period

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphile_worker.cli.settings import Value


@verb("top", "top", "top --interval 5s -c postgresql://me@db/mine")
@click.option(
    "--interval", type=Period(least=0.1), default="2s", show_default=True, help="How often to look, at most."
)
def top(settings: Mapping[str, Value], *, interval: float) -> None:
    """Watch a queue, live, on a terminal.

    Shows how many jobs wait, run and fail, and five tables: tasks and queues with the age of their oldest due
    job, running jobs, workers, and the last failures. Jobs can be looked at, retried and cancelled.

    \b
    Tab, 1 to 5   another table           ↑ ↓ j k   choose a row
    s, o          sort by what, and how   /, Esc    show only some rows, all
    Enter         look at a job           t, c      retry it, cancel it
    space         stand still, go on      q         quit

    It looks more rarely the longer looks take: about a fiftieth of one session's time, at most.
    """  # noqa: D301 - this one is for click
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("top needs a terminal. For a script there is: graphile-worker stats --json")
    number = asyncio.run(_top(settings, interval))
    if number:
        end_by(number)


async def _top(settings: Mapping[str, Value], interval: float) -> int:
    from graphile_worker.cli.live.loop import Top  # noqa: PLC0415
    from graphile_worker.cli.show_settings import masked  # noqa: PLC0415

    where = masked(settings["connection"].value or "the PG* variables").partition("?")[0]
    async with queue_of(settings) as utils:
        await utils.stats()  # what is wrong is better said before the screen is ours
        return await Top(utils, f"{settings['schema'].value} at {where}", interval).run()
