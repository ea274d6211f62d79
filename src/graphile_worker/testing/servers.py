"""A PostgreSQL server for the length of a test run."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from graphile_worker._db.dsn import EMBEDDED
from graphile_worker.embedded import EmbeddedPostgres

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Nothing in a test server needs to survive a power cut.
_FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
_ROOM = 2 * 1024**3


@contextmanager
def running_server(
    *, parameters: Mapping[str, str] | None = None, binaries: str | os.PathLike[str] | None = None
) -> Iterator[str]:
    """The connection string of a server for tests.

    It is the one that ``TEST_DATABASE_URL`` names, for a role that may create databases; or else an
    embedded one in a folder of its own, which is removed at the end.

    Args:
        parameters: More settings for the embedded server.
        binaries: A PostgreSQL installation in place of the one that the ``embedded`` extra brings.

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
        folder, parameters={**_FAST, **(parameters or {})}, binaries=binaries, remove=not kept
    ) as server:
        yield server.dsn()


def fastest_folder() -> Path:
    """In memory if there is room: a new database is 300 files, which a disk makes in 0.3 s."""
    memory = Path("/dev/shm")  # noqa: S108 - a folder of our own is made in it
    if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > _ROOM:
        return memory
    return Path(tempfile.gettempdir())
