"""A witness of all packets of a job whose scripts agree: it checks what the servers and the scheduler say."""

from __future__ import annotations

from kvps.protocol.envelope import Packet
from kvps.protocol.membership import Beat
from kvps.protocol.values import Pulled
from tests.simulation.network import Process


class Witness:
    """Reads what is said: one value per version (I5), versions that do not fall (I4), and no standstill (I16)."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, int, int, int], bytes] = {}
        self._newest: dict[tuple[int, int, int], int] = {}

    def __call__(self, source: Process, packet: Packet) -> None:
        if isinstance(packet.message, Pulled) and source.name.startswith("server"):
            self._read(packet.message, b"".join(bytes(frame) for frame in packet.payload))
        if isinstance(packet.message, Beat) and source.name == "scheduler":
            beat = packet.message
            assert not beat.standstill, f"I16: told of a standstill that is none: {beat.reason}"

    def _read(self, pulled: Pulled, values: bytes) -> None:
        at = 0
        for start, size, version, _ in pulled.runs:
            where = (pulled.chunk, start, size)
            assert version >= self._newest.get(where, 0), f"I4: {where} fell to {version}"
            self._newest[where] = version
            if pulled.values:
                part = values[at : at + 4 * size]
                at += 4 * size
                first = self._values.setdefault((*where, version), part)
                assert part == first, f"I5: {where} has two values at version {version}"
