"""The dashboard's files and the headers that they are sent with: nothing from another host, no inline script."""

from __future__ import annotations

from functools import cache
from importlib import resources

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/format.js": ("format.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/uplot.css": ("uplot.css", "text/css; charset=utf-8"),
    "/uplot.js": ("uplot.js", "text/javascript; charset=utf-8"),
}
"""By path: the file, and its content type."""
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Sent with every answer."""


@cache
def read(path: str) -> tuple[str, bytes]:
    """Return the content type and the content of a file of the dashboard.

    Raises:
        KeyError: if there is none at this path.
    """
    name, kind = FILES[path]
    return kind, (resources.files("kvps.observe") / "page" / name).read_bytes()
