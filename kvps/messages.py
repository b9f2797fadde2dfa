"""Everything that kvps processes say to each other: one frozen class per message.

A message is declared here once, with its tag, its fields and the bytes that must follow it;
:mod:`kvps.wire` turns it into frames and back by reading that declaration. A tag is for ever. A
new field goes to the end of its class and has a default, so that older bytes still decode.
docs/protocol.md says for each message who sends it, when it is legal and how it is answered.

Every message travels in a :class:`Packet` whose :class:`Envelope` says who speaks: identity is in
the payload, and a ZeroMQ routing id is only an address.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

from kvps.codes import Code
from kvps.codes import size as size_of
from kvps.specs import BY_ID

if TYPE_CHECKING:
    from collections.abc import Callable

PROTOCOL = (1, 0)
"""Major and minor number of the protocol; another major number is refused at HELLO."""

RUNS_MAX = 4096
ENTRIES_MAX = 1024
"""How many runs one push or pull, and how many keys one declaration, may carry."""

ROWS_FRAME_BYTES = 32 << 20
ROWS_FRAMES_MAX = 63
"""Rows fill payload frames of so many octets, or of one row; and at most so many frames."""
IDS_FRAME_BYTES = 64 << 20
"""Octets of the numbers of rows, which are one frame, at most."""

KEY_MAX = 256
TEXT_MAX = 4096
"""Characters of the name of a key or store, and octets of any text: a longer one is refused."""


class Role(enum.IntEnum):
    """What a process does in a cluster."""

    SCHEDULER = 0
    SERVER = 1
    WORKER = 2

    def __str__(self) -> str:
        return self.name.lower()


class Node(NamedTuple):
    """A place in the cluster: a role and a rank within that role, from 0."""

    role: Role
    rank: int

    def __str__(self) -> str:
        return "scheduler" if self.role is Role.SCHEDULER else f"{self.role} {self.rank}"


@dataclass(frozen=True, slots=True)
class Envelope:
    """Who speaks, in which job and view, and which of its requests this is."""

    job: bytes
    """16 octets that name the job; zeros in a HELLO from one who does not know it yet."""
    view: int
    """Number of the newest view that the sender has seen."""
    role: Role
    rank: int
    incarnation: int
    """Which life of that rank: issued by the scheduler, it only grows."""
    seq: int
    """Number of this request among the sender's requests to this receiver; 0 asks no answer."""

    @property
    def node(self) -> Node:
        """The sender's place."""
        return Node(self.role, self.rank)


class Message:
    """What every message class has: a tag, and the sizes of the frames that must follow."""

    TAG: ClassVar[int] = 0
    __slots__ = ()

    def payload_sizes(self) -> tuple[int, ...]:
        """Exact bytes of each payload frame behind this message."""
        return ()


class Loan(NamedTuple):
    """Bytes in the sender's segment, in place of a payload frame."""

    nonce: int
    """Which segment."""
    lease: int
    """To be returned by a RELEASE; one for all loans of a packet."""
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Packet:
    """One message with its envelope and its payload frames, or loans in their place."""

    envelope: Envelope
    message: Message
    payload: tuple[memoryview, ...] = ()
    loans: tuple[Loan, ...] = ()


MESSAGES: dict[int, type[Message]] = {}
"""The class of each tag."""

M = TypeVar("M", bound=type[Message])


def _tag(number: int) -> Callable[[M], M]:
    def register(cls: M) -> M:
        assert number not in MESSAGES, f"tag {number} is taken"
        cls.TAG = number
        MESSAGES[number] = cls
        return cls

    return register


# --- joining and living together -------------------------------------------------------------


@_tag(1)
@dataclass(frozen=True, slots=True)
class Hello(Message):
    """First on every connection, and frozen: any version of kvps can read any other's."""

    major: int
    minor: int
    software: str
    features: int
    role: int
    rank: int | None
    """The wanted rank; None takes the lowest free one."""
    host: str
    pid: int
    endpoint: str = ""
    """Where a server listens for workers."""
    guardian: bool = False
    """The sender holds the seat for a command that it runs."""
    master: str = ""
    """HOST:PORT that this worker offers as torch's rendezvous, used if it gets rank 0."""
    machine: int = 0
    """Equal for those who share loopback, and perhaps memory; 0 for one who does not know."""


@_tag(2)
@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """Scheduler or server to the one who said HELLO: this is your seat."""

    rank: int
    incarnation: int
    workers: int
    servers: int
    local_rank: int = 0
    local_size: int = 1
    master: str = ""


class Member(NamedTuple):
    """One seat as a view shows it."""

    role: int
    rank: int
    incarnation: int
    state: str
    """``empty``, ``held``, ``left``, ``lost`` (a replacement may come) or ``gone`` (none will)."""
    endpoint: str
    host: str
    lost_for_s: float
    reason: str
    machine: int = 0


@_tag(3)
@dataclass(frozen=True, slots=True)
class View(Message):
    """Scheduler to all members: who holds which seat. Its number grows with every change."""

    number: int
    phase: str
    """``forming``, ``running``, ``returning`` (to a cut) or ``ending``."""
    reason: str
    members: tuple[Member, ...]
    epoch: int = 0
    """How often the servers have returned to a cut, or are about to."""
    since: int = 0
    """The number of the view in which this epoch began: what was asked under an older one is void."""
    cut: int = 0
    """The newest cut to which they could return; 0 while there is none."""


@_tag(4)
@dataclass(frozen=True, slots=True)
class Beat(Message):
    """Member to scheduler and back: I live; the counter moves when the application does."""

    progress: int
    reason: str = ""


@_tag(5)
@dataclass(frozen=True, slots=True)
class Leave(Message):
    """Member to scheduler: I end. ``done`` says that I ended well."""

    done: bool
    exit_code: int
    replaceable: bool
    reason: str


@_tag(6)
@dataclass(frozen=True, slots=True)
class Left(Message):
    """Scheduler to member: your leaving is known."""


@_tag(7)
@dataclass(frozen=True, slots=True)
class Barrier(Message):
    """Worker to scheduler: I stand at this barrier."""

    store: str
    name: str
    number: int
    waits: bool = True
    """For workers that are lost, too: until a replacement stands there."""
    after: int = 0
    """How many rounds of this store the sender has pushed for before."""
    resumed: bool = False
    """The sender has taken another's place, and does not know the number: ``after`` tells it."""


@_tag(8)
@dataclass(frozen=True, slots=True)
class Released(Message):
    """Scheduler to worker: every member stands there, or stood; go on."""

    seq: int
    number: int | None = None
    """Of the barrier; None for one that this worker's predecessor has behind it."""


@_tag(9)
@dataclass(frozen=True, slots=True)
class Stop(Message):
    """Scheduler to members: the job is over."""

    exit_code: int
    reason: str


@_tag(10)
@dataclass(frozen=True, slots=True)
class Error(Message):
    """Answer to a request that could not be done; nothing was changed by it."""

    seq: int
    code: int
    text: str


@_tag(11)
@dataclass(frozen=True, slots=True)
class Done(Message):
    """Answer to a request that needs no other answer."""

    seq: int


@_tag(12)
@dataclass(frozen=True, slots=True)
class Probe(Message):
    """Worker to server: which of these unanswered requests do you have?"""

    seqs: tuple[int, ...]


class Pending(NamedTuple):
    """A request that a server has and cannot answer yet, and why."""

    seq: int
    reason: str


@_tag(13)
@dataclass(frozen=True, slots=True)
class Probed(Message):
    """Answer to PROBE: the missing ones must be sent again, the pending ones wait."""

    missing: tuple[int, ...]
    pending: tuple[Pending, ...]


# --- stores and keys --------------------------------------------------------------------------


@_tag(20)
@dataclass(frozen=True, slots=True)
class Open(Message):
    """Worker to server: this store exists, with this rule and these options."""

    store: str
    mode: str
    """``sync``, ``async`` or ``ssp``."""
    staleness: int
    deterministic: bool
    on_worker_lost: str
    bigarray_bound: int
    chunk_bytes: int = 1 << 20
    """How much travels, and is updated, at once; the first OPEN decides."""
    bundles: bool = False
    """Workers of one machine add up their gradients before these leave it."""
    on_nonfinite: str = "apply"
    """What becomes of an update by NaN or infinity: ``apply``, ``skip`` or ``error``."""
    average: bool = False
    """The sum of a round is divided by how many ranks are in it."""


class Entry(NamedTuple):
    """A key, what it is, and the elements of it that belong on the addressed server."""

    key: str
    dtype: int
    shape: tuple[int, ...]
    start: int
    size: int


@_tag(21)
@dataclass(frozen=True, slots=True)
class Declare(Message):
    """Worker to server: these keys, please. One rank creates them, others wait until they are."""

    store: str
    create: bool
    call: int
    """0 for init; k + 1 for the k-th broadcast of the key."""
    entries: tuple[Entry, ...]
    creator: int = 0
    """The rank whose value counts."""


class Piece(NamedTuple):
    """A part of a key inside one chunk of one server."""

    chunk: int
    start: int
    size: int


class Place(NamedTuple):
    """Where an entry lies on the answering server, in the order of the key's elements."""

    fresh: bool
    """The creator must load its value."""
    pieces: tuple[Piece, ...]


@_tag(22)
@dataclass(frozen=True, slots=True)
class Declared(Message):
    """Answer to DECLARE, entry by entry."""

    seq: int
    places: tuple[Place, ...]


@_tag(23)
@dataclass(frozen=True, slots=True)
class Find(Message):
    """Worker to server: what are these keys? Never creates, never waits."""

    store: str
    keys: tuple[str, ...]


class Found(NamedTuple):
    """A key's type and shape; an unknown key has type 0."""

    dtype: int
    shape: tuple[int, ...]
    call: int = 0
    """Which call gave it its value: 0 for init, k for the k-th broadcast."""


@_tag(24)
@dataclass(frozen=True, slots=True)
class FoundAll(Message):
    """Answer to FIND, key by key."""

    seq: int
    found: tuple[Found, ...]


# --- values -----------------------------------------------------------------------------------


class Run(NamedTuple):
    """Neighbouring elements of a chunk that one push covers, and the push's number."""

    start: int
    size: int
    number: int


class Ask(NamedTuple):
    """Neighbouring elements of a chunk that a pull wants, and what must have happened before."""

    start: int
    size: int
    after: int
    """How many pushes of this rank must have been applied to them."""
    least: int
    """The lowest version that will do."""


class Stand(NamedTuple):
    """Where neighbouring elements of a chunk stand when they are read."""

    start: int
    size: int
    version: int
    owed: int
    """The number of the push that this rank owes next."""


def _sizes(dtype: int, runs: tuple[Run, ...] | tuple[Stand, ...]) -> tuple[int, ...]:
    return (BY_ID[dtype].itemsize * sum([run.size for run in runs]),)


def _octets(dtype: int, stand: Stand, steps: Steps) -> int:
    """Return the octets of one run that is written so."""
    if steps.whole:
        return BY_ID[dtype].itemsize * stand.size
    return sum([size_of(code, stand.size) for code in steps.codes])


def rows_in_frame(dtype: int, width: int) -> int:
    """Return how many rows of so many elements one payload frame holds."""
    return max(1, ROWS_FRAME_BYTES // max(1, width * BY_ID[dtype].itemsize))


def rows_in_message(dtype: int, width: int) -> int:
    """Return how many rows of so many elements, with their numbers, one message holds."""
    return min(rows_in_frame(dtype, width) * ROWS_FRAMES_MAX, IDS_FRAME_BYTES // 8)


def _id_sizes(count: int) -> tuple[int, ...]:
    return (8 * count,) if count else ()


def _row_sizes(dtype: int, width: int, count: int) -> tuple[int, ...]:
    """Return the sizes of the frames that so many rows fill one after another."""
    each, row = rows_in_frame(dtype, width), width * BY_ID[dtype].itemsize
    if count > each * ROWS_FRAMES_MAX:
        return (count * row,)  # which no frame is
    full, rest = divmod(count, each)
    return (each * row,) * full + ((rest * row,) if rest else ())


@_tag(30)
@dataclass(frozen=True, slots=True)
class Load(Message):
    """Creator to server: the first value of these elements (or its k-th broadcast)."""

    chunk: int
    dtype: int
    runs: tuple[Run, ...]
    """Their ``number`` is the ``call`` of the DECLARE that asked for them."""

    def payload_sizes(self) -> tuple[int, ...]:
        """One frame: the elements of all runs, side by side."""
        return _sizes(self.dtype, self.runs)


@_tag(31)
@dataclass(frozen=True, slots=True)
class Push(Message):
    """Worker to server: a gradient for these elements."""

    chunk: int
    dtype: int
    ranks: tuple[int, ...]
    """The ranks it speaks for."""
    weight: float
    """What it counts in a weighted mean (samples)."""
    pull: bool
    """Answer with the new values."""
    runs: tuple[Run, ...]
    code: Code | None = None
    """How the elements of each run are written; None for as they are."""
    back: Code | None = None
    """How the update that this makes is to be written for those who pull it; None for as it is."""
    held: tuple[int, ...] = ()
    """Of each run, the version of its values that the sender has, or -1; empty if the answer is not
    to be written as steps from there."""

    def payload_sizes(self) -> tuple[int, ...]:
        """One frame: the elements of all runs, side by side."""
        if self.code is None:
            return _sizes(self.dtype, self.runs)
        code = self.code
        return (sum([size_of(code, run.size) for run in self.runs]),)


class Receipt(NamedTuple):
    """A push or load that was taken in, and the lowest version among its elements."""

    seq: int
    version: int


@_tag(32)
@dataclass(frozen=True, slots=True)
class Ack(Message):
    """Server to worker: these are in, and will not be needed again."""

    receipts: tuple[Receipt, ...]


@_tag(33)
@dataclass(frozen=True, slots=True)
class Pull(Message):
    """Worker to server: these elements, once the conditions hold."""

    chunk: int
    values: bool
    """False asks for the versions alone."""
    runs: tuple[Ask, ...]
    broadcasts: int = 0
    """Of how many broadcasts of the store the asker wants to see the values."""
    held: tuple[int, ...] = ()
    """As in PUSH."""


class Dropped(NamedTuple):
    """The last update of a key that was not made, since its gradient was not finite."""

    start: int
    """Where the key's piece begins in the chunk."""
    number: int
    """Of the round; or, where each push is applied by itself, of the asking rank's push."""
    values: int
    """How many of the whole key were not finite."""
    ranks: tuple[int, ...]
    """Among whose pushes they were; empty where all pushes were finite and their sum was not."""


class Steps(NamedTuple):
    """How the values of one run are written."""

    whole: bool
    """As they are; else as the last steps that led to them."""
    codes: tuple[Code, ...]
    """How each step is written, the oldest first."""


@_tag(34)
@dataclass(frozen=True, slots=True)
class Pulled(Message):
    """Answer to PULL, and to a PUSH that asked for the values."""

    seq: int
    chunk: int
    dtype: int
    values: bool
    runs: tuple[Stand, ...]
    dropped: tuple[Dropped, ...] = ()
    """Only of a store that makes errors of them."""
    steps: tuple[Steps, ...] = ()
    """How each run is written; empty if all are as they are."""
    adds: bool = False
    """Steps add up: the receiver keeps the values, and applies later steps to them."""

    def payload_sizes(self) -> tuple[int, ...]:
        """One frame, the elements of all runs side by side, or none."""
        if not self.values:
            return ()
        if not self.steps:
            return _sizes(self.dtype, self.runs)
        return (
            sum([_octets(self.dtype, *one) for one in zip(self.runs, self.steps, strict=False)]),
        )


@_tag(35)
@dataclass(frozen=True, slots=True)
class PushRows(Message):
    """Worker to server: a gradient for some rows of the part of a key that lies there."""

    store: str
    key: str
    dtype: int
    ranks: tuple[int, ...]
    """The ranks it speaks for."""
    number: int
    """Of the push, as in the run of a PUSH."""
    width: int
    """Elements of a row."""
    count: int
    """How many rows; also none are a push."""

    def payload_sizes(self) -> tuple[int, ...]:
        """The numbers of the rows, and the rows."""
        return (*_id_sizes(self.count), *_row_sizes(self.dtype, self.width, self.count))


@_tag(36)
@dataclass(frozen=True, slots=True)
class PullRows(Message):
    """Worker to server: these rows of a key, once the conditions hold for all of it that is there."""

    store: str
    key: str
    after: int
    """How many pushes of this rank must have been applied."""
    least: int
    """The lowest version that will do."""
    count: int

    def payload_sizes(self) -> tuple[int, ...]:
        """One frame: the numbers of the rows."""
        return _id_sizes(self.count)


@_tag(37)
@dataclass(frozen=True, slots=True)
class PulledRows(Message):
    """Answer to PULL-ROWS: the rows, in the order of their numbers."""

    seq: int
    dtype: int
    width: int
    count: int
    lowest: int
    highest: int
    """Versions of the parts of the key on this server."""
    owed: int
    """The number of the push that this rank owes next on some of them."""
    dropped: tuple[Dropped, ...] = ()
    """As in PULLED; ``start`` is where the part begins in the key."""

    def payload_sizes(self) -> tuple[int, ...]:
        """The rows."""
        return _row_sizes(self.dtype, self.width, self.count)


@_tag(38)
@dataclass(frozen=True, slots=True)
class PullChanged(Message):
    """Worker to server: those rows of a key that changed since a version, once the conditions hold."""

    store: str
    key: str
    after: int
    least: int
    """As in PULL-ROWS."""
    since: int
    """The version that the worker has of all that is there."""


@_tag(39)
@dataclass(frozen=True, slots=True)
class Changed(Message):
    """Answer to PULL-CHANGED: numbers of rows, ascending, and the rows."""

    seq: int
    known: bool
    """Whether this server still knows what changed; if not, there are no rows."""
    dtype: int
    width: int
    count: int
    lowest: int
    highest: int
    owed: int
    dropped: tuple[Dropped, ...] = ()
    """As in PULLED-ROWS."""

    def payload_sizes(self) -> tuple[int, ...]:
        """The numbers of the rows, and the rows."""
        return (*_id_sizes(self.count), *_row_sizes(self.dtype, self.width, self.count))


# --- the optimizer on the servers -------------------------------------------------------------


@_tag(40)
@dataclass(frozen=True, slots=True)
class Optimize(Message):
    """Worker to server: the store's optimizer, by name and numbers. Rank 0 sets, others check."""

    store: str
    call: int
    create: bool
    name: str
    numbers: dict[str, bool | int | float | None]
    lr_mult: dict[str, float] = field(default_factory=dict)
    wd_mult: dict[str, float] = field(default_factory=dict)
    after: int = 0
    """How many rounds of this store the sender has pushed for before."""
    resumed: bool = False
    """The sender has taken another's place, and does not know the number of its call."""


@_tag(41)
@dataclass(frozen=True, slots=True)
class Rate(Message):
    """Worker to server: the learning rate from now on. Rank 0 sets, others check."""

    store: str
    call: int
    create: bool
    lr: float
    after: int = 0
    resumed: bool = False
    """These two as in OPTIMIZE."""


@_tag(42)
@dataclass(frozen=True, slots=True)
class Norms(Message):
    """Server to server: what I measured of my part of a tensor, for one update of it."""

    store: str
    key: str
    rank: int | None
    """The pushing rank where each push is applied by itself; None for a round."""
    number: int
    sums: tuple[float, ...]
    """Where the store drops what is not finite, first how many values are not; then the sums of
    squares that the optimizer needs, -1 for one that is no number. Empty where the sender has not
    measured yet and asks for what the receiver has."""
    reply: bool
    """The receiver should answer with its own."""
    culprits: tuple[int, ...] = ()
    """Among whose pushes the values are that are not finite."""
    call: int = 0
    """The DECLARE that gave the key its place: another key may have had the name before."""


class Field(NamedTuple):
    """One tensor of an optimizer's state."""

    name: str
    dtype: int
    size: int


@_tag(43)
@dataclass(frozen=True, slots=True)
class GetState(Message):
    """Worker to server: the optimizer's state of these elements."""

    chunk: int
    start: int
    size: int


@_tag(44)
@dataclass(frozen=True, slots=True)
class StateIs(Message):
    """Answer to GET-STATE."""

    seq: int
    step: int
    fields: tuple[Field, ...]

    def payload_sizes(self) -> tuple[int, ...]:
        """One frame per field."""
        return tuple([BY_ID[one.dtype].itemsize * one.size for one in self.fields])


@_tag(45)
@dataclass(frozen=True, slots=True)
class SetState(Message):
    """Worker to server: put this state there."""

    chunk: int
    start: int
    size: int
    step: int
    fields: tuple[Field, ...]

    def payload_sizes(self) -> tuple[int, ...]:
        """One frame per field."""
        return tuple([BY_ID[one.dtype].itemsize * one.size for one in self.fields])


# --- looking ----------------------------------------------------------------------------------


@_tag(50)
@dataclass(frozen=True, slots=True)
class Status(Message):
    """Worker to server: how does the store stand?"""

    store: str


class OpenRound(NamedTuple):
    """A round that waits: some key in it, its number, who is missing, for how long."""

    key: str
    number: int
    missing: tuple[int, ...]
    age_s: float


class Clock(NamedTuple):
    """How many pushes of a key each rank has had taken in."""

    key: str
    pushes: dict[str, int]


@_tag(51)
@dataclass(frozen=True, slots=True)
class StatusIs(Message):
    """Answer to STATUS."""

    seq: int
    rounds: tuple[OpenRound, ...]
    clocks: tuple[Clock, ...]
    dropped: dict[str, int] = field(default_factory=dict)
    """By key, how many updates were dropped, as they were not finite."""


# --- memory that is shared on one host ----------------------------------------------------------


@_tag(60)
@dataclass(frozen=True, slots=True)
class Offer(Message):
    """To the other end of a data connection: you may read this, if you can find it."""

    pid: int
    fd: int
    size: int
    nonce: int


@_tag(61)
@dataclass(frozen=True, slots=True)
class Taken(Message):
    """Answer to OFFER: I can read it; or I cannot, and why."""

    nonce: int
    mapped: bool
    reason: str = ""


@_tag(62)
@dataclass(frozen=True, slots=True)
class Release(Message):
    """To one who lent memory: of the leases below a number, I hold none but these."""

    before: int
    but: tuple[int, ...]


# --- cuts -------------------------------------------------------------------------------------


@_tag(80)
@dataclass(frozen=True, slots=True)
class Halt(Message):
    """Scheduler to worker: begin no step that changes values, until you are told to proceed."""

    cut: int
    least: dict[str, int]
    """By synchronous store, how many pushes of a key to make before; the others have made them."""


@_tag(81)
@dataclass(frozen=True, slots=True)
class Halted(Message):
    """Worker to scheduler: I stand, and nothing that I began is under way; or I go on to there."""

    cut: int
    numbers: dict[str, int]
    """By synchronous store, how many pushes of a key were made."""
    stands: bool = True
    """False in one who is in the middle of a step, and may need others to come along."""


@_tag(82)
@dataclass(frozen=True, slots=True)
class Proceed(Message):
    """Scheduler to worker: go on."""

    cut: int


@_tag(83)
@dataclass(frozen=True, slots=True)
class Proceeding(Message):
    """Worker to scheduler: I go on, and had halted all the time (or had not)."""

    cut: int
    stood: bool


@_tag(84)
@dataclass(frozen=True, slots=True)
class TakeImage(Message):
    """Scheduler to server: remember what you hold now, and write it down."""

    cut: int


@_tag(85)
@dataclass(frozen=True, slots=True)
class ImageTaken(Message):
    """Server to scheduler: it cannot change any more."""

    cut: int


class StoreSum(NamedTuple):
    """One store in an image or a cut: how many keys begin there, and which versions they have."""

    store: str
    begins: int
    lowest: int
    highest: int


@_tag(86)
@dataclass(frozen=True, slots=True)
class ImageKept(Message):
    """Server to scheduler: it is on the disk; or it is not, and why."""

    cut: int
    size: int
    sha256: str
    stores: tuple[StoreSum, ...]
    error: str = ""


class ImageSum(NamedTuple):
    """The file of one server's image."""

    size: int
    sha256: str


@_tag(87)
@dataclass(frozen=True, slots=True)
class Commit(Message):
    """Scheduler to server: all images are on their disks; write the manifest."""

    cut: int
    tag: str
    epoch: int
    images: tuple[ImageSum, ...]
    """By server."""
    stores: tuple[StoreSum, ...]
    kept: int = 0
    """The newest cut that all servers have, which must stay until this one is; 0 if there is none."""


@_tag(88)
@dataclass(frozen=True, slots=True)
class Committed(Message):
    """Server to scheduler: this cut is complete here; or it is not, and why."""

    cut: int
    error: str = ""


@_tag(89)
@dataclass(frozen=True, slots=True)
class GiveUp(Message):
    """Scheduler to server: there will be no such cut."""

    cut: int


@_tag(90)
@dataclass(frozen=True, slots=True)
class Recall(Message):
    """Scheduler to server: which cuts of this job do you have?"""

    epoch: int


@_tag(91)
@dataclass(frozen=True, slots=True)
class Shelf(Message):
    """Answer to RECALL."""

    epoch: int
    keeps: bool
    """It has a place for cuts."""
    every_s: float
    """How often it should be given one; 0 for never by itself."""
    cuts: tuple[int, ...]
    """The complete ones of this job."""
    highest: int
    """The highest number of any cut that is there."""


@_tag(92)
@dataclass(frozen=True, slots=True)
class Restore(Message):
    """Scheduler to server: hold from now on what you held in this cut, and nothing else."""

    epoch: int
    cut: int


@_tag(93)
@dataclass(frozen=True, slots=True)
class Restored(Message):
    """Server to scheduler: I hold it; or I cannot, and why."""

    epoch: int
    cut: int
    error: str = ""


@_tag(94)
@dataclass(frozen=True, slots=True)
class Checkpoint(Message):
    """Worker to scheduler: I want a cut now, as all others do."""

    store: str
    tag: str
    number: int
    """Of this call, as with barriers."""


@_tag(95)
@dataclass(frozen=True, slots=True)
class Checkpointed(Message):
    """Answer to CHECKPOINT: this cut is complete."""

    seq: int
    cut: int


@_tag(96)
@dataclass(frozen=True, slots=True)
class Revive(Message):
    """Worker to server: give this store the values that it had in this cut; or, which have you?"""

    store: str
    tag: str
    """Of the cuts asked for; empty for any."""
    cut: int
    """0 asks which there are."""


@_tag(97)
@dataclass(frozen=True, slots=True)
class Revived(Message):
    """Answer to REVIVE."""

    seq: int
    cuts: tuple[int, ...]
    """The cut whose values the store has now; or those that are complete here, if that was asked."""


# --- joining, resuming, and the state of a cluster ----------------------------------------------


@_tag(70)
@dataclass(frozen=True, slots=True)
class Join(Message):
    """Worker to server: I have no more batches for this store; do not wait for me."""

    store: str
    call: int
    """Counts from 1."""
    waits: bool
    """Answer when every rank has joined; else at once."""


@_tag(71)
@dataclass(frozen=True, slots=True)
class Joined(Message):
    """Answer to JOIN."""

    seq: int
    last: int
    """The rank that joined last."""


@_tag(72)
@dataclass(frozen=True, slots=True)
class Return(Message):
    """Worker to server: this join is over; wait for everybody again."""

    store: str
    call: int


@_tag(73)
@dataclass(frozen=True, slots=True)
class History(Message):
    """Worker to server: which calls of all ranks do you know of?"""

    store: str


@_tag(74)
@dataclass(frozen=True, slots=True)
class HistoryIs(Message):
    """Answer to HISTORY: the last calls of rank 0, and the joins."""

    seq: int
    optimize_calls: int
    optimize_after: int
    rate_calls: int
    rate_after: int
    lr: float
    """What the last RATE set."""
    joins: int
    """How many are over."""
    joined: bool
    """The asking rank has made the next one, too."""
    restored: int = 0
    """The checkpoint from which the store was restored last; 0 for none."""


@_tag(75)
@dataclass(frozen=True, slots=True)
class Resume(Message):
    """Worker to scheduler: I go on where my rank stopped."""

    store: str
    pushed: int | None
    """After so many rounds; None in a store without rounds."""


@_tag(76)
@dataclass(frozen=True, slots=True)
class Resumed(Message):
    """Answer to RESUME."""

    seq: int
    replaced: bool
    """The sender has taken another's place; else it knows its own numbers."""
    barriers: dict[str, int]
    """By name, the number of the next barrier of this rank, in a store without rounds."""


# --- one who looks ------------------------------------------------------------------------------


class OldRound(NamedTuple):
    """The oldest open round of a store on one server."""

    server: int
    store: str
    key: str
    number: int
    missing: tuple[int, ...]
    age_s: float


@_tag(77)
@dataclass(frozen=True, slots=True)
class Stalled(Message):
    """Server to scheduler: these rounds have been open for a while; none, if none has."""

    rounds: tuple[OldRound, ...]


@_tag(78)
@dataclass(frozen=True, slots=True)
class Look(Message):
    """Anybody to scheduler: how does the job stand?"""


class Sight(NamedTuple):
    """One seat, as the scheduler shows it to one who looks."""

    role: int
    rank: int
    incarnation: int
    state: str
    """As in a view."""
    host: str
    pid: int
    endpoint: str
    heard_s: float
    """Since its holder was last heard."""
    presence: str
    """How its holder stands, in words."""


@_tag(79)
@dataclass(frozen=True, slots=True)
class Seen(Message):
    """Answer to LOOK."""

    seq: int
    phase: str
    reason: str
    members: tuple[Sight, ...]
    rounds: tuple[OldRound, ...]
    """The oldest of each store, the oldest first."""


# --- embedding tables ---------------------------------------------------------------------------


def _rows(dtype: int, dim: int, count: int) -> tuple[int, ...]:
    """Sizes of the frames with so many ids, and rows of so many elements; none of nothing."""
    return (8 * count, BY_ID[dtype].itemsize * dim * count) if count else ()


@_tag(100)
@dataclass(frozen=True, slots=True)
class Embed(Message):
    """Worker to server: this store has an embedding table, made by this recipe."""

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
    """Of the whole table, on all servers; 0 for any number."""
    optimizer: str
    numbers: dict[str, bool | int | float | None]


@_tag(101)
@dataclass(frozen=True, slots=True)
class PushIds(Message):
    """Worker to server: gradients for the rows of these ids; of none, it is a push as well."""

    chunk: int
    dtype: int
    ranks: tuple[int, ...]
    """The ranks it speaks for."""
    number: int
    dim: int
    count: int

    def payload_sizes(self) -> tuple[int, ...]:
        """The ids, ascending and each named once; and their gradients."""
        return _rows(self.dtype, self.dim, self.count)


@_tag(102)
@dataclass(frozen=True, slots=True)
class PullIds(Message):
    """Worker to server: the rows of these ids, once the conditions hold."""

    chunk: int
    after: int
    least: int
    """These two as in PULL."""
    count: int

    def payload_sizes(self) -> tuple[int, ...]:
        """The ids."""
        return (8 * self.count,) if self.count else ()


@_tag(103)
@dataclass(frozen=True, slots=True)
class PulledIds(Message):
    """Answer to PULL-IDS: the rows, in the order of the ids."""

    seq: int
    dtype: int
    dim: int
    count: int
    version: int
    owed: int
    """The number of the push that this rank owes next."""

    def payload_sizes(self) -> tuple[int, ...]:
        """The rows."""
        return _rows(self.dtype, self.dim, self.count)[1:]


@_tag(106)
@dataclass(frozen=True, slots=True)
class TableRate(Message):
    """Worker to server: the learning rate of a table from now on."""

    chunk: int
    lr: float


@_tag(104)
@dataclass(frozen=True, slots=True)
class Export(Message):
    """Worker to server: some rows of a table, from a slot on."""

    chunk: int
    start: int
    count: int
    """At most so many."""
    since: int
    """Only those pushed to after this version."""
    state: bool
    """The optimizer's states, too."""


@_tag(105)
@dataclass(frozen=True, slots=True)
class Exported(Message):
    """Answer to EXPORT."""

    seq: int
    next: int
    """Where the next rows begin; 0 after the last."""
    count: int
    fields: tuple[Field, ...]
    """The columns, the weights first; each has ``count`` rows."""

    def payload_sizes(self) -> tuple[int, ...]:
        """The ids, the version that each row's last push made, and one frame per column."""
        if not self.count:
            return ()
        columns = [BY_ID[one.dtype].itemsize * one.size for one in self.fields]
        return (8 * self.count, 8 * self.count, *columns)
