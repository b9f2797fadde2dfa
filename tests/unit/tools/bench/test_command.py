"""From flags to a plan: cases, systems, and what is refused before anything starts."""

from pathlib import Path

import pytest

from kvps.errors import ConfigError
from kvps.tools.bench.command import MOVED, demand_own, parser
from kvps.tools.bench.run import Plan, plan_of
from kvps.tools.bench.systems import NAMED_ONLY, SYSTEMS


def planned(*flags: str) -> Plan:
    return plan_of(parser().parse_args(flags))


def names(found: Plan) -> list[str]:
    return [system.name for system in found.systems]


def test_the_usual_plan() -> None:
    found = planned()
    assert [(case.workload, case.workers, case.servers) for case in found.cases] == [
        *(("resnet50", 2, 2), ("big", 2, 2), ("small", 2, 2))
    ]
    assert (found.rounds, found.repeat, found.has_limits) == (10, 1, False)
    assert names(found) == ["kvps", "gloo"]


def test_the_full_plan() -> None:
    found = planned("--full")
    assert found.cases == planned().cases
    assert (found.rounds, found.repeat, found.has_limits) == (10, 3, True)
    assert not planned("--full", "--no-limits").has_limits
    assert {"kvps", "kvps sgd", "kvps tcp", "gloo", "gloo in place"} <= set(names(found))


def test_flags_change_it(tmp_path: Path) -> None:
    flags = "--workloads small keys:7 --workers 3 --servers 1 --rounds 4 --repeat 1 --systems gloo kvps gloo --no-limits"
    found = planned(*flags.split(), "--json", str(tmp_path / "a.json"))
    assert [(case.workload, case.workers, case.servers) for case in found.cases] == [
        *(("small", 3, 1), ("keys:7", 3, 1))
    ]
    assert names(found) == ["gloo", "kvps"]
    assert (found.rounds, found.repeat, found.has_limits) == (4, 1, False)


def test_all_systems_but_the_compressed_ones() -> None:
    assert names(planned("--full")) == [name for name in SYSTEMS if name not in NAMED_ONLY]
    assert names(planned("--systems", *SYSTEMS)) == list(SYSTEMS)


@pytest.mark.parametrize("flag", MOVED)
def test_a_flag_that_has_moved_answers_with_its_command(flag: str) -> None:
    argv = ["--rounds", "2", flag, "a b"]
    with pytest.raises(ConfigError) as caught:
        demand_own(parser().parse_args(argv), argv)
    assert str(caught.value) == (
        f"{flag} is not part of kvps bench. In a clone of the repository "
        f"(docs/benchmarks.md) run: python -m benchmarks.compare --rounds 2 {flag} 'a b'"
    )


def test_a_system_that_has_moved_answers_with_its_command() -> None:
    argv = ["--systems", "kvps", "mxnet sgd"]
    with pytest.raises(ConfigError, match=r"'mxnet sgd' is not .*compare --systems kvps 'mxnet sgd'"):
        demand_own(parser().parse_args(argv), argv)
    demand_own(parser().parse_args([]), [])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--workloads", "huge"], "no workload 'huge'"),
        (["--systems", "horovod"], "no system 'horovod'; use some of 'kvps'"),
        (["--rounds", "0"], "--rounds=0: use 1 or more"),
        (["--repeat", "some"], "--repeat='some' is not a number"),
        (["--workers", "0"], "--workers=0"),
        (["--servers", "1.5"], "--servers=1.5"),
        (["--json", "no/such/folder/a.json"], "an existing directory"),
    ],
)
def test_impossible_plan_is_refused_with_its_reason(flags: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(*flags)
    assert told in str(caught.value)
