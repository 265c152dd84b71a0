"""Hooks of mkdocs (mkdocs.yml): files of the repository as pages, links between files as links between pages.

Invariant: a link that works between files of the repository works between pages of the site, or is no link there.
"""

import csv
import posixpath
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "docs/where_is.tsv": "where_is.md",
}
"""Files that become pages of another name."""
_SOURCES: Final = {page: source for source, page in PAGES.items()}
_LINK: Final = re.compile(r"\[([^\[\]]+)\]\(([\w./-]+)(#[\w-]*)?\)")
_CSS_LOADS: Final = re.compile(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^)\"';]+")
_FENCE: Final = re.compile(r"^(```\w+) (?!title=).*$", re.M)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are not in docs/."""
    if (table := files.get_file_from_path("where_is.tsv")) is not None:
        files.remove(table)
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_table(text) if source.endswith(".tsv") else text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links between files become links between pages; what tests/first_hour.py reads behind ```sh is no option here."""
    here = page.file.src_uri
    if "```mermaid" in markdown:
        raise PluginError(f"{here}: a browser would need mermaid's script from elsewhere; draw it as text")
    folder = posixpath.dirname(_SOURCES.get(here, f"docs/{here}"))

    def link(found: re.Match[str]) -> str:
        words, target, anchor = found.group(1), found.group(2), found.group(3) or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        goal = PAGES.get(path, path.removeprefix("docs/"))
        if goal == path and (ROOT / path).exists():  # no page
            url = config.extra["source_url"]
            if url:
                return f"[{words}]({url}/{path}{anchor})"
            return f"`{path}`" if path.endswith(words.strip("`")) else f"{words} (`{path}`)"
        if words.endswith(".md") and (ROOT / path).is_file():
            words = (ROOT / path).read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")  # its title
        return f"[{words}]({posixpath.relpath(goal, posixpath.dirname(here) or '.')}{anchor})"

    return _FENCE.sub(r"\1", _LINK.sub(link, markdown))


def on_post_build(config: Any) -> None:
    """Raises PluginError if a page would load something from another server."""
    for path in sorted(Path(config.site_dir).rglob("*.html")):
        loads = _Loads()
        loads.feed(path.read_text(encoding="utf-8"))
        if loads.foreign:
            raise PluginError(f"{path.name} loads {', '.join(loads.foreign)}: the site has to work without internet")
    for path in sorted(Path(config.site_dir).rglob("*.css")):
        if foreign := _CSS_LOADS.findall(path.read_text(encoding="utf-8")):
            raise PluginError(f"{path.name} loads {', '.join(foreign)}: the site has to work without internet")


class _Loads(HTMLParser):
    """Addresses of other servers that a page fetches from by itself; links (`a`) are left to the reader."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a" or ("rel", "canonical") in attrs:
            return
        for name, value in attrs:
            if name in ("src", "srcset", "href", "data") and re.match(r"(https?:)?//", value or ""):
                self.foreign.append(f"<{tag} {name}={value}>")


def _table(text: str) -> str:
    """docs/where_is.tsv as a page."""
    rows = list(csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))
    lines = [f"| {row['question'][0].upper()}{row['question'][1:]} | {_place(row['file'])} |" for row in rows]
    return "\n".join([_WHERE_IS, "| question | file |", "|---|---|", *lines, ""])


def _place(file: str) -> str:
    return "no single file" if file == "-" else f"`{file}`"


_WHERE_IS: Final = """# Where is what in the code

Questions of people who had not seen the repository, and the file that answers each. A test looks whether they find it
by typing their words into a file finder (`tests/unit/test_where_is.py`). The folders: [architecture](architecture.md).
"""
