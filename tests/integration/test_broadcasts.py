"""One worker's values to all, and means over all."""

import sys

import pytest
import torch

import kvps
import kvps.torch as front
from kvps.torch.sync.shared_stores import own_store
from tests.integration.processes import Processes


def run(work, workers=2):
    """Call ``work(rank)`` as each worker of a cluster; return the results."""
    with kvps.LocalCluster(workers, 2) as cluster:
        return cluster.run(work)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("kvps.store.create.TIMEOUT_S", 20.0)


# --- parameters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", [0, 1, 2])
@pytest.mark.parametrize("kvstore", ["dist_sync", "allreduce"])
def test_parameters_and_buffers_are_those_of_the_root(root, kvstore):
    def work(rank):
        torch.manual_seed(rank)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        model[1].running_mean.fill_(rank)
        model[1].num_batches_tracked.fill_(rank)
        mine = {name: item.clone() for name, item in model.state_dict().items()}
        places = [param.data_ptr() for param in model.parameters()]
        front.broadcast_parameters(model, root, kvstore=kvstore)
        assert [param.data_ptr() for param in model.parameters()] == places
        return mine, model.state_dict()

    results = run(work, workers=3)
    expected = results[root][0]
    assert not torch.equal(expected["0.weight"], results[root - 1][0]["0.weight"])
    for _, found in results:
        assert all(torch.equal(found[name], item) for name, item in expected.items())


@pytest.mark.parametrize("root", [0, 1])
def test_bits_are_exact_in_any_type_and_stride(root):
    def work(rank):
        nan = torch.tensor([0x7FC00001, -1, 1, -0x80000000], dtype=torch.int32).view(torch.float32)
        some = {
            "bits": nan if rank == root else torch.ones(4),
            "flags": torch.tensor([True, False]) ^ (rank != root),
            "complex": torch.tensor([1 + 2j]) * (1 if rank == root else 3),
            "half": torch.tensor([65504.0, 6e-8], dtype=torch.float16) * (rank == root),
            "strided": torch.arange(6.0).view(2, 3).T * (1 if rank == root else 0),
            "scalar": torch.tensor(5 if rank == root else 0),
            "empty": torch.empty(0, 3),
        }
        front.broadcast_parameters(some.items(), root)
        assert some["bits"].view(torch.int32).tolist() == nan.view(torch.int32).tolist()
        assert some["flags"].tolist() == [True, False]
        assert some["complex"].item() == 1 + 2j
        assert some["half"].tolist() == torch.tensor([65504.0, 6e-8]).half().tolist()
        assert some["strided"].tolist() == [[0, 3], [1, 4], [2, 5]]
        assert some["scalar"].item() == 5

    run(work)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (3, "params: .*got int"),
        (torch.ones(1), "got Tensor"),
        ({"w": 1.0}, "'w': float"),
        ([torch.ones(1)], "got Tensor"),
        ({"w": torch.ones(2).to_sparse()}, "'w' is .*sparse"),
    ],
)
def test_broadcast_parameters_refuses_other_values(params, says):
    with pytest.raises(kvps.ConfigError, match=says):
        front.broadcast_parameters(params)


def test_roots_and_stores_that_are_not():
    def work(rank):
        for root in (2, -1, True, 1.0):
            with pytest.raises(kvps.ConfigError, match=r"root_rank=.*there are 2 workers"):
                front.broadcast_object(1, root)
        with pytest.raises(kvps.ConfigError, match=r"dist_async.*dist_sync"):
            front.broadcast_object(1, kvstore="dist_async")
        mine = kvps.create("dist_sync")
        assert front.broadcast_object(rank, 1, kvstore=mine) == 1
        mine.set_optimizer("sgd", lr=1.0)
        with pytest.raises(kvps.ConfigError, match="with an optimizer"):
            front.average(1.0, kvstore=mine)

    run(work)


def test_alone_it_sends_to_nobody_and_checks_all_the_same():
    def work(rank):
        weight = torch.ones(2)
        front.broadcast_parameters({"w": weight})
        assert front.broadcast_object({"a": 1}) == {"a": 1}
        with pytest.raises(kvps.ConfigError, match=r"obj\['a'\]"):
            front.broadcast_object({"a": print})
        optimizer = torch.optim.Adam([weight.requires_grad_()])
        front.broadcast_optimizer_state(optimizer)
        assert optimizer.state_dict()["state"] == {}
        assert front.average(3) == 3.0
        assert own_store("broadcast", "dist_sync").keys() == []

    run(work, workers=1)


# --- objects --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", [0, 1])
def test_objects(root):
    def work(rank):
        seen = []
        for step in range(3):
            mine = {"rank": rank, "steps": (step,) * (1 + 1000 * step), "w": torch.ones(2) * rank}
            found = front.broadcast_object(mine if rank == root else print, root, name="state")
            seen.append((found["rank"], found["steps"], found["w"].tolist()))
        return seen

    expected = [(root, (step,) * (1 + 1000 * step), [float(root)] * 2) for step in range(3)]
    assert run(work) == [expected] * 2


def test_an_object_that_cannot_be_sent_is_told_to_all_and_the_next_one_is_paired():
    def work(rank):
        with pytest.raises(kvps.ConfigError, match=r"obj\['a'\]\[1\] is a builtins"):
            front.broadcast_object({"a": [0, print]} if rank == 1 else None, root_rank=1)
        return front.broadcast_object(rank, root_rank=1)

    assert run(work) == [1, 1]


@pytest.mark.parametrize("root", [None, 0, 1])
def test_objects_of_all_workers(root):
    """Of other sizes with each call; a root alone has them."""

    def work(rank):
        seen = []
        for step in range(4):
            mine = {"rank": rank, "steps": (step,) * (1 + 500 * step * rank), "w": torch.ones(2) * rank}
            found = (
                front.all_gather_object(mine, "state")
                if root is None
                else front.gather_object(mine, root, "state")
            )
            if found is not None:
                seen.append([(item["rank"], item["steps"], item["w"].tolist()) for item in found])
        return seen

    expected = [
        [(rank, (step,) * (1 + 500 * step * rank), [float(rank)] * 2) for rank in range(2)]
        for step in range(4)
    ]
    wanted = [expected if root in (None, rank) else [] for rank in range(2)]
    assert run(work) == wanted


def test_objects_of_all_workers_and_some_that_cannot_be_sent():
    def work(rank):
        says = r"obj\['a'\]\[1\] is a builtins" if rank else r"rank 1 cannot send its object: obj\['a'\]"
        for root in (None, 0):
            mine = {"a": [0, print]} if rank else 5
            with pytest.raises(kvps.ConfigError, match=says):
                front.all_gather_object(mine) if root is None else front.gather_object(mine, root)
        with pytest.raises(kvps.ConfigError, match="root_rank=2: there are 2 workers"):
            front.gather_object(1, 2)
        return front.all_gather_object(rank)

    assert run(work) == [[0, 1]] * 2


# --- optimizers -----------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "plain": lambda params: torch.optim.SGD(params, lr=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1, betas=(0.8, 0.9), amsgrad=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1, centered=True),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3),
}


def trained(make, steps, seed):
    """Return a model and its optimizer after some steps."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = make(list(model.parameters()))

    def step():
        optimizer.zero_grad()
        loss = model(torch.arange(3.0)).square().sum()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(step)
    return model, optimizer, step


@pytest.mark.parametrize("root", [0, 1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_optimizer_is_the_same_on_all_workers(name, root):
    """Only the root has trained; from there on all take the same steps."""

    def work(rank):
        model, optimizer, step = trained(OPTIMIZERS[name], 3 if rank == root else 0, rank)
        if rank == root:
            optimizer.param_groups[0]["lr"] = 0.025
        front.broadcast_parameters(model, root)
        front.broadcast_optimizer_state(optimizer, root)
        assert optimizer.param_groups[0]["lr"] == 0.025
        optimizer.step(step)
        return [param.detach().clone() for param in model.parameters()]

    first, second = run(work)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_optimizers_of_other_parameters():
    def work(rank):
        params = [torch.zeros(2, requires_grad=True) for _ in range(1 + rank)]
        optimizer = torch.optim.SGD(params, lr=0.1)
        if rank == 0:
            front.broadcast_optimizer_state(optimizer)
        else:
            with pytest.raises(kvps.Mismatch, match="differs from the optimizer of rank 1"):
                front.broadcast_optimizer_state(optimizer)
        with pytest.raises(kvps.ConfigError, match="got str"):
            front.broadcast_optimizer_state("sgd")

    run(work)


# --- means ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kvstore", ["dist_sync", "allreduce"])
def test_means_of_numbers_tensors_and_dicts(kvstore):
    def work(rank):
        assert front.average(rank, kvstore=kvstore) == 1.0
        assert front.average(rank + 0.1, name="loss", kvstore=kvstore) == pytest.approx(1.1, rel=1e-15)
        tensor = torch.full((2, 2), float(rank), dtype=torch.float16)
        mean = front.average(tensor, kvstore=kvstore)
        assert mean.dtype is torch.float16
        assert mean.tolist() == [[1.0] * 2] * 2
        assert tensor[0, 0] == rank
        count = front.average(torch.tensor([rank, 10]), kvstore=kvstore)
        assert (count.dtype, count.tolist()) == (torch.float64, [1.0, 10.0])
        pairs = [("loss", 2.0 * rank), ("hits", torch.ones(3) * rank)]
        found = front.average(dict(pairs if rank else pairs[::-1]), kvstore=kvstore)
        assert found["loss"] == 2.0
        assert found["hits"].tolist() == [1.0] * 3
        assert list(found) == [name for name, _ in (pairs if rank else pairs[::-1])]
        return front.average(float(rank), weight=rank, kvstore=kvstore)

    assert run(work, workers=3) == [pytest.approx(5 / 3)] * 3


def test_a_worker_with_weight_0_does_not_count():
    def work(rank):
        first = front.average(float("nan") if rank else 7.0, weight=1 - rank)
        return first, str(front.average(1.0, weight=0))

    assert run(work) == [(7.0, "nan")] * 2


def test_a_worker_that_left_does_not_count():
    def work(rank):
        assert front.average(rank) == 1.0
        if rank == 2:
            kvps.shutdown()
            return 0.5
        return front.average(rank)

    assert run(work, workers=3) == [0.5] * 3


def test_a_worker_that_joined_does_not_count():
    def work(rank):
        kv = kvps.create("dist_sync", timeout=20)
        assert front.average(rank, kvstore=kv) == 1.0
        mean = front.average(rank, kvstore=kv) if rank < 2 else 0.5
        kv.join()
        return mean

    assert run(work, workers=3) == [0.5] * 3


@pytest.mark.parametrize(
    ("value", "weight", "says"),
    [
        ("text", 1.0, "value is a str"),
        ({"a": None}, 1.0, r"value\['a'\] is a NoneType"),
        (torch.ones(1, dtype=torch.cfloat), 1.0, "complex64"),
        (1.0, -1.0, "weight=-1.0"),
        (1.0, float("nan"), "weight=nan"),
        (1.0, "1", "weight='1'"),
    ],
)
def test_average_refuses_values_without_a_mean(value, weight, says):
    with pytest.raises(kvps.ConfigError, match=says):
        front.average(value, weight=weight)


# --- processes ------------------------------------------------------------------------------------------

SCRIPT = """
import os, torch, kvps, kvps.torch
rank = int(os.environ["RANK"])
torch.manual_seed(rank)
model = kvps.torch.SyncBatchNorm.convert_sync_batchnorm(
    torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
kvps.torch.broadcast_parameters(model)
kvps.torch.broadcast_optimizer_state(optimizer)
start = kvps.torch.broadcast_object({"epoch": 3 + rank}, root_rank=1)
model(torch.randn(4 + rank, 2)).sum().backward()
print("seen", start, kvps.torch.average(rank), f"{model[1].running_mean.sum():.6f}", flush=True)
"""


@pytest.mark.parametrize("servers", [0, 1])
def test_under_kvps_launch(processes: Processes, servers: int) -> None:
    text = SCRIPT
    if not servers:
        calls = ("BatchNorm1d(3))", "parameters(model", "state(optimizer", "root_rank=1", "average(rank")
        for call in calls:
            text = text.replace(call, call + ', kvstore="allreduce"')
    script = processes.script(text)
    launch = processes.kvps("launch", "-n", 2, "-s", servers, "--", sys.executable, script)
    assert launch.wait(60) == 0, launch
    said = [line.partition("seen ")[2] for line in launch.out.splitlines() if "seen" in line]
    assert len(said) == 2
    assert said[0] == said[1]
    assert said[0].startswith("{'epoch': 4} 0.5 ")
