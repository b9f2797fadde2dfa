"""The dashboard in a real browser: its figures are those of /statusz, and a person can see from it what is wrong."""

import signal
import time
import urllib.error
import urllib.request
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import pytest

from kvps.observe.http import STREAMS_MAX
from tests.browser.chromium import Page, chromium
from tests.browser.jobs import Training
from tests.integration.processes import Processes, until
from tests.support.scraping import get

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]
SIZES = {"phone": (390, 844), "tablet": (820, 1180), "desktop": (1400, 900)}
SEEN_MAX_S = 3.0


def formatted(kind: str, value: Any) -> str:
    """Return a value as the page has to show it; written anew, so that it is no copy of the page's own code."""
    if value is None or value == "":
        return "\u2013"
    if kind == "text":
        return str(value)
    if kind == "count":
        return f"{int(value + 0.5):,}"
    if kind == "share":
        return f"{fixed(value * 100, 1 if value < 0.1 else 0)} %"
    if kind in ("bytes", "bytesRate"):
        units = ["B", "KiB", "MiB", "GiB", "TiB"]
        while value >= 1024 and len(units) > 1:
            value, units = value / 1024, units[1:]
        number = fixed(value, 0) if units[0] == "B" else three(value)
        return f"{number} {units[0]}" + ("/s" if kind == "bytesRate" else "")
    if kind == "seconds":
        return duration(value)
    return three(value) + {"rate": "/s", "ratio": "\u00d7"}[kind]


def three(value: float) -> str:
    return fixed(value, 0 if value >= 100 else 1 if value >= 10 else 2)


def fixed(value: float, places: int) -> str:
    """Return a number as JavaScript's toFixed does: the exact value, with a half rounded up."""
    return str(Decimal(value).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP))


def duration(value: float) -> str:
    if value < 0.001:
        return f"{fixed(value * 1e6, 0)} µs"
    if value < 1:
        return f"{three(value * 1000)} ms"
    if value < 60:
        return f"{fixed(value, 1)} s"
    minutes, seconds = divmod(int(value), 60)
    return f"{minutes} min {seconds} s"


def at(document: Any, path: str) -> Any:
    """Return the part of a document that a path names."""
    for name in path.split("."):
        document = document[int(name)] if isinstance(document, list) else document.get(name)
    return document


def same_sample(page: Page, job: Training) -> tuple[dict[str, Any], list[tuple[str, str, Any, str]]]:
    """Return /statusz and what the page shows of the same sample."""

    def both() -> Any:
        status = job.status()
        sample, values = page.values()
        return (status, values) if sample == status["sample"] else None

    found: tuple[dict[str, Any], list[tuple[str, str, Any, str]]] = until(both, "equal samples", 60.0)
    return found


def until_said(page: Page, selector: str, *words: str, limit_s: float = 60.0) -> str:
    """Wait until an element shows all of these words; return its text."""

    def said() -> str:
        text = page.text(selector)
        return text if all(word in text for word in words) else ""

    try:
        return until(said, f"{words} in {selector}", limit_s)
    except AssertionError as error:
        raise AssertionError(f"{error}; it says {page.text(selector)!r}") from None


def open_page(page: Page) -> None:
    """Load the page, and wait until it shows a sample."""
    page.open()
    until(lambda: page.run("return document.body.dataset.sample") is not None, "a first sample")


def test_every_figure_is_that_of_statusz_at_every_size_and_theme(processes: Processes) -> None:
    job = Training(processes, ASYNC="1")
    job.until_busy()
    with chromium(processes.folder, job.url) as page:
        open_page(page)
        status, values = same_sample(page, job)
        assert len(values) > 70
        for path, kind, value, text in values:
            assert value == pytest.approx(at(status, path)), path
            assert text == formatted(kind, value), path
        paths = {path for path, *_ in values}
        assert {"totals.round_p99_s", "servers.1.memory_bytes", "workers.1.lateness_s"} <= paths
        assert {"compression.in.ratio", "staleness.counts.0", "keys.0.moved_bytes"} <= paths
        assert {"members.3.software", "members.0.held_s", "checkpoints.kept_age_s"} <= paths
        seen_at_every_size(page)
        assert page.requests() == {job.url.removeprefix("http://")}
        assert page.complaints() == []
    job.end()


def seen_at_every_size(page: Page) -> None:
    """Check that nothing is cut off or unreadable, at three widths, in light and in dark."""
    colors = set()
    for width, height in SIZES.values():
        page.resize(width, height)
        for scheme in ("light", "dark"):
            page.prefer(scheme)
            assert page.run("return document.documentElement.scrollWidth") <= width
            hidden = page.run(
                "return [...document.querySelectorAll('#board .panel')].filter(one => one.offsetWidth < 300).map(one => one.id)"
            )
            assert hidden == []
            hints = page.run(
                "return [...document.querySelectorAll('#board .panel')].filter("
                "one => !one.querySelector('.hint').innerText.startsWith('Good:')).length"
            )
            assert hints == 0
            colors.add(page.run("return getComputedStyle(document.body).backgroundColor"))
            until(lambda: page.run("return document.querySelectorAll('canvas').length") == 3, "charts")
    assert len(colors) == 2


def test_page_names_the_slow_worker(processes: Processes) -> None:
    job = Training(processes, workers=3)
    job.slow(1, 0.25)
    with chromium(processes.folder, job.url) as page:
        open_page(page)
        text = until_said(page, "#findings", "Worker 1 is slow", limit_s=90.0)
        assert "Worker 0" not in text
        assert "Worker 2" not in text
        longest = "return [...document.querySelectorAll('#lateness .row')].sort((a, b) => b.querySelector('i').offsetWidth"
        assert page.run(f"{longest} - a.querySelector('i').offsetWidth)[0].dataset.worker") == "1"
        job.slow(1, 0.03)
        job.workers[1].signal(signal.SIGSTOP)
        try:
            text = until_said(page, "#findings", "Worker 1 holds up a round", limit_s=60.0)
            assert "Worker 0 holds" not in text
            assert "Worker 2 holds" not in text
        finally:
            job.workers[1].signal(signal.SIGCONT)
        assert page.complaints() == []
    job.end()


def test_page_lists_the_stages_of_the_last_fault(processes: Processes) -> None:
    job = Training(processes)
    job.until_busy()
    with chromium(processes.folder, job.url) as page:
        open_page(page)
        victim = job.workers[1]
        killed_at = time.monotonic()
        victim.signal(signal.SIGKILL)
        until_said(page, "[data-member='worker 1']", "lost", limit_s=SEEN_MAX_S)
        assert time.monotonic() - killed_at <= SEEN_MAX_S
        until_said(page, "#findings", "Worker 1 is lost")
        victim.wait()
        job.workers[1] = job.work(1)
        until_said(page, "#fault-list article", "orker 1 lost", "replaced by", "over after", limit_s=90.0)

        before = job.status()["checkpoints"]["kept"]
        until(lambda: job.status()["checkpoints"]["kept"] > before + 1, "newer checkpoints", 60.0)
        job.servers[0].signal(signal.SIGKILL)
        job.servers[0].wait()
        job.servers[0] = job.serve(0)
        text = until_said(
            page,
            "#fault-list article",
            "erver 0 lost",
            "roll back to checkpoint",
            "all servers hold checkpoint",
            limit_s=90.0,
        )
        assert "over after" in text
        until(lambda: job.status()["totals"]["rounds_per_s"] > 0, "rounds after the rollback", 60.0)
        assert page.complaints() == []
    job.end()


def test_a_token_is_asked_for(processes: Processes) -> None:
    job = processes.scheduler(1, 0, "--http", "127.0.0.1:0", KVPS_HTTP_TOKEN="s3cret")
    url = "http://" + job.process.expect(r"http at (127\.0\.0\.1:\d+)").group(1)
    assert get(f"{url}/events")[0] == get(f"{url}/history")[0] == 401
    with chromium(processes.folder, url) as page:
        page.open()
        until_said(page, "#login", "needs a token")
        give = "document.getElementById('token').value = arguments[0]; document.querySelector('#login button').click()"
        page.run(give, "wrong")
        until_said(page, "#denied", "not the right one")
        page.run(give, "s3cret")
        until_said(page, "#phase", "forming")
        assert page.run("return document.getElementById('login').hidden")
        refused = [complaint for complaint in page.complaints() if "401" not in complaint]
        assert refused == []
    job.process.signal(signal.SIGTERM)
    job.process.wait()


def test_few_clients_have_events_and_one_that_is_gone_makes_room(processes: Processes) -> None:
    job = processes.scheduler(1, 0, "--http", "127.0.0.1:0")
    url = "http://" + job.process.expect(r"http at (127\.0\.0\.1:\d+)").group(1)
    streams = [urllib.request.urlopen(f"{url}/events", timeout=30) for _ in range(STREAMS_MAX)]
    assert streams[-1].readline().startswith(b"data: {")
    assert get(f"{url}/events")[0] == 503
    assert get(f"{url}/statusz")[0] == 200
    for stream in streams:
        stream.close()

    def has_room() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/events", timeout=30) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            error.close()
            return False

    until(has_room, "room for another")
    job.process.signal(signal.SIGTERM)
    job.process.wait()
