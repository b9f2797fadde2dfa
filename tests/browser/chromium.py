"""Chromium for tests: headless, with an empty profile, and without a word to the network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--no-proxy-server", "--disable-domain-reliability"),
    *(
        "--disable-extensions",
        "--disable-default-apps",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ),
)
VALUES = """
return {sample: Number(document.body.dataset.sample), values: [...document.querySelectorAll("[data-path]")].map(
  one => [one.dataset.path, one.dataset.as, JSON.parse(one.dataset.value), one.textContent])}
"""


def missing() -> str:
    """Return what a test in a browser lacks here; empty if nothing."""
    try:
        import selenium  # noqa: F401, an extra
    except ImportError:
        return "selenium is not installed: pip install -e '.[browser]'"
    lacking = [item for item in ("chromium", "chromedriver") if shutil.which(item) is None]
    return (
        f"{' and '.join(lacking)} is not installed: apt-get install chromium chromium-driver"
        if lacking
        else ""
    )


class Page:
    """One page in one browser."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver, self.url = driver, url

    def open(self) -> None:
        """Load the page."""
        self.driver.get(self.url)

    def run(self, script: str, *arguments: object) -> Any:
        """Run a script in the page, and return what it returns."""
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        """Return the text that a user sees in an element; empty if there is none."""
        script = "const found = document.querySelector(arguments[0]); return found ? found.innerText : ''"
        return str(self.run(script, selector))

    def values(self) -> tuple[int, list[tuple[str, str, Any, str]]]:
        """Return the number of the sample that is shown, and each value's path, format, value and text."""
        found = self.run(VALUES)
        return found["sample"], [tuple(item) for item in found["values"]]

    def complaints(self) -> list[str]:
        """Return what the console has said since the last time, of errors and warnings."""
        return [item["message"] for item in self.driver.get_log("browser") if item["level"] != "INFO"]

    def requests(self) -> set[str]:
        """Return the hosts that the page has asked."""
        script = "return performance.getEntriesByType('resource').map(one => new URL(one.name).host)"
        return set(self.run(script))

    def resize(self, width: int, height: int) -> None:
        """Show the page at this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, scheme: str) -> None:
        """Prefer a light or a dark page, as a user's system does."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def picture(self, path: Path, height: int | None = None) -> None:
        """Write what is shown, or the whole page down to ``height``, as PNG."""
        import base64

        clip = {}
        if height is not None:
            width = self.run("return innerWidth")
            clip = {
                "clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1},
                "captureBeyondViewport": True,
            }
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", **clip})
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def chromium(folder: Path, url: str) -> Iterator[Page]:
    """Start a browser whose profile is below ``folder``, and end it."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options, Service(shutil.which("chromedriver")))
    driver.set_page_load_timeout(60)
    try:
        yield Page(driver, url)
    finally:
        driver.quit()
