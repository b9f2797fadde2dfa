"""The permissions of senders: the messages that each receiver accepts from each role and each key,
and the longest heads.

They are checked by the envelope and the tag, before a body is decoded: what nobody may send costs its
receiver no more than a look at 48 octets. :mod:`kvps.net.doorman` enforces them. docs/protocol.md
has the same table (section 12).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from kvps import protocol as p
from kvps.errors import ProtocolError, Unauthorized
from kvps.protocol.envelope import Envelope, Message, Node, Role
from kvps.protocol.wire import HEAD_BYTES_MAX


class Place(enum.Enum):
    """Where a packet comes in."""

    SCHEDULER = "a scheduler"
    SERVER = "a server"
    WORKER = "a worker"
    READER = "a relay"
    """These four are where a process listens."""
    TO_SCHEDULER = "a member"
    TO_SERVER = "a client of a server"
    TO_WORKER = "a client of a worker"
    TO_READER = "a client of a relay"
    """And these the near ends of connections that a process has opened."""

    __hash__ = object.__hash__  # the one of Enum is a function in Python, and called for each packet


LISTENING: dict[Role, Place] = {role: Place[role.name] for role in Role if role is not Role.STANDBY}
"""Where others come in to a process of each role."""

_MEMBER = frozenset({p.Enrol, p.Hello, p.Beat, p.Leave, p.Alive, p.Look, p.Ping, p.Error, p.ClockIs, p.Spans})
_SHARING = frozenset({p.Offer, p.Taken, p.Release})
_READS = frozenset({p.Hello, p.Watch, p.Retain, p.Read, p.ReadChanges})

ALLOWED: Mapping[Place, Mapping[Role, frozenset[type[Message]]]] = {
    Place.SCHEDULER: {
        Role.WORKER: _MEMBER
        | {p.Evict, p.Rendezvous, p.Barrier, p.Resume, p.Checkpoint, p.Halted, p.Proceeding, p.Trace, p.Fetch}
        | {p.Close, p.Drain, p.Scale},
        Role.READER: frozenset({p.Where}),
        Role.SERVER: _MEMBER
        | {p.Measured, p.ImageTaken, p.ImageKept, p.Committed, p.Shelf, p.Restored, p.Standing, p.Drain},
    },
    Place.SERVER: {
        Role.WORKER: _SHARING
        | {p.Hello, p.Probe, p.Join, p.Return, p.History, p.Revive, p.Open, p.Declare, p.Find, p.Status}
        | {p.Optimize, p.Rate, p.GetState, p.SetState, p.Load, p.Push, p.Pull}
        | {p.PushRows, p.PullRows, p.PullChanged}
        | {p.Embed, p.PushTables, p.PullTables, p.Export, p.TableRate, p.Pong, p.Close}
        | {p.Tell, p.Give}
        | {p.Freeze, p.Put, p.Announce, p.LastVersion},
        Role.SERVER: _SHARING | {p.Hello, p.Norms, p.StepNorm, p.Follow, p.Followed},
        Role.READER: _SHARING | _READS,
    },
    Place.WORKER: {Role.WORKER: _SHARING | {p.Hello, p.Push, p.Pull, p.Probe, p.Join}},
    Place.READER: {Role.READER: frozenset({p.Read})},
    Place.TO_SCHEDULER: {
        Role.SCHEDULER: frozenset(
            {p.Done, p.Welcome, p.View, p.ViewChanges, p.Beat, p.Left, p.Stop, p.Error, p.Challenge, p.Seen}
        )
        | {
            p.Pong,
            p.Released,
            p.Resumed,
            p.Checkpointed,
            p.Probed,
            p.Halt,
            p.Proceed,
            p.RendezvousIs,
            p.Closed,
            p.ServersAre,
        }
        | {p.TakeImage, p.Commit, p.GiveUp, p.Recall, p.Restore, p.Measure, p.AskClock, p.Tracing, p.Part}
    },
    Place.TO_SERVER: {
        Role.SERVER: _SHARING
        | {p.StreamAt, p.Welcome, p.Error, p.Ack, p.Done, p.Probed, p.Declared, p.FoundAll}
        | {p.Pulled, p.PulledRows, p.Changed}
        | {p.PulledTables, p.Exported, p.StateIs, p.StatusIs, p.Joined, p.HistoryIs, p.Revived, p.Ping}
        | {p.Opened, p.Closed, p.VersionIs, p.Retained, p.Octets, p.Changes, p.Elsewhere}
        | {p.Open, p.CopyBegin, p.CopyStores, p.CopyStore, p.CopyChunk, p.CopyKeys, p.CopyValues, p.CopyLevel}
        | {p.Embed, p.CopyRows, p.CopyBlock, p.CopyVersion, p.CopyPublication}
    },
    Place.TO_WORKER: {Role.WORKER: _SHARING | {p.Welcome, p.Error, p.Ack, p.Probed, p.Pulled}},
    Place.TO_READER: {Role.READER: frozenset({p.Error, p.Octets, p.Elsewhere})},
}
"""By place and by the role of the sender: what may be said there."""

BY_KEY: dict[str, frozenset[type[Message]]] = {
    "worker": frozenset({p.Enrol, p.Hello, p.Rendezvous}),
    "server": frozenset({p.Enrol, p.Hello}),
    "admin": frozenset({p.Evict, p.Drain, p.Scale, p.Look, p.Ping, p.Trace, p.Fetch}),
    "look": frozenset({p.Look, p.Ping}),
    "reader": frozenset({p.Where}),
}
"""By the role that a key opens: the messages that may come along its connections to a scheduler."""

HEAD_BYTES = 64 << 10
"""Octets of the head of a message that is not in :data:`LONG`."""
LONG = frozenset(
    {
        *(
            p.View,
            p.ViewChanges,
            p.Seen,
            p.Measured,
            p.Halt,
            p.Halted,
            p.ImageKept,
            p.Commit,
            p.Shelf,
            p.ServersAre,
        ),
        *(p.Declare, p.Declared, p.Find, p.FoundAll, p.Optimize, p.Probe, p.Probed, p.Release),
        *(p.Push, p.Pull, p.Pulled, p.Load, p.Ack, p.StatusIs, p.Resumed, p.Revived, p.StateIs, p.SetState),
        *(p.CopyStores, p.CopyStore, p.CopyChunk, p.CopyKeys, p.CopyValues, p.CopyRows),
    }
)
"""Messages whose head may be as long as any: they have an entry for each key, run, seat or cut."""


_HEAD_MAX = {
    (place, role, kind): HEAD_BYTES_MAX if kind in LONG else HEAD_BYTES
    for place, roles in ALLOWED.items()
    for role, kinds in roles.items()
    for kind in kinds
}
"""The longest head of each message that is allowed."""


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
    head_max = _HEAD_MAX.get((place, envelope.role, kind), 0)
    if head_bytes > head_max:
        if not head_max:
            raise ProtocolError(f"a {envelope.role} may not send {kind.__name__} to {place.value}")
        raise ProtocolError(
            f"a head of {head_bytes} octets is too long for {kind.__name__}: the limit is {head_max}"
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
        is_own = kind is p.Drain and envelope.role is Role.SERVER  # a server may ask for itself
        if kind in (p.Enrol, p.Evict, p.Drain, p.Scale, p.Rendezvous, p.Trace, p.Fetch) and not is_own:
            raise Unauthorized(
                f"the session key of {name} may not send {kind.__name__}", reason="key_may_not"
            )
        return
    if place in (Place.SERVER, Place.READER) and who == "reader" and envelope.role is Role.READER:
        return  # the doors of its role are checked next
    if place is not Place.SCHEDULER or kind not in BY_KEY.get(who, ()):
        raise Unauthorized(
            f"the key of the role {who} may not send {kind.__name__} to {place.value}", reason="key_may_not"
        )
    asks_for_seat = kind in (p.Enrol, p.Hello)
    if asks_for_seat and str(envelope.role) != who:
        raise Unauthorized(
            f"the key of the role {who} asked for the seat of a {envelope.role}", reason="wrong_role"
        )
    if asks_for_seat and envelope.incarnation:
        raise Unauthorized(
            f"the key of the role {who} was used to speak for a member that has a seat", reason="other_member"
        )
