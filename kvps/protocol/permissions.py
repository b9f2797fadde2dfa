"""The permissions of senders: the messages that each receiver accepts from each role and each key,
and the longest heads.

They are checked by the envelope and the tag, before a body is decoded: what nobody may send costs its
receiver no more than a look at 48 octets. :mod:`kvps.net.doorman` enforces them. docs/protocol.md
has the same table (section 12).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from kvps.errors import ProtocolError, Unauthorized
from kvps.protocol.checkpoint import (
    Checkpoint,
    Checkpointed,
    Commit,
    Committed,
    GiveUp,
    Halt,
    Halted,
    ImageKept,
    ImageTaken,
    Proceed,
    Proceeding,
    Recall,
    Restore,
    Restored,
    Revive,
    Revived,
    Shelf,
    TakeImage,
)
from kvps.protocol.envelope import Envelope, Message, Node, Role
from kvps.protocol.membership import (
    Alive,
    Barrier,
    Beat,
    Challenge,
    Done,
    Enrol,
    Error,
    Evict,
    Hello,
    History,
    HistoryIs,
    Join,
    Joined,
    Leave,
    Left,
    Look,
    Measure,
    Measured,
    Ping,
    Pong,
    Probe,
    Probed,
    Released,
    Rendezvous,
    RendezvousIs,
    Resume,
    Resumed,
    Return,
    Seen,
    Stop,
    View,
    Welcome,
)
from kvps.protocol.shared_memory import Offer, Release, Taken
from kvps.protocol.stores import (
    Close,
    Closed,
    Declare,
    Declared,
    Find,
    FoundAll,
    GetState,
    Norms,
    Open,
    Opened,
    Optimize,
    Rate,
    SetState,
    StateIs,
    Status,
    StatusIs,
    StepNorm,
)
from kvps.protocol.tracing import AskClock, ClockIs, Fetch, Part, Spans, Trace, Tracing
from kvps.protocol.values import (
    Ack,
    Changed,
    Embed,
    Export,
    Exported,
    Load,
    Pull,
    PullChanged,
    Pulled,
    PulledIds,
    PulledRows,
    PullIds,
    PullRows,
    Push,
    PushIds,
    PushRows,
    TableRate,
)


class Place(enum.Enum):
    """Where a packet comes in."""

    SCHEDULER = "a scheduler"
    SERVER = "a server"
    WORKER = "a worker"
    """These three are where a process listens."""
    TO_SCHEDULER = "a member"
    TO_SERVER = "a client of a server"
    TO_WORKER = "a client of a worker"
    """And these the near ends of connections that a process has opened."""


LISTENING = {
    Role.SCHEDULER: Place.SCHEDULER,
    Role.SERVER: Place.SERVER,
    Role.WORKER: Place.WORKER,
}
"""Where others come in to a process of each role."""

_MEMBER = frozenset({Enrol, Hello, Beat, Leave, Alive, Look, Ping, Error, ClockIs, Spans})
_SHARING = frozenset({Offer, Taken, Release})

ALLOWED: Mapping[Place, Mapping[Role, frozenset[type[Message]]]] = {
    Place.SCHEDULER: {
        Role.WORKER: _MEMBER
        | {Evict, Rendezvous, Barrier, Resume, Checkpoint, Halted, Proceeding, Trace, Fetch}
        | {Close},
        Role.SERVER: _MEMBER | {Measured, ImageTaken, ImageKept, Committed, Shelf, Restored},
    },
    Place.SERVER: {
        Role.WORKER: _SHARING
        | {Hello, Probe, Join, Return, History, Revive, Open, Declare, Find, Status}
        | {Optimize, Rate, GetState, SetState, Load, Push, Pull, PushRows, PullRows, PullChanged}
        | {Embed, PushIds, PullIds, Export, TableRate, Pong, Close},
        Role.SERVER: frozenset({Hello, Norms, StepNorm}),
    },
    Place.WORKER: {
        Role.WORKER: _SHARING | {Hello, Push, Pull, Probe, Join},
    },
    Place.TO_SCHEDULER: {
        Role.SCHEDULER: frozenset({Done, Welcome, View, Beat, Left, Stop, Error, Challenge, Seen, Pong})
        | {Released, Resumed, Checkpointed, Probed, Halt, Proceed, RendezvousIs, Closed}
        | {TakeImage, Commit, GiveUp, Recall, Restore, Measure, AskClock, Tracing, Part},
    },
    Place.TO_SERVER: {
        Role.SERVER: _SHARING
        | {Welcome, Error, Ack, Done, Probed, Declared, FoundAll, Pulled, PulledRows, Changed}
        | {PulledIds, Exported, StateIs, StatusIs, Joined, HistoryIs, Revived, Ping}
        | {Opened, Closed},
    },
    Place.TO_WORKER: {
        Role.WORKER: _SHARING | {Welcome, Error, Ack, Probed, Pulled},
    },
}
"""By place and by the role of the sender: what may be said there."""

BY_KEY: dict[str, frozenset[type[Message]]] = {
    "worker": frozenset({Enrol, Hello, Rendezvous}),
    "server": frozenset({Enrol, Hello}),
    "admin": frozenset({Evict, Look, Ping, Trace, Fetch}),
    "look": frozenset({Look, Ping}),
}
"""By the role that a key opens: the messages that may come along its connections."""

HEAD_BYTES = 64 << 10
"""Octets of the head of a message that is not in :data:`LONG`."""
LONG = frozenset(
    {
        *(View, Seen, Measured, Halt, Halted, ImageKept, Commit, Shelf),
        *(Declare, Declared, Find, FoundAll, Optimize, Probe, Probed, Release),
        *(Push, Pull, Pulled, Load, Ack, StatusIs, Resumed, Revived, StateIs, SetState),
    }
)
"""Messages whose head may be as long as any: they have an entry for each key, run, seat or cut."""


def check(place: Place, envelope: Envelope, kind: type[Message], head_bytes: int) -> None:
    """Check that the sender of ``envelope`` may say this there.

    Args:
        place: where the packet came in.
        envelope: of the packet; its role is believed here, and judged elsewhere.
        kind: the class of its message.
        head_bytes: octets of its head.

    Raises:
        ProtocolError: if it may not.
    """
    if kind not in ALLOWED[place].get(envelope.role, ()):
        raise ProtocolError(f"a {envelope.role} may not send {kind.__name__} to {place.value}")
    if head_bytes > HEAD_BYTES and kind not in LONG:
        raise ProtocolError(
            f"a head of {head_bytes} octets is too long for {kind.__name__}: the limit is {HEAD_BYTES}"
        )


def name_of(node: Node, incarnation: int) -> str:
    """Return the name of a connection by the session key of this member."""
    return f"{node.role}:{node.rank}:{incarnation}"


def check_name(name: str, place: Place, envelope: Envelope, kind: type[Message]) -> None:
    """Check that the sender is the process that the connection names.

    Args:
        name: of the connection.
        place: where the packet came in.
        envelope: of the packet.
        kind: the class of its message.

    Raises:
        Unauthorized: if it is not, or may not say that by this key.
    """
    what, _, who = name.partition(":")
    if what == "user":
        if place is Place.SCHEDULER:
            raise Unauthorized("a scheduler with keys accepts no connections without keys", reason="no_key")
        return
    if what != "role":
        if name != name_of(envelope.node, envelope.incarnation):
            raise Unauthorized(
                f"the session key of {name} speaks for {name_of(envelope.node, envelope.incarnation)}",
                reason="other_member",
            )
        if kind in (Enrol, Evict, Rendezvous, Trace, Fetch):
            raise Unauthorized(
                f"the session key of {name} may not send {kind.__name__}", reason="key_may_not"
            )
        return
    if place is not Place.SCHEDULER or kind not in BY_KEY.get(who, ()):
        raise Unauthorized(
            f"the key of the role {who} may not send {kind.__name__} to {place.value}",
            reason="key_may_not",
        )
    asks_for_seat = kind in (Enrol, Hello)
    if asks_for_seat and str(envelope.role) != who:
        raise Unauthorized(
            f"the key of the role {who} asked for the seat of a {envelope.role}",
            reason="wrong_role",
        )
    if asks_for_seat and envelope.incarnation:
        raise Unauthorized(
            f"the key of the role {who} was used to speak for a member that has a seat",
            reason="other_member",
        )
