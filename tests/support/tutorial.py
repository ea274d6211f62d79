"""Follow a documentation page exactly: write its files, run its commands, compare their output."""

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
_UNSET_VARIABLES = ("PYTEST", "GRAPHILE_", "PG", "DATABASE_URL", "FORCE_COLOR", "COLUMNS")
"""Variables that change the output, and that a reader of the page has not set."""
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
    """Return the lines, with placeholders for values that differ in each run."""
    for pattern, name in _VARYING:
        text = re.sub(pattern, name, text)
    return [line.rstrip() for line in re.sub(_STYLE, "", text).splitlines()]


class Reader:
    """A reader who follows a page's instructions in a folder.

    Args:
        folder: The folder.
        replacements: Texts of the page, and what the reader types instead of them.
    """

    def __init__(self, folder: Path, replacements: dict[str, str]) -> None:
        self._folder = folder
        self._replacements = replacements
        self._worker: subprocess.Popen[str] | None = None
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._reading = Thread()
        here = str(Path(sys.executable).parent)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_UNSET_VARIABLES)}
        self._environment = {**kept, "PATH": f"{here}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop_worker()

    def follow(self, page: Path) -> None:
        """Follow the page from the second section on; the first one is about the installation."""
        _, _, text = page.read_text().partition("\n## ")
        for kind, block in _BLOCK.findall(text.partition("\n## ")[2]):
            if kind == "console":
                self._type_commands(block)
            elif kind == "text":
                self._compare_output(block)
            else:
                self._save(block)

    def _with_replacements(self, text: str) -> str:
        for old, new in self._replacements.items():
            text = text.replace(old, new)
        return text

    def _save(self, block: str) -> None:
        """Save a block as a file: its first line has the name, and says if the block is appended."""
        name, _, position = block.partition("\n")[0].removeprefix("# ").partition(", ")
        assert position in {"", "at the end"}
        before = (self._folder / name).read_text() + "\n\n" if position else ""
        (self._folder / name).write_text(before + self._with_replacements(block))

    def _type_commands(self, block: str) -> None:
        for part in block.split("$ ")[1:]:
            command, _, shown = part.partition("\n")
            if command.startswith("graphile-worker run"):
                self._stop_worker()
                self._start_worker(command)
                self._compare_output(shown)
            else:
                status, output = self._run(self._with_replacements(command))
                assert comparable(output) == comparable(shown), f"{command}: {output}"
                assert status == 0

    def _run(self, command: str) -> tuple[int, str]:
        """Run the command on a terminal, as a reader does."""
        controller, terminal = pty.openpty()
        with subprocess.Popen(
            command, shell=True, cwd=self._folder, env=self._environment, stdout=terminal, stderr=terminal
        ) as process:
            os.close(terminal)
            output = b""
            with suppress(OSError):  # a terminal reports its end this way
                while more := os.read(controller, 65536):
                    output += more
        os.close(controller)
        return process.returncode, output.decode()

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

    def _compare_output(self, shown: str) -> None:
        """Compare the worker's next lines with the page."""
        output = ""
        for _ in shown.splitlines():
            try:
                output += self._lines.get(timeout=_DEADLINE)
            except Empty:
                break
        assert comparable(output) == comparable(shown), output

    def _stop_worker(self) -> None:
        """Stop the worker with Ctrl-C."""
        if self._worker is not None:
            self._worker.send_signal(signal.SIGINT)
            self._worker.wait(_DEADLINE)
            self._reading.join(_DEADLINE)  # all output is read
            while not self._lines.empty():
                assert "Traceback" not in self._lines.get()
            assert self._worker.stdout is not None
            self._worker.stdout.close()
            self._worker = None


def _read(worker: subprocess.Popen[str], lines: SimpleQueue[str]) -> None:
    for line in worker.stdout or ():
        lines.put(line)
