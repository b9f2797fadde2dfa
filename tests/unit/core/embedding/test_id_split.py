"""The ids of a call, sorted, each once, and cut by server."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvps.core.embedding.id_hash import Ids, servers_of
from kvps.core.embedding.id_split import SplitIds

GENERATOR = np.random.default_rng(37)
NARROW = GENERATOR.integers(0, 300, 1000)
WIDE = GENERATOR.integers(-(2**63), 2**63 - 1, 300)[NARROW]
CASES = {
    "none": NARROW[:0],
    "one": NARROW[:1],
    "each once": GENERATOR.permutation(500),
    "each once, of 64 bits": np.append(GENERATOR.permutation(500), np.array([-(2**63), 2**63 - 1])),
    "repeated": NARROW,
    "repeated, of 64 bits": WIDE,
    "the widest that are sorted with their positions": np.array([2**61 - 1, 2**61 - 1, 0]),
    "the narrowest that are not": np.array([2**61, 2**61, 0, 0]),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def ids(request: pytest.FixtureRequest) -> Ids:
    given: Ids = request.param
    return given


@pytest.mark.parametrize("servers", [1, 3])
def test_each_server_has_its_ids_once_and_in_order(ids: Ids, servers: int) -> None:
    split = SplitIds(ids, servers)
    unique = np.array(sorted(set(ids.tolist())), np.int64)
    assert len(split) == len(unique)
    assert len(split.edges) == servers + 1
    for server in range(servers):
        mine = split.ids[split.of(server)]
        assert np.array_equal(mine, unique[servers_of(unique, servers) == server])


@pytest.mark.parametrize("servers", [1, 3])
def test_a_pull_finds_the_row_of_each_id(ids: Ids, servers: int) -> None:
    split = SplitIds(ids, servers)
    assert np.array_equal(split.ids[split.places.numpy()], ids)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_rows_of_an_id_are_summed_in_the_order_of_the_call(
    ids: Ids, servers: int, dtype: torch.dtype
) -> None:
    numbers = np.random.default_rng(7).normal(size=(len(ids), 5)) * 10.0 ** np.arange(-3, 7, 2)
    rows = torch.from_numpy(numbers).to(dtype)
    split = SplitIds(ids, servers)
    order = {row: at for at, row in enumerate(split.ids.tolist())}
    places = torch.tensor([order[row] for row in ids.tolist()], dtype=torch.int64)
    expected = torch.zeros(len(order), 5, dtype=dtype).index_add_(0, places, rows)
    assert torch.equal(split.summed(rows), expected)
