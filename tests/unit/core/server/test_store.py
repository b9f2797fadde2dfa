"""A store on one server: its keys come into being, are replaced, and get an optimizer."""

import math

import pytest
import torch

from kvps.core.gradients import DenseGradient, GradientSum
from kvps.core.optim.hyperparams import resolve
from kvps.core.placement import home
from kvps.core.server.chunks.rounds import PendingUpdate
from kvps.core.server.chunks.slab import Chunks
from kvps.core.server.memory_budget import MemoryBudget
from kvps.core.server.options import check_options
from kvps.core.server.store import ServerStore
from kvps.dtypes import BY_NAME
from kvps.errors import ConfigError, Mismatch, Overload, ProtocolError
from kvps.protocol.stores import Entry, Place
from kvps.protocol.values import Load, Run
from tests.support.server_harness import opening, weight_bytes

LIFE = (0, 10)


def make(limit: int | None = None, **options: object) -> ServerStore:
    chunks = Chunks()
    return ServerStore(opening(**options), chunks, MemoryBudget(chunks, limit))  # type: ignore[arg-type]


def entry(key: str, *shape: int, dtype: str = "float32", start: int = 0, size: int = -1) -> Entry:
    count = math.prod(shape) if size < 0 else size
    return Entry(key, BY_NAME[dtype].id, shape, start, count)


def create(store: ServerStore, *entries: Entry, call: int = 0, life: tuple[int, int] = LIFE) -> list[Place]:
    places, replaced = store.create(entries, call, life)
    for old in replaced:
        store._chunks.retire(old.pieces)
    return list(places)


def load(store: ServerStore, key: str, value: float, call: int = 0, pieces: slice = slice(None)) -> bool:
    """Load ``value`` into all elements of ``key``; say whether that made it ready."""
    ready = False
    for piece in store.shards[key].pieces[pieces]:
        chunk = store._chunks.by_number[piece.chunk]
        message = Load(piece.chunk, 1, (Run(piece.start, piece.size, call),))
        ready |= store.load(chunk, message, torch.full((piece.size,), value))
    return ready


def value(store: ServerStore, key: str) -> set[float]:
    return {
        number
        for piece in store.shards[key].pieces
        for number in store._chunks.by_number[piece.chunk]
        .buffer.tensor[piece.start : piece.start + piece.size]
        .unique()
        .tolist()
    }


# --- options ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_bytes", [0, 2**40])
def test_size_of_chunks_is_bounded(chunk_bytes: int) -> None:
    with pytest.raises(ConfigError, match=f"store 'kv': chunk_bytes {chunk_bytes} must be from"):
        check_options(opening(chunk_bytes=chunk_bytes))


@pytest.mark.spec("R42")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", "async"),
        ("staleness", 3),
        ("deterministic", True),
        ("on_worker_lost", "fail"),
        ("bigarray_bound", 5),
        ("bundles", False),
    ],
)
def test_all_must_mean_the_same_store(name: str, value: object) -> None:
    store = make()
    store.agree(opening())
    ours = getattr(opening(), name)
    with pytest.raises(Mismatch, match=f"opened with {name}={ours!r}, .* with {name}={value!r}"):
        store.agree(opening(**{name: value}))  # type: ignore[arg-type]


# --- keys -------------------------------------------------------------------------------------------


@pytest.mark.spec("R45")
def test_a_key_of_another_type_or_shape() -> None:
    store = make()
    create(store, entry("w", 2, 3))
    for wrong, says in (
        (entry("w", 3, 2), r"key 'w' of store 'kv' is float32\[2,3\] .* as float32\[3,2\]"),
        (entry("w", 2, 3, dtype="int32"), r"is float32\[2,3\] .* as int32\[2,3\]"),
        (entry("w", 2, 3, start=1, size=5), "holds 6 elements from 0, not 5 from 1"),
    ):
        with pytest.raises(Mismatch, match=says):
            create(store, wrong)
        assert store.find(wrong, 0) is None  # it has no value yet: that is found out later
    load(store, "w", 1.0)
    with pytest.raises(Mismatch):
        store.find(entry("w", 3, 2), 0)


def test_all_keys_of_a_declare_or_none() -> None:
    store = make(limit=300)
    create(store, entry("a", 10))
    for entries, error in (
        ([entry("b", 1), entry("a", 11)], Mismatch),
        ([entry("b", 10), entry("c", 10)], Overload),
        ([entry("b", 1), entry("b", 1)], ProtocolError),
    ):
        with pytest.raises(error):
            create(store, *entries)
        assert list(store.shards) == ["a"]
        assert weight_bytes(store._chunks) == 40


def test_the_memory_limit_counts_all_that_keys_take() -> None:
    """12 bytes for each element: the weight, its second buffer, and the sum of a round."""
    store = make(limit=300)
    create(store, entry("a", 20), entry("b", 5))
    with pytest.raises(
        Overload,
        match=r"no room for key 'c' and 1 more of store 'kv': weights 108 B \+ second buffers 108 B \+ "
        r"sums of open rounds 108 B = 324 B, and the limit of this server is 300 B",
    ):
        create(store, entry("c", 1), entry("d", 1))
    create(store, entry("b", 5))
    load(store, "a", 1.0)
    create(store, entry("a", 10, dtype="float64"), call=1)  # in the room of the old one
    with pytest.raises(Overload, match=r"no room for key 'a' of"):
        create(store, entry("a", 21), call=2)


# --- values -----------------------------------------------------------------------------------------


@pytest.mark.spec("R49")
def test_a_value_that_is_loaded_again_changes_nothing() -> None:
    store = make()
    create(store, entry("w", 4))
    assert load(store, "w", 1.0)
    assert not load(store, "w", 2.0)
    assert value(store, "w") == {1.0}


@pytest.mark.spec("R48")
def test_a_value_that_nobody_declared() -> None:
    store = make()
    create(store, entry("w", 4), entry("v", 4))
    load(store, "w", 1.0)
    both = Load(1, 1, (Run(0, 4, 1), Run(4, 4, 0)))
    for call in (1, 2):
        with pytest.raises(ProtocolError, match=f"key 'w': value {call} was loaded, declared was 0"):
            load(store, "w", 5.0, call)
    with pytest.raises(ProtocolError):
        store.load(store._chunks.by_number[1], both, torch.ones(8))
    assert value(store, "w") == {1.0}
    assert not store.shards["v"].ready


# --- broadcasts -------------------------------------------------------------------------------------


@pytest.mark.spec("R45")
@pytest.mark.spec("R392")
def test_a_key_that_lies_elsewhere_now_is_forgotten() -> None:
    chunks = Chunks(server=1, servers=2)
    store = ServerStore(opening(), chunks, MemoryBudget(chunks, None))
    away = next(f"k{number}" for number in range(99) if home(f"k{number}", 2) == 0)
    mine = next(f"k{number}" for number in range(99) if home(f"k{number}", 2) == 1)
    for key in (away, mine):
        create(store, entry(key, 8, size=4))
        load(store, key, 1.0)
    elsewhere = entry(away, 5, size=0)
    assert create(store, elsewhere, entry(mine, 0), call=1) == [Place(False, ()), Place(True, ())]
    assert set(store.shards) == {mine}, "a key of no elements lies at its home"
    assert weight_bytes(chunks) == 0
    assert not chunks.by_number
    assert create(store, elsewhere, call=1) == [Place(False, ())], "again"
    create(store, entry(away, 8, start=4, size=4), call=2)
    create(store, elsewhere, call=1)
    assert store.shards[away].born == 2, "a late one of an older value"


def part(store: ServerStore, start: int, stop: int, value: float, call: int = 1) -> bool | None:
    """Load ``value`` into these elements of the first chunk."""
    message = Load(1, 1, (Run(start, stop - start, call),))
    return store.load(store._chunks.by_number[1], message, torch.full((stop - start,), value))


@pytest.mark.spec("R223")
def test_a_value_may_come_in_parts_from_its_beginning_on() -> None:
    store = make()
    w = entry("w", 10)
    create(store, w)
    load(store, "w", 1.0)
    create(store, w, call=1)
    chunk = store._chunks.by_number[1]
    assert part(store, 4, 8, 2.0) is None, "what belongs before it is not there"
    assert part(store, 0, 4, 2.0) is False
    assert part(store, 0, 4, 9.0) is False, "again"
    assert part(store, 6, 10, 2.0) is None
    assert value(store, "w") == {2.0, 1.0}
    assert store.find(w, 1) is None
    assert [store.lacks(chunk, *place, 1) for place in ((0, 4), (2, 6), (5, 9))] == [None, 4, 5]
    assert store.lacks(chunk, 0, 10, 0) is None, "that value is there"
    assert store.lacks(chunk, 0, 10, 2) == 0, "nobody gives that one"
    assert part(store, 2, 9, 2.0) is False, "of which some is in"
    message = Load(1, 1, (Run(9, 1, 1),))
    assert store.load(chunk, message, torch.full((1,), 2.0)) is True
    assert value(store, "w") == {2.0}
    assert store.lacks(chunk, 0, 10, 1) is None


# --- the optimizer ----------------------------------------------------------------------------------


def trained(name: str, **numbers: object) -> ServerStore:
    """A store whose optimizer has state."""
    store = make()
    create(store, entry("a", 2), entry("b", 2))
    load(store, "a", 1.0)
    load(store, "b", 1.0)
    store.optimize(resolve(name, numbers))
    chunk = store._chunks.by_number[1]
    assert store.updater is not None
    chunk.state = store.updater.new_state(chunk.buffer.tensor)
    for tensor in chunk.state.values():
        tensor.fill_(7)
    chunk.spans[0].step = 3
    return store


@pytest.mark.parametrize("rule", ["test", "sgd"])
def test_an_optimizer_that_cannot_update_what_is_pushed_is_refused(rule: str) -> None:
    store = make()
    create(store, entry("n", 2, dtype="int32"))
    store.optimize(resolve("test", {"rescale_grad": 2}))
    before = (store.hyper, store.updater)
    chunk = store._chunks.by_number[1]
    chunk.state = {} if rule == "test" else None
    chunk.spans[0].due.append(
        PendingUpdate(0, (), GradientSum((DenseGradient([torch.zeros(2, dtype=torch.int32)]),)))
    )
    with pytest.raises(ConfigError, match=r"torch\.int32"):
        store.optimize(resolve(rule, {"rescale_grad": 0.5}))
    assert (store.hyper, store.updater) == before


def test_a_learning_rate_leaves_integers_alone_that_the_optimizer_does_not_update() -> None:
    """Such as the count of batches of a BatchNorm."""
    store = trained("adam")
    create(store, entry("batches", 1, dtype="int64"), call=1)
    store.set_rate(0.25)
    assert store.hyper.number("lr") == 0.25


@pytest.mark.spec("R65")
def test_a_learning_rate_needs_an_optimizer() -> None:
    with pytest.raises(ConfigError, match="store 'kv' has no optimizer"):
        make().set_rate(0.1)
