"""Check that SQL files are ASCII: a server rejects characters that a database's encoding does not have."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def not_ascii(path: Path) -> list[str]:
    """Return the lines of one file that contain other characters."""
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if not line.isascii()
    ]


def main() -> None:
    """Exit 1 with a line for each offender."""
    files = sorted((ROOT / "src").rglob("*.sql"))
    found = [line for path in files for line in not_ascii(path)]
    print("\n".join(found) or f"{len(files)} SQL files: all of them are ASCII")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
