"""What a restarted scheduler is told by the former one."""

import msgpack
import pytest

from kvps.core.scheduler.barriers import Passed
from kvps.core.scheduler.saved_state import FORMAT, RunState, SavedState, dump, load
from kvps.core.scheduler.seat import Settings, State
from kvps.errors import ConfigError, StorageError
from kvps.protocol.envelope import Node, Role
from kvps.protocol.membership import Rendezvous
from tests.support.scheduler_harness import JOB, Stage

CUTS = (12, 11, 2, True, 7)


def snapshot_of(stage: Stage) -> SavedState:
    job = stage.scheduler.job
    passed, resumed = job.barriers.passed, job.barriers.resumed
    head = job.name, job.number, job.formed, job.seats
    return SavedState(*head, passed, resumed, CUTS, job.rendezvous)


def test_round_trip() -> None:
    stage = Stage(2, 1)
    stage.form()
    stage.leave("w1", done=False, code=3, reason="boom")
    stage.barrier("w0")
    stage.scheduler.job.barriers.restore({("kv", "c"): Passed(5, 30)}, {("kv", 1): 7})
    stage.scheduler.job.rendezvous.answer(1, Rendezvous("run", 0, ("a", "b")))
    former = snapshot_of(stage)
    again = load(dump(former), stage.settings, 50.0)
    assert again[:3] == (JOB, 2, True)
    assert again.passed == {("kv", "c"): Passed(5, 30)}
    assert again.cuts == CUTS
    assert again.rendezvous.issued == 1
    assert again.rendezvous.runs == {"run": RunState(1, ("a", "b"))}
    assert again.resumed == {("kv", 1): 7}
    assert again.seats.issued == 3
    for node, seat in former.seats.by_node.items():
        copy = again.seats.by_node[node]
        assert copy.member(0)[:6] == seat.member(0)[:6]
        assert (copy.pid, copy.reason, copy.has_said_so) == (seat.pid, seat.reason, seat.has_said_so)
        assert not copy.links
        assert copy.heard_at == 50.0
    assert again.seats.by_node[Node(Role.WORKER, 1)].state is State.LOST
    again.seats.check()


def test_refuses_a_cluster_of_another_size() -> None:
    state = dump(snapshot_of(Stage(2, 1)))
    with pytest.raises(ConfigError, match="2 workers and 1 servers, and now there are to be 3 and 1"):
        load(state, Settings(3, 1), 0.0)


def test_refuses_a_cluster_with_other_replicas() -> None:
    state = dump(snapshot_of(Stage(2, 2)))
    with pytest.raises(ConfigError, match="a job with --replicas 0, and now it is to be 1"):
        load(state, Settings(2, 2, replicas=1), 0.0)


@pytest.mark.parametrize(
    "state", [b"", b"\xc1", b"junk", msgpack.packb([1, [], [], []]), msgpack.packb(None)]
)
def test_refuses_what_it_did_not_write(state: bytes) -> None:
    with pytest.raises(StorageError, match="cannot be read"):
        load(state, Settings(2, 1), 0.0)


def test_refuses_a_seat_that_does_not_exist() -> None:
    head, rows, *others = msgpack.unpackb(dump(snapshot_of(Stage(1, 0))))
    rows[0][1] = 4
    with pytest.raises(StorageError, match="cannot be read"):
        load(msgpack.packb([head, rows, *others]), Settings(1, 0), 0.0)


def test_refuses_another_format() -> None:
    head, *others = msgpack.unpackb(dump(snapshot_of(Stage(1, 0))))
    head[0] = FORMAT + 1
    with pytest.raises(StorageError, match=f"has format {FORMAT + 1}"):
        load(msgpack.packb([head, *others]), Settings(1, 0), 0.0)


def test_refuses_fields_of_other_types() -> None:
    head, seats, *rest = msgpack.unpackb(dump(snapshot_of(Stage(2, 1))))
    for changed in ([*head[:-1], "7"], [*head[:3], True, *head[4:]]):
        with pytest.raises(StorageError, match="cannot be read"):
            load(msgpack.packb([changed, seats, *rest]), Settings(2, 1), 0.0)
    barriers, resumed, cuts, rendezvous = rest
    for others in (
        ([["kv", "b", "1", 0]], resumed, cuts),
        (barriers, [["kv", 0, None]], cuts),
        (barriers, resumed, [*cuts[:-1], "9"]),
    ):
        with pytest.raises(StorageError, match="cannot be read"):
            load(msgpack.packb([head, seats, *others, rendezvous]), Settings(2, 1), 0.0)
    for counts in ([2], [2, 1], [2, 1, 0], [2, 1, 0, 0, 0], ["2", "1", "0", 0], {}):
        with pytest.raises(StorageError, match="cannot be read"):
            load(msgpack.packb([[head[0], counts, *head[2:]], seats, *rest]), Settings(2, 1), 0.0)
    seats[0][4] = 7  # a host
    with pytest.raises(StorageError, match="cannot be read"):
        load(msgpack.packb([head, seats, *rest]), Settings(2, 1), 0.0)


def test_refuses_a_rendezvous_of_other_types() -> None:
    *others, _ = msgpack.unpackb(dump(snapshot_of(Stage(1, 0))))
    for rendezvous in ((1, [("run", 1, (7,))]), ("1", [])):
        with pytest.raises(StorageError, match="cannot be read"):
            load(msgpack.packb([*others, rendezvous]), Settings(1, 0), 0.0)
