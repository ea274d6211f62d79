"""``graphile-worker health``: checking whether workers are healthy."""

from __future__ import annotations

import asyncio
import http.client
import json
import platform
from typing import TYPE_CHECKING

import click

from graphile_worker._base.text import pluralize
from graphile_worker.cli import logs
from graphile_worker.client import WorkerUtils
from graphile_worker.workers import parse_address

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphile_worker.cli.settings import Value
    from graphile_worker.workers import WorkerInfo

_TIMEOUT = 5.0
_READY = 200


def check_health(settings: Mapping[str, Value], *, live: bool, any_host: bool, as_json: bool) -> bool:
    """Print the health of workers, and return whether all are healthy."""
    logs.configure(settings["log_level"].value, settings["log_format"].value)
    if settings["health"].value is not None:
        return _check_worker(str(settings["health"].value), live=live, as_json=as_json)
    return asyncio.run(_check_heartbeats(settings, live=live, any_host=any_host, as_json=as_json))


def _check_worker(address: str, *, live: bool, as_json: bool) -> bool:
    host, port = parse_address(address)
    # A worker that listens on all addresses also listens on the local one.
    host = "127.0.0.1" if host in {None, "0.0.0.0", "::"} else host  # noqa: S104 - not for binding
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT)
    try:
        connection.request("GET", "/live" if live else "/ready")
        response = connection.getresponse()
        found = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise click.ClickException(f"No worker answers at {host}:{port}: {error}") from None
    finally:
        connection.close()
    if as_json:
        click.echo(json.dumps(found))
    else:
        for worker in found.get("workers", [found]):  # several if it is a supervisor
            reason = f" {worker['reason']}" if worker.get("reason") else ""
            jobs = f"{worker.get('running', 0)} of {worker.get('concurrency', 0)} slots busy"
            name = worker.get("worker_id") or f"process {worker['pid']}"
            click.echo(f"{name}: {worker['state']}, {jobs}.{reason}")
    return response.status == _READY


async def _check_heartbeats(
    settings: Mapping[str, Value], *, live: bool, any_host: bool, as_json: bool
) -> bool:
    dsn, schema = settings["connection"].value, settings["schema"].value
    async with WorkerUtils(dsn, schema=schema, max_pool_size=1) as utils:
        found = await utils.workers(include_locks=False)
    workers = [worker for worker in found if worker.is_ours and (any_host or worker.host == platform.node())]
    healthy = [
        worker
        for worker in workers
        if worker.is_alive and (worker.state == "ready" or (live and worker.state != "exhausted"))
    ]
    if as_json:
        click.echo(json.dumps([_as_object(worker) for worker in workers]))
    else:
        _print(workers, where="any machine" if any_host else "this machine")
    return bool(healthy) and len(healthy) == len([worker for worker in workers if worker.died_at is None])


def _print(workers: Sequence[WorkerInfo], *, where: str) -> None:
    if not workers:
        click.echo(f"No worker on {where} has a heartbeat in this schema.")
    for worker in workers:
        slots = pluralize(worker.concurrency or 0, "slot")
        reason = f". {worker.reason}" if worker.reason and worker.is_alive else ""
        click.echo(
            f"{worker.name}: {worker.status}, last heartbeat "
            f"{worker.seconds_since_heartbeat or 0.0:.1f} s ago, {slots}{reason}"
        )


def _as_object(worker: WorkerInfo) -> dict[str, object]:
    return {
        "id": worker.id,
        "host": worker.host,
        "pid": worker.pid,
        "state": worker.state,
        "reason": worker.reason,
        "is_alive": worker.is_alive,
        "seconds_since_heartbeat": worker.seconds_since_heartbeat,
        "concurrency": worker.concurrency,
    }
