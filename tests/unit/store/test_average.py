"""A store that takes means: the sum of a round is divided by the ranks that are in it."""

import pytest
import torch

from kvps.protocol.stores import Open
from tests.support.server_cluster import Cluster, gradient
from tests.support.server_harness import ServerStage, opening, refusal

pytestmark = pytest.mark.spec("R150")


def stage(workers: int, dtype: torch.dtype = torch.float32, **options: object) -> ServerStage:
    server = ServerStage(workers)
    server.open("sync", average=True, **options)
    server.init("w", torch.zeros(3, dtype=dtype))
    return server


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_round_is_the_mean_of_its_ranks(dtype: torch.dtype, deterministic: bool) -> None:
    server = stage(3, dtype, deterministic=deterministic)
    for rank in range(3):
        server.push(rank, "w", torch.tensor([rank, 3 * rank, 1], dtype=dtype), 0)
    assert server.values("w") == [1, 3, 1]


def test_halves_are_divided_before_they_are_rounded() -> None:
    server = stage(2, torch.float16)
    for rank in range(2):
        server.push(rank, "w", torch.full((3,), 60_000.0, dtype=torch.float16), 0)
    assert server.values("w") == [60_000.0] * 3, "their sum is no float16"


def test_the_optimizer_gets_the_mean() -> None:
    server = stage(2)
    server.optimizer("sgd", lr=0.5)
    for rank in range(2):
        server.push(rank, "w", torch.full((3,), 2.0 + rank), 0)
    assert server.values("w") == [-1.25] * 3


def test_a_single_push_may_be_of_several_ranks() -> None:
    server = stage(3, bundles=True)
    server.push(0, "w", torch.full((3,), 5.0), 0, ranks=(0, 1))
    server.push(2, "w", torch.full((3,), 4.0), 0)
    assert server.values("w") == [3.0] * 3


@pytest.mark.parametrize("rule", ["lars", None])
def test_each_part_of_a_tensor_is_divided_once(rule: str | None) -> None:
    """Also where a round makes the detour by what must be known of the whole tensor."""
    mean = Cluster(2, rule=rule, average=True, on_nonfinite="skip")
    plain = Cluster(2, rule=rule, on_nonfinite="skip")
    for server in range(2):
        for rank in range(2):
            mean.push(server, rank, 0)
            plain.push(server, rank, 0, gradient(rank, 0) / 2)
    mean.deliver_all()
    plain.deliver_all()
    assert mean.versions() == [1, 1]
    assert torch.allclose(mean.values(), plain.values(), rtol=1e-6)


def test_integers_have_no_mean() -> None:
    """They may be there, as the counters of a model are that are only handed out."""
    server = stage(2)
    server.init("n", torch.tensor([3, 4], dtype=torch.int64))
    said = refusal(server.push(0, "n", torch.tensor([1, 1], dtype=torch.int64), 0))
    assert "ConfigError: store 'kv' computes means, which integers do not have" in said
    assert server.values("n") == [3, 4]


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_average_needs_a_synchronous_store(mode: str) -> None:
    said = refusal(ServerStage(2).say(0, opening(mode=mode, average=True)))
    assert f"average needs a sync store; a store of mode {mode} applies each push" in said


def test_all_workers_agree() -> None:
    server = stage(2)
    said = refusal(server.say(1, opening(average=False)))
    assert "Mismatch: store 'kv' was opened with average=True, and is now" in said
    assert not Open("kv", "sync", 0, False, "wait", 1).average


# --- means by weight --------------------------------------------------------------------------------


@pytest.mark.spec("R350")
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_push_counts_by_its_weight(deterministic: bool) -> None:
    """What travels is multiplied by the weight already."""
    server = stage(2, deterministic=deterministic)
    server.push(0, "w", torch.full((3,), 4.0) * 3, 0, weight=3)
    server.push(1, "w", torch.full((3,), 8.0), 0, weight=1)
    assert server.values("w") == [5.0] * 3


@pytest.mark.spec("R350")
def test_a_sum_knows_no_weights() -> None:
    server = ServerStage(2)
    server.open("sync")
    server.init("w", torch.zeros(3))
    server.push(0, "w", torch.ones(3), 0, weight=3)
    server.push(1, "w", torch.ones(3), 0)
    assert server.values("w") == [2.0] * 3


@pytest.mark.spec("R351")
@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_a_weight_is_above_0(weight: float) -> None:
    server = stage(2)
    server.push(0, "w", torch.ones(3), 0)
    assert "ProtocolError: a push of weight" in refusal(server.push(1, "w", torch.ones(3), 0, weight=weight))
    assert server.values("w") == [0.0] * 3, "nothing was applied"


def test_half_a_round_that_is_cut_keeps_its_weights() -> None:
    """A later push of a part of the span cuts it while its round is open."""
    server = stage(2)
    server.init("v", torch.zeros(3))
    both = torch.full((6,), 6.0)
    server.push(0, ["w", "v"], both * 2, 0, weight=2)
    server.push(1, "w", torch.zeros(3), 0)
    server.push(1, "v", torch.full((3,), 3.0), 0)
    assert server.values("w") == [4.0] * 3
    assert server.values("v") == [5.0] * 3


def test_the_order_of_weights_does_not_change_a_bit() -> None:
    weights = [0.1, 1e9, 0.3, 7.0]
    found = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        server = stage(4, deterministic=True)
        for rank in order:
            server.push(rank, "w", torch.full((3,), 1.0 + rank) * weights[rank], 0, weight=weights[rank])
        found.append(server.values("w"))
    assert found[0] == found[1]
