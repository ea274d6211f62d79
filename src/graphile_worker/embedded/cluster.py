"""One database cluster on disk: created by initdb, started by pg_ctl, found again by its socket.

Security, if the process runs as root: ``data`` and ``run`` belong to the server's unprivileged user, who may
put anything in them, even symbolic links. So this module writes as root only next to these folders. Whatever
must be written inside them is written by programs that run as that user.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shlex
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker.errors import ConfigurationError, EmbeddedServerError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphile_worker.embedded.binaries import Binaries, ServerUser

SUPERUSER = "postgres"
_START_TIMEOUT = 60
_SOCKET_TIMEOUT = 1.0
"""Seconds in which a new server must have a socket."""
_POLL = 0.02
_ORPHANS_TIMEOUT = 10.0
"""Seconds in which the child processes of a killed server must end."""
_LOG_TAIL = 15
_MAX_SOCKET_FOLDER = 80
"""Systems allow 103 to 107 bytes for a socket's whole path."""

# Only the process id is replaced. From the rest of the file PostgreSQL detects child processes that outlived
# a killed server, and does not start next to them. A socket's lock file has no such information.
_FORGET_CRASHED_SERVER = """
  sed "1s/.*/$1/" "$2" > "$2.new" && mv "$2.new" "$2"
  rm -f "$3"/.s.PGSQL.*
"""


class Running(NamedTuple):
    """A running server, as described by its pid file."""

    port: int
    socket_folder: str
    listens: bool


class _PidFile(NamedTuple):
    running: Running
    status: str


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
        self._log_size = 0

    def make(self) -> None:
        """Create the cluster unless it exists; reject a cluster of another major version."""
        for folder in (self._run, self._data):
            self._check_owner(folder)
        if not self._run.exists():
            self._run.mkdir(mode=0o700)
            self._user.own(self._run)
        major = re.match(r"\d+", self._binaries.version())
        version_file = self._data / "PG_VERSION"
        if not version_file.exists():
            self._init()
        elif major is not None and (found := version_file.read_text().strip()) != major[0]:
            raise EmbeddedServerError(
                f"The folder {self._path} holds data of PostgreSQL {found}, but this is "
                f"PostgreSQL {major[0]}. Use another folder, or dump the data with the old version and "
                "restore it."
            )

    def find_running(self) -> Running | None:
        """Return this cluster's running server, once it is ready; None if none runs.

        The socket is the test: it accepts connections as long as a server runs, even in another container.
        """
        deadline = time.monotonic() + _START_TIMEOUT
        socket_deadline = time.monotonic() + _SOCKET_TIMEOUT
        while time.monotonic() < deadline:
            try:
                found = self._read_pid_file()
            except FileNotFoundError:
                return None
            if found is not None and _accepts_connections(found.running):
                if found.status == "ready":
                    return found.running
            elif (found is not None and found.status == "ready") or time.monotonic() > socket_deadline:
                return None
            time.sleep(_POLL)
        raise EmbeddedServerError(f"The server in {self._path} neither starts nor stops.{self._tail()}")

    def options_of_running(self) -> str:
        """Return the command line of the running server."""
        return (self._data / "postmaster.opts").read_text()

    def start(self, parameters: Mapping[str, str], port: int | None) -> Running:
        """Start the server and wait until it accepts connections. No server may be running."""
        socket_folder = self._choose_socket_folder()
        self._forget_crashed_server(socket_folder)
        if reserved := sorted({"port", "listen_addresses", "unix_socket_directories"} & set(parameters)):
            raise ConfigurationError(
                f"Invalid parameter {reserved[0]!r}: the server sets it itself. Pass port= for TCP."
            )
        settings = {
            **parameters,
            "unix_socket_directories": str(socket_folder),
            "listen_addresses": "" if port is None else "127.0.0.1",
            "port": str(5432 if port is None else port),
        }
        options = " ".join(f"-c {shlex.quote(f'{name}={value}')}" for name, value in settings.items())
        self._start_server(options)
        running = self.find_running()
        if running is None:
            raise EmbeddedServerError(f"The server in {self._path} stopped at once.{self._tail()}")
        return running

    def _start_server(self, options: str) -> None:
        deadline = time.monotonic() + _ORPHANS_TIMEOUT
        while True:
            self._log_size = self.log.stat().st_size if self.log.exists() else 0
            try:
                self._call(
                    self._binaries.program("pg_ctl"),
                    "start",
                    "--wait",
                    f"--timeout={_START_TIMEOUT}",
                    f"--pgdata={self._data}",
                    f"--log={self.log}",
                    f"--options={options}",
                )
            except EmbeddedServerError as error:
                if "is still in use" not in str(error) or time.monotonic() > deadline:
                    raise
            else:
                return
            time.sleep(_POLL)

    def stop(self) -> None:
        """Stop the server if it runs, and wait until it has stopped."""
        if self.find_running() is not None:
            self._call(*self.stop_command())
        if (folder := self.short_socket_folder()) is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def stop_command(self) -> list[str]:
        """Return the command that stops the server, to be run as the cluster's user."""
        return [self._binaries.program("pg_ctl"), "stop", "-m", "fast", "-w", "-D", str(self._data)]

    def short_socket_folder(self) -> Path | None:
        """Return the socket's folder if the cluster's own path is too long for a socket."""
        if len(os.fsencode(self._run)) <= _MAX_SOCKET_FOLDER:
            return None
        digest = hashlib.sha256(os.fsencode(self._path)).hexdigest()[:16]
        return Path(tempfile.gettempdir(), f"graphile-worker-{digest}")

    def _check_owner(self, folder: Path) -> None:
        with suppress(FileNotFoundError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != self._user.uid:
                raise EmbeddedServerError(f"{folder} is not a folder owned by {self._user.name}. Remove it.")

    def _init(self) -> None:
        password = secrets.token_urlsafe(24)
        self.password_file.unlink(missing_ok=True)
        _write_secret(self.password_file, password)
        for leftover in self._path.glob("initdb-*"):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink()
        # Each attempt has its own folder: the initdb of an attempt that was killed may still be running.
        attempt = Path(tempfile.mkdtemp(prefix="initdb-", dir=self._path))
        self._user.own(attempt)
        initdb_password_file = self._path / f"{attempt.name}-password"
        _write_secret(initdb_password_file, password, owner=self._user)
        self._call(
            self._binaries.program("initdb"),
            f"--pgdata={attempt}",
            f"--username={SUPERUSER}",
            "--encoding=UTF8",
            "--no-locale",
            # The socket is in a folder closed to other users; TCP is open to all users of the machine.
            "--auth-local=trust",
            "--auth-host=scram-sha-256",
            f"--pwfile={initdb_password_file}",
            "--no-sync",
        )
        initdb_password_file.unlink()
        attempt.rename(self._data)

    def _read_pid_file(self) -> _PidFile | None:
        """Return the parsed pid file; None while the server has not written all of it."""
        lines = (self._data / "postmaster.pid").read_text(errors="replace").splitlines()
        try:
            running = Running(int(lines[3]), lines[4], listens=bool(lines[5]))
            return _PidFile(running, lines[7].strip())
        except (IndexError, ValueError):
            return None

    def _forget_crashed_server(self, socket_folder: Path) -> None:
        """Make PostgreSQL see that the files of a crashed server are stale.

        PostgreSQL does so by itself, unless the old process id now belongs to another process of the same
        user, as after a restart of the machine.
        """
        pid_file = self._data / "postmaster.pid"
        if not pid_file.exists():
            return
        with suppress(OSError, ValueError):
            pid = int(pid_file.read_text().partition("\n")[0])
            if Path(f"/proc/{pid}/cwd").readlink() == self._data:
                raise EmbeddedServerError(
                    f"The server in {self._path} runs as process {pid}, but its socket is gone. "
                    "Stop that process first."
                )
        with subprocess.Popen(["true"]) as gone:  # noqa: S607 - any program that ends
            pass
        arguments = [str(gone.pid), str(pid_file), str(socket_folder)]
        self._call("/bin/sh", "-c", _FORGET_CRASHED_SERVER, "sh", *arguments)

    def _call(self, *command: str) -> None:
        # Write the output to a file: a server started by pg_ctl inherits it, and would keep a pipe open.
        with tempfile.TemporaryFile() as output:
            result = subprocess.run(
                command,
                check=False,
                cwd="/",
                env=server_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in this process does not reach the server
                **self._user.run_as,
            )
            output.seek(0)
            text = output.read().decode(errors="replace").strip()
        if result.returncode:
            raise EmbeddedServerError(
                f"{Path(command[0]).name} failed for the server in {self._path}: {text}{self._tail()}"
            )

    def _tail(self) -> str:
        try:
            new_text = self.log.read_bytes()[self._log_size :]
        except OSError:
            return ""
        lines = new_text.decode(errors="replace").splitlines()[-_LOG_TAIL:]
        return "\n".join(["", f"The end of {self.log}:", *lines])

    def _choose_socket_folder(self) -> Path:
        folder = self.short_socket_folder()
        if folder is None:
            return self._run
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        # Another user may have created it first, to listen instead of the server.
        is_safe = status.st_uid in {os.geteuid(), self._user.uid} and not status.st_mode & 0o077
        if not is_safe or not stat.S_ISDIR(status.st_mode):
            raise EmbeddedServerError(
                f"{folder} is needed for the socket, but another user owns it or may enter it. Remove it."
            )
        self._user.own(folder)
        return folder


def server_environment() -> dict[str, str]:
    """Return the server's environment variables: few, because other processes of its user can read them."""
    return {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "TZ") if name in os.environ}


def _accepts_connections(running: Running) -> bool:
    """Return whether the server's socket accepts connections."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(f"{running.socket_folder}/.s.PGSQL.{running.port}")
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            pass  # too busy to accept another connection now
    return True


def _write_secret(path: Path, text: str, owner: ServerUser | None = None) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        if owner is not None and owner.drops_root:
            os.fchown(file.fileno(), owner.uid, owner.gid)
