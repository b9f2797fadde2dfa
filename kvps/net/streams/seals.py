"""The secrets of a stream: a pass, by which the connection is known, and seals for what it carries.

All are made of one random secret, which the server has said inside CURVE. It serves one connection.
Pieces are sealed by AES-256-GCM of the package ``cryptography``. Each direction has keys of its own, and
numbers its pieces from 0: the number is the nonce, so that a piece opens only in its place. Every 1,024
pieces another key is derived: by none are more than 2^26 blocks encrypted.
"""

from __future__ import annotations

import hmac
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvps.errors import ProtocolError
from kvps.net.links.framing import Buffer

SECRET_BYTES = PASS_BYTES = 32
PIECES_OF_KEY = 1024
TO_SERVER, TO_WORKER = b"to server", b"to worker"
"""The directions."""


def derived(secret: bytes, what: bytes) -> bytes:
    """Return 32 bytes that nobody knows who does not know ``secret``; others of it tell nothing of them."""
    return hmac.digest(secret, b"kvps stream 1 " + what, "sha256")


def pass_of(secret: bytes) -> bytes:
    """Return the bytes by which a connection says whose it is."""
    return derived(secret, b"pass")


class AesSeal:
    """Seals the pieces that go in one direction, or opens them, in their order.

    Args:
        secret: of the stream.
        direction: :data:`TO_SERVER` or :data:`TO_WORKER`.
    """

    octets = 16
    """How much longer a sealed piece is."""

    def __init__(self, secret: bytes, direction: bytes) -> None:
        self._secret, self._direction = secret, direction
        self._number = 0

    def seal(self, piece: Buffer, into: memoryview) -> None:
        """Write the next piece sealed."""
        self._cipher_of_next().encrypt_into(self._nonce, piece, None, into)

    def open(self, piece: Buffer, into: memoryview) -> None:
        """Write the next piece as it was before it was sealed.

        Raises:
            ProtocolError: if it is not the piece that was sealed next.
        """
        try:
            self._cipher_of_next().decrypt_into(self._nonce, piece, None, into)
        except InvalidTag:
            raise ProtocolError("a stream has bytes that its other end has not sealed") from None

    def _cipher_of_next(self) -> Any:
        """Use up a number, whatever becomes of the piece; return the cipher of its key."""
        number = self._number
        self._number += 1
        self._nonce = number.to_bytes(12, "big")
        if number % PIECES_OF_KEY == 0:
            self._cipher = AESGCM(derived(self._secret, self._direction + b" %d" % (number // PIECES_OF_KEY)))
        return self._cipher


Seals = tuple[AesSeal, AesSeal]
"""For what goes, and for what comes."""
