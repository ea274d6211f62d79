"""Who takes part."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import graphile_worker

ROOT = Path(__file__).parent.parent
DRIVERS = Path(__file__).parent / "drivers"
PEERS = ROOT / ".cache" / "peers"
_PYTHON = PEERS / "python" / "bin" / "python"
NODE_VERSION = "0.18.0"
_NODE = PEERS / f"graphile-worker-{NODE_VERSION}" / "node_modules" / "graphile-worker"
_PYTHON_PEERS = ("procrastinate", "pgqueuer")
_ASK_VERSION = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"


class Missing(Exception):  # noqa: N818 - a fact, not a failure
    """It is not installed here."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A job queue, and how it is set."""

    name: str
    program: str
    """Which driver."""
    tuned: bool = False

    @property
    def database(self) -> str:
        """Which database: those with the schema of Graphile Worker share one."""
        return self.program if self.program in _PYTHON_PEERS else "graphile"

    @property
    def feeder(self) -> str:
        """Whose driver makes the database ready and fills it."""
        return self.program if self.program in _PYTHON_PEERS else "ours"


_PROGRAMS = ("ours", "node", "procrastinate", "pgqueuer")
CONTENDERS = {
    contender.name: contender
    for contender in (
        *(Contender(program, program) for program in _PROGRAMS),
        *(Contender(f"{program} tuned", program, tuned=True) for program in _PROGRAMS),
        Contender("floor", "floor", tuned=True),
    )
}


def driver_command(program: str) -> list[str]:
    """How to start its driver.

    Raises:
        Missing: It is not installed.
    """
    if program in _PYTHON_PEERS:
        version(program)
        return [str(_PYTHON), str(DRIVERS / f"{program}_driver.py")]
    if program == "node":
        return node_program(DRIVERS / "node.mjs")
    return [sys.executable, str(DRIVERS / f"{program}.py")]


def node_program(script: Path) -> list[str]:
    """How to start a program of ours that uses npm's worker: it gets the path of that as an argument.

    Raises:
        Missing: It is not installed.
    """
    return [_node(), str(script), str(_NODE / "dist" / "index.js")]


def once_command(program: str) -> list[str]:
    """How to start a process that runs what there is and ends, from a folder with ``tasks``."""
    if program == "node":
        return [_node(), str(_NODE / "dist" / "cli.js"), "--once"]
    return [sys.executable, "-m", "graphile_worker", "--once"]


@cache
def version(program: str) -> str:
    """Which version it is.

    Raises:
        Missing: It is not installed.
    """
    if program == "node":
        _node()
        return NODE_VERSION
    if program in _PYTHON_PEERS:
        try:
            asked = subprocess.run(
                [_PYTHON, "-c", _ASK_VERSION, program],
                check=True,
                capture_output=True,
                text=True,
            )
        except (OSError, subprocess.CalledProcessError):
            raise Missing(f"{program} is not in {_PYTHON.parent.parent.relative_to(ROOT)}") from None
        return asked.stdout.strip()
    return graphile_worker.__version__


def versions() -> dict[str, str]:
    """Of those that are here, and of what they run on."""
    found = {"Python": sys.version.partition(" ")[0]}
    for program in _PROGRAMS:
        try:
            found[program] = version(program)
        except Missing:
            continue
    if node := shutil.which("node"):
        asked = subprocess.run([node, "--version"], check=True, capture_output=True, text=True)
        found["Node"] = asked.stdout.strip().removeprefix("v")
    return found


def _node() -> str:
    node = shutil.which("node")
    if node is None:
        raise Missing("there is no Node here")
    if not (_NODE / "package.json").exists():
        raise Missing(f"npm did not bring graphile-worker@{NODE_VERSION}")
    return node
