"""Training over ``kvps.compat.horovod``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvps.compat.horovod as hvd
from tests.support.drop_in import Run, alone, batch, close, equal, loss_of, net, sgd


def trained(rank: int, steps: int = 3, **arguments: Any) -> torch.nn.Module:
    """Return what a rank learns, from other first weights than the other."""
    model = net(rank)
    passes = arguments.get("backward_passes_per_step", 1)
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters(), **arguments)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(steps):
        optimizer.zero_grad()
        for item in range(passes):
            loss_of(model, batch(rank, step * passes + item)).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(
    ("arguments", "of_alone", "atol"),
    [
        ({}, {}, 1e-6),
        ({"op": hvd.Sum}, {"factor": 2.0}, 1e-6),
        ({"backward_passes_per_step": 2}, {"passes": 2}, 1e-6),
        pytest.param({"gradient_predivide_factor": 4.0}, {}, 1e-6, marks=pytest.mark.thorough),
        ({"groups": 2}, {}, 1e-6),
        pytest.param({"compression": hvd.Compression.fp16}, {}, 5e-3, marks=pytest.mark.thorough),
    ],
    ids=["mean", "sum", "passes", "predivide", "groups", "fp16"],
)
def test_ranks_learn_what_one_process_learns_from_all_batches(
    two: Run, arguments: dict[str, Any], of_alone: dict[str, Any], atol: float
) -> None:
    for model in two(lambda rank: trained(rank, **arguments)):
        close(model, alone(**of_alone), atol)


def test_clipping_after_synchronize(two: Run) -> None:
    def work(rank: int) -> None:
        model = net()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        loss_of(model, batch(rank, 0)).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        clipped = [param.grad.clone() for param in model.parameters()]
        with optimizer.skip_synchronize():
            optimizer.step()
        for param, grad in zip(model.parameters(), clipped, strict=True):
            equal(param.grad, grad)
        loss_of(model, batch(rank, 0)).backward()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match=r"called without optimizer.skip_synchronize\(\)"):
            optimizer.step()

    two(work)


def test_misuse_of_the_optimizer_raises_as_in_horovod(two: Run) -> None:
    def work(rank: int) -> None:
        model = net()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        loss_of(model, batch(rank, 0)).backward()
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
        with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
            loss_of(model, batch(rank, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()

    two(work)


def test_names_of_parameters_are_those_that_were_given(two: Run) -> None:
    def work(rank: int) -> None:
        model = net()
        given = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        assert given._parameter_names == {item: name for name, item in model.named_parameters()}
        model = net()
        made = set(hvd.DistributedOptimizer(sgd(model))._parameter_names.values())
        assert len(made) == len(list(model.parameters()))
        assert hvd.allgather_object(made) == [made, made]

    two(work)


def wrong_arguments() -> list[tuple[dict[str, Any], str]]:
    model = net()
    first = next(model.parameters())
    half = list(model.named_parameters())[:1]
    return [
        ({"named_parameters": model.parameters()}, "sequence of tuples"),
        ({"named_parameters": [*half, *half]}, "must be unique. Found duplicates: 0.weight"),
        ({"named_parameters": half}, "were not named"),
        ({"op": hvd.Max}, "use hvd.Average, hvd.Sum or hvd.Adasum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "not supported with op != Average"),
        ({"gradient_predivide_factor": 0.0}, "must be > 0"),
        ({"backward_passes_per_step": 0}, "must be > 0"),
        ({"groups": -1}, "non-negative integer"),
        ({"groups": "all"}, "non-negative integer"),
        ({"groups": [["weight"]]}, "must consist of torch.Tensor"),
        ({"groups": [[first], [first]]}, "can only appear once"),
    ]


def test_wrong_arguments_of_the_optimizer(two: Run) -> None:
    def work(rank: int) -> None:
        for arguments, words in wrong_arguments():
            with pytest.raises(ValueError, match=words):
                hvd.DistributedOptimizer(sgd(net()), **arguments)
        with pytest.raises(ValueError, match=r"give a torch.optim.Optimizer, got Sequential"):
            hvd.DistributedOptimizer(net())  # type: ignore[arg-type]
        with pytest.raises(NotImplementedError, match="non-global process sets"):
            hvd.DistributedOptimizer(sgd(net()), op=hvd.Adasum, process_set=hvd.ProcessSet([0]))

    two(work)


def test_two_models_with_equal_names_train_at_once(two: Run) -> None:
    def work(rank: int) -> list[torch.nn.Module]:
        models = [net(), net()]
        optimizers = [hvd.DistributedOptimizer(sgd(item), item.named_parameters()) for item in models]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses = [loss_of(item, batch(rank, step)) for item in models]
            (losses[0] + losses[1]).backward()
            for optimizer in optimizers:
                optimizer.step()
        return models

    for models in two(work):
        for model in models:
            close(model, alone())


@pytest.mark.thorough
def test_adasum_of_equal_ranks_is_the_step_of_one(two: Run) -> None:
    def work(rank: int) -> torch.nn.Module:
        model = net()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), op=hvd.Adasum)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(0, step)).backward()
            optimizer.synchronize()
            optimizer.step()
        with (
            pytest.raises(AssertionError, match="not supported when using Adasum"),
            optimizer.skip_synchronize(),
        ):
            pass
        return model

    model = net()
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, batch(0, step)).backward()
        optimizer.step()
    for found in two(work):
        close(found, model)


# --- broadcasts ---------------------------------------------------------------------------------


def every_optimizer() -> dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]]:
    """Return a maker for each optimizer of torch; Muon takes matrices only."""
    made: dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]] = {}
    for kind in torch.optim.Optimizer.__subclasses__():
        if kind.__module__.startswith("torch.optim") and kind.__name__ not in (
            *("LBFGS", "SparseAdam", "NonCapturableOptimizer"),
        ):
            made[kind.__name__] = lambda model, kind=kind: kind(  # type: ignore[misc]
                [param for param in model.parameters() if kind.__name__ != "Muon" or param.dim() == 2], lr=0.1
            )
    return made


@pytest.mark.thorough
@pytest.mark.parametrize("root", [0, 1])
def test_the_state_of_each_optimizer_is_that_of_the_root(two: Run, root: int) -> None:
    def work(rank: int) -> dict[str, Any]:
        found = {}
        for name, make in sorted(every_optimizer().items()):
            model = net(rank)
            optimizer = make(model)
            if rank == root:
                loss_of(model, batch(0, 0)).backward()
                optimizer.step()
                optimizer.param_groups[0]["lr"] = 0.25
            hvd.broadcast_parameters(model.state_dict(), root)
            hvd.broadcast_optimizer_state(optimizer, root)
            found[name] = optimizer.state_dict()
            hvd.broadcast_optimizer_state(hvd.DistributedOptimizer(make(net())), root)
        return found

    first, second = two(work)
    assert {"Adam", "SGD", "Muon"} <= first.keys()
    for name, state in first.items():
        assert state["param_groups"] == second[name]["param_groups"], name
        assert state["param_groups"][0]["lr"] == 0.25
        torch.testing.assert_close(state["state"], second[name]["state"], rtol=0, atol=0)


def test_parameters_without_a_gradient_get_zeros_and_frozen_ones_do_not(two: Run) -> None:
    def work(rank: int) -> None:
        model = net(rank)
        first, *rest = model.parameters()
        first.requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        before = [param.detach().clone() for param in model.parameters()]
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert first.grad is None
        assert all(param.grad is not None and not param.grad.any() for param in rest)
        for item, old in zip(model.parameters(), before, strict=True):
            equal(item.detach(), old)

    two(work)


def test_parameters_and_objects(two: Run) -> None:
    def work(rank: int) -> None:
        tensors = {"b": torch.full((2,), rank), "a": torch.full((3,), rank, dtype=torch.bfloat16)}
        hvd.broadcast_parameters(dict(reversed(tensors.items())) if rank else tensors, 1)
        assert [tensor.tolist() for tensor in tensors.values()] == [[1, 1], [1.0, 1.0, 1.0]]
        params = [torch.nn.Parameter(torch.full((2,), float(rank)))]
        hvd.broadcast_parameters(params, 0)
        hvd.broadcast_parameters((("x", param) for param in params), 0)
        assert params[0].tolist() == [0.0, 0.0]
        given = {"epoch": 3, 0: [1, 2], "t": (torch.ones(2), None)}
        found = hvd.broadcast_object(given if rank == 0 else {}, root_rank=0)
        assert (found["epoch"], found[0], found["t"][0].tolist()) == (3, [1, 2], [1.0, 1.0])
        assert hvd.broadcast_object([] if rank else "big" * 100_000, name="big") == "big" * 100_000
        assert hvd.allgather_object({"rank": rank, "n": [0] * rank}) == [
            {"rank": 0, "n": []},
            {"rank": 1, "n": [0]},
        ]
        with pytest.raises(hvd.HorovodInternalError, match="shapes differ"):
            hvd.broadcast_parameters({"w": torch.ones(2 + rank)}, 0)

    two(work)


# --- modules ------------------------------------------------------------------------------------


def test_batches_are_normalised_over_all_ranks(two: Run) -> None:
    def part(rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        return torch.randn(3 + rank, 2, 5, generator=generator)

    def work(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layer = hvd.SyncBatchNorm(2)
        x = part(rank).requires_grad_()
        y = layer(x)
        (y * torch.arange(5.0)).sum().backward()
        with pytest.raises(ValueError, match="expected at least 2D input"):
            layer(torch.ones(2))
        assert x.grad is not None
        layer.eval()
        layer(x)
        return y.detach(), x.grad, layer.running_var

    layer = torch.nn.BatchNorm1d(2)
    whole = torch.cat([part(0), part(1)]).requires_grad_()
    y = layer(whole)
    (y * torch.arange(5.0)).sum().backward()
    found = two(work)
    torch.testing.assert_close(torch.cat([item for item, _, _ in found]), y.detach())
    torch.testing.assert_close(torch.cat([item for _, item, _ in found]), whole.grad)
    for _, _, running in found:
        torch.testing.assert_close(running, layer.running_var)
