"""`FleetHealth`: the health and the metrics of all worker processes of a supervisor, on one port.

Each process serves its own health on a Unix socket, in a private folder of the supervisor. The supervisor
asks all of them for each request.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from graphile_worker._base.http_server import HttpServer, Response, fetch
from graphile_worker._base.logs import library_logger as logger
from graphile_worker.errors import ConfigurationError
from graphile_worker.workers import parse_address

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphile_worker._base.http_server import Page
    from graphile_worker.telemetry.prometheus_merge import MergedMetrics

_ANSWER_TIMEOUT = 2.0
_BACKLOG = 8
_OK = 200


class WorkerProcess(Protocol):
    """A process of the supervisor, as far as its health is concerned."""

    pid: int
    ready: asyncio.Event
    health_path: Path | None


class FleetHealth:
    """Serves ``/live``, ``/ready`` and ``/metrics`` for all worker processes.

    Args:
        address: The port, or ``host:port``, to listen on; None to serve nothing.
        processes: The number of processes that should be ready.
        running: Returns the processes that run.
    """

    def __init__(
        self, address: str | int | None, processes: int, running: Callable[[], Sequence[WorkerProcess]]
    ) -> None:
        self._address = None if address is None else parse_address(address)
        self._processes = processes
        self._running = running
        self._folder = Path(tempfile.mkdtemp(prefix="graphile-worker-"))
        self._numbers = count(1)
        self._metrics: MergedMetrics | None = None
        pages: dict[str, Page] = {
            "/": self._ready_page,
            "/live": self._live_page,
            "/ready": self._ready_page,
            "/metrics": self._metrics_page,
        }
        self._server = HttpServer(
            pages, lambda error: logger.error("The health port cannot accept connections: %s", error)
        )

    async def start(self) -> None:
        """Listen on the address, if there is one.

        Raises:
            ConfigurationError: The address cannot be used.
        """
        if self._address is not None:
            await self._server.listen(self._address)

    async def close(self) -> None:
        """Stop listening, and remove the folder of the sockets."""
        await self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def open_socket(self) -> tuple[Path, socket.socket]:
        """Return a listening socket for a new process, and its path."""
        path = self._folder / f"{next(self._numbers)}.sock"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(str(path))
            listening.listen(_BACKLOG)
        except OSError as error:
            listening.close()
            raise ConfigurationError(
                f"Cannot create a socket in {self._folder}: {error}. Set TMPDIR to another folder."
            ) from None
        return path, listening

    async def read(self) -> dict[str, Any]:
        """Return the health of all processes together, and of each."""
        workers = await asyncio.gather(*(_health_of(process) for process in self._running()))
        ready = sum(worker["ready"] for worker in workers)
        others = [worker for worker in workers if not worker["ready"]]
        is_ready = ready >= self._processes
        reasons = [
            f"{worker['pid']}: {worker.get('reason') or worker['state']}"
            for worker in workers
            if worker.get("reason") or not worker["ready"]
        ]
        states = [worker["state"] for worker in others if worker["state"] != "stopping"]
        summary = f"{ready} of {self._processes} processes are ready."
        return {
            "state": "ready" if is_ready else next(iter(states), "starting"),
            "live": all(worker["live"] for worker in workers),
            "ready": is_ready,
            "reason": " ".join([*([] if is_ready else [summary]), *reasons]) or None,
            "processes": self._processes,
            "running": sum(worker.get("running", 0) for worker in workers),
            "concurrency": sum(worker.get("concurrency", 0) for worker in workers),
            "workers": workers,
        }

    async def _live_page(self) -> Response:
        health = await self.read()
        return Response(200 if health["live"] else 503, msgspec.json.encode(health))

    async def _ready_page(self) -> Response:
        health = await self.read()
        return Response(200 if health["ready"] else 503, msgspec.json.encode(health))

    async def _metrics_page(self) -> Response:
        processes = self._running()
        pages = await asyncio.gather(*(_metrics_of(process) for process in processes))
        found = {
            process.pid: page for process, page in zip(processes, pages, strict=True) if page is not None
        }
        if self._metrics is None and not found:
            advice = b"No process serves metrics. Pass --metrics prometheus.\n"
            return Response(404, advice, "text/plain; charset=utf-8")
        if self._metrics is None:
            from graphile_worker.telemetry.prometheus_merge import MergedMetrics  # noqa: PLC0415

            self._metrics = MergedMetrics()
        content_type, body = self._metrics.page(found, {process.pid for process in processes})
        return Response(200, body, content_type)


async def _metrics_of(process: WorkerProcess) -> bytes | None:
    """Return the metrics of a process; None if it has none or does not answer."""
    if process.health_path is None or not process.ready.is_set():
        return None
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT):
            answer = await fetch(process.health_path, "/metrics")
    except OSError:  # TimeoutError is one
        return None
    return answer.body if answer.status == _OK else None


async def _health_of(process: WorkerProcess) -> dict[str, Any]:
    if process.health_path is None or not process.ready.is_set():
        return {"pid": process.pid, "state": "starting", "live": True, "ready": False}
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT):
            answer = await fetch(process.health_path, "/ready")
        found = {"pid": process.pid, **msgspec.json.decode(answer.body)}
    except TimeoutError:
        reason = f"The process has not answered for {_ANSWER_TIMEOUT:g} s."
        return {"pid": process.pid, "state": "silent", "live": False, "ready": False, "reason": reason}
    except (OSError, msgspec.DecodeError):
        found = {"pid": process.pid, "state": "stopped", "ready": False}
    if found["state"] == "stopped":
        found["live"] = True  # the supervisor starts another process, or ends too
    return found
