"""publish(): rank 0 gives all servers the blocks of a version, and announces it to server 0 at last."""

from collections.abc import Iterator

import pytest
import torch

from kvps import protocol as p
from kvps.core import manifest
from kvps.core.worker.calls import Publish, publish
from kvps.core.worker.connection import Request
from kvps.core.worker.plan import PieceLocation
from kvps.core.worker.store import WorkerStore
from kvps.dtypes import Spec
from kvps.errors import ConfigError
from kvps.protocol.envelope import Envelope, Message, Packet, Role
from kvps.tensors import Private, to_frame

SERVER = Envelope(bytes(16), 0, Role.SERVER, 0, 1, 0)
BFLOAT16 = 4


def store_of(rank: int = 0, mode: str = "async") -> WorkerStore:
    return WorkerStore(p.Open("kv", mode, 0, False, "wait", 9), rank, 2, 1.0)


def call(*keys: str, known: int = 0, as_dtype: int = 0, **rows: torch.Tensor) -> Publish:
    return Publish("kv", "policy", 2, as_dtype, known, keys, tuple(rows), tuple(rows.values()))


class Servers:
    """Answer a call as two servers would, and keep what they were told."""

    def __init__(self, last: tuple[int, int] = (0, 0)) -> None:
        self.last = last
        self.told: list[tuple[int | None, Message]] = []
        self.blocks: dict[int, bytes] = {}

    def carry_out(self, store: WorkerStore, asked: Publish) -> object:
        operation, answers = asked.run(store, list(asked.values())), None
        try:
            while True:
                step = operation.send(answers)  # type: ignore[arg-type]
                answers = list(self._answers(step)) if isinstance(step, list) else []
        except StopIteration as end:
            return end.value

    def _answers(self, step: list[Request]) -> Iterator[Packet]:
        for request in step:
            self.told.append((request.server, request.message))
            message: Message = p.Done(1)
            if isinstance(request.message, p.LastVersion):
                message = p.VersionIs(1, request.message.least or self.last[request.server or 0])
            if request.fill is not None:
                (row,) = request.fill("route")
                assert row.nbytes == request.payload_bytes
                block = request.message.block if isinstance(request.message, p.Put) else -1
                self.blocks[block] = bytes(to_frame(row))
            yield Packet(SERVER, message)

    def messages(self, kind: type[Message]) -> list[tuple[int | None, Message]]:
        return [(server, message) for server, message in self.told if isinstance(message, kind)]

    def tensors(self) -> dict[str, bytes]:
        """What readers would read of the blocks."""
        found = {}
        for tensor in manifest.decode(self.blocks[-1]):
            octets = bytearray(tensor.size)
            for _, block, start, size, offset in tensor.extents:
                octets[offset : offset + size] = self.blocks[block][start : start + size]
            found[tensor.name] = bytes(octets)
        return found


@pytest.mark.spec("R542", "R544")
def test_tensors_are_cut_into_blocks_and_announced_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "BLOCK_BYTES", 128)
    servers, weight = Servers((4, 6)), torch.randn(10, 5)
    tied, count, none = weight, torch.tensor([7, 8, 9]), torch.empty(0, 3)
    asked = call(a=weight, count=count, none=none, b=tied, as_dtype=BFLOAT16)
    assert servers.carry_out(store_of(), asked) == 7
    assert [(server, message.block) for server, message in servers.messages(p.Put)] == [(0, 0), (1, 1)]  # type: ignore[attr-defined]
    assert [server for server, _ in servers.messages(p.Announce)] == [1, 0]
    half = bytes(to_frame(weight.bfloat16().view(-1)))
    assert servers.tensors() == {"a": half, "b": half, "count": bytes(to_frame(count)), "none": b""}


@pytest.mark.parametrize(("most", "sizes"), [(1 << 20, [192, 192, 192, 192, 32]), (128, [128] * 6 + [32])])
def test_blocks_that_are_read_in_place_are_large(
    monkeypatch: pytest.MonkeyPatch, most: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(publish, "BLOCK_BYTES", 64)
    monkeypatch.setattr(publish, "LENT_BLOCK_BYTES", most)
    monkeypatch.setattr(Private, "lends", lambda memory, route, pieces: route in ("server 0", "server 1"))
    servers, weight = Servers(), torch.randn(200)
    servers.carry_out(store_of(), call(a=weight))
    assert [message.size for _, message in servers.messages(p.Put)] == sizes  # type: ignore[attr-defined]
    assert servers.tensors() == {"a": bytes(to_frame(weight))}


@pytest.mark.spec("R544")
def test_keys_are_frozen_where_they_are() -> None:
    servers, store = Servers(), store_of()
    pieces = (PieceLocation(0, 2, 8, 4, 0), PieceLocation(1, 3, 0, 2, 4))
    store.place(
        [("w", Spec("float32", (6,)), pieces), ("n", Spec("int64", (1,)), (PieceLocation(1, 5, 2, 1, 0),))]
    )
    assert servers.carry_out(store, call("w", "n", known=4, as_dtype=BFLOAT16)) == 5
    assert not servers.messages(p.LastVersion), "the number is known"
    freeze = [p.Freeze("kv", "policy", 5, 2, BFLOAT16, chunks) for chunks in ((2,), (3, 5))]
    assert servers.messages(p.Freeze) == [(0, freeze[0]), (1, freeze[1])]
    weight, number = manifest.decode(servers.blocks[-1])
    assert (weight.spec, number.spec) == (Spec("bfloat16", (6,)), Spec("int64", (1,)))
    assert weight.extents == ((0, 2, 16, 8, 0), (1, 3, 0, 4, 8))
    assert number.extents == ((1, 5, 16, 8, 0),)


@pytest.mark.parametrize(("known", "is_resumed", "least"), [(0, False, 1), (3, False, 4), (0, True, 0)])
def test_other_ranks_wait_for_the_number(known: int, is_resumed: bool, least: int) -> None:
    servers, store = Servers((9, 0)), store_of(rank=1)
    store.is_resumed = is_resumed
    assert servers.carry_out(store, call(known=known)) == (least or 9)
    assert servers.told == [(0, p.LastVersion("kv", "policy", least))]


def test_small_tensors_share_a_block() -> None:
    servers, first, second = Servers(), torch.randn(3), torch.randn(5)
    servers.carry_out(store_of(), call(a=first, b=second))
    assert [message.size for _, message in servers.messages(p.Put)] == [64 + 20]  # type: ignore[attr-defined]
    assert servers.tensors() == {"a": bytes(to_frame(first)), "b": bytes(to_frame(second))}


def test_too_many_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "FRAME_BYTES_MAX", 10)
    with pytest.raises(ConfigError, match="1 tensors: their names and places take over 64 MiB"):
        Servers().carry_out(store_of(), call(a=torch.randn(3)))
