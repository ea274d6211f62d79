"""Following a page word for word: its files are written, its commands run, its output compared."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Self

_BLOCK = re.compile(r"```(python|ini|console|text)\n(.*?)```", re.DOTALL)
_DEADLINE = 30.0
_OTHERS = ("PYTEST", "GRAPHILE_", "PG", "DATABASE_URL", "FORCE_COLOR", "COLUMNS")
"""Variables that change what is printed, and whoever follows the page has not set."""
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_VARYING = (
    (r"\d\d:\d\d:\d\d\.\d{3}", "<time>"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+00:00", "<moment>"),
    (r"in \d+ min", "<soon>"),
    (r"\d+\.\d\d ms", "<duration>"),
    (r"in \d+\.\d+s", "in <duration>"),
    (r"python-[0-9a-f]+", "<worker>"),
    (r'File ".*/', 'File "'),
)


def comparable(text: str) -> list[str]:
    """The lines, without what is different each time."""
    for pattern, name in _VARYING:
        text = re.sub(pattern, name, text)
    return [line.rstrip() for line in re.sub(_STYLE, "", text).splitlines()]


class Reader:
    """Somebody who does what a page says, in a folder of their own.

    Args:
        folder: Where to do it.
        replacements: What they type in place of something.
    """

    def __init__(self, folder: Path, replacements: dict[str, str]) -> None:
        self._folder = folder
        self._replacements = replacements
        self._worker: subprocess.Popen[str] | None = None
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._reading = Thread()
        here = str(Path(sys.executable).parent)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OTHERS)}
        self._environment = {**kept, "PATH": f"{here}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop_worker()

    def follow(self, page: Path) -> None:
        """Do what stands there from the second section on; the first one installs."""
        _, _, text = page.read_text().partition("\n## ")
        for kind, block in _BLOCK.findall(text.partition("\n## ")[2]):
            if kind == "console":
                self._enter(block)
            elif kind == "text":
                self._see(block)
            else:
                self._save(block)

    def _typed(self, text: str) -> str:
        for old, new in self._replacements.items():
            text = text.replace(old, new)
        return text

    def _save(self, block: str) -> None:
        """A file names itself in its first line, and maybe says that it is the end of one."""
        name, _, where = block.partition("\n")[0].removeprefix("# ").partition(", ")
        assert where in {"", "at the end"}
        before = (self._folder / name).read_text() + "\n\n" if where else ""
        (self._folder / name).write_text(before + self._typed(block))

    def _enter(self, block: str) -> None:
        for part in block.split("$ ")[1:]:
            command, _, shown = part.partition("\n")
            if command.startswith("graphile-worker run"):
                self._stop_worker()
                self._start_worker(command)
                self._see(shown)
            else:
                status, said = self._run(self._typed(command))
                assert comparable(said) == comparable(shown), f"{command}: {said}"
                assert status == 0

    def _run(self, command: str) -> tuple[int, str]:
        """On a terminal, for that is what a reader has."""
        terminal, its_end = pty.openpty()
        with subprocess.Popen(
            command, shell=True, cwd=self._folder, env=self._environment, stdout=its_end, stderr=its_end
        ) as process:
            os.close(its_end)
            said = b""
            with suppress(OSError):  # which is how a terminal ends
                while more := os.read(terminal, 65536):
                    said += more
        os.close(terminal)
        return process.returncode, said.decode()

    def _start_worker(self, command: str) -> None:
        self._worker = worker = subprocess.Popen(
            command.split(),
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines = SimpleQueue()
        self._reading = Thread(target=_read, args=(worker, self._lines), daemon=True)
        self._reading.start()

    def _see(self, shown: str) -> None:
        """What the worker says next."""
        said = ""
        for _ in shown.splitlines():
            try:
                said += self._lines.get(timeout=_DEADLINE)
            except Empty:
                break
        assert comparable(said) == comparable(shown), said

    def _stop_worker(self) -> None:
        """With Ctrl-C, which it takes well."""
        if self._worker is not None:
            self._worker.send_signal(signal.SIGINT)
            self._worker.wait(_DEADLINE)
            self._reading.join(_DEADLINE)  # so that all is read, and by nobody any more
            while not self._lines.empty():
                assert "Traceback" not in self._lines.get()
            assert self._worker.stdout is not None
            self._worker.stdout.close()
            self._worker = None


def _read(worker: subprocess.Popen[str], lines: SimpleQueue[str]) -> None:
    for line in worker.stdout or ():
        lines.put(line)
