"""Pages of the documentation, as programs."""

from __future__ import annotations

import ast
import inspect
import re
from typing import TYPE_CHECKING, Any

from support.postgres import ROOT

if TYPE_CHECKING:
    from pathlib import Path


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


class Page:
    """A page of the documentation whose Python examples run in order, as one program."""

    def __init__(self, name: str, **names: Any) -> None:
        self._examples = iter(python_blocks(ROOT / "docs" / name))
        self.names = names

    async def run(self, count: int = 1) -> dict[str, Any]:
        """Run the next examples; the names that they left."""
        for _ in range(count):
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            code = compile(next(self._examples), "<docs>", "exec", flags, dont_inherit=True)
            result = eval(code, self.names)
            if inspect.iscoroutine(result):
                await result
        return self.names

    def skip(self) -> str:
        """The text of the next example, which is not run."""
        return next(self._examples)

    def assert_done(self) -> None:
        assert next(self._examples, None) is None, "an example has no test"
