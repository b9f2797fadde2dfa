"""The site of the documentation as it is built: links, and what a real browser makes of each page."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest

from tests.support.webdriver import Browser, open_browser

ROOT = Path(__file__).resolve().parents[2]
PHONE, TABLET, DESKTOP = (390, 900), (820, 1100), (1400, 1000)
WIDER = """
const width = document.documentElement.clientWidth;
const scrolls = one => one && (getComputedStyle(one).overflowX !== 'visible' || scrolls(one.parentElement));
return [...document.querySelectorAll('article *')]
    .filter(one => one.getBoundingClientRect().right > width + 1 && !scrolls(one.parentElement.closest('article *')))
    .map(one => one.tagName + ': ' + one.textContent.trim().slice(0, 60))
    .concat(document.documentElement.scrollWidth > width ? ['the page is wider'] : []).slice(0, 5);
"""
"""Return the elements that stand over the edge of the page, and are in no frame that scrolls."""
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]


class Quiet(SimpleHTTPRequestHandler):
    """Serves files, and logs nothing."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the built pages."""
    for module in ("sphinx", "furo", "myst_parser", "sphinx_copybutton", "sphinx_design"):
        pytest.importorskip(module, reason="the extra kvps[docs] is not installed: make docs")
    folder = tmp_path_factory.mktemp("site")
    flags = ("-n", "-W", "--keep-going", "-q", "-b", "html", "-d", str(folder / ".doctrees"))
    made = subprocess.run(
        [sys.executable, "-m", "sphinx", *flags, str(ROOT / "docs"), str(folder / "html")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the pages are served."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("browser")) as opened:
        opened.open("about:blank")
        opened.requests()  # those of the page with which a browser starts
        yield opened


class Links(HTMLParser):
    """The addresses and the anchors of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take note of a tag."""
        given = dict(attrs)
        if anchor := given.get("id") or (tag == "a" and given.get("name")):
            self.anchors.add(str(anchor))
        for name in ("href", "src"):
            if address := given.get(name):
                self.addresses.append(address)


def pages_of(site: Path) -> list[str]:
    """Return the pages that are written by hand, and not the generated source and indices."""
    found = [path.relative_to(site).as_posix() for path in site.rglob("*.html")]
    return sorted(item for item in found if not item.startswith("_modules"))


def test_every_link_leads_somewhere(site: Path) -> None:
    links = {page: Links(site / page) for page in pages_of(site)}
    dead = []
    for page, found in links.items():
        for address in found.addresses:
            parts = urlsplit(urljoin(f"http://here/{page}", address))
            path = unquote(parts.path).lstrip("/") or "index.html"
            if parts.netloc != "here" or parts.scheme != "http":
                continue
            target = links.get(path)
            if not (site / path).exists() or (
                target is not None and parts.fragment and unquote(parts.fragment) not in target.anchors
            ):
                dead.append(f"{page}: {address}")
    assert not dead


def test_the_api_has_source_and_errors(site: Path) -> None:
    text = (site / "api" / "stores.html").read_text("utf-8")
    for name in ("create", "KVStore.push", "KVStore.pull", "KVStore.pushpull", "EmbeddingTable"):
        assert f'id="kvps.{name}"' in text, name
    assert "_modules/kvps/store/kvstore.html" in text
    assert text.count("Raises") > 10


def test_pages_load_quietly_and_fit_a_phone(site: Path, address: str, browser: Browser) -> None:
    browser.size(*PHONE)
    faults = []
    for page in pages_of(site):
        browser.open(f"{address}/{page}")
        faults += [f"{page}: {line}" for line in browser.console()]
        abroad = [request for request in browser.requests() if not request.startswith((address, "data:"))]
        faults += [f"{page} asks {item}" for item in abroad]
        faults += [f"{page}: {item}" for item in browser.run(WIDER)]
    assert not faults


@pytest.mark.parametrize("size", [TABLET, DESKTOP], ids=["tablet", "desktop"])
def test_pages_fit_larger_screens(site: Path, address: str, browser: Browser, size: tuple[int, int]) -> None:
    browser.size(*size)
    faults = []
    for page in ("index.html", "quickstart.html", "concepts/consistency.html", "stores.html"):
        browser.open(f"{address}/{page}")
        faults += [f"{page}: {item}" for item in browser.run(WIDER)]
    assert not faults


@pytest.mark.parametrize(("word", "page"), [("EpochChanged", "checkpoints"), ("staleness", "stores")])
def test_search_finds(address: str, browser: Browser, word: str, page: str) -> None:
    browser.size(*DESKTOP)
    browser.open(f"{address}/search.html?q={word}")
    hrefs = browser.until(
        "const found = [...document.querySelectorAll('#search-results li a')].map(one => one.href);"
        f"return found.some(one => one.includes('/{page}.html')) && found"
    )
    assert any(f"{page}.html" in href for href in hrefs)
    assert not browser.console()
    assert not [request for request in browser.requests() if not request.startswith((address, "data:"))]


def test_diagrams_follow_the_button_of_the_theme(address: str, browser: Browser) -> None:
    browser.size(*DESKTOP)
    color = "return getComputedStyle(document.querySelector('svg.kv')).getPropertyValue('--kv-ink')"
    browser.prefer("light")
    browser.open(f"{address}/concepts/consistency.html")
    assert browser.run("return document.querySelectorAll('article svg.kv').length") == 3
    browser.run("document.body.dataset.theme = 'auto'")
    light = browser.run(color)
    browser.run("document.body.dataset.theme = 'dark'")
    assert browser.run(color) != light  # the button, under a light system
    browser.prefer("dark")
    browser.run("document.body.dataset.theme = 'light'")
    assert browser.run(color) == light  # the button, under a dark system
    browser.run("document.body.dataset.theme = 'auto'")
    assert browser.run(color) != light
    browser.prefer("light")
