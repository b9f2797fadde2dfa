"""Fixtures of the tests with real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.processes import Processes, made


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Processes of which none may be left when the test ends."""
    yield from made(tmp_path)
