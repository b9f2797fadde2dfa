"""A server copies what it holds to its standby, which goes on with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from kvps import protocol as p
from kvps.compression.spec import INT8, CodecSpec
from kvps.core.effects import Connect, Effect, Exit, Note, Send
from kvps.core.embedding.tiered import Tier
from kvps.core.placement import home
from kvps.core.server.participation import KEPT_S
from kvps.core.server.replicas import primary
from kvps.core.server.replicas.primary import AGAIN_S, DISMISS_S
from kvps.core.server.snapshot.storage import Loaded, Read
from kvps.errors import ProtocolError
from kvps.protocol.envelope import Message, Packet
from kvps.protocol.values import Dropped
from tests.support.server_harness import Seat, ServerStage, heard, opening

LIFE = 50
"""The incarnation of the standby."""
TIERED_LIMIT = 350
"""Bytes of memory that a few rows take."""


@dataclass
class Stage(ServerStage):
    """A server whose packets to the other copy are kept."""

    sent: list[Packet] = field(default_factory=list)
    standings: list[p.Standing] = field(default_factory=list)

    def take(self, door: None = None) -> list[Any]:
        others: list[Effect] = []
        for effect in self.server.outbox.take():
            if isinstance(effect, Send) and effect.to in (b"q", "server 0"):
                self.sent.append(effect.packet)
            else:
                others.append(effect)
        for effect in others:
            self.server.outbox.append(effect)
        said = super().take(door)
        self.standings += [packet.message for packet in said if isinstance(packet.message, p.Standing)]
        return said


class Pair:
    """A primary, and its standby once it is named."""

    def __init__(
        self,
        most: int = 0,
        servers: int = 1,
        every_s: float | None = None,
        tiers: tuple[Callable[[], Tier], ...] = (),
    ) -> None:
        first, other = [{"tier": tier, "memory_limit": TIERED_LIMIT} for tier in tiers] or [{}, {}]
        self.primary = Stage(2, servers, most=most, every_s=every_s, welcome={"replicas": 1}, **first)
        mine = {"welcome": {"replicas": 1, "follows": True}, "most": most, **other}
        self.standby = Stage(2, servers, life=LIFE, standby=LIFE, greeted=False, **mine)  # type: ignore[arg-type]
        self.said: list[Any] = []
        """What workers have heard, of the primary and of the standby."""

    def name(self, life: int = LIFE) -> None:
        self.primary.standby = life
        self.said += self.primary.show()

    def pump(self, rounds: int = 20) -> None:
        """Carry all packets between the two."""
        for _ in range(rounds):
            if not self.forth() + self.back():
                return

    def forth(self) -> int:
        """Carry the packets of the primary; return how many."""
        packets, self.primary.sent = self.primary.sent, []
        for packet in packets:
            self.said += self.standby.hear("server 0", packet)  # type: ignore[arg-type]
        return len(packets)

    def back(self) -> int:
        """Carry the packets of the standby; return how many."""
        packets, self.standby.sent = self.standby.sent, []
        for packet in packets:
            self.said += self.primary.hear(b"q", packet)
        return len(packets)

    def level(self) -> None:
        self.name()
        self.ask()
        self.pump()
        assert self.standby.standings[-1].level

    def ask(self) -> None:
        """Let the standby ask again, and be welcomed."""
        self.standby.now += 1.5
        self.standby.take(self.standby.server.on_timer(self.standby.now))
        self.back()
        self.forth()

    def promote(self) -> list[Any]:
        self.standby.standby = 0
        others = [Seat("held", 1 + rank) for rank in range(1, self.standby.servers)]
        said = self.standby.show(servers=[Seat("held", LIFE), *others])
        for rank in range(2):
            said += self.standby.hello(rank)
        return said

    def init(self, store: str, key: str, values: list[float], call: int = 0) -> None:
        """Create a key by rank 0."""
        count = len(values)
        self.do(0, p.Declare(store, True, call, (p.Entry(key, 1, (count,), 0, count),)))
        self.pump()
        (piece,) = heard(self.said, p.Declared)[-1].places[0].pieces
        for at in range(count):  # by parts
            self.do(
                0,
                p.Load(piece.chunk, 1, (p.Run(piece.start + at, 1, call),)),
                torch.tensor(values[at : at + 1]),
            )
            self.pump()

    def do(self, rank: int, message: Message, *payload: torch.Tensor) -> list[Any]:
        """Let a worker ask the primary."""
        return self.primary.say(rank, message, *payload)


def push(key: p.Piece, number: int, *, pull: bool = True) -> p.Push:
    return p.Push(key.chunk, 1, (0,), 1.0, pull, (p.Run(key.start, key.size, number),))


def of(rank: int, message: p.Push) -> p.Push:
    return p.Push(message.chunk, message.dtype, (rank,), 1.0, message.pull, message.runs)


def trained() -> tuple[Pair, p.Piece]:
    """Return a pair whose primary has a key, an optimizer, and has closed one round before it has a standby."""
    pair = Pair()
    item = pair.primary
    item.open()
    item.init("w", [1.0, 2.0, 3.0])
    item.optimizer("sgd", lr=1.0, momentum=0.5)
    (piece,) = item.pieces["w"]
    for rank in range(2):
        pair.do(rank, of(rank, push(piece, 0)), torch.tensor([1.0, 0.0, 0.5]))
    assert item.values("w") == [-1.0, 2.0, 2.0]
    return pair, piece


@pytest.mark.spec("R493", "R494", "R497")
def test_a_standby_gets_all_that_there_is() -> None:
    pair, _ = trained()
    pair.do(0, p.Optimize("kv", 2, True, "sgd", {"lr": -1.0}))  # refused, to all
    pair.do(0, p.Rate("kv", 1, True, 0.5, 1))
    pair.level()
    ours, theirs = pair.primary.server, pair.standby.server
    assert pair.standby.server.context.stores["kv"].shards == ours.context.stores["kv"].shards
    (chunk,), (copy,) = ours.context.chunks.by_number.values(), theirs.context.chunks.by_number.values()
    assert torch.equal(chunk.buffer.tensor[:3], copy.buffer.tensor[:3])
    assert chunk.state is not None
    assert copy.state is not None
    assert all(torch.equal(row[:3], copy.state[name][:3]) for name, row in chunk.state.items())
    assert (copy.spans[0].version, copy.spans[0].step, copy.spans[0].pushed) == (1, 1, {0: 1, 1: 1})
    assert theirs.context.stores["kv"].hyper == ours.context.stores["kv"].hyper
    assert theirs.context.stores["kv"].sent_rate == ours.context.stores["kv"].sent_rate
    assert theirs.context.chunks.counts == ours.context.chunks.counts
    assert theirs.context.stores["kv"].refusals.kept(9) == ours.context.stores["kv"].refusals.kept(9)


@pytest.mark.spec("R495", "R496")
def test_answers_wait_for_the_standby_and_open_pushes_are_not_copied() -> None:
    pair, piece = trained()
    pair.level()
    pair.said.clear()
    gradient = torch.tensor([2.0, 0.0, 0.0])
    pair.do(0, of(0, push(piece, 1)), gradient)
    pair.pump()
    said = pair.do(0, of(0, push(piece, 2, pull=False)), gradient)
    assert heard(said, p.Ack), "nothing has changed that the standby lacks"
    assert not pair.do(1, of(1, push(piece, 1)), gradient), "the round is closed, and nobody is told"
    pair.pump()
    assert len(heard(pair.said, p.Pulled)) == 2
    (copy,) = pair.standby.server.context.chunks.by_number.values()
    assert copy.spans[0].version == 2
    assert copy.spans[0].pushed == {0: 2, 1: 2}, "rank 0 has pushed for round 2, which is open"
    assert pair.primary.span("w").pushed == {0: 3, 1: 2}


@pytest.mark.spec("R496")
def test_an_error_waits_for_the_standby_that_has_to_tell_the_other_ranks() -> None:
    pair, _ = trained()
    pair.level()
    pair.primary.server.control.budget.limit_bytes = 8
    said = pair.do(0, p.Declare("kv", True, 7, (p.Entry("big", 1, (99,), 0, 99),)))
    assert not heard(said, p.Error), "a standby without the refusal lets rank 1 wait for rank 0"
    pair.said.clear()
    pair.pump()
    assert heard(pair.said, p.Error)
    assert pair.standby.server.context.stores["kv"].refusals.kept(9)


@pytest.mark.spec("R498")
def test_a_promoted_standby_goes_on_and_the_former_primary_is_not_heard() -> None:
    pair, piece = trained()
    pair.level()
    gradient = torch.tensor([2.0, 0.0, 0.0])
    for rank in range(2):
        assert not heard(pair.do(rank, of(rank, push(piece, 1)), gradient), p.Pulled)
    (lost,) = [packet for packet in pair.primary.sent if isinstance(packet.message, p.CopyValues)]
    pair.standby.pieces = pair.primary.pieces
    welcomes = heard(pair.promote(), p.Welcome)
    assert [welcome.promoted for welcome in welcomes] == [True, True]
    assert not pair.standby.hear("server 0", lost), "the fence"  # type: ignore[arg-type]
    said = [item for rank in range(2) for item in pair.standby.say(rank, of(rank, push(piece, 1)), gradient)]
    assert len(heard(said, p.Pulled)) == 2
    assert pair.standby.values("w") == [-6.0, 2.0, 1.5]


@pytest.mark.spec("R498")
def test_a_standby_that_is_not_level_ends() -> None:
    pair, _ = trained()
    pair.name()
    pair.ask()
    pair.promote()
    (end,) = [effect for effect in pair.standby.notes if isinstance(effect, Exit)]
    assert (end.code, end.reason) == (75, "server 0 was lost before its standby had all of its values")


@pytest.mark.spec("R496")
def test_without_the_standby_answers_leave() -> None:
    pair, piece = trained()
    pair.level()
    gradient = torch.tensor([2.0, 0.0, 0.0])
    for rank in range(2):
        pair.do(rank, of(rank, push(piece, 1)), gradient)
    pair.said.clear()
    pair.primary.standby = 0
    assert not heard(pair.primary.show(servers=[Seat("held", 99)]), p.Pulled), "another has the seat"
    assert len(heard(pair.primary.show(), p.Pulled)) == 2
    late = pair.standby.server.member.packet(p.Followed(3))
    with pytest.raises(ProtocolError):
        pair.primary.server.admit(b"q", late.envelope, p.Followed)


@pytest.mark.spec("R494", "R502")
def test_lost_packets_are_sent_again_and_a_silent_standby_is_dismissed() -> None:
    pair, piece = trained()
    pair.level()
    item = pair.primary
    for rank in range(2):
        pair.do(rank, of(rank, push(piece, 1)), torch.tensor([2.0, 0.0, 0.0]))
    lost, item.sent = item.sent, []
    item.now += AGAIN_S + 0.1
    item.take(item.server.on_timer(item.now))
    assert item.sent == lost
    for packet in [*item.sent[1:], *item.sent[:1]]:  # not in their order
        pair.standby.hear("server 0", packet)  # type: ignore[arg-type]
    pair.standby.sent.clear()
    item.now += DISMISS_S
    item.take(item.server.on_timer(item.now))
    assert item.standings[-1].dismiss == LIFE
    assert item.standings[-1].reason == "it has acknowledged nothing for 3 s"
    item.take(item.server.on_timer(item.now + AGAIN_S))
    pair.pump()
    assert len(heard(pair.said, p.Pulled)) == 2
    pair.standby.hear("server 0", lost[0])  # type: ignore[arg-type]
    assert isinstance(pair.standby.sent[-1].message, p.Followed), "again"


@pytest.mark.spec("R656", "R658")
@pytest.mark.parametrize("pull", [False, True])
def test_late_push_counts_at_the_standby_if_it_is_sent_again(pull: bool) -> None:
    pair = Pair()
    item, gradient = pair.primary, torch.ones(3)
    item.open(late="next", quorum=1, grace_s=1.0, bundles=False)
    item.init("w", [1.0, 2.0, 3.0])
    item.optimizer("sgd", lr=1.0)
    pair.level()
    (piece,) = item.pieces["w"]
    first, late = [replace(of(rank, push(piece, 0, pull=pull)), since=(0,)) for rank in range(2)]
    assert not heard(pair.do(0, first, gradient), p.Pulled)
    item.now += 1
    pair.said += item.take(item.server.on_timer(item.now))
    pair.pump()
    assert item.span("w").version == 1
    for _ in range(2):  # a repetition is told the same
        (answer,) = heard(pair.do(1, late, gradient), p.Pulled if pull else p.Ack)
        assert answer.due == 2, "it counts in round 1"
    assert [told.due for told in heard(pair.said, p.Pulled)] == [1] * pull
    assert item.span("w").pushed == {0: 1, 1: 1}
    pair.promote()
    standby = pair.standby
    standby.pieces = item.pieces
    assert standby.span("w").pushed.get(1, 0) == 0, "nothing of round 1, whatever its number"
    (receipt,) = heard(standby.say(1, replace(late, pull=False), gradient), p.Ack)
    assert receipt.due == 2
    assert standby.span("w").rounds[0].ranks == {1}


@pytest.mark.spec("R631")
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("has_entered", [False, True])
def test_standby_knows_which_added_workers_have_entered(mode: str, *, has_entered: bool) -> None:
    """The second holder of rank 1 counts from its entry on, and its pushes are counted from 0."""
    pair = Pair(most=2)
    item = pair.primary
    item.open(mode)
    item.init("w", [1.0, 2.0, 3.0])
    item.optimizer("sgd", lr=1.0)
    (piece,) = item.pieces["w"]
    for rank in range(2):
        pair.do(rank, of(rank, push(piece, 0, pull=False)), torch.ones(3))
    item.show(w1="vacant")
    pair.level()
    pair.standby.show(w1="vacant")
    item.seats[1] = Seat("added", 60)
    item.show()
    item.hello(1)
    if has_entered:
        item.say(1, p.Return("kv", 0))
        pair.pump()
    pair.standby.seats = item.seats
    pair.promote()
    (span,) = pair.standby.server.context.chunks.by_number[piece.chunk].spans
    pair.standby.say(0, of(0, push(piece, 1, pull=False)), torch.ones(3))
    if mode == "sync":
        assert span.version == 2 - int(has_entered)
    else:
        pair.standby.say(1, of(1, push(piece, 0, pull=False)), torch.ones(3))
        assert span.version == 3 + int(has_entered)


@pytest.mark.spec("R578", "R632")
@pytest.mark.parametrize("has_entered", [None, False, True], ids=["with the seat", "starts", "has entered"])
def test_standby_knows_which_replacements_have_not_entered(*, has_entered: bool | None) -> None:
    """They are shown by the view that promotes the standby, or before."""
    pair = Pair()
    item = pair.primary
    item.open(on_worker_lost="shrink")
    item.init("w", [1.0, 2.0, 3.0])
    (piece,) = item.pieces["w"]
    pair.level()
    if has_entered is None:
        item.seats[1] = Seat("held", 60)
    else:
        item.replace(1)
        pair.pump()
    if has_entered:
        item.pull(1, "w", values=False)
        pair.pump()
    pair.standby.seats = item.seats
    pair.promote()
    pair.standby.say(0, push(piece, 0, pull=False), torch.ones(3))
    (span,) = pair.standby.server.context.chunks.by_number[piece.chunk].spans
    assert span.version == int(not has_entered)


@pytest.mark.spec("R634")
def test_standby_starts_clocks_anew_when_a_join_is_over() -> None:
    """Rank 0 has pushed more before the join: it waits for nobody at the standby, as at the server."""
    pair = Pair()
    item = pair.primary
    item.open("ssp", staleness=1)
    item.init("w", [1.0, 2.0, 3.0])
    item.optimizer("sgd", lr=1.0)
    (piece,) = item.pieces["w"]
    pair.level()
    for rank, number in ((1, 0), (0, 0), (0, 1), (0, 2)):
        pair.do(rank, of(rank, push(piece, number, pull=False)), torch.ones(3))
    pair.pump()
    for message in (p.Join("kv", 1, waits=True), p.Return("kv", 1)):
        for rank in range(2):
            pair.do(rank, message)
    pair.pump()
    pair.promote()
    (span,) = pair.standby.server.context.chunks.by_number[piece.chunk].spans
    assert span.clock_from == {0: 3, 1: 1}


@pytest.mark.spec("R634")
@pytest.mark.parametrize(
    ("on_worker_lost", "has_entered"), [("wait", False), ("shrink", False), ("shrink", True)]
)
def test_standby_starts_the_clock_of_a_replacement(on_worker_lost: str, *, has_entered: bool) -> None:
    """No value moves with it. Rank 0 waits for none of the pushes that rank 1 makes again."""
    pair = Pair()
    item = pair.primary
    item.open("ssp", staleness=1, on_worker_lost=on_worker_lost)
    item.init("w", [1.0, 2.0, 3.0])
    item.optimizer("sgd", lr=1.0)
    (piece,) = item.pieces["w"]
    pair.level()
    for rank, number in ((1, 0), (0, 0), (0, 1), (0, 2)):
        pair.do(rank, of(rank, push(piece, number, pull=False)), torch.ones(3))
    pair.pump()
    item.replace(1)
    pair.pump()
    if has_entered:
        item.pull(1, "w", values=False)
        pair.pump()
    pair.standby.seats = item.seats
    pair.promote()
    (span,) = pair.standby.server.context.chunks.by_number[piece.chunk].spans
    assert span.head_start == {1: 2}


@pytest.mark.spec("R496", "R633")
def test_pushes_without_rounds_gather_while_a_copy_is_on_its_way() -> None:
    pair = Pair()
    item = pair.primary
    item.open("async")
    item.init("w", [1.0, 2.0, 3.0])
    item.optimizer("sgd", lr=1.0)
    (piece,) = item.pieces["w"]
    pair.level()

    def copies() -> list[dict[str, int]]:
        return [sent.message.pushed for sent in item.sent if isinstance(sent.message, p.CopyValues)]

    said = pair.do(0, of(0, push(piece, 0, pull=False)), torch.ones(3))
    for rank, number in ((1, 0), (0, 1), (0, 2)):
        said += pair.do(rank, of(rank, push(piece, number, pull=False)), torch.ones(3))
    assert copies() == [{"0": 1}]
    pair.forth()
    pair.back()
    assert copies() == [{"0": 3, "1": 1}]
    assert len(heard(said + pair.said, p.Ack)) == 1, "the standby lacks the others"
    pair.pump()
    assert sum([len(ack.receipts) for ack in heard(said + pair.said, p.Ack)]) == 4


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_standby_tells_of_an_update_that_was_dropped(mode: str) -> None:
    pair = Pair()
    item = pair.primary
    item.open(mode, on_nonfinite="error")
    item.init("w", [1.0, 2.0, 3.0])
    item.optimizer("sgd", lr=1.0)
    (piece,) = item.pieces["w"]
    pair.level()
    for rank in range(2):
        values = torch.tensor([1.0, float("nan") if rank else 0.0, 0.5])
        pair.do(rank, of(rank, push(piece, 0, pull=False)), values)
    pair.pump()
    pair.promote()
    asks = (p.Ask(piece.start, piece.size, 1, 0),)
    for rank in range(2):
        (pulled,) = heard(pair.standby.say(rank, p.Pull(piece.chunk, True, asks)), p.Pulled)
        told = (Dropped(piece.start, 0, 1, (1,)),) if mode == "sync" or rank else ()
        assert pulled.dropped == told
    pair.standby.pieces = item.pieces
    assert pair.standby.values("w") == ([1.0, 2.0, 3.0] if mode == "sync" else [0.0, 2.0, 2.5])


@pytest.mark.parametrize("reads", ["keys", "rows"])
def test_standby_knows_what_each_worker_has_read(reads: str) -> None:
    pair = Pair()
    item = pair.primary
    item.open("async")
    item.declare("w", torch.tensor([1.0, 2.0, 3.0]), shape=(3, 1))
    item.load("w", torch.tensor([1.0, 2.0, 3.0]))
    item.optimizer("dcasgd", lr=0.5, momentum=0.5)
    (piece,) = item.pieces["w"]
    pair.level()
    for rank, number in ((0, 0), (1, 0), (0, 1)):
        if reads == "keys":
            asks = (p.Ask(piece.start, piece.size, 0, 0),)
            pair.do(rank, p.Pull(piece.chunk, True, asks))
        else:
            pair.do(rank, p.PullRows("kv", "w", 0, 0, 2), torch.tensor([0, 2]))
        pair.pump()
        pair.do(1 - rank, of(1 - rank, push(piece, number, pull=False)), torch.tensor([1.0, 2.0, 0.5]))
        pair.pump()
    assert len(heard(pair.said, p.Pulled if reads == "keys" else p.PulledRows)) == 3
    ends = [stage.server.context.chunks.by_number[piece.chunk] for stage in (item, pair.standby)]
    first, other = [{name: row[:3].tolist() for name, row in (chunk.state or {}).items()} for chunk in ends]
    assert first == other
    assert {"velocity", "read.0", "read.1"} <= first.keys()
    assert alike(pair)


def test_stores_and_keys_come_and_go() -> None:
    pair, _ = trained()
    pair.level()
    first, other = pair.primary, pair.standby.server.context
    pair.do(0, opening("sync", "second"))
    pair.init("second", "b", [1.0, 2.0])
    assert sorted(other.stores) == ["kv", "second"]
    pair.init("second", "b", [1.0, 2.0, 5.0], call=1)  # of another shape, elsewhere
    assert other.stores["second"].shards["b"].count == 3
    assert other.chunks.counts == first.server.context.chunks.counts
    for rank in range(2):
        pair.do(rank, p.Close((p.StoreLife("second", 0),)))
    pair.do(0, opening("sync", "third"))
    pair.pump()
    assert sorted(other.stores) == ["kv", "third"]
    assert other.chunks.counts == first.server.context.chunks.counts
    pair.standby.server.check()


def test_a_copy_that_cannot_be_held_is_not_level() -> None:
    pair, _ = trained()
    pair.name()
    pair.ask()
    packet = pair.standby.server.member.packet
    pair.pump()
    bad = p.CopyValues(99, 1, 0, 1, 0, 0, {}, {}, {}, ())
    number = pair.standby.server._follower.number + 1  # type: ignore[union-attr]
    envelope = pair.primary.server.member.envelope(number)
    pair.standby.hear("server 0", Packet(envelope, bad, (memoryview(bytes(4)),)))  # type: ignore[arg-type]
    assert "server 0 has no chunk 99" in pair.standby.standings[-1].reason
    assert not pair.standby.standings[-1].level
    assert packet(p.Follow()).envelope.incarnation == LIFE


def test_a_copy_beyond_the_memory_limit_of_the_standby_is_refused() -> None:
    pair, _ = trained()
    pair.standby.server.control.budget.limit_bytes = 8
    pair.name()
    pair.ask()
    pair.pump()
    assert "the copy cannot be held: no room for key 'w' of store 'kv'" in pair.standby.standings[-1].reason
    assert not pair.standby.server.context.chunks.by_number
    assert not any(standing.level for standing in pair.standby.standings)


@pytest.mark.spec("R493")
def test_a_new_epoch_begins_another_copy() -> None:
    pair, _ = trained()
    pair.level()
    pair.standby.show(epoch=1)
    assert not pair.standby.standings[-1].level
    assert not pair.standby.server.context.stores
    pair.standby.show(servers=[Seat("lost", 1)], epoch=1)
    pair.standby.show(servers=[Seat("held", 3)], epoch=1)
    connects = [effect for effect in pair.standby.notes if isinstance(effect, Connect)]
    assert [effect.endpoint for effect in connects if effect.to == "server 0"] == ["tcp://s0:1", "tcp://s0:3"]


def test_a_replacement_is_told_that_it_owes_what_only_the_primary_has() -> None:
    pair, piece = trained()
    pair.level()
    pair.do(0, of(0, push(piece, 1, pull=False)), torch.tensor([2.0, 0.0, 0.0]))
    pair.pump()
    pair.said += pair.primary.replace(0)
    pair.pump()
    said = pair.do(0, p.Pull(piece.chunk, False, (p.Ask(piece.start, piece.size, 0, 0),)))
    ((stand,),) = [pulled.runs for pulled in heard(said, p.Pulled)]
    assert stand.owed == 1
    assert heard(pair.do(0, of(0, push(piece, 1, pull=False)), torch.tensor([2.0, 0.0, 0.0])), p.Ack)
    said = pair.do(0, p.Pull(piece.chunk, False, (p.Ask(piece.start, piece.size, 0, 0),)))
    assert [pulled.runs[0].owed for pulled in heard(said, p.Pulled)] == [2]


@pytest.mark.spec("R493")
def test_a_server_whose_stores_are_replaced_begins_another_copy() -> None:
    pair, piece = trained()
    pair.level()
    for rank in range(2):
        pair.do(rank, of(rank, push(piece, 1)), torch.tensor([2.0, 0.0, 0.0]))
    assert not pair.do(0, p.Rate("kv", 1, True, 0.5, 2)), "it waits, too"
    server = pair.primary.server
    server._reset({})
    pair.said.clear()
    pair.primary.take(server._flush())
    pair.pump()
    assert not heard(pair.said, p.Pulled), "what was to be answered is void"
    assert [standing.level for standing in pair.standby.standings[-2:]] == [False, True]
    assert not pair.standby.server.context.stores
    assert pair.standby.standings[-1].level


@pytest.mark.spec("R494")
def test_nobody_but_the_standby_is_heard_and_states_are_copied() -> None:
    pair, piece = trained()
    pair.level()
    replicator = pair.primary.server._replicator
    assert replicator is not None
    replicator.follow(b"x", LIFE + 9, 0.0)
    replicator.hear(b"x", LIFE + 9, 1, 0.0)
    replicator.append(Note("info", "said at once"))
    envelope = pair.standby.server.member.envelope(1)
    assert not pair.primary.hear(b"q", Packet(envelope, p.CopyLevel(), ())), "only a primary says that"
    state = torch.tensor([4.0, 5.0, 6.0])
    (chunk,) = pair.primary.server.context.chunks.by_number.values()
    assert chunk.state is not None
    fields = tuple([p.Field(name, 1, 3) for name in chunk.state])
    pair.do(0, p.SetState(piece.chunk, piece.start, piece.size, 7, fields), *[state] * len(fields))
    pair.pump()
    (copy,) = pair.standby.server.context.chunks.by_number.values()
    assert copy.state is not None
    assert all(row[:3].tolist() == [4.0, 5.0, 6.0] for row in copy.state.values())
    assert copy.spans[0].step == 7
    replicator.note_all(values=True)
    pair.primary.take(pair.primary.server._flush())
    assert any(isinstance(packet.message, p.CopyValues) for packet in pair.primary.sent)


def alike(pair: Pair) -> bool:
    """Return whether both ends of a copy have the same keys, at the same places."""
    ends = []
    for stage in (pair.primary, pair.standby):
        context = stage.server.context
        chunks = {
            number: (chunk.keys, chunk.unused(), chunk.buffer.tensor[: chunk.used].tolist())
            for number, chunk in context.chunks.by_number.items()
        }
        ends.append(({name: store.shards for name, store in context.stores.items()}, chunks))
    counts = [+stage.server.context.chunks.counts["kv"] for stage in (pair.primary, pair.standby)]
    return ends[0] == ends[1] and counts[0] == counts[1]


LARGE = 9000
"""Elements that have a chunk of their own: more than half of the smallest."""
SMALL_CHUNKS = {"chunk_bytes": 64 << 10}


def make(pair: Pair, values: torch.Tensor, call: int = 0) -> None:
    """Give key ``w`` these values, and their shape; the standby may hear of it later."""
    pair.said.clear()
    pair.do(0, p.Declare("kv", True, call, (p.Entry("w", 1, (len(values),), 0, len(values)),)))
    (piece,) = pair.primary.server.context.stores["kv"].shards["w"].pieces
    pair.do(0, p.Load(piece.chunk, 1, (p.Run(piece.start, piece.size, call),)), values)


def test_a_chunk_that_is_freed_is_freed_at_the_standby() -> None:
    pair = Pair()
    pair.primary.open(**SMALL_CHUNKS)
    make(pair, torch.arange(1.0, LARGE))
    pair.level()
    (before,) = pair.standby.server.context.chunks.by_number
    make(pair, torch.arange(2.0, LARGE), 1)
    pair.pump()
    assert before not in pair.standby.server.context.chunks.by_number
    assert alike(pair)


def test_keys_and_stores_that_end_before_there_is_room_are_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair()
    pair.primary.open(**SMALL_CHUNKS)
    make(pair, torch.arange(1.0, LARGE))
    pair.level()
    monkeypatch.setattr(primary, "WINDOW_BYTES", 1)
    for call in (1, 2, 3):
        make(pair, torch.arange(1.0 + call, LARGE), call)
    pair.do(0, opening("sync", "brief"))
    pair.do(0, p.Declare("brief", True, 0, (p.Entry("b", 1, (2,), 0, 2),)))
    for rank in range(2):
        pair.do(rank, p.Close((p.StoreLife("brief", 0),)))
    pair.do(0, opening("sync", "third"))  # and the one that nobody uses is dropped
    sent = [packet.message for packet in pair.primary.sent]
    assert not any(isinstance(message, p.Open) for message in sent), "there is no room yet"
    pair.pump()
    assert alike(pair)
    assert sorted(pair.standby.server.context.stores) == ["kv", "third"]


def test_a_key_that_lies_on_another_server_now_is_gone_at_the_standby() -> None:
    pair = Pair(servers=2)
    pair.primary.open()
    names = [name for name in ("u", "v", "w", "x") if home(name, 2) == 1]
    pair.primary.init(names[0], [1.0, 2.0])
    pair.primary.init("kept", [3.0])
    pair.level()
    pair.do(0, p.Declare("kv", True, 1, (p.Entry(names[0], 1, (2,), 0, 0),)))
    pair.pump()
    assert [*pair.standby.server.context.stores["kv"].shards] == ["kept"]
    assert alike(pair)


@pytest.mark.spec("R557")
@pytest.mark.parametrize("has_optimizer", [True, False])
def test_the_residuals_of_values_that_are_pulled_compressed_are_copied(has_optimizer: bool) -> None:
    pair, piece = trained()
    if not has_optimizer:
        pair = Pair()
        pair.primary.open()
        pair.primary.init("w", [1.0, 2.0, 3.0])
        (piece,) = pair.primary.pieces["w"]
    first = 1 if has_optimizer else 0

    def round_(stage: Stage, number: int, back: CodecSpec | None) -> list[float]:
        for rank in range(2):
            ask = replace(of(rank, push(piece, number)), back=back)
            stage.say(rank, ask, torch.tensor([2.0, 0.37, -0.013 * number]))
        return stage.values("w")

    round_(pair.primary, first, CodecSpec(INT8))
    pair.level()
    round_(pair.primary, first + 1, CodecSpec(INT8))
    pair.pump()
    ends = [stage.server.context.chunks.by_number[piece.chunk].back for stage in (pair.primary, pair.standby)]
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[0].residual[:3].any()
    assert torch.equal(ends[0].residual[:3], ends[1].residual[:3])
    pair.promote()
    pair.primary.standby = 0
    pair.primary.show()
    pair.standby.pieces = pair.primary.pieces
    for number, back in ((first + 2, CodecSpec(INT8)), (first + 3, None), (first + 4, None)):
        ours, theirs = [round_(stage, number, back) for stage in (pair.primary, pair.standby)]
        assert ours == theirs


@pytest.mark.spec("R557")
def test_residuals_that_are_spent_are_gone_at_the_standby() -> None:
    pair, piece = trained()
    pair.level()
    for number, back in ((1, CodecSpec(INT8)), (2, None)):
        for rank in range(2):
            ask = replace(of(rank, push(piece, number)), back=back)
            pair.do(rank, ask, torch.tensor([2.0, 0.37, -0.013]))
        pair.pump()
    (chunk,) = pair.standby.server.context.chunks.by_number.values()
    assert chunk.back is not None
    assert not chunk.back.owes(0, 3)
    assert not chunk.back.residual.any()


@pytest.mark.spec("R495")
def test_a_round_that_waits_for_another_server_is_not_copied() -> None:
    pair = Pair(servers=2)
    first, other = pair.primary, pair.standby
    first.open(average=True)
    first.init("w", [0.0])
    first.optimizer("sgd", lr=1.0, clip_global_norm=5.0)
    (piece,) = first.pieces["w"]
    step = p.StepPart(7, 0, 1, (0, 1))
    pushes = [replace(of(rank, push(piece, 0, pull=False)), step=step) for rank in range(2)]
    for rank, message in enumerate(pushes):
        pair.do(rank, message, torch.tensor([-6.0]))
    pair.level()
    (copy,) = other.server.context.chunks.by_number.values()
    assert (copy.spans[0].version, copy.spans[0].pushed) == (0, {0: 0, 1: 0})
    pair.promote()
    for rank, message in enumerate(pushes):
        other.say(rank, message, torch.tensor([-6.0]))
    other.pieces = first.pieces
    for stage in (first, other):
        stage.other(1, p.StepNorm("kv", 7, 0, 64.0, None))
        assert stage.values("w") == pytest.approx([3.0], abs=1e-5)  # 6 and 8: the norm is 10


def test_a_replacement_owes_nothing_where_each_push_is_applied_at_once() -> None:
    pair = Pair()
    pair.primary.open("async")
    pair.primary.init("w", [1.0, 2.0, 3.0])
    pair.primary.optimizer("sgd", lr=1.0)
    (piece,) = pair.primary.pieces["w"]
    pair.level()
    for rank, number in ((0, 0), (1, 0), (1, 1)):
        pair.do(rank, of(rank, push(piece, number, pull=False)), torch.tensor([1.0, 0.0, 0.5]))
    pair.said += pair.primary.replace(0)
    pair.pump()
    pair.said.clear()
    pair.said += pair.do(0, p.Pull(piece.chunk, True, (p.Ask(piece.start, piece.size, 0, 0),)))
    pair.pump()
    (pulled,) = heard(pair.said, p.Pulled)
    assert [(stand.version, stand.owed) for stand in pulled.runs] == [(3, 1)]
    pair.promote()
    said = pair.standby.say(1, of(1, push(piece, 1, pull=False)), torch.tensor([1.0, 0.0, 0.5]))
    assert heard(said, p.Ack)
    pair.standby.pieces = pair.primary.pieces
    assert pair.standby.values("w") == pair.primary.values("w") == [-2.0, 2.0, 1.5]


def test_a_view_that_changes_nothing_leaves_the_copy_level() -> None:
    pair, _ = trained()
    pair.level()
    pair.standby.show()
    assert pair.standby.server.context.stores
    assert not pair.standby.sent, "it asks for nothing"
    assert heard(pair.promote(), p.Welcome)


def test_another_rate_keeps_the_state_of_the_optimizer_at_the_standby() -> None:
    pair, piece = trained()
    pair.level()
    pair.do(0, p.Rate("kv", 1, True, 0.25, 1))
    pair.pump()
    pair.promote()
    first, other = pair.primary, pair.standby
    other.pieces = first.pieces
    first.standby = 0
    first.show()
    for stage in (first, other):
        for rank in range(2):
            stage.say(rank, of(rank, push(piece, 1)), torch.tensor([2.0, 0.0, 0.0]))
    assert other.values("w") == first.values("w")


@pytest.mark.spec("R494", "R496")
def test_a_copy_that_cannot_be_held_stops_no_answer_and_takes_no_seat() -> None:
    pair, _ = trained()
    pair.level()
    pair.standby.server.control.budget.limit_bytes = 8
    pair.do(0, p.Declare("kv", True, 0, (p.Entry("b", 1, (9,), 0, 9),)))
    pair.pump()
    assert "the copy cannot be held: no room for key 'b'" in pair.standby.standings[-1].reason
    assert not pair.standby.standings[-1].level
    pair.said.clear()
    pair.primary.now += AGAIN_S + 0.1
    pair.primary.take(pair.primary.server.on_timer(pair.primary.now))
    pair.pump()
    pair.said += pair.primary.take(pair.primary.server._flush())
    assert heard(pair.said, p.Declared)
    pair.promote()
    (end,) = [effect for effect in pair.standby.notes if isinstance(effect, Exit)]
    assert end.reason == "server 0 was lost before its standby had all of its values"


@pytest.mark.spec("R493")
def test_a_refusal_counts_for_all_at_the_standby_too() -> None:
    pair, _ = trained()
    pair.level()
    pair.primary.server.control.budget.limit_bytes = 8
    entry = p.Entry("b", 1, (9,), 0, 9)
    assert not pair.do(0, p.Declare("kv", True, 0, (entry,))), "the standby does not know of it yet"
    pair.pump()
    (told,) = heard(pair.said, p.Error)
    pair.promote()
    (again,) = heard(pair.standby.say(1, p.Declare("kv", False, 0, (entry,))), p.Error)
    assert "no room for key 'b'" in told.text
    assert (again.code, again.text) == (told.code, told.text)


@pytest.mark.spec("R493", "R496")
def test_values_of_a_checkpoint_are_copied_before_rank_0_is_told() -> None:
    pair = Pair(every_s=0.0)
    item = pair.primary
    item.open(on_nonfinite="error")
    item.init("w", [1.0, 2.0, 3.0])
    image, release = item.server.control.snapshot()
    (piece,) = item.pieces["w"]
    pair.level()
    for number, last in enumerate((7.0, float("nan"))):
        for rank in range(2):
            pair.do(rank, of(rank, push(piece, number)), torch.tensor([5.0, 6.0, last]))
    pair.pump()
    drops = pair.standby.server.context.stores["kv"].drops
    assert drops is not None
    assert drops.within(piece.chunk, 0, 3)
    pair.said.clear()
    pair.do(0, p.Revive("kv", "best", 7))
    (read,) = [order for order in item.orders() if isinstance(order, Read)]
    assert not heard(item.disk(Loaded(image, read.for_whom)), p.Revived)
    release()
    pair.pump()
    assert heard(pair.said, p.Revived)
    assert item.values("w") == [1.0, 2.0, 3.0]
    assert alike(pair)
    assert pair.standby.server.context.stores["kv"].restored == 7
    assert not drops.within(piece.chunk, 0, 3), "round 1 is to be made again"


@pytest.mark.spec("R493")
def test_a_standby_drops_a_store_that_has_ended_when_the_primary_does() -> None:
    pair, _ = trained()
    pair.level()
    first, other = pair.primary, pair.standby
    for rank in range(2):
        pair.do(rank, p.Close((p.StoreLife("kv", 0),)))
    pair.pump()
    for stage in (other, first):  # the clock of the standby is ahead
        for _ in range(2):
            stage.now += KEPT_S + 1
            stage.scheduler(stage.server.member.view)
            stage.take(stage.server.on_timer(stage.now))
        if stage is other:
            assert "kv" in other.server.context.stores
    assert not first.server.context.stores
    pair.pump()
    assert not other.server.context.stores
    assert pair.standby.standings[-1].level


def test_a_former_life_of_the_primary_is_not_heard() -> None:
    pair, piece = trained()
    pair.level()
    for rank in range(2):
        pair.do(rank, of(rank, push(piece, 1)), torch.tensor([2.0, 0.0, 0.0]))
    late, pair.primary.sent = pair.primary.sent, []
    assert any(isinstance(packet.message, p.CopyValues) for packet in late)
    pair.standby.show(servers=[Seat("held", 3)])
    pair.standby.sent.clear()
    for packet in late:
        assert not pair.standby.hear("server 0", packet)  # type: ignore[arg-type]
    assert not pair.standby.sent, "it acknowledges nothing"
    assert not pair.standby.server.context.stores
