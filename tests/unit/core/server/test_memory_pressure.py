"""What a server refuses when its machine or container is short of memory, and what it goes on with."""

import pytest

from kvps.core.effects import Note
from kvps.core.limits import Limits
from kvps.core.optim.hyperparams import resolve
from kvps.core.optim.torch_rules import create
from kvps.core.placement import EMBEDDING
from kvps.core.server.memory_budget import MemoryPressure
from kvps.errors import Overload
from kvps.protocol.membership import Done, Error
from kvps.protocol.stores import Declare, Declared, Entry, Open, Optimize
from tests.support.server_harness import ServerStage, opening, optimizing
from tests.unit.core.server.test_memory_budget import holding

GIB = 1 << 30


def test_refusal_names_the_memory_in_use_and_the_next_step() -> None:
    pressure = MemoryPressure(95)
    pressure.demand_room("key 'w'")
    pressure.take_in(31 * GIB // 2, 16 * GIB)
    with pytest.raises(Overload) as refused:
        pressure.demand_room("key 'w'")
    assert str(refused.value) == (
        "key 'w' is refused: 15.5 GiB of 16 GiB are in use (97 %) on this server's machine or container, and new work "
        "is refused from 95 % on. Give it more memory, end other processes there, or add servers; or raise the limit "
        "with kvps-server --limit used_memory=NUMBER (KVPS_LIMITS)"
    )
    assert refused.value.reason == "used_memory"


def test_a_budget_grows_no_more() -> None:
    budget = holding(None, float32=10)
    assert budget.has_room_for(1)
    budget.pressure.take_in(99, 100)
    budget.demand_keys("kv", [], {})
    assert not budget.has_room_for(1)
    with pytest.raises(Overload, match="key 'a' and 1 more of store 'kv' is refused"):
        budget.demand_keys("kv", ["a", "b"], {"int8": 1})
    with pytest.raises(Overload, match="optimizer 'adam' of store 'kv' is refused"):
        budget.demand_optimizer("kv", create(resolve("adam", {})))
    with pytest.raises(Overload, match="a push to table 'words', which grows by it, is refused"):
        budget.demand_growth(EMBEDDING + "words")
    with pytest.raises(Overload, match="compression of the answers of store 'kv' is refused"):
        budget.demand_residuals("kv")
    budget.pressure.take_in(10, 100)
    budget.demand_residuals("kv")
    budget.pressure.take_in(99, 100)
    budget.demand_residuals("kv")  # they are there


def stage() -> ServerStage:
    """Return a server with a key, that then runs short of memory."""
    server = ServerStage(2, limits=Limits(used_memory=90))
    server.open()
    server.init("w", [1.0, 2.0])
    assert not reading(server, 89)
    assert reading(server, 90) == [
        "server 0 is short of memory: 90 B of 100 B are in use (90 %), and new work is refused from 90 % on"
    ]
    return server


def reading(server: ServerStage, used_bytes: int) -> list[str]:
    """Tell the server how much of 100 bytes is in use; return what it logs."""
    server.notes.clear()
    server.take(server.server.on_memory(used_bytes, 100, server.now))
    return [note.text for note in server.notes if isinstance(note, Note)]


@pytest.mark.spec("R380")
@pytest.mark.parametrize(
    "message",
    [opening(store="other"), Declare("kv", True, 1, (Entry("new", 1, (2,), 0, 2),)), optimizing("adam")],
    ids=["a store", "a key", "an optimizer"],
)
def test_new_work_is_refused_until_there_is_memory_again(message: Open | Declare | Optimize) -> None:
    server = stage()
    (said,) = server.say(0, message)
    assert isinstance(said.message, Error)
    assert said.message.code == Overload.code
    assert server.server.counts.values()["kvps_overloads_total", "used_memory"] == 1
    assert reading(server, 80) == [
        "server 0 has memory again: 80 B of 100 B are in use (80 %), and new work is taken"
    ]
    if isinstance(message, Open):
        (said,) = server.say(0, message)
        assert isinstance(said.message, Done)


@pytest.mark.spec("R380")
def test_known_keys_and_stores_are_declared_again() -> None:
    """A replacement of a worker opens what is there, and declares what is there."""
    server = stage()
    (said,) = server.say(1, opening())
    assert isinstance(said.message, Done)
    (said,) = server.say(1, Declare("kv", False, 0, (Entry("w", 1, (2,), 0, 2),)))
    assert isinstance(said.message, Declared)


def test_a_server_that_returns_to_a_checkpoint_begins_without_pressure() -> None:
    """It has given back what it held; the next reading counts."""
    server = stage()
    server.server._reset({})
    assert not server.server.control.budget.pressure.is_high
