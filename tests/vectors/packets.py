"""One packet of each message, as packets.json spells it in bytes, and checked.json with a checksum.

A vector is never changed: what it says has been promised. A new message adds an entry here and
one in each; ``python -m tests.vectors.packets [checked]`` prints the JSON of all.
"""

from __future__ import annotations

import json
import struct
import sys

from kvps import protocol as m
from kvps.protocol.envelope import Envelope, Message, Packet, Role
from kvps.protocol.replicas import CopiedDrop
from kvps.protocol.wire import encode

JOB = bytes(range(16))
NOBODY = bytes(16)
KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
"""The public key of section 4 of ZeroMQ's RFC 26, in Z85."""
SHA256 = bytes(range(32)).hex()

SCHEDULER = Envelope(JOB, 7, Role.SCHEDULER, 0, 0, 0)
SERVER = Envelope(JOB, 7, Role.SERVER, 1, 2, 0)
WORKER = Envelope(JOB, 7, Role.WORKER, 3, 5, 42)
READER = Envelope(JOB, 0, Role.READER, 4_000_000_000, 2**61, 42)
CREATOR = Envelope(JOB, 7, Role.WORKER, 0, 4, 9)
NAMELESS = Envelope(NOBODY, 0, Role.SCHEDULER, 0, 0, 0)
SPAN = memoryview(struct.pack("<BBHIQQQQII", 5, 1, 0, 1, 2**41, 25_000, 42, 5, 3, 12))
"""A SEND of 25 us to server 1."""


def three_tables(number: int) -> tuple[m.TablePart, ...]:
    """Return parts of three tables, the first of which has no ids."""
    return (m.TablePart(3, number, 0), m.TablePart(6, number, 2), m.TablePart(9, number + 2, 1))


def asking_nothing(envelope: Envelope) -> Envelope:
    return envelope._replace(seq=0)


def floats(*numbers: float) -> memoryview:
    return memoryview(struct.pack(f"<{len(numbers)}f", *numbers))


def longs(*numbers: int) -> memoryview:
    return memoryview(struct.pack(f"<{len(numbers)}q", *numbers))


def _all() -> list[tuple[Envelope, Message, tuple[memoryview, ...]]]:
    numbers = {"lr": 0.5, "nesterov": True, "clip_gradient": None, "lag": -2}
    runs = (m.Run(0, 2, 5), m.Run(8, 1, 4))
    return [
        (
            Envelope(NOBODY, 0, Role.WORKER, 0, 0, 0),
            m.Hello(1, 0, "0.1.0", 0, 2, None, "gpu-1", 4711, "", False, "gpu-1:29500", 77),
            (),
        ),
        (SCHEDULER, m.Welcome(3, 5, 4, 2, 1, 2, "gpu-1:29500"), ()),
        (
            SCHEDULER,
            m.View(
                7,
                "running",
                "going on",
                (
                    m.Member(1, 0, 1, "held", "tcp://127.0.0.1:9000", "gpu-1", 0.0, "", 77),
                    m.Member(2, 0, 4, "lost", "", "gpu-1", 2.5, "silent for 12 s", 0),
                ),
                2,
                5,
                12,
                (KEY, ""),
                {"0": 1},
            ),
            (),
        ),
        (
            SCHEDULER,
            m.ViewChanges(
                13,
                12,
                "running",
                "1 of 2 workers is lost",
                (m.Member(2, 1, 5, "lost", "", "gpu-2", 0.5, "killed", 77),),
                2,
                5,
                12,
                (KEY,),
            ),
            (),
        ),
        (WORKER, m.Beat(17, "", 200, 4096, 2048, 0, 0, True, 3), ()),
        (WORKER, m.Leave(False, -9, True, "killed"), ()),
        (SCHEDULER, m.Left(), ()),
        (WORKER, m.Barrier("weights", "epoch", 3, False), ()),
        (SCHEDULER, m.Released(42), ()),
        (SCHEDULER, m.Stop(0, "every worker left"), ()),
        (SERVER, m.Error(42, 10, "key 'w' is float32[2,3], not float32[3,2]"), ()),
        (SERVER, m.Done(42), ()),
        (WORKER, m.Probe((40, 41)), ()),
        (SERVER, m.Probed((40,), (m.Pending(41, "round 5 waits for rank 1"),), (41,)), ()),
        (WORKER, m.Open("weights", "ssp", 4, False, "wait", 100_000, 1 << 23, True, "skip"), ()),
        (
            CREATOR,
            m.Declare("weights", True, 0, (m.Entry("w", 1, (2, 3), 0, 6), m.Entry("größe", 4, (), 0, 1)), 0),
            (),
        ),
        (
            SERVER,
            m.Declared(
                9, (m.Place(True, (m.Piece(0, 0, 4), m.Piece(1, 0, 2))), m.Place(False, (m.Piece(2, 0, 1),)))
            ),
            (),
        ),
        (WORKER, m.Find("weights", ("w", "unknown")), ()),
        (SERVER, m.FoundAll(42, (m.Found(1, (2, 3), 1), m.Found(0, (), 0))), ()),
        (SERVER, m.Opened(42, 3), ()),
        (WORKER, m.Close((m.StoreLife("weights", 0), m.StoreLife("kvps.life-2.m", 2))), ()),
        (SERVER, m.Closed((m.StoreLife("weights", 0),)), ()),
        (
            WORKER,
            m.Tell("sums", 1, "", True, (m.ToldKey("w", 1, (2, 3), 0, (m.Piece(3, 8, 4),), (2,)),)),
            (),
        ),
        (WORKER, m.Give("sums", 3, 1, 2, (m.Run(8, 2, 5),)), (floats(0.5, -4.0),)),
        (CREATOR, m.Load(0, 1, (m.Run(0, 2, 0),)), (floats(1.0, -2.0),)),
        (WORKER, m.Push(0, 1, (3,), 1.0, True, runs), (floats(1.0, -2.0, 0.5),)),
        (SERVER, m.Ack((m.Receipt(42, 5), m.Receipt(43, 6))), ()),
        (WORKER, m.Pull(0, True, (m.Ask(0, 2, 6, 0),), 3, (5,), 4, 6), ()),
        (
            SERVER,
            m.Pulled(
                42,
                0,
                1,
                True,
                (m.Stand(0, 2, 6, 6), m.Stand(2, 1, 6, 6)),
                (m.Dropped(0, 5, 12, (3,)),),
                (m.Steps(False, (m.CodecSpec(4, 0.5, 0.125, 0),)), m.Steps(True, ())),
                True,
                9,
            ),
            (memoryview(b"\x80\x40" + bytes(floats(4.0))),),
        ),
        (
            WORKER,
            m.PushRows("weights", "table", 1, (3,), 5, 2, 2),
            (longs(0, 7), floats(1.0, -2.0, 0.5, 4.0)),
        ),
        (WORKER, m.PullRows("weights", "table", 6, 0, 1), (longs(7),)),
        (SERVER, m.PulledRows(42, 1, 2, 1, 6, 6, 6, (m.Dropped(0, 5, 12, (3,)),)), (floats(0.25, 4.0),)),
        (WORKER, m.PullChanged("weights", "table", 6, 0, 4), ()),
        (
            SERVER,
            m.Changed(42, True, 1, 2, 1, 6, 6, 6, (m.Dropped(0, 5, 12, (3,)),)),
            (longs(7), floats(0.25, 4.0)),
        ),
        (SERVER, m.Changed(43, False, 1, 2, 0, 6, 6, 6), ()),
        (CREATOR, m.Optimize("weights", 1, True, "sgd", numbers, {"w": 0.1}, {"w": 0.0}), ()),
        (CREATOR, m.Rate("weights", 2, True, 0.125), ()),
        (SERVER, m.Norms("weights", "w", None, 5, (2.0, 1.5, 0.25), True, (3,), 1), ()),
        (SERVER, m.StepNorm("weights", 77, 5, 2.25, None), ()),
        (WORKER, m.GetState(0, 0, 2), ()),
        (
            SERVER,
            m.StateIs(42, 6, (m.Field("exp_avg", 1, 2), m.Field("exp_avg_sq", 1, 2))),
            (floats(0.1, 0.2), floats(0.01, 0.04)),
        ),
        (CREATOR, m.SetState(0, 0, 2, 6, (m.Field("momentum_buffer", 1, 2),)), (floats(3, 4),)),
        (WORKER, m.Status("weights"), ()),
        (
            SERVER,
            m.StatusIs(
                42,
                (m.OpenRound("w", 6, (1, 2), 0.75),),
                (m.Clock("w", {"0": 7, "3": 6}),),
                {"w": 2},
                {"0": 0.0, "3": 0.25},
            ),
            (),
        ),
        (asking_nothing(WORKER), m.Offer(4711, 9, 1 << 34, 0x0123456789ABCDEF), ()),
        (SERVER, m.Taken(0x0123456789ABCDEF, False, "another user's"), ()),
        (asking_nothing(WORKER), m.Release(18, (4, 17)), ()),
        (SERVER, m.StreamAt(40001, SHA256), ()),
        (WORKER, m.Join("weights", 2, True), ()),
        (SERVER, m.Joined(42, 1), ()),
        (WORKER, m.Return("weights", 2), ()),
        (WORKER, m.History("weights"), ()),
        (SERVER, m.HistoryIs(42, 1, 0, 3, 200, 0.125, 2, True, 12), ()),
        (WORKER, m.Resume("weights", 200), ()),
        (SCHEDULER, m.Resumed(42, True, {"epoch": 3}), ()),
        (Envelope(NOBODY, 0, Role.WORKER, 0, 0, 1), m.Look(), ()),
        (
            SCHEDULER,
            m.Seen(
                1,
                "running",
                "going on",
                (m.Sight(2, 3, 5, "held", "gpu-1", 4711, "", 0.5, "alive, last call 2 s ago"),),
                (m.OldRound(1, "weights", "w", 5, (2, 3), 12.5),),
                "0.1.0",
                2,
                12,
                (m.Figures("0.1.0", 200, 4096, 2048, 0, 0, 0.25),),
                (m.Wait(3, "push()", 12.5, (2, 5)),),
                (m.Copy(1, "level", "gpu-2:4712", 100, 4096, ""),),
                (m.Promotion(0, 9, "gpu-2:4712", 42.5),),
                (m.Move(1, "gpu-2:4712", 42.5, 0.25, True),),
                (m.PublicationFigures("policy", 5, 0.25, 8192, {"5": 3, "4": 1}),),
                (m.HotRows("weights", "users", {"17": 1204.5, "-3": 0.5}),),
            ),
            (),
        ),
        (Envelope(NOBODY, 0, Role.WORKER, 0, 0, 1), m.Ping(8), (longs(7),)),
        (SCHEDULER, m.Pong(1, 1_800_000_000.25, 8), (longs(7),)),
        (SCHEDULER, m.Halt(12, {"weights": 6}), ()),
        (asking_nothing(WORKER), m.Halted(12, {"weights": 6}, True), ()),
        (SCHEDULER, m.Proceed(12), ()),
        (asking_nothing(WORKER), m.Proceeding(12, True), ()),
        (SCHEDULER, m.TakeImage(12), ()),
        (SERVER, m.ImageTaken(12), ()),
        (SERVER, m.ImageKept(12, 4096, SHA256, (m.StoreSum("weights", 3, 6, 6),), ""), ()),
        (
            SCHEDULER,
            m.Commit(
                12,
                "best",
                2,
                (m.ImageSum(4000, SHA256), m.ImageSum(4096, SHA256)),
                (m.StoreSum("weights", 5, 6, 6),),
                11,
            ),
            (),
        ),
        (SERVER, m.Committed(12, "no space left"), ()),
        (SCHEDULER, m.GiveUp(12), ()),
        (SCHEDULER, m.Recall(2), ()),
        (SERVER, m.Shelf(2, True, 60.0, (11, 12), 12), ()),
        (SCHEDULER, m.Restore(2, 12), ()),
        (SERVER, m.Restored(2, 12, ""), ()),
        (WORKER, m.Checkpoint("weights", "best", 3), ()),
        (SCHEDULER, m.Checkpointed(42, 12), ()),
        (CREATOR, m.Revive("weights", "best", 0), ()),
        (SERVER, m.Revived(9, (11, 12), (301, 0)), ()),
        (
            WORKER,
            m.Embed(
                "weights",
                "kvps.embedding:words",
                1,
                2,
                "uniform",
                0.5,
                7,
                2,
                1000,
                50_000,
                "sgd",
                numbers,
                0.25,
                3600.0,
                400,
            ),
            (),
        ),
        (
            WORKER,
            m.PushTables((3,), (m.TableGroup(1, 2, 2), m.TableGroup(1, 1, 1)), three_tables(5)),
            (longs(-7, 2**40, 3), floats(1.0, 2.0, 0.5, -4.0), floats(2.0)),
        ),
        (WORKER, m.PullTables(three_tables(6), True), (longs(-7, 2**40, 3),)),
        (
            SERVER,
            m.PulledTables(
                42,
                (m.TableGroup(1, 2, 2), m.TableGroup(1, 1, 1)),
                (2, 1),
                (m.TableStand(6, 6), m.TableStand(7, 6), m.TableStand(9, 8)),
            ),
            (floats(1.0, 2.0, 0.5, -4.0), floats(2.0)),
        ),
        (WORKER, m.Export(3, 0, 1000, 4, True), ()),
        (
            SERVER,
            m.Exported(42, 1000, 1, (m.Field("weight", 1, 2), m.Field("sum", 1, 2))),
            (longs(-7), longs(6), floats(1.0, 2.0), floats(0.25, 4.0)),
        ),
        (CREATOR, m.TableRate(3, 0.125), ()),
        (asking_nothing(WORKER), m.Enrol(KEY, ""), ()),
        (Envelope(NOBODY, 0, Role.WORKER, 0, 0, 1), m.Evict(2, 3), ()),
        (Envelope(NOBODY, 0, Role.WORKER, 0, 0, 1), m.Drain(1, 60.0), ()),
        (Envelope(NOBODY, 0, Role.WORKER, 0, 0, 1), m.Scale(3, 60.0), ()),
        (SCHEDULER, m.Challenge(1_700_000_042), ()),
        (asking_nothing(WORKER), m.Alive(1_700_000_042, True), ()),
        (asking_nothing(SERVER), m.Standing(False, 43, 0, 0, "store 'kv' is async"), ()),
        (asking_nothing(SERVER), m.Follow(), ()),
        (SERVER, m.CopyBegin(), ()),
        (
            SERVER,
            m.CopyStores(("weights",), (m.StoreLife("weights", 1), m.StoreLife("ended", 0)), {"1": 17}),
            (),
        ),
        (
            SERVER,
            m.CopyStore(
                "weights",
                0,
                3,
                {"1": 17},
                1,
                {"1": 0},
                {"0": 1, "1": 2},
                "sgd",
                {"lr": 0.5, "nesterov": False},
                {"w": 0.5},
                {},
                2,
                6,
                0.25,
                0.25,
                1,
                8,
                (m.CopiedRefusal("optimizer", False, 1, 0, 3, "lr must be positive"),),
                (1,),
                {"2": 19},
            ),
            (),
        ),
        (SERVER, m.CopyChunk("weights", 3, 1, 96, ("w", "b"), (0, 6, 10), (6,), (6,)), ()),
        (
            SERVER,
            m.CopyKeys(
                "weights",
                (m.CopiedKey("w", 1, (2, 3), 0, 6, 1, 2, 0, 17, 3, 0, (m.Piece(3, 0, 6),), (0,), (5,)),),
                ("b",),
            ),
            (),
        ),
        (
            SERVER,
            m.CopyValues(
                chunk=3,
                dtype=1,
                start=0,
                size=2,
                version=6,
                step=5,
                pushed={"0": 6, "1": 7},
                head_start={"0": 1},
                clock_from={},
                fields=(m.Field("momentum", 1, 2),),
                dropped=(CopiedDrop(2, 0, 4, 1, (1,)),),
            ),
            (floats(1.0, -2.0), floats(0.25, 4.0)),
        ),
        (SERVER, m.CopyLevel(), ()),
        (
            SERVER,
            m.CopyRows(
                chunk=5,
                version=6,
                step=5,
                pushed={"0": 6, "1": 7},
                head_start={"0": 1},
                clock_from={},
                lr=0.25,
                rows=2,
                vacant=1,
                counted=9,
                ids=1,
                counts=4,
                more=True,
                fields=(m.Field("weight", 1, 4), m.Field("sum", 1, 2)),
            ),
            (
                longs(0, 2, 1),
                longs(17, 2**40),
                longs(5, 6),
                floats(1.0, -2.0, 0.5, 4.0),
                floats(0.25, 8.0),
                longs(18),
                memoryview(bytes([1, 2, 1, 1])),
            ),
        ),
        (SERVER, m.CopyBlock("policy", 5, 3, 1, 4, False, 12), (floats(1.0, -2.0, 0.5),)),
        (SERVER, m.CopyVersion("policy", 5, 0.25, 2), (memoryview(b"[]"),)),
        (SERVER, m.CopyPublication("policy", "weights", 2, 6, (3, 5), (5, 6)), ()),
        (asking_nothing(SERVER), m.Followed(41), ()),
        (SCHEDULER, m.Measure(5), ()),
        (
            SERVER,
            m.Measured(
                5,
                (m.Count("kvps_pushes_total", "counted", 12.0),),
                (m.Histogram("kvps_round_duration_seconds", (0, 3, 1), 0.5),),
                (m.StoreFigures("weights", "sync", 3, 6),),
                (m.KeyTraffic("weights", "w", 2, 4096),),
                (m.OldRound(1, "weights", "w", 5, (2, 3), 12.5),),
                {"0": 0.0, "1": 0.25},
                (m.PublicationFigures("policy", 5, 0.25, 4096, {"5": 3}),),
                (m.HotRows("weights", "users", {"17": 1204.5}),),
            ),
            (),
        ),
        (Envelope(NOBODY, 0, Role.WORKER, 0, 0, 1), m.Trace(2**61, 10.0), ()),
        (NAMELESS, m.Tracing(1, 0.5, 3, 1_700_000_042.5, 2**40), ()),
        (NAMELESS, m.AskClock(2**61, 2**40), ()),
        (asking_nothing(WORKER), m.ClockIs(2**61, 2**40, 2**41), ()),
        (asking_nothing(WORKER), m.Spans(2**61, "gpu-1", 4711, 1, 7), (SPAN,)),
        (Envelope(NOBODY, 0, Role.WORKER, 0, 0, 2), m.Fetch(2**61, 1), ()),
        (
            NAMELESS,
            m.Part(2, 2, 3, 5, "gpu-1", 4711, (m.RoundTrip(2**40, 2**41, 2**40 + 90),), 1, 7),
            (SPAN,),
        ),
        (Envelope(NOBODY, 0, Role.WORKER, 0, 0, 1), m.Rendezvous("run-1", 4, ("[1]", "é")), ()),
        (SCHEDULER, m.RendezvousIs(1, 5, ("[1]", "é"), True), ()),
        (CREATOR, m.Freeze("weights", "policy", 5, 2, 4, (3, 6)), ()),
        (CREATOR, m.Put("weights", "policy", 5, 2, 1, 12), (floats(1.0, -2.0, 0.5),)),
        (CREATOR, m.Announce("weights", "policy", 5, 2, 2), (memoryview(b"[]"),)),
        (WORKER, m.LastVersion("weights", "policy", 5), ()),
        (SERVER, m.VersionIs(42, 5, 0.25, ("policy",)), ()),
        (READER._replace(job=NOBODY), m.Where(), ()),
        (
            SCHEDULER,
            m.ServersAre(
                42, (m.Member(1, 0, 2, "held", "tcp://10.0.0.2:9092", "gpu-2", 0.0, "", 77),), (KEY,)
            ),
            (),
        ),
        (READER, m.Watch("policy", 4), ()),
        (READER, m.Retain("policy", 5, True), ()),
        (SERVER, m.Retained(42, 2), (memoryview(b"[]"),)),
        (READER, m.Read("policy", 5, 3, 8, 12, True, 9, 1), ()),
        (SERVER, m.Octets(42, 12), (floats(1.0, -2.0, 0.5),)),
        (READER, m.ReadChanges("policy", 5, 3, 8, 12, 4, 4, True, True), ()),
        (SERVER, m.Changes(42, 1, 0, 2**32 + 7, 5), (memoryview(b"\x02" + floats(0.25).tobytes()),)),
        (SERVER, m.Elsewhere(42, "tcp://10.0.0.3:9093", 9, "ab" * 32), ()),
    ]


def name_of(cls: type[Message]) -> str:
    """The name of a message in docs/protocol.md: STATE-IS for StateIs."""
    return "".join(f"-{c}" if c.isupper() else c for c in cls.__name__).lstrip("-").upper()


PACKETS = {
    name_of(type(message)): Packet(envelope, message, payload) for envelope, message, payload in _all()
}


if __name__ == "__main__":
    checked = "checked" in sys.argv
    vectors = [
        {"name": name, "frames": [bytes(frame).hex() for frame in encode(packet, checked=checked)]}
        for name, packet in PACKETS.items()
    ]
    if not checked:
        vectors[0]["frozen"] = True
    print(json.dumps(vectors, indent=2))  # noqa: T201
