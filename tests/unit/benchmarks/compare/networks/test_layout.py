"""Which host holds what, and the rate of a link."""

import pytest

from benchmarks.compare.networks.layout import Hosts, bytes_per_s, layout_of
from kvps.errors import ConfigError


def test_everybody_has_a_host() -> None:
    hosts = layout_of("2x3")
    assert hosts == Hosts(workers=2, worker_hosts=2, servers=3)
    assert [hosts.holds(host) for host in range(hosts.count)] == [
        *("scheduler", "worker 0", "worker 1"),
        *("server 0", "server 1", "server 2"),
    ]


@pytest.mark.parametrize(
    ("layout", "held"),
    [
        ("8@1x2", ["scheduler", "workers 0 to 7", "server 0", "server 1"]),
        ("4@2x1", ["scheduler", "workers 0 to 1", "workers 2 to 3", "server 0"]),
        ("3@2x1", ["scheduler", "workers 0 to 1", "worker 2", "server 0"]),
    ],
)
def test_workers_share_hosts(layout: str, held: list[str]) -> None:
    hosts = layout_of(layout)
    assert [hosts.holds(host) for host in range(hosts.count)] == held


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("4", "write it as 4x4"),
        ("4 x 4", "write it as 4x4"),
        ("fourx4", "write it as 4x4"),
        ("0x1", "1 or more"),
        ("1x0", "1 or more"),
        ("2@3x1", "1 to 2 hosts"),
        ("2@0x1", "1 to 2 hosts"),
        ("200x1", "202 hosts; use at most 200"),
    ],
)
def test_a_layout_that_is_none(given: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        layout_of(given)


@pytest.mark.parametrize(
    ("given", "rate"),
    [("400mbit", 50e6), ("1gbit", 125e6), ("1.5Gbit", 187.5e6), ("8bit", 1.0), ("8kbit", 1e3)],
)
def test_rates(given: str, rate: float) -> None:
    assert bytes_per_s(given) == rate


@pytest.mark.parametrize("given", ["400", "fast", "0mbit", "-1mbit", "400mb"])
def test_a_rate_that_is_none(given: str) -> None:
    with pytest.raises(ConfigError, match=f"--rate='{given}' is not a rate; write it as 400mbit"):
        bytes_per_s(given)
