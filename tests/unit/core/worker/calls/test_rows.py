"""Rows as a worker pushes and pulls them: to which server, under which number, and read evenly."""

from typing import Any

import pytest
import torch

from kvps import protocol as messages
from kvps.core.worker import calls
from kvps.core.worker.connection import Request
from kvps.core.worker.plan import PieceLocation
from kvps.core.worker.store import WorkerStore
from kvps.dtypes import Spec
from kvps.errors import ConfigError, NonFinite, ProtocolError, Timeout
from kvps.protocol.envelope import WINDOW, Envelope, Message, Packet, Role
from kvps.protocol.membership import Probed
from kvps.protocol.values import Ack, Dropped, Pull, PulledRows, PullRows, Push, PushRows, Receipt, Stand
from kvps.tensors import from_frame, to_frame
from tests.support.worker_harness import Bench, Readable, opened

ENVELOPE = Envelope(bytes(16), 1, Role.SERVER, 0, 1, 0)
TABLE = Spec("float32", (8, 2))


def new_store(mode: str = "sync", servers: int = 2) -> WorkerStore:
    """``t`` has rows 0 to 2 on server 0, in two chunks, and 3 to 7 on server 1; ``wide`` no whole ones."""
    store = WorkerStore(opened(mode=mode), 0, servers, 240.0)
    pieces = [PieceLocation(0, 2, 10, 4, 0), PieceLocation(0, 4, 0, 2, 4), PieceLocation(1, 3, 0, 10, 6)]
    store.place(
        [
            ("t", TABLE, pieces),
            ("wide", Spec("float32", (2, 6)), [PieceLocation(0, 6, 0, 8, 0), PieceLocation(1, 5, 0, 4, 8)]),
            ("empty", Spec("float32", (0, 3)), []),
        ]
    )
    return store


def rows(*ids: int, width: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows that are their number, in the order that was given."""
    order = torch.tensor(sorted(range(len(ids)), key=ids.__getitem__), dtype=torch.int64)
    numbers = torch.tensor(ids, dtype=torch.int64)
    return numbers[order], order, numbers.float()[:, None].expand(-1, width).contiguous()


def pushing(store: WorkerStore, ids: tuple[int, ...], key: str = "t", **more: Any) -> Any:
    values = list(rows(*ids, width=store.keys[key].spec.width))
    call = calls.PushKeyRows("kv", (key,), tuple(values), more.pop("priority", 0), True)
    return call.run(store, values)


def pulling(store: WorkerStore, *ids: int, key: str = "t") -> Any:
    """Pull rows, the last of them to come first."""
    numbers = torch.tensor(ids, dtype=torch.int64)
    places = torch.arange(len(ids)).flip(0)
    return calls.PullKeyRows("kv", (key,), (numbers,), (places,), 7).run(store, [])


def sent(request: Request) -> tuple[list[int], list[float]]:
    """The numbers of a push, and the first element of each row."""
    message = request.message
    assert isinstance(message, PushRows)
    request.freeze()
    assert tuple(frame.nbytes for frame in request.payload) == message.payload_sizes()
    if not message.count:
        return [], []
    ids, *parts = request.payload
    return ids.tolist(), torch.cat(list(parts)).view(-1, message.width)[:, 0].tolist()


def reply(request: Request, lowest: int, highest: int | None = None, owed: int = 0, **more: Any) -> Packet:
    """Answer a PULL-ROWS with rows that are their number plus 100 for each version."""
    message = request.message
    assert isinstance(message, PullRows)
    (ids,) = request.payload
    values = (ids.float() + 100 * lowest)[:, None].expand(-1, 2).reshape(-1)
    top = lowest if highest is None else highest
    answer = PulledRows(1, 1, 2, len(ids), lowest, top, owed, **more)
    packet = Packet(ENVELOPE, answer, (to_frame(values.contiguous()),))
    assert request.on_reply is not None
    request.on_reply(packet, True)
    return packet


def end(steps: Any, answers: list[Packet]) -> Any:
    with pytest.raises(StopIteration) as ended:
        steps.send(answers)
    return ended.value.value


# --- pushing ---------------------------------------------------------------------------------------


@pytest.mark.spec("R172")
def test_each_server_gets_its_rows_in_order_and_its_push_also_if_it_has_none() -> None:
    store = new_store()
    (first, second) = next(pushing(store, (2, 7, 0), priority=3))
    assert first.message == PushRows("kv", "t", 1, (0,), 0, 2, 2)
    assert second.message == PushRows("kv", "t", 1, (0,), 0, 2, 1)
    assert [(each.server, each.lane, each.priority) for each in (first, second)] == [(0, 2, 3), (1, 3, 3)]
    assert sent(first) == ([0, 2], [0.0, 2.0])
    assert sent(second) == ([7], [7.0])
    (first, second) = next(pushing(store, (5,)))
    assert (first.message.count, first.message.number) == (0, 1)
    assert sent(first) == ([], [])
    assert first.payload_bytes > 0, "it changes what a server has, and is never dropped"
    assert store.keys["t"].number == 2


def test_more_rows_than_a_message_holds_are_refused_and_no_number_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvps.protocol.values.IDS_FRAME_BYTES", 16)
    store = new_store()
    with pytest.raises(ConfigError, match="key 't': 3 rows for one server, and a message holds 2"):
        next(pushing(store, (3, 4, 5)))
    assert store.keys["t"].number == 0


def split_store() -> WorkerStore:
    """A table of 8 rows, of which server 1 has two runs."""
    store = WorkerStore(opened(), 0, 2, 240.0)
    runs = [(1, 3, 0, 4, 0), (0, 2, 0, 6, 4), (1, 3, 4, 4, 10), (0, 4, 0, 2, 14)]
    store.place([("t", TABLE, [PieceLocation(*run) for run in runs])])
    return store


@pytest.mark.spec("R172")
def test_a_server_with_several_runs_gets_its_rows_in_one_push() -> None:
    store = split_store()
    (first, second) = next(pushing(store, (7, 2, 0, 5, 3, 6)))
    assert [(each.server, each.lane) for each in (first, second)] == [(1, 3), (0, 2)]
    assert sent(first) == ([0, 5, 6], [0.0, 5.0, 6.0])
    assert sent(second) == ([2, 3, 7], [2.0, 3.0, 7.0])


@pytest.mark.spec("R175")
def test_rows_of_several_runs_of_a_server_are_pulled_at_once() -> None:
    store = split_store()
    steps = pulling(store, 1, 3, 5, 7)
    (first, second) = next(steps)
    assert [(each.server, each.payload[0].tolist()) for each in (first, second)] == [(1, [1, 5]), (0, [3, 7])]
    (found,) = end(steps, [reply(first, 0), reply(second, 0)])
    assert found[:, 0].tolist() == [7.0, 5.0, 3.0, 1.0]


@pytest.mark.spec("R171")
def test_a_key_that_does_not_lie_by_rows_is_pushed_as_a_whole() -> None:
    store = new_store()
    (first, second) = sorted(next(pushing(store, (1,), "wide")), key=lambda each: each.server)
    for request, chunk, values in ((first, 6, [0.0] * 6 + [1.0] * 2), (second, 5, [1.0] * 4)):
        assert isinstance(request.message, Push)
        assert (request.message.chunk, request.message.runs[0].number) == (chunk, 0)
        request.freeze()
        assert torch.cat(list(request.payload)).tolist() == values
    steps = pushing(store, (), "empty")
    assert next(steps) == []
    assert end(steps, []) is None


def test_a_full_window_is_waited_for_and_a_refusal_frees_the_number() -> None:
    store = new_store()
    store.keys["t"].number = WINDOW
    steps = pushing(store, (1,))
    asked = next(steps)
    assert {type(request.message) for request in asked} == {Pull}
    with pytest.raises(ProtocolError):
        steps.throw(ProtocolError("no"))
    assert store.keys["t"].is_refused


def test_refused_push_of_rows_frees_the_number() -> None:
    store = new_store()
    steps = pushing(store, (1,))
    assert next(steps)
    with pytest.raises(ProtocolError):
        steps.throw(ProtocolError("no"))
    assert store.keys["t"].is_refused


@pytest.mark.spec("R227")
def test_rows_that_may_be_refused_wait_for_the_answer_once() -> None:
    """Where each push is applied by itself there may be no optimizer."""
    bench = Bench()
    bench.open(mode="async")
    bench.init({"t": torch.zeros(40, 2)})
    ticket = bench.call(calls.PushKeyRows("kv", ("t",), rows(3, 39), 0, True))
    assert not bench.is_copied(ticket)
    for server in (0, 1):
        bench.ack(server, *bench.seqs(PushRows, server))
    assert bench.is_done(ticket)
    assert bench.is_copied(bench.call(calls.PushKeyRows("kv", ("t",), rows(3, 39), 0, True)))


@pytest.mark.spec("R172")
def test_the_call_ends_when_all_servers_have_it_and_its_values_are_copied_at_once() -> None:
    bench = Bench(memory=Readable("server 0", "server 1"))
    bench.open()
    bench.init({"t": torch.zeros(40, 2)})
    values = rows(3, 39)
    ticket = bench.call(calls.PushKeyRows("kv", ("t",), values, 0, True), timeout_s=5.0)
    assert bench.is_copied(ticket)
    values[2].fill_(9.0)
    (send,) = bench.sends(PushRows, 1)
    assert from_frame(send.packet.payload[1], "float32").tolist() == [39.0, 39.0]
    bench.ack(0, *bench.seqs(PushRows, 0))
    assert not bench.is_done(ticket)
    flush = bench.call(calls.Flush("kv"))
    assert not bench.is_done(flush)
    bench.server(1, Ack((Receipt(bench.seqs(PushRows, 1)[0], 0),)))
    assert bench.is_done(ticket)
    assert bench.is_done(flush)


def test_a_push_whose_caller_gave_up_is_still_made() -> None:
    bench = Bench()
    bench.open()
    bench.init({"t": torch.zeros(40, 2)})
    ticket = bench.call(calls.PushKeyRows("kv", ("t",), rows(3, 39), 0, False), timeout_s=1.0)
    bench.wait(2.0)
    assert isinstance(bench.error(ticket), Timeout)
    assert "push()" in str(bench.error(ticket))
    bench.server(1, Probed(tuple(bench.seqs(PushRows, 1)), ()))
    assert len(bench.sends(PushRows, 1)) == 2, "it goes again"


@pytest.mark.spec("R177")
def test_rows_go_to_the_servers_and_not_to_neighbours() -> None:
    bench = Bench(workers=2, machines=(7, 7))
    bench.open(bundles=True)
    bench.init({"t": torch.zeros(40, 2)})
    before = len(bench.sends(Message))
    bench.call(calls.PushKeyRows("kv", ("t",), rows(3, 39), 0, True))
    bench.call(calls.PullKeyRows("kv", ("t",), (torch.tensor([3]),), (torch.tensor([0]),), 0))
    routes = {send.to for send in bench.sends(Message)[before:]}
    assert routes == {"server 0", "server 1"}


# --- pulling ---------------------------------------------------------------------------------------


@pytest.mark.spec("R175")
def test_only_those_who_have_rows_are_asked() -> None:
    store = new_store()
    store.keys["t"].number = 4
    steps = pulling(store, 3, 7)
    (request,) = next(steps)
    assert request.message == PullRows("kv", "t", 4, 0, 2)
    assert (request.server, request.priority, request.lane) == (1, 7, 3)
    (found,) = end(steps, [reply(request, 4)])
    assert found.tolist() == [[407.0, 407.0], [403.0, 403.0]]
    assert store.keys["t"].applied == 0, "of the other server nothing is known"
    steps = pulling(store)
    assert next(steps) == []
    assert end(steps, [])[0].shape == (0, 2)


@pytest.mark.spec("R176")
def test_a_push_that_this_rank_owes_to_some_is_not_waited_for() -> None:
    steps = pulling(new_store(), 0, 7)
    first, second = next(steps)
    (found,) = end(steps, [reply(first, 3, owed=3), reply(second, 4, owed=4)])
    assert found[:, 0].tolist() == [407.0, 300.0]


def test_rows_of_a_key_that_does_not_lie_by_rows_are_taken_from_the_whole() -> None:
    steps = pulling(new_store(), 1, key="wide")
    requests = next(steps)
    packets = []
    for request in requests:
        message = request.message
        assert isinstance(message, Pull)
        (ask,) = message.runs
        values = torch.arange(ask.size).float() + 10 * request.server
        stand = Stand(ask.start, ask.size, 1, 1)
        answer = messages.Pulled(1, message.chunk, 1, True, (stand,))
        packet = Packet(ENVELOPE, answer, (to_frame(values),))
        request.on_reply(packet, True)
        packets.append(packet)
    assert steps.send(packets) == []
    (found,) = end(steps, [])
    assert found.tolist() == [[6.0, 7.0, 10.0, 11.0, 12.0, 13.0]]


def test_a_dropped_update_is_told_by_the_next_read_if_nobody_waits_for_this() -> None:
    store = new_store()
    for wanted in (False, True):
        steps = pulling(store, 0, 7)
        requests = next(steps)
        packets = []
        for request in requests:
            number = 1 + request.server  # of the two, the newer update is told
            answer = PulledRows(1, 1, 2, 1, 3, 3, 0, (Dropped(0, number, 1, (1,)),))
            packet = Packet(ENVELOPE, answer, (to_frame(torch.ones(2)),))
            request.on_reply(packet, wanted)
            packets.append(packet)
        if wanted:
            with pytest.raises(NonFinite, match="round 2 of key 't' was dropped"):
                steps.send(packets)
        else:
            end(steps, packets)


def test_updates_of_a_whole_key_that_were_dropped_are_told_too() -> None:
    steps = pulling(new_store(), 1, key="wide")
    requests = next(steps)
    packets = []
    for request in requests:
        (ask,) = request.message.runs
        answer = messages.Pulled(
            1,
            request.message.chunk,
            1,
            True,
            (Stand(ask.start, ask.size, 1, 1),),
            dropped=(Dropped(ask.start, 0, 1, (1,)),),
        )
        packet = Packet(ENVELOPE, answer, (to_frame(torch.zeros(ask.size)),))
        request.on_reply(packet, True)
        packets.append(packet)
    with pytest.raises(NonFinite, match="round 0 of key 'wide' was dropped"):
        steps.send(packets)


@pytest.mark.parametrize("wrong", [{"count": 1}, {"width": 3}, {"dtype": 2}])
def test_an_answer_of_other_rows_is_refused(wrong: dict[str, int]) -> None:
    (request,) = next(pulling(new_store(), 3, 7))
    fields = {"dtype": 1, "width": 2, "count": 2} | wrong
    answer = PulledRows(1, lowest=0, highest=0, owed=0, **fields)
    with pytest.raises(ProtocolError, match=r"server 1 answered (\d )?rows of .*key 't'"):
        request.on_reply(Packet(ENVELOPE, answer), True)
