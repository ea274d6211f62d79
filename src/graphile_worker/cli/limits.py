"""``graphile-worker limits``: named limits, and how much of them is used."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click
import msgspec

from graphile_worker.cli.flags import CONTEXT, Integer, json_flag, make_epilog, open_utils, verb
from graphile_worker.cli.printing import Column, print_note, row_printer, to_json
from graphile_worker.limits import MAX_CONCURRENCY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphile_worker.cli.settings import Value
    from graphile_worker.limits import LimitState

_LIMITS: list[Column[LimitState]] = [
    Column(title="LIMIT", value=lambda limit: limit.name, min_width=16),
    Column(title="CONCURRENCY", value=lambda limit: limit.concurrency, align_right=True),
    Column(title="DECLARED", value=lambda limit: limit.declared, align_right=True),
    Column(
        title="USED",
        value=lambda limit: limit.held,
        align_right=True,
        style=lambda limit: "yellow" if limit.is_full else "",
    ),
    Column(title="WAITING", value=lambda limit: limit.waiting, align_right=True),
    Column(
        title="WORKERS",
        value=lambda limit: to_json(limit.workers),
        terminal_value=lambda limit: ", ".join(f"{name} {held}" for name, held in limit.workers.items()),
        min_width=12,
        wraps=True,
    ),
    Column(title="TASKS", value=lambda limit: ", ".join(limit.tasks), min_width=12, wraps=True),
]


@click.group(
    "limits",
    context_settings=CONTEXT,
    epilog=make_epilog("graphile-worker limits list", "graphile-worker limits set stripe --concurrency 5"),
)
def limits() -> None:
    """Show and change how many jobs run at once.

    Tasks declare named limits with limit=Limit("stripe", concurrency=10). They hold across all Python
    workers, and can be changed while these run. Node and Rust workers do not know them.
    """


@verb("list", "limits list", "limits list --json")
@json_flag
def list_limits(settings: Mapping[str, Value], *, as_json: bool) -> None:
    """List limits, what uses them, and what waits.

    USED counts the jobs that workers may run at the moment. WAITING counts the due jobs of the limit's tasks.
    """
    asyncio.run(_list(settings, as_json=as_json))


async def _list(settings: Mapping[str, Value], *, as_json: bool) -> None:
    async with open_utils(settings) as utils:
        found = await utils.limits()
    with row_printer(_LIMITS, msgspec.structs.asdict, as_json=as_json) as rows:
        rows.add(found)


@verb("set", "limits set stripe --concurrency 5", "limits set stripe --concurrency 0")
@click.argument("name")
@click.option(
    "--concurrency",
    type=Integer(0, MAX_CONCURRENCY),
    metavar="N",
    required=True,
    help="Maximum number of jobs that run at once; 0 stops them all.",
)
def set_limit(settings: Mapping[str, Value], *, name: str, concurrency: int) -> None:
    """Change a limit while workers run.

    The value holds until it is changed again, also for workers that start later. Running jobs are not
    stopped: if more run than the new limit allows, no job starts until enough have ended.
    """
    asyncio.run(_set(settings, name, concurrency))


@verb("reset", "limits reset stripe")
@click.argument("name")
def reset_limit(settings: Mapping[str, Value], *, name: str) -> None:
    """Return to the value that the code declares."""
    asyncio.run(_set(settings, name, None))


async def _set(settings: Mapping[str, Value], name: str, concurrency: int | None) -> None:
    async with open_utils(settings, reads_jobs=False) as utils:
        await utils.set_limit(name, concurrency)
        [limit] = [limit for limit in await utils.limits() if limit.name == name]
    print_note(f"The limit {name!r} is {limit.concurrency} now; the code declares {limit.declared}.")


for _verb in (list_limits, set_limit, reset_limit):
    limits.add_command(_verb)
