"""One database cluster on disk: made by initdb, started by pg_ctl, found again by its socket.

For root this is a matter of trust: ``data`` and ``run`` belong to the server's unprivileged user, who may put
anything in them, symbolic links too. So as root we write only beside them, and let what must be written in
them be written by that user.
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
_BEGINNING = 1.0
"""How long a server may exist before it has a socket."""
_POLL = 0.02
_AFTERMATH = 10.0
"""How long the children of a killed server may take to notice that, and end."""
_LOG_TAIL = 15
_LONGEST_SOCKET_FOLDER = 80
"""Systems allow 103 to 107 bytes for a socket's whole name."""

# Only the number is replaced: by the rest of the file PostgreSQL sees children that outlived a killed server,
# and does not start beside them. A socket's lock file has nothing of that kind.
_FORGET_CRASHED_SERVER = """
  sed "1s/.*/$1/" "$2" > "$2.new" && mv "$2.new" "$2"
  rm -f "$3"/.s.PGSQL.*
"""


class Running(NamedTuple):
    """What a server that runs says of itself in its pid file."""

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
        """Make the cluster unless it exists; refuse one of another major version."""
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
                f"The folder {self._path} holds data of PostgreSQL {found}, and this is "
                f"PostgreSQL {major[0]}. Name another folder, or dump with the old one and restore."
            )

    def find_running(self) -> Running | None:
        """The server that runs on this cluster, once it is ready; None if there is none, or no more.

        The socket tells: it answers as long as there is a server, also one in another container.
        """
        deadline = time.monotonic() + _START_TIMEOUT
        beginning = time.monotonic() + _BEGINNING
        while time.monotonic() < deadline:
            try:
                found = self._read_pid_file()
            except FileNotFoundError:
                return None
            if found is not None and _answers(found.running):
                if found.status == "ready":
                    return found.running
            elif (found is not None and found.status == "ready") or time.monotonic() > beginning:
                return None
            time.sleep(_POLL)
        raise EmbeddedServerError(f"The server in {self._path} neither starts nor stops.{self._tail()}")

    def options_of_running(self) -> str:
        """The command line of the server that runs."""
        return (self._data / "postmaster.opts").read_text()

    def start(self, parameters: Mapping[str, str], port: int | None) -> Running:
        """Start the server and wait until it accepts connections. There must be none."""
        socket_folder = self._choose_socket_folder()
        self._forget_crashed_server(socket_folder)
        if reserved := sorted({"port", "listen_addresses", "unix_socket_directories"} & set(parameters)):
            raise ConfigurationError(f"{reserved[0]} is not a parameter to set: pass port= for TCP.")
        settings = {
            **parameters,
            "unix_socket_directories": str(socket_folder),
            "listen_addresses": "" if port is None else "127.0.0.1",
            "port": str(5432 if port is None else port),
        }
        options = " ".join(f"-c {shlex.quote(f'{name}={value}')}" for name, value in settings.items())
        self._begin(options)
        running = self.find_running()
        if running is None:
            raise EmbeddedServerError(f"The server in {self._path} ended at once.{self._tail()}")
        return running

    def _begin(self, options: str) -> None:
        patience = time.monotonic() + _AFTERMATH
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
                if "is still in use" not in str(error) or time.monotonic() > patience:
                    raise
            else:
                return
            time.sleep(_POLL)

    def stop(self) -> None:
        """Stop the server, if it runs, and wait until it has."""
        if self.find_running() is not None:
            self._call(*self.stop_command())
        if (folder := self.short_socket_folder()) is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def stop_command(self) -> list[str]:
        """The command that stops the server, to be run as the cluster's user."""
        return [self._binaries.program("pg_ctl"), "stop", "-m", "fast", "-w", "-D", str(self._data)]

    def short_socket_folder(self) -> Path | None:
        """Where the socket goes if the cluster's own path is too long for one."""
        if len(os.fsencode(self._run)) <= _LONGEST_SOCKET_FOLDER:
            return None
        digest = hashlib.sha256(os.fsencode(self._path)).hexdigest()[:16]
        return Path(tempfile.gettempdir(), f"graphile-worker-{digest}")

    def _check_owner(self, folder: Path) -> None:
        with suppress(FileNotFoundError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != self._user.uid:
                raise EmbeddedServerError(f"{folder} is not a folder of {self._user.name}'s. Remove it.")

    def _init(self) -> None:
        password = secrets.token_urlsafe(24)
        self.password_file.unlink(missing_ok=True)
        _write_secret(self.password_file, password)
        for leftover in self._path.glob("initdb-*"):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink()
        # Each attempt in a folder of its own: one that was killed may still have an initdb at work.
        attempt = Path(tempfile.mkdtemp(prefix="initdb-", dir=self._path))
        self._user.own(attempt)
        for_initdb = self._path / f"{attempt.name}-password"
        _write_secret(for_initdb, password, owner=self._user)
        self._call(
            self._binaries.program("initdb"),
            f"--pgdata={attempt}",
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
        attempt.rename(self._data)

    def _read_pid_file(self) -> _PidFile | None:
        """What the file says; None while the server has not said everything."""
        lines = (self._data / "postmaster.pid").read_text(errors="replace").splitlines()
        try:
            running = Running(int(lines[3]), lines[4], listens=bool(lines[5]))
            return _PidFile(running, lines[7].strip())
        except (IndexError, ValueError):
            return None

    def _forget_crashed_server(self, socket_folder: Path) -> None:
        """Let PostgreSQL see that what a crashed server left is stale.

        It does by itself unless the old number belongs to another process of the same user now, as after
        a restart of the machine.
        """
        pid_file = self._data / "postmaster.pid"
        if not pid_file.exists():
            return
        with suppress(OSError, ValueError):
            pid = int(pid_file.read_text().partition("\n")[0])
            if Path(f"/proc/{pid}/cwd").readlink() == self._data:
                raise EmbeddedServerError(
                    f"The server in {self._path} runs as process {pid}, but its socket is gone. End it first."
                )
        with subprocess.Popen(["true"]) as gone:  # noqa: S607 - any program that ends will do
            pass
        arguments = [str(gone.pid), str(pid_file), str(socket_folder)]
        self._call("/bin/sh", "-c", _FORGET_CRASHED_SERVER, "sh", *arguments)

    def _call(self, *command: str) -> None:
        # Output goes to a file: a server started by pg_ctl inherits it, and would keep a pipe open.
        with tempfile.TemporaryFile() as output:
            result = subprocess.run(
                command,
                check=False,
                cwd="/",
                env=server_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # an interrupt of ours is not one of theirs
                **self._user.run_as,
            )
            output.seek(0)
            said = output.read().decode(errors="replace").strip()
        if result.returncode:
            raise EmbeddedServerError(
                f"{Path(command[0]).name} failed for the server in {self._path}: {said}{self._tail()}"
            )

    def _tail(self) -> str:
        try:
            news = self.log.read_bytes()[self._log_size :]
        except OSError:
            return ""
        lines = news.decode(errors="replace").splitlines()[-_LOG_TAIL:]
        return "\n".join(["", f"The end of {self.log}:", *lines])

    def _choose_socket_folder(self) -> Path:
        folder = self.short_socket_folder()
        if folder is None:
            return self._run
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        # A stranger may have made it before us, to listen in our place.
        ours = status.st_uid in {os.geteuid(), self._user.uid} and not status.st_mode & 0o077
        if not ours or not stat.S_ISDIR(status.st_mode):
            raise EmbeddedServerError(f"{folder} is not ours, but in the way of our socket. Remove it.")
        self._user.own(folder)
        return folder


def server_environment() -> dict[str, str]:
    """What the server's processes get of our environment: others who run as the same user can read it."""
    return {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "TZ") if name in os.environ}


def _answers(running: Running) -> bool:
    """Whether something listens on the server's socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(f"{running.socket_folder}/.s.PGSQL.{running.port}")
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            pass  # so busy that it cannot take another connection now
    return True


def _write_secret(path: Path, text: str, owner: ServerUser | None = None) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        if owner is not None and owner.drops_root:
            os.fchown(file.fileno(), owner.uid, owner.gid)
