"""`HealthCheck`: the health of a worker, and the HTTP server for it."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from graphile_worker._base.durations import format_seconds
from graphile_worker._base.http_server import HttpServer, Response
from graphile_worker._base.tracebacks import format_stack
from graphile_worker.workers import Health, parse_address

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from graphile_worker._base.background_thread import BackgroundThread
    from graphile_worker._base.http_server import Page
    from graphile_worker._base.logs import ScopedLogger
    from graphile_worker._db.connection.connect import Pool
    from graphile_worker._worker.claiming.forbidden_flags import ForbiddenFlags
    from graphile_worker._worker.execution.claimed_jobs import ClaimedJobs
    from graphile_worker._worker.liveness.lease_state import LeaseState
    from graphile_worker._worker.loop import Worker
    from graphile_worker._worker.maintenance.notifier import Notifier
    from graphile_worker._worker.service import Service
    from graphile_worker.events import WorkerPool

_PING_INTERVAL = 1.0
_BLOCKED_AFTER = 5.0
"""Seconds for which the event loop is blocked until the worker is not ready."""
_CALLS_UNTIL_BLOCKED = round(_BLOCKED_AFTER / _PING_INTERVAL)
_NOT_LIVE_AFTER = 60.0
"""Seconds for which the event loop is blocked until the worker is not live."""
_UNANSWERED_AFTER = 10.0
"""Seconds that an exchange may take until the worker is not ready."""
_FAILING_AFTER = 60.0
"""Seconds after which a service that fails is reported."""


class HealthCheck:
    """The health of a worker, collected from its parts.

    With an address, it is served over HTTP from the background thread, even while a task blocks the event
    loop.

    Args:
        pool: The worker's identity.
        worker: The worker's loop.
        claimed_jobs: The jobs that the worker has claimed.
        notifier: Listens for notifications.
        lease_state: The state of the worker's lease.
        flags: The option ``forbidden_flags``.
        connections: The worker's connections.
        services: The worker's loop and the services next to it.
        restart_services: Called every second on the worker's event loop, to restart services that have ended.
        background_thread: The thread that serves requests.
        address: The port, or ``host:port``, or the listening socket; None for no server.
        logs_blocked_loop: Whether to log when the event loop is blocked, and when it runs again.
        logger: The worker's logger.
    """

    def __init__(
        self,
        *,
        pool: WorkerPool,
        worker: Worker,
        claimed_jobs: ClaimedJobs,
        notifier: Notifier,
        lease_state: LeaseState,
        flags: ForbiddenFlags,
        connections: Pool,
        services: Sequence[Service],
        restart_services: Callable[[], None],
        background_thread: BackgroundThread,
        address: str | int | socket.socket | None,
        logger: ScopedLogger,
        logs_blocked_loop: bool = True,
    ) -> None:
        self._pool = pool
        self._logs_blocked_loop = logs_blocked_loop
        self._worker = worker
        self._claimed_jobs = claimed_jobs
        self._notifier = notifier
        self._lease_state = lease_state
        self._flags = flags
        self._connections = connections
        self._services = services
        self._restart_services = restart_services
        self._background_thread = background_thread
        self._address: tuple[str | None, int] | socket.socket | None = (
            address if address is None or isinstance(address, socket.socket) else parse_address(address)
        )
        self._logger = logger
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._loop_lag = 0.0
        self._unanswered = 0
        """How often in a row the event loop was called and did not answer."""
        self._last_turn: float | None = None
        """When the event loop last ran a callback; None until it is watched."""
        self._watches: list[Future[None]] = []
        self._is_serving = False
        self._pages: dict[str, Page] = {
            "/": self._ready_page,
            "/live": self._live_page,
            "/ready": self._ready_page,
        }
        self._server = HttpServer(self._pages, self._log_server_error)
        self.phase = "starting"

    def serve(self, path: str, page: Callable[[], tuple[str, bytes]]) -> None:
        """Serve one more page. It is called on a thread, because it may be the user's code."""

        async def answer() -> Response:
            content_type, body = await asyncio.to_thread(page)
            return Response(200, body, content_type)

        self._pages[path] = answer

    async def start(self) -> None:
        """Watch the event loop and, if there is an address, serve requests."""
        self._watches.append(self._background_thread.submit(self._watch_loop()))
        if self._address is not None:
            await self._background_thread.run(self._server.listen(self._address))
            self._is_serving = True

    async def stop(self) -> None:
        """Stop watching and serving."""
        for watch in self._watches:
            watch.cancel()
        if self._is_serving:
            await self._background_thread.run(self._server.close())

    def read(self) -> Health:
        """Return the worker's current health. May be called from any thread."""
        now = self._lease_state.clock()
        blocked = 0.0 if self._last_turn is None else now - self._last_turn
        state, reason = self._state(now, blocked)
        congestion = self._connections.congestion
        failing = self._failing()
        if state == "ready":
            reasons = [str(congestion)] if congestion is not None else []
            reasons += [f"{name}: {why}" for name, why in failing.items()]
            reasons += filter(None, [self._worker.refusal_message])
            reason = " ".join(reasons) or None
        confirmed, answered = self._lease_state.confirmed, self._worker.last_exchange_sent_at
        return Health(
            state=state,
            live=state != "stopped" and blocked < _NOT_LIVE_AFTER and not self._worker.abandoned.too_many,
            ready=state == "ready",
            reason=reason,
            worker_id=self._pool.id,
            running=len(self._worker.running),
            prefetched=len(self._claimed_jobs.local_queue),
            abandoned=self._worker.abandoned.total,
            concurrency=self._pool.concurrency,
            last_exchange=None if answered is None else round(now - answered, 3),
            last_heartbeat=None if confirmed is None else round(now - confirmed, 3),
            listening=self._notifier.is_listening,
            loop_lag=round(max(self._loop_lag, blocked - _PING_INTERVAL, 0.0), 6),
            connection_wait=None if congestion is None else round(congestion.seconds, 3),
            failing=failing,
        )

    def _failing(self) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for service in self._services:
            failing = service.failing
            if self.phase == "running" and service.has_ended:
                found[service.name] = "It has ended."
            elif failing is not None and (seconds := monotonic() - failing.since) >= _FAILING_AFTER:
                found[service.name] = f"It has failed for {seconds:.0f} s: {failing.reason}"
        return found

    def _state(self, now: float, blocked: float) -> tuple[str, str | None]:  # noqa: PLR0911 - one per state
        sent_at = self._worker.exchange_sent_at
        if self.phase != "running":
            return self.phase, None
        if self._lease_state.dead or not self._lease_state.may_work():
            return (
                "fenced",
                "No heartbeat is recorded, so the worker gave up its jobs before other workers claim them.",
            )
        if not self._worker.reachable:
            return "unreachable", f"The database is unavailable: {self._worker.outage_reason}."
        if sent_at is not None and now - sent_at > _UNANSWERED_AFTER:
            return "unreachable", f"The database has not answered for {now - sent_at:.0f} s."
        if blocked > _BLOCKED_AFTER:
            return "blocked", f"A task has blocked the event loop for {blocked:.0f} s."
        if self._worker.abandoned.too_many:
            return "exhausted", self._worker.abandoned.reason
        if self._worker.too_many_refused:
            return "refused", self._worker.refusal_message
        if self._flags.error is not None:
            return "flags_unavailable", f"forbidden_flags failed: {self._flags.error!r}."
        if ended := [service.name for service in self._services if service.has_ended]:
            return "incomplete", f"Services that have ended: {', '.join(ended)}."
        return "ready", None

    async def _watch_loop(self) -> None:
        """Check, on the background thread, whether the worker's event loop runs callbacks."""
        self._last_turn = self._lease_state.clock()
        while True:
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._on_turn, self._lease_state.clock())
            await asyncio.sleep(_PING_INTERVAL)
            self._warn_if_blocked()

    def _warn_if_blocked(self) -> None:
        """Warn once while the event loop is blocked, with the place in the code.

        Calls are counted, and not seconds: a paused process makes none.
        """
        self._unanswered += 1
        if self._unanswered == _CALLS_UNTIL_BLOCKED and self.phase == "running" and self._logs_blocked_loop:
            frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001
            self._logger.warning(
                "The event loop has been blocked for %s, and all jobs on it wait. It is at:\n%s",
                format_seconds(_BLOCKED_AFTER),
                format_stack(frame),
            )

    def _on_turn(self, called_at: float) -> None:
        before, self._last_turn = self._last_turn, self._lease_state.clock()
        self._loop_lag = self._last_turn - called_at
        unanswered, self._unanswered = self._unanswered, 0
        if unanswered >= _CALLS_UNTIL_BLOCKED and before is not None and self._logs_blocked_loop:
            self._logger.info("The event loop runs again, after %s", format_seconds(self._last_turn - before))
        if self.phase == "running":
            self._restart_services()

    def _log_server_error(self, error: BaseException) -> None:
        log = partial(self._logger.error, "The health port cannot accept connections: %s", error)
        with suppress(RuntimeError):  # the worker's event loop is closed
            self._loop.call_soon_threadsafe(log)

    async def _live_page(self) -> Response:
        health = self.read()
        return Response(200 if health.live else 503, msgspec.json.encode(health))

    async def _ready_page(self) -> Response:
        health = self.read()
        return Response(200 if health.ready else 503, msgspec.json.encode(health))
