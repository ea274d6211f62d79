"""``python -m graphile_worker`` is the command."""

from graphile_worker.cli import main

main()
