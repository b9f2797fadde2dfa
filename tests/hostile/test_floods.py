"""Amounts that nobody has memory for, behind a key that opens the door: the job beside it goes on."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from kvps import protocol as m
from tests.hostile.target import Target
from tests.integration.processes import made

PART_MIB = 400
"""What parts of messages that nobody has ended may take meanwhile: some are counted only after they have come."""


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    """Yield a job of its own, so that its memory is that of one flood."""
    for processes in made(tmp_path):
        target = Target(processes)
        with target.unharmed():
            yield target
        target.finish()


def peak_mib(target: Target) -> int:
    """Return the most memory that the scheduler or the server had so far."""
    peaks = []
    for process in (target.cluster.process, target.server):
        with open(f"/proc/{process.pid}/status") as status:
            (line,) = [line for line in status if line.startswith("VmHWM")]
        peaks.append(int(line.split()[1]) >> 10)
    return max(peaks)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("port", ["server", "scheduler"])
def test_five_million_empty_frames(target: Target, port: str) -> None:
    """In one message, inside CURVE; by a member, and by a role key that has said nothing else."""
    before = peak_mib(target)
    key = None if port == "server" else target.role("worker")
    with target.voice(port, key) as voice, suppress(zmq.Again):
        voice._socket.sndtimeo = 60_000
        for _ in range(5_000_000):
            voice._socket.send(b"", zmq.SNDMORE)
        voice._socket.send(b"")
        assert voice.heard(2000) is None
    assert peak_mib(target) < before + PART_MIB


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_thousand_stores(target: Target) -> None:
    before = peak_mib(target)
    with target.voice("server") as voice:
        refused = 0
        for batch in range(100):
            for number in range(1000):
                voice.say(target.me(), m.Open(f"{batch}-{number}", "async", 0, False, "wait", 10**6))
            for _ in range(1000):
                answer = voice.heard(10_000)
                refused += isinstance(answer, m.Error)
                assert isinstance(answer, m.Done | m.Error), answer
        assert refused > 95_000
    assert peak_mib(target) < before + 64
