"""The notification protocol of systemd: readiness, and signs of life for its watchdog."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from graphile_worker.cli.service_manager import ServiceManager
from graphile_worker.testing import Databases
from support.supervising import children, command

if TYPE_CHECKING:
    from collections.abc import Iterator

DEADLINE = 30.0
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


class NotifySocket:
    """The socket of a service manager."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._socket.setblocking(False)

    async def until(self, text: str) -> None:
        """Read messages until one contains the text."""
        async with asyncio.timeout(DEADLINE):
            message = b""
            while text.encode() not in message:
                message = await asyncio.get_running_loop().sock_recv(self._socket, 1000)

    def read_all(self) -> list[str]:
        """Return the messages that were sent so far."""
        messages = []
        while True:
            try:
                messages.append(self._socket.recv(1000).decode())
            except BlockingIOError:
                return messages

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def notify(short_folder: Path) -> Iterator[NotifySocket]:
    notify = NotifySocket(short_folder.parent)
    yield notify
    notify.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/nothing.py").write_text("async def nothing(payload): pass\n")
    return tmp_path


@pytest.mark.parametrize("processes", ["1", "2"])
async def test_worker_reports_readiness_signs_of_life_and_its_stop(
    database: str, folder: Path, notify: NotifySocket, processes: str
) -> None:
    variables = {"NOTIFY_SOCKET": str(notify.path), "WATCHDOG_USEC": "300000"}
    async with command(folder, database, "--processes", processes, **variables) as running:
        await notify.until("READY=1")
        await notify.until("WATCHDOG=1")
        running.send(signal.SIGTERM)
        await notify.until("STOPPING=1")
        assert await running.end() == -signal.SIGTERM


async def test_watchdog_gets_no_sign_of_life_while_a_process_is_frozen(
    database: str, folder: Path, notify: NotifySocket
) -> None:
    variables = {"NOTIFY_SOCKET": str(notify.path), "WATCHDOG_USEC": "300000"}
    async with command(folder, database, "--processes", "2", **variables) as running:
        await notify.until("WATCHDOG=1")
        frozen, _ = children(running)
        frozen.suspend()
        await running.until("The worker is not live")
        frozen.resume()
        notify.read_all()
        await notify.until("WATCHDOG=1")


def test_signs_of_life_stop_when_the_worker_is_not_live(
    notify: NotifySocket, caplog: pytest.LogCaptureFixture
) -> None:
    answers, is_over = iter([True, False, False]), threading.Event()

    def is_live() -> bool:
        try:
            return next(answers)
        except StopIteration:
            is_over.set()
            return False

    with ServiceManager(str(notify.path), watchdog=0.03) as manager, caplog.at_level(logging.ERROR):
        manager.report_ready("Running jobs", is_live)
        assert is_over.wait(DEADLINE)
    assert notify.read_all() == ["READY=1\nSTATUS=Running jobs", "WATCHDOG=1"]
    assert [record.levelname for record in caplog.records] == ["ERROR"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has sockets without a path")
def test_socket_without_a_path_is_used() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0graphile-worker-test")
        receiver.settimeout(DEADLINE)
        ServiceManager.from_environment({"NOTIFY_SOCKET": "@graphile-worker-test"}).report_stopping()
        assert receiver.recv(1000).startswith(b"STOPPING=1")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"NOTIFY_SOCKET": "relative"},
        {"NOTIFY_SOCKET": "/does/not/exist", "WATCHDOG_USEC": "0"},
        {"NOTIFY_SOCKET": "/does/not/exist", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": str(os.getppid())},
        {"WATCHDOG_USEC": "1000000"},
    ],
)
def test_nothing_happens_without_a_service_manager_or_watchdog(environment: dict[str, str]) -> None:
    with ServiceManager.from_environment(environment) as manager:
        assert not manager.expects_signs_of_life
        manager.report_ready("Running jobs", lambda: pytest.fail("not asked"))
        manager.report_stopping()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_unit_is_valid(tmp_path: Path) -> None:
    unit = (ROOT / "deploy/systemd/graphile-worker@.service").read_text()
    command = Path(sys.executable).with_name("graphile-worker")
    copy = tmp_path / "graphile-worker@shop.service"
    copy.write_text(unit.replace("/srv/%i/.venv/bin/graphile-worker", str(command)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", copy], check=False, capture_output=True, text=True
    )
    found = [line for line in done.stderr.splitlines() if "graphile-worker" in line]
    assert (done.returncode, found) == (0, [])
