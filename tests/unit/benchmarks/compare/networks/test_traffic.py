"""What each link carried, from its counters."""

from benchmarks.compare.networks.traffic import (
    NetworkTrial,
    Traffic,
    cpu_s_per_gb,
    traffic_between,
    traffic_of,
)
from kvps.tools.bench.figures import Case, Measurement


def test_links_carry_what_their_counters_grew_by() -> None:
    links = traffic_between([(100, 200), (0, 0)], [(1100, 2200), (0, 50)], 10)
    assert links == (Traffic("host 0", 100.0, 200.0), Traffic("host 1", 0.0, 5.0))
    trials = [NetworkTrial((1.0,), (Traffic("host 0", item, 2 * item),)) for item in (1.0, 2.0, 9.0)]
    assert traffic_of(Measurement(Case("small", 2, 2), "kvps", trials)) == (Traffic("host 0", 2.0, 4.0),)


def test_processor_time_is_told_by_what_links_carried() -> None:
    links = (Traffic("host 0", 0.0, 2e6), Traffic("host 1", 2e6, 0.0))
    trials = [NetworkTrial((1.0,), links, cpu_s) for cpu_s in (0.001, 0.002, 0.009)]
    assert cpu_s_per_gb(Measurement(Case("small", 2, 2), "kvps", trials)) == 1.0
