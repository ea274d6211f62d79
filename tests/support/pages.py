"""Run the Python examples of documentation pages."""

from __future__ import annotations

import ast
import inspect
import re
from typing import TYPE_CHECKING, Any

from support.postgres import ROOT

if TYPE_CHECKING:
    from pathlib import Path

RECOVERY_OPTIONS = (
    "recovery",
    "heartbeat_interval",
    "lease",
    "fast_lease",
    "task_leases",
    "recovery_delay",
    "refund_attempt_on_recovery",
    "on_recovery",
    "exit_if_stuck",
)
"""The worker options that the reliability page has, instead of the page on running workers."""


def python_blocks(page: Path) -> list[str]:
    """Return the Python examples of a page, in order."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


class Page:
    """A documentation page whose Python examples run in order, as one program."""

    def __init__(self, name: str = "", *, blocks: list[str] | None = None, **names: Any) -> None:
        self._examples = iter(python_blocks(ROOT / "docs" / name) if blocks is None else blocks)
        self.names = names

    async def run(self, count: int = 1) -> dict[str, Any]:
        """Run the next examples, and return the names that all examples so far defined."""
        for _ in range(count):
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            code = compile(next(self._examples), "<docs>", "exec", flags, dont_inherit=True)
            result = eval(code, self.names)
            if inspect.iscoroutine(result):
                await result
        return self.names

    def skip(self) -> str:
        """Return the text of the next example without running it."""
        return next(self._examples)

    def assert_done(self) -> None:
        """Fail if the page has more examples."""
        assert next(self._examples, None) is None, "an example has no test"
