"""Steps that a Timeout or an interrupt cuts off: the next step() of each front end waits on, and what was pushed
counts once."""

import copy
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import kvps
import kvps.torch
from kvps.runtime.ticket import Handle, finished
from kvps.store.options import StoreOptions
from kvps.torch.sync.agreement import Agreement
from tests.support.interrupts import HURRY, WAIT_S, make_interruptible

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


@pytest.fixture(autouse=True)
def _interruptible(monkeypatch: pytest.MonkeyPatch) -> None:
    make_interruptible(monkeypatch)


def front_end(name: str, model: torch.nn.Module) -> tuple[list[Any], Callable[[], None]]:
    """Return the stores of a front end, and its step."""
    kv = kvps.create("dist_sync", average=name in OPTIMIZERS, name="model", timeout=30)
    if name in TRAINERS:
        trainer = kvps.Trainer(model, "adam", {"lr": 0.1}, kvstore=kv, **TRAINERS[name])
        return [kv], lambda: trainer.step(2)
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = kvps.torch.DistributedOptimizer(inner, model, kv, **OPTIMIZERS[name])
    return [kv if optimizer._used is None else optimizer._used._kv], optimizer.step


def train(name: str, kind: type[BaseException] | None, *, is_refused: bool = False) -> list[torch.Tensor]:
    """Return the weights of two workers; with a ``kind`` of exception one of them waits for the other in vain at
    first, and with ``is_refused`` it goes on to another batch."""
    gave_up = threading.Event()
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))

    def work(rank: int) -> torch.Tensor:
        model = copy.deepcopy(first)
        stores, step = front_end(name, model)

        def forward() -> torch.Tensor:
            return model(torch.full((2, 3), float(rank + number))).square().mean()

        for number in range(LATE + 1 if is_refused else STEPS):
            if kind is not None and number == LATE and rank == 1:
                assert gave_up.wait(30)
            model.zero_grad()
            if kind is None or number != LATE or rank != 0:
                forward().backward()
                step()
                continue
            HURRY.begin(kind, *stores)
            give_up(name, step, forward, kind)
            if is_refused:
                with pytest.raises(kvps.ConfigError, match="still under way: call step"):
                    forward().backward()
                gave_up.set()
                HURRY.end()
                break
            gave_up.set()
            HURRY.end()
            if "forward" not in name:
                step()
        return torch.cat([param.detach().flatten() for param in model.parameters()])

    with kvps.LocalCluster(workers=2, servers=2) as cluster:
        return cluster.run(work)


def give_up(
    name: str, step: Callable[[], None], forward: Callable[[], torch.Tensor], kind: type[BaseException]
) -> None:
    """Wait in vain, twice."""
    if kind is KeyboardInterrupt and name == "workers":  # it waits at the end of backward
        with pytest.raises(kind):
            forward().backward()
    else:
        forward().backward()
    if "forward" in name:
        step()
        for _ in range(2):
            with pytest.raises(kind):
                forward()
        return
    for _ in range(2):
        with pytest.raises(kind):
            step()


@pytest.mark.parametrize("kind", [kvps.Timeout, KeyboardInterrupt])
@pytest.mark.parametrize("name", [*OPTIMIZERS, *TRAINERS])
def test_next_step_waits_on(name: str, kind: type[BaseException]) -> None:
    (a, b), (c, d) = train(name, kind), train(name, None)
    assert torch.equal(a, b)
    assert torch.equal(c, d)
    torch.testing.assert_close(a, c, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", [kvps.Timeout, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["workers", "servers", "trainer"])
def test_another_pass_is_refused_before(name: str, kind: type[BaseException]) -> None:
    """Its gradients would be dropped here, while the other workers make their step."""
    train(name, kind, is_refused=True)


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


class Failure(Exception):
    """An exception of the script's own."""


def fail_in(where: str, number: int, model: torch.nn.Module, inner: torch.optim.Optimizer, rank: int) -> Any:
    """Let a hook of rank 0 fail once in step ``number``; return the function that begins a step."""
    seen = {"step": -1, "failed": False}

    def fail(*_: object) -> None:
        if rank == 0 and seen["step"] == number and not seen["failed"]:
            seen["failed"] = True
            raise Failure(where)

    if where == "backward":
        # Of the first layer, when the gradients of the last have left.
        model[0].weight.register_hook(fail)
    elif where == "before":
        inner.register_step_pre_hook(fail)
    elif where == "after":
        inner.register_step_post_hook(fail)

    def begin(step: int) -> None:
        seen["step"] = step

    return begin


@pytest.mark.parametrize(
    ("name", "where"),
    [
        *[(name, "backward") for name in ("workers", "workers-unused", "workers-forward", "servers-overlap")],
        *[(name, "backward") for name in ("servers", "trainer-overlap", "trainer-workers-overlap")],
        *[("workers", "before"), ("servers", "before"), ("trainer-workers-torch", "before")],
        *[("workers", "after"), ("trainer-workers-torch", "after")],
    ],
)
def test_exception_of_a_hook_loses_no_step(name: str, where: str) -> None:
    """On one worker: the pass, or the step, is made again; after the step there is nothing to repeat."""

    def train(where: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        first = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))

        def work(rank: int) -> torch.Tensor:
            model = copy.deepcopy(first)
            inner = torch.optim.Adam(model.parameters(), lr=0.1)
            options = {**OPTIMIZERS, **TRAINERS, "trainer-workers-torch": TRAINERS["trainer-workers"]}[name]
            kv = kvps.create("dist_sync", average=name in OPTIMIZERS, name="model", timeout=30)
            if name in OPTIMIZERS:
                front: Any = kvps.torch.DistributedOptimizer(inner, model, kv, bucket_bytes=1, **options)
                step = front.step
            else:
                front = kvps.Trainer(model, inner, kvstore=kv, **options)
                front._exchange._buckets._limit_bytes = 1
                step = partial(front.step, 2)
            begin = fail_in(where, LATE, model, inner, rank)
            for number in range(STEPS):
                begin(number)
                for parts in (("zero", "backward"), ("step",)):
                    for _ in range(2):
                        try:
                            if "zero" in parts:
                                front.zero_grad() if name in OPTIMIZERS else model.zero_grad()
                                x = torch.full((2, 3), float(rank + number))
                                model(x).square().mean().backward()
                            else:
                                step()
                            break
                        except Failure:
                            if where == "after":
                                break
            front.close()
            return torch.cat([param.detach().flatten() for param in model.parameters()])

        with kvps.LocalCluster(workers=2, servers=1) as cluster:
            return cluster.run(work)

    (a, b), (c, d) = train(where), train("")
    assert torch.equal(a, b)
    assert torch.equal(c, d)
    torch.testing.assert_close(a, c, rtol=1e-6, atol=0)


class CutOff(torch.optim.SGD):
    """An optimizer that fails once, in the middle."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if not self.fails:
            return super().step(closure)
        self.fails = False
        with torch.no_grad():
            self.param_groups[0]["params"][0].zero_()
        raise Failure


@pytest.mark.parametrize("name", ["optimizer", "trainer"])
def test_optimizer_that_is_cut_off_while_it_writes_is_told(name: str, tmp_path: Path) -> None:
    """This worker has other weights from then on, until a checkpoint is loaded everywhere."""

    def work(rank: int) -> list[float]:
        weights = {key: torch.nn.Parameter(torch.ones(2)) for key in "ab"}
        inner = CutOff(weights.values(), lr=0.5)
        kv = kvps.create("dist_sync", average=name == "optimizer")
        front: Any = (
            kvps.torch.DistributedOptimizer(inner, weights.items(), kv)
            if name == "optimizer"
            else kvps.Trainer(weights, inner, kvstore=kv, update_on_kvstore=False)
        )
        step = front.step if name == "optimizer" else partial(front.step, 2)

        def backward() -> None:
            for weight in weights.values():
                weight.grad = None
            torch.cat([*weights.values()]).sum().backward()

        inner.fails = rank == 0
        backward()
        if rank == 0:
            with pytest.raises(Failure):
                step()
            for call in (backward, front.join):
                with pytest.raises(kvps.ConfigError, match=r"cut off step\(\) while the optimizer wrote"):
                    call()
        else:
            step()
        with torch.no_grad():
            for weight in weights.values():
                weight.fill_(3.0)
        if name == "optimizer":
            front.load_state_dict(inner.state_dict())
        else:
            front.save_states(str(tmp_path / f"{rank}"))
            front.load_states(str(tmp_path / f"{rank}"))
        backward()
        step()
        return torch.cat([*weights.values()]).tolist()

    with kvps.LocalCluster(workers=2, servers=1) as cluster:
        assert cluster.run(work) == [[2.5] * 4] * 2


def test_trainer_refuses_another_batch_size_for_the_step_under_way() -> None:
    """The gradients that were pushed are scaled for the first."""
    refused = threading.Event()

    def work(rank: int) -> list[float]:
        model = torch.nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        kv = kvps.create("dist_sync", timeout=30)
        trainer = kvps.Trainer(model, "sgd", {"lr": 1.0}, kvstore=kv)
        for number in range(2):
            model.zero_grad()
            model(torch.ones(2, 2)).sum().backward()
            if number == 0 or rank == 1:
                assert number == 0 or refused.wait(30)
                trainer.step(4)
                continue
            HURRY.begin(kvps.Timeout, kv)
            with pytest.raises(kvps.Timeout):
                trainer.step(4)
            with pytest.raises(kvps.ConfigError, match=r"batch_size=8, but .* call step\(4\)"):
                trainer.step(8)
            HURRY.end()
            refused.set()
            trainer.step(4)
        return model.weight.flatten().tolist()

    with kvps.LocalCluster(workers=2, servers=1) as cluster:
        assert cluster.run(work) == [[-1.0] * 2] * 2


@pytest.mark.parametrize("kind", [kvps.Timeout, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["workers", "servers", "trainer", "trainer-workers"])
def test_step_with_sparse_gradients_is_waited_for(name: str, kind: type[BaseException]) -> None:
    gave_up = threading.Event()

    def work(rank: int) -> list[list[float]]:
        table = torch.nn.Embedding(4, 1, sparse=True)
        with torch.no_grad():
            table.weight.zero_()
        inner = torch.optim.SGD(table.parameters(), lr=1.0)
        kv = kvps.create("dist_sync", average=name in OPTIMIZERS, name="model", timeout=30)
        if name in TRAINERS:
            step: Any = partial(kvps.Trainer(table, inner, kvstore=kv, **TRAINERS[name]).step, 2)
        else:
            step = kvps.torch.DistributedOptimizer(inner, table, kv, **OPTIMIZERS[name]).step
        for number in range(3):
            table.zero_grad()
            loss = table(torch.tensor([rank, 2])).sum()
            if number == 1 and rank == 1:
                assert gave_up.wait(30)
            elif number == 1:
                HURRY.begin(kind, kv)
            with suppress(KeyboardInterrupt):
                loss.backward()
            if number == 1 and rank == 0:
                for _ in range(2):
                    with pytest.raises(kind):
                        step()
                gave_up.set()
                HURRY.end()
            step()
        return table.weight.tolist()

    with kvps.LocalCluster(workers=2, servers=1) as cluster:
        assert cluster.run(work) == [[[-1.5], [-1.5], [-3.0], [0.0]]] * 2


@pytest.mark.parametrize("kind", [kvps.Timeout, KeyboardInterrupt])
def test_late_merge_counts_by_the_share_of_its_gate(kind: type[BaseException]) -> None:
    """A worker whose pseudo-gradient does not count takes the weights of the others, though it waited twice."""
    gave_up = threading.Event()

    def work(rank: int) -> float:
        weight = torch.nn.Parameter(torch.zeros(1))
        inner = torch.optim.SGD([weight], lr=1.0)
        outer = kvps.torch.DiLoCo(
            {"w": weight}, inner, outer="sgd", lr=1.0, momentum=0.0, sync_every=1, alpha=0.5, gate=4
        )
        with outer:
            weight.grad = torch.full((1,), -100.0 if rank == 0 else -1.0)
            (store,) = outer._stores
            if rank == 2:  # it tells its norm first, so that the others pass the gate
                push = store.pushpull

                def late(*given: Any, **more: Any) -> Any:
                    assert gave_up.wait(30)
                    return push(*given, **more)

                store.pushpull = late  # type: ignore[method-assign]
            if rank == 0:
                take = outer._take

                def hurried() -> None:
                    HURRY.begin(kind)
                    take()

                outer._take = hurried  # type: ignore[assignment, method-assign]
                store._timeout_s = WAIT_S if kind is kvps.Timeout else 30.0
                with pytest.raises(kind):
                    inner.step()
                outer._take = take  # type: ignore[method-assign]
                HURRY.end()
                store._timeout_s = 30.0
                gave_up.set()
                outer._take()
            else:
                inner.step()
            return float(weight.detach())

    with kvps.LocalCluster(workers=3, servers=1) as cluster:
        assert cluster.run(work) == pytest.approx([1.0, 1.0, 1.0])
