"""Packets within one process: what a transport has to do, without sockets."""

import threading

import pytest
import torch

from kvps.core.effects import Connect
from kvps.core.server.chunks.slab import Buffer
from kvps.errors import ConfigError, ProtocolError
from kvps.net.transport import DROPPED, Disconnected
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
    return [one if isinstance(one, Disconnected) else one.message for _, one in end.poll(0)]


def test_packets_travel_both_ways(network: MemoryNetwork) -> None:
    server, client = ends(network)
    client.send("up", packet(Beat(1)), None)
    ((route, got),) = server.poll(None)
    assert isinstance(got, Packet)
    assert got.message == Beat(1)
    server.send(route, packet(Beat(2)), None)
    assert [(at, one.message) for at, one in client.poll(None) if isinstance(one, Packet)] == [
        ("up", Beat(2))
    ]
    assert network.carried == {"Beat": 2}
    assert (server.endpoint, client.endpoint) == ("mem://s", "")


def test_an_endpoint_is_taken_once(network: MemoryNetwork) -> None:
    server, _ = ends(network)
    with pytest.raises(ConfigError, match="cannot listen on mem://s"):
        network.transport("mem://s")
    server.close(0)
    network.transport("mem://s")
    server.close(0)
    assert "mem://s" in network.ends, "it is another's now"


def test_packet_to_an_unknown_endpoint_is_lost(network: MemoryNetwork) -> None:
    client = network.transport()
    client.connect(Connect("up", "mem://nobody"))
    client.send("up", packet(Beat(1)), None)
    assert not network.carried
    _, other = ends(network)
    other.connect(Connect("up", "mem://nobody"))
    other.send("up", packet(Beat(1)), None)
    assert not network.carried


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


def test_the_other_end_hears_of_a_close(network: MemoryNetwork) -> None:
    server, client = ends(network)
    client.send("up", packet(Beat(1)), None)
    client.close(0)
    assert heard(server) == [Beat(1), DROPPED]


def test_a_wait_ends_with_a_wake_or_its_time(network: MemoryNetwork) -> None:
    server, _ = ends(network)
    assert heard(server) == []
    threading.Timer(0.01, server.wake).start()
    assert list(server.poll(None)) == []


def test_malformed_packet_is_an_error_and_the_rest_is_kept(network: MemoryNetwork) -> None:
    server, client = ends(network)
    client.send("up", packet(Done(1)), None)
    server._arrive("up", [b"trash"])
    client.send("up", packet(Done(2)), None)
    polled = server.poll(None)
    got = [next(polled)[1]]
    with pytest.raises(ProtocolError):
        next(polled)
    got += [one for _, one in server.poll(None)]
    assert [one.message for one in got if isinstance(one, Packet)] == [Done(1), Done(2)]
