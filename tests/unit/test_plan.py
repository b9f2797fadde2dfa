"""Plans: which elements of which chunks a list of keys stands for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvps.core.plan import Held, Key, Plan, alike, make
from kvps.messages import Ask, Run
from kvps.specs import Spec
from kvps.tensors import PRIVATE


def key(name: str, *pieces: Held, dtype: str = "float32") -> Key:
    return Key(name, Spec(dtype, (sum(piece.size for piece in pieces),)), pieces)


def neighbours() -> Plan:
    """Three keys in one chunk, side by side but for a gap of 2 before the last."""
    return make(
        [
            key("c", Held(0, 5, 12, 3, 0)),
            key("a", Held(0, 5, 0, 4, 0)),
            key("b", Held(0, 5, 4, 6, 0)),
        ]
    )


def test_keys_of_one_chunk_are_one_share_in_the_order_of_the_chunk() -> None:
    (share,) = neighbours().shares
    assert (share.server, share.chunk, share.size, share.payload_bytes) == (0, 5, 13, 52)
    assert [segment.key for segment in share.segments] == [1, 2, 0]
    assert share.blocks == [(0, 10), (12, 3)]


def test_shares_go_round_the_servers() -> None:
    pieces = [Held(server, chunk, 0, 1, 0) for server in (1, 0) for chunk in (8, 3, 5)]
    plan = make([key(f"k{index}", piece) for index, piece in enumerate(pieces)])
    assert [(one.server, one.chunk) for one in plan.shares] == [
        (0, 3),
        (1, 3),
        (0, 5),
        (1, 5),
        (0, 8),
        (1, 8),
    ]


def test_a_key_without_elements_has_no_share() -> None:
    plan = make([key("nothing"), key("a", Held(0, 1, 0, 2, 0))])
    assert [segment.key for share in plan.shares for segment in share.segments] == [1]
    assert make([]).shares == []


@pytest.mark.parametrize(
    ("numbers", "runs"),
    [
        ((7, 7, 7), (Run(0, 10, 7), Run(12, 3, 7))),
        ((7, 8, 8), (Run(0, 10, 8), Run(12, 3, 7))),
        ((7, 7, 8), (Run(0, 4, 7), Run(4, 6, 8), Run(12, 3, 7))),
    ],
)
def test_neighbours_with_one_number_are_one_run(
    numbers: tuple[int, ...], runs: tuple[Run, ...]
) -> None:
    (share,) = neighbours().shares
    assert share.runs(alike(numbers)) == runs


@pytest.mark.parametrize(
    ("after", "least", "asks"),
    [
        ((1, 1, 1), (0, 0, 0), (Ask(0, 10, 1, 0), Ask(12, 3, 1, 0))),
        ((2, 1, 1), (0, 0, 0), (Ask(0, 10, 1, 0), Ask(12, 3, 2, 0))),
        ((1, 1, 1), (0, 5, 0), (Ask(0, 4, 1, 5), Ask(4, 6, 1, 0), Ask(12, 3, 1, 0))),
    ],
)
def test_neighbours_with_one_condition_are_one_ask(
    after: tuple[int, ...], least: tuple[int, ...], asks: tuple[Ask, ...]
) -> None:
    (share,) = neighbours().shares
    assert share.asks(alike(after), alike(least)) == asks


def test_one_whole_key_is_copied_as_it_is() -> None:
    (share,) = make([key("a", Held(0, 1, 0, 4, 0), dtype="int8")]).shares
    row = torch.arange(4, dtype=torch.int8)
    gathered = share.gather([row], PRIVATE, "server 0")[0]
    row.zero_()
    assert gathered.tolist() == [0, 1, 2, 3]
    share.scatter(gathered, [row])
    assert row.tolist() == [0, 1, 2, 3]


@given(st.data())
def test_what_is_gathered_and_scattered_is_every_element_once(data: st.DataObject) -> None:
    """However keys are cut over servers and chunks."""
    keys, place = [], [0, 0, 0]
    for name in range(data.draw(st.integers(1, 6))):
        pieces, offset = [], 0
        for size in data.draw(st.lists(st.integers(1, 9), max_size=4)):
            server = data.draw(st.integers(0, 2))
            gap = data.draw(st.integers(0, 2))
            start = place[server] + gap
            place[server] = start + size
            chunk = 10 * server + start // 8
            pieces.append(Held(server, chunk, start, size, offset))
            offset += size
        keys.append(key(f"k{name}", *pieces))
    plan = make(keys)
    rows = [torch.rand(one.spec.count) for one in keys]
    back = [torch.full_like(row, -1.0) for row in rows]
    for share in plan.shares:
        values = share.gather(rows, PRIVATE, "server 0")[0]
        runs = share.runs(0)
        assert len(values) == share.size == sum(run.size for run in runs)
        share.scatter(values, back)
    assert all(torch.equal(row, one) for row, one in zip(rows, back, strict=True))
