"""A server copies published versions to its standby, so that a reader sees none go back or change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvps import protocol as p
from kvps.core.server.publications import LEASE_S
from kvps.core.server.replicas import primary
from kvps.core.server.replicas.published import PublishedChanges
from kvps.errors import KeyNotFound
from kvps.protocol.envelope import Envelope, Message, Role
from kvps.tensors import from_frame
from tests.support.server_harness import ServerStage, greeting, heard, over
from tests.unit.core.server.test_publications import BFLOAT16, LIFE, MANIFEST
from tests.unit.core.server.test_replicas import of, push, trained


class Published:
    """A primary with a key and its standby; rank 0 publishes, and readers ask either."""

    def __init__(self) -> None:
        self.pair, self.piece = trained()
        self.round = 1

    def train(self) -> None:
        """Close a round, so that the values are others."""
        for rank in range(2):
            message = of(rank, push(self.piece, self.round))
            self.pair.do(rank, message, torch.tensor([1.0, 2.0, self.round]))
        self.round += 1

    def freeze(self, number: int, as_dtype: int = 0, keep: int = 2) -> list[Any]:
        return self.pair.do(0, p.Freeze("kv", "policy", number, keep, as_dtype, (self.piece.chunk,)))

    def put(self, number: int, *values: float, keep: int = 2) -> list[Any]:
        row = torch.tensor(values)
        message = p.Put("kv", "policy", number, keep, 100, row.nbytes)
        return self.pair.do(0, message, *([row] if len(row) else []))

    def announce(self, number: int, keep: int = 2) -> list[Any]:
        return self.pair.do(0, p.Announce("kv", "policy", number, keep, 2), MANIFEST)

    def publish(self, number: int, *values: float) -> None:
        self.freeze(number)
        self.put(number, *values)
        self.announce(number)
        self.pair.pump()

    @property
    def state(self) -> tuple[Any, ...]:
        """What the two ends have."""
        found = []
        for stage in (self.pair.primary, self.pair.standby):
            publication = stage.server.publications.by_name["policy"]
            versions = {
                number: (
                    version.manifest and bytes(version.manifest),
                    version.completed_at is None,
                    {at: self.octets(block) for at, block in version.blocks.items()},
                )
                for number, version in publication.versions.items()
            }
            state = publication.store, publication.keep, publication.last, [*publication.announced]
            found.append((state, versions))
        return tuple(found)

    def octets(self, block: Any) -> tuple[str, str, bytes]:
        size = self.piece.size * 4 if block.dtype == "float32" else len(block.buffer.octets)
        return block.dtype, block.as_dtype, bytes(block.buffer.octets[:size])


def reader(stage: ServerStage, message: Message, rank: int = 0) -> list[Any]:
    envelope = Envelope(stage.job, 0, Role.READER, rank, LIFE, 1)
    return stage.hear(b"r%d" % rank, over(envelope, message))


@pytest.mark.spec("R552")
def test_versions_of_before_and_after_it_is_level_are_at_the_standby(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primary, "WINDOW_BYTES", 20)
    both = Published()
    for number in (1, 2, 3):
        both.freeze(number, BFLOAT16)
        both.put(number, 5.0, float(number))
        both.announce(number)
        both.train()
    both.put(4)
    both.pair.level()
    ours, theirs = both.state
    assert ours == theirs
    assert [*ours[1]] == [2, 3, 4]
    both.announce(4)
    for number in (5, 6):
        both.publish(number, 1.0, 2.0)
        both.train()
        both.pair.pump()
    ours, theirs = both.state
    assert ours == theirs
    assert ours[0][2:] == (6, [1, 2, 3, 4, 5, 6])
    bytes_ = [stage.server.control.budget.publications for stage in (both.pair.primary, both.pair.standby)]
    assert bytes_[1] == bytes_[0], "a buffer that is a block and the values counts once"


@pytest.mark.spec("R553")
def test_values_that_both_have_are_not_sent_again() -> None:
    both = Published()
    both.pair.level()
    both.freeze(1)
    both.announce(1)
    blocks = [packet for packet in both.pair.primary.sent if isinstance(packet.message, p.CopyBlock)]
    assert [packet.payload for packet in blocks] == [()]
    both.pair.pump()
    both.train()
    both.pair.pump()
    assert both.state[0] == both.state[1]


@pytest.mark.spec("R552")
def test_block_of_the_standby_stays_when_the_primary_writes_to_the_memory_it_came_from() -> None:
    both = Published()
    both.freeze(1)
    both.announce(1)
    both.train()
    both.pair.level()
    (block,) = both.pair.standby.server.publications.by_name["policy"].versions[1].blocks.values()
    before = both.octets(block)
    both.freeze(2, keep=1)
    both.announce(2, keep=1)
    both.train()  # into the memory of version 1, which is gone here; the standby has not heard of that
    assert both.octets(block) == before


@pytest.mark.spec("R554")
def test_readers_hear_of_a_version_when_the_standby_has_it() -> None:
    both = Published()
    item = both.pair.primary
    both.pair.level()
    reader(item, greeting(role=4))
    assert heard(reader(item, p.Watch("policy", 0)), p.VersionIs)
    both.freeze(1)
    both.pair.pump()
    assert not heard(both.announce(1), p.VersionIs)
    both.pair.said.clear()
    both.pair.pump()
    assert [answer.number for answer in heard(both.pair.said, p.VersionIs)] == [1]


@pytest.mark.spec("R552", "R555")
def test_a_promoted_standby_serves_what_readers_use() -> None:
    both = Published()
    both.pair.level()
    first, other = both.pair.primary, both.pair.standby
    both.publish(1, 7.0, 8.0)
    reader(first, greeting(role=4))
    reader(first, p.Retain("policy", 1, True))
    both.train()
    for number in (2, 3, 4):
        both.publish(number, 1.0)
    other.now += 6
    other.take(other.server.on_timer(other.now))
    both.pair.promote()
    assert other.server.publications.by_name["policy"].newest == 4
    assert heard(other.say(0, p.LastVersion("kv", "policy", 0)), p.VersionIs)[0].number == 4
    reader(other, greeting(role=4))
    (said,) = reader(other, p.Read("policy", 1, 100, 0, 8))
    assert from_frame(said.payload[0], "float32").tolist() == [7.0, 8.0]
    other.now += LEASE_S - 1
    other.take(other.server.on_timer(other.now))
    (said,) = reader(other, p.Read("policy", 1, both.piece.chunk, 0, 12))
    assert from_frame(said.payload[0], "float32").tolist() == [-1.0, 2.0, 2.0]
    other.now += 9
    for _ in range(2):
        other.take(other.server.on_timer(other.now))
    assert sorted(other.server.publications.by_name["policy"].versions) == [1, 3, 4]
    (said,) = reader(other, p.Read("policy", 2, 100, 0, 4))
    assert isinstance(said.message, p.Error)
    assert said.message.code == KeyNotFound.code
    (number,) = [answer.number for answer in heard(reader(other, p.Watch("policy", 3)), p.VersionIs)]
    assert number == 4


@pytest.mark.spec("R555")
def test_versions_of_before_the_loss_stay_for_readers_that_come_late() -> None:
    both = Published()
    both.pair.level()
    both.publish(1, 7.0, 8.0)
    reader(both.pair.primary, greeting(role=4))
    reader(both.pair.primary, p.Retain("policy", 1, True))
    for number in (2, 3, 4):
        both.publish(number, 1.0)
    both.pair.promote()
    other = both.pair.primary = both.pair.standby
    other.now += 0.1
    for number in range(5, 25):
        both.freeze(number)
        both.put(number, 1.0)
        both.announce(number)
    assert sorted(other.server.publications.by_name["policy"].versions) == [1, 3, 4, 23, 24]
    reader(other, greeting(role=4))
    (said,) = reader(other, p.Read("policy", 1, 100, 0, 8))
    assert from_frame(said.payload[0], "float32").tolist() == [7.0, 8.0]


@pytest.mark.spec("R552")
def test_a_new_copy_begins_without_the_versions_of_the_last() -> None:
    both = Published()
    both.pair.level()
    both.publish(1, 7.0)
    server = both.pair.primary.server
    server._reset({})  # publications stay
    both.pair.primary.take(server._flush())
    both.pair.pump()
    assert both.pair.standby.standings[-1].level
    assert both.state[0] == both.state[1]


@pytest.mark.spec("R552")
def test_versions_beyond_the_memory_of_the_standby_keep_it_from_being_level() -> None:
    both = Published()
    both.put(1, *[1.0] * 100_000)
    both.pair.standby.server.control.budget.limit_bytes = 200_000
    both.pair.name()
    both.pair.ask()
    both.pair.pump()
    assert "the copy of version 1 of publication 'policy'" in both.pair.standby.standings[-1].reason


def test_nothing_follows_a_block_that_has_no_room() -> None:
    published = Published()
    published.freeze(1)
    server = published.pair.primary.server
    left = PublishedChanges().messages(server.publications, server.context.chunks, lambda: False)
    assert [*left] == [None]
