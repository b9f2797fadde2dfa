"""Messages between the primary of a seat and its standby: the copy of all that the seat holds.

The primary numbers what it sends by the ``seq`` of the envelopes, without gaps. An OPEN for each store goes
along. What a message says of a thing replaces all that was said of it before.
"""

from __future__ import annotations

from typing import NamedTuple

from kvps.dtypes import BY_ID
from kvps.protocol.envelope import Message, tag
from kvps.protocol.stores import Field, Piece, StoreLife


@tag(52)
class Follow(Message):
    """Standby to primary: send me all that the seat holds, and what changes in it."""


@tag(53)
class CopyBegin(Message):
    """Primary to standby: forget what you were sent; the copy begins anew."""


@tag(54)
class CopyStores(Message):
    """Primary to standby: of the stores that you have, these are here."""

    names: tuple[str, ...]
    lives: tuple[StoreLife, ...]
    """The last life of each store that has ended and is known, the oldest first."""
    workers: dict[str, int]
    """Rank -> the newest incarnation that the primary has heard of."""


class CopiedRefusal(NamedTuple):
    """A call of all ranks that cannot be done, and why."""

    what: str
    """The key that was to be made, or the setting."""
    is_key: bool
    call: int
    refused: int
    code: int
    text: str


@tag(55)
class CopyStore(Message):
    """Primary to standby: the settings of a store."""

    store: str
    restored: int
    stamps: int
    closed: dict[str, int]
    """Rank -> the incarnation that has closed it."""
    joins_over: int
    joins_last: dict[str, int]
    joins_made: dict[str, int]
    name: str
    """That of the optimizer that was set last; empty before the first. What follows is as in OPTIMIZE."""
    numbers: dict[str, bool | int | float | None]
    lr_mult: dict[str, float]
    wd_mult: dict[str, float]
    calls: int
    after: int
    lr: float
    """The present learning rate of the optimizer."""
    rate: float
    """As RATE has set it last."""
    rate_calls: int
    rate_after: int
    refusals: tuple[CopiedRefusal, ...]
    outside: tuple[int, ...]
    """The ranks whose replacement has not entered the store."""
    entered: dict[str, int]
    """Rank of an added worker -> the incarnation that has entered the store."""


@tag(56)
class CopyChunk(Message):
    """Primary to standby: where the keys of a chunk lie; without names, that the chunk is gone."""

    store: str
    chunk: int
    dtype: int
    capacity: int
    names: tuple[str, ...]
    bounds: tuple[int, ...]
    retired: tuple[int, ...]
    """Where pieces begin whose keys were replaced."""
    blank: tuple[int, ...]
    """Where pieces begin that have no value yet."""


class CopiedKey(NamedTuple):
    """A key, its place, and which DECLARE has given it a value."""

    key: str
    dtype: int
    shape: tuple[int, ...]
    start: int
    size: int
    calls: int
    """One more than the last DECLARE whose value is loaded; 0 for none."""
    loading: int
    """One more than the DECLARE whose value is being loaded; 0 for none."""
    rank: int
    incarnation: int
    """The rank and the process that load it."""
    stamp: int
    born: int
    pieces: tuple[Piece, ...]
    offsets: tuple[int, ...]
    loaded: tuple[int, ...]
    """For each piece one more than the elements loaded so far; 0 if that is all of them."""


@tag(57)
class CopyKeys(Message):
    """Primary to standby: these keys of a store are so, and those are gone."""

    store: str
    copied: tuple[CopiedKey, ...]
    gone: tuple[str, ...]


class CopiedDrop(NamedTuple):
    """The last update of a key that was not made, since its gradient was not finite."""

    rank: int
    """Rank of the push, plus 1; 0 for a round."""
    start: int
    number: int
    values: int
    ranks: tuple[int, ...]
    """From ``start`` on as in PULLED."""


@tag(58)
class CopyValues(Message):
    """Primary to standby: neighbouring elements of a chunk, their history and the optimizer's states."""

    chunk: int
    dtype: int
    start: int
    size: int
    version: int
    step: int
    pushed: dict[str, int]
    """Rank -> the pushes that are in the values."""
    head_start: dict[str, int]
    clock_from: dict[str, int]
    fields: tuple[Field, ...]
    dropped: tuple[CopiedDrop, ...] = ()
    """Updates of these elements that readers are told of."""

    def payload_sizes(self) -> tuple[int, ...]:
        """The values, then one frame per field."""
        states = [BY_ID[field.dtype].itemsize * field.size for field in self.fields]
        return (BY_ID[self.dtype].itemsize * self.size, *states)


@tag(65)
class CopyRows(Message):
    """Primary to standby: rows of an embedding table by their slots, their history, and how often ids without
    a row were pushed."""

    chunk: int
    version: int
    step: int
    pushed: dict[str, int]
    """Rank -> the pushes that are in the rows."""
    head_start: dict[str, int]
    clock_from: dict[str, int]
    lr: float
    rows: int
    """Slots that have a row."""
    vacant: int
    """Slots that have none any more."""
    counted: int
    """Pushes counted since the counts were last halved."""
    ids: int
    """Ids whose counts go along."""
    counts: int
    """Octets of these counts, or of all."""
    more: bool
    """The table is as it says here only with the rows that follow."""
    fields: tuple[Field, ...]
    """The columns, elements of all rows together."""

    def payload_sizes(self) -> tuple[int, ...]:
        """Slots, first those with a row; ids and versions of the rows; a frame for each field; the ids that
        are counted; the counts. None is empty."""
        columns = [BY_ID[field.dtype].itemsize * field.size for field in self.fields]
        rows = 8 * self.rows
        sizes = (rows + 8 * self.vacant, rows, rows, *columns, 8 * self.ids, self.counts)
        return tuple([size for size in sizes if size])


@tag(66)
class CopyBlock(Message):
    """Primary to standby: a block of a published version."""

    publication: str
    number: int
    block: int
    dtype: int
    as_dtype: int
    """The type of its elements, and that in which they are read."""
    is_chunk: bool
    """It is the chunk of this number, as it is now."""
    size: int

    def payload_sizes(self) -> tuple[int, ...]:
        """The octets."""
        return (self.size,) if self.size else ()


@tag(67)
class CopyVersion(Message):
    """Primary to standby: a version is complete."""

    publication: str
    number: int
    age_s: float
    size: int

    def payload_sizes(self) -> tuple[int, ...]:
        """The manifest, if this server has it."""
        return (self.size,) if self.size else ()


@tag(68)
class CopyPublication(Message):
    """Primary to standby: a publication has these versions, and no others."""

    publication: str
    store: str
    keep: int
    last: int
    """The highest number that was heard of."""
    announced: tuple[int, ...]
    """The last complete versions, some of which may be gone."""
    versions: tuple[int, ...]


@tag(59)
class CopyLevel(Message):
    """Primary to standby: you have all. From now on nobody is told what you may not have."""


@tag(64)
class Followed(Message):
    """Standby to primary: I have all up to this number."""

    number: int
