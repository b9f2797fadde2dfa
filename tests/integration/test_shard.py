"""A sharded model over a cluster: any number of workers gives the weights of one process."""

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

import kvps
from kvps.torch import shard
from tests.integration.training_loops import OPTIMIZERS, STEPS, Maker, draw, loss_of, part, run

Weights = dict[str, torch.Tensor]


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.wide = torch.nn.Linear(8, 16)
        self.narrow = torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.narrow(self.wide(self.norm(x)).tanh())
        return y


class Net(torch.nn.Module):
    """Three layers between two that are in no list, and a parameter that is the model's own."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.how = how
        self.begin = torch.nn.Linear(6, 8)
        self.layers = torch.nn.ModuleList([Layer() for _ in range(3)])
        self.scale = torch.nn.Parameter(torch.ones(8))
        self.end = torch.nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x) * self.scale
        for layer in self.layers:
            if self.how == "plain":
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.how == "reentrant")
        y: torch.Tensor = self.end(x)
        return y


def net(seed: int = 0, how: str = "plain") -> Net:
    model = Net(how)
    draw(model, seed, 0.3)
    return model


def assert_all(results: list[Weights], expected: Weights) -> None:
    for result in results:
        assert result.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(result[name], value, rtol=1e-4, atol=1e-6)
            assert torch.equal(result[name], results[0][name]), "to the bit"


def copied(model: torch.nn.Module) -> Weights:
    return {name: item.clone() for name, item in model.state_dict().items()}


def train_alone(model: torch.nn.Module, make: Maker, passes: int = 1, steps: int = STEPS) -> Weights:
    """One process, on the whole batch of each step, under a scheduler."""
    optimizer = make([param for param in model.parameters() if param.requires_grad])
    scheduler = StepLR(optimizer, 2, 0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        (passes * loss_of(model, slice(24))).backward()
        optimizer.step()
        scheduler.step()
    return copied(model)


def is_away(module: torch.nn.Module) -> bool:
    return all(bool(param.isnan().all()) for param in module.parameters())


# --- any number of workers --------------------------------------------------------------------------


@pytest.mark.pairwise
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("how", ["plain", "checkpointed", "reentrant"])
def test_workers_give_the_weights_of_one_process(name: str, workers: int, how: str) -> None:
    def work(rank: int) -> Weights:
        model = net(seed=rank, how=how)  # rank 0's weights count
        optimizer = OPTIMIZERS[name](model.parameters())
        sharded = shard(model, optimizer=optimizer)
        assert is_away(model)
        scheduler = StepLR(optimizer, 2, 0.5)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, part(rank, workers)).backward()
            assert is_away(model), "all are freed behind backward"
            assert all(param.grad is None for param in model.parameters())
            optimizer.step()
            scheduler.step()
        assert not optimizer.state
        assert sharded.steps == STEPS
        return copied(model)

    assert_all(run(workers, work), train_alone(net(how=how), OPTIMIZERS[name]))


@pytest.mark.parametrize("as_blocks", [True, False])
def test_tied_weights(as_blocks: bool) -> None:
    """One weight is the first and the last thing that the model computes with."""
    ids = torch.tensor([[0, 1, 2], [3, 4, 0]])

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(5, 8)
            self.layers = torch.nn.Sequential(Layer(), Layer())
            self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            self.head = torch.nn.Linear(8, 5, bias=False)
            self.head.weight = self.table.weight
            draw(self, 0, 0.3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.layers(self.table(ids))
            x, _ = self.attention(x, x, x, need_weights=False)
            y: torch.Tensor = self.head(x)
            return y

    def work(rank: int) -> Weights:
        model = Tied()
        blocks = [model.table, *model.layers, model.attention, model.head] if as_blocks else None
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        shard(model, optimizer=optimizer, blocks=blocks)
        for _ in range(4):
            model(ids[rank : rank + 1]).square().mean().backward()
            optimizer.step()
        return copied(model)

    model = Tied()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        model(ids).square().mean().backward()
        optimizer.step()
    assert_all(run(2, work), copied(model))


# --- the beginning and the end ----------------------------------------------------------------------


@pytest.mark.parametrize("by", ["reset_parameters", "init"])
def test_a_model_on_the_meta_device(by: str) -> None:
    """Rank 0 makes each block's values when they are uploaded; the optimizer may know the model before."""

    def fill(module: torch.nn.Module) -> None:
        with torch.no_grad():
            for item in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                item.fill_(2)

    def build() -> torch.nn.Sequential:
        return torch.nn.Sequential(
            torch.nn.Linear(6, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Linear(8, 8, bias=False),
            torch.nn.Linear(8, 3),
        )

    def work(rank: int) -> tuple[Weights, Weights]:
        with torch.device("meta"):
            model = build()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        sharded = shard(model, optimizer=optimizer, init=fill if by == "init" else None)
        begun = copied(model)
        loss_of(model, slice(24)).backward()
        optimizer.step()
        sharded.kvstore.barrier()
        return begun, copied(model)

    (begun, ended), *others = run(2, work)
    assert not any(item.is_meta for item in begun.values())
    assert all(bool(item.isfinite().all()) for item in begun.values())
    if by == "init":
        assert bool((begun["3.weight"] == 2).all())
    else:
        assert 0.2 < begun["3.weight"].abs().max() <= 8**-0.5
        assert begun["1.running_var"].tolist() == [1.0] * 8
    model = build()
    model.load_state_dict(begun)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_of(model, slice(24)).backward()
    optimizer.step()
    assert_all([ended, *(item for _, item in others)], copied(model))


def test_a_state_dict_is_that_of_the_module() -> None:
    saved = net(5).state_dict()
    saved["seen"] += 3

    def work(rank: int) -> Weights:
        model = net(rank)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        sharded = shard(model, optimizer=optimizer)
        loss_of(model, slice(24)).backward()
        with pytest.raises(kvps.ConfigError, match="in the middle of a step"):
            sharded.load_state_dict(saved)
        sharded.step()
        with pytest.raises(kvps.ConfigError, match="Call load_state_dict"):
            model.load_state_dict(saved)
        if rank == 0:
            with pytest.raises(kvps.Mismatch, match=r"lacks 'begin\.bias'"):
                sharded.load_state_dict({k: v for k, v in saved.items() if k != "begin.bias"})
        sharded.load_state_dict(saved if rank == 0 else {})
        with sharded.gathered(model.end):
            assert torch.equal(model.end.weight, saved["end.weight"])
            assert is_away(model.begin)
        assert is_away(model)
        assert_all([sharded.state_dict()], saved)
        loss_of(model, part(rank, 2)).backward()
        sharded.step()
        return copied(model)

    model = net()
    model.load_state_dict(saved)
    assert_all(run(2, work), train_alone(model, OPTIMIZERS["sgd"], steps=1))


@pytest.mark.parametrize("call", ["pull", "push"])
def test_a_return_of_the_servers_gives_up_the_step(
    call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the store did in the third step is told when it is waited for; then training goes on."""
    model = net()
    sharded = shard(model, "local", optimizer="sgd", lr=0.1, momentum=0.9)
    kv = sharded.kvstore
    real = getattr(kv, call)
    after = {name: 2 for name, _ in model.named_parameters()}
    due = [kvps.EpochChanged("the servers rolled back", after, after, has_optimizer=True)]

    class Late:
        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def done(self) -> bool:
            return True

        def wait(self) -> object:
            if sharded.steps == 2 and due:
                raise due.pop()
            return self.handle.wait()

    def changed(names: list[str], *values: Any, **options: Any) -> Any:
        if sharded.steps == 2 and due and call == "push":
            return Late(None)  # the store has lost it
        found = real(names, *values, **options)
        return Late(found) if options.get("async_op") else found

    monkeypatch.setattr(kv, call, changed)
    for step in range(4):
        before = copied(model)
        loss_of(model, slice(24)).backward()
        sharded.step()
        is_same = all(torch.equal(item, before[name]) for name, item in copied(model).items())
        assert is_same == (step == 2), step
    assert not due
    assert caplog.text.count("the servers rolled back") == 1


# --- what cannot be ---------------------------------------------------------------------------------


def test_second_use_of_a_freed_weight_is_refused() -> None:
    with kvps.LocalCluster():
        model = net()
        sharded = shard(model, optimizer="sgd", lr=0.1)
        loss = loss_of(model, slice(24))
        loss.backward(retain_graph=True)
        with pytest.raises(kvps.ConfigError, match="already been pushed in this step"):
            loss.backward()
        sharded.step()
        with pytest.raises(kvps.ConfigError, match=r"no gradient for 'scale', 'begin\.weight'"):
            sharded.step()
        with pytest.raises(kvps.ConfigError, match="create_graph=True"):
            loss_of(model, slice(24)).backward(create_graph=True)
        sharded.close()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"kvstore": "dist_async"}, "may update a weight between forward and backward"),
        ({"kvstore": "allreduce"}, "has no servers"),
        ({"blocks": [torch.nn.Linear(1, 1)]}, "not a module inside the model"),
        ({"init": print}, "init= fills modules on the meta device"),
        ({"optimizer": 3}, "give a torch optimizer or a name"),
        ({"optimizer": "sgd", "lr": 1, "rate": 2}, "rate"),
        ({"backward_passes_per_step": 0}, "use a whole number of passes"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], told: str) -> None:
    given = {"optimizer": "sgd", **arguments}
    with kvps.LocalCluster(), pytest.raises(kvps.KvpsError, match=told):
        shard(net(), **given)
