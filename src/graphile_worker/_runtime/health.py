"""How a worker is, and telling those who ask over HTTP."""

from __future__ import annotations

import asyncio
import errno
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from graphile_worker.errors import ConfigurationError
from graphile_worker.liveness import Health, parse_address

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from graphile_worker._db.connect import Pool
    from graphile_worker._runtime.flags import ForbiddenFlags
    from graphile_worker._runtime.notifier import Notifier
    from graphile_worker._runtime.service import Service
    from graphile_worker._runtime.sidecar import Sidecar
    from graphile_worker._runtime.vitals import Vitals
    from graphile_worker._runtime.worker import Worker
    from graphile_worker.events import WorkerPool
    from graphile_worker.logs import ScopedLogger

_PING = 1.0
_BLOCKED = 5.0
_HOPELESS = 60.0
_UNANSWERED = 10.0
_FAILING = 60.0
"""After so many seconds a service that fails is shown."""
_MOST_HEADERS = 16_384
_REQUEST_TIMEOUT = 5.0
_MOST_CONNECTIONS = 64
"""How many may be open at once. Another one takes the place of the oldest that has not asked yet."""
_BACKLOG = 32
_COMPLAINT_INTERVAL = 60.0
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class HealthCheck:
    """Reads from all parts. With an address it answers on the sidecar, also while a task blocks the loop.

    Args:
        services: What runs beside the jobs.
        revive: Called now and then on the worker's event loop, to start again what has ended.
    """

    def __init__(
        self,
        *,
        pool: WorkerPool,
        worker: Worker,
        notifier: Notifier,
        vitals: Vitals,
        flags: ForbiddenFlags,
        connections: Pool,
        services: Sequence[Service],
        revive: Callable[[], None],
        sidecar: Sidecar,
        address: str | int | None,
        logger: ScopedLogger,
    ) -> None:
        self._pool = pool
        self._worker = worker
        self._notifier = notifier
        self._vitals = vitals
        self._flags = flags
        self._connections = connections
        self._services = services
        self._revive = revive
        self._sidecar = sidecar
        self._address = None if address is None else parse_address(address)
        self._logger = logger
        self._loop = asyncio.get_running_loop()
        self._turned: float | None = None
        """When the event loop was last seen to turn, while somebody watches that."""
        self._serving: list[Future[None]] = []
        self._server: asyncio.Server | None = None
        self._clients: dict[asyncio.StreamWriter, None] = {}
        self._complained: float | None = None
        self.phase = "starting"

    async def start(self) -> None:
        """Answer from now on, if there is an address."""
        self._serving.append(self._sidecar.submit(self._watch_loop()))
        if self._address is None:
            return
        host, port = self._address
        try:
            await self._sidecar.run(self._listen(host, port))
        except OSError as error:
            raise ConfigurationError(
                f"health is {host or ''}:{port}, where this process cannot listen: {error.strerror or error}."
            ) from None

    async def stop(self) -> None:
        """Answer no more."""
        for serving in self._serving:
            serving.cancel()
        if self._server is not None:
            await self._sidecar.run(self._close())

    def read(self) -> Health:
        """How the worker is now. Called from any thread."""
        now = self._vitals.clock()
        blocked = 0.0 if self._turned is None else now - self._turned
        state, reason = self._state(now, blocked)
        congestion = self._connections.congestion
        failing = self._failing()
        if state == "ready":
            reasons = [str(congestion)] if congestion is not None else []
            reasons += [f"{name}: {why}" for name, why in failing.items()]
            reasons += filter(None, [self._worker.refused])
            reason = " ".join(reasons) or None
        confirmed, answered = self._vitals.confirmed, self._worker.answered
        return Health(
            state=state,
            live=state != "stopped" and blocked < _HOPELESS and not self._worker.abandoned.too_many,
            ready=state == "ready",
            reason=reason,
            worker_id=self._pool.id,
            running=len(self._worker.running),
            abandoned=self._worker.abandoned.total,
            concurrency=self._pool.concurrency,
            last_exchange=None if answered is None else round(now - answered, 3),
            last_heartbeat=None if confirmed is None else round(now - confirmed, 3),
            listening=self._notifier.listens,
            connection_wait=None if congestion is None else round(congestion.seconds, 3),
            failing=failing,
        )

    def _failing(self) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for service in self._services:
            failing = service.failing
            if self.phase == "running" and service.has_ended:
                found[service.name] = "It has ended."
            elif failing is not None and (seconds := monotonic() - failing.since) >= _FAILING:
                found[service.name] = f"It has failed for {seconds:.0f} s: {failing.why}"
        return found

    def _state(self, now: float, blocked: float) -> tuple[str, str | None]:  # noqa: PLR0911 - one a state
        asking = self._worker.asking
        if self.phase != "running":
            return self.phase, None
        if self._vitals.dead or not self._vitals.may_work():
            return "fenced", "No heartbeat is recorded, so jobs were given up before others take them."
        if not self._worker.reachable:
            return "unreachable", f"The database cannot be used: {self._worker.outage}."
        if asking is not None and now - asking > _UNANSWERED:
            return "unreachable", f"The database has not answered for {now - asking:.0f} s."
        if blocked > _BLOCKED:
            return "blocked", f"A task has blocked the event loop for {blocked:.0f} s."
        if self._worker.abandoned.too_many:
            return "exhausted", self._worker.abandoned.reason
        if self._worker.too_many_refused:
            return "refused", self._worker.refused
        if self._flags.error is not None:
            return "unsure", f"forbidden_flags failed: {self._flags.error!r}."
        if ended := [service.name for service in self._services if service.has_ended]:
            return "incomplete", f"Services that have ended: {', '.join(ended)}."
        return "ready", None

    async def _watch_loop(self) -> None:
        """On the sidecar: see whether the worker's event loop turns."""
        self._turned = self._vitals.clock()
        while True:
            with suppress(RuntimeError):  # it was closed
                self._loop.call_soon_threadsafe(self._turn)
            await asyncio.sleep(_PING)

    def _turn(self) -> None:
        self._turned = self._vitals.clock()
        if self.phase == "running":
            self._revive()

    async def _listen(self, host: str | None, port: int) -> None:
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        self._server = await asyncio.start_server(
            self._answer, host, port, limit=_MOST_HEADERS, backlog=_BACKLOG
        )

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Say once a minute that no connection can be accepted: asyncio says it a hundred times a second."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _EXHAUSTED and "socket" in context):
            loop.default_exception_handler(context)
            return
        now = monotonic()
        if self._complained is None or now - self._complained >= _COMPLAINT_INTERVAL:
            self._complained = now
            say = partial(self._logger.error, "The health port cannot accept connections: %s", error)
            with suppress(RuntimeError):  # the worker's loop was closed
                self._loop.call_soon_threadsafe(say)

    async def _close(self) -> None:
        assert self._server is not None  # noqa: S101 - for the type checker
        self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._clients) >= _MOST_CONNECTIONS:  # the oldest, because probes send their request at once
            oldest = next(iter(self._clients))
            del self._clients[oldest]
            oldest.transport.abort()
        self._clients[writer] = None
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(_REQUEST_TIMEOUT):
                    request = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._response(request))
                    await writer.drain()
        finally:
            self._clients.pop(writer, None)
            writer.close()

    def _response(self, request: bytes) -> bytes:
        method, _, rest = request.decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        health = self.read()
        answers = {"/": health.ready, "/live": health.live, "/ready": health.ready}
        if method not in {"GET", "HEAD"}:
            status, body = "405 Method Not Allowed", b"{}"
        elif path not in answers:
            status, body = "404 Not Found", msgspec.json.encode({"paths": list(answers)})
        else:
            status = "200 OK" if answers[path] else "503 Service Unavailable"
            body = msgspec.json.encode(health)
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + (b"" if method == "HEAD" else body)
