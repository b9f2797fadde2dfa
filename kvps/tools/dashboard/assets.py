"""The dashboard: the model of a job, and the files of the page that draws it."""

from __future__ import annotations

from functools import cache
from importlib import resources

from kvps.tools.dashboard.model import JobModel

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


@cache
def read(path: str) -> tuple[str, bytes]:
    """Return the content type and the content of a file of the dashboard.

    Raises:
        KeyError: if there is none at this path.
    """
    name, kind = FILES[path]
    return kind, (resources.files("kvps.tools.dashboard") / "page" / name).read_bytes()


class Dashboard(JobModel):
    """The dashboard that a scheduler serves: the model of its job, and the files of the page."""

    def file(self, path: str) -> tuple[str, bytes] | None:
        """Return the content type and the content of the file at ``path``; None if there is none."""
        return read(path) if path in FILES else None
