"""``graphile-worker list``: the jobs of a queue."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from graphile_worker.cli import logs
from graphile_worker.client import WorkerUtils
from graphile_worker.payload import encode_stored

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from graphile_worker.cli.settings import Value
    from graphile_worker.job import Job

_PAGE = 1000
_FIELDS = (
    "id", "task_identifier", "queue_name", "state", "payload", "priority", "run_at", "attempts",
    "max_attempts", "last_error", "key", "locked_by", "locked_at", "flags",
)  # fmt: skip


def print_jobs(settings: Mapping[str, Value], *, as_json: bool) -> None:
    """Print all of them, in the order of their ids."""
    logs.configure(settings["log_level"].value, settings["log_format"].value)
    asyncio.run(_print_jobs(settings, as_json=as_json))


async def _print_jobs(settings: Mapping[str, Value], *, as_json: bool) -> None:
    dsn, schema = settings["connection"].value, settings["schema"].value
    async with WorkerUtils(dsn, schema=schema) as utils:
        first = True
        async for job in _jobs(utils):
            if as_json:
                click.echo(("[" if first else ",\n ") + _as_json(job), nl=False)
            else:
                click.echo(_as_line(job))
            first = False
        if as_json:
            click.echo("[]" if first else "]")


async def _jobs(utils: WorkerUtils) -> AsyncIterator[Job]:
    after: int | None = None
    while page := await utils.list_jobs(limit=_PAGE, after=after):
        for job in page:
            yield job
        after = page[-1].id


def _as_json(job: Job) -> str:
    fields = {name: getattr(job, name) for name in _FIELDS}
    return encode_stored({**fields, "flags": sorted(job.flags)}).decode()


def _as_line(job: Job) -> str:
    queue = f" in {job.queue_name}" if job.queue_name else ""
    worker = f", locked by {job.locked_by}" if job.locked_by else ""
    error = f": {job.last_error.splitlines()[0]}" if job.last_error else ""
    run_at = job.run_at.isoformat(sep=" ", timespec="seconds")
    tries = f"{job.attempts}/{job.max_attempts}"
    return f"{job.id:>8}  {job.state:<9}  {run_at}  {tries:>6}  {job.task_identifier}{queue}{worker}{error}"
