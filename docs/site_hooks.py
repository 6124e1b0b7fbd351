"""What MkDocs cannot do by itself: pages from the code, links into the repository, formulas.

MkDocs calls the functions ``on_...`` while it builds the manual (``make docs``).
"""

from __future__ import annotations

import html
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
ROOT = DOCS.parent
if str(DOCS) not in sys.path:
    sys.path.insert(0, str(DOCS))

import reference_pages  # noqa: E402 - a neighbour of this file, which belongs to no package

PLUGINS = {f"plugins/{p.parent.name}.md": p for p in sorted(ROOT.glob("plugins/*/README.md"))}
# Package descriptions are read elsewhere, too: their links into the repository are absolute.
HERE = re.compile(
    r"https://(?:github\.com/bflcore/bflcore/(?:blob|tree)|raw\.githubusercontent\.com/bflcore/bflcore)"
    r"/main/"
)
FENCE = re.compile(r"^( *```.*?^ *```[^\n]*$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FORMULA = re.compile(
    r'<(span|div) class="arithmatex">(?:\\\(|\\\[)(.*?)(?:\\\)|\\\])</\1>', re.DOTALL
)
GENERATED = reference_pages.pages()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace each folder of the navigation by its pages."""
    config.nav = _expanded(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference pages and the plugins' README files."""
    for path, text in GENERATED.items():
        files.append(File.generated(config, path, content=text))
    for path, readme in PLUGINS.items():
        files.append(File.generated(config, path, content=readme.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at pages of the manual; leave the text of links to other files."""
    here = page.file.src_uri
    pieces = FENCE.split(markdown)
    return "".join(
        piece if at % 2 else LINK.sub(lambda found: _link(found, here, files), piece)
        for at, piece in enumerate(pieces)
    )


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Typeset formulas as MathML, which browsers show without any script."""

    def typeset(found: re.Match[str]) -> str:
        display = "block" if found[1] == "div" else "inline"
        return convert(html.unescape(found[2]).strip(), display=display)

    return FORMULA.sub(typeset, content)


def _expanded(nav: Any) -> Any:
    if isinstance(nav, list):
        return [_expanded(entry) for entry in nav]
    if isinstance(nav, dict):
        return {title: _expanded(entry) for title, entry in nav.items()}
    return _pages_of(nav) if nav.endswith("/") else nav


def _pages_of(folder: str) -> list[str]:
    written = (f"{folder}{path.name}" for path in (DOCS / folder).glob("*.md"))
    made = (path for path in (*GENERATED, *PLUGINS) if path.startswith(folder))
    return sorted({*written, *made})


def _link(found: re.Match[str], here: str, files: Files) -> str:
    """Return a link as the page `here` needs it.

    Where the manual lacks the target, an absolute link stays, and of a relative one its text.
    """
    picture, text, target = found.groups()
    path, hash_sign, anchor = target.partition("#")
    absolute = HERE.match(path)
    if not path or (re.match(r"[a-z]+:", path) and not absolute):
        return found[0]
    source = PLUGINS[here].relative_to(ROOT) if here in PLUGINS else Path("docs", here)
    within = path[absolute.end() :] if absolute else posixpath.join(source.parent.as_posix(), path)
    if (page := _page_of(posixpath.normpath(within))) is None:
        return found[0] if absolute else text
    if files.get_file_from_path(page) is None:
        return found[0]  # MkDocs says that it does not exist
    there = posixpath.relpath(page, posixpath.dirname(here) or ".")
    return f"{picture}[{text}]({there}{hash_sign}{anchor})"


def _page_of(path: str) -> str | None:
    """Return the page or file of the manual that shows a file or folder of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    plugin = re.fullmatch(r"plugins/([a-z]+)(/README\.md)?", path)
    return f"plugins/{plugin[1]}.md" if plugin else {"README.md": "index.md"}.get(path)
