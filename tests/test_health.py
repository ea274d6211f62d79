"""Whoever asks is told how a worker is: over HTTP, on the command line, in Python."""

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
from graphile_worker._runtime import health as health_module
from graphile_worker.testing import Databases
from support.jobs import add
from support.proxy import proxied
from support.waiting import until
from support.workers import Gate, Heard, nothing, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture
def port() -> Iterator[int]:
    """Kept for whoever may use an address again, as a server may; nobody else is given it meanwhile."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]


def ask(port: int, path: str, method: str = "GET") -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text else {}
    finally:
        connection.close()


async def holds(condition: Callable[[], bool]) -> None:
    async def found() -> bool:
        return condition()

    await until(found, "the worker is as expected")


async def test_a_worker_is_ready_whether_it_is_idle_or_busy(db: asyncpg.Connection, database: str) -> None:
    gate = Gate()
    async with running({"task": gate}, database) as runner:
        idle = runner.health()
        assert (idle.state, idle.live, idle.ready, idle.running) == ("ready", True, True, 0)
        await add(db)
        await gate.until_begun()
        busy = runner.health()
        assert (busy.state, busy.ready, busy.running, busy.concurrency) == ("ready", True, 1, 1)
        assert busy.worker_id == runner.id
        assert busy.listening
        assert busy.last_exchange is not None
        assert busy.last_heartbeat is not None
        stopping = asyncio.create_task(runner.stop())
        await holds(lambda: runner.health().state == "stopping")
        assert runner.health().live
        assert not runner.health().ready
        gate.open()
        await stopping
    assert (runner.health().state, runner.health().live) == ("stopped", False)


async def test_one_that_cannot_claim_is_not_ready(database: str) -> None:
    heard = Heard()
    roomy: dict[str, Any] = {"heartbeat_interval": 1.0, "fast_lease": 8.0, "lease": 32.0}
    async with (
        proxied(database) as (proxy, through),
        running({"task": nothing}, through, heard=heard, poll_interval=0.1, **roomy) as runner,
    ):
        proxy.refusing = True
        proxy.cut_all()
        await holds(lambda: runner.health().state == "unreachable")
        assert runner.health().live
        await heard.until("pool:fenced")
        await holds(lambda: runner.health().state == "fenced")
        proxy.refusing = False
        await holds(lambda: runner.health().ready)


async def test_an_unreachable_database_is_reported_once_and_with_its_reason(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    heard = Heard()
    async with (
        proxied(database) as (proxy, through),
        running({"task": nothing}, through, heard=heard, poll_interval=0.1, recovery=False) as runner,
    ):
        await holds(lambda: runner.health().listening)
        proxy.refusing = True
        proxy.cut_all()
        await holds(lambda: runner.health().state == "unreachable")
        assert "The database cannot be used: " in (runner.health().reason or "")
        assert runner.health().reason != "The database cannot be used: ."
        await heard.until("pool:listen:error", 5)
        proxy.refusing = False
        await holds(lambda: runner.health().ready and runner.health().listening)
        await holds(lambda: "Notifications of new jobs arrive" in caplog.messages)
    assert sum("do not arrive" in message for message in caplog.messages) == 1


async def test_silent_connections_do_not_use_up_files_or_keep_probes_from_answers(
    database: str, port: int
) -> None:
    async with running({"task": nothing}, database, health=port, recovery=False) as runner:
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
        try:
            health = runner._parts.health
            status, _ = await asyncio.to_thread(ask, port, "/ready")  # accepted after those
            assert status == 200
            assert len(health._clients) <= 64
        finally:
            for one in silent:
                one.close()


async def test_one_without_an_answer_is_not_ready(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "_UNANSWERED", 0.2)
    async with (
        proxied(database) as (proxy, through),
        running({"task": nothing}, through, poll_interval=0.1, recovery=False) as runner,
    ):
        proxy.frozen = True
        await holds(lambda: "has not answered" in (runner.health().reason or ""))
        assert runner.health().last_heartbeat is None
        proxy.frozen = False
        await holds(lambda: runner.health().ready)


async def test_one_whose_flags_cannot_be_told_is_not_ready(database: str) -> None:
    def flags() -> list[str]:
        raise ValueError("oops")

    async with running({"task": nothing}, database, forbidden_flags=flags, poll_interval=0.1) as runner:
        await holds(lambda: runner.health().state == "unsure")
        assert "oops" in (runner.health().reason or "")


async def read_until(stream: asyncio.StreamReader, text: str, lines: list[str] | None = None) -> list[str]:
    """The lines that a program prints until one contains the text."""
    lines = [] if lines is None else lines
    while not any(text in line for line in lines):
        line = await stream.readline()
        assert line, f"ended before {text!r}: {lines}"
        lines.append(line.decode().strip())
    return lines


AT_THE_LIMIT = """
import asyncio, logging, os, resource, sys
from graphile_worker import run

async def task(payload): pass

async def main():
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s", stream=sys.stdout)
    runner = await run({"task": task}, sys.argv[1], health=int(sys.argv[2]), handle_signals=False)
    told = asyncio.ensure_future(asyncio.to_thread(sys.stdin.readline))
    await asyncio.sleep(0)  # it has begun: to begin a thread takes descriptors
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    taken = []
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        print("full", flush=True)
    await told
    for number in taken:
        os.close(number)
    print("free", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await runner.stop()

asyncio.run(main())
"""


class TestOverHttp:
    async def test_300_idle_connections_keep_no_one_from_an_answer(self, database: str, port: int) -> None:
        async with running({"task": nothing}, database, health=port):
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(300)]
            try:
                assert (await asyncio.to_thread(ask, port, "/live"))[0] == 200
                open_ones = [fd for fd in psutil.Process().net_connections() if fd.laddr[1:] == (port,)]
                accepted = [one for one in open_ones if one.status == psutil.CONN_ESTABLISHED]
                assert len(accepted) <= health_module._MOST_CONNECTIONS + 1
            finally:
                for _, writer in idle:
                    writer.transport.abort()

    async def test_one_that_sends_its_request_too_slowly_is_cut_off(
        self, database: str, port: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(health_module, "_REQUEST_TIMEOUT", 0.1)
        async with running({"task": nothing}, database, health=port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /live")
            async with asyncio.timeout(20):
                assert await reader.read() == b""
            writer.close()

    async def test_without_file_descriptors_it_says_so_once(self, database: str, port: int) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", AT_THE_LIMIT, database, str(port)),
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
                    async with asyncio.timeout(1.5):  # to accept it is tried again after a second
                        await read_until(process.stdout, "nothing", lines)
                said = [line for line in lines if "accept" in line]
                assert len(said) == 1, said
                process.stdin.write(b"\n")
                await read_until(process.stdout, "free")
                writer.close()
                assert (await asyncio.to_thread(ask, port, "/live"))[0] == 200
                process.stdin.write(b"\n")
                assert await process.wait() == 0
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def test_live_and_ready(self, database: str, port: int) -> None:
        async with running({"task": nothing}, database, health=port):
            for path in ("/", "/live", "/ready", "/ready?verbose"):
                status, found = await asyncio.to_thread(ask, port, path)
                assert (status, found["state"]) == (200, "ready")
            assert (await asyncio.to_thread(ask, port, "/live", "HEAD"))[0] == 200
            assert (await asyncio.to_thread(ask, port, "/nowhere"))[0] == 404
            assert (await asyncio.to_thread(ask, port, "/live", "POST"))[0] == 405

    async def test_nonsense_harms_nobody(self, database: str, port: int) -> None:
        async with running({"task": nothing}, database, health=f"127.0.0.1:{port}"):
            for nonsense in (b"\r\n\r\n", b"\xff\xfe\r\n\r\n", b"x" * 100_000, b""):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(nonsense)
                writer.close()
            assert (await asyncio.to_thread(ask, port, "/live"))[0] == 200

    async def test_it_answers_while_a_task_blocks_the_event_loop(
        self, db: asyncpg.Connection, database: str, port: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(health_module, "_PING", 0.05)
        seen: list[tuple[int, str]] = []

        def answer_is(status: int, state: str) -> None:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline and (status, state) not in seen:
                answered, found = ask(port, "/live")
                seen.append((answered, found["state"]))

        def watch() -> None:
            # The limits come one after the other, so that no state can be over before it is asked for.
            answer_is(200, "ready")
            monkeypatch.setattr(health_module, "_BLOCKED", 0.3)
            answer_is(200, "blocked")
            monkeypatch.setattr(health_module, "_HOPELESS", 1.0)
            answer_is(503, "blocked")

        async def block(_payload: object) -> None:
            watcher = threading.Thread(target=watch)
            watcher.start()
            watcher.join()

        heard = Heard()
        async with running({"task": block}, database, heard=heard, health=port):
            await add(db)
            await heard.until("job:complete")
        assert list(dict.fromkeys(seen)) == [(200, "ready"), (200, "blocked"), (503, "blocked")]

    @pytest.mark.parametrize("address", ["nowhere", "1:2:3", 70000, True, -1])
    async def test_what_is_no_address_is_refused(self, address: Any) -> None:
        with pytest.raises(ConfigurationError, match="it must be a port, or host:port"):
            await run({"task": nothing}, "postgresql://nowhere", health=address)

    async def test_an_address_that_is_taken_is_refused(self, database: str, port: int) -> None:
        async with running({"task": nothing}, database, health=port):
            with pytest.raises(ConfigurationError, match=f"127.0.0.1:{port}, where this process cannot"):
                await run({"task": nothing}, database, health=port)
