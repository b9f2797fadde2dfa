"""torchrun's rendezvous state as lines of JSON: the scheduler keeps them, and no agent unpickles anything.

The first line is about the round, and each other line about one node. torch has the state as an
object of a class of its own; :data:`FIELDS` says which fields we know, and a torch with others is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

FIELDS = {
    *("round", "complete", "deadline", "closed", "participants", "wait_list"),
    *("redundancy_list", "last_heartbeats"),
}
"""The fields of torch's state."""
PARTICIPANT, WAITING, REDUNDANT = "participant", "waiting", "redundant"


class Meeting(NamedTuple):
    """Where the agents of a round meet: torch's key-value store of the agent with rank 0."""

    round: int
    host: str
    port: int


def new_state() -> _RendezvousState:
    """Return the state of a rendezvous that nobody has joined.

    Raises:
        RendezvousStateError: if this torch has other fields in it.
    """
    state = _RendezvousState()
    if vars(state).keys() != FIELDS:
        other = ", ".join(sorted(vars(state).keys() ^ FIELDS))
        raise RendezvousStateError(
            f"this version of torch has other fields in the state of a rendezvous ({other}): use a version "
            "of kvps that supports it, or another --rdzv-backend"
        )
    return state


def encode(state: _RendezvousState, meeting: Meeting | None) -> tuple[str, ...]:
    """Return the lines of a state, and of the place where its round meets."""
    head = {
        "round": state.round,
        "complete": state.complete,
        "deadline": None if state.deadline is None else state.deadline.timestamp(),
        "closed": state.closed,
        "meeting": meeting,
    }
    nodes = {*state.participants, *state.wait_list, *state.redundancy_list, *state.last_heartbeats}
    return (_line(head), *[_line(_node(state, node)) for node in sorted(nodes)])


def _line(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _node(state: _RendezvousState, node: _NodeDesc) -> list[object]:
    lists = {PARTICIPANT: state.participants, WAITING: state.wait_list, REDUNDANT: state.redundancy_list}
    heard = state.last_heartbeats.get(node)
    return [
        *(node.addr, node.pid, node.local_id),
        [name for name, members in lists.items() if node in members],
        state.participants.get(node),
        None if heard is None else heard.timestamp(),
    ]


def decode(lines: Sequence[str], alive_at: datetime | None = None) -> tuple[_RendezvousState, Meeting | None]:
    """Return what :func:`encode` was given.

    Args:
        lines: the state.
        alive_at: no node counts as silent for the time before; None to leave the heartbeats as they are.

    Raises:
        RendezvousStateError: if it is no such state.
    """
    try:
        head, *nodes = [json.loads(line) for line in lines]
        state = new_state()
        state.round, state.complete = _int(head["round"]), _bool(head["complete"])
        state.closed = _bool(head["closed"])
        state.deadline = None if head["deadline"] is None else _time(head["deadline"])
        for addr, pid, local_id, lists, rank, heard in nodes:
            node = _NodeDesc(_text(addr), _int(pid), _int(local_id))
            if PARTICIPANT in lists:
                state.participants[node] = _int(rank)
            if WAITING in lists:
                state.wait_list.add(node)
            if REDUNDANT in lists:
                state.redundancy_list.add(node)
            if heard is not None:
                at = _time(heard)
                state.last_heartbeats[node] = at if alive_at is None else max(at, alive_at)
        meeting = head["meeting"]
        if meeting is not None:
            round_, host, port = meeting
            meeting = Meeting(_int(round_), _text(host), _int(port))
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise RendezvousStateError(
            f"the scheduler has a state of this run that is not torchrun's ({error}): choose "
            "another --rdzv-id"
        ) from error
    return state, meeting


def _time(value: Any) -> datetime:
    if type(value) not in (int, float):
        raise TypeError(f"{value!r:.40} is not a time")
    return datetime.fromtimestamp(value, UTC)


def _int(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r:.40} is not a whole number")
    return value


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError(f"{value!r:.40} is neither true nor false")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r:.40} is not a text")
    return value
