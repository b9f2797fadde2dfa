"""Messages about stores: opening them, declaring keys, the optimizer and its state."""

from __future__ import annotations

from dataclasses import field
from typing import NamedTuple

from kvps.dtypes import BY_ID
from kvps.protocol.envelope import Answer, Message, tag

# --- stores and keys ------------------------------------------------------------------------------


@tag(20)
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
    """The policy for an update with NaN or infinity: ``apply``, ``skip`` or ``error``."""
    average: bool = False
    """The sum of a round is divided by the weights of the pushes in it."""
    quorum: int = 0
    """A round may close when so many ranks are in it; 0 for all that it waits for."""
    grace_s: float = -1.0
    """Seconds that such a round waits for the others; below 0, a quarter of the time that the quorum took."""
    late: str = "drop"
    """The policy for a push whose round closed without it: ``drop``, or ``next``, which counts it
    in the next round."""
    life: int = 0
    """How often all workers have closed a store of this name before, as far as the sender knows."""
    rebuilds: bool = False
    """Workers keep the values that they were told last, and give them to a server in another's place."""


class Entry(NamedTuple):
    """A key, its shape and type, and the elements of it that belong on the addressed server."""

    key: str
    dtype: int
    shape: tuple[int, ...]
    start: int
    size: int


@tag(21)
class Declare(Message):
    """Worker to server: these keys, please. One rank creates them, others wait until they are."""

    store: str
    create: bool
    call: int
    """0 for init; k + 1 for the k-th broadcast of the key."""
    entries: tuple[Entry, ...]
    creator: int = 0
    """The rank whose value counts."""
    refused: int = 0
    """How often this call of the sender was refused before: the highest count among its keys."""
    early: bool = False
    """Where it lies is wanted as soon as that is known; PULL waits for the value."""


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


@tag(22)
class Declared(Answer):
    """Answer to DECLARE, entry by entry."""

    places: tuple[Place, ...]
    stamp: int = 0
    """Another, if the value of one of these keys was begun anew since; larger, the later."""


@tag(23)
class Find(Message):
    """Worker to server: what are these keys? Never creates, never waits."""

    store: str
    keys: tuple[str, ...]


class Found(NamedTuple):
    """A key's type and shape; an unknown key has type 0."""

    dtype: int
    shape: tuple[int, ...]
    call: int = 0
    """The call that gave it its value: 0 for init, k for the k-th broadcast."""


@tag(24)
class FoundAll(Answer):
    """Answer to FIND, key by key."""

    found: tuple[Found, ...]


@tag(25)
class Opened(Answer):
    """Answer to OPEN of a worker that took another's place: the store has been closed and opened
    again before."""

    life: int


class StoreLife(NamedTuple):
    """One life of a store: it begins when the store is made, and ends when all workers have closed it."""

    store: str
    life: int


@tag(26)
class Close(Message):
    """Worker to server and scheduler: I do not use these stores any more."""

    stores: tuple[StoreLife, ...]


@tag(27)
class Closed(Message):
    """Answer to CLOSE: the same stores."""

    stores: tuple[StoreLife, ...]


class ToldKey(NamedTuple):
    """A key, and where its elements lay on the server whose place the addressed one has taken."""

    key: str
    dtype: int
    shape: tuple[int, ...]
    call: int
    """The call that gave it its value, as in FOUND-ALL."""
    pieces: tuple[Piece, ...]
    offsets: tuple[int, ...]
    """Where each piece begins in the key, ascending."""


@tag(28)
class Tell(Message):
    """Worker to a server that has taken another's place: what I know of a store. OPEN ends it."""

    store: str
    joins: int
    """The number of joins that are over."""
    reason: str
    """Why the store cannot be made again from what its workers hold; empty if it can."""
    waits: bool
    """Whether the sender waits for what comes of a push."""
    keys: tuple[ToldKey, ...]


# --- the optimizer on the servers -----------------------------------------------------------------


@tag(40)
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
    refused: int = 0
    """How often this call of the sender was refused before."""


@tag(41)
class Rate(Message):
    """Worker to server: the learning rate from now on. Rank 0 sets, others check."""

    store: str
    call: int
    create: bool
    lr: float
    after: int = 0
    resumed: bool = False
    refused: int = 0
    """These three as in OPTIMIZE."""


@tag(42)
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
    """Ranks whose pushes have the values that are not finite."""
    call: int = 0
    """The DECLARE that gave the key its place: another key may have had the name before."""


@tag(46)
class StepNorm(Message):
    """Server to server: the norm over all keys of a step, by which gradients are clipped.

    A holder tells the first holder ``squares``, the first tells all others ``factor``, and each of
    them confirms the factor by neither.
    """

    store: str
    digest: int
    number: int
    """The step, as in PUSH."""
    squares: float | None = None
    """The sum of squares of the sender's elements, -1 for NaN or infinity."""
    factor: float | None = None
    """The factor of the step's gradients, -1 for NaN."""


class Field(NamedTuple):
    """One tensor of an optimizer's state."""

    name: str
    dtype: int
    size: int


@tag(43)
class GetState(Message):
    """Worker to server: the optimizer's state of these elements."""

    chunk: int
    start: int
    size: int


@tag(44)
class StateIs(Answer):
    """Answer to GET-STATE."""

    step: int
    fields: tuple[Field, ...]

    def payload_sizes(self) -> tuple[int, ...]:
        """One frame per field."""
        return tuple([BY_ID[field.dtype].itemsize * field.size for field in self.fields])


@tag(45)
class SetState(Message):
    """Worker to server: put this state there."""

    chunk: int
    start: int
    size: int
    step: int
    fields: tuple[Field, ...]

    def payload_sizes(self) -> tuple[int, ...]:
        """One frame per field."""
        return tuple([BY_ID[field.dtype].itemsize * field.size for field in self.fields])


# --- looking --------------------------------------------------------------------------------------


@tag(50)
class Status(Message):
    """Worker to server: how does the store stand?"""

    store: str


class OpenRound(NamedTuple):
    """An open round: one of its keys, its number, the missing ranks, and its age."""

    key: str
    number: int
    missing: tuple[int, ...]
    age_s: float


class Clock(NamedTuple):
    """How many pushes of a key each rank has had taken in."""

    key: str
    pushes: dict[str, int]


@tag(51)
class StatusIs(Answer):
    """Answer to STATUS."""

    rounds: tuple[OpenRound, ...]
    clocks: tuple[Clock, ...]
    dropped: dict[str, int] = field(default_factory=dict)
    """By key, how many updates were dropped, as they were not finite."""
    late: dict[str, float] = field(default_factory=dict)
    """By rank, the seconds by which its pushes came after the first of their round: a moving mean."""
