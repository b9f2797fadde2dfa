"""Messages that carry values: loads, pushes, pulls, rows of keys and of embedding tables."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

from kvps.compression.spec import CodecSpec
from kvps.compression.spec import size as size_of
from kvps.dtypes import BY_ID
from kvps.protocol.envelope import Answer, Message, tag
from kvps.protocol.stores import Field

ROWS_FRAME_BYTES = 32 << 20
ROWS_FRAMES_MAX = 63
"""Limits of the rows in a message: octets of a payload frame, unless one row is larger; and number
of frames."""
IDS_FRAME_BYTES = 64 << 20
"""Most octets of the frame that holds the numbers of rows."""


# --- values ---------------------------------------------------------------------------------------


class Run(NamedTuple):
    """Neighbouring elements of a chunk that one push covers, and the push's number."""

    start: int
    size: int
    number: int


class StepPart(NamedTuple):
    """A server's part of a step: of the keys that one push call names, where gradients are clipped
    by their norm over all of them."""

    digest: int
    """A hash of the keys' names, and of the push number of each below ``number``."""
    number: int
    """The highest push number among the keys. With ``digest`` it identifies the step, and every
    rank derives the same."""
    size: int
    """The number of elements of the step on the receiving server."""
    holders: tuple[int, ...]
    """The servers that hold elements of the step, in ascending order; the first adds up the norm."""


class Ask(NamedTuple):
    """Neighbouring elements of a chunk that a pull wants, and the conditions for the answer."""

    start: int
    size: int
    after: int
    """Pushes of this rank that must have been applied to them."""
    least: int
    """The lowest version that will do."""


class Stand(NamedTuple):
    """Version of neighbouring elements of a chunk when they are read."""

    start: int
    size: int
    version: int
    owed: int
    """The number of the push that this rank owes next."""


_size = attrgetter("size")


def _octets(dtype: int, stand: Stand, steps: Steps) -> int:
    """Return the octets of the run ``stand``, written as ``steps``."""
    if steps.whole:
        return BY_ID[dtype].itemsize * stand.size
    return sum([size_of(code, stand.size) for code in steps.codes])


def rows_in_frame(dtype: int, width: int) -> int:
    """Return the number of rows of ``width`` elements that one payload frame holds."""
    return max(1, ROWS_FRAME_BYTES // max(1, width * BY_ID[dtype].itemsize))


def rows_in_message(dtype: int, width: int) -> int:
    """Return the number of rows of ``width`` elements that one message holds with their numbers."""
    return min(rows_in_frame(dtype, width) * ROWS_FRAMES_MAX, IDS_FRAME_BYTES // 8)


def _id_sizes(count: int) -> tuple[int, ...]:
    """Return the size of the frame of ``count`` row numbers; no frame for no rows."""
    return (8 * count,) if count else ()


def _row_sizes(dtype: int, width: int, count: int) -> tuple[int, ...]:
    """Return the sizes of the frames that ``count`` rows fill one after another."""
    each, row = rows_in_frame(dtype, width), width * BY_ID[dtype].itemsize
    if count > each * ROWS_FRAMES_MAX:
        return (count * row,)  # larger than any frame may be
    full, rest = divmod(count, each)
    return (each * row,) * full + ((rest * row,) if rest else ())


@tag(30)
class Load(Message):
    """Creator to server: the first value of these elements, or that of the k-th broadcast."""

    chunk: int
    dtype: int
    runs: tuple[Run, ...]
    """The elements; ``number`` is the ``call`` of the DECLARE that asked for them."""

    def payload_sizes(self) -> tuple[int, ...]:
        """One frame: the elements of all runs, side by side."""
        return (BY_ID[self.dtype].itemsize * sum(map(_size, self.runs)),)


@tag(29)
class Give(Message):
    """Worker to a server that has taken another's place: values that I was told last."""

    store: str
    chunk: int
    dtype: int
    broadcasts: int
    """Broadcasts of the store that the sender had made when it was told."""
    runs: tuple[Run, ...]
    """The elements; ``number`` is their version."""

    def payload_sizes(self) -> tuple[int, ...]:
        """One frame: the elements of all runs, side by side."""
        return (BY_ID[self.dtype].itemsize * sum(map(_size, self.runs)),)


@tag(31)
class Push(Message):
    """Worker to server: a gradient for these elements."""

    chunk: int
    dtype: int
    ranks: tuple[int, ...]
    """The ranks it speaks for."""
    weight: float
    """Its weight in a mean; its elements are multiplied by it."""
    pull: bool
    """Whether to answer with the new values."""
    runs: tuple[Run, ...]
    code: CodecSpec | None = None
    """Codec of the elements of each run; None for uncompressed elements."""
    back: CodecSpec | None = None
    """Codec in which ranks pull the update that this push makes; None for an uncompressed update."""
    held: tuple[int, ...] = ()
    """Version of the values that the sender has, for each run, or -1 for none; empty if the answer is not to
    be written as steps from there."""
    since: tuple[int, ...] = ()
    """For each run the number after the sender's push before this one; empty in a store that drops
    late pushes."""
    step: StepPart | None = None
    """The step of the push in a store whose optimizer clips gradients by their global norm; else None."""

    def payload_sizes(self) -> tuple[int, ...]:
        """One frame: the elements of all runs, side by side."""
        if self.code is None:
            return (BY_ID[self.dtype].itemsize * sum(map(_size, self.runs)),)
        code = self.code
        return (sum([size_of(code, run.size) for run in self.runs]),)


class Receipt(NamedTuple):
    """Receipt of one push or load: its number on the connection, and the lowest version among its
    elements."""

    seq: int
    version: int


@tag(32)
class Ack(Message):
    """Server to worker: these pushes and loads are taken in and need not be sent again."""

    receipts: tuple[Receipt, ...]
    due: int = 0
    """In a job with copies, where late pushes count in the next round, the version with which the round of a
    push is closed; else 0."""


@tag(33)
class Pull(Message):
    """Worker to server: these elements, once the conditions hold."""

    chunk: int
    values: bool
    """False asks for the versions alone."""
    runs: tuple[Ask, ...]
    broadcasts: int = 0
    """Broadcasts of the store whose values the reader must see."""
    held: tuple[int, ...] = ()
    """Versions that the sender has, as in PUSH."""
    call: int | None = None
    """The DECLARE whose value is wanted; the runs may be a part of it."""
    stamp: int = 0
    """The stamp in the answer to that DECLARE."""


class Dropped(NamedTuple):
    """The last update of a key that was not made, since its gradient was not finite."""

    start: int
    """Start of the key's piece in the chunk."""
    number: int
    """Number of the round or, where each push is applied by itself, of the asking rank's push."""
    values: int
    """Number of values of the whole key that were not finite."""
    ranks: tuple[int, ...]
    """Ranks that pushed non-finite values; empty if all pushes were finite and only their sum was not."""


class Steps(NamedTuple):
    """Encoding of the values of one run."""

    whole: bool
    """Whether the values are written uncompressed; if not, the last steps that led to them are written."""
    codes: tuple[CodecSpec, ...]
    """Codec of each step, the oldest first."""


@tag(34)
class Pulled(Answer):
    """Answer to PULL, and to a PUSH that asked for the values."""

    chunk: int
    dtype: int
    values: bool
    runs: tuple[Stand, ...]
    dropped: tuple[Dropped, ...] = ()
    """Dropped updates of the elements; only in a store that reports them as errors."""
    steps: tuple[Steps, ...] = ()
    """Encoding of each run; empty if all values are written uncompressed."""
    adds: bool = False
    """Whether steps add up: the receiver keeps the values, and applies later steps to them."""
    due: int = 0
    """As in ACK."""

    def payload_sizes(self) -> tuple[int, ...]:
        """One frame, the elements of all runs side by side, or none."""
        if not self.values:
            return ()
        if not self.steps:
            return (BY_ID[self.dtype].itemsize * sum(map(_size, self.runs)),)
        return (
            sum(
                [
                    _octets(self.dtype, *run_and_step)
                    for run_and_step in zip(self.runs, self.steps, strict=False)
                ]
            ),
        )


@tag(35)
class PushRows(Message):
    """Worker to server: a gradient for some rows of the part of a key that lies there."""

    store: str
    key: str
    dtype: int
    ranks: tuple[int, ...]
    """The ranks it speaks for."""
    number: int
    """Number of the push, as in a run of PUSH."""
    width: int
    """Elements of a row."""
    count: int
    """Number of rows; a push of no rows counts, too."""

    def payload_sizes(self) -> tuple[int, ...]:
        """The numbers of the rows, and the rows."""
        return (*_id_sizes(self.count), *_row_sizes(self.dtype, self.width, self.count))


@tag(36)
class PullRows(Message):
    """Worker to server: these rows of a key, once the conditions hold for all of the key on this server."""

    store: str
    key: str
    after: int
    """Pushes of this rank that must have been applied."""
    least: int
    """The lowest version that will do."""
    count: int

    def payload_sizes(self) -> tuple[int, ...]:
        """One frame: the numbers of the rows."""
        return _id_sizes(self.count)


@tag(37)
class PulledRows(Answer):
    """Answer to PULL-ROWS: the rows, in the order of their numbers."""

    dtype: int
    width: int
    count: int
    lowest: int
    highest: int
    """Lowest and highest version of the parts of the key on this server."""
    owed: int
    """The number of the push that this rank owes next on some of them."""
    dropped: tuple[Dropped, ...] = ()
    """Dropped updates, as in PULLED; ``start`` is the start of the part in the key."""

    def payload_sizes(self) -> tuple[int, ...]:
        """The rows."""
        return _row_sizes(self.dtype, self.width, self.count)


@tag(38)
class PullChanged(Message):
    """Worker to server: the rows of a key that changed since a version, once the conditions hold."""

    store: str
    key: str
    after: int
    least: int
    """Conditions, as in PULL-ROWS."""
    since: int
    """The version that the worker has of all rows on this server."""


@tag(39)
class Changed(Answer):
    """Answer to PULL-CHANGED: numbers of rows, ascending, and the rows."""

    known: bool
    """Whether this server still knows which rows changed; if not, the answer has no rows."""
    dtype: int
    width: int
    count: int
    lowest: int
    highest: int
    owed: int
    dropped: tuple[Dropped, ...] = ()
    """Versions, owed push and dropped updates, as in PULLED-ROWS."""

    def payload_sizes(self) -> tuple[int, ...]:
        """The numbers of the rows, and the rows."""
        return (*_id_sizes(self.count), *_row_sizes(self.dtype, self.width, self.count))


# --- embedding tables -----------------------------------------------------------------------------


class TablePart(NamedTuple):
    """The part of a push or pull that one table has."""

    chunk: int
    number: int
    """The number of the push; of a pull, the pushes of this rank that must have been applied."""
    size: int
    """The number of ids."""


class TableGroup(NamedTuple):
    """Neighbouring parts whose rows have one type and width, and share a frame."""

    dtype: int
    dim: int
    parts: int
    """The number of parts."""


class TableStand(NamedTuple):
    """Version of a table when its rows are read."""

    version: int
    owed: int
    """The number of the push that this rank owes next."""


def _counted_ids(parts: tuple[TablePart, ...]) -> tuple[int, ...]:
    return _id_sizes(sum([part.size for part in parts]))


@tag(100)
class Embed(Message):
    """Worker to server: make this embedding table of a store, unless it exists."""

    store: str
    key: str
    dtype: int
    dim: int
    init: str
    scale: float
    seed: int
    admit: int
    max_age: int
    max_rows: int
    """Most rows of the table, on all servers together; 0 for no limit."""
    optimizer: str
    numbers: dict[str, bool | int | float | None]
    chance: float = 1.0
    """Probability that a push makes the row of an id that may have one."""
    max_idle_s: float = 0.0
    """Seconds that a row is kept without a push; 0 for ever."""
    half_life: int = 0
    """Updates after which a push counts half when rows have to go; 0 if the oldest go."""


@tag(107)
class PushTables(Message):
    """Worker to server: gradients for rows of some tables; a part without ids counts, too."""

    ranks: tuple[int, ...]
    """The ranks it speaks for."""
    groups: tuple[TableGroup, ...]
    parts: tuple[TablePart, ...]
    """The parts of all groups, one after the other."""

    @property
    def chunk(self) -> int:
        """The chunk of the first part; 0, which no chunk has, without parts."""
        return self.parts[0].chunk if self.parts else 0

    def payload_sizes(self) -> tuple[int, ...]:
        """The ids of all parts, in each ascending and each named once; and the gradients of each group."""
        counts = [part.size for part in self.parts]
        sizes = list(_counted_ids(self.parts))
        at = 0
        for dtype, dim, parts in self.groups:
            count = sum(counts[at : at + parts])
            at += parts
            if count:
                sizes.append(BY_ID[dtype].itemsize * dim * count)
        return tuple(sizes)


@tag(108)
class PullTables(Message):
    """Worker to server: rows of some tables, once the conditions of all parts hold."""

    parts: tuple[TablePart, ...]
    packed: bool = False
    """Rows are answered as a scale and an int8 for each element."""

    def payload_sizes(self) -> tuple[int, ...]:
        """The ids of all parts."""
        return _counted_ids(self.parts)


@tag(109)
class PulledTables(Answer):
    """Answer to PULL-TABLES: the rows, in the order of the ids."""

    groups: tuple[TableGroup, ...]
    counts: tuple[int, ...]
    """The number of rows of each group."""
    stands: tuple[TableStand, ...]
    """The stand of each part."""

    def payload_sizes(self) -> tuple[int, ...]:
        """The rows of each group that has some."""
        return tuple(
            [
                BY_ID[dtype].itemsize * dim * count
                for (dtype, dim, _), count in zip(self.groups, self.counts, strict=False)
                if count
            ]
        )


@tag(106)
class TableRate(Message):
    """Worker to server: the learning rate of a table from now on."""

    chunk: int
    lr: float


@tag(104)
class Export(Message):
    """Worker to server: some rows of a table, from a slot on."""

    chunk: int
    start: int
    count: int
    """Most rows of the answer."""
    since: int
    """Export only rows that were pushed to after this version."""
    state: bool
    """Whether to export the optimizer's states, too."""


@tag(105)
class Exported(Answer):
    """Answer to EXPORT."""

    next: int
    """The slot to export from next; 0 after the last."""
    count: int
    fields: tuple[Field, ...]
    """The columns, the weights first; each has ``count`` rows."""

    def payload_sizes(self) -> tuple[int, ...]:
        """The ids, the version that each row's last push made, and one frame per column."""
        if not self.count:
            return ()
        columns = [BY_ID[field.dtype].itemsize * field.size for field in self.fields]
        return (8 * self.count, 8 * self.count, *columns)
