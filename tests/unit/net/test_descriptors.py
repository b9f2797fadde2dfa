"""When limits of file descriptors are raised, and when somebody is told."""

import resource

import pytest

from kvps.errors import ConfigError
from kvps.net import descriptors, zeromq
from kvps.net.zeromq import ZmqTransport

ENDLESS = resource.RLIM_INFINITY


class Limits:
    """Limits of a process that has 10 descriptors open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = (0, 0)
        monkeypatch.setattr(resource, "getrlimit", lambda _: self.now)
        monkeypatch.setattr(resource, "setrlimit", lambda _, limits: setattr(self, "now", limits))
        monkeypatch.setattr("os.listdir", lambda _: ["fd"] * 11)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    return Limits(monkeypatch)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((40, 40), (40, 40)),
        ((39, 100), (40, 100)),
        ((39, ENDLESS), (40, ENDLESS)),
        ((ENDLESS, ENDLESS), (ENDLESS, ENDLESS)),
    ],
)
def test_descriptor_limit_is_raised_where_needed(
    limits: Limits, before: tuple[int, int], after: tuple[int, int]
) -> None:
    limits.now = before
    descriptors.demand("somebody", 30)
    assert limits.now == after


def test_a_hard_limit_that_is_too_low_is_named(limits: Limits) -> None:
    limits.now = (20, 39)
    with pytest.raises(ConfigError, match=r"somebody needs 30 .* besides the 10 .* have 39 .*-n 40"):
        descriptors.demand("somebody", 30)
    assert limits.now == (20, 39)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((20, 39), (39, 39)),
        ((20, 100), (40, 100)),
        ((20, ENDLESS), (40, ENDLESS)),
        ((50, 100), (50, 100)),
        ((ENDLESS, ENDLESS), (ENDLESS, ENDLESS)),
    ],
)
def test_room_is_made_as_far_as_may_be(
    limits: Limits, before: tuple[int, int], after: tuple[int, int]
) -> None:
    limits.now = before
    descriptors.make_room(30)
    assert limits.now == after


def test_where_it_cannot_be_seen_what_is_open(limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: OSError) -> None:
        def listdir(_: str) -> list[str]:
            raise error

        monkeypatch.setattr("os.listdir", listdir)

    limits.now = (20, 40)
    fail(OSError(24, "Too many open files"))
    with pytest.raises(ConfigError, match="besides the 20"):
        descriptors.demand("somebody", 21)
    fail(FileNotFoundError(2, "no /proc"))
    descriptors.demand("somebody", 37)
    assert limits.now == (40, 40)


def test_larger_jobs_need_more() -> None:
    for count in (descriptors.of_scheduler, descriptors.of_server, descriptors.of_worker):
        assert count(1, 1) < count(2, 1)
        assert count(2, 1) < count(2, 2)


def test_exhausted_descriptors_are_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once in a while, and counted each second."""
    transport = ZmqTransport("tcp://127.0.0.1:0")
    monkeypatch.setattr(zeromq, "LOOK_EVERY_S", 0.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        list(transport.poll(0.0))
        assert not transport.refused.connections["no_descriptor"]
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        for _ in range(3):
            list(transport.poll(0.0))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        transport.close(0.0)
    assert transport.refused.connections["no_descriptor"] == 3
    assert [
        message for message in caplog.messages if "all file descriptors of this process are in use" in message
    ]
    assert len(caplog.messages) == 1
