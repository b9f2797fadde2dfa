"""A neighbour says HELLO in each of its incarnations before it asks anything."""

import pytest

from kvps.core.membership_client import Identity, MembershipClient
from kvps.core.worker.host_aggregation.peer_sessions import PeerSessions
from kvps.errors import Fenced, ProtocolError
from kvps.protocol.envelope import PROTOCOL, Envelope, Role
from kvps.protocol.membership import Hello, Probe

HELLO = Hello(*PROTOCOL, "kvps", 0, Role.WORKER, 1, "here", 8, "", False, "", 2)


@pytest.fixture
def sessions() -> PeerSessions:
    identity = Identity(Role.WORKER, "tcp://sched:1", "here", 7, "kvps", 0)
    return PeerSessions(MembershipClient(identity, 0.0, []))


def from_peer(incarnation: int = 5, **more: object) -> Envelope:
    fields = {"job": bytes(16), "view": 1, "role": Role.WORKER, "rank": 1, "seq": 0}
    return Envelope(**(fields | {"incarnation": incarnation} | more))  # type: ignore[arg-type]


def test_worker_without_hello_is_refused(sessions: PeerSessions) -> None:
    with pytest.raises(ProtocolError, match="worker 0 expects HELLO first"):
        sessions.of(b"x", from_peer())
    assert sessions.begin(b"x", from_peer(), HELLO)
    assert sessions.of(b"x", from_peer()).rank == 1
    with pytest.raises(ProtocolError, match="HELLO first"):
        sessions.of(b"x", from_peer(incarnation=6))


def test_a_new_incarnation_fences_the_one_before(sessions: PeerSessions) -> None:
    sessions.begin(b"x", from_peer(), HELLO)
    sessions.learn({1: 6})
    assert sessions.admit(from_peer(incarnation=6), Hello)
    assert sessions.begin(b"y", from_peer(incarnation=6), HELLO)
    assert [peer.incarnation for peer in sessions] == [6]
    assert sessions.admit(from_peer(incarnation=6), Probe)
    with pytest.raises(Fenced, match="incarnation 5 was replaced by incarnation 6"):
        sessions.admit(from_peer(), Probe)
