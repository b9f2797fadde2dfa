"""Packets within one process: what a transport has to do, without sockets."""

import pytest
import torch

from kvps.core.effects import Connect
from kvps.core.server.chunks.slab import Buffer
from kvps.errors import ProtocolError
from kvps.net.transport import Disconnected
from kvps.protocol.envelope import Envelope, Message, Packet, Role
from kvps.protocol.membership import Beat, Done
from kvps.protocol.values import Push, Run
from tests.support.memory_network import MemoryNetwork, MemoryTransport


def packet(message: Message, *payload: memoryview) -> Packet:
    return Packet(Envelope(bytes(16), 0, Role.WORKER, 0, 1, 0), message, payload)


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


def ends(network: MemoryNetwork) -> tuple[MemoryTransport, MemoryTransport]:
    """A server, and a client that is connected to it as ``up``."""
    server, client = network.transport("mem://s"), network.transport()
    client.connect(Connect("up", "mem://s"))
    return server, client


def heard(end: MemoryTransport) -> list[Message | Disconnected]:
    return [packet if isinstance(packet, Disconnected) else packet.message for _, packet in end.poll(0)]


def test_payload_is_copied_before_it_may_change(network: MemoryNetwork) -> None:
    server, client = ends(network)
    memory = bytearray(4)
    hold = Buffer(torch.zeros(1)).hold()
    push = Push(1, 1, (0,), 1.0, False, (Run(0, 1, 0),))
    client.send("up", packet(push, memoryview(memory)), hold)
    assert hold.holds == 0
    client.send("up", packet(push, memoryview(memory)), None)
    memory[0] = 9
    for _, got in server.poll(0):
        assert isinstance(got, Packet)
        assert bytes(got.payload[0]) == bytes(4)
        got.payload[0][0] = 1  # it belongs to its receiver


def test_a_filter_loses_and_doubles(network: MemoryNetwork) -> None:
    server, client = ends(network)
    copies = iter([0, 2, 1])
    network.filter = lambda packet: next(copies)
    for number in (1, 2, 3):
        client.send("up", packet(Beat(number)), None)
    assert heard(server) == [Beat(2), Beat(2), Beat(3)]


def test_malformed_packet_is_an_error_and_the_rest_is_kept(network: MemoryNetwork) -> None:
    server, client = ends(network)
    client.send("up", packet(Done(1)), None)
    server._arrive("up", [b"trash"])
    client.send("up", packet(Done(2)), None)
    polled = server.poll(None)
    got = [next(polled)[1]]
    with pytest.raises(ProtocolError):
        next(polled)
    got += [item for _, item in server.poll(None)]
    assert [item.message for item in got if isinstance(item, Packet)] == [Done(1), Done(2)]
