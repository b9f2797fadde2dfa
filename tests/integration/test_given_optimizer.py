"""The torch optimizer that a script gives to a front end: its hooks, its schedulers, and its own ``step()``."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import kvps
import kvps.compat.horovod as hvd
from kvps.torch import DiLoCo, DistributedOptimizer, LocalSGD, shard

INPUTS = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
STEPS = 4
Model = torch.nn.Sequential
Optimizer = torch.optim.Optimizer


class Loop(NamedTuple):
    """What a training loop calls in each step, and at its end."""

    step: Callable[[], object]
    close: Callable[[], object] = lambda: None


def net() -> Model:
    model = Model(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4), torch.nn.Linear(4, 1))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(generator=generator)
    return model


@contextmanager
def in_cluster() -> Iterator[tuple[Model, Optimizer]]:
    """Yield a model and its optimizer, for the only worker of a cluster."""
    with kvps.LocalCluster():
        model = net()
        yield model, torch.optim.SGD(model.parameters(), lr=0.1)


def groups(model: Model, lr: float = 0.1) -> list[dict[str, Any]]:
    first, *others = model.children()
    rest = [param for other in others for param in other.parameters()]
    return [{"params": list(first.parameters()), "lr": lr}, {"params": rest, "lr": lr / 4}]


def train(model: Model, step: Callable[[], object], *also: Any) -> None:
    for _ in range(STEPS):
        model.zero_grad()
        model(INPUTS).square().mean().backward()
        step()
        for item in also:
            item.step()


def weights(model: Model) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def distributed(**options: Any) -> Callable[[Model, Optimizer], Loop]:
    def begin(model: Model, sgd: Optimizer) -> Loop:
        distributed_optimizer = DistributedOptimizer(sgd, model, **options)
        return Loop(distributed_optimizer.step, distributed_optimizer.close)

    return begin


def trainer(**options: Any) -> Callable[[Model, Optimizer], Loop]:
    def begin(model: Model, sgd: Optimizer) -> Loop:
        item = kvps.Trainer(model, sgd, kvstore="dist_sync", **options)
        return Loop(lambda: item.step(1))

    return begin


def sharded(by_optimizer: bool) -> Callable[[Model, Optimizer], Loop]:
    def begin(model: Model, sgd: Optimizer) -> Loop:
        item = shard(model, optimizer=sgd)
        return Loop((lambda: sgd.step()) if by_optimizer else item.step, item.close)

    return begin


def local_steps(model: Model, sgd: Optimizer) -> Loop:
    di_lo_co = DiLoCo(model, sgd, sync_every=2)
    di_lo_co.__enter__()
    return Loop(lambda: sgd.step(), lambda: di_lo_co.__exit__(None, None, None))


def horovods(model: Model, sgd: Optimizer) -> Loop:
    hvd.init()
    distributed_optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    return Loop(lambda: distributed_optimizer.step(), hvd.shutdown)


FRONT_ENDS = {
    "workers": distributed(),
    "workers, find_unused": distributed(find_unused=True),
    "workers, overlap_forward": distributed(overlap_forward=True),
    "servers": distributed(update_on_kvstore=True),
    "servers, overlap_forward": distributed(update_on_kvstore=True, overlap_forward=True),
    "async": distributed(kvstore="dist_async", update_on_kvstore=True),
    "trainer on workers": trainer(update_on_kvstore=False),
    "trainer on workers, overlap": trainer(update_on_kvstore=False, overlap=True),
    "trainer": trainer(),
    "trainer, overlap": trainer(overlap=True),
    "shard": sharded(by_optimizer=False),
    "shard, by the optimizer": sharded(by_optimizer=True),
    "diloco": local_steps,
    "horovod": horovods,
}


@contextmanager
def counted(counts: dict[str, int], sgd: Optimizer) -> Iterator[None]:
    """Count what each kind of hook, and a profiler, sees of an optimizer's steps."""

    def count(kind: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            counts[kind] = counts.get(kind, 0) + 1

        return hook

    handles = [
        sgd.register_step_pre_hook(count("before")),
        sgd.register_step_post_hook(count("after")),
        register_optimizer_step_pre_hook(count("before any")),
        register_optimizer_step_post_hook(count("after any")),
    ]
    vars(sgd)["_optimizer_step_code"] = count("profiler's")
    yield
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_hooks_of_a_step_are_called_once_in_each_step(name: str) -> None:
    counts: dict[str, int] = {}
    with kvps.LocalCluster():
        model = net()
        sgd = torch.optim.SGD(groups(model), lr=0.1)
        with counted(counts, sgd):
            loop = FRONT_ENDS[name](model, sgd)
            train(model, loop.step)
            loop.close()
    assert counts == dict.fromkeys(("before", "after", "before any", "after any", "profiler's"), STEPS)


@pytest.mark.parametrize("name", ["servers", "workers, overlap_forward", "trainer", "shard"])
def test_a_profile_has_one_mark_for_each_step(name: str) -> None:
    """And no hook is there for which a step would wait."""
    with in_cluster() as (model, sgd):
        loop = FRONT_ENDS[name](model, sgd)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            train(model, loop.step)
        loop.close()
    marks = [event.name for event in profile.events() if event.name.startswith("Optimizer.step#")]
    assert marks == ["Optimizer.step#SGD.step"] * STEPS


def test_a_copy_of_horovods_optimizer_leaves_the_hooks_alone() -> None:
    """torch wraps step() of a class when an object of it is copied."""
    counts: dict[str, int] = {}
    with in_cluster() as (model, sgd), counted(counts, sgd):
        hvd.init()
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
        copy.deepcopy(optimizer)
        train(model, lambda: optimizer.step())
        hvd.shutdown()
    assert set(counts.values()) == {STEPS}


def test_a_hook_after_the_step_reads_new_weights() -> None:
    """An average of weights, as scripts with an EMA keep it."""

    def averaged(begin: Callable[[Model, Optimizer], Loop] | None) -> list[torch.Tensor]:
        model = net()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = Loop(lambda: sgd.step()) if begin is None else begin(model, sgd)
        means = weights(model)

        def average(*_: object) -> None:
            for mean, param in zip(means, model.parameters(), strict=True):
                mean.lerp_(param.detach(), 0.5)

        sgd.register_step_post_hook(average)
        train(model, loop.step)
        loop.close()
        return means

    expected = averaged(None)
    for name in ("servers", "servers, overlap_forward", "workers, overlap_forward", "trainer"):
        with kvps.LocalCluster():
            torch.testing.assert_close(averaged(FRONT_ENDS[name]), expected)


# --- schedulers ---------------------------------------------------------------------------------------


def test_a_rate_that_was_set_is_where_a_scheduler_goes_on() -> None:
    with kvps.LocalCluster():
        model = net()
        sgd = torch.optim.SGD(groups(model), lr=0.1)
        trainer = kvps.Trainer(model, sgd, kvstore="dist_sync")
        scheduler = StepLR(sgd, 1, 0.5)
        trainer.set_learning_rate(0.8)
        assert [group["lr"] for group in sgd.param_groups] == [0.8, 0.2]
        train(model, lambda: trainer.step(1))
        scheduler.step()
        train(model, lambda: trainer.step(1))
        assert trainer.learning_rate == trainer._kv.learning_rate == 0.4


def test_an_outer_optimizer_that_a_scheduler_has_changed_is_told() -> None:
    with in_cluster() as (model, sgd):
        outer = torch.optim.SGD(model.parameters(), lr=0.7)
        with DiLoCo(model, sgd, outer, sync_every=2):
            train(model, lambda: sgd.step())
            outer.param_groups[0]["lr"] = 0.5
            with pytest.raises(kvps.ConfigError, match=r"lr=0\.5, but servers have lr=0\.7"):
                train(model, lambda: sgd.step())


# --- a step by mistake ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in FRONT_ENDS if name.startswith(("work", "ser"))])
def test_the_wrapped_optimizer_does_not_step_by_itself(name: str) -> None:
    with in_cluster() as (model, sgd):
        loop = FRONT_ENDS[name](model, sgd)
        train(model, loop.step)
        with pytest.raises(kvps.ConfigError, match=r"Call step\(\) of the DistributedOptimizer"):
            sgd.step()
        loop.close()
        sgd.step()  # it is the script's again


@pytest.mark.parametrize("on_store", [True, False])
def test_a_trainers_optimizer_does_not_step_by_itself(on_store: bool) -> None:
    with in_cluster() as (model, sgd):
        trainer = kvps.Trainer(model, sgd, kvstore="dist_sync", update_on_kvstore=on_store)
        before = weights(model)
        with pytest.raises(kvps.ConfigError, match=r"Call trainer\.step\(batch_size\)"):
            train(model, lambda: sgd.step())
        assert all(map(torch.equal, weights(model), before))
        train(model, lambda: trainer.step(1))
        again = kvps.Trainer(model, sgd, kvstore="dist_sync", update_on_kvstore=on_store)
        train(model, lambda: again.step(1))  # for which the first trainer has nothing to say


def test_a_trainers_optimizer_steps_by_itself_once_gradients_are_summed() -> None:
    with in_cluster() as (model, sgd):
        trainer = kvps.Trainer(model, sgd, kvstore="dist_sync", update_on_kvstore=False)

        def halves() -> None:
            trainer.allreduce_grads()
            sgd.step()

        def closure() -> torch.Tensor:
            sgd.zero_grad()
            loss = model(INPUTS).square().mean()
            loss.backward()
            trainer.allreduce_grads()
            return loss

        train(model, halves)
        train(model, lambda: sgd.step(closure))
        with pytest.raises(kvps.ConfigError, match="not summed over the workers"):
            train(model, lambda: sgd.step())


def test_a_trainer_alone_leaves_its_optimizer_to_the_script() -> None:
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = kvps.Trainer(model, sgd)
    train(model, lambda: trainer.step(1))
    train(model, lambda: sgd.step())


@pytest.mark.parametrize("kind", [DiLoCo, LocalSGD])
def test_local_steps_outside_the_context_are_told_once(kind: type[DiLoCo]) -> None:
    with in_cluster() as (model, sgd):
        outer = kind(model, sgd, sync_every=2)
        with pytest.warns(UserWarning, match=f"train inside `with {kind.__name__}") as told:
            train(model, lambda: sgd.step())
        assert [effect.filename for effect in told] == [__file__]
        with warnings.catch_warnings(action="error"), outer:
            train(model, lambda: sgd.step())
        with warnings.catch_warnings(action="error"):
            train(model, lambda: sgd.step())
        assert outer.syncs == STEPS // 2


def test_an_optimizer_that_exchanges_gradients_itself_is_refused() -> None:
    with in_cluster() as (model, sgd):
        hvd.init()
        for taken in (
            DistributedOptimizer(copy.copy(sgd), model),
            hvd.DistributedOptimizer(sgd, model.named_parameters()),
        ):
            for make in (
                lambda item: DiLoCo(model, item, sync_every=2),
                lambda item: kvps.Trainer(model, item, kvstore="dist_sync"),
                lambda item: shard(model, optimizer=item),
            ):
                with pytest.raises(kvps.ConfigError, match="got a DistributedOptimizer"):
                    make(taken)
        hvd.shutdown()
        with pytest.raises(kvps.ConfigError, match="got a DistributedOptimizer"):
            DistributedOptimizer(DistributedOptimizer(sgd, model), model)
