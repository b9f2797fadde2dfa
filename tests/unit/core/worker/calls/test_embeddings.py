"""Calls on embedding tables: what is asked of which server, and what comes of bad answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvps.core.embedding.id_hash import servers_of
from kvps.core.embedding.id_split import SplitIds
from kvps.core.embedding.spec import recipe_of
from kvps.core.embedding.table import ExportBatch
from kvps.core.worker import calls
from kvps.core.worker.calls.embeddings import check_size
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
    PulledIds,
    PullIds,
    PushIds,
    Stand,
    TableRate,
)
from tests.support.worker_harness import Bench, server_of

KEY = "kvps.embedding:t"
RECIPE = recipe_of("t", 2, "zeros", "sgd", 1, None, "float32", None)
IDS = np.arange(8)


def bench(servers: int = 2, **options: object) -> Bench:
    """A worker that has a table, in chunk 5 of server 0 and 6 of server 1."""
    one = Bench(servers=servers)
    one.open(**options)
    ticket = one.call(calls.MakeTable("kv", KEY, RECIPE, 0))
    for server in range(servers):
        (seq,) = one.seqs(Embed, server)
        one.server(server, Declared(seq, (Place(False, (Piece(5 + server, 0, 1),)),)))
    assert one.is_done(ticket)
    return one


def pushing(ids: np.ndarray = IDS, servers: int = 2) -> calls.PushTableRows:  # type: ignore[type-arg]
    split = SplitIds(ids, servers)
    mine = [torch.from_numpy(split.ids[split.of(server)]) for server in range(servers)]
    return calls.PushTableRows(
        "kv", (KEY,), True, 2, tuple((some, torch.ones(len(some), 2)) for some in mine)
    )


def pulling(ids: np.ndarray = IDS, servers: int = 2) -> calls.PullTableRows:  # type: ignore[type-arg]
    split = SplitIds(ids, servers)
    return calls.PullTableRows("kv", (KEY,), RECIPE, split.ids, split.edges)


@pytest.mark.spec("R188")
def test_each_server_has_its_share_of_a_push_and_be_it_none() -> None:
    one = bench()
    ids = IDS[servers_of(IDS, 2) == 1]
    ticket = one.call(pushing(ids))
    (here,), (there,) = one.sends(PushIds, 0), one.sends(PushIds, 1)
    assert here.packet.message == PushIds(5, 1, (0,), 0, 2, 0)
    assert here.packet.payload == ()
    assert there.packet.message == PushIds(6, 1, (0,), 0, 2, len(ids))
    assert [len(frame) for frame in there.packet.payload] == [8 * len(ids), 8 * len(ids)]
    assert one.is_copied(ticket)
    one.ack(0, *one.seqs(PushIds, 0))
    assert not one.is_done(ticket)
    one.ack(1, *one.seqs(PushIds, 1))
    assert one.is_done(ticket)
    one.call(pushing())
    assert [message.number for message in one.sent(PushIds)] == [0, 0, 1, 1]


@pytest.mark.spec("R227")
def test_a_table_needs_no_optimizer_of_the_store() -> None:
    one = bench(mode="async")
    assert one.is_copied(one.call(pushing()))


def test_the_number_of_a_push_that_was_refused_is_asked_for() -> None:
    one = bench(servers=1)
    ticket = one.call(pushing(servers=1))
    one.server(0, Error(one.seqs(PushIds)[-1], Mismatch.code, "another dim"))
    assert isinstance(one.error(ticket), Mismatch)
    one.call(pushing(servers=1))
    assert len(one.sent(PushIds)) == 1
    (seq,) = one.seqs(Pull)
    one.server(0, Pulled(seq, 5, 8, False, (Stand(0, 1, 3, 7),)))
    assert one.sent(PushIds)[-1].number == 7


def test_so_many_pushes_are_under_way_and_no_more() -> None:
    one = bench(servers=1)
    for _ in range(WINDOW):
        one.call(pushing(servers=1))
        one.ack(0, *one.seqs(PushIds)[-1:])
    ticket = one.call(pushing(servers=1))
    assert len(one.sent(PushIds)) == WINDOW
    (pull,) = one.sent(Pull)
    assert not pull.values
    assert pull.runs[0].least == 1
    one.server(0, Pulled(one.seqs(Pull)[0], 5, 8, False, (Stand(0, 1, 1, WINDOW),)))
    assert len(one.sent(PushIds)) == WINDOW + 1
    one.ack(0, one.seqs(PushIds)[-1])
    assert one.is_done(ticket)


def test_rows_come_in_the_order_of_their_ids_by_server() -> None:
    one = bench()
    ticket = one.call(pulling())
    for send in one.sends(PullIds):
        server, seq = server_of(send), send.packet.envelope.seq
        assert server is not None
        mine = torch.from_numpy(IDS[servers_of(IDS, 2) == server]).float()
        rows = torch.stack([mine, -mine], 1)
        one.server(server, PulledIds(seq, 1, 2, len(mine), 4, 4), rows.view(-1))
    end = one.finish(ticket)
    assert end is not None
    assert isinstance(end.value, torch.Tensor)
    assert end.value.tolist() == [[float(row), -float(row)] for row in SplitIds(IDS, 2).ids]
    key = one.core.stores["kv"].keys[KEY]
    assert (key.applied, key.version) == (4, 4)


def test_pulls_are_asked_of_every_server_also_for_nothing() -> None:
    one = bench(mode="async")
    ticket = one.call(pulling(IDS[:0]))
    for server in range(2):
        (seq,) = one.seqs(PullIds, server)
        one.server(server, PulledIds(seq, 1, 2, 0, 9, 3 + server))
    assert one.is_done(ticket)
    key = one.core.stores["kv"].keys[KEY]
    assert (key.applied, key.version) == (3, 9)


@pytest.mark.parametrize(
    ("answer", "count"), [(PulledIds(2, 1, 2, 7, 4, 4), 14), (PulledIds(2, 1, 3, 8, 4, 4), 24)]
)
def test_an_answer_that_is_none_to_the_question_is_not_believed(answer: PulledIds, count: int) -> None:
    one = bench(servers=1)
    one.call(pulling(servers=1))
    seq = one.seqs(PullIds)[0]
    message = PulledIds(seq, answer.dtype, answer.dim, answer.count, 4, 4)
    with pytest.raises(ProtocolError, match="asked for were 8 of 2"):
        one.server(0, message, torch.zeros(count))


def test_an_answer_that_nobody_waits_for_is_not_written() -> None:
    one = bench(servers=1)
    ticket = one.call(pulling(servers=1), 5.0)
    seq = one.seqs(PullIds)[0]
    one.wait(6.0)
    assert "pull() of rows" in str(one.error(ticket))
    one.server(0, PulledIds(seq, 1, 2, 8, 4, 4), torch.zeros(16))


@pytest.mark.spec("R196")
def test_a_rate_is_set_when_all_pushes_so_far_are_applied() -> None:
    one = bench(servers=1)
    one.call(pushing(servers=1))
    one.ack(0, *one.seqs(PushIds))
    ticket = one.call(calls.SetTableRate("kv", KEY, 0.5))
    assert one.sent(TableRate) == []
    (pull,) = one.sent(Pull)
    assert pull.runs[0].after == 1
    one.server(0, Pulled(one.seqs(Pull)[0], 5, 8, False, (Stand(0, 1, 1, 1),)))
    assert one.sent(TableRate) == [TableRate(5, 0.5)]
    one.server(0, Done(one.seqs(TableRate)[0]))
    assert one.is_done(ticket)


def test_a_block_has_what_the_server_says() -> None:
    one = bench()
    ticket = one.call(calls.ExportBlock("kv", KEY, 1, 2, 10, 100, 3, True))
    (message,) = one.sent(Export, 1)
    assert message == Export(6, 10, 100, 3, True)
    fields = (Field("weight", 1, 4), Field("sum", 1, 4))
    long = [torch.tensor([1, 2]), torch.tensor([5, 6])]
    rows = [torch.arange(4.0), -torch.arange(4.0)]
    one.server(1, Exported(one.seqs(Export)[0], 12, 2, fields), *long, *rows)
    end = one.finish(ticket)
    assert end is not None
    block = end.value
    assert isinstance(block, ExportBatch)
    assert (block.ids.tolist(), block.stamps.tolist(), block.next) == ([1, 2], [5, 6], 12)
    assert block.columns["sum"].tolist() == [[0.0, -1.0], [-2.0, -3.0]]
    ticket = one.call(calls.ExportBlock("kv", KEY, 0, 2, 0, 100, 0, False))
    one.server(0, Exported(one.seqs(Export, 0)[0], 0, 0, (Field("weight", 1, 0),)))
    end = one.finish(ticket)
    assert end is not None
    assert isinstance(end.value, ExportBatch)
    assert (end.value.ids.tolist(), end.value.columns["weight"].shape) == ([], (0, 2))


def test_a_table_that_is_unknown_is_asked_for_by_its_name() -> None:
    one = Bench()
    one.open()
    ticket = one.call(pulling())
    error = one.error(ticket)
    assert isinstance(error, KeyNotFound)
    assert "no table 't'" in str(error)
    assert "embedding('t', ...)" in str(error)
    ticket = one.call(calls.Lookup("kv", (KEY,)))
    (send,) = one.sends(Find)
    server = server_of(send)
    assert server is not None
    one.server(server, FoundAll(send.packet.envelope.seq, (Found(0, ()),)))
    assert one.is_done(ticket)


def test_a_push_that_no_frame_holds_is_refused() -> None:
    wide = torch.zeros(1, 1024).expand(16_385, 1024)
    check_size("table 't'", ((torch.zeros(1), wide[:-1]),))
    with pytest.raises(Mismatch, match="for server 1, and one push has 67108864 at most"):
        check_size("table 't'", ((torch.zeros(1), torch.zeros(1)), (torch.zeros(1), wide)))
