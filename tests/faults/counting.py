"""A job inside this process whose weights count each push, and its servers behind proxies.

The gradient of a rank's step is 1 at the elements of that rank and step, and 0 elsewhere, and the
optimizer adds it to the weights. So each element counts one push: 0 says that it was lost, 2 that it
was applied twice, anything else that it was damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import pytest
import torch

import kvps
from kvps.runtime import local_cluster as local
from kvps.runtime.transport import open_transport

SIZES = {"wide": 50_001, "a": 501, "b": 997}
LIMIT_S = 60.0
PROBE_AFTER_S = 0.1
"""In place of two seconds: what is lost is asked for soon, and more can be lost in a test."""


class Proxy(Protocol):
    """Stands before a server, at an endpoint of its own."""

    endpoint: str

    def close(self) -> None:
        """Stop."""


@contextmanager
def behind(
    monkeypatch: pytest.MonkeyPatch,
    proxy: Callable[[str], Proxy],
    control: Callable[[str], Proxy] | None = None,
) -> Iterator[kvps.LocalCluster]:
    """A cluster of two servers and two workers, who know of a proxy in place of each server.

    Args:
        monkeypatch: of the test.
        proxy: makes one, for the endpoint of a server.
        control: makes another, which the workers take for the scheduler.
    """
    proxies: list[Proxy] = []

    def opened(bind: str | None = None, keys: None = None) -> tuple[object, object, str]:
        transport, memory, endpoint = open_transport(bind, keys)
        if bind is not None:
            proxies.append(proxy(endpoint))
            endpoint = proxies[-1].endpoint
        return transport, memory, endpoint

    monkeypatch.setenv("KVPS_INSECURE", "1")  # with keys, a proxy could read and change nothing
    monkeypatch.setenv("KVPS_TRANSPORT", "tcp")
    monkeypatch.setenv("KVPS_CHUNK_BYTES", "64K")
    monkeypatch.setattr(local, "open_transport", opened)
    for module in ("connection", "call_table"):
        monkeypatch.setattr(f"kvps.core.worker.{module}.PROBE_AFTER_S", PROBE_AFTER_S)
    try:
        with kvps.LocalCluster(workers=2, servers=2) as cluster:
            if control is not None:
                proxies.append(control(cluster.scheduler))
                cluster.scheduler = proxies[-1].endpoint
            yield cluster
    finally:
        for item in proxies:
            item.close()


def train(mode: str, steps: int, rank: int, limit_s: float = LIMIT_S) -> None:
    """Push ``steps`` times as one of the workers; each push of each of them must count once."""
    names = list(SIZES)
    with kvps.create(f"dist_{mode}", timeout=limit_s, bigarray_bound=20_000) as kv:
        kv.set_optimizer("test")
        kv.init(names, [torch.zeros(size) for size in SIZES.values()])
        owners = [torch.arange(size) % (steps * kv.num_workers) for size in SIZES.values()]
        for step in range(steps):
            mine = step * kv.num_workers + kv.rank
            gradients = [(owner == mine).float() for owner in owners]
            if step % 2:
                pulled = kv.pushpull(names, gradients)
            else:
                kv.push(names, gradients)
                pulled = kv.pull(names)
            for name, owner, value in zip(names, owners, pulled, strict=True):
                done = owner.div(kv.num_workers, rounding_mode="floor") <= step
                own = owner % kv.num_workers == kv.rank
                known = done if mode == "sync" else done & own
                assert value[known].eq(1).all(), f"{name} after {step}: {value[known].unique()}"
                assert value.eq(0).logical_or(value.eq(1)).all(), f"{name}: {value.unique()}"
                assert mode != "sync" or value[~done].eq(0).all(), f"{name}: too early"
        pushes = steps if mode == "sync" else steps * kv.num_workers
        for name, value in zip(names, kv.pull(names, min_version=pushes), strict=True):
            assert value.eq(1).all(), f"{name}: {value.unique(return_counts=True)}"
        assert kv.version(names) == [pushes] * len(names)
        kv.barrier()
