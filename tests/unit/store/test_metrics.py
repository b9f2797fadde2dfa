"""The numbers of a store for experiment trackers: names, waiting times, and what each call adds."""

import time
from collections.abc import Callable

import pytest
import torch

import kvps
from kvps.protocol.stores import Clock, OpenRound, StatusIs
from kvps.store.metrics import NAMES, SERVER_NAMES, WAITS_MAX, WaitTimes, of_servers, percentile


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile([], 0.5) == 0.0
    assert percentile([1.0], 0.99) == 1.0
    hundred = [float(item) for item in range(1, 101)]
    assert (percentile(hundred, 0.5), percentile(hundred, 0.99)) == (50.0, 99.0)


def test_only_the_newest_waiting_times_make_percentiles() -> None:
    waits = WaitTimes()
    waits.add(1000.0)
    for _ in range(WAITS_MAX):
        waits.add(0.5)
    figures = waits.figures("pull")
    assert figures["pull_calls"] == WAITS_MAX + 1
    assert figures["pull_wait_s"] == 1000.0 + WAITS_MAX / 2
    assert figures["pull_wait_p99_s"] == 0.5


def test_a_local_store_has_every_name_and_counts() -> None:
    with kvps.create("local") as kv:
        assert kv.metrics().keys() == NAMES.keys()
        assert set(kv.metrics().values()) <= {0, 1}
        kv.init("w", torch.zeros(256))
        for _ in range(3):
            kv.push("w", torch.ones(256))
            kv.pull("w")
        kv.pushpull("w", torch.ones(256))
        found = kv.metrics()
        assert (found["rounds"], found["keys"], found["servers"]) == (4, 1, 1)
        assert (found["push_calls"], found["pull_calls"]) == (3, 4)
        assert found["sent_bytes"] == 5 * 1024  # init, and 4 pushes
        assert found["received_bytes"] == 4 * 1024
        assert 0 < found["push_wait_p50_s"] <= found["push_wait_p99_s"] <= found["push_wait_s"]
        assert all(type(item) in (int, float) for item in found.values())


def test_servers_are_asked_only_if_wished() -> None:
    with kvps.create("local") as kv:
        kv.init("w", torch.zeros(2))
        assert not SERVER_NAMES.keys() & kv.metrics().keys()
        asked = kv.metrics(servers=True)
        assert asked.keys() == {*NAMES, *SERVER_NAMES}
        assert {asked[name] for name in SERVER_NAMES} == {0}


def test_compression_ratio_is_shown() -> None:
    with kvps.create("dist_sync") as kv:
        kv.set_gradient_compression({"type": "fp16", "min_bytes": 0})
        kv.init("w", torch.zeros(4096))
        kv.pushpull("w", torch.ones(4096))
        assert kv.metrics()["compression_ratio"] == pytest.approx(2.0, rel=0.01)
    kvps.shutdown()


def test_the_wait_for_a_handle_counts_and_the_time_before_it_does_not() -> None:
    with kvps.create("dist_sync") as kv:
        kv.init("w", torch.zeros(2))
        handle = kv.pushpull("w", torch.ones(2), async_op=True)
        assert kv.metrics()["pull_calls"] == 0
        handle.wait()
        handle.wait()  # the second time there is nothing to wait for
        assert kv.metrics()["pull_calls"] == 1
        kv.push("w", torch.ones(2), async_op=True).wait()
        assert kv.metrics()["push_calls"] == 1
    kvps.shutdown()


def test_the_answers_of_servers_are_summed_up() -> None:
    status_is = StatusIs(1, (OpenRound("w", 3, (1,), 2.5),), (Clock("w", {"0": 3}),), {"w": 2}, {"0": 0.5})
    other = StatusIs(1, (OpenRound("w", 3, (1,), 2.0),), (), {"w": 2, "b": 1}, {"1": 4.0})
    assert of_servers([status_is, other], 0, {"w": 1, "b": 0}) == {
        "staleness": 1,
        "lateness_s": 0.5,
        "dropped_rounds": 2,
        "open_rounds": 1,
        "oldest_round_s": 2.5,
    }


def test_a_rank_that_comes_late_sees_it() -> None:
    def work(rank: int) -> dict[str, float]:
        kv = kvps.create("dist_sync")
        kv.init("w", torch.zeros(2))
        for number in range(3):
            wait_for(lambda number=number: rank == 0 or kv.stragglers() or number < 0)
            kv.pushpull("w", torch.ones(2))
        kv.barrier()
        found = kv.metrics(servers=True)
        kv.barrier()
        return found

    with kvps.LocalCluster(workers=2, servers=1) as cluster:
        first, late = cluster.run(work)
    assert first["lateness_s"] == 0.0
    assert late["lateness_s"] > 0.0
    assert (first["rounds"], first["workers"], late["rank"]) == (3, 2, 1)


def wait_for(is_there: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not is_there():
        assert time.monotonic() < deadline


def test_an_allreduce_store_has_the_same_names() -> None:
    def work(rank: int) -> dict[str, float]:
        kv = kvps.create("allreduce")
        kv.init("w", torch.zeros(2))
        kv.pushpull("w", torch.ones(2))
        return kv.metrics(servers=True)

    with kvps.LocalCluster(workers=2, servers=1) as cluster:
        found = cluster.run(work)
    assert [item["rank"] for item in found] == [0, 1]
    for item in found:
        assert item.keys() == {*NAMES, *SERVER_NAMES}
        assert (item["servers"], item["keys"], item["pull_calls"], item["rounds"]) == (0, 1, 1, 1)
        assert item["sent_bytes"] == 8


def test_the_numbers_outlive_the_cluster() -> None:
    kv = kvps.create("dist_sync")
    kv.init("w", torch.zeros(2))
    kv.push("w", torch.ones(2))
    kvps.shutdown()
    assert kv.metrics()["rounds"] == 1


@pytest.mark.parametrize("name", [*NAMES, *SERVER_NAMES])
def test_the_document_has_each_name_with_its_meaning(name: str, request: pytest.FixtureRequest) -> None:
    text = (request.config.rootpath / "docs" / "observability.md").read_text(encoding="utf-8")
    assert f"| `{name}` | {({**NAMES, **SERVER_NAMES})[name]} |" in text
