"""Publications on a server: versions that readers read, and that no reader can change, keep or hold up."""

import hashlib
import math
import zlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvps import protocol as p
from kvps.core.deltas import apply
from kvps.core.effects import Note
from kvps.core.limits import Limits
from kvps.core.relay import KEPT_S
from kvps.core.server import publications, readers
from kvps.core.server.publications import LEASE_S, SETTLE_AFTER_S
from kvps.core.server.readers import READERS_MAX, WATCHES_MAX
from kvps.core.server.server import LOOK_EVERY_S
from kvps.errors import ConfigError, KeyNotFound, Mismatch, Overload, ProtocolError
from kvps.protocol.envelope import Envelope, Message, Role
from kvps.protocol.publications import READ_BYTES_MAX
from kvps.tensors import from_frame, to_frame
from tests.support.server_harness import Said, ServerStage, greeting, heard, over, refusal

LIFE = 2**40
BFLOAT16 = 4
MANIFEST = torch.tensor(list(b"[]"), dtype=torch.uint8)


class Stage(ServerStage):
    """A server with an open store, a publisher at rank 0, and readers."""

    seq = 0

    def reader(self, rank: int, message: Message, life: int = LIFE, job: bytes | None = None) -> list[Said]:
        self.seq += 1
        envelope = Envelope(job or self.job, 0, Role.READER, rank, life, self.seq)
        return self.hear(b"r%d" % rank, over(envelope, message))

    def greet(self, rank: int) -> None:
        assert heard(self.reader(rank, greeting(role=4, rank=rank)), p.Welcome)

    def put(self, number: int, *values: float, block: int = 0, keep: int = 2, **fields: str) -> list[Said]:
        row = torch.tensor(values)
        message = replace(p.Put("kv", "policy", number, keep, block, row.nbytes), **fields)
        return self.say(0, message, *([row] if len(row) else []))

    def freeze(
        self, number: int, *chunks: int, as_dtype: int = 0, keep: int = 2, rank: int = 0
    ) -> list[Said]:
        return self.say(rank, p.Freeze("kv", "policy", number, keep, as_dtype, chunks))

    def announce(self, number: int, keep: int = 2) -> list[Said]:
        return self.say(0, p.Announce("kv", "policy", number, keep, 2), MANIFEST)

    def publish(self, number: int, *values: float, keep: int = 2) -> None:
        assert heard(self.put(number, *values, keep=keep), p.Done)
        assert heard(self.announce(number, keep), p.Done)

    def read(self, number: int, block: int, size: int, start: int = 0, rank: int = 0) -> list[Said]:
        return self.reader(rank, p.Read("policy", number, block, start, size))

    def changes(
        self, number: int, base: int, size: int, start: int = 0, block: int = 0, **fields: object
    ) -> Said:
        message = p.ReadChanges("policy", number, block, start, size, base, 4)
        (said,) = self.reader(0, replace(message, **fields))  # type: ignore[arg-type]
        return said

    def floats(self, number: int, block: int, size: int, start: int = 0) -> list[float]:
        (said,) = self.read(number, block, size, start)
        assert isinstance(said.message, p.Octets), said
        return from_frame(said.payload[0], "float32").tolist()

    @property
    def held(self) -> list[int]:
        return sorted(self.server.publications.by_name["policy"].versions)

    @property
    def bytes(self) -> int:
        return self.server.control.budget.publications


def stage(**options: object) -> Stage:
    server = Stage(**options)  # type: ignore[arg-type]
    server.open()
    server.greet(0)
    return server


def fails(said: list[Said], error: type[Exception], text: str) -> None:
    found = refusal(said)
    assert found.startswith(f"{error.__name__}: ")
    assert text in found


# --- versions -------------------------------------------------------------------------------------


@pytest.mark.spec("R543", "R544")
def test_frozen_values_do_not_change_and_are_read_in_the_published_type() -> None:
    server = stage()
    server.init("w", [1.0, 2.0, 3.0, 4.0])
    server.init("n", torch.tensor([7, 8]))
    chunks = [server.pieces[key][0].chunk for key in ("w", "n")]
    for _ in range(2):
        assert heard(server.freeze(1, *chunks, as_dtype=BFLOAT16), p.Done)
    server.announce(1)
    assert heard(server.freeze(2, chunks[0]), p.Done)
    server.announce(2)
    held = server.bytes
    assert heard(server.freeze(2, chunks[0]), p.Done), "again"
    for number in range(2):
        for rank in range(2):
            server.push(rank, "w", [9.0] * 4, number)
    assert server.values("w") == [18.0] * 4
    (said,) = server.read(1, chunks[0], 8)
    assert from_frame(said.payload[0], "bfloat16").tolist() == [1.0, 2.0, 3.0, 4.0]
    (said,) = server.read(1, chunks[1], 16)
    assert from_frame(said.payload[0], "int64").tolist() == [7, 8], "only floating-point values are converted"
    assert server.floats(2, chunks[0], 8, 4) == [2.0, 3.0]
    assert server.bytes == held, "a buffer of two versions counts once"
    server.publish(3, 5.0, keep=1)
    assert (server.held, server.bytes) == ([3], 4)


@pytest.mark.spec("R542")
def test_repeated_or_late_requests_change_nothing() -> None:
    server = stage()
    server.publish(5, 1.0, 2.0)
    assert heard(server.put(5, 8.0, 9.0), p.Done)
    assert heard(server.put(4, 8.0, 9.0), p.Done)
    assert heard(server.announce(5), p.Done)
    assert heard(server.announce(3), p.Done)
    assert server.held == [5]
    assert server.floats(5, 0, 8) == [1.0, 2.0]
    server.init("w", [1.0])
    assert heard(server.freeze(5, server.pieces["w"][0].chunk), p.Done)
    fails(server.read(5, server.pieces["w"][0].chunk, 4), ProtocolError, "cannot be read")


@pytest.mark.spec("R545")
def test_newest_versions_stay_and_incomplete_ones_go() -> None:
    server = stage()
    for number in (1, 2, 3):
        server.publish(number, float(number))
    server.put(4, 4.0)
    assert server.held == [2, 3, 4]
    assert server.bytes == 12
    server.put(5, 5.0)
    assert server.held == [2, 3, 5], "version 4 is not announced any more"
    server.say(0, p.Announce("kv", "policy", 6, 2, 0))
    assert server.held == [3, 6], "a server may have no part of a version"
    assert heard(server.put(7), p.Done), "a block may be empty"


@pytest.mark.spec("R541")
def test_publisher_is_rank_0_of_one_store_and_keeps_a_version() -> None:
    server = stage()
    server.publish(1, 1.0)
    fails(server.freeze(2, rank=1), ProtocolError, "rank 1 may not publish")
    for keep in (0, 1025):
        fails(server.put(2, 1.0, keep=keep), ConfigError, "keep must be 1 to 1024")
    fails(server.put(2, 1.0, store="other"), ProtocolError, "was not opened")
    server.open(store="other")
    fails(server.put(2, 1.0, store="other"), Mismatch, "store 'kv' publishes 'policy' already")
    server.say(0, p.Close((p.StoreLife("kv", 0),)))
    server.say(1, p.Close((p.StoreLife("kv", 0),)))
    server.now += 100
    server.take(server.server.on_timer(server.now))
    server.take(server.server.on_timer(server.now + 100))
    assert "kv" not in server.server.context.stores
    assert heard(server.put(2, 1.0, store="other"), p.Done)


def test_chunks_that_cannot_be_frozen_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    server = stage()
    server.init("w", [1.0])
    chunk = server.pieces["w"][0].chunk
    fails(server.freeze(1, 999), ProtocolError, "no chunk 999")
    fails(server.freeze(1, chunk, as_dtype=77), ProtocolError, "no element type has number 77")
    server.open(store="other")
    message = p.Freeze("other", "else", 1, 2, 0, (chunk,))
    fails(server.say(0, message), ProtocolError, "has no keys of store 'other'")
    server.server.context.chunks.at(chunk).embedding = object()  # type: ignore[assignment]  # as that of a table
    fails(server.freeze(1, chunk), ProtocolError, "has no keys of store 'kv'")
    server.server.context.chunks.at(chunk).embedding = None
    monkeypatch.setattr(publications, "PUBLICATIONS_MAX", 1)
    server.publish(1, 1.0)
    fails(server.put(1, 1.0, publication="third"), Overload, "one too many")


@pytest.mark.spec("R545")
def test_versions_count_as_memory_and_unused_ones_go_first() -> None:
    server = stage(memory_limit=64)
    server.publish(1, *[1.0] * 6, keep=1)
    server.reader(0, p.Retain("policy", 1))
    server.publish(2, 2.0, keep=1)
    assert server.held == [1, 2]
    server.publish(3, *[3.0] * 10, keep=1)
    assert server.held == [3], "a version that only a reader used went"
    fails(
        server.put(4, *[4.0] * 9),
        Overload,
        "no room for version 4 of publication 'policy': publications 76 B",
    )
    assert server.floats(3, 0, 4) == [3.0]
    fails(
        server.reader(0, p.Retain("policy", 1)),
        KeyNotFound,
        "version 1 of 'policy' is gone (version 3 is the newest)",
    )


@pytest.mark.spec("R542")
def test_last_version_is_told_at_once_or_when_it_is_complete() -> None:
    server = stage()
    ask = p.LastVersion("kv", "policy", 0)
    assert [m.number for m in heard(server.say(0, ask), p.VersionIs)] == [0]
    assert not server.say(1, p.LastVersion("kv", "policy", 1))
    (probed,) = heard(server.say(1, p.Probe((server.seqs[1],)), seq=0), p.Probed)
    assert "rank 0" in probed.pending[0].reason
    assert "has not published version 1 of 'policy'" in probed.pending[0].reason
    server.put(2, 1.0)
    assert [m.number for m in heard(server.say(0, ask), p.VersionIs)] == [2], "complete or not"
    assert [m.number for m in heard(server.announce(2), p.VersionIs, b"w1")] == [2]
    server.publish(3, 1.0)
    assert [m.number for m in heard(server.say(1, p.LastVersion("kv", "policy", 1)), p.VersionIs)] == [2]


@pytest.mark.spec("R543")
def test_versions_outlive_a_return_to_a_cut_and_end_with_the_job() -> None:
    server = stage()
    server.publish(1, 1.0)
    server.server._reset({})
    assert server.bytes == 4
    assert server.floats(1, 0, 4) == [1.0]
    server.server._begin()
    assert server.bytes == 0
    fails(server.read(1, 0, 4), Mismatch, "expects HELLO first")


def told(server: Stage) -> list[tuple[p.PublicationFigures, ...]]:
    """Return what the server tells the scheduler of publications in its next report, if there is one."""
    server.now += LOOK_EVERY_S
    said = server.take(server.server.on_timer(server.now))
    return [each.message.publications for each in said if isinstance(each.message, p.Measured)]


@pytest.mark.spec("R465")
def test_server_tells_the_scheduler_of_publications_and_their_readers() -> None:
    server = stage()
    assert told(server) == []
    server.put(1, 1.0, 2.0)
    gauges = server.server.publications.gauges()
    assert gauges["kvps_publication_bytes", "policy"] == 8
    assert ("kvps_publication_version", "policy") not in gauges
    assert told(server) == [(p.PublicationFigures("policy", 0, 0.0, 8, {}),)]
    server.announce(1)
    server.reader(0, p.Retain("policy", 1))
    assert told(server) == [(p.PublicationFigures("policy", 1, LOOK_EVERY_S, 8, {"1": 1}),)]
    server.server.publications.clear()
    assert told(server) == [()]
    assert told(server) == []


# --- readers --------------------------------------------------------------------------------------


@pytest.mark.spec("R546")
def test_watch_is_answered_at_once_and_once_more() -> None:
    server = stage()
    (first,) = heard(server.reader(0, p.Watch("policy", 0)), p.VersionIs)
    assert (first.number, first.names) == (0, ())
    server.put(1, 1.0)
    (news,) = heard(server.announce(1), p.VersionIs, b"r0")
    assert (news.seq, news.number) == (first.seq, 1)
    assert not heard(server.announce(1), p.VersionIs)
    server.now += 3
    server.reader(0, p.Watch("policy", 1))
    (again,) = heard(server.reader(0, p.Watch("policy", 0)), p.VersionIs)
    assert (again.number, again.age_s) == (1, 3.0)
    (other,) = heard(server.reader(0, p.Watch("nix", 0)), p.VersionIs)
    assert (other.number, other.names) == (0, ("policy",))
    server.reader(0, p.Watch("policy", 7))
    assert not heard(server.put(2, 1.0) + server.announce(2), p.VersionIs)


@pytest.mark.spec("R545", "R546")
def test_retained_version_stays_until_its_reader_moves_on_or_is_silent() -> None:
    server = stage()
    server.greet(1)
    server.publish(1, 1.0, keep=1)
    (kept,) = server.reader(0, p.Retain("policy", 1, True))
    assert (kept.message, bytes(kept.payload[0])) == (p.Retained(server.seq, 2), b"[]")
    server.reader(1, p.Retain("policy", 1))
    server.publish(2, 2.0, keep=1)
    server.publish(3, 3.0, keep=1)
    assert server.held == [1, 3]
    assert server.floats(1, 0, 4) == [1.0]
    server.reader(1, p.Retain("policy", 0))
    assert server.held == [1, 3]
    server.reader(0, p.Retain("policy", 3))
    assert server.held == [3]
    server.publish(4, 4.0, keep=1)
    server.now += 2
    server.take(server.server.on_timer(server.now))
    assert server.server.publications.gauges() == {
        ("kvps_publications", ""): 1,
        ("kvps_published_versions", ""): 2,
        ("kvps_readers", ""): 2,
        ("kvps_publication_version", "policy"): 4,
        ("kvps_publication_age_seconds", "policy"): 2.0,
        ("kvps_publication_bytes", "policy"): 8,
        ("kvps_publication_readers", "3,policy"): 1,
    }
    server.now += LEASE_S
    server.take(server.server.on_timer(server.now))
    assert server.held == [4]
    assert not server.server.publications.readers
    fails(server.read(4, 0, 4), Mismatch, "expects HELLO first")
    server.greet(0)
    fails(
        server.reader(0, p.Retain("nix", 1)), KeyNotFound, "version 1 of 'nix' is gone (none is the newest)"
    )
    server.put(5, 5.0)
    fails(server.read(5, 0, 4), KeyNotFound, "version 5")
    assert heard(server.reader(0, p.Retain("nix", 0)), p.Retained)


@pytest.mark.spec("R547")
@pytest.mark.parametrize(
    ("start", "size"), [(0, 0), (0, 20), (12, 8), (2, 4), (0, 2), (0, READ_BYTES_MAX + 4)]
)
def test_reads_of_other_octets_are_refused(start: int, size: int) -> None:
    server = stage()
    server.init("w", [1.0, 2.0, 3.0, 4.0])
    chunk = server.pieces["w"][0].chunk
    server.freeze(1, chunk)
    server.announce(1)
    if size == 20 or start == 12:
        size += server.server.context.chunks.at(chunk).capacity * 4
    fails(server.read(1, chunk, size, start), ProtocolError, f"of block {chunk} of 'policy' cannot be read")
    fails(server.read(1, chunk + 1, 4), ProtocolError, "cannot be read")


@pytest.mark.spec("R548")
def test_bytes_on_their_way_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    server = stage()
    server.init("w", [1.0, 2.0])
    chunk = server.pieces["w"][0].chunk
    server.freeze(1, chunk, as_dtype=BFLOAT16)
    server.put(1, 5.0, block=9)
    server.announce(1)
    served = server.server.publications
    (reader,) = served.readers.values()
    monkeypatch.setattr(readers, "AWAY_BYTES_MAX", 3)
    assert not server.read(1, 9, 4)
    monkeypatch.setattr(readers, "AWAY_BYTES_MAX", 4)
    assert server.read(1, 9, 4)
    assert server.read(1, chunk, 4)
    monkeypatch.setattr(readers, "COPIES_BYTES_MAX", 3)
    monkeypatch.setattr(readers, "AWAY_BYTES_MAX", 5)
    reader.away_bytes = 1
    assert not server.read(1, chunk, 4), "what is converted is a copy"
    reader.away_bytes = 0
    assert server.read(1, 9, 4)
    assert (reader.away_bytes, server.server.readers._copied_bytes) == (0, 0)


@pytest.mark.spec("R548")
def test_readers_that_hang_leave_one_read_at_a_time_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    server = stage()
    server.init("w", [1.0, 2.0])
    chunk = server.pieces["w"][0].chunk
    server.freeze(1, chunk, as_dtype=BFLOAT16)
    server.announce(1)
    server.greet(1)
    served = server.server.publications
    monkeypatch.setattr(readers, "COPIES_BYTES_MAX", 4)
    server.server.readers._copied_bytes = 4
    (one_reader, _) = served.readers.values()
    assert server.read(1, chunk, 4, rank=1), "by readers that hang"
    one_reader.away_bytes = 4
    assert not server.read(1, chunk, 4), "one that has some on their way waits"


@pytest.mark.spec("R548")
def test_small_reads_do_not_keep_many_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    server = stage()
    server.init("w", [1.0, 2.0])
    chunk = server.pieces["w"][0].chunk
    server.freeze(1, chunk)
    server.announce(1)
    (reader,) = server.server.publications.readers.values()
    reader.away = {-number: b"" for number in range(readers.AWAY_MAX)}
    assert not server.read(1, chunk, 4)
    del reader.away[0]
    assert server.read(1, chunk, 4)
    assert len(reader.away) == readers.AWAY_MAX - 1


@pytest.mark.spec("R548")
def test_readers_and_their_requests_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    server = stage()
    for index in range(WATCHES_MAX):
        server.reader(0, p.Watch(f"p{index}", 0))
    fails(server.reader(0, p.Watch("one more", 0)), Overload, f"watches {WATCHES_MAX} publications at most")
    monkeypatch.setattr(readers, "MESSAGES_MAX", WATCHES_MAX + 3)
    assert server.reader(0, p.Watch("p0", 0))
    assert not server.reader(0, p.Watch("p0", 0))
    server.now += 1
    assert server.reader(0, p.Watch("p0", 0))
    for rank in range(1, READERS_MAX):
        server.reader(rank, greeting(role=4, rank=rank))
    fails(server.reader(READERS_MAX, greeting(role=4)), Overload, f"has {READERS_MAX} readers already")
    server.now += LEASE_S
    server.greet(READERS_MAX)


@pytest.mark.spec("R503")
def test_a_silent_reader_makes_place_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    server = stage()
    monkeypatch.setattr(readers, "READERS_MAX", 3)
    for rank in (1, 2):
        server.greet(rank)
    server.now += readers.IDLE_S
    server.reader(0, p.Watch("policy", 0))
    server.notes.clear()
    for rank in (3, 4):
        server.greet(rank)
    assert sorted(rank for rank, _ in server.server.publications.readers) == [0, 3, 4]
    (note,) = server.notes
    assert isinstance(note, Note)
    assert note.text.startswith("server 0 has 3 readers: those that are silent longest lose their leases")
    fails(server.reader(5, greeting(role=4)), Overload, "has 3 readers already")


@pytest.mark.spec("R503")
def test_readers_keep_a_few_versions_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publications, "READ_ONLY_MAX", 2)
    server = stage()
    for number in range(1, 5):
        server.publish(number, float(number), keep=1)
        server.greet(number)
        server.reader(number, p.Retain("policy", number))
        server.now += 1
        server.reader(1, p.Read("policy", 1, 0, 0, 4))
    server.publish(5, 5.0, keep=1)
    assert server.held == [1, 4, 5], "the readers of versions 1 and 4 spoke last"


@pytest.mark.spec("R543", "R85")
def test_bytes_stay_where_they_came_until_somebody_reads_them_or_there_is_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publications, "SETTLE_BYTES", 2)
    server = stage()
    served = server.server.publications
    for block in range(3):
        server.put(1, float(block), block=block, keep=1)
    assert served.settle_at == math.inf, "nobody can read it yet"
    server.announce(1, keep=1)
    assert server.server.deadline() == served.settle_at == server.now
    held = server.bytes
    assert server.floats(1, 1, 4) == [1.0]

    assert served.settle_at == server.now + SETTLE_AFTER_S, "the reader needs the processor"
    server.now += SETTLE_AFTER_S
    for filled in ([2, 4, 0], [4, 4, 0], [4, 4, 2], [4, 4, 4], [4, 4, 4]):
        server.take(server.server.on_timer(server.now))
        (version,) = served.by_name["policy"].versions.values()
        assert [block.filled for block in version.blocks.values()] == filled
    assert (served.settle_at, server.bytes) == (math.inf, held)
    assert all(block.lent is None for block in version.blocks.values())
    assert server.floats(1, 2, 4) == [2.0]
    server.publish(2, 5.0, keep=1)
    server.publish(3, 6.0, keep=1)
    for _ in range(3):  # version 2 is gone
        server.take(server.server.on_timer(server.now))
    assert server.floats(3, 0, 4) == [6.0]
    assert (served.settle_at, server.bytes) == (math.inf, 4)


@pytest.mark.spec("R549", "R550")
@pytest.mark.parametrize(
    ("act", "error", "text"),
    [
        (lambda item: item.reader(9, p.Watch("policy", 0)), Mismatch, "expects HELLO first"),
        (lambda item: item.reader(0, p.Watch("policy", 0), life=1), Mismatch, "expects HELLO first"),
        (lambda item: item.reader(0, p.Watch("policy", 0), job=bytes(16)), Mismatch, "serves another job"),
        (lambda item: item.reader(0, p.Probe((1,))), ProtocolError, "a reader may not send Probe"),
        (lambda item: item.reader(0, replace(greeting(role=4), major=9)), ProtocolError, "cannot talk to"),
    ],
)
def test_readers_are_refused(act: Callable[[Stage], list[Said]], error: type[Exception], text: str) -> None:
    fails(act(stage()), error, text)


@pytest.mark.spec("R550")
def test_readers_are_no_sign_of_life_and_wait_for_a_job() -> None:
    server = stage()
    heard_at = server.server._heard_at
    server.now += 30
    server.greet(0)
    assert server.server._heard_at == heard_at
    server.server.member.welcome = None
    assert not server.reader(0, p.Watch("policy", 0))


def test_a_limit_of_the_machine_refuses_a_version() -> None:
    server = stage(limits=Limits(used_memory=50))
    server.take(server.server.on_memory(60, 100, server.now))
    fails(server.put(1, 1.0), Overload, "version 1 of publication 'policy' is refused")


# --- changes --------------------------------------------------------------------------------------


@pytest.mark.spec("R504", "R505")
def test_changes_are_those_since_the_base() -> None:
    server = stage()
    before = torch.arange(100.0)
    after = before.clone()
    after[[3, 50]] = 7.0
    server.publish(1, *before.tolist(), keep=1)
    server.reader(0, p.Retain("policy", 1))
    server.publish(2, *after.tolist(), keep=1)
    server.reader(0, p.Retain("policy", 2, base=1))
    server.publish(3, *before.tolist(), keep=1)
    assert server.held == [1, 2, 3], "the base stays, too"
    said = server.changes(2, 1, 400)
    assert said.message == p.Changes(server.seq, 2, 0, 1 << 32 | zlib.crc32(to_frame(after)), 10)
    octets = before.clone().numpy().view("u1")
    apply(octets, 4, 2, 0, said.payload[0])
    assert octets.view("f4").tolist() == after.tolist()
    (reader,) = server.server.publications.readers.values()
    reader.away = {-number: b"" for number in range(readers.AWAY_MAX - 1)}
    assert server.changes(2, 1, 400)
    assert len(reader.away) == readers.AWAY_MAX - 1
    reader.away = {}
    assert server.changes(2, 1, 20, 20).message == p.Changes(
        server.seq, 0, 0, 1 << 32 | zlib.crc32(to_frame(after)[20:40])
    )
    server.reader(0, p.Retain("policy", 3, base=2))
    assert server.held == [2, 3]
    assert server.changes(3, 1, 400).message == p.Octets(server.seq, 400), "the base is gone"
    assert (reader.away_bytes, server.server.readers._copied_bytes) == (0, 0)


@pytest.mark.spec("R505")
def test_all_bytes_are_sent_where_they_are_no_more_than_the_changes() -> None:
    server = stage()
    server.publish(1, *[1.0] * 8)
    server.publish(2, *[2.0] * 8)
    assert server.changes(2, 1, 32).message == p.Octets(server.seq, 32)
    server.publish(3, *[2.0] * 9)
    assert server.changes(3, 2, 32).message == p.Octets(server.seq, 32), "blocks of other sizes"
    server.put(4, 1.0)
    fails([server.changes(4, 3, 4)], KeyNotFound, "version 4")
    server.announce(4)
    server.put(5, 1.0)
    assert server.changes(4, 5, 4).message == p.Octets(server.seq, 4), "a base that is not complete"


@pytest.mark.spec("R504", "R505")
def test_changes_of_frozen_values_are_told_in_the_published_type() -> None:
    server = stage()
    server.init("w", torch.arange(64.0))
    chunk = server.pieces["w"][0].chunk
    for number in (1, 2):
        server.freeze(number, chunk, as_dtype=BFLOAT16)
        server.announce(number)
    same = server.changes(2, 1, 128, block=chunk, width=2)
    assert same.message == p.Changes(server.seq)
    values = to_frame(torch.arange(64.0).bfloat16())
    proved = server.changes(2, 1, 128, block=chunk, width=2, proves=True)
    assert proved.message == p.Changes(server.seq, 0, 0, 1 << 32 | zlib.crc32(values))
    update = torch.arange(64.0) / 2
    update[5] += 1.0
    for rank in range(2):
        server.push(rank, "w", update, 0)
    server.freeze(3, chunk, as_dtype=BFLOAT16)
    server.announce(3)
    said = server.changes(3, 2, 128, block=chunk, width=2)
    assert isinstance(said.message, p.Changes)
    assert (said.message.count, said.message.size) == (1, 3)
    assert from_frame(said.payload[0][1:], "bfloat16").tolist() == server.values("w")[5:6] == [7.0]


@pytest.mark.spec("R504")
@pytest.mark.parametrize(
    "fields",
    [
        {"width": 3},
        {"width": 8, "size": 12},
        {"width": 8, "start": 4, "size": 8},
        {"size": (1 << 20) + 4},
        {"block": 9},
        {"size": 20},
    ],
)
def test_changes_of_no_elements_are_refused(fields: dict[str, int]) -> None:
    server = stage()
    server.publish(1, 1.0, 2.0, 3.0, 4.0)
    said = server.changes(1, 1, **{"size": 16, **fields})
    fails([said], ProtocolError, "cannot be read")


# --- relays ---------------------------------------------------------------------------------------


class Relays(Stage):
    """A server of one version, and readers that listen on machines of their own."""

    octets = memoryview(b"")

    def listen(self, *machines: int) -> None:
        for rank, machine in enumerate(machines, 1):
            said = self.reader(
                rank, greeting(role=4, rank=rank, endpoint=f"tcp://10.0.0.9:{rank}", machine=machine)
            )
            assert heard(said, p.Welcome)
            self.reader(rank, p.Retain("policy", 1))

    def sends(self, rank: int, start: int = 0, **fields: object) -> int:
        """Return the rank of the relay that a reader is sent to; 0 if it gets the bytes."""
        message = replace(p.Read("policy", 1, 0, start, 4, True), **fields)  # type: ignore[arg-type]
        (said,) = self.reader(rank, message)
        if isinstance(said.message, p.Octets):
            return 0
        assert isinstance(said.message, p.Elsewhere)
        assert said.message.endpoint == f"tcp://10.0.0.9:{said.message.relay}"
        assert said.message.digest == hashlib.sha256(self.octets[start : start + 4]).hexdigest()
        return said.message.relay


def relays(*machines: int) -> Relays:
    server = Relays(2, 1)
    server.open()
    server.octets = to_frame(torch.tensor([1.0, 2.0]))
    server.publish(1, 1.0, 2.0)
    server.listen(*machines)
    return server


@pytest.mark.spec("R588")
def test_range_goes_through_readers_one_by_one_and_then_through_a_tree() -> None:
    server = relays(*range(1, readers.CHAIN + 4))
    assert [server.sends(rank) for rank in (2, 1, 3)] == [0, 2, 1]
    assert server.sends(1) == 2, "asked again"
    assert [server.sends(rank, start=4) for rank in (3, 2)] == [0, 3], "another range, another first"
    for rank in range(4, readers.CHAIN + 1):
        assert server.sends(rank) == rank - 1
    assert server.sends(readers.CHAIN + 1) == readers.CHAIN // 2


@pytest.mark.spec("R588")
def test_reader_is_sent_to_its_own_host_first() -> None:
    server = relays(7, 8, 7, 0, 0)
    assert [server.sends(rank) for rank in (1, 2, 3)] == [0, 1, 1]
    assert [server.sends(rank) for rank in (4, 5)] == [3, 4], "hosts that are not known are none"


@pytest.mark.spec("R588")
def test_relay_that_failed_is_named_no_more() -> None:
    server = relays(1, 2, 3)
    assert [server.sends(rank) for rank in (1, 2, 3)] == [0, 1, 2]
    assert server.sends(2, without=1) == 0
    assert server.sends(3, without=1) == 2
    assert server.sends(3, without=2) == 0


@pytest.mark.spec("R588")
def test_readers_that_have_left_or_read_another_version_are_not_named() -> None:
    server = relays(1, 2, 3)
    assert [server.sends(rank) for rank in (1, 2, 3)] == [0, 1, 2]
    server.reader(2, p.Retain("policy", 0))
    assert server.sends(3) == 1
    server.publish(2, 3.0, 4.0)
    server.reader(1, p.Retain("policy", 2))
    assert server.sends(3) == 0
    server.reader(1, p.Retain("policy", 1))
    assert server.sends(3) == 1
    server.now += KEPT_S
    assert server.sends(3) == 0, "nothing was heard of it"


@pytest.mark.parametrize(
    "endpoint", ["tcp://slow.example:1", "tcp://10.0.0.1:1;10.0.0.2:1", "ipc://x", "x" * 4000]
)
def test_readers_are_sent_to_no_place_but_an_address(endpoint: str) -> None:
    server = relays(1, 2)
    server.reader(1, greeting(role=4, rank=1, endpoint=endpoint, machine=1))
    assert [server.sends(rank) for rank in (1, 2)] == [0, 0]


@pytest.mark.spec("R588")
def test_only_those_that_listen_are_sent_to_relays_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    server = relays(1, 2)
    server.greet(9)
    assert server.sends(9) == 0
    assert server.sends(1) == 0
    assert server.sends(9) == 0
    assert server.sends(2, relays=False) == 0
    monkeypatch.setattr(readers, "RANGES_MAX", 1)
    assert [server.sends(rank, start=4) for rank in (1, 2)] == [0, 0], "too many ranges"
    monkeypatch.setattr(readers, "RELAYS_MAX", 1)
    assert server.sends(2) == 1
    assert len(server.server.publications.by_name["policy"].versions[1].relays[0, 0, 4]) == 1


@pytest.mark.spec("R588")
def test_reader_of_changes_is_sent_elsewhere_where_all_bytes_are_to_come() -> None:
    server = relays(1, 2)
    change = p.ReadChanges("policy", 1, 0, 0, 8, 7, 4, relays=True)
    (said,) = server.reader(1, change)
    assert isinstance(said.message, p.Octets)
    (said,) = server.reader(2, change)
    assert isinstance(said.message, p.Elsewhere)


@pytest.mark.spec("R591")
def test_answer_that_is_under_way_is_not_sent_twice() -> None:
    server = relays(1)
    publication = server.server.publications
    (_, reader) = publication.readers.popitem()
    publication.readers[1, LIFE] = reader
    reader.away[server.seq + 1] = b"r1"
    assert not server.reader(1, p.Read("policy", 1, 0, 0, 4))
    reader.away = {server.seq + 1: b"an older connection"}
    assert heard(server.reader(1, p.Read("policy", 1, 0, 0, 4)), p.Octets)
