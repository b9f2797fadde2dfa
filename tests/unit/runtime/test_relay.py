"""The door of a subscription: its thread knows a version before anybody asks, and nothing waits for a thread that
has ended."""

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvps import protocol as p
from kvps.protocol.envelope import Envelope, Role
from kvps.runtime import relay
from kvps.runtime.relay import Door

PLACE = p.Read("policy", 3, 0, 0, 4)


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door("127.0.0.1", None, Envelope(bytes(16), 0, Role.READER, 1, 2, 0))
    yield door
    door.close()


def test_version_is_known_before_it_is_read(door: Door) -> None:
    for number in range(1, 50):
        door.begin("policy", number)
        assert door._relay._version == ("policy", number)


def test_ranges_that_nobody_waits_for_wake_the_thread_together(door: Door) -> None:
    door.begin("policy", 3)
    for start in range(relay.RANGES_PER_WAKE):
        door.add(replace(PLACE, start=start), memoryview(b"abcd"))
    until = time.monotonic() + 0.9  # before the loop looks by itself
    while len(door._relay._kept) < relay.RANGES_PER_WAKE and time.monotonic() < until:
        time.sleep(0.001)
    assert len(door._relay._kept) == relay.RANGES_PER_WAKE


def test_thread_that_has_ended_keeps_no_bytes(door: Door) -> None:
    door.close()
    door.begin("policy", 3)
    door.add(PLACE, memoryview(b"abcd"))
    assert not door._inbox.requests
