"""The health of a worker, in Python and over HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import asyncpg
import psutil
import pytest

from graphile_worker import ConfigurationError, run
from graphile_worker._base import http_server
from graphile_worker._worker.liveness import health_server as health_module
from graphile_worker.testing import Databases
from support.jobs import add
from support.proxy import proxied
from support.waiting import until
from support.workers import EventRecorder, Gate, nothing, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture
def port() -> Iterator[int]:
    """A free port. It stays bound, so other programs do not get it, but a server may reuse the address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]


def request_health(port: int, path: str, method: str = "GET") -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text else {}
    finally:
        connection.close()


async def until_true(condition: Callable[[], bool]) -> None:
    async def found() -> bool:
        return condition()

    await until(found, "the worker has the expected health")


async def test_idle_and_busy_workers_are_ready(db: asyncpg.Connection, database: str) -> None:
    gate = Gate()
    async with running({"task": gate}, database) as runner:
        idle = runner.health()
        assert (idle.state, idle.live, idle.ready, idle.running) == ("ready", True, True, 0)
        await add(db)
        await gate.until_started()
        busy = runner.health()
        assert (busy.state, busy.ready, busy.running, busy.concurrency) == ("ready", True, 1, 1)
        assert busy.worker_id == runner.id
        assert busy.listening
        assert busy.last_exchange is not None
        assert busy.last_heartbeat is not None
        stop_requested = asyncio.create_task(runner.stop())
        await until_true(lambda: runner.health().state == "stopping")
        assert runner.health().live
        assert not runner.health().ready
        gate.open()
        await stop_requested
    assert (runner.health().state, runner.health().live) == ("stopped", False)


async def test_worker_that_cannot_claim_is_not_ready(database: str) -> None:
    recorder = EventRecorder()
    long_leases: dict[str, Any] = {"heartbeat_interval": 1.0, "fast_lease": 8.0, "lease": 32.0}
    async with (
        proxied(database) as (proxy, through),
        running({"task": nothing}, through, recorder=recorder, poll_interval=0.1, **long_leases) as runner,
    ):
        proxy.refusing = True
        proxy.cut_all()
        await until_true(lambda: runner.health().state == "unreachable")
        assert runner.health().live
        await recorder.until("pool:fenced")
        await until_true(lambda: runner.health().state == "fenced")
        proxy.refusing = False
        await until_true(lambda: runner.health().ready)


async def test_unreachable_database_is_reported_once_with_the_reason(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    recorder = EventRecorder()
    async with (
        proxied(database) as (proxy, through),
        running({"task": nothing}, through, recorder=recorder, poll_interval=0.1, recovery=False) as runner,
    ):
        await until_true(lambda: runner.health().listening)
        proxy.refusing = True
        proxy.cut_all()
        await until_true(lambda: runner.health().state == "unreachable")
        assert "The database is unavailable: " in (runner.health().reason or "")
        assert runner.health().reason != "The database is unavailable: ."
        await recorder.until("pool:listen:error", 5)
        proxy.refusing = False
        await until_true(lambda: runner.health().ready and runner.health().listening)
        await until_true(lambda: any("is back after" in message for message in caplog.messages))
    assert sum("The database is unavailable" in message for message in caplog.messages) == 1
    assert sum("is back after" in message for message in caplog.messages) == 1


async def test_silent_connections_do_not_exhaust_files_or_block_probes(database: str, port: int) -> None:
    async with running({"task": nothing}, database, health=port, recovery=False) as runner:
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
        try:
            health = runner._parts.health
            # The server accepts this connection after the silent ones.
            status, _ = await asyncio.to_thread(request_health, port, "/ready")
            assert status == 200
            assert len(health._server._clients) <= 64
        finally:
            for one in silent:
                one.close()


async def test_worker_without_a_reply_from_the_database_is_not_ready(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_module, "_UNANSWERED_AFTER", 0.2)
    async with (
        proxied(database) as (proxy, through),
        running({"task": nothing}, through, poll_interval=0.1, recovery=False) as runner,
    ):
        proxy.frozen = True
        await until_true(lambda: "has not answered" in (runner.health().reason or ""))
        assert runner.health().last_heartbeat is None
        proxy.frozen = False
        await until_true(lambda: runner.health().ready)


async def test_worker_without_its_forbidden_flags_is_not_ready(database: str) -> None:
    def flags() -> list[str]:
        raise ValueError("oops")

    async with running({"task": nothing}, database, forbidden_flags=flags, poll_interval=0.1) as runner:
        await until_true(lambda: runner.health().state == "flags_unavailable")
        assert "oops" in (runner.health().reason or "")


async def read_until(stream: asyncio.StreamReader, text: str, lines: list[str] | None = None) -> list[str]:
    """Return the lines that a program prints, up to the first that contains the text."""
    lines = [] if lines is None else lines
    while not any(text in line for line in lines):
        line = await stream.readline()
        assert line, f"ended before {text!r}: {lines}"
        lines.append(line.decode().strip())
    return lines


WITHOUT_FILE_DESCRIPTORS = """
import asyncio, logging, os, resource, sys
from graphile_worker import run

async def task(payload): pass

async def main():
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s", stream=sys.stdout)
    runner = await run({"task": task}, sys.argv[1], health=int(sys.argv[2]), handle_signals=False)
    stdin_line = asyncio.ensure_future(asyncio.to_thread(sys.stdin.readline))
    await asyncio.sleep(0)  # lets the thread start: that needs file descriptors
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    opened = []
    try:
        while True:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        print("full", flush=True)
    await stdin_line
    for number in opened:
        os.close(number)
    print("free", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await runner.stop()

asyncio.run(main())
"""


class TestOverHttp:
    async def test_300_idle_connections_do_not_block_other_requests(self, database: str, port: int) -> None:
        async with running({"task": nothing}, database, health=port):
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(300)]
            try:
                assert (await asyncio.to_thread(request_health, port, "/live"))[0] == 200
                open_ones = [fd for fd in psutil.Process().net_connections() if fd.laddr[1:] == (port,)]
                accepted = [one for one in open_ones if one.status == psutil.CONN_ESTABLISHED]
                assert len(accepted) <= http_server._MAX_CONNECTIONS + 1
            finally:
                for _, writer in idle:
                    writer.transport.abort()

    async def test_connection_with_a_slow_request_is_closed(
        self, database: str, port: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http_server, "_REQUEST_TIMEOUT", 0.1)
        async with running({"task": nothing}, database, health=port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /live")
            async with asyncio.timeout(20):
                assert await reader.read() == b""
            writer.close()

    async def test_missing_file_descriptors_are_logged_once(self, database: str, port: int) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", WITHOUT_FILE_DESCRIPTORS, database, str(port)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(60):
                lines = await read_until(process.stdout, "full")
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                lines += await read_until(process.stdout, "cannot accept connections")
                with suppress(TimeoutError):
                    async with asyncio.timeout(1.5):  # asyncio tries to accept again after a second
                        await read_until(process.stdout, "nothing", lines)
                reported = [line for line in lines if "accept" in line]
                assert len(reported) == 1, reported
                process.stdin.write(b"\n")
                await read_until(process.stdout, "free")
                writer.close()
                assert (await asyncio.to_thread(request_health, port, "/live"))[0] == 200
                process.stdin.write(b"\n")
                assert await process.wait() == 0
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def test_live_and_ready_endpoints_answer(self, database: str, port: int) -> None:
        async with running({"task": nothing}, database, health=port):
            for path in ("/", "/live", "/ready", "/ready?verbose"):
                status, found = await asyncio.to_thread(request_health, port, path)
                assert (status, found["state"]) == (200, "ready")
            assert (await asyncio.to_thread(request_health, port, "/live", "HEAD"))[0] == 200
            assert (await asyncio.to_thread(request_health, port, "/nowhere"))[0] == 404
            assert (await asyncio.to_thread(request_health, port, "/live", "POST"))[0] == 405

    async def test_malformed_requests_do_not_stop_the_server(self, database: str, port: int) -> None:
        async with running({"task": nothing}, database, health=f"127.0.0.1:{port}"):
            for nonsense in (b"\r\n\r\n", b"\xff\xfe\r\n\r\n", b"x" * 100_000, b""):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(nonsense)
                writer.close()
            assert (await asyncio.to_thread(request_health, port, "/live"))[0] == 200

    async def test_health_endpoint_answers_while_a_task_blocks_the_event_loop(
        self, db: asyncpg.Connection, database: str, port: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(health_module, "_PING_INTERVAL", 0.05)
        seen: list[tuple[int, str]] = []

        def wait_for_answer(status: int, state: str) -> None:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline and (status, state) not in seen:
                answered, found = request_health(port, "/live")
                seen.append((answered, found["state"]))

        def watch() -> None:
            # The limits are set one after the other, so no state can end before it is requested.
            wait_for_answer(200, "ready")
            monkeypatch.setattr(health_module, "_BLOCKED_AFTER", 0.3)
            wait_for_answer(200, "blocked")
            monkeypatch.setattr(health_module, "_NOT_LIVE_AFTER", 1.0)
            wait_for_answer(503, "blocked")

        async def block(_payload: object) -> None:
            watcher = threading.Thread(target=watch)
            watcher.start()
            watcher.join()

        recorder = EventRecorder()
        async with running({"task": block}, database, recorder=recorder, health=port):
            await add(db)
            await recorder.until("job:complete")
        assert list(dict.fromkeys(seen)) == [(200, "ready"), (200, "blocked"), (503, "blocked")]

    @pytest.mark.parametrize("address", ["nowhere", "1:2:3", 70000, True, -1])
    async def test_invalid_health_address_is_rejected(self, address: Any) -> None:
        with pytest.raises(ConfigurationError, match="host:port"):
            await run({"task": nothing}, "postgresql://nowhere", health=address)

    async def test_health_address_in_use_is_rejected(self, database: str, port: int) -> None:
        async with running({"task": nothing}, database, health=port):
            with pytest.raises(ConfigurationError, match=f"127.0.0.1:{port}"):
                await run({"task": nothing}, database, health=port)
