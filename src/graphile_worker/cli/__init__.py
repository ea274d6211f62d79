"""The ``graphile-worker`` command."""

from __future__ import annotations

import signal
import sys

import click

from graphile_worker.cli import logs
from graphile_worker.cli.command import root
from graphile_worker.cli.exits import end_by
from graphile_worker.errors import GraphileWorkerError


def main() -> None:
    """Run the command; a mistake of the user's is a sentence, not a traceback."""
    try:
        sys.exit(root(prog_name="graphile-worker", standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (GraphileWorkerError, OSError) as error:  # such as a folder that may not be read, or a full disk
        logs.report(error)
        sys.exit(1)
    except (click.Abort, KeyboardInterrupt):
        end_by(signal.SIGINT)
