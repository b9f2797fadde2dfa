"""One agent's copy of the rendezvous state, and how long the agent waits for the scheduler.

torch's agent calls :meth:`Holder.sync` about once a second: it writes the copy if the agent
changed it, and else reads. How long a scheduler that is away is waited for depends on what the
agent is doing:

===========  ===========================================================================================
joining      for :attr:`Holder.patience_s`; then the agent ends, with the reason
running      a moment; then the agent continues with its last copy, and the training with it
closing      a moment; then the rendezvous counts as closed: a scheduler that ended with its job
has no other agents ===========
===========================================================================================

After such a time no agent counts as silent for it, since none could send a heartbeat.

torchrun's rendezvous state as lines of JSON: the scheduler keeps them, and no agent unpickles anything.

The first line is about the round, and each other line about one node. torch has the state as an
object of a class of its own; :data:`FIELDS` says which fields we know, and a torch with others is refused.
"""

from __future__ import annotations

import enum
import json
import logging
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    _BackendRendezvousStateHolder,
    _NodeDesc,
    _RendezvousState,
)

from kvps.errors import KvpsError, SchedulerLost
from kvps.protocol.membership import Rendezvous, RendezvousIs

log = logging.getLogger("kvps")
RUNNING_S = 2.0
"""Seconds that an agent whose workers train waits for the scheduler: it watches them, too."""
TOLD_AFTER_S = 10.0
"""Seconds after which the log says that the scheduler is away: at the end of a job it ends before
the agents."""
READ_EVERY_S = 1.0
"""An agent that asks more often gets its last copy."""

Ask = Callable[[Rendezvous, float], RendezvousIs]
"""Asks the scheduler, for so many seconds at most; raises a KvpsError."""


class Doing(enum.Enum):
    """The phases of an agent."""

    JOINING = "joining"
    RUNNING = "running"
    CLOSING = "closing"


class Holder(_BackendRendezvousStateHolder):
    """The copy of the state.

    Args:
        ask: asks the scheduler.
        settings: of the rendezvous.
        patience_s: seconds that a joining agent waits for the scheduler.
    """

    def __init__(self, ask: Ask, settings: RendezvousSettings, patience_s: float) -> None:
        self.doing = Doing.JOINING
        self.meeting: Meeting | None = None
        """Where the newest round that has a meeting meets."""
        self.patience_s = patience_s
        self._ask = ask
        self._settings = settings
        self._state = new_state()
        self._token = 0
        self._dirty = False
        self._read_at = -READ_EVERY_S
        self._has_written = False
        self._away_since: float | None = None
        """When the scheduler was first found not to answer; None while it answers."""
        self._is_told = False
        self._alive_at: datetime | None = None
        """When the scheduler came back last."""
        self._dead_nodes = []

    @property
    def state(self) -> _RendezvousState:
        """The copy."""
        return self._state

    def mark_dirty(self) -> None:
        """Have the next :meth:`sync` write the copy."""
        self._dirty = True

    def sync(self) -> bool | None:
        """Write the copy if it was changed, else read.

        Returns:
            Whether what was written is the state now; None if nothing was written.

        Raises:
            RendezvousConnectionError: if the scheduler does not answer a joining agent, or refuses.
        """
        if self._dirty:
            lines = encode(self._state, self.meeting)
            self._dirty = False
            answer = self._request(Rendezvous(self._settings.run_id, self._token, lines))
            if answer is None:
                self._state.closed |= self.doing is Doing.CLOSING
                return self.doing is Doing.CLOSING
            self._take(answer)
            self._has_written |= answer.is_set
            return answer.is_set
        if time.monotonic() >= self._read_at + READ_EVERY_S:
            answer = self._request(Rendezvous(self._settings.run_id, None))
            if answer is not None:
                self._take(answer)
        return None

    def meet(self, meeting: Meeting) -> None:
        """Tell the other agents of this round where they meet.

        Raises:
            RendezvousConnectionError: as :meth:`sync`.
        """
        self.meeting = meeting
        while True:
            self._dirty = True
            if self.sync() or self._state.round != meeting.round:
                return
            self.meeting = meeting  # another agent was faster; its lines have the former one

    def refresh(self) -> None:
        """Read now, however long ago the last copy was read.

        Raises:
            RendezvousConnectionError: as :meth:`sync`.
        """
        self._read_at = -READ_EVERY_S
        self.sync()

    def _request(self, request: Rendezvous) -> RendezvousIs | None:
        """Return the answer; None if there is none and the agent goes on without."""
        is_joining = self.doing is Doing.JOINING
        try:
            answer = self._ask(request, self.patience_s if is_joining else RUNNING_S)
        except SchedulerLost as error:
            if is_joining:
                raise RendezvousConnectionError(str(error)) from error
            self._miss(error)
            return None
        except KvpsError as error:
            raise RendezvousConnectionError(str(error)) from error
        if self._away_since is not None:
            self._away_since, self._is_told, self._alive_at = None, False, datetime.now(UTC)
        return answer

    def _miss(self, error: SchedulerLost) -> None:
        self._read_at = now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
        if not self._is_told and now - self._away_since >= TOLD_AFTER_S:
            self._is_told = True
            log.warning("torchrun continues with the ranks that it has: %s", error)

    def _take(self, answer: RendezvousIs) -> None:
        self._token, self._read_at = answer.token, time.monotonic()
        if answer.token == 0:
            self._state, self.meeting = new_state(), None
            return
        self._state, self.meeting = decode(answer.state, self._alive_at)
        self._sanitize()
        if self._state.closed and not self._has_written and not self._state.last_heartbeats:
            # Its run is over, and no agent of it is alive: this one belongs to the next run of that name.
            self._state, self.meeting = new_state(), None


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
