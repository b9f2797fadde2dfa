"""Deltas: what has changed comes back to the bit, in few bytes, and nothing else is written to."""

import struct

import numpy as np
import pytest

from kvps.core.deltas import SHARE_MAX, Delta, Octets, apply, difference
from kvps.errors import ProtocolError

DICE = np.random.default_rng(5)


def changed(old: Octets, width: int, at: np.ndarray) -> Octets:
    new = old.copy()
    new.view(f"u{width}")[at] ^= np.array(1, f"u{width}")
    return new


def applied(old: Octets, width: int, delta: Delta) -> Octets:
    octets = old.copy()
    apply(octets, width, delta.sent, delta.runs, memoryview(delta.octets))
    return octets


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 0.0004, 0.02, SHARE_MAX])
def test_scattered_changes_come_back(width: int, share: float) -> None:
    count = 20_000
    old = DICE.integers(0, 256, count * width, np.uint8)
    new = changed(old, width, DICE.choice(count, int(count * share), replace=False))
    delta = difference(old, new, width)
    assert delta is not None
    assert (applied(old, width, delta) == new).all()
    assert len(delta.octets) <= (1 + width) * (count * share + count / 256)


def test_changed_rows_are_sent_as_runs() -> None:
    old = DICE.integers(0, 256, 64 * 512, np.uint8)
    rows = np.concatenate([np.arange(128) + 128 * row for row in (0, 7, 8, 127)])
    delta = difference(old, changed(old, 2, rows), 2)
    assert delta is not None
    assert (delta.sent, delta.runs, len(delta.octets)) == (512, 3, 3 * 8 + 512 * 2)
    assert (applied(old, 2, delta) == changed(old, 2, rows)).all()


def test_much_that_has_changed_is_no_delta() -> None:
    old = DICE.integers(0, 256, 4000, np.uint8)
    assert difference(old, changed(old, 2, np.arange(0, 2000, 3)), 2) is None
    few = np.zeros(6, np.uint8)
    assert difference(few[:1], few[:1] + np.uint8(1), 1) is None
    alternating = changed(old[:32], 8, np.array([0]))
    assert difference(old[:32], alternating, 8) == Delta(1, 0, b"\0" + alternating[:8].tobytes())


@pytest.mark.parametrize(
    ("count", "runs", "octets", "text"),
    [
        (2, 0, bytes(5), "do not take 5 bytes"),
        (1, 0, b"\x08" + bytes(2), "element 8 of 8 cannot have changed"),
        (2, 1, struct.pack("<II", 7, 2) + bytes(4), "element 8 of 8 cannot have changed"),
        (2, 1, struct.pack("<II", 0, 3) + bytes(4), "runs of 3 elements come with 2"),
        (1, 2, struct.pack("<4I", 2**32 - 1, 0, 1, 0) + bytes(2), "element 4294967295 of 8"),
    ],
)
def test_changes_elsewhere_are_refused(count: int, runs: int, octets: bytes, text: str) -> None:
    target = np.full(16, 7, np.uint8)
    with pytest.raises(ProtocolError, match=text):
        apply(target, 2, count, runs, memoryview(octets))
    assert (target == 7).all()
