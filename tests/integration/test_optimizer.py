"""DistributedOptimizer over a cluster: any number of workers gives the weights of one process."""

import copy
import pickle
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

import kvps
import kvps.torch
from kvps.torch import DistributedOptimizer, broadcast_optimizer_state
from tests.integration.training_loops import (
    INPUTS,
    LABELS,
    OPTIMIZERS,
    STEPS,
    Maker,
    Weights,
    assert_all,
    draw,
    loss_of,
    net,
    part,
    run,
    weights,
)


def net_and_sgd(seed: int = 0, lr: float = 0.1) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = net(seed)
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def train(optimizer: Any, model: torch.nn.Module, rows: slice, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()


def alone(name: str, passes: int = 1) -> Weights:
    """One process, on the whole batch of each step, under a scheduler."""
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    scheduler = StepLR(optimizer, 2, 0.5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (passes * loss_of(model, slice(24))).backward()
        optimizer.step()
        scheduler.step()
    return weights(model)


# --- any number of workers --------------------------------------------------------------------------


@pytest.mark.pairwise
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("overlap", [False, True])
def test_workers_give_the_weights_of_one_process(
    name: str, on_store: bool, workers: int, overlap: bool
) -> None:
    def work(rank: int) -> Weights:
        model = net(seed=rank)  # rank 0's weights count
        optimizer = DistributedOptimizer(
            OPTIMIZERS[name](model.parameters()), model, update_on_kvstore=on_store, overlap_forward=overlap
        )
        scheduler = StepLR(optimizer, 2, 0.5)
        for _ in range(STEPS):
            loss_of(model, part(rank, workers)).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return [tensor.clone() for tensor in model.state_dict().values()]

    assert_all(run(workers, work), alone(name))


def test_arguments_may_be_given_by_position() -> None:
    """A script may leave out the names, in the order of the signature."""

    def work(rank: int) -> Weights:
        model, sgd = net_and_sgd(rank)
        optimizer = DistributedOptimizer(sgd, model.named_parameters(), "dist_sync", None, 2, "sum", True)
        for _ in range(2):
            loss_of(model, part(rank, 2)).backward()
        optimizer.step()
        return weights(model)

    model, sgd = net_and_sgd()
    (4 * loss_of(model, slice(24))).backward()  # two passes of two workers are summed
    sgd.step()
    assert_all(run(2, work), weights(model))


def test_step_pushes_the_gradients_that_no_pass_has_pushed() -> None:
    """The last batches of an epoch may be fewer than make up a step."""

    def work(rank: int) -> Weights:
        model, sgd = net_and_sgd()
        optimizer = DistributedOptimizer(sgd, model, backward_passes_per_step=3)
        loss_of(model, part(rank, 2)).backward()
        optimizer.step()
        return weights(model)

    model, sgd = net_and_sgd()
    train(sgd, model, slice(24), steps=1)
    assert_all(run(2, work), weights(model))


def test_a_scheduler_that_was_made_before(recwarn: pytest.WarningsRecorder) -> None:
    with kvps.LocalCluster():
        model, sgd = net_and_sgd()
        scheduler = StepLR(sgd, 1, 0.5)
        for on_store in (True, False):
            optimizer = DistributedOptimizer(sgd, model, update_on_kvstore=on_store)
            loss_of(model, slice(24)).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        assert sgd.param_groups[0]["lr"] == 0.025 == optimizer.param_groups[0]["lr"]
    assert not recwarn.list


# --- gradients between backward() and step() --------------------------------------------------------


@pytest.mark.parametrize("explicit", [True, False])
def test_gradients_can_be_clipped(explicit: bool) -> None:
    def train(optimizer: Any, model: torch.nn.Module, rows: slice) -> Weights:
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model, rows).backward()
            if explicit and isinstance(optimizer, DistributedOptimizer):
                optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            is_ours = explicit and isinstance(optimizer, DistributedOptimizer)
            with optimizer.skip_synchronize() if is_ours else nullcontext():
                optimizer.step()
        return weights(model)

    def work(rank: int) -> Weights:
        model = net(rank)
        sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        return train(DistributedOptimizer(sgd, model), model, part(rank, 2))

    model = net()
    expected = train(torch.optim.SGD(model.parameters(), lr=0.5), model, slice(24))
    assert_all(run(2, work), expected)


@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("option", ["", "fused", "overlap_forward", "find_unused"])
def test_a_scaler_drops_a_round_everywhere(on_store: bool, option: str) -> None:
    """Worker 1 overflows in the second step: nobody makes it."""
    fused, options = option == "fused", {option: True} if "_" in option else {}

    def work(rank: int) -> tuple[Weights, float]:
        model = net(rank)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        optimizer = DistributedOptimizer(sgd, model, update_on_kvstore=on_store, **options)  # type: ignore[arg-type]
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        for step in range(4):
            optimizer.zero_grad()
            loss = scaler.scale(loss_of(model, part(rank, 2)))
            (loss * float("inf") if (rank, step) == (1, 1) else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return weights(model), scaler.get_scale()

    model, sgd = net_and_sgd()
    train(sgd, model, slice(24), steps=3)
    results = run(2, work)
    assert_all([found for found, _ in results], weights(model))
    assert results[1][1] == 4.0
    assert results[0][1] == (8.0 if on_store else 4.0), "sums are infinite everywhere"


def test_a_scaler_that_comes_late_is_refused() -> None:
    with kvps.LocalCluster():
        model, sgd = net_and_sgd()
        optimizer = DistributedOptimizer(sgd, model, update_on_kvstore=True, overlap_backward=True)
        loss_of(model, slice(24)).backward()
        optimizer.step()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, slice(24))).backward()
        with pytest.raises(kvps.ConfigError, match="use the scaler from the first step"):
            scaler.step(optimizer)


@pytest.mark.parametrize("overlap_forward", [False, True])
def test_gradients_leave_during_backward_from_the_second_step_on(overlap_forward: bool) -> None:
    with kvps.LocalCluster():
        model, sgd = net_and_sgd()
        optimizer = DistributedOptimizer(
            sgd, model, update_on_kvstore=True, overlap_backward=True, overlap_forward=overlap_forward
        )
        known, expected = net_and_sgd()
        left = []
        for _ in range(3):
            optimizer.zero_grad()
            before = optimizer.kvstore.metrics()["rounds"]
            loss_of(model, slice(24)).backward()
            left.append(optimizer.kvstore.metrics()["rounds"] > before)
            optimizer.step()
        assert left == [False, True, True]
        if overlap_forward:
            optimizer.synchronize()  # makes the deferred updates
        train(expected, known, slice(24), steps=3)
        assert_all([weights(model)], weights(known))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    def train(optimizer: Any, model: torch.nn.Module, rows: slice) -> Weights:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = loss_of(model, rows)
            loss.backward()
            optimizer.step()
        return weights(model)

    def work(rank: int) -> Weights:
        model, sgd = net_and_sgd(rank)
        return train(DistributedOptimizer(sgd, model), model, part(rank, 2))

    model = net()
    expected = train(torch.optim.SGD(model.parameters(), lr=0.1), model, slice(24))
    results = run(2, work)
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0.05, atol=0.02)
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


# --- parameters without a gradient ------------------------------------------------------------------


class Branches(torch.nn.Module):
    """Uses one of three branches, and never the last."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = torch.nn.ModuleList([torch.nn.Linear(6, 3) for _ in range(3)])
        draw(self, 0)

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        y: torch.Tensor = self.branches[which](x)
        return y


def test_unused_parameters_are_named() -> None:
    with kvps.LocalCluster():
        model = Branches()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(sgd, model)
        model(INPUTS, 0).sum().backward()
        told = (
            "no gradient for 'branches.1.weight', 'branches.1.bias', 'branches.2.weight', "
            "'branches.2.bias', of 6 parameters"
        )
        with pytest.raises(kvps.ConfigError, match=told):
            optimizer.step()


@pytest.mark.parametrize("on_store", [True, False])
def test_workers_may_use_different_parameters(on_store: bool) -> None:
    """Momentum moves a parameter that another worker has used, and none that nobody has."""

    def choice(step: int, rank: int) -> int:
        return (step + rank) % 2 if step < 3 else 0

    def work(rank: int) -> Weights:
        model = Branches()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = DistributedOptimizer(sgd, model, update_on_kvstore=on_store, find_unused=True)
        for step in range(5):
            optimizer.zero_grad()
            rows = part(rank, 2)
            cross_entropy(model(INPUTS[rows], choice(step, rank)), LABELS[rows]).backward()
            optimizer.step()
        return weights(model)

    model = Branches()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        sgd.zero_grad()
        for rank in range(2):
            rows = part(rank, 2)
            loss = cross_entropy(model(INPUTS[rows], choice(step, rank)), LABELS[rows])
            (loss / 2).backward()
        sgd.step()
    assert_all(run(2, work), weights(model))


# --- the optimizer itself ---------------------------------------------------------------------------


STATEFUL: list[Maker] = [
    *OPTIMIZERS.values(),
    lambda params: torch.optim.NAdam(params, lr=0.01),
    lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5),
    lambda params: torch.optim.Adagrad(params, lr=0.01),
]


@pytest.mark.parametrize("number", range(len(STATEFUL)))
@pytest.mark.parametrize("on_store", [True, False])
def test_state_dicts_are_those_of_torch(number: int, on_store: bool) -> None:
    """What one saves the other loads: a job can begin on one machine and go on in a cluster."""
    make = STATEFUL[number]
    model = net()
    plain = make(model.parameters())

    def step(optimizer: torch.optim.Optimizer, trained: torch.nn.Module) -> None:
        optimizer.zero_grad()
        loss_of(trained, slice(24)).backward()
        optimizer.step()

    for _ in range(3):
        step(plain, model)
    saved, begun = copy.deepcopy(plain.state_dict()), copy.deepcopy(model.state_dict())

    def work(rank: int) -> tuple[Weights, dict[str, Any]]:
        mine = net(rank)
        mine.load_state_dict(begun)
        optimizer = DistributedOptimizer(make(mine.parameters()), mine, update_on_kvstore=on_store)
        optimizer.load_state_dict(copy.deepcopy(saved))
        if on_store:
            assert not optimizer.state, "it lives in the store only"
        step(optimizer, mine)
        return weights(mine), optimizer.state_dict()

    step(plain, model)
    results = run(2, work)
    assert_all([found for found, _ in results], weights(model))
    expected = plain.state_dict()
    for _, state in results:
        assert state["state"].keys() == expected["state"].keys()
        for index, entry in expected["state"].items():
            assert state["state"][index].keys() == entry.keys()
            torch.testing.assert_close(state["state"][index], entry, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("on_store", [True, False])
def test_optimizer_state_can_be_broadcast(on_store: bool) -> None:
    """Rank 1 alone has a state and a rate to begin with; where the store has the state, the rate alone."""

    def work(rank: int) -> tuple[Weights, float]:
        model = net(rank)
        sgd = OPTIMIZERS["sgd"](model.parameters())
        optimizer = DistributedOptimizer(sgd, model, update_on_kvstore=on_store)
        if rank == 1:
            optimizer.param_groups[0]["lr"] = 0.05
            for param in [] if on_store else model.parameters():
                optimizer.state[param] = {"momentum_buffer": torch.ones_like(param)}
        broadcast_optimizer_state(optimizer, root_rank=1)
        loss_of(model, part(rank, 2)).backward()
        optimizer.step()
        return weights(model), optimizer.param_groups[0]["lr"]

    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for param in [] if on_store else model.parameters():
        sgd.state[param] = {"momentum_buffer": torch.ones_like(param)}
    train(sgd, model, slice(24), steps=1)
    results = run(2, work)
    assert_all([found for found, _ in results], weights(model))
    assert [rate for _, rate in results] == [0.05, 0.05]


@pytest.mark.parametrize("front", ["trainer", "shard"])
def test_the_rate_of_an_optimizer_whose_state_servers_have_can_be_broadcast(front: str) -> None:
    def work(rank: int) -> float:
        model = net(rank)
        sgd = OPTIMIZERS["sgd"](model.parameters())
        if front == "trainer":
            owner: Any = kvps.Trainer(model, sgd, kvstore="dist_sync")
        else:
            owner = kvps.torch.shard(model, optimizer=sgd)
        if rank == 1:
            sgd.param_groups[0]["lr"] = 0.05
        broadcast_optimizer_state(sgd, root_rank=1)
        owner.close()
        return float(sgd.param_groups[0]["lr"])

    assert run(2, work) == [0.05, 0.05]


def test_a_closure_is_averaged_each_time() -> None:
    """LBFGS evaluates the model several times in a step."""
    inputs = INPUTS.double()

    def train(optimizer: Any, model: torch.nn.Module, rows: slice) -> Weights:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs[rows]), LABELS[rows])
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        return weights(model)

    def work(rank: int) -> Weights:
        model = net(rank).double()
        optimizer = DistributedOptimizer(torch.optim.LBFGS(model.parameters(), max_iter=4), model)
        return train(optimizer, model, part(rank, 2))

    model = net().double()
    expected = train(torch.optim.LBFGS(model.parameters(), max_iter=4), model, slice(24))
    assert_all(run(2, work), expected)


# --- uneven batches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_mean_is_of_those_who_still_have_batches(on_store: bool, overlap: bool) -> None:
    """Rank r has 2 + r batches; then all train on from the same weights."""

    def work(rank: int) -> Weights:
        model = net(rank)
        optimizer = DistributedOptimizer(
            OPTIMIZERS["sgd"](model.parameters()), model, update_on_kvstore=on_store, overlap_forward=overlap
        )
        for epoch in range(2):
            for step in range(2 + rank):
                optimizer.zero_grad()
                loss_of(model, slice(3 * step + epoch, 3 * step + 3 * rank + 4)).backward()
                optimizer.step()
            optimizer.join()
        return weights(model)

    model = net()
    sgd = OPTIMIZERS["sgd"](model.parameters())
    for epoch in range(2):
        for step in range(4):
            sgd.zero_grad()
            ranks = [rank for rank in range(3) if step < 2 + rank]
            for rank in ranks:
                rows = slice(3 * step + epoch, 3 * step + 3 * rank + 4)
                (loss_of(model, rows) / len(ranks)).backward()
            sgd.step()
    assert_all(run(3, work), weights(model))


@pytest.mark.parametrize("option", ["overlap_forward", "find_unused"])
def test_gradients_that_are_changed_on_their_way_are_told(option: str) -> None:
    with kvps.LocalCluster():
        model, sgd = net_and_sgd()
        optimizer = DistributedOptimizer(sgd, model, **{option: True})  # type: ignore[arg-type]
        loss_of(model, slice(24)).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, slice(24)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with pytest.raises(kvps.ConfigError, match=r"was changed .* call synchronize\(\) before"):
            optimizer.step()


@pytest.mark.parametrize("on_store", [False, True])
def test_synchronize_makes_deferred_updates_though_another_loss_has_left_gradients(on_store: bool) -> None:
    """As the discriminator of a GAN has gradients of the generator's loss."""

    def work(_: int) -> list[float]:
        judge = torch.nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            judge.weight.fill_(1.0)
        sgd = torch.optim.SGD(judge.parameters(), lr=0.5)
        optimizer = DistributedOptimizer(sgd, judge, update_on_kvstore=on_store, overlap_forward=True)
        seen = judge.weight.detach().numpy()
        for _step in range(2):
            optimizer.zero_grad()
            judge(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            judge(3 * torch.ones(1, 1)).sum().backward()
            optimizer.synchronize()
        return seen.flatten().tolist()

    assert run(2, work) == [[0.0]] * 2


def test_join_is_refused_where_others_would_wait_for_an_answer() -> None:
    with kvps.LocalCluster():
        model, sgd = net_and_sgd()
        optimizer = DistributedOptimizer(sgd, model, find_unused=True)
        with pytest.raises(kvps.ConfigError, match=r"join\(\) is not possible with find_unused=True"):
            optimizer.join()


# --- an overlapped forward pass ---------------------------------------------------------------------


class Odd(torch.nn.Module):
    """Shares a weight, and reads one of a module that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5, 8)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = torch.nn.Linear(8, 5, bias=False)
        self.head.weight = self.table.weight
        self.scale = torch.nn.Parameter(torch.ones(8))
        draw(self, 0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids) * self.scale
        x, _ = self.attention(x, x, x, need_weights=False)
        y: torch.Tensor = self.head(x)
        return y


@pytest.mark.parametrize("on_store", [True, False])
def test_modules_wait_for_what_they_read(on_store: bool) -> None:
    ids = torch.tensor([[0, 1, 2], [3, 4, 0]])

    def train(optimizer: Any, model: torch.nn.Module, rows: slice) -> Weights:
        for _ in range(4):
            optimizer.zero_grad()
            model(ids[rows]).square().mean().backward()
            optimizer.step()
        return [tensor.clone() for tensor in model.state_dict().values()]

    def work(rank: int) -> Weights:
        model = Odd()
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        optimizer = DistributedOptimizer(sgd, model, update_on_kvstore=on_store, overlap_forward=True)
        return train(optimizer, model, slice(rank, rank + 1))

    model = Odd()
    expected = train(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), model, slice(2))
    assert_all(run(2, work), expected)


def clamp(part: torch.nn.Module, _: Any) -> None:
    """A hook that reads and writes a weight."""
    part.weight.data.clamp_(-0.3, 0.3)  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("on_store", [True, False])
def test_reads_between_two_steps_find_new_weights(on_store: bool) -> None:
    """A part's state, a copy, a penalty, a view that was taken long before; and a hook that reads and writes weights."""

    def work(overlap: bool) -> list[torch.Tensor]:
        model = net()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if not on_store:  # servers would not learn of it
            model[2].register_forward_pre_hook(clamp)
        optimizer = DistributedOptimizer(sgd, model, update_on_kvstore=on_store, overlap_forward=overlap)
        found: list[torch.Tensor] = []
        view = model[2].weight.detach()
        readers: list[Callable[[], Any]] = [
            lambda: model[0].state_dict()["weight"],
            lambda: copy.deepcopy(model)[2].weight,
            lambda: torch.stack([param.square().sum() for param in model.parameters()]),
            lambda: loss_of(model, slice(24)),
            lambda: (optimizer.synchronize() if overlap else None, view)[1],
            lambda: optimizer.state_dict()["state"][0]["momentum_buffer"],
        ]
        for read in [*readers, *readers]:
            loss_of(model, slice(24)).backward()
            optimizer.step()
            found.append(read().detach().clone())
            optimizer.zero_grad()
        optimizer.close()
        return [*found, *weights(model)]

    with kvps.LocalCluster():
        assert all(map(torch.equal, work(True), work(False)))


def test_an_overlapped_step_returns_before_the_others_have_pushed() -> None:
    """Worker 0 steps, and only then lets worker 1 begin its backward pass."""
    stepped = threading.Event()

    def work(rank: int) -> Weights:
        model, sgd = net_and_sgd(rank)
        optimizer = DistributedOptimizer(sgd, model, overlap_forward=True)
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, part(rank, 2))
            if step == 2 and rank == 1:
                assert stepped.wait(60.0)
            loss.backward()
            optimizer.step()
            if step == 2 and rank == 0:
                stepped.set()
        return [tensor.clone() for tensor in model.state_dict().values()]

    results = run(2, work)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# --- what cannot be ---------------------------------------------------------------------------------


@pytest.mark.parametrize("on_store", [False, True])
def test_reentrant_checkpoints_of_one_layer_need_no_sync(on_store: bool) -> None:
    """Each of them runs a backward of its own within backward, and so adds a gradient of the layer."""

    def made() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
        layer = torch.nn.Linear(4, 4)
        torch.nn.init.eye_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
        return layer, torch.optim.SGD(layer.parameters(), lr=0.1)

    def backward(layer: torch.nn.Linear) -> None:
        x = torch.ones(2, 4, requires_grad=True)
        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=True)
        x.sum().backward()

    def work(rank: int) -> list[torch.Tensor]:
        layer, sgd = made()
        optimizer = DistributedOptimizer(sgd, layer, update_on_kvstore=on_store)
        if not on_store:
            with pytest.raises(kvps.ConfigError, match=r"use_reentrant=True.*no_sync\(\) around the"):
                backward(layer)
            optimizer.zero_grad()
        with nullcontext() if on_store else optimizer.no_sync():
            backward(layer)
        optimizer.step()
        return [param.detach().clone() for param in layer.parameters()]

    alone, sgd = made()
    backward(alone)
    sgd.step()
    for found in run(2, work):
        torch.testing.assert_close(found, list(alone.parameters()))


@pytest.mark.parametrize("on_store", [False, True])
@pytest.mark.parametrize("front_end", ["DistributedOptimizer", "Trainer", "sharded model"])
def test_a_weight_that_forward_passes_change_is_refused(front_end: str, on_store: bool) -> None:
    def work(rank: int) -> None:
        bag = torch.nn.EmbeddingBag(5, 2, max_norm=1.0)
        model = torch.nn.Sequential(bag, torch.nn.Linear(2, 1))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        where = {"update_on_kvstore": on_store}
        make: dict[str, Any] = {
            "DistributedOptimizer": lambda: DistributedOptimizer(sgd, model, **where),
            "Trainer": lambda: kvps.Trainer(model, sgd, kvstore="dist_sync", **where),
            "sharded model": lambda: kvps.torch.shard(model, optimizer=sgd),
        }
        with pytest.raises(kvps.ConfigError, match=rf"^0: EmbeddingBag\(max_norm=1\).*{front_end}"):
            make[front_end]()
        bag.weight.requires_grad_(False)  # each row is rescaled once, and all workers see the same
        kvps.Trainer(model, "sgd", {"lr": 0.1}, "dist_sync", **where)

    run(2, work)


def test_single_process_may_rescale_rows_in_forward_passes() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 2, max_norm=1.0))
    kvps.Trainer(model, "sgd", {"lr": 0.1})
    DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, "local")


def test_the_newest_optimizer_has_the_gradients() -> None:
    with kvps.LocalCluster():
        model, sgd = net_and_sgd()
        first = DistributedOptimizer(sgd, model)
        second = DistributedOptimizer(sgd, model)
        for _ in range(2):
            loss_of(model, slice(24)).backward()
            second.step()
            second.zero_grad()
        assert first._model.kv.version("0.weight") == 0
        assert second._model.kv.version("0.weight") == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"op": "max"}, "op='max': use one of average, sum"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0: use a whole number"),
        ({"bucket_bytes": 0}, "bucket_bytes=0: use a whole number"),
        ({"kvstore": None}, "kvstore: give the name of a store"),
        ({"kvstore": "dist_async"}, "use update_on_kvstore=True, or dist_sync"),
        ({"overlap_forward": True}, "pass the module as named_parameters"),
        ({"overlap_backward": True}, "overlap_backward=True is for update_on_kvstore=True"),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, Any], told: str) -> None:
    sgd = torch.optim.SGD(net().parameters(), lr=0.1)
    with kvps.LocalCluster(), pytest.raises(kvps.KvpsError, match=told):
        DistributedOptimizer(sgd, **options)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_optimizer_cannot_be_copied_or_pickled(way: Callable[[Any], Any]) -> None:
    sgd = torch.optim.SGD(net().parameters(), lr=0.1)
    optimizer = DistributedOptimizer(sgd, kvstore="local")
    with pytest.raises(kvps.ConfigError, match=r"cannot be pickled or copied.*state_dict"):
        way(optimizer)


def test_a_store_of_the_users_own() -> None:
    def work(rank: int) -> list[str]:
        model = net(rank)
        told = []
        for option, op in ((True, "average"), (False, "sum"), (True, "sum"), (False, "average")):
            kv = kvps.create("dist_sync", average=option)
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            try:
                optimizer = DistributedOptimizer(sgd, model, kv, op=op)
                loss_of(model, slice(24)).backward()
                optimizer.step()
                told.append("")
            except kvps.Mismatch as error:
                told.append(str(error))
            model = net(rank)
        return told

    for told in run(2, work):
        assert told[:2] == ["", ""]
        assert "computes means; create it without average=True" in told[2]
        assert "computes sums; create it with average=True" in told[3]


@pytest.mark.parametrize("store", ["dist_async", "dist_ssp"])
def test_asynchronous_stores(store: str) -> None:
    """Each push moves the weights by itself."""

    def work(rank: int) -> float:
        param = torch.nn.Parameter(torch.zeros(1))
        sgd = torch.optim.SGD([param], lr=0.25)
        optimizer = DistributedOptimizer(sgd, [("w", param)], store, update_on_kvstore=True)
        for _ in range(4):
            optimizer.zero_grad()
            (param * 1.0).sum().backward()
            optimizer.step()
        kv = optimizer._model.kv
        kv.barrier()
        return float(kv.pull("w"))

    assert run(2, work) == [-2.0, -2.0]


def decay(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def load(model: torch.nn.Module) -> None:
    model.load_state_dict(net(1).state_dict())


def swap(model: torch.nn.Module) -> None:
    """As an evaluation with averaged weights does."""
    kept = copy.deepcopy(model.state_dict())
    load(model)
    model.load_state_dict(kept)


@pytest.mark.parametrize("front", ["plain", "overlap_forward", "overlap_backward", "Trainer"])
@pytest.mark.parametrize(("write", "told"), [(decay, 1), (load, 1), (swap, 0)])
def test_written_weights_that_a_step_overwrites_are_told_once(
    front: str, write: Callable[[torch.nn.Module], None], told: int, caplog: pytest.LogCaptureFixture
) -> None:
    with kvps.LocalCluster():
        model, sgd = net_and_sgd()
        if front == "Trainer":
            trainer: Any = kvps.Trainer(model, sgd, kvstore="dist_sync")
            step = lambda: trainer.step(1)  # noqa: E731  # as short as the other
        else:
            options: Any = {} if front == "plain" else {front: True}
            trainer = DistributedOptimizer(sgd, model, update_on_kvstore=True, **options)
            step = trainer.step
        for _ in range(3):
            for _ in range(2):
                model.zero_grad()
                loss_of(model, slice(24)).backward()
                step()
            write(model)
        trainer.close()
    texts = [
        record.getMessage() for record in caplog.records if "has written other weights" in record.message
    ]
    assert len(texts) == told
    assert all("'0.weight'" in text and "create it again" in text for text in texts)
