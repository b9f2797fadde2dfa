"""The pictures of the dashboard in the documentation: ``python -m tests.browser.pictures`` makes them again.

They show a job of three workers and two servers, of which a worker is slow, and was killed and replaced before.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

from tests.browser.chromium import Page, chromium, missing
from tests.browser.jobs import Training
from tests.integration.processes import ROOT, Processes, until

FOLDER = ROOT / "docs" / "pictures"
PICTURES = (
    ("dashboard-light", "light", 1400, 1530),
    ("dashboard-dark", "dark", 1400, 1530),
    ("dashboard-phone", "dark", 390, 1500),
)
HISTORY_S = 40


def take(page: Page, job: Training) -> None:
    """Stage the fault and the slow worker, and write the pictures."""
    page.resize(1400, 1050)
    page.open()
    job.workers[2].signal(signal.SIGKILL)
    job.workers[2].wait()
    until(lambda: job.status()["faults"], "the fault", 30.0)
    job.workers[2] = job.work(2)
    until(lambda: job.status()["faults"][0]["is_over"], "its end", 120.0)
    job.slow(1, 0.1)
    samples = job.status()["sample"] + HISTORY_S
    until(lambda: job.status()["sample"] >= samples, "some history", 3.0 * HISTORY_S)

    def is_shown() -> bool:
        text = page.text("#findings")
        return "Worker 1 is slow" in text and "holds up" not in text

    for name, scheme, width, height in PICTURES:
        page.resize(width, height)
        page.prefer(scheme)
        until(is_shown, "a worker that is slow", 120.0)
        page.picture(FOLDER / f"{name}.png", height)
        compress(FOLDER / f"{name}.png")


def compress(path: Path) -> None:
    """Write a picture again with 256 colours: half of the bytes, and no difference that one sees."""
    from PIL import Image

    with Image.open(path) as image:
        small = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def main() -> int:
    """Make all pictures; return the exit code."""
    if lacking := missing():
        sys.stderr.write(f"{lacking}\n")
        return 1
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvps-pictures-") as name:
        processes = Processes(Path(name))
        try:
            job = Training(processes, workers=3, ASYNC="1")
            job.until_busy()
            with chromium(processes.folder, job.url) as page:
                take(page, job)
            job.end()
        finally:
            processes.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
