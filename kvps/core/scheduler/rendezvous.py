"""The rendezvous of other launchers: one small state for each run, set only by an agent that knows the present one.

torchrun's agents agree on their ranks by compare-and-set of such a state. The scheduler keeps it beside its job and
does not look into it: a run may have any number of agents, and its workers need not be members of the job.
"""

from __future__ import annotations

from typing import NamedTuple

from kvps.errors import Overload
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
                f"the state of the rendezvous {request.run!r:.80} takes {size} bytes, and the scheduler keeps "
                f"at most {STATE_BYTES_MAX}: start fewer nodes",
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
