"""The ``graphile-worker`` command.

`command` declares the verbs that run workers; the other verbs are declared in the modules that carry them
out, such as `list_jobs` and `maintenance`. `settings` declares the settings and merges flags, environment and
files; `flags` turns settings into flags. `printing` and `times` format output, and `live` draws the screen of
``top``.

Only the entry point imports this package: the library works without it. The package uses the public API,
`_client` and the modules that load tasks, but never the database queries, except through `WorkerUtils`.
"""

from __future__ import annotations

import signal
import sys
import threading


def main() -> None:
    """Run the command, and print the user's mistakes as sentences instead of tracebacks."""
    # The imports take a while. Until they are done, Ctrl-C ends the process without a traceback, unless the
    # parent process made it ignore SIGINT.
    raises_interrupt = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if raises_interrupt and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from graphile_worker.cli.entry import run_command  # noqa: PLC0415

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL and raises_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run_command(sys.argv[1:], "graphile-worker"))
