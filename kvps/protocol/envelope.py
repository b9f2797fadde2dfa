"""Envelopes, packets, and the registry of message tags.

Every message travels in a :class:`Packet` whose :class:`Envelope` names the sender: identity is in the
payload, and a ZeroMQ routing id is only an address.

A message is declared once, in a file of this package, with its tag, its fields and the bytes that must follow
it; :mod:`kvps.protocol.wire` turns it into frames and back by reading that declaration. A tag is for ever. A
new field goes to the end of its class and has a default, so that older bytes still decode. docs/protocol.md
states the sender of each message, when it is legal and how it is answered.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

PROTOCOL = (1, 0)
"""Major and minor number of the protocol; another major number is refused at HELLO."""

WINDOW = 64
"""Pushes of one key and rank under way, and so rounds of a span that are open at once."""
RUNS_MAX = 4096
ENTRIES_MAX = 1024
"""How many runs one push or pull, and how many keys one declaration, may carry."""

KEY_MAX = 256
TEXT_MAX = 4096
"""Characters of the name of a key or store, and octets of any text: a longer one is refused."""


class Role(enum.IntEnum):
    """The role of a process in a cluster."""

    SCHEDULER = 0
    SERVER = 1
    WORKER = 2
    STANDBY = 3
    """The role of a seat in views and in answers to LOOK only: in its envelope, a standby is the server whose
    values it copies."""
    READER = 4
    """Reads published versions, and has no seat."""

    def __str__(self) -> str:
        return self.name.lower()


class Node(NamedTuple):
    """A place in the cluster: a role and a rank within that role, from 0."""

    role: Role
    rank: int

    def __str__(self) -> str:
        return "scheduler" if self.role is Role.SCHEDULER else f"{self.role} {self.rank}"


T = TypeVar("T", bound=tuple[Any, ...])


def maker(kind: type[T]) -> Callable[[tuple[Any, ...]], T]:
    """Return what makes a named tuple of the tuple of all its fields, without a Python call."""
    return partial(tuple.__new__, kind)


class Envelope(NamedTuple):
    """The sender, its job and view, and the number of this request."""

    job: bytes
    """16 octets that name the job; zeros in a HELLO from a process that does not know it yet."""
    view: int
    """Number of the newest view that the sender has seen."""
    role: Role
    rank: int
    incarnation: int
    """The number of one process's life in that rank; the scheduler issues it, and it only grows."""
    seq: int
    """Number of this request among the sender's requests to this receiver; 0 asks no answer."""

    @property
    def node(self) -> Node:
        """The sender's place."""
        return Node(self.role, self.rank)


class Message:
    """The base of messages: each class has a tag, and the sizes of the frames that must follow."""

    TAG: ClassVar[int] = 0
    __slots__ = ()

    def payload_sizes(self) -> tuple[int, ...]:
        """Exact bytes of each payload frame behind this message."""
        return ()


M = TypeVar("M", bound=Message)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def _message(cls: type[M]) -> type[M]:
    """Make a dataclass of a message class; it is frozen for type checkers, and not when it runs.

    A frozen dataclass sets each field by a call of ``object.__setattr__``.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


@_message
class Answer(Message):
    """The base of answers to a request that waits for them."""

    seq: int
    """The number of the request."""


class Loan(NamedTuple):
    """Bytes in the sender's segment, in place of a payload frame."""

    nonce: int
    """The nonce of the segment."""
    lease: int
    """To be returned by a RELEASE; one for all loans of a packet."""
    offset: int
    size: int


class Packet(NamedTuple):
    """One message with its envelope and its payload frames, or loans in their place."""

    envelope: Envelope
    message: Message
    payload: tuple[memoryview, ...] = ()
    loans: tuple[Loan, ...] = ()


MESSAGES: dict[int, type[Message]] = {}
"""The class of each tag."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def tag(number: int) -> Callable[[type[M]], type[M]]:
    """Register a message class under its tag; use it as a decorator."""

    def register(cls: type[M]) -> type[M]:
        assert number not in MESSAGES, f"tag {number} is taken"
        made = _message(cls)
        made.TAG = number
        MESSAGES[number] = made
        return made

    return register
