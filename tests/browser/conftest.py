"""Fixtures of the tests in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.chromium import missing
from tests.integration.conftest import has_namespaces as has_namespaces
from tests.integration.processes import Processes, made


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Processes of which none may be left when the test ends; skip where there is no browser."""
    lacking = missing()
    if lacking:
        pytest.skip(lacking)
    yield from made(tmp_path)
