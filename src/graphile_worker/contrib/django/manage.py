"""``python -m graphile_worker.contrib.django.manage``: manage.py, for processes that a supervisor starts."""

from __future__ import annotations

import sys
from pathlib import Path

from django.core.management import execute_from_command_line

if __name__ == "__main__":
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    execute_from_command_line(["manage.py", *sys.argv[1:]])
