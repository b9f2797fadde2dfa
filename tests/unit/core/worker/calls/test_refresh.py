"""How a worker asks for what changed, and when it reads a key whole."""

from typing import Any

import pytest
import torch

from kvps.core.worker import calls
from kvps.core.worker.calls.refresh import Fresh
from kvps.core.worker.connection import Request
from kvps.core.worker.consistent_read import LaggingReads
from kvps.core.worker.plan import CopyVersion, PieceLocation
from kvps.core.worker.store import WorkerStore
from kvps.dtypes import Spec
from kvps.errors import NonFinite, ProtocolError
from kvps.protocol.envelope import Envelope, Message, Packet, Role
from kvps.protocol.values import Changed, Dropped, Pull, PullChanged, Pulled, Stand
from kvps.tensors import to_frame
from tests.support.worker_harness import Bench, opened

ENVELOPE = Envelope(bytes(16), 1, Role.SERVER, 0, 1, 0)
TABLE = Spec("float32", (8, 2))


def new_store(mode: str = "sync") -> WorkerStore:
    """``t`` has rows 0 to 2 on server 0, in two chunks, and 3 to 7 on server 1; ``v`` is none of rows."""
    store = WorkerStore(opened(mode=mode), 0, 2, 240.0)
    pieces = [PieceLocation(0, 2, 10, 4, 0), PieceLocation(0, 4, 0, 2, 4), PieceLocation(1, 3, 0, 10, 6)]
    store.place([("t", TABLE, pieces), ("v", Spec("float32", (4,)), [PieceLocation(1, 5, 0, 4, 0)])])
    return store


def refreshing_of(store: WorkerStore, *keys: str, since: int | None = 3, sink: bool = True) -> Any:
    marks = [None if since is None else CopyVersion(store.keys[key].pieces, since) for key in keys]
    sinks = [torch.zeros(store.keys[key].spec.shape) if sink else None for key in keys]
    return calls.Refresh("kv", keys, tuple(sinks), tuple(marks), 7).run(store, [])


def reply(request: Request, ids: list[int], lowest: int, *, wanted: bool = True, **more: Any) -> Packet:
    """Answer a PULL-CHANGED with rows that are their number plus 100 for each version."""
    assert isinstance(request.message, PullChanged)
    numbers = torch.tensor(ids, dtype=torch.int64)
    values = (numbers.float() + 100 * lowest)[:, None].expand(-1, 2).reshape(-1).contiguous()
    fields: dict[str, Any] = {"known": True, "dtype": 1, "width": 2, "highest": lowest, "owed": 0}
    answer = Changed(1, count=len(ids), lowest=lowest, **(fields | more))
    packet = Packet(ENVELOPE, answer, (to_frame(numbers), to_frame(values)) if ids else ())
    assert request.on_reply is not None
    request.on_reply(packet, wanted)
    return packet


def whole(requests: list[Request], version: int) -> list[Packet]:
    """Answer PULLs with the number of the server."""
    packets = []
    for request in requests:
        assert isinstance(request.message, Pull)
        runs = request.message.runs
        stands = tuple(Stand(run.start, run.size, version, 0) for run in runs)
        answer = Pulled(1, request.message.chunk, 1, True, stands)
        values = torch.full((sum(run.size for run in runs),), float(request.server))
        packet = Packet(ENVELOPE, answer, (to_frame(values),))
        request.on_reply(packet, True)
        packets.append(packet)
    return packets


def end(steps: Any, answers: list[Packet]) -> list[Fresh]:
    with pytest.raises(StopIteration) as ended:
        steps.send(answers)
    return ended.value.value


def named(fresh: Fresh) -> dict[int, float]:
    return {
        number: value
        for ids, rows in fresh.patches
        for number, value in zip(ids.tolist(), rows[:, 0].tolist(), strict=True)
    }


@pytest.mark.spec("R178")
def test_each_server_is_asked_what_changed() -> None:
    store = new_store()
    store.keys["t"].number = 4
    steps = refreshing_of(store, "t")
    first, second = next(steps)
    assert first.message == second.message == PullChanged("kv", "t", 4, 0, 3)
    assert [(each.server, each.lane, each.priority) for each in (first, second)] == [(0, 2, 7), (1, 3, 7)]
    (fresh,) = end(steps, [reply(first, [0, 2], 4), reply(second, [7], 4)])
    assert named(fresh) == {0: 400.0, 2: 402.0, 7: 407.0}
    assert fresh.mark is not None
    assert fresh.mark.pieces is store.keys["t"].pieces
    assert (fresh.mark.version, fresh.whole, store.keys["t"].applied) == (4, None, 4)


@pytest.mark.parametrize("sink", [True, False])
def test_a_copy_of_which_nothing_is_known_is_read_whole(sink: bool) -> None:
    steps = refreshing_of(new_store(), "t", since=None, sink=sink)
    (fresh,) = end(steps, whole(next(steps), 5))
    assert fresh.whole is not None
    assert fresh.whole[:, 0].tolist() == [0.0] * 3 + [1.0] * 5
    assert fresh.mark is not None
    assert fresh.mark.version == 5


def test_a_mark_of_other_pieces_says_nothing() -> None:
    """A key that was replaced, or is there again after a return, begins to count anew."""
    store = new_store()
    mark = CopyVersion((*store.keys["t"].pieces,), 3)
    sinks = (torch.zeros(8, 2),)
    steps = calls.Refresh("kv", ("t",), sinks, (mark,), 7).run(store, [])
    assert {type(request.message) for request in next(steps)} == {Pull}


@pytest.mark.spec("R179")
def test_where_one_server_does_not_know_the_key_is_read_whole() -> None:
    steps = refreshing_of(new_store(), "v", "t")
    first, second = next(steps)
    asked = steps.send([reply(first, [0], 4), reply(second, [], 4, known=False)])
    vector, table = end(steps, whole(asked, 4))
    assert vector.whole is not None
    assert vector.whole.tolist() == [1.0] * 4
    assert table.whole is not None
    assert not table.patches
    assert vector.mark is not None
    assert table.mark is not None


@pytest.mark.spec("R179")
def test_lagging_servers_are_asked_again_since_the_same_version() -> None:
    store = new_store()
    steps = refreshing_of(store, "t")
    first, second = next(steps)
    (again,) = steps.send([reply(first, [0], 4), reply(second, [7], 5)])
    assert again.message == PullChanged("kv", "t", 0, 5, 3)
    (fresh,) = end(steps, [reply(again, [0, 1], 5)])
    assert named(fresh) == {0: 500.0, 1: 501.0, 7: 507.0}
    assert fresh.mark == CopyVersion(store.keys["t"].pieces, 5)

    steps = refreshing_of(store, "t")
    first, second = next(steps)
    (again,) = steps.send([reply(first, [0], 4), reply(second, [7], 5)])
    asked = steps.send([reply(again, [], 5, known=False)])
    (fresh,) = end(steps, whole(asked, 5))
    assert fresh.whole is not None, "it has forgotten meanwhile"


def test_parts_of_several_versions_leave_no_mark() -> None:
    store = new_store("async")
    steps = refreshing_of(store, "t")
    first, second = next(steps)
    assert isinstance(steps.send([reply(first, [0], 3), reply(second, [7], 4)]), LaggingReads)
    (fresh,) = end(steps, [])
    assert named(fresh) == {0: 300.0, 7: 407.0}
    assert fresh.mark is None
    assert store.keys["t"].version == 4


def test_whole_parts_of_several_versions_leave_no_mark() -> None:
    store = new_store("async")
    steps = refreshing_of(store, "t", since=None)
    requests = sorted(next(steps), key=lambda each: each.server)
    packets = whole(requests[:-1], 3) + whole(requests[-1:], 4)
    assert isinstance(steps.send(packets), LaggingReads)
    (fresh,) = end(steps, [])
    assert fresh.mark is None


@pytest.mark.parametrize("wrong", [{"width": 3}, {"dtype": 2}])
def test_an_answer_of_other_rows_is_refused(wrong: dict[str, int]) -> None:
    first, _ = next(refreshing_of(new_store(), "t"))
    with pytest.raises(ProtocolError, match=r"server 0 answered rows of . elements of key 't'"):
        reply(first, [], 4, **wrong)


@pytest.mark.parametrize("ids", [[0, 3], [-1, 2], [2, 1], [1, 1], [0, 2, 1, 2]])
def test_rows_that_are_not_the_servers_are_refused(ids: list[int]) -> None:
    first, _ = next(refreshing_of(new_store(), "t"))
    with pytest.raises(ProtocolError, match="not its own, 0 to 2, in order"):
        reply(first, ids, 4)


def test_updates_that_were_dropped_are_told() -> None:
    drop = Dropped(6, 2, 1, (1,))
    steps = refreshing_of(new_store(), "t")
    first, second = next(steps)
    packets = [reply(first, [], 3), reply(second, [], 3, dropped=(drop,))]
    with pytest.raises(NonFinite, match="round 2 of key 't' was dropped"):
        steps.send(packets)


def test_updates_of_what_is_read_whole_are_told_too() -> None:
    steps = refreshing_of(new_store(), "v")
    (request,) = next(steps)
    answer = Pulled(1, 5, 1, True, (Stand(0, 4, 3, 0),), (Dropped(0, 2, 1, (1,)),))
    packet = Packet(ENVELOPE, answer, (to_frame(torch.zeros(4)),))
    request.on_reply(packet, True)
    with pytest.raises(NonFinite, match="round 2 of key 'v' was dropped"):
        steps.send([packet])


@pytest.mark.spec("R177")
def test_refresh_asks_the_servers_and_no_neighbours() -> None:
    bench = Bench(workers=2, machines=(7, 7))
    bench.open(bundles=True)
    bench.init({"t": torch.zeros(40, 2)})
    key = bench.core.stores["kv"].keys["t"]
    before = len(bench.sends(Message))
    mark = CopyVersion(key.pieces, 0)
    bench.call(calls.Refresh("kv", ("t",), (torch.zeros(40, 2),), (mark,), 0))
    routes = {send.to for send in bench.sends(Message)[before:]}
    assert routes == {"server 0", "server 1"}
