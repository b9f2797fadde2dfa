"""The seals of streams: what was sealed opens once, in its place, by the other end's secret."""

from __future__ import annotations

import os

import pytest

from kvps.errors import ProtocolError

pytest.importorskip("cryptography", reason="the extra kvps[aes] is not installed")
from kvps.net.links.framing import memory  # as above
from kvps.net.streams import seals  # it needs the extra
from kvps.net.streams.seals import TO_SERVER, TO_WORKER, AesSeal  # as above

SECRET = bytes(range(32))


def sealed(seal: AesSeal, piece: bytes) -> memoryview:
    """Return ``piece`` sealed."""
    into = memory(len(piece) + seal.octets)
    seal.seal(piece, into)
    return into


def opened(seal: AesSeal, piece: memoryview) -> bytes:
    """Return what was sealed."""
    into = memory(len(piece) - seal.octets)
    seal.open(piece, into)
    return bytes(into)


@pytest.mark.spec("R455")
def test_pieces_open_in_their_order_and_keys_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seals, "PIECES_OF_KEY", 4)
    aes_seal, other = AesSeal(SECRET, TO_SERVER), AesSeal(SECRET, TO_SERVER)
    pieces = [os.urandom(size) for size in (0, 1, 100, 5000, 7, 7, 7, 7, 7, 7)]
    on_the_way = [sealed(aes_seal, piece) for piece in pieces]
    assert [opened(other, piece) for piece in on_the_way] == pieces
    assert len({bytes(piece) for piece in on_the_way}) == len(pieces)


@pytest.mark.spec("R455")
@pytest.mark.parametrize("harm", ["changed", "cut", "again", "later", "other way", "other secret"])
def test_a_piece_opens_in_its_place_only(harm: str) -> None:
    aes_seal, other = AesSeal(SECRET, TO_SERVER), AesSeal(SECRET, TO_SERVER)
    first, second = sealed(aes_seal, b"first"), sealed(aes_seal, b"second")
    if harm == "changed":
        first[2] ^= 1
    elif harm == "cut":
        first = first[:-1]
    elif harm == "again":
        opened(other, first)
    elif harm == "later":
        first = second
    elif harm == "other way":
        other = AesSeal(SECRET, TO_WORKER)
    else:
        other = AesSeal(SECRET[::-1], TO_SERVER)
    with pytest.raises(ProtocolError, match="its other end has not sealed"):
        opened(other, first)


def test_a_pass_tells_nothing_of_the_keys() -> None:
    made = [seals.pass_of(SECRET), *[seals.derived(SECRET, what) for what in (TO_SERVER, TO_WORKER)]]
    assert len({*made, SECRET}) == 4
    assert all(len(item) == 32 for item in made)
