"""Who may say what, and where: judged by the envelope alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvps import protocol as m
from kvps.errors import ProtocolError
from kvps.protocol import wire
from kvps.protocol.envelope import MESSAGES, Envelope, Message, Packet, Role
from kvps.protocol.permissions import ALLOWED, HEAD_BYTES, LONG, Place, check
from tests.vectors.packets import PACKETS, name_of

PLACES = {"scheduler": Place.SCHEDULER, "server": Place.SERVER, "worker": Place.WORKER}
LISTENING = tuple(PLACES.values())


def sender(role: Role) -> Envelope:
    return Envelope(bytes(16), 0, role, 0, 1, 1)


def documented() -> dict[tuple[Place, Role], set[str]]:
    """The table of section 12."""
    text = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
    found: dict[tuple[Place, Role], set[str]] = {}
    for at, roles, names in re.findall(
        r"^\| (\w+) \| ([\w, ]+) \| ([A-Z-]+(?:, [A-Z-]+)*) \|$", text, re.M
    ):
        for role in roles.split(", "):
            found.setdefault((PLACES[at], Role[role.upper()]), set()).update(names.split(", "))
    return found


@pytest.mark.spec("R240")
def test_the_table_is_that_of_the_document() -> None:
    ours = {
        (place, role): {name_of(kind) for kind in kinds}
        for place in LISTENING
        for role, kinds in ALLOWED[place].items()
    }
    assert ours == documented()


@pytest.mark.spec("R16", "R240")
@pytest.mark.parametrize("place", Place)
@pytest.mark.parametrize("role", Role)
def test_all_that_is_not_allowed_is_refused(place: Place, role: Role) -> None:
    for kind in MESSAGES.values():
        if kind in ALLOWED[place].get(role, ()):
            check(place, sender(role), kind, 100)
        else:
            with pytest.raises(ProtocolError, match=f"a {role} may not send {kind.__name__}"):
                check(place, sender(role), kind, 100)


def test_every_message_may_be_said_somewhere() -> None:
    said = {kind for roles in ALLOWED.values() for kinds in roles.values() for kind in kinds}
    assert said == set(MESSAGES.values())


@pytest.mark.spec("R240")
def test_a_long_head_is_for_messages_with_many_entries() -> None:
    check(Place.SCHEDULER, sender(Role.WORKER), m.Beat, HEAD_BYTES)
    with pytest.raises(ProtocolError, match="too long for Beat"):
        check(Place.SCHEDULER, sender(Role.WORKER), m.Beat, HEAD_BYTES + 1)
    check(Place.SERVER, sender(Role.WORKER), m.Declare, 1 << 20)
    for kind in LONG:
        assert any(
            "tuple" in str(one) or "dict" in str(one) for one in kind.__annotations__.values()
        )


@pytest.mark.spec("R240")
def test_nothing_is_decoded_that_is_not_admitted() -> None:
    packet = PACKETS["BEAT"]
    (head,) = wire.encode(packet)
    asked: list[tuple[Envelope, type[Message], int]] = []

    def admit(envelope: Envelope, kind: type[Message], head_bytes: int) -> None:
        asked.append((envelope, kind, head_bytes))
        raise PermissionError

    with pytest.raises(PermissionError):
        wire.decode([head[:48] + b"\xc1 no fields"], admit)
    assert asked == [(packet.envelope, m.Beat, 48 + len(b"\xc1 no fields"))]
    assert wire.decode([head], lambda *_: None) == Packet(packet.envelope, packet.message)
