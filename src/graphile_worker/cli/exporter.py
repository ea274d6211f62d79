"""``graphile-worker exporter``: metrics of the whole queue, for Prometheus."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from graphile_worker._base.http_server import HttpServer, Response
from graphile_worker._base.logs import library_logger as logger
from graphile_worker.cli.flags import open_utils, verb
from graphile_worker.cli.settings import duration
from graphile_worker.workers import parse_address

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphile_worker.cli.settings import Value

_DEFAULT_ADDRESS = 9187


@verb(
    "exporter",
    "exporter",
    "exporter --health :9187 --interval 30s",
    also=("health", "prepared_statements"),
)
@click.option(
    "--interval", metavar="TIME", default="15s", help="Time between two passes over the jobs [15s]."
)
def exporter(settings: Mapping[str, Value], *, interval: str) -> None:
    """Serve metrics of the whole queue for Prometheus.

    Serve /metrics, /live and /ready at the address of --health, by default 127.0.0.1:9187: the jobs by task
    and state, how long they wait, the workers, and the state of the jobs table. The jobs are counted in the
    background, so a scrape costs the database nothing. Run one exporter per queue.
    """
    try:
        pause = duration(interval)
    except ValueError as error:
        raise click.UsageError(f"Invalid value for '--interval': {interval!r} must be {error}.") from None
    address = settings["health"].value
    asyncio.run(_export(settings, _DEFAULT_ADDRESS if address is None else address, pause))


async def _export(settings: Mapping[str, Value], address: str | int, interval: float) -> None:
    from graphile_worker.telemetry.exporter import QueueExporter  # noqa: PLC0415

    async with open_utils(settings) as utils:
        queue = QueueExporter(utils, interval=interval)

        async def metrics() -> Response:
            content_type, body = queue.page()
            return Response(200, body, content_type)

        async def live() -> Response:
            return Response(200, b"{}")

        async def ready() -> Response:
            return Response(200 if queue.is_up else 503, b"{}")

        server = HttpServer(
            {"/": ready, "/live": live, "/ready": ready, "/metrics": metrics},
            lambda error: logger.error("The port cannot accept connections: %s", error),
        )
        await queue.refresh()
        host, port = parse_address(address)
        await server.listen((host, port))
        logger.info("Serving metrics at http://%s:%d/metrics", host or "0.0.0.0", port)  # noqa: S104 - shown
        try:
            await queue.run()
        finally:
            await server.close()
