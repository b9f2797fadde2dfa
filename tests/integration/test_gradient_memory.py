"""Gradients in memory that servers read: the same bits as copies, never changed under a reader or a keeper."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kvps
from kvps.errors import Timeout
from kvps.torch import DistributedOptimizer

WIDTH, STEPS = 64, 4


def net(rank: int, dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    """A model with one weight that is cut over the servers."""
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 2048)]
    model = torch.nn.Sequential(*layers)
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0, 0.1, generator=generator)
    return model.to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, WIDTH, generator=generator).to(dtype)


def lies_in_segment(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in this process's memory that others may read."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, mode = line.split()[:2]
        first, last = (int(item, 16) for item in place.split("-"))
        if "/memfd:kvps" in line and mode == "rw-s" and first <= tensor.data_ptr() < last:
            return True
    return False


def front_end(name: str, model: torch.nn.Module) -> tuple[Any, Callable[[], None]]:
    """Return an optimizer or a Trainer, and its step."""
    if name.startswith("trainer"):
        trainer = kvps.Trainer(
            model,
            "sgd",
            {"lr": 0.1, "momentum": 0.9},
            "dist_sync",
            update_on_kvstore="servers" in name,
            overlap="overlap" in name,
        )
        return trainer, lambda: trainer.step(2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = DistributedOptimizer(
        sgd, model, update_on_kvstore="servers" in name, overlap_backward="overlap" in name
    )
    return optimizer, optimizer.step


def train(rank: int, name: str, dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], list[bool]]:
    """Return the weights after some steps, and for each gradient of the last whether others may read it."""
    model = net(rank, dtype)
    _, step = front_end(name, model)
    for number in range(STEPS):
        model.zero_grad()
        model(batch(rank, number, dtype)).square().mean().backward()
        grads = [param.grad for param in model.parameters() if param.numel() > WIDTH]
        places = [lies_in_segment(gradient) for gradient in grads if gradient is not None]
        step()
    return [param.detach() for param in model.parameters()], places


def run(work: Callable[..., Any], *arguments: Any, workers: int = 2) -> list[Any]:
    with kvps.LocalCluster(workers, servers=2) as cluster:
        return cluster.run(work, *arguments)


WAYS = [
    *("optimizer", "trainer overlap", "trainer servers"),
    *(
        pytest.param(way, marks=pytest.mark.in_turn)
        for way in ("optimizer servers", "trainer", "trainer servers overlap")
    ),
]


@pytest.mark.parametrize("name", WAYS)
def test_gradients_in_place_give_the_bits_of_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_place = run(train, name)
    monkeypatch.setenv("KVPS_TRANSPORT", "tcp")
    copied = run(train, name)
    for (weights, places), (expected, others) in zip(in_place, copied, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
        assert places == [True] * 3
        assert not any(others)


@pytest.mark.parametrize("name", ["optimizer", "trainer"])
@pytest.mark.parametrize("is_view", [False, True])
def test_a_gradient_that_is_kept_does_not_change(name: str, is_view: bool) -> None:
    """As with a gradient that torch has allocated; and training goes on beside it."""

    def work(rank: int) -> tuple[bool, bool, list[torch.Tensor]]:
        model = net(rank)
        _, step = front_end(name, model)
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number in range(STEPS + 2):
            model.zero_grad()
            model(batch(rank, number)).square().mean().backward()
            step()
            grad = model[0].weight.grad
            if number < STEPS:
                kept.append((grad[1:] if is_view else grad, grad.clone()))
        is_same = all(torch.equal(item, copy[1:] if is_view else copy) for item, copy in kept)
        return is_same, lies_in_segment(grad), [param.detach() for param in model.parameters()]

    def alone(rank: int) -> list[torch.Tensor]:
        model = net(rank)
        _, step = front_end(name, model)
        for number in range(STEPS + 2):
            model.zero_grad()
            model(batch(rank, number)).square().mean().backward()
            step()
        return [param.detach() for param in model.parameters()]

    expected = run(alone)
    for (is_same, is_in_place, weights), others in zip(run(work), expected, strict=True):
        assert is_same
        assert is_in_place, "the parameter has got another place"
        assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def test_servers_read_what_was_pushed_although_the_call_failed() -> None:
    """One worker gives up, and writes to its gradients, before the other has pushed."""

    def work(rank: int) -> tuple[bool, list[torch.Tensor], list[torch.Tensor]]:
        model = net(0)
        talk = kvps.create("dist_sync", name="talk")
        optimizer, step = front_end("optimizer", model)
        for number in range(2):
            model.zero_grad()
            model(batch(rank, number)).square().mean().backward()
            step()
        both = []
        for item in range(2):
            (loss,) = [model(batch(item, 2)).square().mean()]
            both.append(torch.autograd.grad(loss, list(model.parameters())))
        optimizer.zero_grad()
        was_late = False
        if rank == 0:
            optimizer.kvstore._timeout_s = 1.0  # of this step alone
            model(batch(rank, 2)).square().mean().backward()
            try:
                step()
            except Timeout:
                was_late = True
            for param in model.parameters():
                param.grad.fill_(99.0)
            talk.barrier()
        else:
            talk.barrier()
            model(batch(rank, 2)).square().mean().backward()
        got = [param.grad.clone() for param in model.parameters()]
        talk.barrier()
        return was_late, got, [(a + b) / 2 for a, b in zip(*both, strict=True)]

    (was_late, _, _), (_, got, expected) = run(work)
    assert was_late
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", ["optimizer servers overlap", "trainer servers overlap"])
def test_weights_of_servers_are_not_written_before_the_step(name: str) -> None:
    """Backward may read weights after the last gradient of theirs has left."""

    def work(rank: int) -> tuple[bool, bool, bool]:
        model = net(rank)
        talk = kvps.create("dist_sync", name="talk")
        owner, step = front_end(name, model)
        for number in range(3):
            model.zero_grad()
            model(batch(rank, number)).square().mean().backward()
            step()
        before = [param.detach().clone() for param in model.parameters()]
        model.zero_grad()
        model(batch(rank, 3)).square().mean().backward()
        talk.barrier()  # all have pushed
        kv = owner.kvstore if name.startswith("optimizer") else owner._kv
        moved = kv.pull([name for name, _ in model.named_parameters()])
        now = [param.detach() for param in model.parameters()]
        is_still = all(torch.equal(a, b) for a, b in zip(now, before, strict=True))
        has_moved = not any(torch.equal(a, b) for a, b in zip(now, moved, strict=True))
        step()
        now = [param.detach() for param in model.parameters()]
        return is_still, has_moved, all(torch.equal(a, b) for a, b in zip(now, moved, strict=True))

    assert run(work) == [(True, True, True)] * 2
