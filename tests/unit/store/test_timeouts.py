"""The ``timeout=`` of each call of a store that waits for others."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvps
from kvps.errors import ConfigError

LIMIT_S = 7.0
Call = Callable[[Any, str], object]
"""Makes a call of a store, with a path for its files."""

CALLS: dict[str, Call] = {
    "save_optimizer_states": lambda kv, path: kv.save_optimizer_states(path, timeout=LIMIT_S),
    "load_optimizer_states": lambda kv, path: kv.load_optimizer_states(path, timeout=LIMIT_S),
    "optimizer_states": lambda kv, _: kv.optimizer_states(timeout=LIMIT_S),
    "set_optimizer_states": lambda kv, _: kv.set_optimizer_states({}, timeout=LIMIT_S),
    "set_gradient_compression": lambda kv, _: kv.set_gradient_compression("fp16", timeout=LIMIT_S),
    "compression_state": lambda kv, _: kv.compression_state(timeout=LIMIT_S),
    "load_compression_state": lambda kv, _: kv.load_compression_state({}, timeout=LIMIT_S),
    "staleness": lambda kv, _: kv.staleness(timeout=LIMIT_S),
    "stragglers": lambda kv, _: kv.stragglers(timeout=LIMIT_S),
    "dropped_rounds": lambda kv, _: kv.dropped_rounds(timeout=LIMIT_S),
    "metrics": lambda kv, _: kv.metrics(servers=True, timeout=LIMIT_S),
    "join": lambda kv, _: kv.join(timeout=LIMIT_S),
    "barrier": lambda kv, _: kv.barrier(timeout=LIMIT_S),
    "resume": lambda kv, _: kv.resume("w", timeout=LIMIT_S),
    "close": lambda kv, _: kv.close(timeout=LIMIT_S),
}


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "states")


@pytest.fixture
def kv(path: str) -> Iterator[Any]:
    """Yield a store with an optimizer and one key, whose states are in a file."""
    with kvps.create("local") as made:
        made.set_optimizer("sgd", lr=0.5)
        made.init("w", torch.zeros(2))
        made.push("w", torch.ones(2))
        made.save_optimizer_states(path)
        yield made


@pytest.mark.parametrize("name", CALLS)
def test_a_call_waits_as_long_as_it_is_told(
    name: str, kv: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, limits = kv._start, []

    def noting(call: object, limit_s: float) -> object:
        limits.append(limit_s)
        return start(call, limit_s)

    monkeypatch.setattr(kv, "_start", noting)
    CALLS[name](kv, path)
    assert set(limits) == {LIMIT_S}


@pytest.mark.parametrize("name", CALLS)
def test_a_time_that_is_none_is_refused_by_name(
    name: str, kv: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "LIMIT_S", 0)
    with pytest.raises(ConfigError, match="timeout=0: use a number of seconds above 0"):
        CALLS[name](kv, path)
    kv.pull("w")
