"""Plans: which elements of which chunks a list of keys stands for."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvps.core.worker.plan import (
    HERE,
    MANY,
    PIECES_MAX,
    ChunkSlice,
    Key,
    PieceLocation,
    Placed,
    TransferPlan,
    addresses,
    alike,
    allocate,
    cut,
    make,
    of_key,
)
from kvps.dtypes import Spec
from kvps.protocol.values import Ask, Run
from kvps.tensors import PRIVATE, TORCH, to_frame
from tests.support.worker_harness import Readable


def key(name: str, *pieces: PieceLocation, dtype: str = "float32") -> Key:
    return Key(name, Spec(dtype, (sum(piece.size for piece in pieces),)), pieces)


def neighbours() -> TransferPlan:
    """Three keys in one chunk, side by side but for a gap of 2 before the last."""
    return make(
        [
            key("c", PieceLocation(0, 5, 12, 3, 0)),
            key("a", PieceLocation(0, 5, 0, 4, 0)),
            key("b", PieceLocation(0, 5, 4, 6, 0)),
        ]
    )


def test_keys_of_one_chunk_are_one_share_in_the_order_of_the_chunk() -> None:
    (share,) = neighbours().shares
    assert (share.server, share.chunk, share.size, share.payload_bytes) == (0, 5, 13, 52)
    assert [segment.key for segment in share.segments] == [1, 2, 0]
    assert share.blocks == [(0, 10), (12, 3)]


def test_shares_go_round_the_servers() -> None:
    pieces = [PieceLocation(server, chunk, 0, 1, 0) for server in (1, 0) for chunk in (8, 3, 5)]
    plan = make([key(f"k{index}", piece) for index, piece in enumerate(pieces)])
    assert [(share.server, share.chunk) for share in plan.shares] == [
        (0, 3),
        (1, 3),
        (0, 5),
        (1, 5),
        (0, 8),
        (1, 8),
    ]


def test_a_key_without_elements_has_no_share() -> None:
    plan = make([key("nothing"), key("a", PieceLocation(0, 1, 0, 2, 0))])
    assert [segment.key for share in plan.shares for segment in share.segments] == [1]
    assert make([]).shares == []


def two_servers() -> TransferPlan:
    return make(
        [
            key("a", PieceLocation(0, 0, 0, 3, 0), PieceLocation(1, 1, 0, 2, 3)),
            key("b", PieceLocation(1, 1, 2, 4, 0)),
        ],
        0,
    )


@pytest.mark.spec("R439")
def test_a_step_is_the_same_for_all_calls_of_the_same_keys() -> None:
    step = two_servers().step("kv", [5, 5])
    assert {server: (part.number, part.size, part.holders) for server, part in step.items()} == {
        0: (5, 3, (0, 1)),
        1: (5, 6, (0, 1)),
    }
    digest = step[0].digest
    plan = two_servers()
    assert [part.digest for part in plan.step("kv", [6, 6]).values()] == [digest] * 2
    others = [plan.step("kv", [6, 5]), plan.step("kv", [5, 6])]
    others += [two_servers().step("kv.2", [6, 6]), make(plan.keys[:1]).step("kv", [5])]
    assert len({step[0].digest for step in [*others, plan.step("kv", [7, 7])]} | {digest}) == 5


@pytest.mark.parametrize(
    ("numbers", "runs"),
    [
        ((7, 7, 7), (Run(0, 10, 7), Run(12, 3, 7))),
        ((7, 8, 8), (Run(0, 10, 8), Run(12, 3, 7))),
        ((7, 7, 8), (Run(0, 4, 7), Run(4, 6, 8), Run(12, 3, 7))),
    ],
)
def test_neighbours_with_one_number_are_one_run(numbers: tuple[int, ...], runs: tuple[Run, ...]) -> None:
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


def test_single_whole_key_is_copied_as_it_is() -> None:
    (share,) = make([key("a", PieceLocation(0, 1, 0, 4, 0), dtype="int8")]).shares
    row = torch.arange(4, dtype=torch.int8)
    gathered = share.gather([row], PRIVATE, "server 0")[0]
    row.zero_()
    assert gathered.tolist() == [0, 1, 2, 3]
    share.scatter(gathered, [row])
    assert row.tolist() == [0, 1, 2, 3]


@given(st.data())
def test_gather_and_scatter_move_every_element_once(data: st.DataObject) -> None:
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
            pieces.append(PieceLocation(server, chunk, start, size, offset))
            offset += size
        keys.append(key(f"k{name}", *pieces))
    plan = make(keys)
    rows = [torch.rand(item.spec.count) for item in keys]
    back = [torch.full_like(row, -1.0) for row in rows]
    for share in plan.shares:
        values = share.gather(rows, PRIVATE, "server 0")[0]
        runs = share.runs((0,))
        assert len(values) == share.size == sum(run.size for run in runs)
        share.scatter(values, back)
    assert all(torch.equal(row, item) for row, item in zip(rows, back, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_rows_keep_their_shapes(dtype: str) -> None:
    shapes = [(2, 3), (), (4,), (1, 2, 2)]
    keys, start = [], 0
    for index, shape in enumerate(shapes):
        spec = Spec(dtype, shape)
        keys.append(Key(f"k{index}", spec, (PieceLocation(0, 1, start, spec.count, 0),)))
        start += spec.count
    (share,) = make(keys).shares
    rows = [torch.ones(shape).to(TORCH[dtype]) * index for index, shape in enumerate(shapes)]
    (gathered,) = share.gather(rows, PRIVATE, "server 0")
    assert gathered.tolist() == [0] * 6 + [1] + [2] * 4 + [3] * 4
    back = [torch.zeros_like(row) for row in rows]
    share.scatter(gathered, back)
    assert all(torch.equal(row, item) for row, item in zip(rows, back, strict=True))


def test_a_single_number_stands_for_all_keys() -> None:
    assert alike([3, 3, 3]) == [3]
    assert alike([3, 4, 3]) == [3, 4, 3]
    assert alike([]) == []
    assert (of_key(3, 1), of_key([3], 1), of_key([3, 4], 1)) == (3, 3, 4)
    (share,) = neighbours().shares
    assert share.runs([7]) == share.runs([7, 7, 7])
    assert share.asks([1], [2]) == share.asks([1] * 3, [2] * 3) == share.asks([1], [2] * 3)


# --- what the server can read -----------------------------------------------------------------------


def lending(*counts: int) -> tuple[Readable, list[torch.Tensor]]:
    """Memory that server 0 reads, and one block in it, split."""
    memory = Readable("server 0")
    rows = list(memory.empty(sum(counts), "float32").split(counts))
    for index, row in enumerate(rows):
        row.fill_(index)
    return memory, rows


def places(pieces: tuple[torch.Tensor, ...]) -> list[tuple[int, int]]:
    return [(piece.data_ptr(), len(piece)) for piece in pieces]


def test_values_side_by_side_as_on_the_server_are_lent_in_place() -> None:
    plan = make([key("a", PieceLocation(0, 1, 0, 4, 0)), key("b", PieceLocation(0, 1, 4, 6, 0))])
    memory, (a, b) = lending(4, 6)
    assert places(plan.shares[0].gather([a, b], memory, "server 0")) == [(a.data_ptr(), 10)]
    assert len(memory.blocks) == 1


def test_neighbours_are_joined_and_others_are_pieces() -> None:
    """Here the rows lie in the order of the call, and c is behind a gap on the server."""
    (share,) = neighbours().shares  # a, b and c of 4, 6 and 3, called as c, a, b
    memory, (a, b, _, c) = lending(4, 6, 5, 3)
    pieces = share.gather([c, a, b], memory, "server 0")
    assert places(pieces) == [(a.data_ptr(), 10), (c.data_ptr(), 3)]
    memory, (b, a, c) = lending(6, 4, 3)
    pieces = share.gather([c, a, b], memory, "server 0")
    assert places(pieces) == [(a.data_ptr(), 4), (b.data_ptr(), 6), (c.data_ptr(), 3)]


def test_a_tensor_twice_is_two_pieces() -> None:
    plan = make([key("a", PieceLocation(0, 1, 0, 4, 0)), key("b", PieceLocation(0, 1, 4, 4, 0))])
    memory, (row,) = lending(4)
    pieces = plan.shares[0].gather([row, row], memory, "server 0")
    assert places(pieces) == [(row.data_ptr(), 4)] * 2


def test_neighbours_of_two_storages_stay_two() -> None:
    """Who keeps the first alive does not keep the second."""
    plan = make([key("a", PieceLocation(0, 1, 0, 4, 0)), key("b", PieceLocation(0, 1, 4, 6, 0))])
    memory, (whole,) = lending(10)
    a, b = (torch.from_numpy(item) for item in np.split(whole.numpy(), [4]))
    pieces = plan.shares[0].gather([a, b], memory, "server 0")
    assert places(pieces) == [(a.data_ptr(), 4), (b.data_ptr(), 6)]


def test_shapes_do_not_matter_to_what_is_lent() -> None:
    keys = [
        Key("a", Spec("float32", (2, 2)), (PieceLocation(0, 1, 0, 4, 0),)),
        Key("b", Spec("float32", ()), (PieceLocation(0, 1, 4, 1, 0),)),
    ]
    memory, (a, b) = lending(4, 1)
    (piece,) = make(keys).shares[0].gather([a.view(2, 2), b.view(())], memory, "server 0")
    assert piece.tolist() == [0, 0, 0, 0, 1]
    (piece,) = make(keys[:1]).shares[0].gather([a.view(2, 2)], memory, "server 0")
    assert piece.tolist() == [0, 0, 0, 0]


def test_parts_of_a_key_are_lent_each_to_its_server() -> None:
    plan = make([key("big", PieceLocation(0, 1, 0, 4, 0), PieceLocation(1, 1, 0, 6, 4))])
    memory, (row,) = lending(10)
    memory.routes = ("server 0", "server 1")
    found = [share.gather([row], memory, f"server {share.server}") for share in plan.shares]
    assert [places(pieces) for pieces in found] == [[(row.data_ptr(), 4)], [(row[4:].data_ptr(), 6)]]


def test_values_that_the_server_cannot_read_are_copied() -> None:
    (share,) = neighbours().shares
    memory, (a, b, c) = lending(4, 6, 3)
    own = torch.full((6,), 9.0)
    for rows, route in (([c, a, own], "server 0"), ([c, a, b], "server 1")):
        (copy,) = share.gather(rows, memory, route)
        assert places((copy,)) == places((memory.blocks[-1],))
        assert copy.tolist() == [0] * 4 + rows[2].tolist() + [2] * 3
    own[:] = 0
    assert len(memory.blocks) == 3


@pytest.mark.parametrize(("count", "is_lent"), [(PIECES_MAX, True), (PIECES_MAX + 1, False)])
def test_values_in_too_many_places_are_copied(count: int, is_lent: bool) -> None:
    plan = make([key(f"k{index}", PieceLocation(0, 1, index, 1, 0)) for index in range(count)])
    memory, rows = lending(*[2] * count)
    pieces = plan.shares[0].gather([row[:1] for row in rows], memory, "server 0")
    assert len(pieces) == (count if is_lent else 1)
    assert torch.cat(pieces).tolist() == list(range(count))


def test_a_parameter_is_lent_as_well() -> None:
    memory, (a, b) = lending(4, 6)
    plan = make([key("a", PieceLocation(0, 1, 0, 4, 0)), key("b", PieceLocation(0, 1, 4, 6, 0))])
    for count, names in ((4, [a]), (10, [a, b])):
        item = make(plan.keys[: len(names)]).shares[0]
        with torch.no_grad():  # as the loop of a worker runs
            (piece,) = item.gather([torch.nn.Parameter(row) for row in names], memory, "server 0")
            assert to_frame(piece).nbytes == 4 * count
        assert piece.data_ptr() == a.data_ptr()


class TestAllocate:
    def test_gives_keys_side_by_side_as_on_the_server(self) -> None:
        memory = Readable("server 0")
        plan = make(
            [
                Key("b", Spec("float32", (2, 3)), (PieceLocation(0, 1, 4, 6, 0),)),
                key("a", PieceLocation(0, 1, 0, 4, 0)),
                Key("nothing", Spec("int8", (0, 2))),
                Key("half", Spec("float16", ()), (PieceLocation(0, 2, 0, 1, 0),)),
            ]
        )
        rows = allocate(plan, memory)
        assert [tuple(row.shape) for row in rows] == [(2, 3), (4,), (0, 2), ()]
        assert [row.dtype for row in rows] == [torch.float32, torch.float32, torch.int8, torch.float16]
        for row in rows:
            row.fill_(1)
        for share in plan.shares:
            (piece,) = share.gather(rows, memory, "server 0")
            assert piece.tolist() == [1] * share.size

    def test_gives_a_key_that_is_cut_in_one_piece(self) -> None:
        """Beside neighbours that are not."""
        memory = Readable("server 0", "server 1")
        plan = make(
            [
                key("a", PieceLocation(0, 1, 0, 4, 0)),
                key("big", PieceLocation(0, 1, 4, 3, 0), PieceLocation(1, 1, 0, 5, 3)),
                key("b", PieceLocation(0, 1, 7, 2, 0)),
            ]
        )
        rows = allocate(plan, memory)
        assert [row.shape for row in rows] == [(4,), (8,), (2,)]
        for share in plan.shares:
            pieces = share.gather(rows, memory, f"server {share.server}")
            assert sum(map(len, pieces)) == share.size
            assert memory.lends(f"server {share.server}", pieces)
        assert len(memory.blocks) == 3


class TestManySmallKeys:
    """They are copied back by their addresses."""

    @given(st.data())
    def test_every_element_is_copied_wherever_the_rows_lie(self, data: st.DataObject) -> None:
        """Whatever their sizes, types and addresses; what lies between them is not touched."""
        dtype = data.draw(st.sampled_from(["float32", "bfloat16", "int64", "uint8"]))
        sizes = data.draw(st.lists(st.sampled_from([1, 3, 8, 16, 24, 64]), min_size=MANY, max_size=2 * MANY))
        gaps = data.draw(st.lists(st.integers(0, 5), min_size=len(sizes), max_size=len(sizes)))
        if data.draw(st.booleans()):
            sizes = [sizes[0]] * len(sizes)
        starts = np.cumsum([0, *sizes]).tolist()
        keys = [
            key(f"k{at}", PieceLocation(0, 1, start, size, 0), dtype=dtype)
            for at, (start, size) in enumerate(zip(starts, sizes, strict=False))
        ]
        (share,) = make(keys).shares
        memory = torch.zeros(sum(sizes) + sum(gaps), dtype=TORCH[dtype])
        order = data.draw(st.permutations(range(len(sizes))))
        rows = dict[int, torch.Tensor]()
        at = 0
        for index in order:
            at += gaps[index]
            rows[index] = memory[at : at + sizes[index]]
            at += sizes[index]
        values = (torch.rand(share.size) * 99 + 1).to(TORCH[dtype])
        share.scatter(values, [rows[index] for index in range(len(sizes))])
        parts = torch.split(values, sizes)
        assert all(torch.equal(rows[index], part) for index, part in enumerate(parts))
        assert int((memory != 0).sum()) == sum(sizes)

    def share(self, *shape: int) -> ChunkSlice:
        spec = Spec("float32", shape)
        places = [(PieceLocation(0, 1, at * spec.count, spec.count, 0),) for at in range(MANY)]
        (share,) = make([Key(f"k{at}", spec, place) for at, place in enumerate(places)]).shares
        return share

    def test_rows_of_any_shape_are_known_to_have_changed(self) -> None:
        share, rows = self.share(2, 3), [torch.zeros(2, 3) for _ in range(MANY)]
        assert share.units is not None
        before = [row._version for row in rows]
        share.scatter(torch.arange(6.0 * MANY), rows)
        assert torch.equal(torch.stack(rows).view(-1), torch.arange(6.0 * MANY))
        assert all(row._version > version for row, version in zip(rows, before, strict=True))

    @pytest.mark.parametrize("shape", [(4,), (2, 3), (1,)])
    def test_placed_rows_are_read_and_written_by_their_addresses(self, shape: tuple[int, ...]) -> None:
        share, rows = self.share(*shape), [torch.randn(shape) for _ in range(MANY)]
        placed = Placed(rows)
        placed.starts = addresses(rows)
        (sent,) = share.gather(placed, PRIVATE, "server 0")
        assert torch.equal(sent, torch.cat([row.ravel() for row in rows]))
        share.scatter(sent * 2, placed)
        assert torch.equal(torch.cat([row.ravel() for row in rows]), sent * 2)
        here = share.gather(placed, PRIVATE, HERE)
        assert torch.equal(torch.cat(here), sent * 2)
        placed.starts = None  # its caller waits no more
        assert torch.equal(share.gather(placed, PRIVATE, "server 0")[0], sent * 2)

    def test_parts_of_keys_lie_behind_their_beginnings(self) -> None:
        spec = Spec("float32", (8,))
        pieces = [
            (PieceLocation(0, 1, 4 * at, 4, 4), PieceLocation(1, 2, 4 * at, 4, 0)) for at in range(MANY)
        ]
        plan = make([Key(f"k{at}", spec, pieces[at]) for at in range(MANY)])
        rows = Placed([torch.randn(8) for _ in range(MANY)])
        rows.starts = addresses(rows)
        for share in plan.shares:
            (sent,) = share.gather(rows, PRIVATE, f"server {share.server}")
            part = slice(4, 8) if share.server == 0 else slice(0, 4)
            assert torch.equal(sent, torch.cat([row[part] for row in rows]))

    def test_a_row_that_is_given_twice_has_its_last_value(self) -> None:
        row = torch.zeros(1)
        self.share(1).scatter(torch.arange(float(MANY)), [row] * MANY)
        assert row.item() == MANY - 1


def test_a_plan_is_cut_into_shares_of_so_many_bytes() -> None:
    whole = neighbours()
    parts = cut(whole, 20).shares
    assert [(item.server, item.chunk, item.blocks) for item in parts] == [
        (0, 5, [(0, 5)]),
        (0, 5, [(5, 5)]),
        (0, 5, [(12, 3)]),
    ]
    assert [item.payload_bytes for item in parts] == [20, 20, 12]
    rows = [torch.arange(3.0), torch.arange(4.0) + 10, torch.arange(6.0) + 20]
    values = torch.cat([part for item in parts for part in item.gather(rows, PRIVATE, "server 0")])
    assert values.tolist() == [10, 11, 12, 13, 20, 21, 22, 23, 24, 25, 0, 1, 2]
    found = [torch.zeros(3), torch.zeros(4), torch.zeros(6)]
    for item in parts:
        item.scatter(torch.cat(item.gather(rows, PRIVATE, "server 0")), found)
    assert [row.tolist() for row in found] == [row.tolist() for row in rows]


def test_shares_of_several_chunks_are_cut_one_by_one() -> None:
    plan = make([key("a", PieceLocation(0, 1, 0, 5, 0), PieceLocation(1, 2, 0, 3, 5), dtype="float64")])
    parts = cut(plan, 16).shares
    assert [(part.server, part.chunk, part.blocks) for part in parts] == [
        (0, 1, [(0, 2)]),
        (0, 1, [(2, 2)]),
        (0, 1, [(4, 1)]),
        (1, 2, [(0, 2)]),
        (1, 2, [(2, 1)]),
    ]
    assert [share.size for share in cut(plan, 1).shares] == [1] * 8, "at least an element"
    assert cut(plan, 1 << 20).shares == plan.shares


class TestProgress:
    """Keys that are always pushed together are counted as one."""

    def keys(self, count: int) -> list[Key]:
        return [key(f"k{at}", PieceLocation(0, 1, 4 * at, 4, 0)) for at in range(count)]

    def test_keys_that_move_together_have_it_in_common(self) -> None:
        keys = self.keys(3)
        plan = make(keys)
        assert plan.joint() is None
        (progress,) = plan.apart()
        progress.number = 5
        assert [key.number for key in keys] == [5, 5, 5]
        assert plan.joint() is progress
        assert plan.apart()[0] is progress
        assert plan.numbers() == (5,)

    def test_a_key_that_moves_alone_parts_from_the_others(self) -> None:
        keys = self.keys(3)
        plan, others = make(keys), make(keys[1:])
        (progress,) = plan.apart()
        progress.number = 5
        keys[0].number = 6
        assert [key.number for key in keys] == [6, 5, 5]
        assert plan.joint() is None
        assert list(plan.numbers()) == [6, 5, 5]
        assert len(plan.apart()) == 2
        assert plan.joint() is None
        assert others.apart()[0] is progress  # which is that of all others
        others.apart()[0].number = 6
        assert len(plan.apart()) == 1
        assert plan.numbers() == (6,)

    def test_a_part_of_the_keys_leaves_the_others_as_they_are(self) -> None:
        keys = self.keys(4)
        whole, part = make(keys), make(keys[:2])
        whole.apart()
        (progress,) = part.apart()
        progress.applied = progress.number = 2
        progress.read(7)
        assert [key.applied for key in keys] == [2, 2, 0, 0]
        assert [key.others for key in keys] == [7, 7, None, None]
        keys[3].read(1)
        assert [key.others for key in keys] == [7, 7, None, 1]
        part.refuse()
        assert [key.is_refused for key in keys] == [True, True, False, False]

    def test_the_same_keys_in_another_order_have_the_same(self) -> None:
        keys = self.keys(3)
        plan, other = make(keys), make(keys[::-1])
        (progress,) = plan.apart()
        assert other.joint() is None
        assert other.apart() == [progress]
        assert other.joint() is plan.joint() is progress
