"""What stores take of a server's memory, and what is refused."""

from __future__ import annotations

import pytest
import torch

from kvps.core.limits import TABLE
from kvps.core.optim.hyperparams import resolve
from kvps.core.optim.torch_rules import create
from kvps.core.placement import EMBEDDING
from kvps.core.server.chunks.slab import Chunks, Slab
from kvps.core.server.memory_budget import MemoryBudget, MemoryTerms, Reservation
from kvps.errors import Overload
from tests.support.server_harness import opening, weight_bytes

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


def test_elements_reserve_weights_sums_and_states() -> None:
    adam = create(resolve("adam", {}))
    assert NO.reserve({"float32": 10, "int8": 3}) == Reservation(43, 43)
    assert MemoryTerms(1, adam).reserve({"float32": 10, "int8": 3}) == Reservation(43, 43, 43, 80)
    assert MemoryTerms(1, None).reserve({"float16": 10}) == Reservation(20, 20, 40)


def test_stores_are_added_up() -> None:
    budget = holding(None, float32=10)
    budget.terms["other"] = NO
    assert budget.reserved() == Reservation(40, 40, 40)
    assert budget.reserved("other", NO, {"float64": 1}) == Reservation(48, 48, 40)
    assert budget.reserved("kv", NO) == Reservation(40, 40)


def test_an_optimizer_that_has_no_room_is_refused_with_the_sum() -> None:
    budget = holding(10**9, float32=60_000_000)
    budget.demand_optimizer("kv", create(resolve("sgd", {"momentum": 0.9})))
    with pytest.raises(Overload) as refused:
        budget.demand_optimizer("kv", create(resolve("adam", {})))
    assert str(refused.value) == (
        "no room for optimizer 'adam' of store 'kv': weights 229 MiB + second buffers 229 MiB + sums of open "
        "rounds 229 MiB + optimizer state 458 MiB = 1.12 GiB, and the limit of this server is 954 MiB (--memory-limit; by "
        "default 80 % of the memory of the machine or its container, divided by the servers that are started together). "
        "Add servers (each holds a part), raise the limit, or use an optimizer with less state"
    )


def test_keys_and_tables_that_have_no_room() -> None:
    budget = holding(130, float32=10)
    budget.demand_keys("kv", [], {})
    budget.demand_keys("kv", ["a"], {"int8": 3})
    with pytest.raises(Overload, match="no room for key 'a' and 2 more of store 'kv'"):
        budget.demand_keys("kv", ["a", "b", "c"], {"int8": 4})
    with pytest.raises(Overload, match="no room for table 'words' of"):
        budget.demand_keys("kv", [EMBEDDING + "words"], {"int64": 1})


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


@pytest.mark.parametrize(
    ("mode", "deterministic", "gradients"), [("sync", False, 1), ("sync", True, 3), ("async", False, 0)]
)
def test_the_gradients_of_an_open_round(mode: str, deterministic: bool, gradients: int) -> None:
    opened = opening(mode=mode, deterministic=deterministic)
    assert MemoryBudget(Chunks(), None, workers=3).gradients_of(opened) == gradients


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
