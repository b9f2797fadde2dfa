"""Reading keys: each at one version, though its parts answer one by one."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvps.compression.policy import rules_of
from kvps.core.worker.calls import Views
from kvps.core.worker.connection import Request
from kvps.core.worker.consistent_read import (
    AwaitAcks,
    HeldValues,
    LaggingReads,
    Sink,
    Step,
    Steps,
    read,
    read_versions,
)
from kvps.core.worker.plan import ANY, PieceLocation
from kvps.core.worker.store import WorkerStore
from kvps.dtypes import BY_NAME, Spec
from kvps.errors import ProtocolError
from kvps.protocol.envelope import Packet
from kvps.protocol.values import Ask, Pull, Pulled, Stand
from kvps.tensors import PRIVATE, to_frame
from tests.support.worker_harness import opened, spec

ENVELOPE: Any = None
"""Nobody here reads it."""


def new_store(mode: str = "sync") -> WorkerStore:
    """``a`` and ``b`` lie side by side on server 0; ``big`` on both servers."""
    store = WorkerStore(opened(mode=mode), 0, 2, 240.0)
    store.place(
        [
            ("a", spec(2), [PieceLocation(0, 1, 0, 2, 0)]),
            ("b", spec(3), [PieceLocation(0, 1, 2, 3, 0)]),
            ("big", spec(8), [PieceLocation(0, 2, 0, 4, 0), PieceLocation(1, 1, 0, 4, 4)]),
        ]
    )
    return store


def reading(store: WorkerStore, *names: str, after: int = 0) -> tuple[Steps, list[torch.Tensor]]:
    plan = store.plan(names)
    sinks = [torch.full((key.spec.count,), -1.0) for key in plan.keys]
    conditions = [after] * len(names)
    return read(store, plan, sinks, conditions, ANY, 0), sinks


def read_versions_alone(store: WorkerStore) -> None:
    """Read the versions of ``a`` and ``big``, without values: 5, and 6 on the second part of ``big``."""
    for names in (("a",), ("big",)):
        steps = read_versions(store, store.plan(names), [0], [0])
        step = next(steps)
        assert isinstance(step, list)
        with pytest.raises(StopIteration):
            steps.send([answer(request, 5 + at) for at, request in enumerate(step)])


def pulls(step: Step) -> list[Pull]:
    assert not isinstance(step, AwaitAcks)
    return [packet.message for packet in step if isinstance(packet.message, Pull)]


def answer(request: Request, *versions: int, wanted: bool = True, owed: int = 0) -> Packet:
    """Answer with one version per ask, and values that are their version."""
    message = request.message
    assert isinstance(message, Pull)
    runs = tuple(
        Stand(ask.start, ask.size, version, owed) for ask, version in zip(message.runs, versions, strict=True)
    )
    packet = Packet(ENVELOPE, Pulled(1, message.chunk, BY_NAME["float32"].id, message.values, runs))
    if message.values:
        values = torch.cat([torch.full((run.size,), float(run.version)) for run in runs])
        packet = Packet(ENVELOPE, packet.message, (to_frame(values),))
    assert request.on_reply is not None
    request.on_reply(packet, wanted)
    return packet


def ends(steps: Steps, answers: Sequence[Packet]) -> bool:
    try:
        steps.send(list(answers))
    except StopIteration:
        return True
    return False


@pytest.mark.parametrize("wanted", [None, Views.VIEWS, Views.HELD])
def test_keys_that_travel_in_two_forms_are_read_by_two_requests(wanted: Views | None) -> None:
    store = new_store()
    store.compress(rules_of({"rules": [{"pattern": "b", "type": "fp16", "min_bytes": 0}]}))
    plan = store.plan(("b", "a"))
    sinks = [torch.zeros(3), torch.zeros(2)]
    sink: Sink = sinks if wanted is None else HeldValues()
    steps = read(store, plan, sink, ANY, ANY, 0)
    step = next(steps)
    assert [message.runs for message in pulls(step)] == [(Ask(2, 3, 0, 0),), (Ask(0, 2, 0, 0),)]
    assert isinstance(step, list)
    assert ends(steps, [answer(step[0], 3), answer(step[1], 4)])
    if isinstance(sink, HeldValues):
        if wanted is Views.VIEWS:
            sinks = sink.views(plan.keys, store.memory)
        sink.copy_to(sinks)
    assert [row.tolist() for row in sinks] == [[3, 3, 3], [4, 4]], "each at its own place"


def test_keys_may_stand_at_different_versions() -> None:
    store = new_store()
    store.key("a").number = 1
    plan = store.plan(("a", "b"))
    sinks = [torch.zeros(2), torch.zeros(3)]
    steps = read(store, plan, sinks, [1, 0], [0, 4], 0)
    step = next(steps)
    assert pulls(step) == [Pull(1, True, (Ask(0, 2, 1, 0), Ask(2, 3, 0, 4)))]
    assert isinstance(step, list)
    assert ends(steps, [answer(step[0], 1, 5)])
    assert [sink.tolist() for sink in sinks] == [[1, 1], [5, 5, 5]]
    assert [key.applied for key in plan.keys] == [1, 5]


class TestTorn:
    def test_a_lost_worker_is_not_waited_for_where_pushes_are_applied_one_by_one(self) -> None:
        store = new_store("async")
        steps, (sink,) = reading(store, "big")
        step = next(steps)
        assert isinstance(step, list)
        again = steps.send([answer(step[0], 5), answer(step[1], 4)])
        assert isinstance(again, LaggingReads)
        store.is_short = True
        assert ends(steps, [])
        assert sink.tolist() == [5] * 4 + [4] * 4

    @given(st.data())
    def test_every_key_ends_at_one_version(self, data: st.DataObject) -> None:
        """Whatever versions the parts stand at whenever they are read."""
        parts = data.draw(st.integers(1, 4))
        store = WorkerStore(opened(), 0, parts, 240.0)
        store.place(
            (name, spec(2 * parts), [PieceLocation(at, 1 + which, 0, 2, 2 * at) for at in range(parts)])
            for which, name in enumerate("kl")
        )
        now = {(at, chunk): 0 for at in range(parts) for chunk in (1, 2)}
        steps, sinks = reading(store, "k", "l")
        step = next(steps)
        for _ in range(50):
            assert isinstance(step, list)
            answers = []
            for request in step:
                message = request.message
                assert isinstance(message, Pull)
                assert request.server is not None
                part = (request.server, message.chunk)
                ahead = data.draw(st.integers(0, 2)) if _ < 40 else 0
                now[part] = max(now[part] + ahead, message.runs[0].least)
                answers.append(answer(request, now[part]))
            try:
                step = steps.send(answers)
            except StopIteration:
                break
        for sink in sinks:
            assert len(sink.unique()) == 1


class TestWhatIsKnownToBeApplied:
    def test_never_less_than_before(self) -> None:
        store = new_store()
        store.key("a").applied = store.key("big").applied = 9
        read_versions_alone(store)
        assert (store.key("a").applied, store.key("big").applied) == (9, 9)


class TestAge:
    """The number of pushes of others between two reads, where each push is applied by itself."""

    def read(self, store: WorkerStore, name: str, *stands: tuple[int, int]) -> int:
        """Read a key whose parts stand so: (version, own pushes); return its age."""
        steps, _ = reading(store, name)
        step = next(steps)
        assert isinstance(step, list)
        store.is_short = True  # torn parts are taken as they are
        answers = [
            answer(request, version, owed=owed) for request, (version, owed) in zip(step, stands, strict=True)
        ]
        assert ends(steps, answers)
        return store.key(name).age

    def test_is_not_changed_by_an_older_answer(self) -> None:
        store = new_store("async")
        self.read(store, "a", (5, 2))
        assert self.read(store, "a", (8, 2)) == 3
        assert self.read(store, "a", (7, 2)) == 3
        assert store.key("a").others == 6

    def test_is_none_where_rounds_wait_for_all(self) -> None:
        store = new_store()
        for version in (5, 9):
            assert self.read(store, "a", (version, version)) == 0
        assert store.figures()["push_age"] == 0


class TestViews:
    """Values that stay where they are."""

    def read(self, store: WorkerStore, *names: str) -> tuple[Steps, HeldValues]:
        sink = HeldValues()
        return read(store, store.plan(names), sink, ANY, ANY, 0), sink

    def test_are_of_the_memory_in_which_values_came(self) -> None:
        store = new_store()
        store.place([("m", Spec("float32", (2, 2)), [PieceLocation(0, 1, 5, 4, 0)])])
        steps, sink = self.read(store, "b", "m")
        step = next(steps)
        assert isinstance(step, list)
        packet = answer(step[0], 3)
        assert ends(steps, [packet])
        values = torch.frombuffer(packet.payload[0], dtype=torch.float32)
        values.copy_(torch.arange(7.0))
        b, m = sink.views(store.plan(("b", "m")).keys, PRIVATE)
        assert (b.tolist(), m.tolist()) == ([0, 1, 2], [[3, 4], [5, 6]])
        assert b.data_ptr() == values.data_ptr()

    def test_the_order_of_answers_does_not_matter(self) -> None:
        store = new_store()
        plan = store.plan(("big",))
        sink = HeldValues()
        for share in reversed(plan.shares):
            sink.write(share, torch.full((4,), float(share.server)))
        assert sink.views(plan.keys, PRIVATE)[0].tolist() == [0] * 4 + [1] * 4

    def test_of_keys_without_elements(self) -> None:
        store = new_store()
        store.place([("nothing", Spec("int8", (0, 3)), [])])
        steps, sink = self.read(store, "nothing", "a")
        step = next(steps)
        assert isinstance(step, list)
        assert ends(steps, [answer(step[0], 1)])
        nothing, a = sink.views(store.plan(("nothing", "a")).keys, PRIVATE)
        assert (nothing.shape, nothing.dtype) == ((0, 3), torch.int8)
        assert a.tolist() == [1, 1]

    @pytest.mark.parametrize("wanted", [(False, False), (True, False), (False, True)])
    def test_views_need_every_answer_to_be_wanted(self, wanted: tuple[bool, bool]) -> None:
        store = new_store()
        for names in (("big",), ("a", "big")):
            steps, sink = self.read(store, *names)
            step = next(steps)
            assert isinstance(step, list)
            flags = [*wanted, False]
            answers = [answer(request, 1, wanted=flag) for request, flag in zip(step, flags, strict=False)]
            assert ends(steps, answers)
            assert sink.views(store.plan(names).keys, PRIVATE) == []
        sink = HeldValues()
        assert sink.views(store.plan(("a",)).keys, PRIVATE) == []


class TestHeldValues:
    """Values that are written when the caller says so."""

    def test_are_written_once_and_then_held_no_more(self) -> None:
        store = new_store()
        store.place([("m", Spec("float32", (2, 2)), [PieceLocation(0, 1, 5, 4, 0)])])
        plan = store.plan(("b", "m", "big"))
        sink = HeldValues()
        values = torch.arange(7.0)
        for share in plan.shares:
            own = values if share.chunk == 1 and share.server == 0 else torch.full((4,), 8.0)
            sink.write(share, own)
        values += 1  # they are not read before
        rows = [torch.zeros(3), torch.zeros(2, 2), torch.zeros(8)]
        sink.copy_to(rows)
        assert [row.tolist() for row in rows] == [[1, 2, 3], [[4, 5], [6, 7]], [8] * 8]
        values += 1
        sink.copy_to(rows)
        assert rows[0].tolist() == [1, 2, 3]


def test_an_answer_of_another_length_is_refused() -> None:
    """What is asked for is read by its address later on."""
    store = new_store()
    steps, _ = reading(store, "a", "b")
    step = next(steps)
    assert isinstance(step, list)
    packet = answer(step[0], 3, wanted=False)
    short = Packet(ENVELOPE, packet.message, (packet.payload[0][:16],))
    assert step[0].on_reply is not None
    with pytest.raises(ProtocolError, match="server 0 answered 4 elements of chunk 1, and"):
        step[0].on_reply(short, True)
