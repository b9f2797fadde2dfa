"""The flight recorder: what it keeps, for how long, and where it goes; and replays of what it wrote."""

import gc
import os
import weakref
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from kvps import protocol as p
from kvps.core.effects import CoreOutbox, Effect, Exit, Send
from kvps.core.limits import Limits
from kvps.core.membership_client import Identity
from kvps.core.server.server import Server
from kvps.core.worker.calls import PushValues
from kvps.errors import ConfigError, StorageError, Timeout
from kvps.net.driver import Doors
from kvps.protocol.envelope import Envelope, Packet, Role
from kvps.tensors import PRIVATE
from kvps.tools.replay import recorder
from kvps.tools.replay.format import Record, What, read
from kvps.tools.replay.recorder import FullLens, RecordedMemory, Ring, RingLens, new_file
from kvps.tools.replay.replay import replay
from kvps.tools.replay.values import dumps

WORKER = Envelope(bytes(16), 3, Role.WORKER, 1, 5, 42)
SCHEDULER = Envelope(bytes(range(16)), 0, Role.SCHEDULER, 0, 0, 0)


class Core:
    """A core that answers everything by the same effects."""

    def __init__(self, *effects: Effect) -> None:
        self.effects = effects
        self.outbox = CoreOutbox()

    def _make(self, *_: object, **__: object) -> None:
        for effect in self.effects:
            self.outbox.append(effect)

    def on_call(self, *_: object) -> None:
        self._make()

    on_packet = on_failure = on_drop = on_timer = _make


def push(runs: int = 1) -> Packet:
    message = p.Push(3, 1, (1,), 1.0, True, tuple([p.Run(at, 1, 0) for at in range(runs)]))
    return Packet(WORKER, message, (memoryview(bytearray(4 * runs)),))


def record_in(folder: Path, at: int = -1) -> Record:
    paths = sorted(folder.glob("*.record"), key=lambda item: item.stat().st_mtime_ns)
    with paths[at].open("rb") as file:
        return read(file)


def watched(lens: RingLens, core: Core) -> Doors:
    """Return the doors of ``lens`` before ``core``."""
    lens.connect(core, lambda effect: None)
    return lens.own


# --- the ring ---------------------------------------------------------------------------------------


def test_the_ring_has_the_last_events_and_a_bound_for_their_size() -> None:
    ring = Ring()
    for at in range(recorder.EVENTS_MAX + 5):
        ring.entries.append((What.TIMER, float(at), None, None, None))
    ring.trim()
    assert len(ring.entries) == recorder.EVENTS_MAX
    assert (ring.dropped, ring.entries[0][1]) == (5, 5.0)


def test_the_ring_bounds_the_size_of_its_messages(tmp_path: Path) -> None:
    lens = RingLens({"role": "server"}, tmp_path)
    doors, large = watched(lens, Core()), push(4000)
    for at in range(100):
        doors.packet(b"w", large, float(at))
    assert len(lens.ring.entries) == recorder.RUNS_MAX // 4000
    for at in range(recorder.FULL):
        doors.packet(b"w", push(0), float(at))
    assert recorder.EVENTS_MAX <= len(lens.ring.entries) < recorder.FULL


def test_the_ring_keeps_no_values_alive(tmp_path: Path) -> None:
    lens = RingLens({"role": "worker"}, tmp_path, dumps)
    row = torch.zeros(4)
    payload = row.numpy()
    call = PushValues("w", ("a",), (row,), None, 0, True)
    sent = Packet(WORKER, push().message, (memoryview(payload).cast("B"),))
    core = Core(Send("server 0", sent))
    watched(lens, core).request(Core.on_call, core, 1, call, 5.0, 1.0)
    watched(lens, core).packet("server 0", sent, 1.0)
    watched(lens, core).failure("server 0", WORKER, Timeout("late"), 1.0)
    gone = weakref.ref(payload)
    core.effects = ()
    del row, payload, call, sent
    gc.collect()
    assert gone() is None
    assert len(lens.ring.entries) == 6


@pytest.mark.parametrize("code", [0, 75, 78])
def test_an_expected_end_writes_nothing(tmp_path: Path, code: int) -> None:
    lens = RingLens({"role": "server"}, tmp_path / "records")
    watched(lens, Core(Exit(code, "over"))).timer(1.0)
    watched(lens, Core()).failure(b"w", WORKER, Timeout("late"), 1.0)
    assert not (tmp_path / "records").exists()


def test_an_error_writes_the_ring_once(tmp_path: Path) -> None:
    lens = RingLens({"role": "server", "now": 0.0}, tmp_path)
    core = Core()
    watched(lens, core).packet(b"w", push(), 1.0)
    watched(lens, core).drop(b"w", 2.0)
    watched(lens, core).failure(b"w", WORKER, ValueError("a bug"), 3.0)
    watched(lens, Core(Exit(1, "torn"))).timer(4.0)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    record = record_in(tmp_path)
    assert record.header["why"] == "ValueError('a bug')"
    assert [event.what for event in record.events] == [
        *(What.BARE_PACKET, What.DROP, What.FAILURE, What.DIGEST)
    ]
    assert record.events[2].parts[2:] == [b"ValueError", b"a bug"]


def test_a_place_that_takes_no_file_is_told_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert RingLens({"role": "server"}, tmp_path / "file").dump(Core(), "SIGUSR1") is None  # type: ignore[arg-type]
    assert "cannot write the flight recorder" in caplog.text
    with pytest.raises(StorageError, match="cannot write a record"):
        FullLens({"role": "server"}, tmp_path / "file")


def test_files_do_not_pile_up(tmp_path: Path) -> None:
    for _ in range(recorder.FILES_MAX + 3):
        new_file(tmp_path, "server")[1].close()
    assert len(list(tmp_path.iterdir())) == recorder.FILES_MAX


def test_two_processes_may_remove_the_same_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone.record"
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter([gone]))
    path, file = new_file(tmp_path, "server")
    file.close()
    assert path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_not_used(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(PermissionError, match="belongs to another user"):
        new_file(tmp_path, "server")


# --- replays ----------------------------------------------------------------------------------------

WRITING: list[FullLens] = []
"""The lenses of one test that have a file."""


@pytest.fixture(autouse=True)
def _no_file_is_left_open() -> Iterator[None]:
    yield
    for lens in WRITING:
        lens._file.close()
    WRITING.clear()


def served(folder: Path, *, is_full: bool) -> tuple[Server, RingLens]:
    """A server that joins and takes in a round; return it with its lens."""
    identity = Identity(Role.SERVER, "tcp://a:1", "host", 7, "kvps 0.1")
    header = {
        "role": "server",
        "now": 1.0,
        "identity": {**asdict(identity), "role": 1, "job": identity.job.hex()},
        "memory_limit": 1 << 30,
        "threads": 1,
        "checkpoint_every_s": None,
        "limits": asdict(Limits()),
    }
    lens = (FullLens if is_full else RingLens)(header, folder, dumps)
    if isinstance(lens, FullLens):
        WRITING.append(lens)
    memory = RecordedMemory(PRIVATE, lens) if isinstance(lens, FullLens) else PRIVATE
    core = Server(identity, 1.0, 1 << 30, memory, 1, None, Limits())
    said: list[Effect] = []
    lens.connect(core, said.append)
    view = p.View(1, "running", "", (p.Member(2, 0, 5, "held", "", "h", 0.0, ""),))
    worker = Envelope(bytes(range(16)), 1, Role.WORKER, 0, 5, 0)

    def hear(route: str | bytes, envelope: Envelope, message: p.Message, *rows: torch.Tensor) -> list[Effect]:
        payload = tuple([memoryview(bytearray(row.numpy().tobytes())) for row in rows])
        said.clear()
        lens.packet(route, Packet(envelope, message, payload), 2.0)
        return said.copy()

    def ask(seq: int, message: p.Message, *rows: torch.Tensor) -> p.Message:
        envelope = Envelope(worker.job, 1, Role.WORKER, 0, 5, seq)
        (sent, *_) = [item for item in hear(b"w", envelope, message, *rows) if isinstance(item, Send)]
        return sent.packet.message

    lens.request(Server.start, core, 1.0)
    hear("scheduler", SCHEDULER, p.Welcome(0, 1, 1, 1))
    hear("scheduler", SCHEDULER, view)
    hear(b"w", worker, p.Hello(1, 0, "k", 0, 2, 0, "h", 9))
    ask(1, p.Open("kv", "sync", 0, False, "wait", 100_000, 1 << 20, False, "apply"))
    declared = ask(2, p.Declare("kv", True, 0, (p.Entry("w", 1, (4,), 0, 4),)))
    assert isinstance(declared, p.Declared), declared
    chunk = declared.places[0].pieces[0].chunk
    ask(3, p.Load(chunk, 1, (p.Run(0, 4, 0),)), torch.arange(4.0))
    row = torch.full((4,), 0.5)
    ask(4, p.Push(chunk, 1, (0,), 1.0, True, (p.Run(0, 4, 0),)), row)
    lens.request(Server.on_memory, core, 99, 100, 2.5)
    refused = ask(5, p.Declare("kv", True, 1, (p.Entry("x", 1, (4,), 0, 4),)))
    assert isinstance(refused, p.Error), refused
    lens.timer(3.0)
    return core, lens


@pytest.mark.parametrize("is_full", [True, False])
def test_a_server_replays(tmp_path: Path, is_full: bool) -> None:
    core, lens = served(tmp_path, is_full=is_full)
    lens.dump(core, "SIGUSR1")
    outcome = replay(record_in(tmp_path))
    assert outcome.is_same, outcome
    assert not outcome.stopped
    assert [same for _, same in outcome.states] == [True]
    assert outcome.sent > 5


def test_another_value_is_a_difference(tmp_path: Path) -> None:
    core, lens = served(tmp_path, is_full=True)
    lens.close(core)
    record = record_in(tmp_path)
    pushes = [event for event in record.events if event.what is What.PACKET and len(event.parts) > 2]
    pushes[-1].parts[-1] = bytes(16)
    outcome = replay(record)
    assert not outcome.is_same
    assert "sent another packet then" in outcome.difference


def test_a_record_that_goes_on_after_something_unknown_stops_there(tmp_path: Path) -> None:
    core, lens = served(tmp_path, is_full=True)
    lens.request(lambda core, now: None, core, 4.0)
    assert isinstance(lens, FullLens)
    lens.note(What.UNKNOWN, 4.0, b"on_call", b"!")
    lens.note(What.TIMER, 5.0)
    outcome = replay(record_in(tmp_path))
    assert outcome.stopped == "on_call could not be written down"
    lens.close(core)


def test_a_full_disk_ends_the_record_and_not_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    core, lens = served(tmp_path, is_full=True)
    assert isinstance(lens, FullLens)
    lens._file.close()
    with open("/dev/full", "wb", buffering=0) as lens._file:
        lens.note(What.TIMER, 5.0)
        lens.note(What.TIMER, 6.0)
        lens.close(core)
    assert len([message for message in caplog.messages if "ends here" in message]) == 1
    assert not any(event.what is What.DIGEST for event in record_in(tmp_path).events)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({"role": "server", "dropped": 7}, "7 events before it are gone"),
        ({"role": "worker", "dropped": 0}, "no values of calls"),
        ({"role": "server", "is_full": True}, "the header of this record is damaged"),
    ],
)
def test_unreplayable_record_says_why(header: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        replay(Record(header, []))
