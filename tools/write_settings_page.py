"""Write the tables of docs/reference/settings.md from the option declarations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from graphile_worker._worker.option_kinds import Seconds
from graphile_worker._worker.run_options import OPTIONS, Option
from graphile_worker.cli.settings import SETTINGS, Setting

if TYPE_CHECKING:
    from collections.abc import Iterable

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "settings.md"


def settings_table() -> str:
    """Return the table of all settings of the command."""
    return table(("setting", "flag", "environment", "default", "meaning"), map(_setting_row, SETTINGS))


def python_table() -> str:
    """Return the table of the options of `run` that the command does not have."""
    rows = (
        (f"`{name}`", _shown_default(option), _meaning(option.help, option.details))
        for name, option in OPTIONS.items()
        if not option.key
    )
    return table(("option", "default", "meaning"), rows)


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    headings = list(headings)
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def page(text: str) -> str:
    """Return the page with up-to-date tables."""
    for name, content in (("settings", settings_table()), ("python-options", python_table())):
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{content}\n{end}{after}"
    return text


def _setting_row(setting: Setting) -> tuple[str, ...]:
    meaning = _meaning(setting.description, setting.details)
    if setting.argument not in {None, setting.name}:
        meaning += f" `{setting.argument}` in Python."
    default = f"`{setting.shown_default}`" if setting.shown_default else setting.default_text
    flags = ", ".join(f"`{flag}`" for flag in setting.flags)
    return f"`{setting.name}`", flags, f"`{setting.environment}`", default, meaning


def _shown_default(option: Option) -> str:
    if option.default is None:
        return option.default_text
    if isinstance(option.kind, Seconds):
        return f"{option.default:g} s"
    return f"`{option.default!r}`"


def _meaning(description: str, details: str) -> str:
    return f"{description} {details}".strip()


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text()))
    print(f"Wrote {PAGE}")


if __name__ == "__main__":
    main()
