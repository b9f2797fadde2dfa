"""A member's beats."""

from __future__ import annotations

import pytest

from kvps.core.effects import Send
from kvps.core.member import BEAT_EVERY_S, SCHEDULER, Identity, Membership
from kvps.messages import Beat, Envelope, Hello, Leave, Left, Packet, Role, Stop, Welcome

JOB = b"j" * 16


def member():
    """Return a server's membership that was welcomed at time 0."""
    one = Membership(Identity(Role.SERVER, "tcp://s:1", "host", 1, "0"), 0.0)
    list(one.start(0.0))
    list(one.on_packet(said(Welcome(0, 5, 1, 1)), 0.0))
    return one


def said(message):
    """Return a packet of the scheduler."""
    return Packet(Envelope(JOB, 0, Role.SCHEDULER, 0, 0, 0), message)


def sent(effects):
    """Return the messages that go to the scheduler."""
    return [one.packet.message for one in effects if isinstance(one, Send) and one.to == SCHEDULER]


@pytest.mark.spec("R29")
def test_it_beats_every_second_until_it_is_told_that_it_is_over():
    for last in (Left(), Stop(0, "over")):
        one = member()
        for second in range(1, 6):
            assert one.deadline() == pytest.approx(second * BEAT_EVERY_S)
            assert sent(one.on_timer(second - 0.01)) == []
            assert sent(one.on_timer(float(second))) == [Beat(0)]
        assert sent(one.leave(True, 0, True, "done")) == [Leave(True, 0, True, "done")]
        assert Beat(0) in sent(one.on_timer(6.0))  # and LEAVE again, until it is answered
        list(one.on_packet(said(last), 6.5))
        assert sent(one.on_timer(7.0)) == []
        assert one.deadline() is None


def test_it_says_hello_until_it_is_welcomed():
    one = Membership(Identity(Role.SERVER, "tcp://s:1", "host", 1, "0"), 0.0)
    first = sent(one.start(0.0))
    again = sent(one.on_timer(1.0))
    assert [type(message) for message in (*first, *again)] == [Hello, Hello]
