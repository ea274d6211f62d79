"""Entry point of ``python -m graphile_worker``, which is the same as the command ``graphile-worker``."""

from graphile_worker.cli import main

main()
