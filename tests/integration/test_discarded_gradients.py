"""Gradients that a script discards between ``backward()`` and ``step()``: they count nowhere, or the script is told."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import kvps
from kvps.torch import DistributedOptimizer, shard

WORKERS = 2
INPUTS = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))


class Pair(torch.nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.makes = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh())
        self.judges = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.normal_(generator=generator)


class OfTrainer:
    """A Trainer with the methods of an optimizer; it leaves zero_grad() to the model."""

    def __init__(self, trainer: kvps.Trainer, model: torch.nn.Module) -> None:
        self.trainer, self.model = trainer, model

    def step(self) -> None:
        self.trainer.step(WORKERS)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def front_end(name: str, model: torch.nn.Module, **options: Any) -> Any:
    if name == "trainer":
        return OfTrainer(kvps.Trainer(model, sgd(model), kvstore="dist_sync", **options), model)
    return DistributedOptimizer(sgd(model), model, **options)


def set_to_none(model: torch.nn.Module, optimizer: Any) -> None:
    for param in model.parameters():
        param.grad = None


def fill_with_zeros(model: torch.nn.Module, optimizer: Any) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.zero_()


Way = Callable[[torch.nn.Module, Any], None]
WAYS: dict[str, Way] = {
    "optimizer.zero_grad()": lambda model, optimizer: optimizer.zero_grad(),
    "model.zero_grad()": lambda model, optimizer: model.zero_grad(),
    "grad = None": set_to_none,
    "optimizer.zero_grad(False)": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model.zero_grad(False)": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "grad.zero_()": fill_with_zeros,
}


def rows_of(rank: int, workers: int) -> slice:
    return slice(rank * 24 // workers, (rank + 1) * 24 // workers)


def loss_of(model: Any, rows: slice) -> torch.Tensor:
    found: torch.Tensor = model.judges(model.makes(INPUTS[rows])).square().mean()
    return found


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def train(model: torch.nn.Module, optimizer: Any, rows: slice, ways: list[Way]) -> list[torch.Tensor]:
    """Make steps, and in each of them discard a backward pass of another loss in one of the ways."""
    for way in [None, *ways, None]:
        optimizer.zero_grad()
        if way is not None:
            (-5.0 * loss_of(model, rows)).backward()
            way(model, optimizer)
        torch.autograd.grad(loss_of(model, rows), list(model.parameters()))
        loss_of(model, rows).backward()
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("told", WAYS)
@pytest.mark.parametrize(
    ("name", "options"),
    [("optimizer", {"update_on_kvstore": True, "overlap_backward": True}), ("trainer", {"overlap": True})],
)
def test_gradients_that_servers_have_used_cannot_be_discarded(
    name: str, options: dict[str, Any], told: str
) -> None:
    with kvps.LocalCluster():
        model = Pair()
        optimizer = front_end(name, model, **options)
        train(model, optimizer, slice(24), [])
        optimizer.zero_grad()
        loss_of(model, slice(24)).backward()

        def discard() -> None:
            WAYS[told](model, optimizer)
            loss_of(model, slice(24)).backward()

        with pytest.raises(kvps.ConfigError, match=r"was discarded before step|got another gradient"):
            discard()


@pytest.mark.parametrize("ignore", [False, True])
def test_a_step_does_not_take_a_discarded_gradient_for_0(ignore: bool) -> None:
    """Neither the servers' optimizer, which has used it, nor the one here, which has its sum."""

    def trained(on_store: bool) -> Any:
        model = Pair()
        trainer = kvps.Trainer(
            model, "sgd", {"lr": 0.1}, "dist_sync", update_on_kvstore=on_store, overlap=True
        )
        for _ in range(2):
            loss_of(model, slice(24)).backward()
            trainer.step(1)
            model.zero_grad()
        loss_of(model, slice(24)).backward()
        model.zero_grad()
        return model, trainer

    with kvps.LocalCluster():
        model, trainer = trained(on_store=False)
        before = values(model)
        if ignore:
            trainer.step(1, ignore_stale_grad=True)
            torch.testing.assert_close(values(model), before, rtol=0, atol=0)
        told = "was discarded before step" if ignore else "has no gradient"
        model, trainer = trained(on_store=True)
        with pytest.raises(kvps.ConfigError, match=told):
            trainer.step(1, ignore_stale_grad=ignore)


def test_a_frozen_sharded_model_may_be_an_adversary() -> None:
    """What the error of a sharded model says: freeze it meanwhile."""

    def steps(model: Any, makes: Any, judges: Any, rows: slice) -> None:
        for _ in range(3):
            makes.zero_grad()
            judges.zero_grad()
            model.judges(model.makes(INPUTS[rows]).detach()).sub(1).square().mean().backward()
            judges.step()
            model.judges.requires_grad_(False)
            loss_of(model, rows).backward()
            makes.step()
            model.judges.requires_grad_(True)

    def work(rank: int) -> list[torch.Tensor]:
        model = Pair()
        judges = sgd(model.judges)
        sharded = shard(model.judges, optimizer=judges)
        makes = front_end("optimizer", model.makes, update_on_kvstore=True)
        steps(model, makes, judges, rows_of(rank, WORKERS))
        loss_of(model, slice(24)).backward()
        second = loss_of(model, slice(24))
        with pytest.raises(kvps.ConfigError, match="look at its loss before backward"):
            second.backward()
        sharded.step()
        return list(model.makes.state_dict().values())

    model = Pair()
    steps(model, sgd(model.makes), sgd(model.judges), slice(24))
    with kvps.LocalCluster(WORKERS, 2) as cluster:
        for found in cluster.run(work):
            expected = list(model.makes.state_dict().values())
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


# --- changed, not discarded -------------------------------------------------------------------------


def clipped(model: torch.nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_clipping_what_servers_average_is_refused(overlap: bool, scaled: bool) -> None:
    def work(rank: int) -> str:
        model = Pair()
        optimizer = front_end("optimizer", model, update_on_kvstore=True, overlap_forward=overlap)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
        for number in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rows_of(rank, WORKERS))).backward()
            if number != 1:
                scaler.unscale_(optimizer)
            if number == 3:
                clipped(model)
                with pytest.raises(kvps.ConfigError) as error:
                    scaler.step(optimizer)
                return str(error.value)
            scaler.step(optimizer)
            scaler.update()
        return ""

    with kvps.LocalCluster(WORKERS, 2) as cluster:
        for told in cluster.run(work):
            assert "was changed (for example clipped) between backward() and step()" in told
            assert "use update_on_kvstore=False" in told


def test_a_gradient_may_be_changed_to_0_or_on_one_worker_alone() -> None:
    def work(rank: int) -> list[torch.Tensor]:
        model = Pair()
        optimizer = front_end("optimizer", model, update_on_kvstore=True)
        loss_of(model, slice(12)).backward()
        if rank == 1:
            fill_with_zeros(model, optimizer)  # a bad batch, and the others go on
        optimizer.step()
        return values(model)

    model = Pair()
    (loss_of(model, slice(12)) / 2).backward()
    sgd(model).step()
    with kvps.LocalCluster(WORKERS, 2) as cluster:
        for found in cluster.run(work):
            torch.testing.assert_close(found, values(model), rtol=1e-4, atol=1e-6)
    with kvps.LocalCluster():
        ends = []
        for make in (sgd, lambda model: front_end("optimizer", model, update_on_kvstore=True)):
            model = Pair()
            optimizer = make(model)
            for _ in range(3):
                optimizer.zero_grad()
                loss_of(model, slice(24)).backward()
                clipped(model)
                optimizer.step()
            ends.append(values(model))
    torch.testing.assert_close(ends[1], ends[0])


def test_a_scaler_may_come_late_where_gradients_leave_in_the_step() -> None:
    with kvps.LocalCluster():
        model = Pair()
        optimizer = front_end("optimizer", model, update_on_kvstore=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for number in range(3):
            optimizer.zero_grad()
            loss = scaler.scale(loss_of(model, slice(24))) if number else loss_of(model, slice(24))
            (loss * float("inf") if number == 1 else loss).backward()
            scaler.step(optimizer) if number else optimizer.step()
            if number:
                scaler.update()
        assert optimizer.kvstore.version("makes.0.weight") == 2


def test_a_close_in_the_middle_of_a_step_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with kvps.LocalCluster():
        model = Pair()
        optimizer = front_end("optimizer", model, update_on_kvstore=True, overlap_backward=True)
        train(model, optimizer, slice(24), [])
        loss_of(model, slice(24)).backward()
        optimizer.close()
    assert "closed after a backward() without a step()" in caplog.text


@pytest.mark.parametrize("call", ["synchronize", "skip_synchronize"])
def test_calls_that_need_means_name_the_mode_that_has_them(call: str) -> None:
    """And not to call another method that is refused, too."""
    with kvps.LocalCluster():
        model = Pair()
        optimizer = front_end("optimizer", model, update_on_kvstore=True)

        def use() -> None:
            with getattr(optimizer, call)() or nullcontext():
                pass

        with pytest.raises(kvps.ConfigError, match="to read or change the mean, use update_on_kvs"):
            use()
