"""Messages of membership: joining, beats, views, barriers, uneven data, and status queries."""

from __future__ import annotations

from dataclasses import field
from typing import NamedTuple

from kvps.protocol.envelope import Answer, Message, Node, Role, tag

STANDBY_FEATURE = 1
"""The bit of HELLO's ``features`` by which a server says that it wants to be the standby of another."""
HOT_ROWS_MAX = 8
"""Rows of a table that are listed as hot."""
PING_BYTES_MAX = 256 << 10
"""Octets of payload of a PING, and of its answer."""

# --- joining and living together ------------------------------------------------------------------


@tag(1)
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
    """Equal for processes that share loopback, and perhaps memory; 0 if unknown."""


@tag(2)
class Welcome(Message):
    """Scheduler or server to the sender of HELLO: this is your seat."""

    rank: int
    incarnation: int
    workers: int
    servers: int
    local_rank: int = 0
    local_size: int = 1
    master: str = ""
    replaces: bool = False
    """The scheduler says so to a server or a worker that takes another's place in a job that has run."""
    follows: bool = False
    """The scheduler says so to a standby: it copies the values of the server of this rank."""
    replicas: int = 0
    """The number of standbys that each server of the job is to have."""
    most: int = 0
    """The most workers that the job may come to have; 0 for no more than ``workers``."""
    promoted: bool = False
    """A server says so to workers: it was the standby of a server that is lost, and has all that anybody was
    told of its values."""

    @property
    def seats(self) -> int:
        """How many seats workers have."""
        return self.most or self.workers


class Member(NamedTuple):
    """One seat as a view shows it."""

    role: int
    rank: int
    incarnation: int
    state: str
    """``empty``, ``held``, ``left``, ``lost`` (a replacement may come) or ``gone`` (none will); of a standby
    ``empty``, ``held`` or ``level`` (it may take the server's place); of a worker also ``vacant`` (nobody
    waits for a holder) or ``added`` (held, and counts in a store once it has entered it)."""
    endpoint: str
    host: str
    lost_for_s: float
    reason: str
    machine: int = 0


def speaker(member: Member) -> Node:
    """Return what a member's envelopes name: a standby speaks as the server whose seat it may get."""
    return Node(Role.SERVER if member.role == Role.STANDBY else Role(member.role), member.rank)


@tag(3)
class View(Message):
    """Scheduler to all members: the holder of each seat. Its number grows with every change."""

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
    keys: tuple[str, ...] = ()
    """In the order of ``members``, the public key by which each speaks to the others, or that it has where
    it listens; empty for a member without a key. None at all in a job without keys."""
    lines: dict[str, int] = field(default_factory=dict)
    """By rank of a server that was given all that its predecessors held: the first one's incarnation."""


@tag(14)
class ViewChanges(Message):
    """Scheduler to members, in place of VIEW: the seats that are not as view ``base`` shows them."""

    number: int
    base: int
    phase: str
    """This and what follows as in a VIEW of this number."""
    reason: str
    members: tuple[Member, ...]
    """The seats that have changed since view ``base``, each as it is."""
    epoch: int = 0
    since: int = 0
    cut: int = 0
    keys: tuple[str, ...] = ()
    lines: dict[str, int] = field(default_factory=dict)

    def applied(self, view: View) -> View:
        """Return the view that a member has whose newest was ``view``, not older than ``base``."""
        keys = view.keys or ("",) * len(view.members)
        changed = {(member.role, member.rank): member for member in self.members}
        new_keys = {
            (member.role, member.rank): key for member, key in zip(self.members, self.keys, strict=False)
        }
        nodes = [(member.role, member.rank) for member in view.members]
        return View(
            self.number,
            self.phase,
            self.reason,
            tuple([changed.get(node, member) for node, member in zip(nodes, view.members, strict=True)]),
            self.epoch,
            self.since,
            self.cut,
            tuple([new_keys.get(node, key) for node, key in zip(nodes, keys, strict=False)])
            if view.keys or self.keys
            else (),
            self.lines,
        )


@tag(4)
class Beat(Message):
    """Member to scheduler and back: I live; the counter moves when the application does."""

    progress: int
    reason: str = ""
    rounds: int = 0
    """Pushes of the key that a worker has pushed most often; 0 of a server."""
    in_bytes: int = 0
    out_bytes: int = 0
    """Bytes of values that the member has received and sent since it began."""
    memory_bytes: int = 0
    limit_bytes: int = 0
    """The memory that the values of a server have reserved, and its limit; 0 for no limit, and of
    a worker."""
    goes_on: bool = False
    """Whether a store of a worker closes rounds without lost workers (``on_worker_lost="shrink"``)."""
    standstill: int = 0
    """The number of a worker's standstill, 0 for none. Of the scheduler, the one that cannot end,
    for ``reason``."""
    replayed: int = 0
    """The number of steps of its predecessor that a replacement passes over, so far; 0 for none.
    Of the scheduler, of all other workers together."""
    rebuilds: bool = False
    """The sender uses stores, and each can be made again from what its workers hold."""


@tag(5)
class Leave(Message):
    """Member to scheduler: I end. ``done`` says that I ended well."""

    done: bool
    exit_code: int
    replaceable: bool
    reason: str


@tag(6)
class Left(Message):
    """Scheduler to member: your leaving is known."""


class Trait(NamedTuple):
    """A thing that must be the same on every worker."""

    name: str
    """Its name, such as that of a parameter, for people."""
    value: str


@tag(7)
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
    what: str = ""
    """The call that begins here, with all that must be the same on every worker."""
    code: int = 0
    """The sender will not pass, as its call has failed with this error, and neither may the others."""
    text: str = ""
    refused: int = 0
    """How often the sender was refused at this barrier before."""
    traits: tuple[Trait, ...] = ()
    """The things that the workers compare here, where they do."""


@tag(8)
class Released(Answer):
    """Scheduler to worker: every member stands there, or stood; go on."""

    number: int | None = None
    """The number of the barrier; None for a barrier that this worker's predecessor has passed."""


@tag(9)
class Stop(Message):
    """Scheduler to members: the job is over."""

    exit_code: int
    reason: str


@tag(10)
class Error(Answer):
    """Answer to a request that could not be done; nothing was changed by it."""

    code: int
    text: str


@tag(11)
class Done(Answer):
    """Answer to a request that needs no other answer."""


@tag(12)
class Probe(Message):
    """Worker to server: which of these unanswered requests do you have?"""

    seqs: tuple[int, ...]


class Pending(NamedTuple):
    """A request that a server has and cannot answer yet, and why."""

    seq: int
    reason: str


@tag(13)
class Probed(Message):
    """Answer to PROBE: the missing ones must be sent again, the pending ones wait."""

    missing: tuple[int, ...]
    pending: tuple[Pending, ...]
    for_workers: tuple[int, ...] = ()
    """Those of the pending that wait for calls of workers, which the reason names."""


# --- joining, resuming, and the state of a cluster ------------------------------------------------


@tag(70)
class Join(Message):
    """Worker to server: I have no more batches for this store; do not wait for me."""

    store: str
    call: int
    """Counts from 1."""
    waits: bool
    """Answer when every rank has joined; else at once."""


@tag(71)
class Joined(Answer):
    """Answer to JOIN."""

    last: int
    """The rank that joined last."""


@tag(72)
class Return(Message):
    """Worker to server: this join is over; wait for everybody again."""

    store: str
    call: int


@tag(73)
class History(Message):
    """Worker to server: which calls of all ranks do you know of?"""

    store: str


@tag(74)
class HistoryIs(Answer):
    """Answer to HISTORY: the last calls of rank 0, and the joins."""

    optimize_calls: int
    optimize_after: int
    rate_calls: int
    rate_after: int
    lr: float
    """The learning rate of the last RATE."""
    joins: int
    """How many are over."""
    joined: bool
    """The asking rank has made the next one, too."""
    restored: int = 0
    """The checkpoint from which the store was restored last; 0 for none."""


@tag(75)
class Resume(Message):
    """Worker to scheduler: I go on where my rank stopped."""

    store: str
    pushed: int | None
    """After so many rounds; None in a store without rounds."""


@tag(76)
class Resumed(Answer):
    """Answer to RESUME."""

    replaced: bool
    """The sender has taken another's place; else it knows its own numbers."""
    barriers: dict[str, int]
    """By name, the number of the next barrier of this rank, in a store without rounds."""


# --- one who looks --------------------------------------------------------------------------------


class OldRound(NamedTuple):
    """The oldest open round of a store on one server."""

    server: int
    store: str
    key: str
    number: int
    missing: tuple[int, ...]
    age_s: float


@tag(78)
class Look(Message):
    """Anybody to scheduler: how does the job stand?"""


class Sight(NamedTuple):
    """A seat, as the scheduler shows it in answer to LOOK."""

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


class Figures(NamedTuple):
    """The figures of the holder of a seat, as the scheduler shows them in answer to LOOK."""

    software: str
    """Its version; empty if it is not known."""
    rounds: int
    """This and the following as in its newest BEAT."""
    in_bytes: int
    out_bytes: int
    memory_bytes: int
    limit_bytes: int
    late_s: float
    """Seconds by which the pushes of a worker come after the first of their round, at the server
    where most."""


class Wait(NamedTuple):
    """A call in which a worker waits."""

    rank: int
    call: str
    waited_s: float
    """Since its script has made a call last."""
    ranks: tuple[int, ...]
    """The workers that it waits for; none if that is not known."""


class Copy(NamedTuple):
    """The copy of a server's values."""

    rank: int
    """The server."""
    state: str
    """The state of its standby, as in a view."""
    who: str
    """HOST:PID of the standby's process; empty if it has none."""
    copied: int
    """The percentage of the values that the standby has."""
    behind_bytes: int
    """Bytes that the server has sent to it, and that are not confirmed."""
    reason: str
    """Why it is not level; empty where it is, or soon will be."""


class PublicationFigures(NamedTuple):
    """A publication, as one server or all of them have it."""

    name: str
    version: int
    """The newest version that is there; 0 for none."""
    age_s: float
    size: int
    """Bytes of all versions that are there."""
    readers: dict[str, int]
    """By version, how many use it."""


class HotRows(NamedTuple):
    """The rows of an embedding table that were used most, of one server or of all of them."""

    store: str
    table: str
    uses: dict[str, float]
    """By id, at most :data:`HOT_ROWS_MAX`: the updates of the row, of which old ones count less."""


class Promotion(NamedTuple):
    """A standby that has taken the seat of its server."""

    rank: int
    incarnation: int
    who: str
    """HOST:PID of its process."""
    ago_s: float


class Move(NamedTuple):
    """A server's seat that another process has taken from one that goes on, or is about to take."""

    rank: int
    who: str
    """HOST:PID of that process; empty while there is none."""
    ago_s: float
    """Seconds since it has the seat; or since this was asked for."""
    took_s: float
    is_over: bool


@tag(79)
class Seen(Answer):
    """Answer to LOOK."""

    phase: str
    reason: str
    members: tuple[Sight, ...]
    rounds: tuple[OldRound, ...]
    """The oldest of each store, the oldest first."""
    software: str = ""
    """The version of the scheduler; empty if it is too old to say."""
    epoch: int = 0
    """How often the job was rolled back to a checkpoint."""
    checkpoint: int = 0
    """The newest complete checkpoint; 0 for none."""
    figures: tuple[Figures, ...] = ()
    """In the order of ``members``."""
    waits: tuple[Wait, ...] = ()
    """The calls in which workers have waited for some seconds."""
    copies: tuple[Copy, ...] = ()
    """One for each server, in a job with copies."""
    promotions: tuple[Promotion, ...] = ()
    """The newest promotions of standbys, the oldest first."""
    moves: tuple[Move, ...] = ()
    """The newest moves of servers' seats, the oldest first, and behind them those under way."""
    publications: tuple[PublicationFigures, ...] = ()
    """By name."""
    hot_rows: tuple[HotRows, ...] = ()
    """By store and table."""


@tag(130)
class Ping(Message):
    """Anybody to scheduler: answer at once, with as many octets as follow. Server to worker:
    behind values, say when you have them."""

    size: int = 0
    """At most :data:`PING_BYTES_MAX`."""

    def payload_sizes(self) -> tuple[int, ...]:
        return (self.size,) if self.size else ()


@tag(131)
class Pong(Answer):
    """Answer to PING."""

    clock_s: float
    """The sender's clock, in seconds since 1970; 0 if it has none."""
    size: int = 0
    sending_s: float = 0.0
    """From a worker: the seconds in which values that it had sent to this server were not known to
    have arrived."""

    def payload_sizes(self) -> tuple[int, ...]:
        return (self.size,) if self.size else ()


# --- figures of servers ---------------------------------------------------------------------------


@tag(120)
class Measure(Message):
    """Scheduler to server: send your figures, once."""

    number: int
    """Each is larger than the one before."""


class Count(NamedTuple):
    """A counter or a gauge of a server."""

    name: str
    """The name of the metric."""
    label: str
    """The value of its label; several are separated by commas, and empty is none."""
    value: float


class Histogram(NamedTuple):
    """A histogram of a server."""

    name: str
    buckets: tuple[int, ...]
    """How many values were within each bound and above the one before; the last has no bound."""
    total: float


class StoreFigures(NamedTuple):
    """A store as a server has it."""

    store: str
    mode: str
    size: int
    """Its keys of which the server holds a part."""
    version: int
    """The newest version of any key: closed rounds, or applied pushes."""


class KeyTraffic(NamedTuple):
    """Neighbouring keys that are pushed and pulled together, and the bytes of their values that moved."""

    store: str
    key: str
    """The first of them."""
    others: int
    """How many keys follow it."""
    moved_bytes: int


@tag(121)
class Measured(Message):
    """Answer to MEASURE: the figures of the server as of now; or, unasked, its stalled rounds, late
    ranks, publications and hot rows alone."""

    number: int
    """The number of MEASURE; 0 where the server was not asked."""
    counts: tuple[Count, ...]
    histograms: tuple[Histogram, ...]
    stores: tuple[StoreFigures, ...]
    traffic: tuple[KeyTraffic, ...]
    """Those with the most traffic, the first with the most."""
    rounds: tuple[OldRound, ...]
    """The oldest open round of each store that has one; unasked, of those that have been open for a while."""
    late: dict[str, float] = field(default_factory=dict)
    """By rank, the seconds by which its pushes came after the first of their round, a moving mean;
    unasked only."""
    publications: tuple[PublicationFigures, ...] = ()
    """Unasked only."""
    hot_rows: tuple[HotRows, ...] = ()
    """Unasked only, of tables that count uses."""


# --- keys -----------------------------------------------------------------------------------------


@tag(110)
class Enrol(Message):
    """Before HELLO, to a scheduler with keys: as a member I shall speak by these keys."""

    public: str
    """The public key of this process, in Z85."""
    command: str = ""
    """The public key of the command that this process will run, if it is a supervisor."""


@tag(112)
class Evict(Message):
    """Operator to a scheduler with keys: evict the holder of this seat."""

    role: int
    rank: int


@tag(116)
class Drain(Message):
    """Operator, or a server itself, to scheduler: hand all seats of the process of this server to others."""

    rank: int
    within_s: float
    """The time that it may take."""


@tag(117)
class Scale(Message):
    """Operator to scheduler: let so many processes hold the seats of servers."""

    servers: int
    within_s: float


# --- seats that two want --------------------------------------------------------------------------


@tag(113)
class Challenge(Message):
    """Scheduler to member: another process wants your seat; say that you live."""

    number: int


@tag(114)
class Alive(Message):
    """Member's answer to CHALLENGE."""

    number: int
    """The number of the challenge."""
    guardian: bool = False
    """The sender holds the seat for a command that it runs."""


# --- standbys -------------------------------------------------------------------------------------


@tag(115)
class Standing(Message):
    """Standby to scheduler: how its copy stands; and server to scheduler, about its standby."""

    level: bool = False
    """A standby has all that its server has answered, and will have it until it says otherwise."""
    copied: int = 0
    """The percentage of the values that a standby has copied."""
    behind_bytes: int = 0
    """Bytes that a server has sent to its standby, and that are not confirmed."""
    dismiss: int = 0
    """The incarnation of a standby with which a server cannot go on; 0 for none."""
    reason: str = ""
    """Why it is dismissed, or why it cannot be level; empty where it is, or soon will be."""


# --- the rendezvous of another launcher -----------------------------------------------------------


@tag(150)
class Rendezvous(Message):
    """Agent of another launcher to scheduler: the state of this run, or another one in its place."""

    run: str
    """The name that the launcher gave the run."""
    token: int | None
    """None only reads. Else ``state`` is set if this is the token of the present state; 0 is that of none."""
    state: tuple[str, ...] = ()
    """Lines that only agents understand."""


@tag(151)
class RendezvousIs(Answer):
    """Answer to RENDEZVOUS: the state that the run has now."""

    token: int
    """0 where there is none."""
    state: tuple[str, ...]
    is_set: bool
    """It is what the request wanted to set."""
