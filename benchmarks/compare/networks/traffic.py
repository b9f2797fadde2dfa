"""The traffic of each link in a round, from the counters of its ends."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from kvps.tools.bench.figures import Measurement, TrialTimes


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes that one host's link carried in a round, on average."""

    host: str
    in_bytes: float
    out_bytes: float


@dataclass(frozen=True, slots=True)
class NetworkTrial(TrialTimes):
    """A trial on hosts with links of a set rate."""

    traffic: tuple[Traffic, ...] = ()
    cpu_s: float = 0.0
    """Processor time of all processes in a round."""


def traffic_between(
    before: list[tuple[int, int]], after: list[tuple[int, int]], rounds: int
) -> tuple[Traffic, ...]:
    """Return what each link carried in a round, from its counters before and after all of them."""
    pairs = enumerate(zip(before, after, strict=True))
    return tuple(
        Traffic(f"host {host}", (last[0] - first[0]) / rounds, (last[1] - first[1]) / rounds)
        for host, (first, last) in pairs
    )


def traffic_of(row: Measurement) -> tuple[Traffic, ...]:
    """Return what each host's link carried in a round, as the median of the trials."""
    trials = [trial for trial in row.trials if isinstance(trial, NetworkTrial)]
    return tuple(
        Traffic(
            links[0].host,
            statistics.median(link.in_bytes for link in links),
            statistics.median(link.out_bytes for link in links),
        )
        for links in zip(*(trial.traffic for trial in trials), strict=True)
    )


def cpu_s_per_gb(row: Measurement) -> float:
    """Return the processor time that 10^9 bytes on a link took at both ends together; the median
    of the trials."""
    return statistics.median(
        1e9 * trial.cpu_s / sum(link.out_bytes for link in trial.traffic)
        for trial in row.trials
        if isinstance(trial, NetworkTrial)
    )
