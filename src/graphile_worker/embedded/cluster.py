"""One database cluster on disk: made by initdb, started by pg_ctl, found again by its pid file."""

from __future__ import annotations

import hashlib
import os
import secrets
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker.errors import EmbeddedServerError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphile_worker.embedded.binaries import Binaries, ServerUser

SUPERUSER = "postgres"
_START_TIMEOUT = 60
_LOG_TAIL = 15
_LONGEST_SOCKET_FOLDER = 80
"""Systems allow 103 to 107 bytes for a socket's whole name."""


class Running(NamedTuple):
    """What a server that runs says of itself in its pid file."""

    pid: int
    port: int
    socket_folder: str
    listens: bool


class Cluster:
    """The cluster in the folder `path`, run by `user` with `binaries`."""

    def __init__(self, path: Path, binaries: Binaries, user: ServerUser) -> None:
        self._binaries = binaries
        self._user = user
        self._path = path
        self._data = path / "data"
        self._run = path / "run"
        self.log = self._run / "server.log"
        self.password_file = path / "password"

    def make(self) -> None:
        """Make the cluster unless it exists; refuse one of another major version."""
        major = self._binaries.version().partition(".")[0]
        version_file = self._data / "PG_VERSION"
        if version_file.exists():
            found = version_file.read_text().strip()
            if found != major:
                raise EmbeddedServerError(
                    f"The folder {self._path} holds data of PostgreSQL {found}, and this is "
                    f"PostgreSQL {major}. Name another folder, or dump with the old one and restore."
                )
            return
        self._run.mkdir(mode=0o700, exist_ok=True)
        self._user.own(self._run)
        password = secrets.token_urlsafe(24)
        _write_secret(self.password_file, password)
        for_initdb = self._run / "password"
        _write_secret(for_initdb, password)
        self._user.own(for_initdb)
        # Made aside and moved into place, so that a crash leaves no half a cluster.
        draft = self._run / "data"
        shutil.rmtree(draft, ignore_errors=True)
        self._call(
            "initdb",
            f"--pgdata={draft}",
            f"--username={SUPERUSER}",
            "--encoding=UTF8",
            "--no-locale",
            # The socket is in a folder closed to others; TCP is open to everybody on the machine.
            "--auth-local=trust",
            "--auth-host=scram-sha-256",
            f"--pwfile={for_initdb}",
            "--no-sync",
        )
        for_initdb.unlink()
        draft.rename(self._data)

    def find_running(self) -> Running | None:
        """The server that runs on this cluster, if there is one."""
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
            pid, port, socket_folder, address = int(lines[0]), int(lines[3]), lines[4], lines[5]
        except (FileNotFoundError, IndexError, ValueError):
            return None
        if not self._is_ours(pid):
            return None
        return Running(pid, port, socket_folder, listens=bool(address))

    def options_of_running(self) -> str:
        """The command line of the server that runs."""
        return (self._data / "postmaster.opts").read_text()

    def start(self, parameters: Mapping[str, str], port: int | None) -> Running:
        """Start the server and wait until it accepts connections."""
        self._mend_pid_file()
        settings = {
            **parameters,
            "unix_socket_directories": str(self._choose_socket_folder()),
            "listen_addresses": "" if port is None else "127.0.0.1",
            "port": str(5432 if port is None else port),
        }
        self._call(
            "pg_ctl",
            "start",
            "--wait",
            f"--timeout={_START_TIMEOUT}",
            f"--pgdata={self._data}",
            f"--log={self.log}",
            f"--options={command_line_options(settings)}",
        )
        running = self.find_running()
        if running is None:
            raise EmbeddedServerError(f"The server in {self._path} ended at once.{self._tail()}")
        return running

    def stop_command(self) -> list[str]:
        """The command that stops the server, to be run as the cluster's user."""
        return [self._binaries.program("pg_ctl"), "stop", "-m", "fast", "-w", "-D", str(self._data)]

    def _call(self, program: str, *arguments: str) -> None:
        # Output goes to a file: a server started by pg_ctl inherits it, and would keep a pipe open.
        with tempfile.TemporaryFile() as output:
            result = subprocess.run(
                [self._binaries.program(program), *arguments],
                check=False,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                **self._user.run_as,
            )
            output.seek(0)
            said = output.read().decode(errors="replace").strip()
        if result.returncode:
            raise EmbeddedServerError(
                f"{program} failed for the server in {self._path}: {said}{self._tail()}"
            )

    def _tail(self) -> str:
        try:
            lines = self.log.read_text(errors="replace").splitlines()[-_LOG_TAIL:]
        except FileNotFoundError:
            return ""
        return "\n".join(["", f"The end of {self.log}:", *lines])

    def _is_ours(self, pid: int) -> bool:
        """Whether that process is a server on this cluster, and not one that got the number later."""
        try:
            import psutil  # noqa: PLC0415 - part of the extra
        except ImportError as error:
            raise MissingExtraError(
                "An embedded PostgreSQL needs psutil: pip install 'graphile-worker[embedded]'"
            ) from error
        try:
            command = psutil.Process(pid).cmdline()
        except psutil.Error:
            return False
        return str(self._data) in command

    def _mend_pid_file(self) -> None:
        """Let PostgreSQL see that a pid file left by a crash is stale.

        It does by itself unless the number belongs to another process now. Only the number is
        replaced: the rest lets PostgreSQL wait for children that outlived a killed server.
        """
        pid_file = self._data / "postmaster.pid"
        if not pid_file.exists():
            return
        _, _, rest = pid_file.read_text().partition("\n")
        with subprocess.Popen(["true"]) as gone:  # noqa: S607 - any program that ends will do
            pass
        pid_file.write_text(f"{gone.pid}\n{rest}")

    def _choose_socket_folder(self) -> Path:
        if len(os.fsencode(self._run)) <= _LONGEST_SOCKET_FOLDER:
            return self._run
        digest = hashlib.sha256(os.fsencode(self._path)).hexdigest()[:16]
        folder = Path(tempfile.gettempdir(), f"graphile-worker-{digest}")
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        # A stranger may have made it before us, to listen in our place.
        if status.st_uid not in {os.geteuid(), self._user.uid} or status.st_mode & 0o077:
            raise EmbeddedServerError(f"The folder {folder} is not ours. Remove it.")
        if not stat.S_ISDIR(status.st_mode):
            raise EmbeddedServerError(f"{folder} is in the way of a socket's folder. Remove it.")
        self._user.own(folder)
        return folder


def command_line_options(settings: Mapping[str, str]) -> str:
    """Server settings as ``pg_ctl --options`` takes them."""
    return " ".join(f"-c {shlex.quote(f'{name}={value}')}" for name, value in settings.items())


def _write_secret(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
