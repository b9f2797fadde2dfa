"""NaN and infinity in gradients, as a training script sees it: in this process, and over real ones."""

import logging

import pytest
import torch

import kvps

NAN, INF = float("nan"), float("inf")
BIG, SMALL = 250_000, 7
"""One that is cut over the servers, and one that lies on one."""


def gradients(step: int, rank: int) -> list[torch.Tensor]:
    """The last value of ``big`` is NaN in step 1 from rank 1, and one of ``small`` in step 2."""
    big, small = torch.full((BIG,), -1.0 - rank), torch.full((SMALL,), -1.0)
    if (step, rank) == (1, 1):
        big[-1] = NAN
    if (step, rank) == (2, 0):
        small[3] = INF
    return [big, small]


@pytest.mark.parametrize("kind", ["local", "device", "dist_sync", "dist_async", "dist_ssp"])
def test_an_unknown_action_is_refused(kind):
    with kvps.LocalCluster(1, 1), pytest.raises(kvps.ConfigError) as caught:
        kvps.create(kind, on_nonfinite="ignore")
    assert "on_nonfinite='ignore': use one of apply, skip, error" in str(caught.value)


@pytest.mark.parametrize("servers", [3])
@pytest.mark.parametrize("action", ["skip", "error"])
def test_a_round_is_left_out_on_all_servers(action, servers):
    def work(rank):
        kv = kvps.create("dist_sync", timeout=60, on_nonfinite=action)
        kv.init(["big", "small"], [torch.zeros(BIG), torch.zeros(SMALL)])
        kv.set_optimizer("sgd", lr=1.0)
        raised = []
        for step in range(4):
            try:
                kv.pushpull(["big", "small"], gradients(step, rank))
            except kvps.NonFinite as error:
                raised.append(str(error))
        big, small = kv.pull(["big", "small"])
        assert big.unique().tolist() == [9.0]  # three rounds of 1 + 2
        assert small.unique().tolist() == [6.0]
        assert kv.version(["big", "small"]) == [4, 4]
        assert kv.dropped_rounds() == {"big": 1, "small": 1}
        if action == "skip":
            assert raised == []
            return
        first, second = raised
        assert "round 1 of key 'big' was dropped: 1 value of key 'big' is not finite" in first
        assert "(from rank 1)" in first
        assert "round 2 of key 'small' was dropped" in second

    with kvps.LocalCluster(2, servers) as cluster:
        cluster.run(work)


@pytest.mark.parametrize("kind", ["local", "device"])
def test_a_local_store_means_the_same(kind, caplog):
    caplog.set_level(logging.WARNING, "kvps")
    for action in ("apply", "skip", "error"):
        kv = kvps.create(kind, on_nonfinite=action)
        kv.init(["a", "b", "n"], [torch.zeros(3), torch.zeros(2), torch.zeros(2, dtype=torch.int64)])
        rows = [torch.tensor([1.0, NAN, 1]), torch.ones(2), torch.ones(2, dtype=torch.int64)]
        out = [torch.full_like(row, 7) for row in rows]
        for step in range(2):
            if action == "error":
                with pytest.raises(kvps.NonFinite, match=f"round {step} of key 'a' was dropped: 1 value of"):
                    kv.pushpull(["a", "b", "n"], rows, out=out)
            else:
                kv.pushpull(["a", "b", "n"], rows, out=out)
        assert out[1].tolist() == out[2].tolist() == [1, 1]
        assert out[0].isfinite().all().item() is (action != "apply")
        assert kv.version("a") == 2
        assert kv.dropped_rounds() == ({} if action == "apply" else {"a": 2})
        kv.pull("a")  # told once
        kv.push("a", rows[0])
        if action == "error":
            kv.push("b", torch.full((2,), INF))
            with pytest.raises(kvps.NonFinite, match=r"round 2 of key 'a' \(and 1 more\)"):
                kv.pull(["a", "b"])
            with pytest.raises(kvps.NonFinite):
                kv.pushpull("a", rows[0], copy=False)
        kv.pull(["a", "b"], copy=False)
        if action == "skip":
            assert "round 0 dropped: 1 value of key 'a' is not finite" in caplog.text
