"""Run the command: for the program ``graphile-worker``, and inside the command line of a web framework."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import click

from graphile_worker.cli import logs
from graphile_worker.cli.command import root
from graphile_worker.cli.exit_codes import exit_by_signal
from graphile_worker.cli.settings import HOST, Host
from graphile_worker.errors import GraphileWorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphile_worker.app import App


def run_command(arguments: Sequence[str], name: str) -> int:
    """Run the command, and return its exit status. Print the user's mistakes as sentences.

    Args:
        arguments: What the user wrote after the name of the command.
        name: The name of the command, for its messages.
    """
    try:
        return int(root.main(list(arguments), prog_name=name, standalone_mode=False) or 0)
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption) and error.option_name == "--concurrency":
            # The option is called concurrency in Python; the flag has Graphile Worker's name.
            error = click.UsageError(f"{error.message} Did you mean '--jobs'?", ctx=error.ctx)
        error.show()
        return error.exit_code
    except (GraphileWorkerError, OSError) as error:  # such as an unreadable folder, or a full disk
        logs.report(error)
        return 1
    except (click.Abort, KeyboardInterrupt):
        exit_by_signal(signal.SIGINT)


def host_command(find_app: Callable[[], App], *, name: str, program: str) -> click.Command:
    """Return this command as one of another program's command line. It works for one app.

    Args:
        find_app: Returns the app. It is called when the command runs.
        name: The name of the command.
        program: The module that Python runs for the other command line, such as ``flask``. Worker processes
            are started with it.
    """

    def run(arguments: tuple[str, ...]) -> None:
        # Not a parameter, because Litestar passes its own objects to parameters with some names.
        ctx = click.get_current_context()
        token = HOST.set(Host(find_app(), program))
        try:
            ctx.exit(run_command(arguments, ctx.command_path))
        finally:
            HOST.reset(token)

    return click.Command(
        name,
        callback=run,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        help="Run a worker, and manage its queue: see the option --help of this command.",
        short_help="Run a worker, and manage its queue.",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    )
