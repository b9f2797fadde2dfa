"""Hosts, slots, and the host of each process."""

from pathlib import Path

import pytest

from kvps.errors import ConfigError
from kvps.launchers.remote import Host, Placement, of_slurm, parse_hosts, tasks_per_node

ALLOCATED = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "3,1"}


def test_a_list() -> None:
    assert parse_hosts("a:4,user@b, 10.0.0.1:2") == [Host("a", 4), Host("user@b", 1), Host("10.0.0.1", 2)]


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\na slots=4\n\nb   # one slot\n")
    assert parse_hosts(str(path)) == [Host("a", 4), Host("b", 1)]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("a,,b", "is not the name"),
        ("-oProxyCommand=evil", "is not the name"),
        ("a b:2", "is not the name"),
        ("a:0", "use 1 or more"),
        ("a:two", "use 1 or more"),
        ("a:", "use 1 or more"),
        ("a,b,a", "host a is there twice"),
    ],
)
def test_a_bad_list(given: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_hosts(given)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "names no host"),
        ("a max_slots=3\n", "write it as 'HOST slots=N'"),
        ("a slots\n", "write it as 'HOST slots=N'"),
        ("a slots=-1\n", "use 1 or more"),
    ],
)
def test_a_bad_file(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        parse_hosts(str(path))


def test_an_allocation() -> None:
    assert of_slurm(ALLOCATED, lambda _: ["n1", "n2"]) == [Host("n1", 3), Host("n2", 1)]


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("SLURM_JOB_ID", "in no Slurm allocation"),
        ("SLURM_JOB_NODELIST", "in no Slurm allocation"),
        ("SLURM_TASKS_PER_NODE", "allocate with --ntasks"),
    ],
)
def test_half_an_allocation(missing: str, told: str) -> None:
    env = {name: value for name, value in ALLOCATED.items() if name != missing}
    with pytest.raises(ConfigError, match=told):
        of_slurm(env, lambda _: ["n1", "n2"])


def test_an_allocation_that_contradicts_itself() -> None:
    with pytest.raises(ConfigError, match="has 1 nodes, but SLURM_TASKS_PER_NODE=3,1 is of 2"):
        of_slurm(ALLOCATED, lambda _: ["n1"])


def test_slurms_way_to_write_numbers() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ConfigError, match="is not like"):
        tasks_per_node("2(3)")


def test_workers_fill_slots_and_servers_go_round() -> None:
    placed = Placement([Host("a", 2), Host("b", 1), Host("c", 9)], 4, 4)
    assert [placed.host_of("worker", rank) for rank in range(4)] == ["a", "a", "b", "c"]
    assert [placed.host_of("server", rank) for rank in range(4)] == ["a", "b", "c", "a"]
    assert placed.count_on("a", "server") == 2
    assert placed.count_on("a", "server", "worker") == 4
    assert placed.hosts == ["a", "b", "c"]


def test_too_few_slots() -> None:
    with pytest.raises(ConfigError, match=r"-n 4 needs 4 slots, but the 2 hosts have 3 \(a: 2, b: 1\)"):
        Placement([Host("a", 2), Host("b", 1)], 4, 0)
