"""Small limits for all simulations."""

from __future__ import annotations

import pytest

from kvps.core.server import options
from kvps.core.server.chunks import rounds, slab
from kvps.core.worker import connection
from kvps.core.worker.calls import base


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks and windows, so that small tensors meet every limit."""
    monkeypatch.setattr(options, "CHUNK_BYTES_MIN", 1)
    monkeypatch.setattr(slab, "PAGE_BYTES", 64)
    monkeypatch.setattr(connection, "WINDOW_BYTES", 1_000)
    for module in (rounds, base):
        monkeypatch.setattr(module, "WINDOW", 4)
