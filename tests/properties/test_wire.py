"""Any packet survives the wire; any bytes are a packet or a ProtocolError, and soon."""

import dataclasses
import gc
import time
import types
import typing
from collections.abc import Callable

import msgpack
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvps.compression.spec import TABLE, CodecSpec
from kvps.dtypes import BY_ID, DTYPES
from kvps.errors import ProtocolError
from kvps.protocol.envelope import MESSAGES, Envelope, Message, Packet, Role
from kvps.protocol.membership import View, ViewChanges
from kvps.protocol.publications import ServersAre
from kvps.protocol.replicas import CopyRows
from kvps.protocol.stores import Entry, Found
from kvps.protocol.values import Pulled, Steps
from kvps.protocol.wire import HEAD, decode, encode
from tests.support import tiers
from tests.vectors.packets import KEY, PACKETS


def examples(count: int) -> settings:
    """So many examples, however busy the machine is."""
    return tiers.examples(count, suppress_health_check=[HealthCheck.too_slow])


# --- from the declarations to packets -----------------------------------------------------------

DECODE_MAX_S = 5.0
"""Far below a hang. The worst of these takes 0.16 s, and over 1 s where coverage traces a busy machine."""

naturals = st.integers(0, 2**63 - 1)
naturals_32 = st.integers(0, 2**32 - 1)
sizes = st.integers(0, 40)
floats = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
keys = st.text(st.characters(categories=["L", "M", "N", "P", "S"]), min_size=1, max_size=20)
public_keys = st.sampled_from(["", KEY, KEY[::-1]])
dtypes = st.sampled_from(sorted(BY_ID))
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)

BY_TYPE = {int: naturals, bool: st.booleans(), float: floats, str: texts, type(None): st.none()}
BY_NAME = {
    "dtype": dtypes,
    "key": keys,
    "keys": keys,
    "public": public_keys,
    "command": public_keys,
    "store": keys,
    "publication": keys,
    "run": keys,
    "shape": st.integers(0, 5),
    "rank": naturals_32,
    "creator": naturals_32,
    "ranks": naturals_32,
    "culprits": naturals_32,
    "role": st.sampled_from(range(3)),
    "size": sizes,
    "dim": sizes,
    "width": sizes,
    "count": sizes,
    "counts": sizes,
    "exit_code": st.integers(-(2**63) + 1, 2**63 - 1),
    "numbers": st.integers(-(2**63) + 1, 2**63 - 1),
    "held": st.integers(-(2**63) + 1, 2**63 - 1),
}


def values(hint: object, name: str) -> st.SearchStrategy[typing.Any]:
    """What a field of this declared type and name may hold."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return st.lists(values(arguments[0], name), max_size=5).map(tuple)
    if origin is dict:
        return st.dictionaries(texts, values(arguments[1], name), max_size=5)
    if origin is types.UnionType:
        return st.one_of([values(argument, name) for argument in arguments])
    if hint is Entry:
        return entries()
    if hint is CodecSpec:
        return codes
    if isinstance(hint, type) and issubclass(hint, tuple):
        hints = typing.get_type_hints(hint)
        record = st.tuples(*[values(item, field) for field, item in hints.items()])
        return record.map(typing.cast("type[Entry]", hint)._make)
    return BY_NAME.get(name, BY_TYPE[hint]) if hint in (int, str) else BY_TYPE[hint]


codes = st.builds(
    CodecSpec, st.sampled_from(sorted(TABLE)), st.floats(1e-10, 1), st.floats(1e-20, 1e20), naturals
)


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    """A key, and a part of it that lies within it."""
    shape = draw(shapes)
    count = 1
    for dim in shape:
        count *= dim
    start = draw(st.integers(0, count))
    return Entry(draw(keys), draw(dtypes), shape, start, draw(st.integers(0, count - start)))


def messages_of(cls: type[Message]) -> st.SearchStrategy[Message]:
    hints = typing.get_type_hints(cls)
    fields = {
        field.name: values(hints[field.name], field.name)
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
    }
    if cls in (View, ViewChanges):
        fields["number"] = naturals_32
    if cls in (View, ViewChanges, ServersAre):
        fields["keys"] = st.lists(public_keys, max_size=5).map(tuple)
    if cls is CopyRows:  # of so many there is payload
        fields |= dict.fromkeys(("rows", "vacant", "ids"), sizes)
    if cls is ViewChanges:
        fields["base"] = naturals_32
    if cls is Pulled:
        fields["steps"] = st.just(())
        return st.builds(cls, **fields).flatmap(by_steps)
    return st.builds(cls, **fields)


def by_steps(pulled: Pulled) -> st.SearchStrategy[Message]:
    """The same answer, or one of as many steps as it has runs."""
    count = len(pulled.runs)
    steps = st.lists(values(Steps, "steps"), min_size=count, max_size=count).map(tuple)
    return steps.map(lambda some: dataclasses.replace(pulled, steps=some)) | st.just(pulled)


envelopes = st.builds(
    Envelope,
    st.binary(min_size=16, max_size=16),
    naturals_32,
    st.sampled_from([role for role in Role if role is not Role.STANDBY]),
    naturals_32,
    naturals,
    naturals,
)


@st.composite
def packets_of(draw: st.DrawFn, cls: type[Message]) -> Packet:
    """A packet of that class, with the payload that it declares."""
    message = draw(messages_of(cls))
    seed = draw(st.binary(min_size=1, max_size=8))
    payload = tuple(memoryview((seed * size)[:size]) for size in message.payload_sizes())
    return Packet(draw(envelopes), message, payload)


packets = st.sampled_from(list(MESSAGES.values())).flatmap(packets_of)


# --- round trip ---------------------------------------------------------------------------------


@pytest.mark.spec("R4", "R8")
@pytest.mark.parametrize("cls", MESSAGES.values(), ids=lambda cls: cls.__name__)
@examples(25)
@given(st.data())
def test_round_trip(cls: type[Message], data: st.DataObject) -> None:
    packet = data.draw(packets_of(cls))
    frames = encode(packet)
    assert decode(frames) == packet
    assert encode(decode([bytes(frame) for frame in frames])) == frames


def test_a_found_key_may_be_of_no_type() -> None:
    assert {dtype.id for dtype in DTYPES} == set(BY_ID)
    assert 0 not in BY_ID
    assert Found(0, ()) in PACKETS["FOUND-ALL"].message.found  # type: ignore[attr-defined]


# --- anything else ------------------------------------------------------------------------------


def attempt(frames: list[bytes]) -> None:
    """Decode, and check that there is no third way."""
    gc.disable()  # how much else there is to collect is not the decoder's fault
    began = time.process_time()
    try:
        outcome: Packet | ProtocolError = decode(frames)
    except ProtocolError as error:
        outcome = error
    finally:
        gc.enable()
    assert time.process_time() - began < DECODE_MAX_S
    if isinstance(outcome, ProtocolError):
        assert len(str(outcome)) < 1000
    else:
        assert decode(encode(outcome)) == outcome


def heads(body: st.SearchStrategy[bytes]) -> st.SearchStrategy[list[bytes]]:
    """Packets with a right envelope and these fields."""
    envelope = st.sampled_from([bytes(encode(item)[0])[: HEAD.size] for item in PACKETS.values()])
    payload = st.lists(st.binary(max_size=16), max_size=2)
    return st.builds(lambda head, body, rest: [head + body, *rest], envelope, body, payload)


atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    texts,
    st.binary(max_size=8),
    st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=8)),
)
trees = st.recursive(
    atoms,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=30,
)


@pytest.mark.spec("R14")
@examples(200)
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_any_frames(frames: list[bytes]) -> None:
    attempt(frames)


@pytest.mark.spec("R7", "R14")
@examples(300)
@given(heads(st.binary(min_size=1, max_size=200)))
def test_any_fields(frames: list[bytes]) -> None:
    attempt(frames)


@pytest.mark.spec("R7", "R8", "R9", "R14")
@examples(300)
@given(heads(st.lists(trees, max_size=8).map(msgpack.packb)))
def test_any_fields_of_any_type(frames: list[bytes]) -> None:
    attempt(frames)


@pytest.mark.spec("R8", "R9", "R14")
@examples(300)
@given(packets, st.data())
def test_field_of_another_type_is_refused_or_decoded(packet: Packet, data: st.DataObject) -> None:
    head, *payload = [bytes(frame) for frame in encode(packet)]
    fields = msgpack.unpackb(head[HEAD.size :])
    if fields:
        fields[data.draw(st.integers(0, len(fields) - 1))] = data.draw(trees)
    attempt([head[: HEAD.size] + msgpack.packb(fields), *payload])


flips = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4)


@pytest.mark.spec("R4", "R5", "R14")
@examples(500)
@given(packets, flips)
@example(PACKETS["BEAT"], [(24, 9)])
def test_flipped_octets(packet: Packet, flips: list[tuple[int, int]]) -> None:
    head, *payload = [bytes(frame) for frame in encode(packet)]
    damaged = bytearray(head)
    for at, octet in flips:
        damaged[at % len(damaged)] = octet
    attempt([bytes(damaged), *payload])


Change = Callable[[list[bytes], int], list[bytes]]
CHANGES: dict[str, Change] = {
    "cut": lambda frames, at: [frames[0][: at % len(frames[0])], *frames[1:]],
    "cut out": lambda frames, at: [frames[0][:at] + frames[0][at + 1 :], *frames[1:]],
    "double": lambda frames, at: frames + frames[at % len(frames) :],
    "drop": lambda frames, at: frames[:-1],
    "reverse": lambda frames, at: frames[::-1],
    "append": lambda frames, at: [frames[0] + bytes(at), *frames[1:]],
    "short payload": lambda frames, at: [*frames[:-1], frames[-1][:-1]],
}


@pytest.mark.spec("R4", "R6", "R14")
@pytest.mark.parametrize("change", CHANGES)
@examples(50)
@given(packets, st.integers(0, 300))
def test_frames_out_of_shape(change: str, packet: Packet, at: int) -> None:
    attempt(CHANGES[change]([bytes(frame) for frame in encode(packet)], at))


NASTY = {
    "nested arrays": b"\x91" * 1000 + b"\x90",
    "empty maps": b"\xdc\x00\x78" + (b"\xdc\x20\x00" + b"\x80" * 8192) * 120,
    "empty arrays": b"\xdc\x00\x78" + (b"\xdc\x20\x00" + b"\x90" * 8192) * 120,
    "one key": b"\x91\xde\x20\x00" + b"\xa1x\x01" * 8192,
    "zeros": bytes(1_000_000),
    "texts": b"\xdc\x01\x00" + (b"\xda\x0f\x00" + b"\n" * 0x0F00) * 256,
}


def nasty_heads() -> list[tuple[str, str]]:
    """Return the messages and contents of today: each message with one of the contents, another one each day."""
    return [
        (name, nasty)
        for row, name in enumerate(PACKETS)
        for column, nasty in enumerate(NASTY)
        if tiers.plays_all() or (row + column + tiers.day()) % len(NASTY) == 0
    ]


@pytest.mark.spec("R14")
@pytest.mark.parametrize(("name", "nasty"), nasty_heads())
def test_a_whole_head_of_one_nasty_thing(name: str, nasty: str) -> None:
    attempt([bytes(encode(PACKETS[name])[0])[: HEAD.size] + NASTY[nasty]])
