"""Lazy updates: rows that a gradient names are updated as a tensor of their own, others not at all."""

from typing import Any

import pytest
import torch

from kvps.core.embedding.spec import new_state
from kvps.core.optim import sparse_update
from kvps.core.optim.base import MASTER, Terms
from kvps.core.optim.hyperparams import resolve
from kvps.core.optim.torch_rules import UPDATERS, State, Updater, create

COUNT, WIDTH = 20, 6
LAZY = sorted(set(UPDATERS) - {"lars", "lamb"})


class Table:
    """A table with its optimizer, of one type."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        torch.manual_seed(0)
        self.weights = torch.randn(COUNT, WIDTH).to(dtype)
        self.hyper = resolve(name, options)
        self.updater: Updater = create(self.hyper)
        self.state: State = new_state(self.updater, self.weights)
        self.step = 0

    def update(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self.step += 1
        sparse_update.update_rows(
            self.weights,
            self.state,
            ids,
            rows.clone(),
            self.updater,
            Terms(self.step, *self.hyper.for_key("")),
        )


def steps(count: int, touched: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return so many sparse gradients, each of other rows."""
    torch.manual_seed(1)
    return [
        (torch.randperm(COUNT)[:touched].sort().values, torch.randn(touched, WIDTH)) for _ in range(count)
    ]


def dense(ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.zeros(COUNT, WIDTH, dtype=rows.dtype).index_copy_(0, ids, rows)


@pytest.mark.parametrize(
    ("name", "options", "reference"),
    [
        ("sgd", {"lr": 0.1}, lambda p: torch.optim.SGD(p, lr=0.1)),
        ("adagrad", {"lr": 0.1}, lambda p: torch.optim.Adagrad(p, lr=0.1)),
    ],
)
def test_rules_that_a_zero_gradient_does_not_move_equal_dense_torch(
    name: str, options: dict[str, Any], reference: Any
) -> None:
    table = Table(name, **options)
    weight = torch.nn.Parameter(table.weights.clone())
    optimizer = reference([weight])
    for ids, rows in steps(8):
        weight.grad = dense(ids, rows)
        optimizer.step()
        table.update(ids, rows)
    torch.testing.assert_close(table.weights, weight.detach())


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.9)])
def test_adam_equals_sparse_adam_of_torch(betas: tuple[float, float]) -> None:
    table = Table("adam", lr=0.05, betas=betas)
    weight = torch.nn.Parameter(table.weights.clone())
    optimizer = torch.optim.SparseAdam([weight], lr=0.05, betas=betas)
    for ids, rows in steps(12):
        weight.grad = torch.sparse_coo_tensor(
            ids[None], rows, (COUNT, WIDTH), is_coalesced=True, check_invariants=False
        )
        optimizer.step()
        table.update(ids, rows)
    # torch adds eps before it corrects the bias, and Adam behind: that is all the difference.
    torch.testing.assert_close(table.weights, weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options", "reference"),
    [
        (
            "sgd",
            {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        ),
        ("adamw", {"lr": 0.1, "weight_decay": 0.1}, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1)),
        ("rmsprop", {"lr": 0.1, "momentum": 0.5}, lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5)),
    ],
)
def test_rows_that_are_always_touched_are_updated_as_torch_updates_a_tensor(
    name: str, options: dict[str, Any], reference: Any
) -> None:
    table = Table(name, **options)
    ids = torch.tensor([0, 3, 19])
    weight = torch.nn.Parameter(table.weights[ids].clone())
    optimizer = reference([weight])
    for _, rows in steps(8, touched=3):
        weight.grad = rows.clone()
        optimizer.step()
        table.update(ids, rows)
    torch.testing.assert_close(table.weights[ids], weight.detach())


def test_ftrl_follows_its_formula_on_the_rows_that_are_touched() -> None:
    table = Table("ftrl", lr=0.1, lamda1=0.05, beta=1.0, weight_decay=0.01)
    weight = table.weights.clone().double()
    z, n = torch.zeros(COUNT, WIDTH).double(), torch.zeros(COUNT, WIDTH).double()
    for ids, rows in steps(8):
        g = rows.double()
        sigma = ((n[ids] + g * g).sqrt() - n[ids].sqrt()) / 0.1
        z[ids] += g - sigma * weight[ids]
        n[ids] += g * g
        shrunk = (z[ids].abs() - 0.05).clamp(min=0)
        weight[ids] = -z[ids].sign() * shrunk / ((1.0 + n[ids].sqrt()) / 0.1 + 0.01)
        table.update(ids, rows)
    torch.testing.assert_close(table.weights.double(), weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_no_other_row_changes_in_any_bit(name: str, dtype: torch.dtype) -> None:
    options = {"weight_decay": 0.1} if name not in ("test", "assign") else {}
    table = Table(name, dtype, multi_precision=True, **options)
    table.update(torch.arange(COUNT), torch.randn(COUNT, WIDTH).to(_wide(dtype)))
    ids = torch.tensor([2, 7])
    others = torch.tensor([row for row in range(COUNT) if row not in (2, 7)])
    before = {"": table.weights.clone(), **{key: item.clone() for key, item in table.state.items()}}
    table.update(ids, torch.randn(2, WIDTH).to(_wide(dtype)))
    after = {"": table.weights, **table.state}
    for title, item in before.items():
        assert torch.equal(after[title][others], item[others]), title
    assert not torch.equal(after[""][ids], before[""][ids])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype is torch.float16 else dtype


def test_the_master_of_half_weights_moves_with_them() -> None:
    table = Table("sgd", torch.float16, lr=1e-4, multi_precision=True)
    ids = torch.tensor([4])
    for _ in range(50):  # each too small for float16 to show
        table.update(ids, torch.ones(1, WIDTH))
    assert torch.equal(table.weights[4], table.state[MASTER][4].half())
    torch.manual_seed(0)
    begun = torch.randn(COUNT, WIDTH).half()[4].float()
    torch.testing.assert_close(table.state[MASTER][4], begun - 50 * 1e-4)


def test_many_rows_are_updated_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = Table("adam"), Table("adam")
    gradients = steps(3, touched=11)
    for ids, rows in gradients:
        whole.update(ids, rows)
    monkeypatch.setattr(sparse_update, "BLOCK_COUNT", 4 * WIDTH)
    for ids, rows in gradients:
        cut.update(ids, rows)
    assert torch.equal(whole.weights, cut.weights)


def test_no_rows_are_no_update() -> None:
    table = Table("adam", weight_decay=0.5)
    before = table.weights.clone()
    table.update(torch.empty(0, dtype=torch.int64), torch.empty(0, WIDTH))
    assert torch.equal(table.weights, before)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_a_rule_that_needs_norms_is_refused(name: str) -> None:
    table = Table(name)
    with pytest.raises(ValueError, match=f"{name} needs norms of the whole tensor"):
        table.update(torch.tensor([1]), torch.ones(1, WIDTH))


@pytest.mark.parametrize("before", [None, torch.tensor([0, 2]), torch.tensor([2])])
def test_assigned_rows_are_all_that_is_not_zero(before: torch.Tensor | None) -> None:
    weights = torch.tensor([[1.0, 1.0], [0.0, 0.0], [3.0, 3.0]]).half()
    sparse_update.assign_rows(weights, torch.tensor([1, 2]), torch.full((2, 2), 5.0), before)
    first = 1.0 if before is not None and 0 not in before else 0.0  # not known to have a value
    assert weights.tolist() == [[first, first], [5.0, 5.0], [5.0, 5.0]]


@pytest.mark.spec("R423")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_given_row_of_zeros_can_be_told_from_a_row_that_is_not_given(dtype: torch.dtype) -> None:
    weights = torch.ones(4, 2, dtype=dtype)
    rows = torch.tensor([[0.0, 0.0], [-0.0, 3.0], [-0.0, -0.0]])
    sparse_update.assign_rows(weights, torch.tensor([0, 2, 3]), rows, None)
    assert weights.tolist() == [[0.0, 0.0], [0.0, 0.0], [0.0, 3.0], [0.0, 0.0]]
    assert weights[:, 0].signbit().tolist() == [True, False, True, True]
    sparse_update.assign_rows(weights, torch.tensor([1]), torch.zeros(1, 2), torch.tensor([0, 2, 3]))
    assert weights[:, 0].signbit().tolist() == [False, True, False, False]


def test_integers_have_no_negative_zero() -> None:
    weights = torch.ones(2, 2, dtype=torch.int32)
    rows = torch.zeros(1, 2, dtype=torch.int32)
    sparse_update.assign_rows(weights, torch.tensor([1]), rows, None)
    assert weights.tolist() == [[0, 0], [0, 0]]
