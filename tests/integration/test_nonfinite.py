"""NaN and infinity in gradients, as a training script sees it: in this process, and over real ones."""

from __future__ import annotations

import logging
import threading

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


def test_workers_must_agree():
    opened = threading.Event()

    def work(rank):
        kvps.create("dist_sync", name="first")  # joins: that takes both
        if rank == 0:
            kv = kvps.create("dist_sync", name="kv", on_nonfinite="skip")
            opened.set()
        else:
            assert opened.wait(60)
            with pytest.raises(kvps.Mismatch, match="on_nonfinite='skip', and is now requested"):
                kvps.create("dist_sync", name="kv", on_nonfinite="error")
            kv = kvps.create("dist_sync", name="kv", on_nonfinite="skip")
        kv.barrier(timeout=60)

    with kvps.LocalCluster(2, 1) as cluster:
        cluster.run(work)


@pytest.mark.parametrize("servers", [1, 3])
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


@pytest.mark.parametrize("kind", ["dist_async", "dist_ssp"])
def test_a_push_is_left_out_on_all_servers(kind):
    def work(rank):
        kv = kvps.create(kind, timeout=60, on_nonfinite="error")
        kv.init(["big", "small"], [torch.zeros(BIG), torch.zeros(SMALL)])
        kv.set_optimizer("sgd", lr=1.0)
        raised = []
        for step in range(4):
            kv.push(["big", "small"], gradients(step, rank))
            try:
                kv.pull(["big", "small"])
            except kvps.NonFinite as error:
                raised.append(str(error))
        kv.barrier()
        big, small = kv.pull(["big", "small"], min_version=7)
        assert big.unique().tolist() == [4 + 3 * 2]
        assert small.unique().tolist() == [7]
        (text,) = raised
        assert (
            "push 1 of this rank of key 'big'" if rank else "push 2 of this rank of key 'small'"
        ) in text

    with kvps.LocalCluster(2, 2) as cluster:
        cluster.run(work)


@pytest.mark.parametrize("kind", ["local", "device"])
def test_a_local_store_means_the_same(kind, caplog):
    caplog.set_level(logging.WARNING, "kvps")
    for action in ("apply", "skip", "error"):
        kv = kvps.create(kind, on_nonfinite=action)
        kv.init(
            ["a", "b", "n"], [torch.zeros(3), torch.zeros(2), torch.zeros(2, dtype=torch.int64)]
        )
        rows = [torch.tensor([1.0, NAN, 1]), torch.ones(2), torch.ones(2, dtype=torch.int64)]
        out = [torch.full_like(row, 7) for row in rows]
        for step in range(2):
            if action == "error":
                with pytest.raises(
                    kvps.NonFinite, match=f"round {step} of key 'a' was dropped: 1 value of"
                ):
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


def test_a_local_optimizer_keeps_its_state():
    one, other = (kvps.create("local", on_nonfinite="skip") for _ in range(2))
    for kv in (one, other):
        kv.init("w", torch.ones(4))
        kv.set_optimizer("adam", lr=0.1)
    for step in range(3):
        one.push("w", torch.full((4,), NAN) if step == 1 else torch.ones(4))
        if step != 1:
            other.push("w", torch.ones(4))
    assert torch.equal(one.pull("w"), other.pull("w"))


SCRIPT = """
import os, torch, kvps
kv = kvps.create("dist_sync", timeout=60, on_nonfinite=os.environ["ACTION"])
keys = ["big", "small"]
kv.init(keys, [torch.zeros(250_000), torch.zeros(7)])
kv.set_optimizer("sgd", lr=1.0, momentum=0.5)
told = []
for step in range(5):
    rows = [-torch.ones(250_000), -torch.ones(7)]
    if step == 2 and kv.rank == 1:
        rows[0][200_000] = float("nan")
    if step == 3 and kv.rank == 0:
        rows[1][0] = float("inf")
    try:
        kv.pushpull(keys, rows)
    except kvps.NonFinite as error:
        told.append(str(error).split(" was dropped")[0].split(": ")[1])
values = [row.unique().tolist() for row in kv.pull(keys)]
print("RESULT", values, kv.version(keys), kv.dropped_rounds(), told, flush=True)
"""


@pytest.mark.parametrize("action", ["skip", "error"])
def test_processes(processes, action):
    cluster = processes.scheduler(2, 2)
    servers = [cluster.server("--log-level", "info") for _ in range(2)]
    script = processes.script(SCRIPT)
    workers = [cluster.plain(script, ACTION=action) for _ in range(2)]
    told = ["round 2 of key 'big'", "round 3 of key 'small'"] if action == "error" else []
    # Four rounds of 2 with momentum 0.5: 2 + 3 + 3.5 + 3.75.
    expected = f"RESULT [[12.25], [12.25]] [5, 5] {{'big': 1, 'small': 1}} {told}"
    for worker in workers:
        assert worker.wait() == 0, worker
        assert expected in worker.out
    logs = "".join(server.err for server in servers if server.wait() == 0)
    assert "round 2 dropped: 1 value of key 'big' is not finite (from rank" in logs
    processes.check_nothing_left()
