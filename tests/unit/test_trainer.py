"""The Trainer in one process: it equals torch, takes what it should and refuses the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import kvps

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DATA = torch.Generator().manual_seed(1)
INPUTS = torch.randn(12, 6, generator=DATA)
LABELS = torch.randint(3, (12,), generator=DATA)

OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": ({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, torch.optim.SGD),
    "adam": ({"lr": 0.01, "betas": (0.8, 0.9)}, torch.optim.Adam),
    "adamw": ({"lr": 0.01, "weight_decay": 0.1}, torch.optim.AdamW),
    "rmsprop": ({"lr": 0.01, "momentum": 0.5}, torch.optim.RMSprop),
}
PLACES = [
    pytest.param(store, on_store, id=f"{store}-{'store' if on_store else 'here'}")
    for store in ("local", "device", None)
    for on_store in (False, True)
    if store is not None or not on_store
]


def net(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    """A small model with the same weights each time."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3, bias=False))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(generator=generator)
    return model.to(dtype)


def backward(model: torch.nn.Module, rows: slice = slice(None)) -> int:
    """Make gradients of the sum of the losses; return the number of examples."""
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    cross_entropy(model(INPUTS[rows].to(dtype)), LABELS[rows], reduction="sum").backward()
    return len(LABELS[rows])


def train(model: torch.nn.Module, trainer: kvps.Trainer, steps: int = 5) -> None:
    for _ in range(steps):
        trainer.step(backward(model))


def train_torch(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> torch.nn.Module:
    for _ in range(steps):
        count = backward(model)
        for param in model.parameters():
            if param.grad is not None:
                param.grad /= count
        optimizer.step()
    return model


def assert_same(
    first: torch.nn.Module, other: torch.nn.Module, rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    for mine, theirs in zip(first.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)


# --- it equals torch --------------------------------------------------------------------------------


@pytest.mark.parametrize(("store", "on_store"), PLACES)
@pytest.mark.parametrize("is_class", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_torch(name: str, is_class: bool, store: str | None, on_store: bool) -> None:
    options, cls = OPTIMIZERS[name]
    model, reference = net(), net()
    given = (cls(model.parameters(), **options), None) if is_class else (name, options)
    train(model, kvps.Trainer(model, *given, kvstore=store, update_on_kvstore=on_store))
    assert_same(model, train_torch(reference, cls(reference.parameters(), **options)))


@pytest.mark.parametrize(("store", "on_store"), PLACES)
def test_batch_sizes_may_change(store: str | None, on_store: bool) -> None:
    model, reference = net(), net()
    options = {"lr": 0.1, "momentum": 0.9}
    trainer = kvps.Trainer(model, "sgd", options, kvstore=store, update_on_kvstore=on_store)
    optimizer = torch.optim.SGD(reference.parameters(), **options)
    for rows in (slice(12), slice(5), slice(1), slice(12)):
        trainer.step(backward(model, rows))
        count = backward(reference, rows)
        for param in reference.parameters():
            assert param.grad is not None
            param.grad /= count
        optimizer.step()
    assert_same(model, reference)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("on_store", [False, True])
def test_other_types_train_too(dtype: torch.dtype, on_store: bool) -> None:
    model = net(dtype)
    options = {"lr": 0.1, "momentum": 0.9, "multi_precision": True}
    train(model, kvps.Trainer(model, "sgd", options, update_on_kvstore=on_store))
    reference = net()
    train_torch(reference, torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9))
    assert all(param.dtype == dtype for param in model.parameters())
    assert_same(model.float(), reference, rtol=4 * torch.finfo(dtype).eps + 1e-5, atol=0.03)


def test_a_half_gradient_is_divided_in_float32() -> None:
    """1e-4 / 4096 is below what float16 can tell from 0; the weight must feel it."""
    model = torch.nn.Linear(1, 1, bias=False).half()
    with torch.no_grad():
        model.weight.zero_()
    options = {"lr": 1e3, "multi_precision": True}
    trainer = kvps.Trainer(model, "sgd", options, update_on_kvstore=True)
    model.weight.grad = torch.full_like(model.weight, 1e-4)
    trainer.step(4096)
    assert model.weight.item() == pytest.approx(-1e3 * 1e-4 / 4096, rel=0.01)


def test_rescale_grad_of_the_user_counts_too() -> None:
    model, reference = net(), net()
    train(
        model, kvps.Trainer(model, "sgd", {"lr": 0.1, "rescale_grad": 0.5}, "device", update_on_kvstore=True)
    )
    train_torch(reference, torch.optim.SGD(reference.parameters(), lr=0.05))
    assert_same(model, reference)


@pytest.mark.parametrize("on_store", [False, True])
def test_clipping_comes_after_the_division(on_store: bool) -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    options = {"lr": 1.0, "clip_gradient": 1.0}
    trainer = kvps.Trainer({"w": param}, "sgd", options, update_on_kvstore=on_store)
    param.grad = torch.tensor([3.0, 30.0])
    trainer.step(6)
    assert param.tolist() == [-0.5, -1.0]


# --- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("on_store", [False, True])
def test_gradients_are_left_as_they_are(on_store: bool) -> None:
    model = net()
    trainer = kvps.Trainer(model, "adam", update_on_kvstore=on_store)
    for rows in (slice(12), slice(5)):
        count = backward(model, rows)
        before = [param.grad.clone() for param in model.parameters() if param.grad is not None]
        trainer.step(count)
        after = [param.grad for param in model.parameters()]
        torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_a_step_in_two_halves_is_a_step() -> None:
    model, reference = net(), net()
    trainer = kvps.Trainer(model, "sgd", {"lr": 0.1})
    count = backward(model)
    trainer.allreduce_grads()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    trainer.update(count)
    backward(reference)
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    kvps.Trainer(reference, "sgd", {"lr": 0.1}).step(count)
    assert_same(model, reference)


@pytest.mark.parametrize("half", ["allreduce_grads", "update"])
def test_the_store_takes_no_half_step(half: str) -> None:
    trainer = kvps.Trainer(net(), "sgd", update_on_kvstore=True)
    arguments = () if half == "allreduce_grads" else (1,)
    with pytest.raises(kvps.ConfigError, match=rf"{half}\(\).*update_on_kvstore=False"):
        getattr(trainer, half)(*arguments)


@pytest.mark.parametrize("on_store", [False, True])
def test_a_missing_gradient_is_an_error_that_names_it(on_store: bool) -> None:
    model, untouched = net(), net()
    trainer = kvps.Trainer(model, "sgd", {"lr": 0.1}, update_on_kvstore=on_store)
    with pytest.raises(kvps.ConfigError, match=r"'0\.weight' and 2 more of 3 has no gradient"):
        trainer.step(1)
    backward(model)
    model[2].weight.grad = None
    with pytest.raises(kvps.ConfigError, match=r"parameter '2\.weight' of 3.*ignore_stale_grad"):
        trainer.step(1)
    assert_same(model, untouched)


@pytest.mark.parametrize("on_store", [False, True])
def test_a_missing_gradient_may_count_as_zero(on_store: bool) -> None:
    model, reference = net(), net()
    options = {"lr": 0.1, "weight_decay": 0.5}
    trainer = kvps.Trainer(model, "sgd", options, update_on_kvstore=on_store)
    backward(model)
    model[2].weight.grad = None
    trainer.step(1, ignore_stale_grad=True)
    torch.testing.assert_close(model[2].weight, reference[2].weight * (1 - 0.1 * 0.5))
    assert not torch.equal(model[0].weight, reference[0].weight)


@pytest.mark.parametrize("on_store", [False, True])
def test_rows_of_a_sparse_gradient_are_updated_and_no_others(on_store: bool) -> None:
    model = torch.nn.Embedding(4, 2, sparse=True)
    before = model.weight.detach().clone()
    options = {"lr": 0.5, "weight_decay": 0.5}
    trainer = kvps.Trainer(model, "sgd", options, update_on_kvstore=on_store)
    for batch in (2, 4):
        model.zero_grad()
        model(torch.tensor([1, 3, 1])).sum().mul(batch).backward()
        trainer.step(batch)
    expected = before.clone()
    for _ in range(2):
        expected[1] -= 0.5 * (2 + 0.5 * expected[1])
        expected[3] -= 0.5 * (1 + 0.5 * expected[3])
    torch.testing.assert_close(model.weight.detach(), expected)


def test_a_transposed_table_is_updated_by_rows_too() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 4).t())
    trainer = kvps.Trainer({"w": weight}, "sgd", {"lr": 1.0})
    weight.grad = torch.sparse_coo_tensor(
        torch.tensor([[2]]), torch.ones(1, 2), (4, 2), check_invariants=False
    )
    trainer.step(1)
    assert weight.tolist() == [[0.0, 0.0], [0.0, 0.0], [-1.0, -1.0], [0.0, 0.0]]


def test_a_sparse_optimizer_of_torch_gets_sparse_gradients() -> None:
    model, reference = (torch.nn.Embedding(4, 2, sparse=True) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    trainer = kvps.Trainer(model, torch.optim.SparseAdam(model.parameters()))
    alone = torch.optim.SparseAdam(reference.parameters())
    for item in (model, reference):
        item(torch.tensor([1, 1])).sum().backward()
    trainer.step(1)
    alone.step()
    assert torch.equal(model.weight, reference.weight)


# --- parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        lambda model: model,
        lambda model: model.named_parameters(),
        lambda model: list(model.named_parameters()),
        lambda model: dict(model.named_parameters()),
        lambda model: model.state_dict(keep_vars=True),
    ],
    ids=["module", "iterator", "list", "dict", "state_dict"],
)
def test_parameters_may_come_as(given: Callable[[torch.nn.Module], Any]) -> None:
    model, reference = net(), net()
    train(model, kvps.Trainer(given(model), "sgd", {"lr": 0.1}))
    train(reference, kvps.Trainer(reference, "sgd", {"lr": 0.1}))
    assert_same(model, reference, rtol=0)


@pytest.mark.parametrize("on_store", [False, True])
def test_a_shared_parameter_is_one(on_store: bool) -> None:
    param = torch.nn.Parameter(torch.zeros(1))
    trainer = kvps.Trainer({"a": param, "b": param}, "sgd", {"lr": 1.0}, update_on_kvstore=on_store)
    param.grad = torch.ones(1)
    trainer.step(1)
    assert param.item() == -1.0


@pytest.mark.parametrize("on_store", [False, True])
def test_a_frozen_parameter_stays_and_may_thaw(on_store: bool) -> None:
    model = net()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    trainer = kvps.Trainer(model, "sgd", {"lr": 0.1}, update_on_kvstore=on_store)
    train(model, trainer, 1)
    assert torch.equal(model[0].weight, before)
    model[0].requires_grad_(True)
    train(model, trainer, 1)
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("on_store", [False, True])
def test_weights_of_any_layout_are_updated_in_place(on_store: bool) -> None:
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    reference = torch.nn.Conv2d(3, 4, 3)
    reference.load_state_dict(model.state_dict())
    where = model.weight.data_ptr()
    trainer = kvps.Trainer(model, "adam", {"lr": 0.1}, update_on_kvstore=on_store)
    images = torch.randn(2, 3, 5, 5)
    for _ in range(3):
        model.zero_grad()
        model(images).square().sum().backward()
        trainer.step(1)
    assert model.weight.data_ptr() == where
    assert not model.weight.is_contiguous()
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.1)
    for _ in range(3):
        reference.zero_grad()
        reference(images).square().sum().backward()
        optimizer.step()
    assert_same(model, reference, rtol=1e-4)


def test_a_parameter_may_be_empty() -> None:
    params = {"none": torch.nn.Parameter(torch.zeros(0)), "w": torch.nn.Parameter(torch.zeros(1))}
    for on_store in (False, True):
        trainer = kvps.Trainer(params, "adam", {"lr": 0.1}, update_on_kvstore=on_store)
        for param in params.values():
            param.grad = torch.ones_like(param)
        trainer.step(1)
    assert params["w"].item() == pytest.approx(-0.2)


# --- optimizers -------------------------------------------------------------------------------------


def groups(model: torch.nn.Sequential) -> list[dict[str, Any]]:
    return [
        {"params": model[0].parameters(), "lr": 0.1, "weight_decay": 0.0},
        {"params": model[2].parameters(), "lr": 0.025, "weight_decay": 0.5},
    ]


@pytest.mark.parametrize("on_store", [False, True])
def test_groups_may_differ_in_rate_and_decay(on_store: bool) -> None:
    model, reference = net(), net()
    optimizer = torch.optim.SGD(groups(model), momentum=0.9)
    trainer = kvps.Trainer(model, optimizer, update_on_kvstore=on_store)
    assert trainer.learning_rate == 0.1
    train(model, trainer, 3)
    trainer.set_learning_rate(0.2)  # 0.05 in the second group: it keeps its ratio
    train(model, trainer, 3)
    theirs = torch.optim.SGD(groups(reference), momentum=0.9)
    train_torch(reference, theirs, 3)
    theirs.param_groups[0]["lr"], theirs.param_groups[1]["lr"] = 0.2, 0.05
    assert_same(model, train_torch(reference, theirs, 3))


def test_groups_may_not_differ_in_more_than_that() -> None:
    model = net()
    optimizer = torch.optim.SGD(groups(model))
    optimizer.param_groups[1]["momentum"] = 0.5
    with pytest.raises(kvps.ConfigError, match="momentum"):
        kvps.Trainer(model, optimizer, update_on_kvstore=True)


@pytest.mark.parametrize("on_store", [False, True])
def test_multipliers_go_by_parameter_name(on_store: bool) -> None:
    model, before = net(), net()
    options = {"lr": 0.1, "lr_mult": {"0.weight": 0.0}}
    train(model, kvps.Trainer(model, "sgd", options, update_on_kvstore=on_store))
    assert torch.equal(model[0].weight, before[0].weight)
    assert not torch.equal(model[0].bias, before[0].bias)


def test_an_optimizer_that_servers_lack_works_here() -> None:
    model, reference = net(), net()
    optimizer = torch.optim.Rprop(model.parameters())
    train(model, kvps.Trainer(model, optimizer))
    assert_same(model, train_torch(reference, torch.optim.Rprop(reference.parameters())))
    with pytest.raises(kvps.ConfigError, match=r"Rprop.*update_on_kvstore=False"):
        kvps.Trainer(model, optimizer, update_on_kvstore=True)


@pytest.mark.parametrize(("store", "on_store"), PLACES)
def test_the_learning_rate_can_be_set(store: str | None, on_store: bool) -> None:
    param = torch.nn.Parameter(torch.zeros(1))
    trainer = kvps.Trainer({"w": param}, "sgd", {"lr": 1.0}, store, update_on_kvstore=on_store)
    assert trainer.learning_rate == 1.0
    param.grad = torch.ones(1)
    trainer.set_learning_rate(0.5)  # before the first step ...
    trainer.step(2)
    assert param.item() == -0.25
    trainer.set_learning_rate(0.125)  # ... and after it
    trainer.step(2)
    assert trainer.learning_rate == 0.125
    assert param.item() == -0.3125


@pytest.mark.parametrize("optimizer", ["sgd", torch.optim.SGD])
@pytest.mark.parametrize("lr", [-1, float("nan"), "fast"])
@pytest.mark.parametrize("on_store", [False, True])
def test_a_bad_learning_rate_is_refused(optimizer: Any, lr: Any, on_store: bool) -> None:
    model = net()
    given = optimizer if isinstance(optimizer, str) else optimizer(model.parameters(), lr=0.1)
    trainer = kvps.Trainer(model, given, update_on_kvstore=on_store)
    before = trainer.learning_rate
    with pytest.raises(kvps.ConfigError, match="lr="):
        trainer.set_learning_rate(lr)
    assert trainer.learning_rate == before


def by_name(model: torch.nn.Module, name: str) -> str:
    return name


def by_class(model: torch.nn.Module, name: str) -> torch.optim.Optimizer:
    options, cls = OPTIMIZERS[name]
    return cls(model.parameters(), **options)


@pytest.mark.parametrize(("store", "on_store"), PLACES)
@pytest.mark.parametrize("make", [by_name, by_class])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_saved_states_resume_exactly(
    name: str, make: Callable[..., Any], store: str | None, on_store: bool, tmp_path: Path
) -> None:
    path = str(tmp_path / "states.safetensors")

    def trainer_of(model: torch.nn.Module) -> kvps.Trainer:
        optimizer = make(model, name)
        options = OPTIMIZERS[name][0] if isinstance(optimizer, str) else None
        return kvps.Trainer(model, optimizer, options, store, update_on_kvstore=on_store)

    model, resumed = net(), net()
    trainer = trainer_of(model)
    train(model, trainer, 3)
    trainer.save_states(path)
    resumed.load_state_dict(model.state_dict())
    train(model, trainer, 3)

    again = trainer_of(resumed)
    again.load_states(path)
    train(resumed, again, 3)
    assert_same(model, resumed, rtol=0)


@pytest.mark.parametrize("make", [by_name, by_class])
@pytest.mark.parametrize("on_store", [False, True])
def test_states_of_something_else_are_refused(
    make: Callable[..., Any], on_store: bool, tmp_path: Path
) -> None:
    path = str(tmp_path / "states.safetensors")
    model = net()
    trainer = kvps.Trainer(model, make(model, "adam"), update_on_kvstore=on_store)
    train(model, trainer)
    trainer.save_states(path)
    with pytest.raises(kvps.Mismatch, match=r"[aA]dam"):
        kvps.Trainer(model, make(model, "sgd"), update_on_kvstore=on_store).load_states(path)
    other = torch.nn.Sequential(torch.nn.Linear(6, 9))
    with pytest.raises(kvps.Mismatch):
        kvps.Trainer(other, make(other, "adam"), update_on_kvstore=on_store).load_states(path)
    with pytest.raises(kvps.StorageError):
        trainer.load_states(str(tmp_path / "missing"))
    with pytest.raises(kvps.StorageError):
        trainer.save_states(str(tmp_path / "missing" / "states"))


# --- stores -----------------------------------------------------------------------------------------


class Doubling(kvps.KVStoreBase):
    """A plug-in with the least there is: it stands for two workers with the same gradients."""

    def __init__(self, capable: bool = False) -> None:
        self.seen: list[tuple[str, str, int]] = []
        self.is_capable = lambda capability: capable  # type: ignore[method-assign]

    @property
    def type(self) -> str:
        return "doubling"

    @property
    def rank(self) -> int:
        return 1

    @property
    def num_workers(self) -> int:
        return 2

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        self.seen.append(("broadcast", key, priority))
        out.fill_(1.0)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        self.seen.append(("pushpull", key, priority))
        out.copy_(value * 2)


def test_a_plugin_with_broadcast_and_pushpull_is_enough() -> None:
    kv = Doubling()
    params = {name: torch.nn.Parameter(torch.zeros(2)) for name in "ab"}
    trainer = kvps.Trainer(params, "sgd", {"lr": 0.25}, kvstore=kv)
    assert params["a"].tolist() == [1.0, 1.0]
    for param in params.values():
        param.grad = torch.ones(2)
    trainer.step(2)
    assert params["b"].tolist() == [0.75, 0.75]
    assert params["b"].grad.tolist() == [2.0, 2.0]  # type: ignore[union-attr]
    assert kv.seen == [
        ("broadcast", "a", 0),
        ("broadcast", "b", 0),
        ("pushpull", "a", 0),
        ("pushpull", "b", -1),
    ]


def test_a_store_that_cannot_update_is_not_made_to() -> None:
    with pytest.raises(ValueError, match="'doubling' cannot run an optimizer"):
        kvps.Trainer(net(), "sgd", kvstore=Doubling(), update_on_kvstore=True)


class Updating(Doubling):
    """A plug-in that runs an optimizer, of lr 1."""

    def __init__(self) -> None:
        super().__init__(capable=True)
        self.weights: dict[str, torch.Tensor] = {}
        self.optimizer = ""

    def set_optimizer(self, name: str, **hyper: Any) -> None:
        self.optimizer = name

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        self.weights[key] = value.detach().clone()

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        out.copy_(self.weights[key].sub_(value))


def test_a_plugin_that_can_update_does() -> None:
    kv = Updating()
    param = torch.nn.Parameter(torch.zeros(1))
    trainer = kvps.Trainer({"w": param}, "sgd", {"lr": 1.0}, kvstore=kv)
    param.grad = torch.ones(1)
    trainer.step(4)
    trainer.step(2)
    assert (kv.optimizer, param.item()) == ("sgd", -0.75)


def test_a_users_store_serves_one_trainer() -> None:
    kv = kvps.create("device")
    kvps.Trainer(net(), "sgd", kvstore=kv, update_on_kvstore=True)
    with pytest.raises(kvps.ConfigError, match=r"has the key '0\.bias' already.*its own store"):
        kvps.Trainer(net(), "sgd", kvstore=kv, update_on_kvstore=True)
    other = kvps.create("device")
    other.set_optimizer("sgd")
    with pytest.raises(kvps.ConfigError, match="has an optimizer already"):
        kvps.Trainer(net(), "sgd", kvstore=other, update_on_kvstore=True)


# --- bad input --------------------------------------------------------------------------------------


def lazy() -> torch.nn.Module:
    with torch.random.fork_rng():
        return torch.nn.LazyLinear(3)


def frozen() -> torch.nn.Module:
    return net().requires_grad_(False)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((net(), "sdg"), "unknown optimizer 'sdg'.*sgd"),
        ((net(), "sgd", {"lr": -1}), "lr=-1"),
        ((net(), "sgd", {"speed": 1}), "speed.*momentum"),
        ((net(), torch.optim.SGD), "give a name or a torch.optim.Optimizer"),
        ((net(), torch.optim.SGD(net().parameters())), r"'0\.weight' is not in the optimizer"),
        ((net(), "sgd", {}, "dits_sync"), "dits_sync.*dist_sync"),
        ((net(), "sgd", {}, 3), "name of a store, a store or None, got int"),
        ((torch.zeros(3), "sgd"), "a module, its named_parameters"),
        ((3, "sgd"), "a module, its named_parameters"),
        ((list(net().parameters()), "sgd"), "a module, its named_parameters.*Parameter"),
        (({"w": 3}, "sgd"), "a module, its named_parameters"),
        (([("w", torch.zeros(1)), ("w", torch.zeros(1))], "sgd"), "two parameters.*'w'"),
        (({}, "sgd"), "nothing to train"),
        ((frozen(), "sgd"), "nothing to train"),
        (({"w": torch.nn.Parameter(torch.zeros(1) * 1j)}, "sgd"), "'w' is torch.complex64"),
        ((net(), "sgd", {}, None, None, True), "needs a store"),
        ((net(), "sgd", {}, "device", True), "compression_params=True: give the name of a codec"),
        ((net(), "sgd", {}, "device", "3bit"), "type='3bit'.*2bit"),
        ((net(), "sgd", {}, None, "2bit"), "compression_params needs a store"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(kvps.KvpsError, match=text):
        kvps.Trainer(*arguments)


def test_a_torch_optimizer_brings_its_own_numbers() -> None:
    model = net()
    with pytest.raises(kvps.ConfigError, match="when you create it"):
        kvps.Trainer(model, torch.optim.SGD(model.parameters()), {"lr": 0.1})


def test_a_torch_optimizer_of_more_than_the_parameters_is_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD([*model.parameters(), torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(kvps.ConfigError, match="1 parameters that are not in params"):
        kvps.Trainer(model, optimizer)


def test_a_lazy_parameter_needs_a_batch_first() -> None:
    with pytest.raises(kvps.ConfigError, match="'weight' has no shape yet"):
        kvps.Trainer(lazy(), "sgd")


@pytest.mark.parametrize("batch_size", [0, -1, float("nan"), float("inf"), "8", True, None])
@pytest.mark.parametrize("on_store", [False, True])
def test_a_bad_batch_size_is_refused(batch_size: Any, on_store: bool) -> None:
    model, untouched = net(), net()
    trainer = kvps.Trainer(model, "sgd", {"lr": 0.1}, update_on_kvstore=on_store)
    backward(model)
    with pytest.raises(kvps.ConfigError, match="batch_size="):
        trainer.step(batch_size)
    assert_same(model, untouched)
