"""What was sent and has not left yet."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

import torch
import zmq

from kvps import protocol as m
from kvps.core.limits import TABLE
from kvps.net.tcp_watch import Outflow
from kvps.net.zeromq import ZmqTransport
from kvps.protocol import wire
from kvps.protocol.envelope import Envelope, Packet, Role
from kvps.tensors import to_frame
from tests.integration.processes import until

UNREAD_MAX_BYTES = TABLE["unread"].default
HALF = UNREAD_MAX_BYTES // 2


@dataclass
class Tracker:
    done: bool = False


@dataclass
class Hold:
    released: int = 0

    def release(self) -> None:
        self.released += 1


def sent(flow: Outflow, route: str, hold: Hold | None = None, copied: int = 0) -> Tracker:
    tracker = Tracker()
    flow.sent(route, cast(Any, tracker), hold, copied)
    return tracker


def test_sent_payload_is_released_whatever_others_read() -> None:
    flow, holds = Outflow(), [Hold() for _ in range(3)]
    trackers = [sent(flow, route, item) for route, item in zip("aab", holds, strict=True)]
    trackers[1].done = trackers[2].done = True
    flow.look()
    assert [hold.released for hold in holds] == [0, 0, 1]
    trackers[0].done = True
    flow.look()
    flow.look()
    assert [hold.released for hold in holds] == [1, 1, 1]


def test_route_that_reads_nothing_gets_no_more() -> None:
    flow = Outflow()
    assert not flow.is_full("a", 10 * UNREAD_MAX_BYTES), "one answer may be of any size"
    first = sent(flow, "a", copied=HALF)
    assert not flow.is_full("a", HALF)
    sent(flow, "a", copied=HALF)
    assert flow.is_full("a", 1)
    assert not flow.is_full("b", HALF)
    first.done = True
    flow.look()
    assert not flow.is_full("a", HALF)


def test_values_that_are_held_count_for_nothing() -> None:
    flow = Outflow()
    for _ in range(10):
        sent(flow, "a", Hold())
    assert not flow.is_full("a", UNREAD_MAX_BYTES)


def test_a_peer_that_stops_to_read_costs_no_more_than_that() -> None:
    listening = ZmqTransport("tcp://127.0.0.1:0", role=Role.SERVER)
    context: zmq.Context[Any] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVHWM, 1)
    dealer.connect(listening.endpoint)
    try:
        envelope = Envelope(bytes(16), 0, Role.WORKER, 1, 1, 1)
        dealer.send_multipart(wire.encode(Packet(envelope, m.Probe((1,)))))
        heard = until(lambda: list(listening.poll(0.01)), "a packet")
        route = heard[0][0]
        rows = torch.zeros(8 << 20)
        answer = Packet(
            Envelope(bytes(16), 0, Role.SERVER, 0, 1, 1),
            m.PulledRows(1, 1, 1, 8 << 20, 1, 1, 1),
            (to_frame(rows),),
        )
        for _ in range(20):
            listening.send(route, answer, None)
        dropped = listening.refused.packets["unread"]
        assert dropped >= 20 - UNREAD_MAX_BYTES // rows.nbytes - 2  # some lie in the kernel's buffers
        assert dropped < 20
        counts: Counter[str] = Counter()

        def read_all() -> bool:
            while dealer.poll(0):
                dealer.recv_multipart()
                counts["read"] += 1
            list(listening.poll(0.01))
            return counts["read"] == 20 - dropped

        until(read_all, "answers")
        listening.send(route, answer, None)
        assert listening.refused.packets["unread"] == dropped
        assert dealer.poll(5000)
    finally:
        listening.close(0.0)
        context.destroy(0)
