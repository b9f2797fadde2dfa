"""From flags to a comparison: sweeps, networks, peers, and what is refused before anything starts."""

import sys
from pathlib import Path

import pytest

from benchmarks.compare import plan
from benchmarks.compare.__main__ import parser
from benchmarks.compare.networks import namespaces
from benchmarks.compare.plan import Comparison, plan_of
from benchmarks.compare.systems import NAMED_ONLY, SYSTEMS, chosen, version_of
from kvps.errors import ConfigError


def planned(*flags: str) -> Comparison:
    return plan_of(parser().parse_args(flags))


def names(found: Comparison) -> list[str]:
    return [system.name for system in found.systems]


@pytest.mark.parametrize(
    ("axis", "cases"),
    [
        ("workers", [("small", count, 2) for count in range(1, 9)]),
        ("servers", [("small", 2, count) for count in range(1, 5)]),
    ],
)
def test_sweeps_of_processes(axis: str, cases: list[tuple[str, int, int]]) -> None:
    found = planned("--sweep", axis, "--workloads", "small")
    assert [(case.workload, case.workers, case.servers) for case in found.cases] == cases
    assert names(found) == ["kvps", "gloo"]


def test_sweeps_of_sizes() -> None:
    sizes = [case.workload for case in planned("--sweep", "bytes").cases]
    assert (sizes[0], sizes[-1], len(sizes)) == ("bytes:1024", "bytes:1073741824", 11)
    keys = [case.workload for case in planned("--sweep", "keys").cases]
    assert (keys[0], keys[-1], len(keys)) == ("keys:1", "keys:100000", 6)


def test_a_sweep_at_some_values() -> None:
    found = planned("--sweep", "bytes", "--at", "1K", "1M")
    assert [case.workload for case in found.cases] == ["bytes:1024", "bytes:1048576"]


def test_a_network_has_its_own_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "demand_root", lambda: None)
    found = planned("--network", "8@1x4", "--rate", "1gbit")
    assert [(case.workload, case.workers, case.servers) for case in found.cases] == [("resnet50", 8, 4)]
    assert names(found) == ["kvps", "gloo"]
    assert (found.rate, found.has_limits) == ("1gbit", False)
    with pytest.raises(ConfigError, match="not 'gloo in place'"):
        planned("--network", "2x2", "--systems", "kvps", "gloo in place")


def test_a_network_is_for_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="needs root: run it as root"):
        planned("--network", "2x2")


def test_a_network_needs_iproute2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="the program 'ip'; install iproute2"):
        planned("--network", "2x2")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--sweep", "threads"], "use one of workers, servers, bytes, keys"),
        (["--sweep", "workers", "--workers", "2"], "--sweep workers and --workers"),
        (["--sweep", "workers", "--workloads", "small", "big"], "takes one workload, got 2"),
        (["--sweep", "keys", "--workloads", "small"], "has its own workload"),
        (["--sweep", "keys", "--network", "2x2"], "cannot be combined"),
        (["--sweep", "keys", "--at", "0"], "--at=0"),
        (["--sweep", "bytes", "--at", "6"], "--at=6: use a multiple of 4"),
        (["--at", "5"], "--at belongs to --sweep"),
        (["--rate", "1gbit"], "--rate belongs to --network"),
        (["--network", "2"], "write it as 4x4"),
        (["--network", "2x2", "--rate", "fast"], "not a rate"),
        (["--network", "2x2", "--workers", "2"], "--network and --workers"),
        (["--plot", "/dev/null/plots"], "cannot make this folder"),
        (["--mxnet", "no/such/python"], "--mxnet=no/such/python: cannot run it"),
    ],
)
def test_impossible_plan_is_refused_with_its_reason(flags: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(*flags)
    assert told in str(caught.value)


def test_an_interpreter_without_the_peer_is_named() -> None:
    with pytest.raises(ConfigError, match=r"it cannot import no_such_peer: .*docs/benchmarks.md"):
        version_of("no_such_peer", sys.executable)


def test_a_peer_is_asked_for_its_version() -> None:
    import numpy

    assert version_of("numpy", sys.executable) == numpy.__version__


class TestChosen:
    def test_all_that_there_are(self) -> None:
        """But for those that mean something on slow networks only."""
        everything = [name for name in SYSTEMS if name not in NAMED_ONLY]
        assert [field.name for field in chosen(None, ["mxnet", "ray"])] == everything
        without = {field.name for field in chosen(None, [])}
        assert set(everything) - without == {"mxnet", "mxnet sgd", "ray"}

    def test_unavailable_system_is_named(self) -> None:
        with pytest.raises(ConfigError, match=r"'mxnet sgd' cannot be measured: .* --mxnet PATH"):
            chosen(["mxnet sgd"], [])


def test_plots_need_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plan.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install matplotlib"):
        planned("--plot", str(tmp_path))
