"""The traffic of one store on one worker, in bytes: gradients as given, as encoded, as sent, and values received."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kvps.protocol.envelope import Packet


@dataclass(slots=True)
class Traffic:
    """Counters since the store was opened; a rollback does not reset them.

    A peer is a server, or the worker of this host that pushes to the servers for this one.
    """

    pushed_bytes: int = 0
    """Bytes of the dense gradients that were pushed, as the script gave them."""
    encoded_bytes: int = 0
    """Bytes of the payload that was made of them."""
    sent_bytes: int = 0
    """Bytes of payload that were sent or lent to peers."""
    received_bytes: int = 0
    """Bytes of payload that peers have sent or lent."""
    resent: int = 0
    """Number of requests that a peer did not have, and that were sent again."""

    def encoded(self, gradients: Iterable[torch.Tensor], payload_bytes: Iterable[int]) -> None:
        """Count a push: its gradients, and the payload of each request that carries them."""
        self.pushed_bytes += sum([one.nbytes for one in gradients])
        self.encoded_bytes += sum(payload_bytes)

    def received(self, packet: Packet) -> None:
        """Count an answer."""
        if packet.payload:
            self.received_bytes += sum([one.nbytes for one in packet.payload])

    @property
    def compression_ratio(self) -> float:
        """The bytes of dense gradients for each byte of their payload; 1 before the first push."""
        return self.pushed_bytes / self.encoded_bytes if self.encoded_bytes else 1.0
