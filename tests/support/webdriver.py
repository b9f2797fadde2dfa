"""A headless chromium for tests, driven by the WebDriver protocol: pages, scripts, console and requests.

It needs Debian's packages chromium and chromium-driver; :func:`open_browser` skips the test where they are missing.
"""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars"),
)
START_S = 60.0
ANSWER_S = 120.0


class Browser:
    """One session of a browser."""

    def __init__(self, driver: str, profile: Path) -> None:
        options = {"args": [*FLAGS, f"--user-data-dir={profile}"], "binary": shutil.which("chromium")}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        self._driver = driver
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    def size(self, width: int, height: int) -> None:
        """Set the size of the page, in pixels of CSS."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._command("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        """Set the color scheme of the system: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._command("Emulation.setEmulatedMedia", {"features": features})

    def open(self, url: str) -> None:
        """Load a page, to its end."""
        self._ask("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: object) -> Any:
        """Run the body of a function of JavaScript; return what it returns."""
        words = {"script": script, "args": list(arguments)}
        return self._ask("POST", f"{self._session}/execute/sync", words)

    def until(self, script: str, limit_s: float = 30.0) -> Any:
        """Return the first true thing that a script returns."""
        deadline = time.monotonic() + limit_s
        while not (found := self.run(script)):
            assert time.monotonic() < deadline, f"not in {limit_s:g} s: {script}"
        return found

    def console(self) -> list[str]:
        """Return the errors since the last call."""
        lines = self._ask("POST", f"{self._session}/se/log", {"type": "browser"})
        return [line["message"] for line in lines if line["level"] == "SEVERE"]

    def requests(self) -> list[str]:
        """Return the addresses that were asked for since the last call."""
        lines = self._ask("POST", f"{self._session}/se/log", {"type": "performance"})
        events = [json.loads(line["message"])["message"] for line in lines]
        return [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def screenshot(self, path: Path) -> None:
        """Write what the page shows as a PNG."""
        path.write_bytes(base64.b64decode(self._ask("GET", f"{self._session}/screenshot")))

    def close(self) -> None:
        """End the session, and the browser with it."""
        self._ask("DELETE", self._session)

    def _command(self, name: str, parameters: dict[str, object]) -> None:
        words = {"cmd": name, "params": parameters}
        self._ask("POST", f"{self._session}/goog/cdp/execute", words)

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        data = None if method != "POST" else json.dumps(body).encode()
        request = urllib.request.Request(self._driver + path, data, method=method)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{method} {path}: {error.read().decode()}") from None


@contextmanager
def open_browser(folder: Path) -> Iterator[Browser]:
    """Start a browser with an empty profile in a folder; end it with the block."""
    for program, package in (("chromium", "chromium"), ("chromedriver", "chromium-driver")):
        if shutil.which(program) is None:
            pytest.skip(f"no {program}: apt-get install {package}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}", "--silent"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(port, driver)
        browser = Browser(f"http://127.0.0.1:{port}", folder / "profile")
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.wait(START_S)


def _wait_for(port: int, driver: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while True:
        assert driver.poll() is None, f"chromedriver ended with {driver.returncode}"
        assert time.monotonic() < deadline, f"chromedriver does not answer in {START_S:g} s"
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            pass
