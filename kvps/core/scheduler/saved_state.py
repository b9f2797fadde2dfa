"""The saved state: the knowledge of a restarted scheduler, as bytes and back; the rendezvous of other
launchers.

Links and times are left out: members speak again, and every limit is counted anew from then.

The rendezvous is one small state for each run, set only by an agent that knows the present state. torchrun's
agents agree on their ranks by compare-and-set of such a state. The scheduler keeps it beside its job and does
not look into it: a run may have any number of agents, and its workers need not be members of the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgpack

from kvps.core.scheduler.barriers import Name, Passed
from kvps.core.scheduler.membership import Membership
from kvps.core.scheduler.seat import Settings, State, range_of
from kvps.errors import ConfigError, Overload, StorageError
from kvps.protocol.envelope import Node, Role
from kvps.protocol.membership import Rendezvous, RendezvousIs

RUNS_MAX = 64
"""Runs whose states are kept; then the state that was set longest ago is forgotten."""
STATE_BYTES_MAX = 60_000
"""Bytes of one state, with :data:`LINE_BYTES` for each line: it must fit into a head."""
LINE_BYTES = 5


class RunState(NamedTuple):
    """The state of one run."""

    token: int
    state: tuple[str, ...]


NO_STATE = RunState(0, ())


class RendezvousTable:
    """The states of all runs.

    A token names one state for ever: it is never issued again, also not for another run.
    """

    def __init__(self) -> None:
        self.issued = 0
        """The newest token."""
        self.runs: dict[str, RunState] = {}
        """By run; the state that was set longest ago comes first."""

    def answer(self, seq: int, request: Rendezvous) -> RendezvousIs:
        """Set a state if the request may, and return the present state.

        A request that comes a second time has the first answer, as its state is already there.

        Raises:
            Overload: if its state is too long. Then nothing changes.
        """
        if request.token is None:
            return RendezvousIs(seq, *self.runs.get(request.run, NO_STATE), False)
        size = sum([len(line.encode()) + LINE_BYTES for line in request.state])
        if size > STATE_BYTES_MAX:
            raise Overload(
                f"the state of the rendezvous {request.run!r:.80} takes {size} bytes, and the scheduler "
                f"keeps at most {STATE_BYTES_MAX}: start fewer nodes",
                limit="rendezvous",
            )
        present = self.runs.get(request.run, NO_STATE)
        if request.token == present.token and request.state != present.state:
            self.issued += 1
            self.runs.pop(request.run, None)
            self.runs[request.run] = present = RunState(self.issued, request.state)
            if len(self.runs) > RUNS_MAX:
                del self.runs[next(iter(self.runs))]
        return RendezvousIs(seq, *present, present.state == request.state)


FORMAT = 9
_NAMES = (
    *("incarnation", "host", "pid", "endpoint", "master", "machine"),
    *("is_guarded", "is_replacement", "has_said_so", "has_begun", "is_level", "is_added", "has_entered"),
    *("reason", "line"),
)
"""Fields of a seat that outlive the process."""
_TYPES = (int, str, int, str, str, int, *[bool] * 7, str, int, str, str)
"""The types of these fields, and of the two keys of the seat."""


class SavedState(NamedTuple):
    """The part of a scheduler that outlives its process."""

    job: bytes
    number: int
    formed: bool
    seats: Membership
    passed: dict[Name, Passed]
    resumed: dict[tuple[str, int], int]
    cuts: tuple[int, int, int, bool, int]
    """The newest cut that was begun, and that is complete, the epoch, whether the servers return to
    a cut, and the view in which the epoch began."""
    rendezvous: RendezvousTable


def dump(snapshot: SavedState) -> bytes:
    """Return ``snapshot`` as bytes."""
    settings = snapshot.seats.settings
    seats = [
        (*seat.node, seat.state.value, *[getattr(seat, name) for name in _NAMES], *seat.keys)
        for seat in snapshot.seats.by_node.values()
    ]
    passed = [(*name, *last) for name, last in snapshot.passed.items()]
    resumed = [(*place, pushed) for place, pushed in snapshot.resumed.items()]
    counts = (settings.workers, settings.servers, settings.replicas, settings.most_workers)
    head = (FORMAT, counts, snapshot.job, snapshot.number, snapshot.formed, snapshot.seats.issued)
    runs = [(run, *found) for run, found in snapshot.rendezvous.runs.items()]
    rendezvous = (snapshot.rendezvous.issued, runs)
    state: bytes = msgpack.packb((head, seats, passed, resumed, snapshot.cuts, rendezvous))
    return state


def _demand(values: Sequence[object], types: Sequence[type]) -> None:
    """Check the types of the values read, one by one.

    Raises:
        TypeError: if one is another.
    """
    for value, kind in zip(values, types, strict=True):
        if type(value) is not kind:
            raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")


def load(state: bytes, settings: Settings, now: float) -> SavedState:
    """Return the snapshot that :func:`dump` wrote.

    Raises:
        StorageError: if it did not write that.
        ConfigError: if it is of a cluster of another size.
    """
    try:
        head, rows, barriers, resumed, cuts, (last, runs) = msgpack.unpackb(state)
        (version, counts, job, number, formed, issued) = head
        _demand(head[2:], (bytes, int, bool, int))
        _demand(cuts, (int, int, int, bool, int))
        if version != FORMAT:
            raise StorageError(f"the scheduler's state has format {version}, expected {FORMAT}")
        _demand(counts, (int, int, int, int))
        workers, servers, replicas, most = counts
        if (workers, servers, most) != (settings.workers, settings.servers, settings.most_workers):
            raise ConfigError(
                f"the scheduler's state is of a job with {range_of(workers, most)} workers and {servers} "
                f"servers, and now there are to be {settings.workers_range} and {settings.servers}: start it "
                "as before, or with another --state"
            )
        if replicas != settings.replicas:
            raise ConfigError(
                f"the scheduler's state is of a job with --replicas {replicas}, and now it is to be "
                f"{settings.replicas}: start it as before, or with another --state"
            )
        seats = Membership(settings)
        seats.issued = issued
        for role, rank, state_name, *fields in rows:
            _demand(fields, _TYPES)
            if role == Role.STANDBY and not settings.replicas:
                seats.want_standby(rank)  # the seat of that server was being moved
            seat = seats.by_node[Node(Role(role), rank)]
            seat.state, seat.heard_at, seat.lost_at = State(state_name), now, now
            seat.is_welcomed = True  # one that was not says HELLO until it is
            *values, own, command = fields
            for name, value in zip(_NAMES, values, strict=True):
                setattr(seat, name, value)
            seat.keys = own, command
        for barrier in barriers:
            _demand(barrier, (str, str, int, int))
        for entry in resumed:
            _demand(entry, (str, int, int))
        passed = {(store, name): Passed(*last) for store, name, *last in barriers}
        places = {(store, rank): pushed for store, rank, pushed in resumed}
        begun, kept, epoch, is_returning, since = cuts
        rendezvous = RendezvousTable()
        for run, token, lines in runs:
            _demand((run, token, *lines), (str, int, *[str] * len(lines)))
            rendezvous.runs[run] = RunState(token, tuple(lines))
        _demand((last,), (int,))
        rendezvous.issued = last
    except (ValueError, TypeError, KeyError) as error:
        raise StorageError(
            "the scheduler's state cannot be read: start the scheduler with another --state, and "
            "start the job again"
        ) from error
    came = (begun, kept, epoch, is_returning, since)
    return SavedState(job, number, formed, seats, passed, places, came, rendezvous)
