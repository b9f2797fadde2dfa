"""Front ends that compress: two workers and two servers equal a reference in plain torch."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import kvps
import kvps.torch
from kvps.torch import DistributedOptimizer

WORKERS = 2
STEPS = 5
SHAPES = {"cut": (400, 300), "small": (7, 3), "bias": (5,)}
"""The first is cut over both servers."""
THRESHOLD = 0.75
TWO_BITS = {"type": "2bit", "threshold": THRESHOLD, "min_bytes": 0}
ONE_BIT = {"type": "1bit", "threshold": 0.25, "min_bytes": 0}
LR = {"lr": 0.5, "momentum": 0.9}

Tensors = dict[str, torch.Tensor]
Rule = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPS_TRANSPORT", request.param)


def run(work: Callable[..., Any], *arguments: Any) -> list[Any]:
    with kvps.LocalCluster(WORKERS, servers=2) as cluster:
        return cluster.run(work, *arguments)


def parameters() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()
    }


def gradients(rank: int, step: int) -> Tensors:
    generator = torch.Generator().manual_seed(1 + 100 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def loss_of(params: dict[str, torch.nn.Parameter], rank: int, step: int) -> torch.Tensor:
    """Return a loss that has exactly the drawn gradients."""
    drawn = gradients(rank, step)
    return torch.stack([(params[name] * drawn[name]).sum() for name in params]).sum()


def kept(params: dict[str, torch.nn.Parameter]) -> Tensors:
    return {name: item.detach().clone() for name, item in params.items()}


def two_bits(rest: torch.Tensor) -> torch.Tensor:
    return THRESHOLD * ((rest >= THRESHOLD).float() - (rest <= -THRESHOLD).float())


def one_bit(rest: torch.Tensor) -> torch.Tensor:
    return torch.where(rest > 0.25, 1.0, -1.0)


class Reference:
    """All workers' gradients through a codec with a rest for each, and torch's SGD."""

    def __init__(self, rule: Rule, plain: Iterable[str] = ()) -> None:
        self.params = parameters()
        self.rests = [{n: torch.zeros(s) for n, s in SHAPES.items()} for _ in range(WORKERS)]
        self._rule = rule
        self._plain = set(plain)
        self._optimizer = torch.optim.SGD(self.params.values(), **LR)

    def step(self, number: int) -> None:
        self.step_by([gradients(rank, number) for rank in range(WORKERS)])

    def step_by(self, drawn: list[Tensors], divisor: float = WORKERS) -> None:
        for name, param in self.params.items():
            param.grad = torch.zeros(SHAPES[name])
            for rank, found in enumerate(drawn):
                param.grad += self.sent(rank, name, found[name]) / divisor
        self._optimizer.step()

    def sent(self, rank: int, name: str, gradient: torch.Tensor) -> torch.Tensor:
        if name in self._plain:
            return gradient
        rest = self.rests[rank][name]
        rest += gradient
        sent = self._rule(rest)
        rest -= sent
        return sent


def assert_close(found: Tensors, expected: dict[str, Any], atol: float = 1e-5) -> None:
    for name, item in expected.items():
        torch.testing.assert_close(found[name], item.detach(), rtol=1e-5, atol=atol, msg=name)


# --- the Trainer ------------------------------------------------------------------------------------


@pytest.mark.pairwise
@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("compression", "rule"), [(TWO_BITS, two_bits), (ONE_BIT, one_bit)], ids=["2bit", "1bit"]
)
def test_a_trainer_follows_mxnets_rule(
    compression: dict[str, Any], rule: Rule, overlap: bool, on_store: bool
) -> None:
    rules = [{"pattern": "b*s", "type": "none"}]

    def work(rank: int) -> tuple[Tensors, Tensors]:
        params = parameters()
        kv = kvps.create("dist_sync")
        trainer = kvps.Trainer(
            params,
            "sgd",
            LR,
            kv,
            {**compression, "rules": rules},
            update_on_kvstore=on_store,
            overlap=overlap,
        )
        for step in range(STEPS):
            loss_of(params, rank, step).backward()
            trainer.step(WORKERS)
            for param in params.values():
                param.grad = None
        return kept(params), kv.compression_state()

    reference = Reference(rule, plain=["bias"])
    for step in range(STEPS):
        reference.step(step)
    for rank, (found, rests) in enumerate(run(work)):
        assert_close(found, reference.params)
        assert rests.keys() == {"cut", "small"}
        assert_close(reference.rests[rank], rests)


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("on_store", [True, False])
def test_a_trainer_goes_on_with_what_was_owed(on_store: bool, tmp_path: Path) -> None:
    """Saved and loaded in another cluster, it makes the same steps, to the bit."""
    path = str(tmp_path / "states")

    def work(rank: int, params: dict[str, torch.nn.Parameter], begin: int) -> Tensors:
        trainer = kvps.Trainer(params, "sgd", LR, "dist_sync", TWO_BITS, update_on_kvstore=on_store)
        if begin:
            trainer.load_states(path)
        for step in range(begin, STEPS):
            if step == 2 and not begin:
                trainer.save_states(path)
                saved[rank] = kept(params)
            loss_of(params, rank, step).backward()
            trainer.step(WORKERS)
            for param in params.values():
                param.grad = None
        return kept(params)

    saved: dict[int, Tensors] = {}
    whole = run(lambda rank: work(rank, parameters(), 0))
    names = sorted(field.name for field in tmp_path.iterdir())
    assert names == ["states", "states.rests-0", "states.rests-1"]
    again = run(lambda rank: work(rank, {n: torch.nn.Parameter(w) for n, w in saved[rank].items()}, 2))
    for item, other in zip(whole, again, strict=True):
        assert_same(item, other)


def assert_same(first: Tensors, other: Tensors) -> None:
    for name in first:
        assert torch.equal(first[name], other[name]), name


def test_a_ring_does_not_compress() -> None:
    def work(rank: int) -> None:
        with pytest.raises(kvps.ConfigError, match=r"allreduce.*does not support set_gradient_compress"):
            kvps.Trainer(parameters(), "sgd", LR, "allreduce", "2bit")
        params = parameters()
        sgd = torch.optim.SGD(params.values(), **LR)
        with pytest.raises(kvps.ConfigError, match="allreduce"):
            DistributedOptimizer(sgd, params.items(), "allreduce", "2bit")

    run(work)


# --- DistributedOptimizer ---------------------------------------------------------------------------


def wrapped(
    params: dict[str, torch.nn.Parameter], compression: Any = TWO_BITS, **options: Any
) -> DistributedOptimizer:
    sgd = torch.optim.SGD(params.values(), **LR)
    named: Any = params.items()
    if options.get("overlap_forward"):
        named = torch.nn.ParameterDict(params)
    return DistributedOptimizer(sgd, named, "dist_sync", compression, **options)


@pytest.mark.pairwise
@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("option", ["", "find_unused", "overlap_forward", "bucket_bytes"])
def test_an_optimizer_follows_mxnets_rule(option: str, on_store: bool) -> None:
    options: dict[str, Any] = {option: 1000 if option == "bucket_bytes" else True} if option else {}

    def work(rank: int) -> tuple[Tensors, Tensors]:
        params = parameters()
        optimizer = wrapped(params, update_on_kvstore=on_store, **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(params, rank, step).backward()
            optimizer.step()
        rests = optimizer.kvstore.compression_state()
        optimizer.close()
        return kept(params), rests

    reference = Reference(two_bits)
    for step in range(STEPS):
        reference.step(step)
    for rank, (found, rests) in enumerate(run(work)):
        assert_close(found, reference.params)
        assert rests.keys() == SHAPES.keys()
        assert_close(reference.rests[rank], rests)


@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("way", ["backward_passes_per_step", "no_sync"])
def test_passes_are_added_up_before_they_are_compressed(way: str, on_store: bool) -> None:
    def work(rank: int) -> Tensors:
        params = parameters()
        options = {way: 2} if way != "no_sync" else {}
        optimizer = wrapped(params, update_on_kvstore=on_store, **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            with optimizer.no_sync() if way == "no_sync" else nullcontext():
                loss_of(params, rank, 10 + step).backward()
            loss_of(params, rank, step).backward()
            optimizer.step()
        return kept(params)

    reference = Reference(two_bits)
    for step in range(STEPS):
        both = [(gradients(r, 10 + step), gradients(r, step)) for r in range(WORKERS)]
        reference.step_by([{name: a[name] + b[name] for name in a} for a, b in both])
    for found in run(work):
        assert_close(found, reference.params)


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("on_store", [True, False])
def test_a_scaler_sees_what_is_infinite(on_store: bool) -> None:
    """Worker 1 overflows in step 2: nobody makes it, and it is in no rest."""

    def work(rank: int) -> Tensors:
        params = parameters()
        optimizer = wrapped(params, update_on_kvstore=on_store)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = scaler.scale(loss_of(params, rank, step))
            (loss * float("inf") if (rank, step) == (1, 2) else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return kept(params)

    reference = Reference(two_bits)
    for step in range(STEPS):
        scale = 1.0 if on_store else 4.0 if step <= 2 else 2.0
        drawn = [
            {name: scale * item for name, item in gradients(rank, step).items()} for rank in range(WORKERS)
        ]
        if step != 2:
            reference.step_by(drawn, divisor=WORKERS * scale)
        elif not on_store:  # worker 0 could not know
            for name in SHAPES:
                reference.sent(0, name, drawn[0][name])
    for found in run(work):
        assert_close(found, reference.params)


@pytest.mark.parametrize("on_store", [True, False])
def test_a_state_dict_has_what_is_owed(on_store: bool, tmp_path: Path) -> None:
    """It goes on to the bit, and torch's own optimizer takes it, too."""

    def work(rank: int, params: dict[str, torch.nn.Parameter], begin: int) -> Tensors:
        optimizer = wrapped(params, update_on_kvstore=on_store)
        path = tmp_path / f"optimizer-{rank}.pt"
        if begin:
            optimizer.load_state_dict(torch.load(path))
        for step in range(begin, STEPS):
            if step == 2 and not begin:
                torch.save(optimizer.state_dict(), path)
                saved[rank] = kept(params)
            optimizer.zero_grad()
            loss_of(params, rank, step).backward()
            optimizer.step()
        return kept(params)

    saved: dict[int, Tensors] = {}
    whole = run(lambda rank: work(rank, parameters(), 0))
    again = run(lambda rank: work(rank, {n: torch.nn.Parameter(w) for n, w in saved[rank].items()}, 2))
    for item, other in zip(whole, again, strict=True):
        assert_same(item, other)

    state = torch.load(tmp_path / "optimizer-1.pt")
    assert state["compression"]["rank"] == 1
    assert state["compression"]["rests"].keys() == SHAPES.keys()
    alone = torch.optim.SGD(parameters().values(), **LR)
    alone.load_state_dict(state)
    assert alone.state_dict().keys() == {"state", "param_groups"}


def test_a_state_dict_of_another_rank_owes_nothing() -> None:
    def work(rank: int) -> bool:
        params = parameters()
        optimizer = wrapped(params)
        loss_of(params, rank, 0).backward()
        optimizer.step()
        mine = optimizer.state_dict()
        theirs = kvps.torch.broadcast_object(mine, root_rank=0)
        optimizer.load_state_dict(theirs)
        return bool(optimizer.kvstore.compression_state())

    assert run(work) == [True, False]
