"""Files of records, and the values in them."""

import dataclasses
import io

import msgpack
import numpy as np
import pytest
import torch

from kvps import protocol as p
from kvps.core.optim.hyperparams import HyperParams
from kvps.core.server.snapshot.storage import FoundCuts, Loaded
from kvps.core.worker.calls import Flush, PullValues, PushValues
from kvps.core.worker.calls.dense import Views
from kvps.dtypes import Spec
from kvps.errors import ConfigError, StorageError
from kvps.protocol.envelope import Envelope, Loan, Packet, Role
from kvps.tools.replay.format import (
    MAGIC,
    Event,
    Record,
    What,
    checksum_of,
    event_bytes,
    packet_of,
    packet_parts,
    read,
    route_bytes,
    route_of,
    write_header,
)
from kvps.tools.replay.values import Decoder, Encoder, dumps

WORKER = Envelope(bytes(range(16)), 3, Role.WORKER, 1, 5, 42)
PUSH = p.Push(3, 1, (1,), 1.0, True, (p.Run(0, 2, 5),))
PAYLOAD = (memoryview(np.array([1.0, -2.0], np.float32)).cast("B"),)


def file_of(*events: Event, header: dict[str, object] | None = None) -> io.BytesIO:
    file = io.BytesIO()
    write_header(file, header or {"role": "server"})
    for event in events:
        file.write(event_bytes(event))
    file.seek(0)
    return file


# --- files ------------------------------------------------------------------------------------------


def test_events_come_back() -> None:
    events = [
        Event(What.TIMER, 1.5),
        Event(What.DROP, 2.0, [b"sserver 1"]),
        Event(What.ITEM, 3.0, [b"", b"x"]),
    ]
    assert read(file_of(*events)) == Record({"role": "server"}, events)


@pytest.mark.parametrize("cut", [1, 10, 20])
def test_a_process_that_was_killed_leaves_an_unfinished_event(cut: int) -> None:
    whole = file_of(Event(What.TIMER, 1.5), Event(What.DROP, 2.0, [b"sserver 1"])).getvalue()
    record = read(io.BytesIO(whole[:-cut]))
    assert record.is_cut
    assert [event.what for event in record.events] == [What.TIMER]


@pytest.mark.parametrize(
    ("octets", "why"),
    [
        (b"", "no record"),
        (b"PK\3\4" * 9, "no record"),
        (MAGIC, "header"),
        (MAGIC + b"\2\0\0\0\0\0\0\0[]", "header"),
        (file_of().getvalue() + bytes(17), "damaged"),
        (file_of().getvalue() + b"\4" + b"\xff" * 16, "damaged"),
        (file_of().getvalue() + b"\4" + bytes(8) + b"\3" + bytes(7) + b"abc", "damaged"),
    ],
)
def test_another_file_is_refused(octets: bytes, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read(io.BytesIO(octets))


@pytest.mark.parametrize("route", ["scheduler", "server 3", b"\x00\x80abc"])
def test_routes_come_back(route: str | bytes) -> None:
    assert route_of(route_bytes(route)) == route


@pytest.mark.parametrize("loans", [(), (Loan(1, 2, 3, 4), Loan(1, 2, 30, 4))])
def test_packets_come_back_with_their_payload(loans: tuple[Loan, ...]) -> None:
    payload = PAYLOAD if not loans else (PAYLOAD[0][:4], PAYLOAD[0][4:])
    packet = Packet(WORKER, PUSH, payload, loans)
    event = Event(What.PACKET, 1.0, [b"bw", *packet_parts(packet)])
    found = packet_of(event)
    assert found == packet
    assert not found.payload[0].readonly, "a round may add to it"


def test_a_damaged_packet_is_refused() -> None:
    with pytest.raises(ConfigError, match="a packet of this record is damaged"):
        packet_of(Event(What.PACKET, 1.0, [b"bw", bytes(60)]))


def test_a_checksum_is_of_head_and_payload() -> None:
    first = checksum_of(Packet(WORKER, PUSH, PAYLOAD))
    assert first == checksum_of(Packet(WORKER, PUSH, (bytes(PAYLOAD[0]),)))  # type: ignore[arg-type]
    assert first != checksum_of(Packet(WORKER, PUSH, (memoryview(bytes(8)),)))
    assert first != checksum_of(Packet(WORKER, p.Beat(3)))


# --- values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, -(2**70), 2**64 - 1, 0.1, float("inf"), "text", b"octets", (), [1, (2, "x")]),
        *({"a": 1, ("b", 2): [None]}, {3, 1, 2}, frozenset({"a"}), range(2, 9, 3)),
        *(Views.VIEWS, What.TIMER and p.Run(1, 2, 3), Spec("float32", (2, 3)), PUSH),
        Flush("weights"),
        PullValues("w", ("a",), Views.VIEWS, (1,), 4),
        HyperParams("adam", {"lr": 0.1}),
        FoundCuts((1, 2), 3, None),
    ],
    ids=repr,
)
def test_values_come_back(value: object) -> None:
    again = Decoder().loads(Encoder().pack(value))
    assert again == value
    assert type(again) is type(value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "uint8"])
def test_tensors_come_back_bit_for_bit(dtype: str) -> None:
    value = torch.arange(6).reshape(2, 3).to(getattr(torch, dtype))
    again = Decoder().loads(Encoder().pack(value))
    assert torch.equal(again, value)
    assert again.dtype == value.dtype
    again.fill_(1)  # it can be written to
    empty = Decoder().loads(Encoder().pack(value[:0]))
    assert empty.shape == (0, 3)


def test_a_tensor_that_occurs_twice_is_one() -> None:
    row = torch.tensor([1.0, 2.0])
    call = PushValues("w", ("a",), (row,), (row,), 0, True)
    again = Decoder().loads(Encoder().pack(call))
    assert again.rows[0] is again.sinks[0]
    assert torch.equal(again.rows[0], row)
    assert again.rows[0].data_ptr() != row.data_ptr()


def test_arrays_and_errors_come_back() -> None:
    array = Decoder().loads(Encoder().pack(np.array([[1, 2]], np.int64)))
    assert array.tolist() == [[1, 2]]
    error = Decoder().loads(Encoder().pack(StorageError("no space")))
    assert type(error) is StorageError
    assert str(error) == "no space"


def test_things_that_a_replay_has_are_named_by_their_place() -> None:
    asker = object()
    octets = Encoder(lambda thing: 4 if thing is asker else None).pack(Loaded(None, asker))
    things: dict[int, object] = {4: "the asker"}
    assert Decoder(things.__getitem__).loads(octets) == Loaded(None, "the asker")


def test_values_that_are_no_data_are_not_written() -> None:
    @dataclasses.dataclass
    class Other:
        value: int = 0

    for value in (object(), print, Other(), torch.zeros(2, dtype=torch.complex64)):
        with pytest.raises(ConfigError):
            Encoder().pack(value)
    deep: list[object] = []
    for _ in range(200):
        deep = [deep]
    assert dumps(lambda _: None, deep) is None
    assert dumps(lambda _: None, (1,)) == Encoder().pack((1,))


@pytest.mark.parametrize(
    "octets",
    [
        b"\xc1",
        b"\x92\xa1",
        Encoder().pack(Flush("w")).replace(b"Flush", b"Flash"),
        Encoder().pack(Flush("w")).replace(b"kvps.core.worker", b"os.system.worker"),
        msgpack.packb(msgpack.ExtType(99, b"\x01")),
    ],
)
def test_a_record_can_name_no_other_class(octets: bytes) -> None:
    with pytest.raises(ConfigError, match="a value of this record is damaged"):
        Decoder().loads(octets)
