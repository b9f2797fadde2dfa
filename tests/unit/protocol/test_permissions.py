"""Who may say what, and where: judged by the envelope alone."""

import re
from pathlib import Path

import pytest

from kvps import protocol as m
from kvps.errors import ProtocolError, Unauthorized
from kvps.protocol import permissions
from kvps.protocol.envelope import MESSAGES, Envelope, Message, Node, Role
from kvps.protocol.permissions import ALLOWED, HEAD_BYTES, LONG, Place, check
from tests.vectors.packets import name_of

PLACES = {
    "scheduler": Place.SCHEDULER,
    "server": Place.SERVER,
    "worker": Place.WORKER,
    "reader": Place.READER,
}
LISTENING = tuple(PLACES.values())


def sender(role: Role) -> Envelope:
    return Envelope(bytes(16), 0, role, 0, 1, 1)


def documented() -> dict[tuple[Place, Role], set[str]]:
    """The table of section 12."""
    text = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
    found: dict[tuple[Place, Role], set[str]] = {}
    for at, roles, names in re.findall(r"^\| (\w+) \| ([\w, ]+) \| ([A-Z-]+(?:, [A-Z-]+)*) \|$", text, re.M):
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
        assert any("tuple" in str(item) or "dict" in str(item) for item in kind.__annotations__.values())


WORKER = Node(Role.WORKER, 3)


def envelope(role: Role = Role.WORKER, rank: int = 3, life: int = 17) -> Envelope:
    return Envelope(bytes(16), 0, role, rank, life, 1)


@pytest.mark.spec("R246")
@pytest.mark.parametrize(
    ("name", "place", "said", "kind"),
    [
        ("worker:3:17", Place.SCHEDULER, envelope(), m.Beat),
        ("worker:3:17", Place.SERVER, envelope(), m.Push),
        ("role:worker", Place.SCHEDULER, envelope(rank=0, life=0), m.Hello),
        ("role:worker", Place.SCHEDULER, envelope(rank=0, life=0), m.Enrol),
        ("role:worker", Place.SCHEDULER, envelope(rank=0, life=0), m.Rendezvous),
        ("role:server", Place.SCHEDULER, envelope(Role.SERVER, 0, 0), m.Hello),
        ("role:look", Place.SCHEDULER, envelope(rank=0, life=0), m.Look),
        ("role:admin", Place.SCHEDULER, envelope(rank=0, life=0), m.Look),
        ("role:admin", Place.SCHEDULER, envelope(rank=0, life=0), m.Evict),
        ("role:admin", Place.SCHEDULER, envelope(rank=0, life=0), m.Drain),
        ("role:admin", Place.SCHEDULER, envelope(rank=0, life=0), m.Scale),
        ("server:3:17", Place.SCHEDULER, envelope(Role.SERVER), m.Drain),
        ("role:reader", Place.SERVER, envelope(Role.READER, 5, 9), m.Watch),
        ("role:reader", Place.READER, envelope(Role.READER, 5, 9), m.Read),
        ("user:1000", Place.WORKER, envelope(rank=9, life=1), m.Push),
        ("user:1000", Place.SERVER, envelope(rank=9, life=1), m.Push),
    ],
)
def test_permitted_names_pass(name: str, place: Place, said: Envelope, kind: type[Message]) -> None:
    permissions.check_name(name, place, said, kind)


@pytest.mark.spec("R246")
@pytest.mark.parametrize(
    ("name", "place", "said", "kind"),
    [
        ("worker:3:17", Place.SCHEDULER, envelope(rank=0), m.Beat),
        ("worker:3:17", Place.SCHEDULER, envelope(Role.SERVER), m.Beat),
        ("worker:3:17", Place.SERVER, envelope(life=18), m.Push),
        ("worker:3:17", Place.SCHEDULER, envelope(life=0), m.Hello),
        ("worker:3:17", Place.SCHEDULER, envelope(), m.Enrol),
        ("worker:3:17", Place.SCHEDULER, envelope(), m.Evict),
        ("worker:3:17", Place.SCHEDULER, envelope(), m.Drain),
        ("server:3:17", Place.SCHEDULER, envelope(Role.SERVER), m.Scale),
        ("worker:3:17", Place.SCHEDULER, envelope(), m.Rendezvous),
        ("role:server", Place.SCHEDULER, envelope(life=0), m.Rendezvous),
        ("role:look", Place.SCHEDULER, envelope(life=0), m.Rendezvous),
        ("role:admin", Place.SCHEDULER, envelope(life=0), m.Rendezvous),
        ("role:look", Place.SCHEDULER, envelope(life=0), m.Evict),
        ("role:worker", Place.SCHEDULER, envelope(life=0), m.Evict),
        ("role:worker", Place.SCHEDULER, envelope(), m.Hello),
        ("role:worker", Place.SCHEDULER, envelope(life=0), m.Beat),
        ("role:worker", Place.SCHEDULER, envelope(Role.SERVER, life=0), m.Hello),
        ("role:worker", Place.SERVER, envelope(life=0), m.Hello),
        ("role:look", Place.SCHEDULER, envelope(life=0), m.Hello),
        ("role:reader", Place.SERVER, envelope(), m.Push),
        ("role:reader", Place.SCHEDULER, envelope(Role.READER), m.Look),
        ("role:scheduler", Place.SCHEDULER, envelope(life=0), m.Look),
        ("user:1000", Place.SCHEDULER, envelope(), m.Beat),
        ("nobody", Place.SERVER, envelope(), m.Push),
    ],
)
def test_forbidden_names_are_refused(name: str, place: Place, said: Envelope, kind: type[Message]) -> None:
    with pytest.raises(Unauthorized):
        permissions.check_name(name, place, said, kind)


def test_the_name_of_a_member() -> None:
    assert permissions.name_of(WORKER, 17) == "worker:3:17"
