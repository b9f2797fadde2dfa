"""From a store on a server to its image, and back: on the same server, on others, and in place."""

import pytest
import torch

from kvps.checkpoint.reshard import regroup
from kvps.compression.spec import BIT2, CodecSpec
from kvps.core.placement import parts
from kvps.core.server.snapshot.model import Snapshot
from kvps.dtypes import BY_NAME
from kvps.errors import Mismatch, StorageError
from kvps.protocol.stores import Declare, Declared, Entry
from kvps.protocol.values import Push, Run
from kvps.tensors import TORCH
from tests.support.server_harness import ServerStage, heard
from tests.support.snapshots import elements, same

BOUND = 64


def stage(server: int = 0, servers: int = 1, **more: object) -> ServerStage:
    shard = ServerStage(servers=servers, rank=server, every_s=0.0, **more)  # type: ignore[arg-type]
    shard.open(bigarray_bound=BOUND, chunk_bytes=65_536)
    return shard


def image_of(server: ServerStage) -> Snapshot:
    image, release = server.server.control.snapshot()
    release()
    return image


def push(server: ServerStage, key: str, rank: int, number: int, value: float = 1.0) -> None:
    """Push to all pieces of a key."""
    dtype = server.server.context.stores["kv"].shards[key].spec.dtype
    for piece in server.pieces[key]:
        runs = (Run(piece.start, piece.size, number),)
        row = torch.full((piece.size,), value, dtype=TORCH[dtype])
        server.say(rank, Push(piece.chunk, BY_NAME[dtype].id, (rank,), 1.0, False, runs), row)


def trained(server: int = 0, servers: int = 1) -> ServerStage:
    """Keys of several kinds, of which some have been pushed more often than others."""
    shard = stage(server, servers)
    shard.optimizer("adam", lr=0.5)
    sizes = {"w": 40, "big": 40_000, "half": 30, "never": 100, "nothing": 0}
    for key, count in sizes.items():
        row = (torch.arange(count) % 100).to(torch.bfloat16 if key == "half" else torch.float32)
        own = [part for part in parts(key, count, servers, BOUND) if part.server == server]
        if own:
            some = torch.cat([row[part.start : part.start + part.size] for part in own])
            shard.declare(key, some, start=own[0].start, shape=(count,))
            shard.load(key, some)
    for key, pushes in (("w", 3), ("big", 2), ("half", 3)):
        for number in range(pushes if key in shard.pieces else 0):
            for rank in (0, 1):
                push(shard, key, rank, number, 1.0 + number)
    return shard


def fresh(image: Snapshot) -> ServerStage:
    """A server that holds what the image says."""
    server = ServerStage(servers=image.servers, rank=image.server, every_s=0.0)
    server.restore(image)
    server.server.check()
    for name, shard in server.server.context.stores["kv"].shards.items():
        server.pieces[name] = shard.pieces
    return server


def test_a_server_that_comes_back_holds_the_same() -> None:
    image = image_of(trained())
    assert {key.name: len(key.portions) for key in image.stores[0].keys}["big"] > 1
    assert same(image_of(fresh(image)), image)


@pytest.mark.spec("R433")
def test_a_cut_holds_where_clocks_started() -> None:
    server = trained()
    server.span("w").clock_from[0] = 3
    other = fresh(image_of(server))
    assert server.span("w").clock_from
    assert other.span("w").clock_from == server.span("w").clock_from


def test_keys_that_were_always_pushed_together_have_one_history() -> None:
    server = stage()
    server.init("a", [1.0])
    server.init("b", [2.0])
    piece = server.places("a")[0]
    together = Push(piece.chunk, 1, (0, 1), 1.0, False, (Run(piece.start, 2, 0),))
    server.say(0, together, torch.ones(2))
    first, second = (key.portions[0].history for key in image_of(server).stores[0].keys)
    assert first is second
    assert first.version == 1


@pytest.mark.spec("R482")
def test_server_with_several_runs_of_a_key_has_them_all_after_a_restore() -> None:
    images = [image_of(trained(server, 5)) for server in range(5)]
    assert any(len(key.portions) > 1 for image in images for key in image.stores[0].keys)
    back = [image_of(fresh(image)) for image in images]
    assert _without_new_states(elements(back)) == _without_new_states(elements(images))
    again = trained(3, 5)
    again.restore(images[3])
    held, saved = (
        [key for key in image.stores[0].keys if key.name == "big"] for image in (image_of(again), images[3])
    )
    assert [part.start for part in held[0].portions] == [part.start for part in saved[0].portions]
    with pytest.raises(StorageError, match="open the store with the bigarray_bound"):
        again.revive(images[2])


@pytest.mark.spec("R148")
@pytest.mark.parametrize("servers", [1, 3, 5])
def test_on_another_number_of_servers(servers: int) -> None:
    images = [image_of(trained(server, 2)) for server in (0, 1)]
    others = [fresh(regroup(images, server, servers)) for server in range(servers)]
    assert _without_new_states(elements([image_of(other) for other in others])) == (
        _without_new_states(elements(images))
    )


def _without_new_states(found: dict[tuple[str, str], list[object]]) -> object:
    """A state that no update has touched may be there or not, by what else is in the chunk."""
    return {
        key: [
            (start, weight, history, state if history.step else {})
            for start, weight, history, state in rows  # type: ignore[misc]
        ]
        for key, rows in found.items()
    }


def test_parts_of_a_key_with_different_histories_get_pieces_of_their_own() -> None:
    """As when a rank's push had reached one server and not the other."""
    images = []
    for server in (0, 1):
        shard = trained(server, 2)
        if "big" in shard.pieces and server == 0:
            for rank in (0, 1):
                push(shard, "big", rank, 2)
        images.append(image_of(shard))
    whole = fresh(regroup(images, 0, 1))
    spans = [
        next(whole.chunk(piece.chunk).spans_in(piece.start, piece.start + 1)) for piece in whole.pieces["big"]
    ]
    assert {span.version for span in spans} == {2, 3}
    assert elements([image_of(whole)])["kv", "big"] == elements(images)["kv", "big"]


def test_a_part_that_lacks_something_beside_one_that_lacks_nothing() -> None:
    """Values of one server were compressed for who pulls them, those of the other were not."""
    images, rests = [], []
    for server in (0, 1):
        shard = stage(server, 2)
        shard.optimizer("adam", lr=0.5)
        (part,) = [part for part in parts("v", 80, 2, BOUND) if part.server == server]
        shard.declare("v", torch.zeros(part.size), start=part.start, shape=(80,))
        shard.load("v", torch.zeros(part.size))
        (piece,) = shard.pieces["v"]
        runs = (Run(piece.start, piece.size, 0),)
        back = CodecSpec(BIT2, 0.3) if server == 0 else None
        for rank in (0, 1):
            row = torch.linspace(0.1, 1, part.size)
            shard.say(rank, Push(piece.chunk, 1, (rank,), 1.0, False, runs, None, back), row)
        images.append(image_of(shard))
        lacks = shard.chunk().back.residual[: part.size] if back is not None else torch.zeros(part.size)  # type: ignore[union-attr]
        rests.append(lacks)
    assert rests[0].any()
    whole = fresh(regroup(images, 0, 1))
    (key,) = image_of(whole).stores[0].keys
    (portion,) = key.portions
    assert portion.state.keys() == {"exp_avg", "exp_avg_sq", "kvps.rest"}
    assert torch.equal(portion.state["kvps.rest"], torch.cat(rests))
    assert (portion.state["exp_avg"] > 0).all()


def test_a_part_without_states_beside_one_with_some_is_as_new() -> None:
    """A frozen tensor on two servers: beside it in its chunk, one of them has updated another key."""
    images = []
    for server in (0, 1):
        shard = stage(server, 2)
        shard.optimizer("adam", lr=0.5)
        for part in parts("frozen", 80, 2, BOUND):
            if part.server == server:
                row = torch.zeros(part.size)
                shard.declare("frozen", row, start=part.start, shape=(80,))
                shard.load("frozen", row)
        if server == 0:
            shard.init("w", torch.zeros(4))
            for rank in (0, 1):
                push(shard, "w", rank, 0)
        images.append(image_of(shard))
    names = [
        [set(portion.state) for portion in key.portions]
        for image in images
        for key in image.stores[0].keys
        if key.name == "frozen"
    ]
    assert names == [[{"exp_avg", "exp_avg_sq"}], [set()]]
    whole = fresh(regroup(images, 0, 1))
    (portion,) = [key.portions[0] for key in image_of(whole).stores[0].keys if key.name == "frozen"]
    assert all(not row.any() for row in portion.state.values())


class TestInPlace:
    """A store that is open, and in use, takes the values of a cut."""

    def revive(self, server: ServerStage, image: Snapshot, store: str = "kv") -> None:
        server.revive(image, store)

    @pytest.mark.spec("R147")
    def test_keys_that_are_not_in_the_cut_are_left_as_they_are(self) -> None:
        server = trained()
        image = image_of(server)
        server.init("later", [5.0])
        self.revive(server, image)
        assert server.values("later") == [5.0]

    def test_waiter_for_a_key_of_the_cut_is_answered(self) -> None:
        whole = trained()
        server = stage()
        server.init("x", [1.0])
        said = server.say(1, Declare("kv", False, 0, (Entry("w", 1, (40,), 0, 40),)))
        assert said == []
        effects = server.revive(image_of(whole))
        assert len(heard(effects, Declared)) == 1

    @pytest.mark.spec("R147")
    @pytest.mark.parametrize("what", ["shape", "type", "optimizer"])
    def test_another_model_is_refused_and_nothing_is_changed(self, what: str) -> None:
        image = image_of(trained())
        server = stage()
        if what == "optimizer":
            server.optimizer("sgd", lr=1.0)
        server.init("aaa", [1.0])
        row = torch.zeros(41 if what == "shape" else 40)
        server.init("w", row.double() if what == "type" else row)
        before = server.snapshot()
        with pytest.raises(Mismatch, match="optimizer 'sgd'" if what == "optimizer" else "'w'"):
            self.revive(server, image)
        assert server.snapshot() == before

    def test_another_placement_is_refused(self) -> None:
        """A store that was opened with another bound has its keys on other servers."""
        image = image_of(trained())
        server = stage()
        server.declare("w", torch.zeros(20), shape=(40,))
        server.load("w", torch.zeros(20))
        with pytest.raises(StorageError, match=r"40 elements from 0 .* holds 20 from 0"):
            self.revive(server, image)

    def test_a_key_whose_parts_went_apart_is_refused_where_it_lies(self) -> None:
        images = []
        for server in (0, 1):
            shard = trained(server, 2)
            if server == 0:
                for rank in (0, 1):
                    push(shard, "big", rank, 2)
            images.append(image_of(shard))
        shard = stage()
        shard.init("big", torch.zeros(40_000))
        with pytest.raises(StorageError, match="its parts have had different pushes"):
            self.revive(shard, regroup(images, 0, 1))

    def test_a_store_that_is_not_in_the_cut(self) -> None:
        server = trained()
        server.open(store="other")
        with pytest.raises(StorageError, match=r"has no store 'other'; it has 'kv'\. Create"):
            self.revive(server, image_of(trained()), "other")
        with pytest.raises(StorageError, match="it has none"):
            self.revive(server, Snapshot(0, 1, ()), "kv")
