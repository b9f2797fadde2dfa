"""Memory for rows that grows without moving one."""

import numpy as np
import pytest
import torch

from kvps.core.embedding import arena as module
from kvps.core.embedding.arena import ArenaGroup, Arenas, Columns, Slots


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Arenas:
    """Arenas of 4, 4, 8, 8, ... rows of 2 floats and 2 halves."""
    monkeypatch.setattr(module, "ARENA_BYTES_MIN", 48)
    monkeypatch.setattr(module, "ARENA_BYTES_MAX", 96)
    return Arenas({"weight": (torch.float32, 2), "sum": (torch.float16, 2)})


def write(arenas: Arenas, slots: Slots, columns: Columns) -> None:
    ArenaGroup((arenas,)).write(slots, (len(slots),), columns)


def rows(count: int) -> dict[str, torch.Tensor]:
    weight = torch.arange(2.0 * count).view(count, 2)
    return {"weight": weight, "sum": -weight.half()}


def test_each_arena_is_as_large_as_those_before_within_bounds(small: Arenas) -> None:
    small.reserve(0)
    assert [item.rows for item in small] == []
    small.reserve(20)
    assert [(item.start, item.rows) for item in small] == [(0, 4), (4, 4), (8, 8), (16, 8)]
    assert small.size_bytes == 24 * 12
    small.check()


def test_rows_are_found_where_they_were_written(small: Arenas) -> None:
    small.reserve(24)
    order = np.random.default_rng(3).permutation(24)
    write(small, order, rows(24))
    assert torch.equal(small.read(order)["weight"], rows(24)["weight"])
    assert torch.equal(small.read(order)["sum"], rows(24)["sum"])
    again = np.array([order[3], order[3], order[20]])
    assert torch.equal(small.read(again)["weight"], rows(24)["weight"][[3, 3, 20]])
    assert small.read(again[:0])["sum"].shape == (0, 2)
    assert small.read(again, ("sum",)).keys() == {"sum"}


def test_held_arenas_keep_their_values(small: Arenas) -> None:
    small.reserve(16)
    everywhere = np.arange(16)
    write(small, everywhere, rows(16))
    _, kept, release = small.keep(16)
    _, second, release_second = small.keep(16)
    write(small, np.array([0]), {"weight": torch.tensor([[9.0, 9.0]]), "sum": torch.zeros(1, 2).half()})
    assert kept[0].columns["weight"][0].tolist() == [0.0, 1.0]
    assert second[0].columns["weight"][0].tolist() == [0.0, 1.0]
    assert small.read(np.array([0]))["weight"].tolist() == [[9.0, 9.0]]
    mine = [item.columns["weight"].data_ptr() for item in small]
    theirs = [item.columns["weight"].data_ptr() for item in kept]
    assert [a == b for a, b in zip(mine, theirs, strict=True)] == [False, True, True]
    both = np.array([1, 14])  # in an arena that is ours by now, and in one that is held
    write(small, both, {"weight": torch.full((2, 2), 7.0), "sum": torch.zeros(2, 2).half()})
    assert small.read(both)["weight"].tolist() == [[7.0, 7.0]] * 2
    assert kept[2].columns["weight"][6].tolist() == [28.0, 29.0]
    release()
    write(small, np.array([5]), {"weight": torch.tensor([[8.0, 8.0]]), "sum": torch.zeros(1, 2).half()})
    assert second[1].columns["weight"][1].tolist() == [10.0, 11.0]
    release_second()
    before = [item.columns["weight"].data_ptr() for item in small]
    write(small, everywhere, rows(16))
    assert [item.columns["weight"].data_ptr() for item in small] == before
    small.check()
