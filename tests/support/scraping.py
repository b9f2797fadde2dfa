"""The endpoints of a process as a scraper sees them: its metrics, and which of them moved."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prometheus_client.parser import text_string_to_metric_families

from tests.integration.processes import Process, until

Samples = dict[tuple[str, str], float]
"""Values by name and label values."""
HTTP = ("--http", "127.0.0.1:0", "--log-level", "info")
REFUSALS = ("refus", "overload", "dropped", "ignored", "closed", "unread")
"""Parts of the names of all metrics that count what was refused."""


def url_of(process: Process) -> str:
    """Return where the endpoints of a process are, which says so in its log."""
    return "http://" + process.expect(r"http at (127\.0\.0\.1:\d+)").group(1)


def get(url: str) -> tuple[int, str]:
    """Return the status and the body of the answer to a GET."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def metrics(url: str, words: Sequence[str] = ("",)) -> Samples:
    """Return all samples of a process whose names have one of these ``words``."""
    status, text = get(f"{url}/metrics")
    assert status == 200
    text = "".join([line for line in text.splitlines(True) if any(word in line for word in words)])
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def change(url: str, before: Samples) -> Samples:
    """Return by how much counters of refusals have grown."""
    now = metrics(url, REFUSALS)
    return {
        at: now[at] - before.get(at, 0)
        for at in now
        if any(item in at[0] for item in REFUSALS) and now[at] != before.get(at, 0)
    }


HUNG_UP = ("kvps_refused_connections_total", "no_handshake")
"""What a peer moves that notices first that it does not fit, and any that ends early."""


@contextmanager
def one_moves(url: str, name: str, label: str) -> Iterator[None]:
    """Check that what is done meanwhile moves one counter of refusals, and no other."""
    before, expected = metrics(url), (name, label)

    def is_moved() -> Samples | None:
        moved = change(url, before)
        return moved if expected in moved or (label == "no_key" and HUNG_UP in moved) else None

    yield
    moved = until(is_moved, f"a change of {name} {label}")
    assert moved.keys() <= {expected, HUNG_UP}, moved
