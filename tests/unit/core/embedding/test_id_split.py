"""The ids of a call, sorted, each once, and cut by server."""

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
    "the narrowest that are not": np.array([2**61, 2**61, 0]),
}


TABLES = [*CASES, "one table of them all", "tables of few bits"]


@pytest.fixture(params=TABLES)
def given_ids(request: pytest.FixtureRequest) -> list[Ids]:
    if request.param in CASES:
        return [CASES[request.param]]
    if request.param == "tables of few bits":
        return [NARROW, NARROW[:0], GENERATOR.permutation(500), NARROW[:7]]
    return [*CASES.values(), NARROW]


def stops_of(given: list[Ids]) -> tuple[int, ...]:
    return (len(given),) if len(given) < 4 else (2, 3, len(given))


@pytest.mark.parametrize("servers", [1, 3])
def test_each_server_has_the_ids_of_each_table_once_and_in_order(given_ids: list[Ids], servers: int) -> None:
    split = SplitIds(given_ids, servers)
    assert len(split.shares) == servers
    for server, share in enumerate(split.shares):
        assert share.edges[0] == 0
        assert share.edges[-1] == len(share.ids)
        for at, some in enumerate(given_ids):
            unique = np.array(sorted(set(some.tolist())), np.int64)
            assert np.array_equal(split.ids[split.edges[at] : split.edges[at + 1]], unique)
            mine = share.ids[share.edges[at] : share.edges[at + 1]]
            assert np.array_equal(mine, unique[servers_of(unique, servers) == server])


@pytest.mark.parametrize("servers", [1, 3])
def test_a_pull_finds_the_row_of_each_id(given_ids: list[Ids], servers: int) -> None:
    stops = stops_of(given_ids)
    split = SplitIds(given_ids, servers, stops)
    first = 0
    for group, stop in enumerate(stops):
        rows = np.full(split.edges[stop] - split.edges[first], -1)
        for share in split.shares:
            rows[np.array(share.places[group], np.int64)] = share.ids[share.edges[first] : share.edges[stop]]
        for at in range(first, stop):
            assert np.array_equal(rows[split.places[at].numpy()], given_ids[at])
        first = stop


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_rows_of_an_id_are_summed_in_the_order_of_the_call(
    given_ids: list[Ids], servers: int, dtype: torch.dtype
) -> None:
    generator, stops = np.random.default_rng(7), stops_of(given_ids)
    rows = [
        torch.from_numpy(generator.normal(size=(len(some), 5)) * 10.0 ** np.arange(-3, 7, 2)).to(dtype)
        for some in given_ids
    ]
    split = SplitIds(given_ids, servers, stops)
    first = 0
    for total, stop in zip(split.summed(rows), stops, strict=True):
        expected = torch.zeros(split.edges[stop] - split.edges[first], 5, dtype=dtype)
        for at in range(first, stop):
            expected.index_add_(0, split.places[at], rows[at])
        assert torch.equal(total, expected)
        first = stop
