"""Check sizes outside the tests: at most 600 lines per module, and 60 per function."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_MODULE_LINES = 600
MOST_FUNCTION_LINES = 60


def too_long(path: Path) -> list[str]:
    """Return a line for the module and each function that is too long. Docstrings do not count."""
    text = path.read_text()
    name = path.relative_to(ROOT)
    lines = text.count("\n")
    found = [f"{name}: {lines} lines"] if lines > MOST_MODULE_LINES else []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        size = (node.end_lineno or node.lineno) - node.lineno + 1
        size -= (ast.get_docstring(node, clean=False) or "").count("\n")
        if size > MOST_FUNCTION_LINES:
            found.append(f"{name}:{node.lineno}: {node.name} has {size} lines")
    return found


def main() -> None:
    """Exit 1 with a line for each offender."""
    modules = [
        path
        for folder in ("src", "tools", "examples", "benchmarks", "chaos")
        for path in (ROOT / folder).rglob("*.py")
    ]
    found = [line for path in sorted(modules) for line in too_long(path)]
    print("\n".join(found) or f"{len(modules)} modules: no module and no function is too long")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
