"""Stop an embedded server when its last user is gone. A program, not a module to import.

It uses only the standard library, so that it starts fast and stays small. Its arguments are:

- the users' lock file,
- the descriptor of the watcher's own lock (inherited, already held),
- the socket's folder, if it is a separate one,
- the server's folder, if it must be removed,
- the user and the group that stop the server, if not the current ones,
- the command that stops the server.
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
    """Wait for the exclusive lock, stop the server, and release both locks."""
    # Fork a second time, so that the watcher has no parent and outlives the process that started it.
    if os.fork():
        os._exit(0)
    os.chdir("/")
    users = os.open(users_lock, os.O_RDWR)
    fcntl.flock(users, fcntl.LOCK_EX)
    if _is_same_file(users, users_lock):
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
    # In this order: a new user that gets the users' lock must not find the watcher's lock still held, and so
    # assume that this watcher keeps watching.
    os.close(int(watcher_lock))
    os.close(users)


def _is_same_file(descriptor: int, path: str) -> bool:
    """Return whether the folder is the watched one, not a new folder that replaced a deleted one."""
    try:
        return os.path.samestat(os.fstat(descriptor), Path(path).stat())
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    main(*sys.argv[1:])
