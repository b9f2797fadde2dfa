"""Small limits for all simulations."""

from __future__ import annotations

import pytest

from kvps.core import conversations, link, namespace, rounds, slab


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks and windows, so that small tensors meet every limit."""
    monkeypatch.setattr(namespace, "CHUNK_BYTES_MIN", 1)
    monkeypatch.setattr(slab, "PAGE_BYTES", 64)
    monkeypatch.setattr(link, "WINDOW_BYTES", 1_000)
    for module in (rounds, conversations):
        monkeypatch.setattr(module, "WINDOW", 4)
