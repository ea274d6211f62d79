"""Stops an embedded server when its last user is gone. A program, not a module to import.

Run with the standard library alone, so that it starts fast and stays small. Its arguments: the lock
file of the users, the descriptor of the watcher's own lock (inherited, already held), and the
command that stops the server, with the user and group to run it as.
"""

import fcntl
import os
import subprocess
import sys


def main(users_lock: str, watcher_lock: str, user: str, group: str, *stop_command: str) -> None:
    """Wait for the exclusive lock, stop the server, let go of both locks."""
    # Detached twice, so that the watcher is nobody's child and outlives whoever started it.
    if os.fork():
        os._exit(0)
    os.chdir("/")
    users = os.open(users_lock, os.O_RDWR)
    fcntl.flock(users, fcntl.LOCK_EX)
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
    # In this order: a newcomer that waits for the users' lock must not find the watcher's still held
    # and take a watcher that is about to end for one that watches.
    os.close(int(watcher_lock))
    os.close(users)


if __name__ == "__main__":
    main(*sys.argv[1:])
