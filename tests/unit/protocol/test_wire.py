"""The decoder against everything that is not a packet, and what the encoder promises."""

import pickle
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgpack
import pytest

from kvps import protocol as m
from kvps.core.server.options import CHUNK_BYTES_MAX
from kvps.errors import ProtocolError
from kvps.protocol import wire
from kvps.protocol.envelope import MESSAGES, Message, Packet
from kvps.protocol.wire import HEAD, HEAD_BYTES_MAX, Damaged, decode, encode
from tests.vectors.packets import KEY, PACKETS, WORKER, floats

Frames = list[bytes]


def frames_of(name: str) -> Frames:
    return [bytes(frame) for frame in encode(PACKETS[name])]


def with_body(name: str, body: bytes, *payload: bytes) -> Frames:
    """A packet of that kind whose fields are these bytes."""
    return [frames_of(name)[0][: HEAD.size] + body, *payload]


def with_fields(name: str, *values: object, payload: Sequence[bytes] = ()) -> Frames:
    return with_body(name, msgpack.packb(values), *payload)


def with_head(name: str, at: int, octets: bytes) -> Frames:
    """A packet of that kind with other octets in its envelope."""
    head, *payload = frames_of(name)
    return [head[:at] + octets + head[at + len(octets) :], *payload]


def refused(frames: Sequence[bytes | memoryview], match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        decode(frames)


# --- what comes through -------------------------------------------------------------------------


@pytest.mark.spec("R8", "R14")
@pytest.mark.parametrize("name", PACKETS)
def test_round_trip(name: str) -> None:
    assert decode(encode(PACKETS[name])) == PACKETS[name]


def test_a_view_that_goes_to_many_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[object] = []
    pack = wire._pack

    def counted(fields: object) -> bytes:
        packed.append(fields)
        return pack(fields)

    monkeypatch.setattr(wire, "_pack", counted)
    first, second = m.View(1, "running", "", ()), m.View(2, "running", "", ())
    views = [first, first, second, first]
    heads = [encode(Packet(WORKER, view))[0] for view in views]
    assert len(packed) == 3
    assert heads[0] == heads[1] == heads[3] != heads[2]
    assert [decode([head]).message for head in heads] == views


def test_payload_is_not_copied() -> None:
    values = floats(1.0, -2.0, 0.5)
    frames = encode(Packet(WORKER, PACKETS["PUSH"].message, (values,)))
    assert frames[1] is values
    received = bytearray(values)
    packet = decode([frames[0], memoryview(received)])
    received[:4] = bytes(floats(7.0))
    assert packet.payload[0][:4] == bytes(floats(7.0))


def test_payload_of_another_format_is_seen_as_octets() -> None:
    frames = encode(PACKETS["PUSH"])
    assert decode([frames[0], memoryview(frames[1]).cast("f")]) == PACKETS["PUSH"]


def test_records_are_of_their_class() -> None:
    (run, _) = decode(frames_of("PUSH")).message.runs  # type: ignore[attr-defined]
    assert type(run) is m.Run
    (entry, _) = decode(frames_of("DECLARE")).message.entries  # type: ignore[attr-defined]
    assert type(entry) is m.Entry
    assert type(decode(frames_of("PUSH")).envelope.role) is m.Role


@pytest.mark.spec("R8")
@pytest.mark.parametrize("value", [True, False, 0, -1, 2**63 - 1, -(2**63 - 1), 0.5, -0.0, None])
def test_numbers_of_an_optimizer_keep_their_type(value: object) -> None:
    message = m.Optimize("s", 1, True, "sgd", {"x": value})  # type: ignore[dict-item]
    got = decode(encode(Packet(WORKER, message))).message.numbers["x"]  # type: ignore[attr-defined]
    assert (got, type(got)) == (value, type(value))


@pytest.mark.spec("R8")
def test_a_number_may_be_written_as_an_integer() -> None:
    lr = decode(with_fields("RATE", "s", 1, True, 2)).message.lr  # type: ignore[attr-defined]
    assert (lr, type(lr)) == (2.0, float)


@pytest.mark.spec("R75")
@pytest.mark.parametrize("count", range(8, 12))
def test_missing_fields_have_their_defaults(count: int) -> None:
    values = [1, 7, "2.0", 0, 1, 3, "host", 1, "tcp://here:1", True, "there:2"][:count]
    assert decode(with_fields("HELLO", *values)).message == m.Hello(*values)


@pytest.mark.spec("R12")
@pytest.mark.parametrize(
    ("shape", "start", "size"),
    [((), 0, 1), ((0,), 0, 0), ((2, 3), 6, 0), ((2, 3), 1, 5), ((1,) * 16, 0, 1), ((2**40,), 0, 1)],
)
def test_entry_within_its_key(shape: tuple[int, ...], start: int, size: int) -> None:
    entry = m.Entry("w", 1, shape, start, size)
    packet = Packet(WORKER, m.Declare("s", False, 0, (entry,)))
    assert decode(encode(packet)) == packet


@pytest.mark.spec("R4")
def test_a_pulled_without_values_has_no_payload() -> None:
    packet = Packet(WORKER, m.Pulled(1, 0, 1, False, (m.Stand(0, 10**9, 1, 1),)))
    assert decode(encode(packet)) == packet


@pytest.mark.spec("R4")
def test_a_push_of_nothing_has_an_empty_frame() -> None:
    packet = Packet(WORKER, m.Push(0, 1, (3,), 1.0, False, ()), (memoryview(b""),))
    assert decode(encode(packet)) == packet


@pytest.mark.spec("R6", "R10")
def test_the_largest_messages_come_through() -> None:
    runs = tuple(m.Run(i, 1, 2**63 - 1) for i in range(m.RUNS_MAX))
    packet = Packet(WORKER, m.Push(0, 5, (0,), 1.0, True, runs), (memoryview(bytes(len(runs))),))
    assert decode(encode(packet)) == packet
    entries = tuple(m.Entry(f"{i:0>{m.KEY_MAX}}", 1, (2**30,), 0, 2**30) for i in range(m.ENTRIES_MAX))
    packet = Packet(WORKER, m.Declare("s", True, 0, entries))
    assert decode(encode(packet)) == packet
    packet = Packet(WORKER, m.Error(1, 1, "x" * m.TEXT_MAX))
    assert decode(encode(packet)) == packet


@pytest.mark.spec("R6")
def test_a_head_has_at_most_a_mebibyte() -> None:
    def head(size: int) -> bytes:
        reasons = ["x" * 4096] * 255
        frame = with_fields("PROBED", [], [(1, reason) for reason in [*reasons, "x" * 300]])[0]
        missing = size - len(frame)
        fields = [(1, reason) for reason in [*reasons, "x" * (300 + missing)]]
        return with_fields("PROBED", [], fields)[0]

    assert len(head(2**20)) == 2**20
    decode([head(2**20)])
    refused([head(2**20 + 1)], "head of 49 to 1048576 octets, got 1048577")


@pytest.mark.spec("R5", "R8")
def test_the_largest_numbers_come_through() -> None:
    envelope = m.Envelope(b"\xff" * 16, 2**32 - 1, m.Role.SERVER, 2**32 - 1, 2**63 - 1, 2**63 - 1)
    packet = Packet(envelope, m.Welcome(2**32 - 1, 2**63 - 1, 1, 1))
    assert decode(encode(packet)) == packet


# --- framing ------------------------------------------------------------------------------------


@pytest.mark.spec("R4", "R5", "R6", "R14")
@pytest.mark.parametrize(
    ("frames", "match"),
    [
        ([], "1 to 65 frames"),
        ([b""], "head of 49"),
        ([b"x"], "head of 49"),
        ([b"\0" * 48], "head of 49"),
        (frames_of("BEAT") * 66, "1 to 65 frames"),
        (frames_of("BEAT") * 1000, "1 to 65 frames"),
        ([frames_of("BEAT")[0] + bytes(HEAD_BYTES_MAX)], "head of 49"),
        ([b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: probe\r\n\r\n"], "magic b'GE'"),
        ([b"\x16\x03\x01" + bytes(100)], "magic"),
        (with_head("BEAT", 0, b"kv"), "magic b'kv'"),
        (with_head("BEAT", 2, b"\x00"), "version 0"),
        (with_head("BEAT", 2, b"\x02"), "expected a packet of version 1, got .* version 2"),
        (with_head("BEAT", 24, b"\x05"), "role has number 5"),
        (with_head("BEAT", 27, b"\x01"), "reserved"),
        (with_head("BEAT", 32, b"\xff"), "over 2\\^63-1"),
        (with_head("BEAT", 40, b"\x80"), "over 2\\^63-1"),
        (frames_of("PUSH")[:1], r"\(12,\) octets, got \(\)"),
        ([*frames_of("PUSH"), b""], r"got \(12, 0\)"),
        (frames_of("PUSH")[::-1], "head of 49"),
        ([frames_of("PUSH")[0], bytes(11)], r"got \(11,\)"),
        ([frames_of("PUSH")[0], bytes(13)], r"got \(13,\)"),
        ([*frames_of("BEAT"), b""], r"\(\) octets, got \(0,\)"),
        (frames_of("STATE-IS")[:2], r"\(8, 8\) octets, got \(8,\)"),
    ],
)
def test_framing(frames: Frames, match: str) -> None:
    refused(frames, match)


@pytest.mark.spec("R74")
@pytest.mark.parametrize("tag", sorted(set(range(256)) - set(MESSAGES)))
def test_unknown_tag(tag: int) -> None:
    refused(with_head("BEAT", 3, bytes([tag])), f"no message has tag {tag}")


@pytest.mark.spec("R6")
def test_a_payload_frame_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "FRAME_BYTES_MAX", 12)
    decode(frames_of("PUSH"))
    monkeypatch.setattr(wire, "FRAME_BYTES_MAX", 11)
    refused(frames_of("PUSH"), "over 11 octets")


@pytest.mark.spec("R14")
def test_a_size_that_is_merely_claimed_is_compared_and_no_more() -> None:
    runs = [(0, 2**63 - 1, 0)] * m.RUNS_MAX
    refused(with_fields("PUSH", 0, 2, [0], 1, False, runs, payload=[b"12345678"]), "declares")
    fields = [("exp_avg", 2, 2**63 - 1)] * 64
    refused(with_fields("STATE-IS", 1, 1, fields, payload=[b"12345678"] * 64), "declares")
    refused(with_fields("STATE-IS", 1, 1, fields * 100, payload=[b""] * 64), "declares")


# --- loans --------------------------------------------------------------------------------------


def lent(name: str, *loans: m.Loan, payload: Sequence[memoryview] = ()) -> Frames:
    """A packet of that kind whose payload is lent; ``payload`` comes beside it."""
    packet = PACKETS[name]
    frames = encode(Packet(packet.envelope, packet.message, (), loans))
    return [bytes(frame) for frame in (*frames, *payload)]


NONCE = 0x0123456789ABCDEF
LENT = (m.Loan(NONCE, 17, 4096, 8), m.Loan(NONCE, 17, 8192, 4))
"""What a PUSH of three float32 lends in two places."""


@pytest.mark.spec("R4", "R5")
@pytest.mark.parametrize(
    ("name", "loans"),
    [
        ("PUSH", (m.Loan(NONCE, 1, 4096, 12),)),
        ("PUSH", LENT),
        ("PUSH", (*LENT, *[m.Loan(NONCE, 17, 4096, 0)] * 253)),
        ("PULLED", (m.Loan(0, 0, 0, 6),)),
        ("STATE-IS", (m.Loan(NONCE, 1, 4096, 8), m.Loan(NONCE, 1, 64, 8))),
        ("LOAD", (m.Loan(2**63 - 1, 2**63 - 1, 2**63 - 1, 8),)),
    ],
)
def test_loans_come_through_in_place_of_payload(name: str, loans: tuple[m.Loan, ...]) -> None:
    frames = lent(name, *loans)
    assert len(frames) == 1
    packet = decode(frames)
    assert packet == Packet(PACKETS[name].envelope, PACKETS[name].message, (), loans)
    assert all(type(loan) is m.Loan for loan in packet.loans)


@pytest.mark.spec("R4", "R5", "R14")
def test_the_octets_of_a_loan() -> None:
    """As docs/protocol.md shows them."""
    text = (Path(__file__).resolve().parents[3] / "docs" / "protocol.md").read_text("utf-8")
    shown = re.findall(r"```text\n(.*?)```", text, re.DOTALL)[-1]
    assert "".join(re.sub(r"#.*|\s", "", shown)) == lent("PUSH", *LENT)[0].hex()


@pytest.mark.spec("R5", "R14")
def test_a_head_that_holds_fewer_loans_than_it_says() -> None:
    (head,) = lent("PUSH", *LENT)
    for length in range(HEAD.size + 1, HEAD.size + 2 * wire.LOAN.size):
        refused([head[:length]], f"head of {length} octets does not hold 2 loans")
    refused([head[: HEAD.size + 2 * wire.LOAN.size]], "not msgpack")
    refused(with_head("BEAT", 25, b"\x01"), "does not hold 1 loans")
    refused(with_head("DECLARE", 25, b"\xff"), "does not hold 255 loans")


@pytest.mark.spec("R5", "R14")
@pytest.mark.parametrize("field", m.Loan._fields)
def test_a_number_of_a_loan_that_is_too_large(field: str) -> None:
    loan = m.Loan(NONCE, 1, 4096, 12)._replace(**{field: 2**63})
    refused(lent("PUSH", loan), "a number in a loan is over 2\\^63-1")


@pytest.mark.spec("R4", "R14")
@pytest.mark.parametrize(
    ("frames", "match"),
    [
        (lent("PUSH", *LENT, payload=[floats(1.0, -2.0, 0.5)]), "both payload frames and loans"),
        (lent("PUSH", m.Loan(NONCE, 1, 4096, 8)), r"\(12,\) octets, got \(8,\)"),
        (lent("PUSH", m.Loan(NONCE, 1, 4096, 16)), r"\(12,\) octets, got \(16,\)"),
        (lent("PUSH", *LENT, LENT[0]), r"\(12,\) octets, got \(20,\)"),
        (lent("PUSH", *[m.Loan(NONCE, 1, 4096, 2**63 - 4)] * 3), r"\(12,\) octets, got \(27670"),
        (lent("PUSH", *[m.Loan(NONCE, 1, 4096, 6)] * 2), "ends within an element of 4"),
        (lent("BEAT", m.Loan(NONCE, 1, 4096, 8)), r"\(\) octets, got \(8,\)"),
        (lent("BEAT", m.Loan(NONCE, 1, 4096, 0)), r"\(\) octets, got \(0,\)"),
        (lent("STATE-IS", m.Loan(NONCE, 1, 4096, 16)), r"\(8, 8\) octets, got \(16,\)"),
        (lent("SET-STATE", *[m.Loan(NONCE, 1, 0, 4)] * 2), r"\(8,\) octets, got \(4, 4\)"),
        (lent("PULLED", *[m.Loan(NONCE, 1, 0, 4)] * 2), r"\(6,\) octets, got \(4, 4\)"),
    ],
)
def test_loans_that_are_not_what_is_declared(frames: Frames, match: str) -> None:
    refused(frames, match)


@pytest.mark.spec("R6")
def test_oversized_loan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "FRAME_BYTES_MAX", 12)
    decode(lent("PUSH", *LENT))
    monkeypatch.setattr(wire, "FRAME_BYTES_MAX", 11)
    refused(lent("PUSH", *LENT), "over 11 octets")


@pytest.mark.spec("R75", "R92")
def test_an_open_of_before_has_chunks_of_a_mebibyte() -> None:
    message = decode(with_fields("OPEN", "s", "sync", 0, False, "wait", 7)).message
    assert message == m.Open("s", "sync", 0, False, "wait", 7, 1 << 20)


# --- checksums ----------------------------------------------------------------------------------


def checked(name: str, *loans: m.Loan) -> Frames:
    """A packet of that kind with a checksum; with loans in place of its payload if some are given."""
    packet = PACKETS[name]
    if loans:
        packet = Packet(packet.envelope, packet.message, (), loans)
    return [bytes(frame) for frame in encode(packet, checked=True)]


@pytest.mark.spec("R110", "R112")
@pytest.mark.parametrize("name", PACKETS)
def test_a_packet_is_the_same_with_a_checksum_and_without(name: str) -> None:
    plain, frames = frames_of(name), checked(name)
    assert decode(frames) == decode(plain) == PACKETS[name]
    assert frames[1:] == plain[1:]
    head = frames[0]
    assert head[:26] + b"\0" + head[27:-4] == plain[0]
    assert head[26] == 1
    everything = head[:-4] + b"".join(frames[1:])
    assert int.from_bytes(head[-4:], "big") == zlib.crc32(everything)


@pytest.mark.spec("R110")
def test_loans_are_not_part_of_the_checksum() -> None:
    (head,) = checked("PUSH", *LENT)
    assert decode([head]).loans == LENT
    assert int.from_bytes(head[-4:], "big") == zlib.crc32(head[:-4])


FLIPPED = {**{name: checked(name) for name in PACKETS}, "PUSH, lent": checked("PUSH", *LENT)}


@pytest.mark.spec("R14", "R111")
@pytest.mark.parametrize("name", FLIPPED)
def test_no_bit_may_change(name: str) -> None:
    """Each bit of each octet of each frame, the checksum and the octet that announces it included."""
    frames = FLIPPED[name]
    for place, frame in enumerate(frames):
        for at in range(len(frame)):
            for bit in range(8):
                damaged = bytearray(frame)
                damaged[at] ^= 1 << bit
                refused([*frames[:place], damaged, *frames[place + 1 :]], ".")


@pytest.mark.spec("R111")
def test_damaged_packet_is_told_from_a_malformed_packet() -> None:
    head, payload = checked("PUSH")
    with pytest.raises(Damaged, match=r"of \d+ octets was damaged .* checksum is [0-9a-f]{8}, and"):
        decode([head, payload[:-1] + b"\x3e"])
    with pytest.raises(Damaged):  # nothing in it is believed: not even that no message has its tag
        decode([head[:3] + b"\xff" + head[4:], payload])


@pytest.mark.spec("R5", "R111")
def test_a_packet_is_checked_or_not() -> None:
    head, payload = checked("PUSH")
    refused([head[:26] + b"\x02" + head[27:], payload], "checked must be 0 or 1, got 2")
    refused([head[:26] + b"\x00" + head[27:], payload], "ExtraData")
    refused([head[:48], payload], "head of 49")
    refused([head[:49], payload], "damaged")


@pytest.mark.spec("R111")
def test_frames_that_were_exchanged_are_damaged() -> None:
    head, first, second = checked("STATE-IS")
    assert len(first) == len(second)
    refused([head, second, first], "damaged")


# --- msgpack ------------------------------------------------------------------------------------

LIES = {
    "array16": b"\xdc\xff\xff",
    "array32": b"\xdd\xff\xff\xff\xff",
    "map32": b"\xdf\xff\xff\xff\xff",
    "text32": b"\xdb\xff\xff\xff\xff",
    "binary32": b"\xc6\xff\xff\xff\xff",
    "extension32": b"\xc9\xff\xff\xff\xff\x01",
}


@pytest.mark.spec("R7", "R14")
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("before", [b"", b"\x91", b"\x92"])
def test_claimed_lengths(lie: str, before: bytes) -> None:
    refused(with_body("BEAT", before + LIES[lie]), "not msgpack")


@pytest.mark.spec("R7", "R14")
@pytest.mark.parametrize("name", PACKETS)
def test_a_head_that_is_cut_anywhere(name: str) -> None:
    head, *payload = frames_of(name)
    for length in range(len(head)):
        refused([head[:length], *payload], "head of 49|not msgpack")


@pytest.mark.spec("R7", "R14")
@pytest.mark.parametrize(
    ("body", "match"),
    [
        (b"\xc1", "FormatError"),
        (b"\xc0", "not an array but NoneType"),
        (b"\x05", "not an array but int"),
        (b"\x80", "not an array but dict"),
        (b"\xa1x", "not an array but str"),
        (b"\x92\x01\xa0\xc0", "ExtraData"),
        (b"\x92\x01\xa0\xc1", "not msgpack"),
        (b"\x92\x01\xa1\xff", "UnicodeDecodeError"),
        (b"\x92\x01\xa3\xed\xa0\x80", "UnicodeDecodeError"),
        (b"\x92\x01\xc4\x00", "expected text, got <class 'bytes'>"),
        (b"\x92\x01\xc4\x01x", "not msgpack"),
        (b"\x92\x01\xc7\x00\x05", "expected text, got <class 'msgpack.ext.ExtType'>"),
        (b"\x92\x01\xd4\x05x", "not msgpack"),
        (b"\x92\x01\xd6\xff\x00\x00\x00\x00", "not msgpack"),
        (b"\x92\x01\xc7\x0c\xff" + b"\xff" * 12, "not msgpack"),
        (b"\x92\x01\xda\x10\x01" + b"x" * 4097, "not msgpack"),
        (b"\x92" + b"\x91" * 400 + b"\x90\xa0", "got <class 'tuple'>"),
        (b"\x92" + b"\x91" * 1000 + b"\x90\xa0", "got <class 'tuple'>"),
        (b"\x92" + b"\x91" * 100_000 + b"\x90\xa0", "StackError"),
        (b"\x92" + b"\x81\xa0" * 100_000 + b"\x80\xa0", "StackError"),
        (b"\x92\xdc\x20\x01" + b"\x00" * 8193, "not msgpack"),
        (pickle.dumps({"x": 1}), "not msgpack|not an array"),
    ],
)
def test_bodies(body: bytes, match: str) -> None:
    refused(with_body("BEAT", body), match)


@pytest.mark.spec("R7")
@pytest.mark.parametrize(
    ("a_map", "match"),
    [
        (b"\x82\xa1x\x01\xa1x\x02", "one key twice"),
        (b"\x82\xa1x\x01\xa1x\x01", "one key twice"),
        (b"\x81\x01\x01", "not msgpack"),
        (b"\x81\xc0\x01", "not msgpack"),
        (b"\x81\x90\x01", "not msgpack"),
        (b"\x81\xc4\x00\x01", "expected text, got <class 'bytes'>"),
        (b"\x81\xa1\xff\x01", "UnicodeDecodeError"),
    ],
)
def test_maps(a_map: bytes, match: str) -> None:
    refused(with_body("OPTIMIZE", b"\x95\xa1s\x01\xc3\xa3sgd" + a_map), match)


@pytest.mark.spec("R10")
def test_a_map_that_is_too_large() -> None:
    decode(with_fields("OPTIMIZE", "s", 1, True, "sgd", {f"{i}": i for i in range(8192)}))
    refused(with_fields("OPTIMIZE", "s", 1, True, "sgd", {f"{i}": i for i in range(8193)}), "not msgpack")


@pytest.mark.spec("R14")
def test_pickle_in_any_field_is_only_bytes() -> None:
    """Were anything unpickled here, the exit would be seen."""

    class Bomb:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
            return (exec, ("raise SystemExit('executed')",))

    bomb = pickle.dumps(Bomb())
    for name, cls in zip(PACKETS, MESSAGES.values(), strict=True):
        for index in range(len(fields_of(cls))):
            values = [*fields_of(cls)]
            values[index] = bomb
            with pytest.raises(ProtocolError):
                decode(with_fields(name, *values))


def fields_of(cls: type[Message]) -> list[object]:
    packet = next(item for item in PACKETS.values() if type(item.message) is cls)
    return [getattr(packet.message, name) for name in cls.__dataclass_fields__]  # type: ignore[attr-defined]


# --- fields -------------------------------------------------------------------------------------


@pytest.mark.spec("R75")
@pytest.mark.parametrize(
    ("name", "values", "match"),
    [
        ("BEAT", [], "Beat has 1 to 11 fields, got 0"),
        ("BEAT", [1, "", 0, 0, 0, 0, 0, False, 0, 0, False, 0], "Beat has 1 to 11 fields, got 12"),
        ("LEFT", [0], "Left has 0 to 0 fields, got 1"),
        ("BEAT", [0] * 8192, "got 8192"),
        ("BEAT", [0] * 10_000, "not msgpack"),
        ("HELLO", [1, 0, "0.1.0", 0, 2, None, "host"], "8 to 12 fields, got 7"),
        ("HELLO", [1, 0, "0.1.0", 0, 2, None, "host", 1, "", True, "", 0, 0], "got 13"),
    ],
)
def test_number_of_fields(name: str, values: list[object], match: str) -> None:
    refused(with_fields(name, *values), match)


NAN, INFINITY = float("nan"), float("inf")
NOT_NATURAL = [-1, -(2**63), 2**63, 2**64 - 1, True, 1.0, "1", None, [], {}, NAN]


@pytest.mark.spec("R8", "R9")
@pytest.mark.parametrize(
    ("name", "values", "match"),
    [
        *(("BEAT", [value], "integer from 0 to 2\\^63-1") for value in NOT_NATURAL),
        *(("PROBE", [[value]], "integer from 0 to 2\\^63-1") for value in NOT_NATURAL),
        *(("ACK", [[(1, value)]], "Receipt integers from 0") for value in NOT_NATURAL),
        *(("PULL", [0, True, [(value, 1, 1, 1)]], "Ask integers") for value in NOT_NATURAL),
        *(
            ("STOP", [value, ""], "integer of 63 bits")
            for value in (-(2**63), 2**63, True, 1.0, "1", None, [])
        ),
        *(
            ("WELCOME", [value, 1, 1, 1], "integer from 0 to 2\\^32-1")
            for value in (-1, 2**32, True, 1.0, None)
        ),
        ("VIEW", [2**32, "running", "", []], "integer from 0 to 2\\^32-1"),
        ("VIEW", [1, "running", "", [(5, 0, 1, "held", "", "", 0, "", 0)]], "number of a role"),
        ("VIEW", [1, "running", "", [(2, -1, 1, "held", "", "", 0, "", 0)]], "2\\^32-1"),
        ("VIEW", [1, "running", "", [(2, 1, 1, "held", "", "", NAN, "", 0)]], "finite"),
        ("VIEW", [1, "running", "", [(2, 1, 1, "held", "", "", 0)]], "Member of 9 fields"),
        ("VIEW", [1, "running", "", [{}]], "Member of 9 fields"),
        ("HELLO", [1, 0, "", 0, 5, None, "", 1], "number of a role, got 5"),
        ("HELLO", [1, 0, "", 0, True, None, "", 1], "number of a role, got True"),
        ("HELLO", [1, 0, "", 0, 2, "0", "", 1], "expected int or NoneType, got '0'"),
        ("HELLO", [1, 0, "", 0, 2, 2**32, "", 1], "2\\^32-1"),
        ("HELLO", [1, 0, "", 0, 2, False, "", 1], "expected int or NoneType, got False"),
        ("LEAVE", [1, 0, True, ""], "true or false, got 1"),
        ("LEAVE", [None, 0, True, ""], "true or false, got None"),
        ("BEAT", [0, 0], "text, got 0"),
        ("BEAT", [0, None], "text, got None"),
        *(
            ("RATE", ["s", 1, True, value], "finite number")
            for value in (NAN, INFINITY, -INFINITY, "0.1", True, None, [], {})
        ),
        ("OPTIMIZE", ["s", 1, True, "sgd", {"lr": NAN}], "finite number"),
        ("OPTIMIZE", ["s", 1, True, "sgd", {"lr": "0.1"}], "expected bool or int or float or"),
        ("OPTIMIZE", ["s", 1, True, "sgd", {"lr": 2**64 - 1}], "63 bits"),
        ("OPTIMIZE", ["s", 1, True, "sgd", {"lr": [0.1]}], "expected bool or int or float or"),
        ("OPTIMIZE", ["s", 1, True, "sgd", [0.1]], "a map, got <class 'tuple'>"),
        ("OPTIMIZE", ["s", 1, True, "sgd", {}, {"w": INFINITY}], "finite number"),
        ("OPTIMIZE", ["s", 1, True, "sgd", {}, {}, {"w": None}], "finite number"),
        ("OPTIMIZE", ["s", 1, True, ["sgd"], {}], "text, got <class 'tuple'>"),
        ("NORMS", ["s", "w", None, 1, [NAN], False], "finite number"),
        ("PUSH", [0, 1, [-1], 1.0, True, []], "2\\^32-1"),
        ("PUSH", [0, 1, [1], NAN, True, []], "finite number"),
        ("PUSH", [0, 1, 3, 1.0, True, []], "in ranks an array"),
        ("PUSH", [0, 1, [3], 1.0, True, {}], "in runs an array"),
        ("PUSH", [0, 1, [3], 1.0, True, [1]], "a Run of 3 fields, got 1"),
        ("PUSH", [0, 1, [3], 1.0, True, [(1, 1)]], "a Run of 3 fields"),
        ("PUSH", [0, 1, [3], 1.0, True, [(1, 1, 1, 1)]], "a Run of 3 fields"),
        ("DECLARED", [1, [(True, [(0, 0)])]], "a Piece of 3 fields"),
    ],
)
def test_types_and_ranges(name: str, values: list[object], match: str) -> None:
    refused(with_fields(name, *values), match)


@pytest.mark.spec("R10")
@pytest.mark.parametrize("key", ["", "x" * 257, "a\0b", "a\nb", "\x1b[31m", "\u202e", 3, None, []])
@pytest.mark.parametrize("field", ["key", "keys", "store"])
def test_names_of_keys_and_stores(key: object, field: str) -> None:
    frames = {
        "key": with_fields("DECLARE", "s", True, 0, [(key, 1, (), 0, 1)]),
        "keys": with_fields("FIND", "s", [key]),
        "store": with_fields("STATUS", key),
    }
    refused(frames[field], "a key of 1 to 256 printable characters")


@pytest.mark.spec("R10")
@pytest.mark.parametrize("key", ["x" * 256, "層" * 256, "layer 1/weight", "../etc/passwd", "'"])
def test_a_key_is_opaque(key: str) -> None:
    packet = Packet(WORKER, m.Find(key, (key,)))
    assert decode(encode(packet)) == packet


@pytest.mark.spec("R10")
@pytest.mark.parametrize(
    ("name", "values", "match"),
    [
        ("PUSH", [0, 1, [3], 1.0, True, [(0, 0, 0)] * (m.RUNS_MAX + 1)], "in runs an array"),
        ("PULL", [0, True, [(0, 0, 0, 0)] * (m.RUNS_MAX + 1)], "in runs an array"),
        ("DECLARE", ["s", True, 0, [("w", 1, (), 0, 1)] * (m.ENTRIES_MAX + 1)], "in entries an array"),
        ("PROBE", [[1] * 8193], "not msgpack"),
    ],
)
def test_arrays_that_are_too_long(name: str, values: list[object], match: str) -> None:
    refused(with_fields(name, *values), match)


# --- tensors ------------------------------------------------------------------------------------


@pytest.mark.spec("R11")
@pytest.mark.parametrize("dtype", [0, 10, 255, -1, True, 1.0, "float32", "O", None, []])
@pytest.mark.parametrize("name", ["PUSH", "DECLARE", "STATE-IS"])
def test_element_types(dtype: object, name: str) -> None:
    frames = {
        "PUSH": with_fields("PUSH", 0, dtype, [3], 1.0, True, [], payload=[b""]),
        "DECLARE": with_fields("DECLARE", "s", True, 0, [("w", dtype, (), 0, 1)]),
        "STATE-IS": with_fields("STATE-IS", 1, 1, [("x", dtype, 0)], payload=[b""]),
    }
    refused(frames[name], "number of an element type")


@pytest.mark.spec("R11")
@pytest.mark.parametrize("dtype", [10, 255, False, 0.0, None])
def test_element_types_of_found(dtype: object) -> None:
    assert decode(with_fields("FOUND-ALL", 1, [(0, (), 0)])).message == m.FoundAll(1, (m.Found(0, ()),))
    refused(with_fields("FOUND-ALL", 1, [(dtype, (), 0)]), "number of an element type")


@pytest.mark.spec("R12")
@pytest.mark.parametrize(
    ("shape", "start", "size", "match"),
    [
        ((2, -3), 0, 1, "integer from 0"),
        ((2, True), 0, 1, "integer from 0"),
        ((2**62,), 0, 1, "outside the limits"),
        ((1,) * 17, 0, 1, "outside the limits"),
        ((1,) * 65, 0, 1, "outside the limits"),
        ((2**63 - 1,) * 8192, 0, 1, "outside the limits"),
        ((2**40, 2), 0, 1, "over 4398046511104 bytes"),
        ((2**32, 2**32), 0, 0, "over 4398046511104 bytes"),
        ((2**40,) * 16, 0, 0, "over 4398046511104 bytes"),
        ((2, 3), 0, 7, "goes beyond"),
        ((2, 3), 6, 1, "goes beyond"),
        ((2, 3), 7, 0, "goes beyond"),
        ((2, 0), 0, 1, "goes beyond"),
        ((), 1, 1, "goes beyond"),
        ((2, 3), 2**63 - 1, 2**63 - 1, "goes beyond"),
    ],
)
def test_shapes(shape: tuple[int, ...], start: int, size: int, match: str) -> None:
    refused(with_fields("DECLARE", "s", True, 0, [("w", 1, shape, start, size)]), match)


# --- what a refusal says ------------------------------------------------------------------------


@pytest.mark.spec("R14")
@pytest.mark.parametrize(
    "value",
    ["\n" * 4096, "\x1b[2J", [["x"] * 8000] * 8, {"x" * 4000: 1}, 2**64 - 1],
    ids=["long", "escape", "array", "map", "integer"],
)
def test_a_refusal_is_one_short_printable_line(value: object) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(with_fields("BEAT", value))
    assert re.fullmatch(r"expected an integer from 0 to 2\^63-1, got .{1,60}", str(caught.value))
    assert str(caught.value).isprintable()


@pytest.mark.spec("R14")
@pytest.mark.parametrize("key", ["x", KEY[1:], KEY + "x", KEY[1:] + "~", "\n" * 40, 7, None])
def test_a_public_key_is_one_or_nothing(key: object) -> None:
    enrol = wire.encode(PACKETS["ENROL"])
    with pytest.raises(ProtocolError, match="a public key in Z85"):
        wire.decode([enrol[0][:48] + msgpack.packb([key, ""])])
    assert wire.decode([enrol[0][:48] + msgpack.packb(["", KEY])]).message == m.Enrol("", KEY)


def test_a_chunk_of_halves_fits_a_frame_as_float32() -> None:
    assert 2 * CHUNK_BYTES_MAX <= wire.FRAME_BYTES_MAX
