"""``manage.py graphile_worker dev``: a worker that restarts when Django's autoreload notices a change.

Django's reloader ends its process at once, and with it the running jobs. Here, the worker first stops like at
Ctrl-C: it returns jobs that do not end in time to the queue, without counting the attempt.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.utils import autoreload

from graphile_worker._base.logs import library_logger as logger
from graphile_worker.cli.entry import run_command
from graphile_worker.cli.exit_codes import exit_by_signal
from graphile_worker.runner import DEFAULT_GRACE

if TYPE_CHECKING:
    from graphile_worker.contrib.django.django_app import DjangoApp
    from graphile_worker.runner import Runner

RELOAD = 3
"""The exit status that asks the parent process to start the program again."""
_CHECK_INTERVAL = 1.0


def run_with_autoreload(app: DjangoApp, arguments: list[str], name: str) -> int:
    """Run a worker, and run it again whenever the code changes.

    Args:
        app: The project's app.
        arguments: The arguments of the command, from ``dev`` on.
        name: The name of the command, for its messages.
    """
    if os.environ.get(autoreload.DJANGO_AUTORELOAD_ENV) != "true":
        return _supervise()
    reload = _Reload(app)
    reload.start()
    try:
        status = run_command(arguments, name)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    if status and not reload.changed.is_set():
        logger.info("Waiting for a change of the code")
        reload.changed.wait()
    return RELOAD if reload.changed.is_set() else status


class _Reload:
    """Stops the worker when Django's reloader notices a change."""

    def __init__(self, app: DjangoApp) -> None:
        self.changed = threading.Event()
        self._runner: Runner | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Task[None] | None = None
        app.on_running = self._on_running

    def start(self) -> None:
        """Watch the files on another thread."""
        reloader: Any = autoreload.get_reloader()
        reloader.notify_file_changed = self._on_change
        watch = threading.Thread(target=reloader.run, args=(threading.main_thread(),), daemon=True)
        watch.name = "graphile-worker autoreload"
        watch.start()

    def _on_running(self, runner: Runner) -> None:
        self._runner, self._loop = runner, asyncio.get_running_loop()
        if self.changed.is_set():
            self._stop()

    def _on_change(self, path: Path) -> None:
        if self.changed.is_set():
            return
        logger.info("%s changed: restarting", path)
        self.changed.set()
        if self._loop is not None and self._loop.is_running():
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._runner is not None:
            self._stopping = asyncio.ensure_future(self._runner.stop(DEFAULT_GRACE))


def _supervise() -> int:
    """Run this program in a child process, again and again while it asks for it. Return its exit status."""
    environment = {**os.environ, autoreload.DJANGO_AUTORELOAD_ENV: "true"}
    while True:
        before = _modification_times()
        with subprocess.Popen(autoreload.get_child_arguments(), env=environment, close_fds=False) as child:
            handlers = {
                number: signal.signal(number, lambda number, _frame: _forward(child, number))
                for number in (signal.SIGINT, signal.SIGTERM)
            }
            try:
                status = child.wait()
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        if status < 0:
            exit_by_signal(signal.Signals(-status))
        if status == 0:
            return 0
        if status != RELOAD:  # the code cannot even be imported
            logger.error("The program failed with status %d. Waiting for a change of the code", status)
            while _modification_times() == before:
                time.sleep(_CHECK_INTERVAL)


def _forward(child: subprocess.Popen[bytes], number: int) -> None:
    if number != signal.SIGINT:  # the terminal sends Ctrl-C to both processes
        child.send_signal(number)


def _modification_times() -> dict[Path, float]:
    """Return when each module below the current folder was changed."""
    return {path: path.stat().st_mtime for path in Path.cwd().rglob("*.py") if path.is_file()}
