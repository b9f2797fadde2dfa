"""Steps that end with Timeout: the next step() of each front end waits on, and what was pushed counts once."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvps
import kvps.torch
from kvps.runtime.ticket import Handle, finished
from kvps.store.options import StoreOptions
from kvps.torch.sync.agreement import Agreement

STEPS, LATE = 4, 2
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "workers": {},
    "workers-unused": {"find_unused": True},
    "workers-forward": {"overlap_forward": True},
    "servers": {"update_on_kvstore": True},
    "servers-overlap": {"update_on_kvstore": True, "overlap_backward": True},
    "servers-forward": {"update_on_kvstore": True, "overlap_forward": True},
    "servers-clip": {"update_on_kvstore": True, "clip_global_norm": 0.1},
}
TRAINERS: dict[str, dict[str, Any]] = {
    "trainer": {},
    "trainer-overlap": {"overlap": True},
    "trainer-workers": {"update_on_kvstore": False},
    "trainer-workers-overlap": {"update_on_kvstore": False, "overlap": True},
}


def front_end(name: str, model: torch.nn.Module) -> tuple[list[Any], Callable[[], None]]:
    """Return the stores of a front end, and its step."""
    kv = kvps.create("dist_sync", average=name in OPTIMIZERS, name="model", timeout=30)
    if name in TRAINERS:
        trainer = kvps.Trainer(model, "adam", {"lr": 0.1}, kvstore=kv, **TRAINERS[name])
        return [kv], lambda: trainer.step(2)
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = kvps.torch.DistributedOptimizer(inner, model, kv, **OPTIMIZERS[name])
    return [kv if optimizer._used is None else optimizer._used._kv], optimizer.step


def train(name: str, *, is_late: bool, is_refused: bool = False) -> list[torch.Tensor]:
    """Return the weights of two workers; with ``is_late`` one of them waits for the other in vain at first, and
    with ``is_refused`` it goes on to another batch."""
    gave_up = threading.Event()
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))

    def work(rank: int) -> torch.Tensor:
        model = copy.deepcopy(first)
        stores, step = front_end(name, model)

        def forward() -> torch.Tensor:
            return model(torch.full((2, 3), float(rank + number))).square().mean()

        for number in range(LATE + 1 if is_refused else STEPS):
            if is_late and number == LATE and rank == 1:
                assert gave_up.wait(30)
            for kv in stores:
                kv._timeout_s = 0.2 if is_late and number == LATE and rank == 0 else 30.0
            model.zero_grad()
            forward().backward()
            if not is_late or number != LATE or rank != 0:
                step()
                continue
            give_up(name, step, forward)
            if is_refused:
                with pytest.raises(kvps.ConfigError, match="still under way: call step"):
                    forward().backward()
                gave_up.set()
                break
            gave_up.set()
            for kv in stores:
                kv._timeout_s = 30.0
            if "forward" not in name:
                step()
        return torch.cat([param.detach().flatten() for param in model.parameters()])

    with kvps.LocalCluster(workers=2, servers=2) as cluster:
        return cluster.run(work)


def give_up(name: str, step: Callable[[], None], forward: Callable[[], torch.Tensor]) -> None:
    """Wait in vain, twice."""
    if "forward" in name:
        step()
        for _ in range(2):
            with pytest.raises(kvps.Timeout):
                forward()
        return
    for _ in range(2):
        with pytest.raises(kvps.Timeout):
            step()


@pytest.mark.parametrize("name", [*OPTIMIZERS, *TRAINERS])
def test_next_step_waits_on_after_a_timeout(name: str) -> None:
    (a, b), (c, d) = train(name, is_late=True), train(name, is_late=False)
    assert torch.equal(a, b)
    assert torch.equal(c, d)
    torch.testing.assert_close(a, c, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["workers", "servers", "trainer"])
def test_another_pass_after_a_timeout_is_refused(name: str) -> None:
    """Its gradients would be dropped here, while the other workers make their step."""
    train(name, is_late=True, is_refused=True)


@pytest.mark.parametrize("where", ["flags", "values"])
@pytest.mark.parametrize("option", ["scaler", "unused"])
def test_flags_of_a_late_step_are_told_once(option: str, where: str) -> None:
    """One worker is late to tell its flags, or to push behind them; the other does not get its gradients."""
    (a, b), (c, d) = tell(option, where), tell(option, "")
    assert torch.equal(a, b)
    assert torch.equal(c, d)
    torch.testing.assert_close(a, c, rtol=1e-5, atol=0)


def tell(option: str, where: str) -> list[torch.Tensor]:
    """Return the weights of two workers; one waits in vain for ``where``, if that is set, in one step."""
    gave_up = threading.Event()
    torch.manual_seed(0)
    first = torch.nn.ModuleList([torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)])

    def work(rank: int) -> torch.Tensor:
        model = copy.deepcopy(first)
        kv = kvps.create("dist_sync", average=True, name="model", timeout=30)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = kvps.torch.DistributedOptimizer(
            inner, model, kv, update_on_kvstore=True, find_unused=option == "unused"
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=option == "scaler")
        exchange = optimizer._exchange
        for number in range(STEPS):
            optimizer.zero_grad()
            x = torch.full((2, 3), float(rank + number))
            used = model if option == "scaler" else [model[rank]]
            scaler.scale(sum(layer(x).square().mean() for layer in used)).backward()
            agreement = optimizer._overflow or optimizer._used
            if where and number == LATE and rank == 1:
                held = exchange if where == "values" else agreement
                begin = held.complete if where == "values" else held.any
                calls = {"left": 1 if where == "values" and option == "unused" else 0}

                def late(*given: Any, begin: Any = begin, calls: Any = calls) -> Any:
                    calls["left"] -= 1
                    assert calls["left"] >= 0 or gave_up.wait(30)
                    return begin(*given)

                setattr(held, "complete" if where == "values" else "any", late)
            if where and number == LATE and rank == 0:
                stores = [kv if where == "values" else agreement._kv]
                for store in stores:
                    store._timeout_s = 0.2
                for _ in range(2):
                    with pytest.raises(kvps.Timeout):
                        scaler.step(optimizer)
                    with pytest.raises(kvps.ConfigError, match="still under way: call step"):
                        optimizer.zero_grad()
                gave_up.set()
                for store in stores:
                    store._timeout_s = 30.0
            scaler.step(optimizer)
            scaler.update()
        return torch.cat([param.detach().flatten() for param in model.parameters()])

    with kvps.LocalCluster(workers=2, servers=2) as cluster:
        return cluster.run(work)


def test_agreement_goes_on_after_a_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(_: int) -> None:
        agreement = Agreement(2, 1, StoreOptions(timeout_s=30))
        flags, kv = torch.ones(1), agreement._kv
        lost = Handle(finished(error=kvps.EpochChanged("returned")), lambda: None)
        with monkeypatch.context() as patch:
            patch.setattr(kv, "pushpull", lambda *_, **__: lost)
            with pytest.raises(kvps.EpochChanged):
                agreement.any(flags)
        assert agreement.any(flags).tolist() == [True]

    with kvps.LocalCluster(workers=1, servers=1) as cluster:
        cluster.run(work)
