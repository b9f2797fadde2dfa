"""Calls on embedding tables: what is asked of which server, and what comes of bad answers."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, strategies

from kvps.core.embedding.id_hash import servers_of
from kvps.core.embedding.id_split import Share, SplitIds
from kvps.core.embedding.spec import recipe_of
from kvps.core.embedding.table import ExportBatch
from kvps.core.worker import calls
from kvps.core.worker.calls import embeddings
from kvps.core.worker.calls.embeddings import Group, blocks, check_size
from kvps.errors import KeyNotFound, Mismatch, ProtocolError
from kvps.protocol.envelope import WINDOW
from kvps.protocol.membership import Done, Error
from kvps.protocol.stores import Declared, Field, Find, Found, FoundAll, Piece, Place
from kvps.protocol.values import (
    Embed,
    Export,
    Exported,
    Pull,
    Pulled,
    PulledTables,
    PullTables,
    PushTables,
    Stand,
    TableGroup,
    TablePart,
    TableRate,
    TableStand,
)
from tests.support.table_messages import pulled_table, push_table
from tests.support.worker_harness import Bench, server_of

KEY = "kvps.embedding:t"
RECIPE = recipe_of("t", 2, "zeros", "sgd", 1, None, "float32", None)
IDS = np.arange(8)
GROUPS = (Group("float32", 2, 0, 1),)


def bench(servers: int = 2, **options: object) -> Bench:
    """A worker that has a table, in chunk 5 of server 0 and 6 of server 1."""
    worker = Bench(servers=servers)
    worker.open(**options)
    ticket = worker.call(calls.MakeTable("kv", KEY, RECIPE, 0))
    for server in range(servers):
        (seq,) = worker.seqs(Embed, server)
        worker.server(server, Declared(seq, (Place(False, (Piece(5 + server, 0, 1),)),)))
    assert worker.is_done(ticket)
    return worker


def pushing(ids: np.ndarray = IDS, servers: int = 2) -> calls.PushTableRows:  # type: ignore[type-arg]
    shares = SplitIds([ids], servers).shares
    return calls.PushTableRows("kv", (KEY,), True, GROUPS, shares, (torch.ones(len(ids), 2),))


def pulling(ids: np.ndarray = IDS, servers: int = 2) -> calls.PullTableRows:  # type: ignore[type-arg]
    return calls.PullTableRows("kv", (KEY,), GROUPS, SplitIds([ids], servers).shares)


@pytest.mark.spec("R188")
def test_each_server_has_its_share_of_a_push_and_be_it_none() -> None:
    worker = bench()
    ids = IDS[servers_of(IDS, 2) == 1]
    ticket = worker.call(pushing(ids))
    (here,), (there,) = worker.sends(PushTables, 0), worker.sends(PushTables, 1)
    assert here.packet.message == push_table(5, 1, (0,), 0, 2, 0)
    assert here.packet.payload == ()
    assert there.packet.message == push_table(6, 1, (0,), 0, 2, len(ids))
    assert [len(frame) for frame in there.packet.payload] == [8 * len(ids), 8 * len(ids)]
    assert worker.is_copied(ticket)
    worker.ack(0, *worker.seqs(PushTables, 0))
    assert not worker.is_done(ticket)
    worker.ack(1, *worker.seqs(PushTables, 1))
    assert worker.is_done(ticket)
    worker.call(pushing())
    assert [message.parts[0].number for message in worker.sent(PushTables)] == [0, 0, 1, 1]


@pytest.mark.spec("R227")
def test_a_table_needs_no_optimizer_of_the_store() -> None:
    worker = bench(mode="async")
    assert worker.is_copied(worker.call(pushing()))


def test_the_number_of_a_push_that_was_refused_is_asked_for() -> None:
    worker = bench(servers=1)
    ticket = worker.call(pushing(servers=1))
    worker.server(0, Error(worker.seqs(PushTables)[-1], Mismatch.code, "another dim"))
    assert isinstance(worker.error(ticket), Mismatch)
    worker.call(pushing(servers=1))
    assert len(worker.sent(PushTables)) == 1
    (seq,) = worker.seqs(Pull)
    worker.server(0, Pulled(seq, 5, 8, False, (Stand(0, 1, 3, 7),)))
    assert worker.sent(PushTables)[-1].parts[0].number == 7


@pytest.mark.spec("R646")
@pytest.mark.parametrize(("owed", "number"), [(0, 0), (3, 3), (4, 4), (5, 4), (7, 7), (9, 8), (10, 8)])
@pytest.mark.parametrize("before", [0, 1])
def test_a_table_goes_on_at_the_step_at_which_a_replacement_begins(
    owed: int, number: int, before: int
) -> None:
    worker = bench(servers=1)
    for _ in range(before):
        worker.call(pushing(servers=1))
    worker.core.stores["kv"].beginning.step = 4
    worker.core.stores["kv"].beginning.asks = True
    for _ in range(2):  # the second does not wait for the first
        worker.call(pushing(servers=1))
    for seq in worker.seqs(Pull):
        worker.server(0, Pulled(seq, 5, 8, False, (Stand(0, 1, 3, before + owed),)))
    worker.call(pushing(servers=1))
    numbers = [push.parts[0].number - before for push in worker.sent(PushTables)]
    assert numbers[before:] == [number, number + 1, number + 2]


def test_so_many_pushes_are_under_way_and_no_more() -> None:
    worker = bench(servers=1)
    for _ in range(WINDOW):
        worker.call(pushing(servers=1))
        worker.ack(0, *worker.seqs(PushTables)[-1:])
    ticket = worker.call(pushing(servers=1))
    assert len(worker.sent(PushTables)) == WINDOW
    (pull,) = worker.sent(Pull)
    assert not pull.values
    assert pull.runs[0].least == 1
    worker.server(0, Pulled(worker.seqs(Pull)[0], 5, 8, False, (Stand(0, 1, 1, WINDOW),)))
    assert len(worker.sent(PushTables)) == WINDOW + 1
    worker.ack(0, worker.seqs(PushTables)[-1])
    assert worker.is_done(ticket)


def test_rows_come_in_the_order_of_their_ids() -> None:
    worker = bench()
    ticket = worker.call(pulling())
    for send in worker.sends(PullTables):
        server, seq = server_of(send), send.packet.envelope.seq
        assert server is not None
        mine = torch.from_numpy(IDS[servers_of(IDS, 2) == server]).float()
        rows = torch.stack([mine, -mine], 1)
        worker.server(server, pulled_table(seq, 1, 2, len(mine), 4, 4), rows.view(-1))
    end = worker.finish(ticket)
    assert end is not None
    assert isinstance(end.value, list)
    assert end.value[0].tolist() == [[float(row), -float(row)] for row in IDS]
    key = worker.core.stores["kv"].keys[KEY]
    assert (key.applied, key.version) == (4, 4)


def test_pulls_are_asked_of_every_server_also_for_nothing() -> None:
    worker = bench(mode="async")
    ticket = worker.call(pulling(IDS[:0]))
    for server in range(2):
        (seq,) = worker.seqs(PullTables, server)
        worker.server(server, pulled_table(seq, 1, 2, 0, 9, 3 + server))
    assert worker.is_done(ticket)
    key = worker.core.stores["kv"].keys[KEY]
    assert (key.applied, key.version) == (3, 9)


@pytest.mark.parametrize(("size", "dim"), [(7, 2), (8, 3)])
def test_an_answer_that_is_none_to_the_question_is_not_believed(size: int, dim: int) -> None:
    worker = bench(servers=1)
    worker.call(pulling(servers=1))
    message = pulled_table(worker.seqs(PullTables)[0], 1, dim, size, 4, 4)
    with pytest.raises(
        ProtocolError, match=r"asked for were \(8,\) of \(TableGroup\(dtype=1, dim=2, parts=1\),\)"
    ):
        worker.server(0, message, torch.zeros(size * dim))


@pytest.mark.spec("R196")
def test_a_rate_is_set_when_all_pushes_so_far_are_applied() -> None:
    worker = bench(servers=1)
    worker.call(pushing(servers=1))
    worker.ack(0, *worker.seqs(PushTables))
    ticket = worker.call(calls.SetTableRate("kv", KEY, 0.5))
    assert worker.sent(TableRate) == []
    (pull,) = worker.sent(Pull)
    assert pull.runs[0].after == 1
    worker.server(0, Pulled(worker.seqs(Pull)[0], 5, 8, False, (Stand(0, 1, 1, 1),)))
    assert worker.sent(TableRate) == [TableRate(5, 0.5)]
    worker.server(0, Done(worker.seqs(TableRate)[0]))
    assert worker.is_done(ticket)


def test_a_block_has_what_the_server_says() -> None:
    worker = bench()
    ticket = worker.call(calls.ExportBlock("kv", KEY, 1, 2, 10, 100, 3, True))
    (message,) = worker.sent(Export, 1)
    assert message == Export(6, 10, 100, 3, True)
    fields = (Field("weight", 1, 4), Field("sum", 1, 4))
    long = [torch.tensor([1, 2]), torch.tensor([5, 6])]
    rows = [torch.arange(4.0), -torch.arange(4.0)]
    worker.server(1, Exported(worker.seqs(Export)[0], 12, 2, fields), *long, *rows)
    end = worker.finish(ticket)
    assert end is not None
    block = end.value
    assert isinstance(block, ExportBatch)
    assert (block.ids.tolist(), block.stamps.tolist(), block.next) == ([1, 2], [5, 6], 12)
    assert block.columns["sum"].tolist() == [[0.0, -1.0], [-2.0, -3.0]]
    ticket = worker.call(calls.ExportBlock("kv", KEY, 0, 2, 0, 100, 0, False))
    worker.server(0, Exported(worker.seqs(Export, 0)[0], 0, 0, (Field("weight", 1, 0),)))
    end = worker.finish(ticket)
    assert end is not None
    assert isinstance(end.value, ExportBatch)
    assert (end.value.ids.tolist(), end.value.columns["weight"].shape) == ([], (0, 2))


def test_a_table_that_is_unknown_is_asked_for_by_its_name() -> None:
    worker = Bench()
    worker.open()
    ticket = worker.call(pulling())
    error = worker.error(ticket)
    assert isinstance(error, KeyNotFound)
    assert "no table 't'" in str(error)
    assert "embedding('t', ...)" in str(error)
    ticket = worker.call(calls.Lookup("kv", (KEY,)))
    (send,) = worker.sends(Find)
    server = server_of(send)
    assert server is not None
    worker.server(server, FoundAll(send.packet.envelope.seq, (Found(0, ()),)))
    assert worker.is_done(ticket)


def test_a_push_that_no_frame_holds_is_refused() -> None:
    groups = (Group("float32", 1, 0, 1), Group("float32", 1024, 1, 3))
    none = np.zeros(0, np.int64)
    check_size(["s", "t", "u"], groups, Share(none, (0, 16_385, 32_769, 49_153), (none,) * 3), 0)
    with pytest.raises(
        Mismatch, match="table 'u': 67112960 bytes of a push are for server 1, and one push has"
    ):
        check_size(["s", "t", "u"], groups, Share(none, (0, 1, 16_385, 32_770), (none,) * 3), 1)


# --- several tables ---------------------------------------------------------------------------------

KINDS = (Group("float32", 2, 0, 2), Group("float64", 1, 2, 3), Group("float64", 3, 3, 5))
NAMES = tuple(f"kvps.embedding:{name}" for name in "tuvwx")


def several(sizes: tuple[int, ...]) -> Share:
    """A share of tables of :data:`KINDS`, each with so many ids; the caller has them from last to first."""
    edges = (0, *np.cumsum(sizes).tolist())
    places = []
    for group in KINDS:
        count = edges[group.stop] - edges[group.first]
        places.append(np.arange(count)[::-1].copy())
    return Share(np.arange(edges[-1]) * 3, edges, tuple(places))


@given(
    sizes=strategies.lists(strategies.integers(0, 9), min_size=5, max_size=5),
    limit=strategies.integers(1, 200),
    is_whole=strategies.booleans(),
    tables=strategies.integers(1, 6),
    groups=strategies.integers(1, 4),
)
def test_blocks_have_all_ids_and_tables_in_order(
    sizes: list[int], limit: int, is_whole: bool, tables: int, groups: int
) -> None:
    share = several(tuple(sizes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embeddings, "TABLES_MAX", tables)
        patch.setattr(embeddings, "GROUPS_MAX", groups)
        found = list(blocks(share, KINDS, limit, is_whole=is_whole))
    assert [block.begin for block in found] == [0, *[block.end for block in found[:-1]]]
    assert found[-1].end == len(share.ids)
    assert (found[0].first, found[-1].stop) == (0, 5)
    widths = [8, 8, 8, 24, 24]
    for block, following in pairwise(found):
        assert following.first in (block.stop, block.stop - 1)
        assert following.first == block.stop or not is_whole
        assert block.end <= share.edges[block.stop]
    for block in found:
        assert block.first < block.stop
        assert share.edges[block.first] <= block.begin <= share.edges[block.first + 1]
        assert block.stop - block.first <= tables
        named = [group for group in KINDS if group.first < block.stop and block.first < group.stop]
        assert len(named) <= groups
        size = sum(
            widths[at] * (min(block.end, share.edges[at + 1]) - max(block.begin, share.edges[at]))
            for at in range(block.first, block.stop)
        )
        assert size <= limit or block.stop - block.first == 1


def test_tables_of_one_call_are_one_message_to_each_server(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = bench(servers=1)
    for at, name in enumerate(NAMES[1:], 1):
        worker.call(calls.MakeTable("kv", name, RECIPE, 0))
        worker.server(0, Declared(worker.seqs(Embed)[-1], (Place(False, (Piece(5 + at, 0, 1),)),)))
    share = several((1, 0, 2, 0, 1))
    rows = (torch.arange(2.0).view(1, 2), torch.arange(2.0).double().view(2, 1), torch.ones(1, 3).double())
    backwards = (rows[0], rows[1].flip(0), rows[2])
    push = calls.PushTableRows("kv", NAMES, True, KINDS, (share,), rows)
    assert worker.is_copied(worker.call(push))
    (send,) = worker.sends(PushTables)
    parts = tuple(TablePart(5 + at, 0, size) for at, size in enumerate((1, 0, 2, 0, 1)))
    groups = (TableGroup(1, 2, 2), TableGroup(2, 1, 1), TableGroup(2, 3, 2))
    assert send.packet.message == PushTables((0,), groups, parts)
    assert [len(frame) for frame in send.packet.payload] == [8 * 4, 4 * 2, 8 * 2, 8 * 3]
    worker.ack(0, *worker.seqs(PushTables))
    ticket = worker.call(calls.PullTableRows("kv", NAMES, KINDS, (share,)))
    (ask,) = worker.sends(PullTables)
    assert ask.packet.message == PullTables(tuple(part._replace(number=1) for part in parts))
    stands = tuple(TableStand(at + 1, at + 1) for at in range(5))
    answer = PulledTables(worker.seqs(PullTables)[0], groups, (1, 2, 1), stands)
    worker.server(0, answer, *[some.view(-1) for some in backwards])
    end = worker.finish(ticket)
    assert end is not None
    assert isinstance(end.value, list)
    assert [some.tolist() for some in end.value] == [[[0.0, 1.0]], [[0.0], [1.0]], [[1.0] * 3]]
    assert [worker.core.stores["kv"].keys[name].applied for name in NAMES] == [1, 2, 3, 4, 5]
    monkeypatch.setattr(embeddings, "TABLES_MAX", 2)
    worker.call(push)
    assert [message.parts for message in worker.sent(PushTables)[1:]] == [
        tuple(part._replace(number=1) for part in parts[at : at + 2]) for at in (0, 2, 4)
    ]


def test_a_refused_push_of_several_tables_has_all_their_numbers_asked_for() -> None:
    worker = bench(servers=1)
    worker.call(calls.MakeTable("kv", NAMES[1], RECIPE, 0))
    worker.server(0, Declared(worker.seqs(Embed)[-1], (Place(False, (Piece(6, 0, 1),)),)))
    groups = (Group("float32", 2, 0, 2),)
    share = Share(IDS[:2], (0, 1, 2), (IDS[:2],))
    push = calls.PushTableRows("kv", NAMES[:2], True, groups, (share,), (torch.ones(2, 2),))
    ticket = worker.call(push)
    worker.server(0, Error(worker.seqs(PushTables)[-1], Mismatch.code, "another dim"))
    assert isinstance(worker.error(ticket), Mismatch)
    worker.call(push)
    for seq, chunk, owed in zip(worker.seqs(Pull), (5, 6), (7, 3), strict=True):
        worker.server(0, Pulled(seq, chunk, 8, False, (Stand(0, 1, 3, owed),)))
    assert [part.number for part in worker.sent(PushTables)[-1].parts] == [7, 3]
