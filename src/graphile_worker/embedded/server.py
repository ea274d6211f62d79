"""`EmbeddedPostgres`: a server in a folder, shared between processes."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import quote

from graphile_worker.embedded import watcher
from graphile_worker.embedded.binaries import SYSTEM_FOLDER, Binaries, ServerUser, make_open_folder
from graphile_worker.embedded.cluster import SUPERUSER, Cluster, Running, server_environment
from graphile_worker.errors import ConfigurationError, EmbeddedServerError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# pg_ctl passes the path to a shell in double quotes; a list of socket folders is split at commas.
_FORBIDDEN_CHARACTERS = frozenset('"$`\\\n\0,')
_GITIGNORE = ".gitignore"
_START_LOCK, _USERS_LOCK, _WATCHER_LOCK = "start.lock", "users.lock", "watcher.lock"


class EmbeddedPostgres:
    """A PostgreSQL server in a folder, shared by all processes that name the folder.

    The first process starts the server, and the last process to close it stops it. A crash counts as closing.

    Args:
        path: The folder, created if missing [a folder in the user's data folder].
        port: A TCP port on 127.0.0.1 in addition to the socket, or 0 for a free port.
        parameters: Server settings as in ``postgresql.conf``.
        binaries: A PostgreSQL installation: the folder above its ``bin`` [the one of the ``embedded`` extra].
        remove: Whether to remove the folder when the server stops.

    Example:
        >>> from graphile_worker.embedded import EmbeddedPostgres
        >>> with EmbeddedPostgres(folder) as server:
        ...     dsn = server.dsn()
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        port: int | None = None,
        parameters: Mapping[str, str] | None = None,
        binaries: str | os.PathLike[str] | None = None,
        remove: bool = False,
    ) -> None:
        self._user = ServerUser.find()
        self._binaries = Binaries(Path(binaries)) if binaries else Binaries.from_extra()
        self.path = _absolute(path) if path else _default_path(self._user)
        if port is not None and port not in range(65536):
            raise ConfigurationError(f"Invalid port {port!r}: must be from 0 to 65535.")
        self._port = port
        self._parameters = dict(parameters or {})
        self._remove = remove
        self._cluster: Cluster | None = None
        self._running: Running | None = None
        self._users_lock: int | None = None

    def __repr__(self) -> str:
        return f"EmbeddedPostgres({str(self.path)!r})"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def start(self) -> None:
        """Use the server in the folder; create and start it if necessary."""
        if self._users_lock is not None:
            return
        self._check_folder()
        with ExitStack() as locks:
            locks.enter_context(self._lock(_START_LOCK, fcntl.LOCK_EX))
            self._hide_from_git()
            # Wait for a watcher that is stopping the server.
            users = locks.enter_context(self._lock(_USERS_LOCK, fcntl.LOCK_SH))
            cluster = Cluster(self.path, self._binaries.reachable_by(self._user), self._user)
            cluster.make()
            # Start the watcher first: it stops the server if this process dies while the server starts.
            self._ensure_watcher(cluster)
            running = cluster.find_running()
            if running is None:
                running = cluster.start(self._parameters, self._free_port())
            else:
                self._check_settings(cluster, running)
            # The duplicate descriptor keeps the lock when the original is closed below.
            self._cluster, self._running, self._users_lock = cluster, running, os.dup(users)

    def close(self) -> None:
        """Stop using the server. If it has no other users, it has stopped when this method returns."""
        if self._users_lock is None or self._cluster is None:
            return
        try:
            # Only the last user gets the exclusive lock. The watcher does the same after a crash.
            fcntl.flock(self._users_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._cluster.stop()
            if self._remove:
                shutil.rmtree(self.path, ignore_errors=True)
        except BlockingIOError:
            pass  # other processes still use it
        finally:
            # Unlock explicitly: a forked child has the descriptor too, and would keep the lock.
            fcntl.flock(self._users_lock, fcntl.LOCK_UN)
            os.close(self._users_lock)
            self._users_lock = self._running = None

    def dsn(self, database: str = SUPERUSER, *, tcp: bool = False) -> str:
        """Return a connection string for the superuser, over the socket or over TCP if a port was given."""
        if self._running is None or self._cluster is None:
            raise EmbeddedServerError(f"The server in {self.path} is not started: call start() first.")
        name = quote(database, safe="")
        if tcp:
            if not self._running.listens:
                raise ConfigurationError("TCP is off: pass port=0, or a port, to EmbeddedPostgres.")
            password = self._cluster.password_file.read_text()
            return f"postgresql://{SUPERUSER}:{password}@127.0.0.1:{self._running.port}/{name}"
        host = quote(self._running.socket_folder, safe="/")
        return f"postgresql://{SUPERUSER}@/{name}?host={host}&port={self._running.port}"

    @property
    def log(self) -> Path:
        """The server's log file."""
        return Cluster(self.path, self._binaries, self._user).log

    def _check_folder(self) -> None:
        if forbidden := sorted(set(str(self.path)) & _FORBIDDEN_CHARACTERS):
            raise EmbeddedServerError(
                f"Invalid folder {str(self.path)!r}: PostgreSQL's programs do not support the character "
                f"{' '.join(map(repr, forbidden))} in its name. Use another folder."
            )
        try:
            self._check_parents()
            make_open_folder(self.path)
            status = self.path.stat()
            entries = {entry.name for entry in self.path.iterdir()}
        except OSError as error:
            raise EmbeddedServerError(f"The folder {self.path} cannot be used: {error}.") from error
        # A user who can write here could redirect this process to another server, or to other files.
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise EmbeddedServerError(
                f"The folder {self.path} belongs to another user, or other users may write to it. "
                "Use another folder."
            )
        if entries and _START_LOCK not in entries:
            raise EmbeddedServerError(
                f"The folder {self.path} holds other files. Use a new or an empty folder."
            )

    def _check_parents(self) -> None:
        for folder in reversed([self.path, *self.path.parents]):
            if folder.exists() and not folder.is_dir():
                raise EmbeddedServerError(f"{folder} is not a folder.")
        closed = self._user.closed_folder_above(self.path / "data")
        if closed is not None:
            raise EmbeddedServerError(
                f"The server runs as {self._user.name}, because PostgreSQL does not run as root, but "
                f"{closed} is closed to that user. Use another folder, for example "
                f"{SYSTEM_FOLDER / self.path.name}."
            )

    @contextmanager
    def _lock(self, name: str, kind: int) -> Iterator[int]:
        try:
            descriptor = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise EmbeddedServerError(f"The folder {self.path} cannot be used: {error}.") from error
        try:
            fcntl.flock(descriptor, kind)
            yield descriptor
        finally:
            os.close(descriptor)

    def _hide_from_git(self) -> None:
        """Ignore the folder in Git: a database should not be committed."""
        with suppress(OSError), (self.path / _GITIGNORE).open("x") as file:
            file.write("*\n")

    def _ensure_watcher(self, cluster: Cluster) -> None:
        with (
            suppress(BlockingIOError),
            self._lock(_WATCHER_LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB) as lock,
        ):
            # This process got the lock, so no watcher runs. The new watcher inherits the lock with the
            # descriptor, so two can never be started.
            run_as = self._user.run_as
            socket_folder = cluster.short_socket_folder()
            subprocess.run(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    watcher.__file__,
                    str(self.path / _USERS_LOCK),
                    str(lock),
                    str(socket_folder or ""),
                    str(self.path) if self._remove else "",
                    str(run_as.get("user", "")),
                    str(run_as.get("group", "")),
                    *cluster.stop_command(),
                ],
                check=True,
                env=server_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[lock],
            )

    def _free_port(self) -> int | None:
        if self._port != 0:
            return self._port
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            return port

    def _check_settings(self, cluster: Cluster, running: Running) -> None:
        """Raise an error if the running server lacks a requested setting: it keeps its own settings."""
        command_line = cluster.options_of_running()
        missing = [
            f"{name}={value}"
            for name, value in self._parameters.items()
            if f'"{name}={value}"' not in command_line
        ]
        if self._port is not None and (not running.listens or self._port not in {0, running.port}):
            missing.append(f"port={self._port}")
        if missing:
            raise ConfigurationError(
                f"The server in {self.path} is already in use without {', '.join(missing)}. "
                "Stop the processes that use it first, or use another folder."
            )


def _absolute(path: str | os.PathLike[str]) -> Path:
    try:
        return Path(path).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise EmbeddedServerError(f"The folder {os.fspath(path)!r} cannot be used: {error}.") from error


def _default_path(user: ServerUser) -> Path:
    if user.drops_root:
        return SYSTEM_FOLDER / "embedded"
    try:
        import platformdirs  # noqa: PLC0415 - part of the extra
    except ImportError as error:
        raise MissingExtraError(
            "An embedded PostgreSQL needs platformdirs: pip install 'graphile-worker[embedded]'"
        ) from error
    try:
        return platformdirs.user_data_path("graphile-worker") / "embedded"
    except RuntimeError as error:
        raise EmbeddedServerError(
            "This user has no home folder for an embedded server. Pass a folder: embedded:/some/folder"
        ) from error
