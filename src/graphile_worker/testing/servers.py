"""Run a PostgreSQL server for a test run."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from graphile_worker._db.connection.dsn import EMBEDDED
from graphile_worker.embedded import EmbeddedPostgres

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Nothing in a test server needs to survive a power cut.
_FAST_SETTINGS = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
_MIN_FREE_BYTES = 2 * 1024**3


@contextmanager
def running_server(
    *, parameters: Mapping[str, str] | None = None, binaries: str | os.PathLike[str] | None = None
) -> Iterator[str]:
    """Yield the connection string of a server for tests.

    ``TEST_DATABASE_URL`` names the server, with a role that may create databases. Otherwise an embedded
    server runs in its own folder, which is removed at the end.

    Args:
        parameters: More settings for the embedded server.
        binaries: A PostgreSQL installation [the one of the ``embedded`` extra].

    Example:
        >>> from graphile_worker.testing import running_server
        >>> with running_server() as dsn:
        ...     print(dsn.partition(":")[0])
        postgresql
    """
    given = os.environ.get("TEST_DATABASE_URL", "") if binaries is None else ""
    if given and not given.startswith(EMBEDDED):
        yield given
        return
    kept = given.removeprefix(EMBEDDED)
    folder = kept or fastest_folder() / f"graphile-worker-{secrets.token_hex(8)}"
    with EmbeddedPostgres(
        folder, parameters={**_FAST_SETTINGS, **(parameters or {})}, binaries=binaries, remove=not kept
    ) as server:
        yield server.dsn()


def fastest_folder() -> Path:
    """Return a folder in memory if it has space: a new database is 300 files, which take 0.3 s on a disk."""
    memory = Path("/dev/shm")  # noqa: S108 - callers create a private folder in it
    if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > _MIN_FREE_BYTES:
        return memory
    return Path(tempfile.gettempdir())
