"""Hooks for mkdocs: pages that include files, and links to files outside of docs/.

The comment ``<!-- include: CHANGELOG.md -->`` includes a file, with a path from the root of the repository.
The text from there to ``<!-- end -->`` is for readers outside of the site, and is removed.

A link to a file outside of docs/ becomes a link to the page that includes the file. If there is none, it
becomes a link to a generated page that shows the file. So the same links work on GitHub, in an editor and on
the site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r"^<!-- include: (\S+) -->\n(?:.*?^<!-- end -->\n)?", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)#\s:]+)(#[^)\s]*)?\)")
PAGES = {
    "ARCHITECTURE.md": "about/architecture.md",
    "CHANGELOG.md": "about/changelog.md",
    "CONTRIBUTING.md": "about/contributing.md",
    "README.md": "index.md",
}
"""The page of each root file that has one."""
LANGUAGES = {".md": "markdown", ".py": "python", ".sql": "sql", ".toml": "toml", ".yaml": "yaml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Generate a page for each file outside of docs/ that a page links to."""
    sources = [file for file in files if file.is_documentation_page()]
    for file in sources:
        text = INCLUDE.sub(_included, Path(file.abs_src_path or "").read_text(encoding="utf-8"))
        for _, target, _ in LINK.findall(text):
            for outside in {_outside(file.src_uri, target), _outside("../README.md", target)} - {None}:
                uri = f"source/{outside}.md"
                if outside not in PAGES and files.get_file_from_path(uri) is None:
                    files.append(File.generated(config, uri, content=_shown(str(outside))))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Include the files that the page names, and redirect its links out of docs/."""
    here = page.file.src_uri
    if here.startswith("source/"):
        return markdown
    included = next((f"../{path}" for path in INCLUDE.findall(markdown) if path in PAGES), here)
    text = INCLUDE.sub(_included, markdown)

    def redirect(link: re.Match[str]) -> str:
        # A link in an included file is relative to that file.
        path = _resolve(included, link[2])
        outside = _outside(included, link[2])
        if outside is not None:
            path = PAGES.get(outside, f"source/{outside}.md")
        return f"{link[1]}{os.path.relpath(path, Path(here).parent)}{link[3] or ''})"

    return LINK.sub(redirect, text)


def _resolve(page: str, target: str) -> str:
    """Return the path that a link leads to, relative to docs/."""
    return os.path.relpath(ROOT / "docs" / Path(page).parent / target, ROOT / "docs")


def _outside(page: str, target: str) -> str | None:
    """Return the path from the root, if the link leads to a file outside of docs/."""
    path = os.path.normpath(Path("docs") / _resolve(page, target))
    is_outside = not path.startswith(("docs" + os.sep, "..")) and (ROOT / path).is_file()
    return Path(path).as_posix() if is_outside else None


def _included(match: re.Match[str]) -> str:
    return (ROOT / match[1]).read_text(encoding="utf-8")


def _shown(path: str) -> str:
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"# {path}\n\n````{language}\n{(ROOT / path).read_text(encoding='utf-8')}````\n"
