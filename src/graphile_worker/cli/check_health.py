"""``graphile-worker health``: whether workers can do their work."""

from __future__ import annotations

import asyncio
import http.client
import json
import platform
from typing import TYPE_CHECKING

import click

from graphile_worker.cli import logs
from graphile_worker.client import WorkerUtils
from graphile_worker.liveness import parse_address
from graphile_worker.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphile_worker.cli.settings import Value
    from graphile_worker.liveness import WorkerInfo

_PATIENCE = 5.0
_READY = 200


def check_health(settings: Mapping[str, Value], *, live: bool, any_host: bool, as_json: bool) -> bool:
    """Whether all is well; says what it found."""
    logs.configure(settings["log_level"].value, settings["log_format"].value)
    if settings["health"].value is not None:
        return _ask_worker(str(settings["health"].value), live=live, as_json=as_json)
    return asyncio.run(_ask_database(settings, live=live, any_host=any_host, as_json=as_json))


def _ask_worker(address: str, *, live: bool, as_json: bool) -> bool:
    host, port = parse_address(address)
    # Who listens everywhere listens here too.
    here = "127.0.0.1" if host in {None, "0.0.0.0", "::"} else host  # noqa: S104 - not to bind
    connection = http.client.HTTPConnection(here, port, timeout=_PATIENCE)
    try:
        connection.request("GET", "/live" if live else "/ready")
        answer = connection.getresponse()
        found = json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise click.ClickException(f"No worker answers at {here}:{port}: {error}") from None
    finally:
        connection.close()
    if as_json:
        click.echo(json.dumps(found))
    else:
        reason = f" {found['reason']}" if found.get("reason") else ""
        jobs = f"{found['running']} of {found['concurrency']} slots busy"
        click.echo(f"{found['worker_id']}: {found['state']}, {jobs}.{reason}")
    return answer.status == _READY


async def _ask_database(settings: Mapping[str, Value], *, live: bool, any_host: bool, as_json: bool) -> bool:
    dsn, schema = settings["connection"].value, settings["schema"].value
    async with WorkerUtils(dsn, schema=schema, max_pool_size=1) as utils:
        found = await utils.workers(and_locks=False)
    ours = [one for one in found if one.is_ours and (any_host or one.host == platform.node())]
    good = [
        one for one in ours if one.lives and (one.state == "ready" or (live and one.state != "exhausted"))
    ]
    if as_json:
        click.echo(json.dumps([_as_object(one) for one in ours]))
    else:
        _print(ours, where="any machine" if any_host else "this machine")
    return bool(good) and len(good) == len([one for one in ours if one.died_at is None])


def _print(workers: Sequence[WorkerInfo], *, where: str) -> None:
    if not workers:
        click.echo(f"No worker of {where} has a heartbeat in this schema.")
    for one in workers:
        slots = counted(one.concurrency or 0, "slot")
        reason = f". {one.reason}" if one.reason and one.lives else ""
        click.echo(f"{one.name}: {one.condition}, last heard {one.silence or 0.0:.1f} s ago, {slots}{reason}")


def _as_object(worker: WorkerInfo) -> dict[str, object]:
    return {
        "id": worker.id,
        "host": worker.host,
        "pid": worker.pid,
        "state": worker.state,
        "reason": worker.reason,
        "lives": worker.lives,
        "silence": worker.silence,
        "concurrency": worker.concurrency,
    }
