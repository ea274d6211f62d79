"""`ServiceManager`: tells systemd how this command is doing, with its notification protocol.

systemd sets ``NOTIFY_SOCKET`` for a unit of ``Type=notify``, and ``WATCHDOG_USEC`` if the unit has a
``WatchdogSec``. Without them, nothing is sent.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from graphile_worker._base.logs import library_logger as logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_SOCKET = "NOTIFY_SOCKET"
_WATCHDOG = "WATCHDOG_USEC"
_WATCHDOG_PID = "WATCHDOG_PID"
_MICROSECONDS = 1_000_000


class ServiceManager:
    """The service manager that started this command, if one did.

    Args:
        address: The path of its socket, ``@name`` for one without a path; None without a service manager.
        watchdog: Seconds within which it expects a sign of life; None if it expects none.
    """

    def __init__(self, address: str | None, watchdog: float | None = None) -> None:
        self._address = address
        self._watchdog = watchdog
        self._stopped = threading.Event()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> ServiceManager:
        """Return the service manager that the environment names.

        The variables stay in the environment: by default, systemd ignores what other processes of the unit
        send.
        """
        address = environment.get(_SOCKET, "")
        if not address.startswith(("/", "@")):
            return cls(None)
        for_this_process = environment.get(_WATCHDOG_PID, "") in {"", str(os.getpid())}
        microseconds = environment.get(_WATCHDOG, "")
        expects = for_this_process and microseconds.isdecimal() and int(microseconds) > 0
        return cls(address, int(microseconds) / _MICROSECONDS if expects else None)

    @property
    def expects_signs_of_life(self) -> bool:
        """Whether the service manager restarts a command that sends no signs of life."""
        return self._watchdog is not None

    def report_ready(self, status: str, is_live: Callable[[], bool]) -> None:
        """Report that the worker runs jobs. From then on, send signs of life while `is_live` returns True.

        They are sent from a thread, because a task may block the event loop for longer than the service
        manager waits.
        """
        self._send(f"READY=1\nSTATUS={status}")
        if self._address is not None and self._watchdog is not None:
            watching = threading.Thread(
                target=self._send_signs_of_life,
                args=(self._watchdog / 3, is_live),
                name="graphile-worker watchdog",
                daemon=True,
            )
            watching.start()

    def report_stopping(self) -> None:
        """Report that the worker finishes its jobs. Signs of life go on, because that may take long."""
        self._send("STOPPING=1\nSTATUS=Finishing running jobs")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        """Send no more signs of life."""
        self._stopped.set()

    def _send_signs_of_life(self, interval: float, is_live: Callable[[], bool]) -> None:
        was_live = True
        while not self._stopped.wait(interval):
            live = is_live()
            if live:
                self._send("WATCHDOG=1")
            elif was_live:
                logger.error("The worker is not live: systemd restarts it, because it gets no sign of life")
            was_live = live

    def _send(self, message: str) -> None:
        if self._address is None:
            return
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.connect(
                address
            )  # the service manager may be gone, or its socket full: then it learns nothing
            sender.send(message.encode())
