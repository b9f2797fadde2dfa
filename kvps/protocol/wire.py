"""Packets to frames and back; the only file that knows how bytes are laid out.

A packet is one head frame followed by the payload frames that its message declares. The head is
a fixed envelope of 48 octets, big-endian, and behind it the message's fields as one msgpack
array::

    "KV" version tag | job 16 | view 4 | role 1 | loans 1 | checked 1 | 0 | rank 4 | incarnation 8
    seq 8 | loan (nonce 8, lease 8, offset 8, size 8) ... | fields | checksum 4, if checked

Where the payload lies in memory that both ends share, loans of it stand in place of the frames. A
packet that goes over a wire ends its head with a checksum of all other octets, payload included. At
the end, so that a packet whose ``checked`` is damaged has something behind its fields, and is refused.

:func:`decode` takes any bytes and either returns a packet in which every field has its declared
type and range and every payload frame its declared size, or raises
:class:`~kvps.errors.ProtocolError`. Nothing is allocated on a peer's word: msgpack's limits are
set, tensors travel as raw frames beside the head, and their sizes are compared, never trusted.

The checksum is CRC-32, as zlib and Ethernet have it. TCP's own checksum has 16 bits, and a network
card, a switch or a proxy may compute it anew after it has damaged what it carries. CRC-32 finds
every error within 32 neighbouring bits, and of others all but one in four thousand million.

zlib-ng computes it at the speed of memory. Python's own zlib gives the same number at a fifth of
that speed, and serves where zlib-ng is not installed.
"""

from __future__ import annotations

import re
import struct
import sys
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from itertools import starmap
from operator import attrgetter
from typing import Any, NamedTuple, cast

import msgpack

from kvps.compression import spec
from kvps.dtypes import BY_ID, Spec
from kvps.errors import KvpsError, ProtocolError
from kvps.protocol.envelope import (
    ENTRIES_MAX,
    KEY_MAX,
    MESSAGES,
    RUNS_MAX,
    TEXT_MAX,
    Envelope,
    Loan,
    Message,
    Packet,
    Role,
    maker,
)
from kvps.protocol.membership import View
from kvps.protocol.stores import Entry
from kvps.protocol.values import Load, Push

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:  # pragma: no cover  # every test environment has zlib-ng
    from zlib import crc32


def checksum(parts: Iterable[bytes | memoryview]) -> int:
    """Return the CRC-32 of ``parts``, one after the other as if they were one, from 0 to 2^32-1.

    Args:
        parts: contiguous octets each.

    Example:
        >>> hex(checksum([b"1234", b"56789"]))
        '0xcbf43926'
    """
    value = 0
    for part in parts:
        value = crc32(part, value)
    return value


VERSION = 1
HEAD = struct.Struct("!2sBB16sIBBBxIQQ")
LOAN = struct.Struct("!QQQQ")
CHECKSUM = struct.Struct("!I")
HEAD_BYTES = HEAD.size
HEAD_BYTES_MAX = 1 << 20
PAYLOAD_FRAMES_MAX = 64
FRAME_BYTES_MAX = 64 << 20
ARRAY_MAX = 8192
"""Limits: octets of a head, payload frames of a packet, octets of one (64 MiB), elements of an
array or map of which :mod:`kvps.protocol` says nothing else."""

_INT_MAX = 2**63 - 1

_ROLES: dict[int, Role] = {role.value: role for role in Role if role is not Role.STANDBY}
_unpack_head = struct.Struct(HEAD.format.replace("x", "B")).unpack_from
"""Reads the reserved octet, too."""
_size: Callable[[Loan], int] = attrgetter("size")
_envelope, _loan, _packet = maker(Envelope), maker(Loan), maker(Packet)

_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")

Check = Callable[[object], object]
"""Returns the value as its declared type, or raises ProtocolError."""


class Damaged(ProtocolError):
    """A packet differs from the one sent: nothing in it can be believed, not even its sender."""


def encode(packet: Packet, *, checked: bool = False) -> list[bytes | memoryview]:
    """Return the frames of ``packet``: the head, then its payload as it is, uncopied.

    Of a packet with loans the payload stays where it is. One that is ``checked`` has a checksum,
    for which its payload is read once.
    """
    (job, view, role, rank, incarnation, seq), message, payload, loans = packet
    head = HEAD.pack(
        b"KV", VERSION, message.TAG, job, view, role, len(loans), checked, rank, incarnation, seq
    )
    body = _body_of_view(message) if type(message) is View else _pack(_VALUES[type(message)](message))
    parts = [head, *starmap(LOAN.pack, loans), body]
    if loans:
        payload = ()
    if checked:
        parts.append(CHECKSUM.pack(checksum([*parts, *payload])))
    return [b"".join(parts), *payload]


_pack: Callable[[object], bytes] = msgpack.Packer().pack
"""One packer serves all threads: it calls nothing that lets another thread run meanwhile."""
_view_body: tuple[Message | None, bytes] = None, b""
"""The view that was encoded last: it goes to every member, and is large where they are many."""


def _body_of_view(message: Message) -> bytes:
    global _view_body
    if message is not _view_body[0]:
        _view_body = message, _pack(_VALUES[View](message))
    return _view_body[1]


Unread = tuple[Envelope, type[Message], memoryview, tuple[memoryview, ...], int]
"""A packet of which only the envelope was read: that, the class of its message, its head without checksum,
its payload, and the number of loans behind the envelope."""


def decode(frames: Sequence[bytes | memoryview]) -> Packet:
    """Return the packet that ``frames`` spell: the head, and the payload.

    Raises:
        ProtocolError: for any bytes that are not a packet of this protocol.
        Damaged: if its checksum is not that of its octets.
    """
    return read_body(read_envelope([memoryview(frame).cast("B") for frame in frames]))


def read_envelope(frames: Sequence[memoryview]) -> Unread:
    """Return the packet that ``frames`` of octets spell as far as its envelope tells; see :func:`decode`.

    A receiver that judges packets by their envelope decodes nothing of a packet that it refuses.
    """
    if not 1 <= len(frames) <= 1 + PAYLOAD_FRAMES_MAX:
        raise ProtocolError(f"expected 1 to {1 + PAYLOAD_FRAMES_MAX} frames, got {len(frames)}")
    head, payload = frames[0], tuple(frames[1:])
    if not HEAD_BYTES < len(head) <= HEAD_BYTES_MAX:
        raise ProtocolError(
            f"expected a head of {HEAD_BYTES + 1} to {HEAD_BYTES_MAX} octets, got {len(head)}"
        )
    magic, version, tag, job, view, number, lent, checked, zero, rank, incarnation, seq = _unpack_head(head)
    if magic != b"KV" or version != VERSION:
        raise ProtocolError(f"expected a packet of version {VERSION}, got magic {magic!r} version {version}")
    if checked:
        head = _verified(head, checked, payload)
    kind = MESSAGES.get(tag)
    if kind is None:
        raise ProtocolError(f"no message has tag {tag}")
    if zero:
        raise ProtocolError("the envelope's reserved octet is not zero")
    role = _ROLES.get(number)
    if role is None:
        raise ProtocolError(f"no role has number {number}")
    if incarnation > _INT_MAX or seq > _INT_MAX:
        raise ProtocolError(f"incarnation {incarnation} or seq {seq} is over 2^63-1")
    return _envelope((job, view, role, rank, incarnation, seq)), kind, head, payload, lent


def read_body(unread: Unread) -> Packet:
    """Return the packet whose envelope was read; see :func:`decode`."""
    envelope, kind, head, payload, lent = unread
    loans: tuple[Loan, ...] = ()
    at = HEAD_BYTES
    if lent:
        at += lent * LOAN.size
        numbers = head[HEAD_BYTES:at]
        if len(numbers) < lent * LOAN.size:
            raise ProtocolError(f"a head of {len(head)} octets does not hold {lent} loans")
        if not bytes(numbers[::8]).isascii():  # the first octet of each number
            raise ProtocolError("a number in a loan is over 2^63-1")
        loans = tuple(map(_loan, LOAN.iter_unpack(numbers)))
    try:
        values = msgpack.unpackb(
            head[at:],
            use_list=False,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_no_twins,
            max_array_len=ARRAY_MAX,
            max_map_len=ARRAY_MAX,
            max_str_len=TEXT_MAX,
            max_bin_len=0,
            max_ext_len=0,
        )
    except KvpsError:
        raise
    except Exception as error:  # msgpack raises a dozen classes; all mean the same here
        raise ProtocolError(f"the fields are not msgpack: {type(error).__name__}") from error
    if type(values) is not tuple:
        raise ProtocolError(f"the fields are not an array but {type(values).__name__}")
    declared, required = _FIELDS[kind]
    if not required <= len(values) <= len(declared):
        raise ProtocolError(f"{kind.__name__} has {required} to {len(declared)} fields, got {len(values)}")
    message = kind(*_checked(declared, values))
    sizes = () if kind.payload_sizes is Message.payload_sizes else message.payload_sizes()
    if payload or loans or sizes:
        if payload and loans:
            raise ProtocolError(f"a {kind.__name__} with both payload frames and loans")
        got = tuple(map(_size, loans) if loans else map(len, payload))
        if len(loans) > 1 and isinstance(message, Load | Push):
            got = (_sum(message, got),)
        if got != sizes:
            raise ProtocolError(
                f"{kind.__name__} declares payload frames of {sizes!s:.60} octets, got {got!s:.60}"
            )
        if max(got) > FRAME_BYTES_MAX:
            raise ProtocolError(f"a payload frame is over {FRAME_BYTES_MAX} octets: {got!s:.60}")
    return _packet((envelope, message, payload, loans))


def _verified(head: memoryview, checked: int, payload: tuple[memoryview, ...]) -> memoryview:
    """Return a head without its checksum, which covers everything else."""
    if checked != 1:
        raise ProtocolError(f"the field checked must be 0 or 1, got {checked}")
    head, end = head[: -CHECKSUM.size], head[-CHECKSUM.size :]
    (said,), found = CHECKSUM.unpack(end), checksum([head, *payload])
    if said != found:
        size = len(head) + len(end) + sum([len(frame) for frame in payload])
        raise Damaged(
            f"a packet of {size} octets was damaged in transit: its checksum is {found:08x}, and its "
            f"sender computed {said:08x}. It counts as lost, and will be requested again"
        )
    return head


def _sum(message: Load | Push, sizes: tuple[int, ...]) -> int:
    """Return the octets of a payload that is lent in several places."""
    is_coded = isinstance(message, Push) and message.code is not None
    itemsize = 1 if is_coded else BY_ID[message.dtype].itemsize
    if any(size % itemsize for size in sizes):
        raise ProtocolError(f"a loan of {sizes!s:.60} octets ends within an element of {itemsize}")
    return sum(sizes)


def _no_twins(pairs: list[tuple[object, object]]) -> dict[object, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ProtocolError("a map has one key twice")
    return result


# --- from a declared type to its check ----------------------------------------------------------


class _Field(NamedTuple):
    """The values that a field of a message or record may have."""

    default: object
    kind: type
    least: Any
    most: Any
    """The default, and values of type ``kind`` within these bounds, need no further check."""
    check: Check
    """Checks all other values."""


def _checked(declared: Iterable[_Field], values: tuple[object, ...]) -> list[object]:
    """Return the values of fields; a call for each would cost more than all that is checked here."""
    return [
        value if value is default or (type(value) is kind and least <= value <= most) else check(value)
        for value, (default, kind, least, most, check) in zip(values, declared, strict=False)
    ]


def _unlike(expected: str, value: object) -> ProtocolError:
    """Return the error that names the expected type and the value; of an array or map only its type."""
    shown = f"{value!r:.60}" if isinstance(value, str | float | int | None) else type(value)
    return ProtocolError(f"expected {expected}, got {shown}")


@dataclass(frozen=True, slots=True)
class _Range:
    """A check of flags or numbers: the values of one type within bounds."""

    kind: type
    least: float
    most: float
    words: str

    def __call__(self, value: object) -> object:
        """Return ``value``, or an integer as the number that it stands for."""
        if self.kind is float and type(value) is int:
            value = float(value)
        if type(value) is not self.kind or not self.least <= cast("float", value) <= self.most:
            raise _unlike(self.words, value)
        return value


def _text(value: object) -> object:
    if type(value) is not str:
        raise _unlike("text", value)
    return value


def _key(value: object) -> object:
    if type(value) is not str or not 1 <= len(value) <= KEY_MAX or not value.isprintable():
        raise _unlike(f"a key of 1 to {KEY_MAX} printable characters", value)
    return value


def _public(value: object) -> object:
    if type(value) is not str or (value and not _Z85.fullmatch(value)):
        raise _unlike("a public key in Z85, or nothing", value)
    return value


_INTEGER = _Range(int, -_INT_MAX, _INT_MAX, "an integer of 63 bits")
_NATURAL = _Range(int, 0, _INT_MAX, "an integer from 0 to 2^63-1")
_NATURAL_32 = _Range(int, 0, 2**32 - 1, "an integer from 0 to 2^32-1")
_DTYPE = _Range(int, min(BY_ID), max(BY_ID), "the number of an element type")
assert sorted(BY_ID) == [*range(min(BY_ID), max(BY_ID) + 1)], "a number of an element type is left out"

_BY_TYPE: dict[object, Check] = {
    int: _NATURAL,
    bool: _Range(bool, False, True, "true or false"),
    float: _Range(float, -sys.float_info.max, sys.float_info.max, "a finite number"),
    str: _text,
    types.NoneType: lambda none: none,  # within a union only, which has looked at the type
}

_BY_FIELD: dict[str, Check] = {
    "dtype": _DTYPE,
    "Found.dtype": replace(_DTYPE, least=0),
    "key": _key,
    "keys": _key,
    "store": _key,
    "publication": _key,
    "ServersAre.keys": _public,
    "role": _Range(int, min(Role), max(Role), "the number of a role"),
    "rank": _NATURAL_32,
    "creator": _NATURAL_32,
    "ranks": _NATURAL_32,
    "culprits": _NATURAL_32,
    "View.number": _NATURAL_32,
    "View.keys": _public,
    "ViewChanges.number": _NATURAL_32,
    "ViewChanges.base": _NATURAL_32,
    "ViewChanges.keys": _public,
    "Enrol.public": _public,
    "Enrol.command": _public,
    "Rendezvous.run": _key,
    "exit_code": _INTEGER,
    "numbers": _INTEGER,
    "held": _INTEGER,
}
"""Integers and texts whose field, or class and field, says more than their type does."""


def _check_for(hint: object, owner: type, name: str) -> Check:
    """Return the check of one declared type; recursive for tuples, maps and unions."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return _array_of(arguments[0], owner, name)
    if origin is dict:
        return _map_of(_check_for(arguments[1], owner, name))
    if origin is types.UnionType:
        return _one_of({_plain(argument): _check_for(argument, owner, name) for argument in arguments})
    if isinstance(hint, type) and issubclass(hint, tuple):
        return _record_of(hint)
    if hint in (int, str):
        return _BY_FIELD.get(f"{owner.__name__}.{name}") or _BY_FIELD.get(name) or _BY_TYPE[hint]
    return _BY_TYPE[hint]


def _field(default: object, check: Check) -> _Field:
    if isinstance(check, _Range):
        return _Field(default, check.kind, check.least, check.most, check)
    return _Field(default, _Field, 0, 0, check)  # no value is a _Field, so that each is checked


def _array_of(hint: object, owner: type, name: str) -> Check:
    limit = {"runs": RUNS_MAX, "entries": ENTRIES_MAX}.get(name, ARRAY_MAX)
    if isinstance(hint, type) and issubclass(hint, tuple) and {*_checks_of(hint)} == {_NATURAL}:
        return _table_of(hint, name, limit)
    _, kind, least, most, check = _field(None, _check_for(hint, owner, name))

    def array(value: object) -> object:
        if type(value) is not tuple or len(value) > limit:
            raise _unlike(f"in {name} an array of at most {limit}", value)
        for element in value:
            if type(element) is not kind or not least <= element <= most:
                return tuple(map(check, value))
        return value

    return array


def _table_of(cls: type[tuple[object, ...]], name: str, limit: int) -> Check:
    """Return the check of an array of records that are integers from 0: it may have thousands."""
    width, new = len(typing.get_type_hints(cls)), tuple.__new__

    def table(value: object) -> object:
        if type(value) is not tuple or len(value) > limit:
            raise _unlike(f"in {name} an array of at most {limit}", value)
        records = []
        for row in value:
            if type(row) is not tuple or len(row) != width:
                raise _unlike(f"a {cls.__name__} of {width} fields", row)
            for number in row:
                if type(number) is not int or not 0 <= number <= _INT_MAX:
                    raise _unlike(f"in a {cls.__name__} integers from 0 to 2^63-1", number)
            records.append(new(cls, row))
        return tuple(records)

    return table


def _map_of(check: Check) -> Check:
    def mapping(value: object) -> object:
        if type(value) is not dict:
            raise _unlike("a map", value)
        return {_text(key): check(element) for key, element in value.items()}

    return mapping


def _plain(hint: type) -> type:
    """Return the type that msgpack gives for a value of type ``hint``."""
    return tuple if issubclass(hint, tuple) else hint


def _one_of(checks: dict[type, Check]) -> Check:
    names = " or ".join(check.__name__ for check in checks)

    def union(value: object) -> object:
        check = checks.get(type(value))
        if check is None:
            raise _unlike(names, value)
        return check(value)

    return union


def _checks_of(cls: type) -> list[Check]:
    return [_check_for(hint, cls, name) for name, hint in typing.get_type_hints(cls).items()]


def _record_of(cls: type[tuple[object, ...]]) -> Check:
    declared = [_field(_Field, check) for check in _checks_of(cls)]
    width, finish = len(declared), _FINISH.get(cls)

    def record(value: object) -> object:
        if type(value) is not tuple or len(value) != width:
            raise _unlike(f"a {cls.__name__} of {width} fields", value)
        made = tuple.__new__(cls, _checked(declared, value))
        return made if finish is None else finish(made)

    return record


def _within(entry: Entry) -> Entry:
    """Check an entry's shape, and that its part lies inside the key."""
    try:
        count = Spec(BY_ID[entry.dtype].name, entry.shape).count
    except KvpsError as error:
        raise ProtocolError(str(error)) from error
    if entry.start + entry.size > count:
        raise ProtocolError(
            f"key {entry.key!r} has {count} elements; the part {entry.start} + {entry.size} goes beyond them"
        )
    return entry


_FINISH: dict[type, Callable[[typing.Any], object]] = {Entry: _within, spec.CodecSpec: spec.check}
"""Further checks of a record whose fields are valid."""


def _fields_of(cls: type[Message]) -> tuple[list[_Field], int]:
    hints = typing.get_type_hints(cls)
    declared = fields(cls)  # type: ignore[arg-type]  # every registered message is a dataclass
    required = sum(field.default is MISSING and field.default_factory is MISSING for field in declared)
    checks = [_check_for(hints[field.name], cls, field.name) for field in declared]
    return [_field(field.default, check) for field, check in zip(declared, checks, strict=True)], required


def _values_of(cls: type[Message]) -> Callable[[Message], object]:
    """Return the function that gets the values of the fields of a message."""
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]  # as above
    return (
        attrgetter(*names) if len(names) > 1 else lambda message: [getattr(message, name) for name in names]
    )


_FIELDS = {cls: _fields_of(cls) for cls in MESSAGES.values()}
_VALUES = {cls: _values_of(cls) for cls in MESSAGES.values()}
