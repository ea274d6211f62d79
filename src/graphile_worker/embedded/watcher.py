"""Stops an embedded server when its last user is gone. A program, not a module to import.

Run with the standard library alone, so that it starts fast and stays small. Its arguments: the lock file of
the users, the descriptor of the watcher's own lock (inherited, already held), the socket's folder if it has
one of its own, the server's folder if it is to be removed, the user and group to stop the server as if it is
not us, and the command that stops it.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path


def main(
    users_lock: str,
    watcher_lock: str,
    socket_folder: str,
    server_folder: str,
    user: str,
    group: str,
    *stop_command: str,
) -> None:
    """Wait for the exclusive lock, stop the server, let go of both locks."""
    # Detached twice, so that the watcher is nobody's child and outlives whoever started it.
    if os.fork():
        os._exit(0)
    os.chdir("/")
    users = os.open(users_lock, os.O_RDWR)
    fcntl.flock(users, fcntl.LOCK_EX)
    if _is_still_there(users, users_lock):
        subprocess.run(
            stop_command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            user=int(user) if user else None,
            group=int(group) if group else None,
            extra_groups=[] if user else None,
        )
        for folder in filter(None, (socket_folder, server_folder)):
            shutil.rmtree(folder, ignore_errors=True)
    # In this order: a newcomer that waits for the users' lock must not find the watcher's still held and take
    # a watcher that is about to end for one that watches.
    os.close(int(watcher_lock))
    os.close(users)


def _is_still_there(descriptor: int, path: str) -> bool:
    """Whether the folder is the one we watch, and not a new one where the old one was deleted."""
    try:
        return os.path.samestat(os.fstat(descriptor), Path(path).stat())
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    main(*sys.argv[1:])
