"""Find phrases that read like a translation, and suggest a replacement."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "docs", "tests", "examples", "benchmarks", "chaos", "tools")
SUFFIXES = {".py", ".sql", ".md", ".mjs", ".toml", ".yml"}
LIBRARIES = (
    "asyncpg|pydantic|psycopg|msgspec|click|rich|asyncio|pytest|hypothesis|npm|Node|Rust|PostgreSQL|PgBouncer"
)
OFF = re.compile(r"(?:#|--) words: .+")
"""The mark of a line that is a quotation. The rest of the comment gives the reason."""

ADVICE = {
    r"whoever|whomever": "name the actor: callers, the worker, the task",
    r"somebody|someone else's|somebody's": "name the actor: another worker, another transaction",
    r"nobody": "name the actor: no worker, no caller",
    r"what becomes of": "the outcome of",
    r"in place of": "instead of",
    r"all the same": "still",
    r"but for": "except for, or apart from",
    r"(?<!there )is no (?!longer\b|more\b|one\b)\w+": "is not a",
    r"(?<!there )are no (?!longer\b|more\b)\w+": "are not",
    rf"(?:an?|the|some|one) \w+ of (?:{LIBRARIES})'s": "an asyncpg connection, not a connection of asyncpg's",
    r"(?:an?|some|any|one|each|every) [\w-]+ of (?:ours|theirs|its own's|the user's|the caller's|users')": (
        "a Python worker, the caller's pool: an X from Y, not an X of Y's"
    ),
    r"in hand": "claimed",
    r", for (?:nobody|it|they|there|he|we|a|the) (?:\w+ )?(?:is|are|was|has|have|may|can|would|knows)": (
        "because"
    ),
    r"comes? to nothing": "has no effect",
    r"(?:keep|keeps) house": "run maintenance",
    r"mourns?|buries|weather": "no metaphors",
}
BANNED = {
    re.compile(rf"(?<![\w'`-])(?:{phrase})(?![\w-])", re.IGNORECASE): advice
    for phrase, advice in ADVICE.items()
}


def find(path: Path) -> list[str]:
    """Return a line for each banned phrase in one file."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if OFF.search(line):
            continue
        # Names in code count too: test_nobody_waits reads as "test nobody waits".
        text = line.replace("_", " ")
        for phrase, advice in BANNED.items():
            if match := phrase.search(text):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match.group()!r}; write: {advice}")
    return found


def main() -> None:
    """Exit 1 with a line for each offender."""
    only = [Path(name).resolve() for name in sys.argv[1:]]
    files = [
        ROOT / name
        for name in ("README.md", "CHANGELOG.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "Makefile")
    ]
    for folder in FOLDERS:
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    files = [path for path in files if path != Path(__file__).resolve() and "__pycache__" not in path.parts]
    if only:
        files = [path for path in files if any(path.is_relative_to(name) for name in only)]
    found = [line for path in sorted(files) for line in find(path)]
    print("\n".join(found) or f"{len(files)} files: no phrase that reads like a translation")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
