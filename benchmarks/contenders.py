"""The contenders: job queues and their settings."""

from __future__ import annotations

import os
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
_WITH_OWN_DATABASE = (*_PYTHON_PEERS, "before")
BEFORE = "BEFORE"
"""The environment variable with the folder of another checkout, which takes part as `before`."""
_PRINT_VERSION = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"


class NotInstalledError(Exception):
    """The contender is not installed on this machine."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A job queue and its settings."""

    name: str
    program: str
    """The name of the driver."""
    tuned: bool = False
    prefetch: int | None = None
    """A size of the local queue other than the usual one. Only for graphile_worker."""
    history: str | None = None
    """What the history keeps, if it is on. Only for graphile_worker."""

    @property
    def database(self) -> str:
        """The name of the database. Contenders with Graphile Worker's schema share one."""
        return self.program if self.program in _WITH_OWN_DATABASE else "graphile"

    @property
    def feeder(self) -> str:
        """The program whose driver prepares and fills the database."""
        return self.program if self.program in _WITH_OWN_DATABASE else "python"


_PROGRAMS = ("python", "node", "procrastinate", "pgqueuer")
CONTENDERS = {
    contender.name: contender
    for contender in (
        *(Contender(program, program) for program in _PROGRAMS),
        *(Contender(f"{program} tuned", program, tuned=True) for program in _PROGRAMS),
        Contender("python, prefetch 0", "python", prefetch=0),
        Contender("by hand", "python"),
        Contender("python, failures kept", "python", history="failures"),
        Contender("python, all kept", "python", history="all"),
        Contender("python tuned, all kept", "python", tuned=True, history="all"),
        Contender("python, call", "python"),
        Contender("before", "before"),
        Contender("before tuned", "before", tuned=True),
        Contender("floor", "floor", tuned=True),
    )
}


def driver_command(program: str) -> list[str]:
    """Return the command that starts a driver.

    Raises:
        NotInstalledError: The program is not installed.
    """
    if program in _PYTHON_PEERS:
        version(program)
        return [str(_PYTHON), str(DRIVERS / f"{program}_driver.py")]
    if program == "node":
        return node_program(DRIVERS / "node.mjs")
    if program == "before":
        folder = _checkout()
        driver = folder / "benchmarks" / "drivers" / "python.py"
        return ["env", f"PYTHONPATH={folder / 'src'}", sys.executable, str(driver)]
    return [sys.executable, str(DRIVERS / f"{program}.py")]


def node_program(script: Path) -> list[str]:
    """Return the command that starts a Node script, with the path of the npm package as its argument.

    Raises:
        NotInstalledError: Node or npm's graphile-worker is not installed.
    """
    return [_node(), str(script), str(_NODE / "dist" / "index.js")]


def once_command(program: str) -> list[str]:
    """Return the command that runs all available jobs and exits, for a folder with ``tasks``."""
    if program == "node":
        return [_node(), str(_NODE / "dist" / "cli.js"), "--once"]
    return [sys.executable, "-m", "graphile_worker", "--once"]


@cache
def version(program: str) -> str:
    """Return the version of a program.

    Raises:
        NotInstalledError: The program is not installed.
    """
    if program == "node":
        _node()
        return NODE_VERSION
    if program in _PYTHON_PEERS:
        try:
            output = subprocess.run(
                [_PYTHON, "-c", _PRINT_VERSION, program],
                check=True,
                capture_output=True,
                text=True,
            )
        except (OSError, subprocess.CalledProcessError):
            folder = _PYTHON.parent.parent.relative_to(ROOT)
            raise NotInstalledError(
                f"{program} is not installed in {folder}; run: make bench-peers"
            ) from None
        return output.stdout.strip()
    return graphile_worker.__version__


def versions() -> dict[str, str]:
    """Return the versions of the installed contenders, of Python and of Node."""
    found = {"Python": sys.version.partition(" ")[0]}
    for program in _PROGRAMS:
        try:
            found["graphile-worker" if program == "python" else program] = version(program)
        except NotInstalledError:
            continue
    if node := shutil.which("node"):
        output = subprocess.run([node, "--version"], check=True, capture_output=True, text=True)
        found["Node"] = output.stdout.strip().removeprefix("v")
    return found


def _checkout() -> Path:
    """Return the folder of the checkout to compare with."""
    folder = os.environ.get(BEFORE)
    if not folder:
        raise NotInstalledError(
            f"{BEFORE} is not set; to compare with another commit, run: make bench {BEFORE}=its/checkout"
        )
    if not (Path(folder) / "benchmarks" / "drivers" / "python.py").exists():
        raise NotInstalledError(f"{BEFORE}={folder} is not a checkout of this repository")
    return Path(folder).resolve()


def _node() -> str:
    node = shutil.which("node")
    if node is None:
        raise NotInstalledError("Node is not installed")
    if not (_NODE / "package.json").exists():
        raise NotInstalledError(f"npm's graphile-worker@{NODE_VERSION} is not installed; run: make peers")
    return node
