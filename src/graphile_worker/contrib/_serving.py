"""What a web server does with an app: open and close it, run a worker, and answer health checks."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from graphile_worker.errors import ConfigurationError, GraphileWorkerError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from graphile_worker.app import App
    from graphile_worker.runner import Runner

_DATABASE_TIMEOUT = 5.0
_NO_JOB = 0
"""The id of no job: ids begin with 1."""


@asynccontextmanager
async def serving(app: App, options: Mapping[str, Any], *, run_worker: bool) -> AsyncIterator[Runner | None]:
    """Open the app while a web server runs, and yield its worker if it has one.

    Args:
        app: The app.
        options: Options of the worker. Without a worker there is only `migrate`, with the same meaning.
        run_worker: Whether to run a worker.
    """
    if run_worker:
        async with app.running(**options) as runner:
            yield runner
        return
    async with app:
        if options.get("migrate", True):
            await app.migrate()
        yield None


def check_worker_options(options: Mapping[str, Any], *, run_worker: bool) -> None:
    """Raise an error if there are options for a worker that does not run."""
    unused = [] if run_worker else [name for name in options if name != "migrate"]
    if unused:
        raise ConfigurationError(
            f"{unused[0]}= is an option of a worker, and no worker runs in this server. Pass "
            "run_worker=True too, or leave it out."
        )


async def live(runner: Runner | None) -> tuple[int, bytes]:
    """Return the HTTP status and the JSON of a liveness check."""
    if runner is None:
        return 200, b'{"live":true}'
    health = runner.health()
    return 200 if health.live else 503, msgspec.json.encode(health)


async def ready(app: App, runner: Runner | None) -> tuple[int, bytes]:
    """Return the HTTP status and the JSON of a readiness check.

    Without a worker, the server is ready if it can read the queue.
    """
    if runner is not None:
        health = runner.health()
        return 200 if health.ready else 503, msgspec.json.encode(health)
    reason = None
    try:
        async with asyncio.timeout(_DATABASE_TIMEOUT):
            await app.utils.get_job(id=_NO_JOB)
    except GraphileWorkerError as error:
        reason = str(error)
    except TimeoutError:
        reason = f"The database has not answered for {_DATABASE_TIMEOUT:.0f} s."
    return 200 if reason is None else 503, msgspec.json.encode({"ready": reason is None, "reason": reason})
