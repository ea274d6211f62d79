"""The ``graphile-worker`` command."""

from __future__ import annotations

import signal
import sys
import threading


def main() -> None:
    """Run the command; a mistake of the user's is a sentence, not a traceback."""
    # It takes a while to import all that is needed. Ctrl-C in between ends it as it ends any program, unless
    # whoever started us wants it to be ignored.
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if raises and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    import click  # noqa: PLC0415

    from graphile_worker.cli import logs  # noqa: PLC0415
    from graphile_worker.cli.command import root  # noqa: PLC0415
    from graphile_worker.cli.exits import end_by  # noqa: PLC0415
    from graphile_worker.errors import GraphileWorkerError  # noqa: PLC0415

    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL and raises:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(root(prog_name="graphile-worker", standalone_mode=False))
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption) and error.option_name == "--concurrency":
            # So it is called in Python; here it has the name that Graphile Worker gave it.
            error = click.UsageError(f"{error.message} Did you mean '--jobs'?", ctx=error.ctx)
        error.show()
        sys.exit(error.exit_code)
    except (GraphileWorkerError, OSError) as error:  # such as a folder that may not be read, or a full disk
        logs.report(error)
        sys.exit(1)
    except (click.Abort, KeyboardInterrupt):
        end_by(signal.SIGINT)
