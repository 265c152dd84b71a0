"""Pages for browsers: one frame, style sheet and script, both for self-contained files and for served pages.

Invariant: every text is escaped; a served page runs no script and loads nothing but its own server's two files.
"""

from importlib.resources import files
from typing import Any, Final

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from swarm.printable import printable
from swarm.telemetry.page_server import Page

EVERY_MS: Final = 2000  # a served page asks for what changed
SECURITY: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_KINDS: Final = {"style.css": "text/css; charset=utf-8", "page.js": "text/javascript; charset=utf-8"}


def templates(package: str) -> Environment:
    """Returns the environment for the templates of a package, which extend `page.html`.

    Each template must be rendered with `root`: the path, with final slash, under which style sheet and script are
    served; "" for a self-contained file, which includes both.
    """
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("swarm.pages")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    ours: dict[str, Any] = environment.globals  # jinja2 names only its own in the type
    ours |= {"style": Markup(_read("style.css")), "script": Markup(_read("page.js")), "every_ms": EVERY_MS}
    return environment


def html_page(html: str) -> Page:
    """Returns an HTML page to serve, with the security headers."""
    return Page(body=html.encode(), kind="text/html; charset=utf-8", headers=SECURITY)


def asset(name: str) -> Page | None:
    """Returns the style sheet or the script to serve; None for another name."""
    kind = _KINDS.get(name)
    return None if kind is None else Page(body=_read(name).encode(), kind=kind, headers=SECURITY)


def _shown(value: Any) -> Any:
    """Returns a value as a page shows it, text made printable; only our own charts are markup."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _read(name: str) -> str:
    return (files("swarm.pages") / "static" / name).read_text(encoding="utf-8")
