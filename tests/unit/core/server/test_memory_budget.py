"""What stores take of a server's memory, and what is refused."""

import pytest
import torch

from kvps.core.limits import TABLE
from kvps.core.optim.hyperparams import resolve
from kvps.core.optim.torch_rules import create
from kvps.core.placement import EMBEDDING
from kvps.core.server.chunks.slab import Chunks, Slab
from kvps.core.server.memory_budget import MemoryBudget, MemoryTerms, Reservation
from kvps.errors import Overload
from tests.support.server_harness import weight_bytes

NO = MemoryTerms(0, None)


def holding(limit: int | None, **counts: int) -> MemoryBudget:
    """Return the budget of a server with a store of rounds, which has so many elements of each type."""
    chunks = Chunks()
    budget = MemoryBudget(chunks, limit)
    budget.terms["kv"] = MemoryTerms(1, None)
    for dtype, count in counts.items():
        Slab("kv", dtype, chunks, 1 << 20).place(dtype, count)
    return budget


@pytest.mark.parametrize(
    ("name", "options", "dtype", "size"),
    [
        ("sgd", {}, torch.float32, 0),
        ("sgd", {"momentum": 0.9}, torch.float32, 4),
        ("adam", {}, torch.float32, 8),
        ("adam", {}, torch.float64, 16),
        ("adam", {"multi_precision": True}, torch.bfloat16, 12),
        ("adam", {}, torch.int8, 0),
    ],
)
def test_the_state_of_an_element(
    name: str, options: dict[str, object], dtype: torch.dtype, size: int
) -> None:
    assert create(resolve(name, options)).state_bytes(dtype) == size


def test_tables_count_what_they_hold() -> None:
    chunks = Chunks()
    budget = MemoryBudget(chunks, 100)
    budget.terms["kv"] = NO
    chunks.table_bytes["kv"] = 100
    budget.demand_growth(EMBEDDING + "words")
    chunks.table_bytes["kv"] = 101
    with pytest.raises(Overload, match="more rows of table 'words': tables 101 B = 101 B"):
        budget.demand_growth(EMBEDDING + "words")
    assert weight_bytes(chunks) == 101


def test_rounds_ahead_have_the_room_that_is_left() -> None:
    budget = holding(120 + 2 * 40 + 39, float32=10)
    assert [budget.has_room_for(rounds) for rounds in (0, 1, 2, 3)] == [True, True, True, False]
    assert holding(None, float32=10).has_room_for(63)


def test_residuals_are_reserved_once() -> None:
    budget = holding(200, float32=10, int8=1)
    budget.demand_residuals("kv")
    assert budget.reserved() == Reservation(41, 41, 41, residuals=40)
    budget.terms["other"] = budget.terms["kv"]
    budget.demand_residuals("kv")
    budget.terms["kv"] = MemoryTerms(1, create(resolve("sgd", {"momentum": 0.9})))
    with pytest.raises(Overload, match=r"no room for residuals of store 'kv': .* residuals 40 B = "):
        budget.demand_residuals("kv")
    assert not budget.terms["kv"].has_residuals


def test_a_server_holds_a_million_keys() -> None:
    budget = holding(None, float32=10)
    budget.keys["other"] = range(TABLE["keys"].default - 2)  # type: ignore[assignment]  # as many as that
    budget.demand_keys("kv", ["a", "b"], {})
    with pytest.raises(Overload, match="3 keys of store 'kv' are too many: a server holds 1,000,000"):
        budget.demand_keys("kv", ["a", "b", "c"], {})
