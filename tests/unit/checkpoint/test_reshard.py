"""A cut for another number of servers: every element at its place, once, with its history."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvps.checkpoint.reshard import demand_own, gathered, merged, regroup
from kvps.core.optim.hyperparams import resolve
from kvps.core.placement import parts
from kvps.core.server.snapshot.model import KeySnapshot, Snapshot, StoreSnapshot
from kvps.dtypes import Spec
from kvps.errors import StorageError
from tests.support import snapshots
from tests.support.placement_reference import first_rule
from tests.support.tiers import examples


def cut_of(servers: int, **more: object) -> list[Snapshot]:
    return [snapshots.image(server, servers, **more) for server in range(servers)]  # type: ignore[arg-type]


@given(
    counts=st.dictionaries(st.text("abcdef", min_size=1, max_size=4), st.integers(0, 300), max_size=6),
    inner=st.sets(st.integers(1, 299), max_size=4),
    before=st.integers(1, 5),
    after=st.integers(1, 5),
    bound=st.integers(1, 300),
)
@examples(150)
def test_resharding_back_restores_every_element(
    counts: dict[str, int], inner: set[int], before: int, after: int, bound: int
) -> None:
    keys = {name: Spec("float32", (count,)) for name, count in counts.items()}
    old = cut_of(before, keys=keys, bound=bound, cuts=sorted(inner))
    new = [regroup(old, server, after) for server in range(after)]
    back = [regroup(new, server, before) for server in range(before)]
    expected = snapshots.elements(old)
    assert snapshots.elements(new) == snapshots.elements(back) == expected
    for name, count in counts.items():
        assert [row[0] for row in expected["default", name]] == list(range(count))  # type: ignore[index]
        placed = {part.server: part for part in parts(name, count, after, bound)}
        for image in new:
            held = {key.name: key for key in image.stores[0].keys}
            assert (name in held) == (image.server in placed)
            demand_own(image)


@pytest.mark.spec("R482")
@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_cut_of_the_first_rule_comes_back_by_the_present_one(after: int) -> None:
    old = cut_of(3, place=first_rule)
    new = [regroup(old, server, after, rule=1) for server in range(after)]
    assert snapshots.elements(new) == snapshots.elements(old)
    for image in new:
        demand_own(image)
    with pytest.raises(StorageError, match=r"missing|must not be|does not belong"):
        demand_own(old[1])


def test_nothing_is_copied() -> None:
    old = cut_of(1)
    storages = {tensor.untyped_storage().data_ptr() for tensor in old[0].tensors()}
    for server in range(3):
        new = regroup(old, server, 3)
        assert {tensor.untyped_storage().data_ptr() for tensor in new.tensors()} <= storages


def test_a_store_that_one_server_does_not_know_yet() -> None:
    """It has no keys: whoever opened it had not come further."""
    old = cut_of(2)
    old[0] = replace(old[0], stores=old[0].stores[:1])
    assert [store.name for store in regroup(old, 0, 1).stores] == ["default", "plain"]


def test_the_whole_weights() -> None:
    for servers in (1, 3):
        found = merged(cut_of(servers), "default")
        assert {name: tuple(array.shape) for name, array in found.items()} == {
            name: spec.shape for name, spec in snapshots.KEYS.items()
        }
        for name, spec in snapshots.KEYS.items():
            assert torch.equal(found[name], snapshots.values(spec).view(spec.shape))
    assert merged(cut_of(3), "plain") == {}


def test_a_key_of_nothing_may_have_no_portions() -> None:
    key = KeySnapshot("nothing", Spec("int8", (3, 0)), 0, ())
    store = StoreSnapshot(snapshots.opened(), None, None, 0.0, 0, 0, (key,))
    found = merged([Snapshot(0, 1, (store,))], "default")["nothing"]
    assert (found.dtype, tuple(found.shape)) == (torch.int8, (3, 0))


def test_a_store_that_is_not_there() -> None:
    with pytest.raises(StorageError, match=r"no store 'other'.*'default', 'plain'"):
        merged(cut_of(2), "other")
    with pytest.raises(StorageError, match="there is none"):
        merged([Snapshot(0, 1, ())], "other")


# --- cuts that are none -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("images", "says"),
    [
        ([], "servers none"),
        (cut_of(2)[:1], "servers 0 of 2"),
        ([cut_of(2)[0]] * 2, "0 of 2, 0 of 2"),
        ([cut_of(2)[0], cut_of(3)[1]], "0 of 2, 1 of 3"),
    ],
)
def test_regroup_needs_an_image_of_each_server(images: list[Snapshot], says: str) -> None:
    with pytest.raises(StorageError, match=says):
        regroup(images, 0, 1)


Change = Callable[[StoreSnapshot], StoreSnapshot]


def changed(change: Change, server: int = 1) -> list[Snapshot]:
    """A cut of two, of which one differs in its first store."""
    old = cut_of(2)
    first, *others = old[server].stores
    old[server] = replace(old[server], stores=(change(first), *others))
    return old


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda store: replace(store, optimize_calls=9), "optimize_calls is 1 on server 0 and 9"),
        (lambda store: replace(store, rate_calls=9), "rate_calls"),
        (lambda store: replace(store, sent_lr=9.0), "sent_lr"),
        (lambda store: replace(store, hyper=None), "hyper is"),
        (lambda store: replace(store, sent_hyper=resolve("sgd", {})), "sent_hyper"),
        (lambda store: replace(store, opened=snapshots.opened(bound=65)), "bigarray_bound"),
    ],
)
def test_servers_must_know_the_same_of_a_store(change: Change, says: str) -> None:
    with pytest.raises(StorageError, match=says):
        regroup(changed(change), 0, 1)


def test_chunks_may_differ() -> None:
    """The first OPEN decides, and that may be another worker's on another server."""
    old = changed(lambda store: replace(store, opened=replace(store.opened, chunk_bytes=1 << 16)))
    assert snapshots.elements([regroup(old, 0, 1)]) == snapshots.elements(old)


def cut_key(**changes: object) -> Change:
    """Change the image of the key that is on both servers."""

    def change(store: StoreSnapshot) -> StoreSnapshot:
        keys = (
            replace(key, **changes) if key.name == "layer1.weight" else key  # type: ignore[arg-type]
            for key in store.keys
        )
        return replace(store, keys=tuple(keys))

    return change


def without(name: str) -> Change:
    return lambda store: replace(store, keys=tuple(key for key in store.keys if key.name != name))


PORTIONS = next(key.portions for key in snapshots.image(1, 2).stores[0].keys if key.name == "layer1.weight")
"""Of elements 60 to 119: 48 to 74, and 75 to 119."""


@pytest.mark.parametrize(
    ("change", "server", "says"),
    [
        (cut_key(call=9), 1, "after call 1 on one"),
        (cut_key(spec=Spec("float32", (120,))), 1, r"float32\[120\]"),
        (without("layer1.weight"), 1, "elements 60 to 119 are missing"),
        (without("layer1.weight"), 0, "elements 0 to 59 are missing"),
        (cut_key(portions=PORTIONS[:1]), 1, "elements 75 to 119 are missing"),
        (cut_key(portions=PORTIONS[1:]), 1, "elements 60 to 74 are missing"),
        (cut_key(portions=PORTIONS[:1] * 2), 1, "element 60 is there twice"),
        (cut_key(portions=(PORTIONS[0], replace(PORTIONS[1], start=76))), 1, "elements 75 to 75 are missing"),
    ],
)
def test_elements_must_be_there_once(change: Change, server: int, says: str) -> None:
    with pytest.raises(StorageError, match=f"'layer1.weight'.*{says}"):
        regroup(changed(change, server), 0, 3)


def test_a_key_beyond_its_end() -> None:
    change = cut_key(portions=(PORTIONS[0], replace(PORTIONS[1], weight=torch.zeros(50))))
    with pytest.raises(StorageError, match="elements 120 to 124 are where they must not be"):
        gathered(changed(change))


def test_an_image_must_hold_what_belongs_there() -> None:
    for image in cut_of(3):
        demand_own(image)
    misplaced = replace(cut_of(3)[1], server=0)
    only = next(key for key in misplaced.stores[0].keys if key.spec.count < snapshots.BOUND)
    alone = replace(misplaced.stores[0], keys=(only,))
    with pytest.raises(StorageError, match=r"of store 'default' does not belong on server 0 of 3"):
        demand_own(replace(misplaced, stores=(alone,)))
    short = changed(cut_key(portions=PORTIONS[:1]))[1]
    with pytest.raises(StorageError, match="elements 75 to 119 are missing"):
        demand_own(short)
    early = changed(cut_key(portions=(replace(PORTIONS[0], start=47),)))[1]
    with pytest.raises(StorageError, match="element 47 is there twice or where it must not be"):
        demand_own(early)
