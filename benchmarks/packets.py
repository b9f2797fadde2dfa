"""What a packet costs each end: Python calls, and processor time with warm and with cold caches.

    python benchmarks/packets.py [--rounds 300]

A PUSH with a loan, its PULLED, a PULL and an ACK are encoded, and decoded as a process does that
receives them: with checks of permission, types and bounds. Each has one run of elements, as of keys
with equal push numbers, or 1,000 of different numbers. For cold caches :data:`EVICTED_BYTES` are read
before each call, as other processes of a host do between two messages. The printed times are without that
of an empty function.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import cast

import torch
import zmq

from kvps import protocol as p
from kvps.net.doorman import Doorman
from kvps.protocol import wire
from kvps.protocol.envelope import Envelope, Loan, Packet, Role

EVICTED_BYTES = 48 << 20
SIZE = 64
"""Elements of a run."""
RUNS = (1, 1000)
WORKER = Envelope(bytes(16), 7, Role.WORKER, 3, 5, 42)
SERVER = Envelope(bytes(16), 7, Role.SERVER, 1, 2, 0)


def packets(count: int) -> list[Packet]:
    """Return one packet of each message, with ``count`` runs."""
    dice = random.Random(count)
    numbers = [(index * SIZE, SIZE, dice.randrange(1, 9)) for index in range(count)]
    loans = (Loan(1, 2, 4096, count * SIZE * 4),)
    stands = tuple([p.Stand(start, size, number, number) for start, size, number in numbers])
    asks = tuple([p.Ask(start, size, number, 0) for start, size, number in numbers])
    return [
        Packet(WORKER, p.Push(0, 1, (3,), 1.0, True, tuple(map(p.Run._make, numbers))), (), loans),
        Packet(SERVER, p.Pulled(42, 0, 1, True, stands), (), loans),
        Packet(WORKER, p.Pull(0, True, asks)),
        Packet(SERVER, p.Ack(tuple([p.Receipt(seq, 5) for seq in range(count)]))),
    ]


def calls_of(function: Callable[[], object]) -> int:
    """Return how many Python functions are called."""
    count = -1  # function itself

    def trace(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(trace)
    function()
    sys.setprofile(None)
    return count


def taken_us(function: Callable[[], object], rounds: int, evicted: torch.Tensor) -> float:
    """Return the median processor time of a call in microseconds, after ``evicted`` was read."""
    times = []
    for _ in range(rounds):
        evicted.sum()
        begun_ns = time.thread_time_ns()
        function()
        times.append(time.thread_time_ns() - begun_ns)
    return statistics.median(times) / 1000


def main() -> None:
    """Print a line for each message and number of runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300, help="calls of which the median is taken")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    doors = {Role.WORKER: Doorman(Role.SERVER), Role.SERVER: Doorman(Role.WORKER)}
    routes: dict[Role, bytes | str] = {Role.WORKER: b"\0worker", Role.SERVER: "server 1"}
    for count in RUNS:
        for packet in packets(count):
            door, route = doors[packet.envelope.role], routes[packet.envelope.role]
            frames = cast("Sequence[zmq.Frame]", [zmq.Frame(bytes(wire.encode(packet)[0]))])
            assert door.decode(route, frames) == packet
            line = f"{type(packet.message).__name__:7}{count:5} runs "
            for name, function in (
                ("encode", lambda packet=packet: wire.encode(packet)),
                ("decode", lambda door=door, route=route, frames=frames: door.decode(route, frames)),
            ):
                times = [
                    taken_us(function, rounds, evicted) - taken_us(lambda: None, rounds, evicted)
                    for evicted in (torch.empty(0), torch.zeros(EVICTED_BYTES // 4))
                ]
                line += f"| {name} {calls_of(function):3} calls, {times[0]:6.1f} us, cold {times[1]:6.1f} us "
            print(line)


if __name__ == "__main__":
    main()
