"""Ranges in torch.profiler."""

import pytest
import torch

import kvps
from kvps.runtime.ticket import is_profiled


def test_calls_and_waits_are_ranges_while_a_profiler_is_active() -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with kvps.LocalCluster(workers=1, servers=1) as cluster:

        def train(rank: int) -> set[str]:
            kv = kvps.create("dist_sync")
            kv.init("w", torch.zeros(4))
            with torch.profiler.profile(activities=activities) as profile:
                kv.push("w", torch.ones(4))
                kv.pull("w", out=torch.zeros(4))
                kv.pushpull("w", torch.ones(4), out=torch.zeros(4))
                # The others may be over before they are waited for.
                with pytest.raises(kvps.Timeout):
                    kv.pull("w", min_version=99, timeout=0.5)
            return {event.name for event in profile.events() if event.name.startswith("kvps::")}

        (names,) = cluster.run(train)
    assert names >= {"kvps::push", "kvps::pull", "kvps::wait"}


def test_a_profiler_is_seen_while_it_is_active() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert is_profiled()
    assert not is_profiled()
