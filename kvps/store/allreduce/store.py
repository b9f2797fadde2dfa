"""``allreduce``: a store without servers, whose ranks add up among themselves in a ring.

Theory of operation
-------------------
Every rank holds the value of every key. A push is a collective: the ranks add up what they push, and the
sum is the key's value at all of them. A pull copies what is there, once this rank's own pushes of the key
are summed. So the store does what ``dist_sync`` does without an optimizer, and one word in a script
compares the two::

    script:   push a, b ──────── pull a ────── push c ───
                  │ copied          ▲ waits        │
    turns:        └─► [agree|sum a,b]──────────────└─► [agree|sum c]
                           │    ▲
    other ranks: ··········▼····│··· the same turns in the same order

What servers would do for it, nobody does here: keep values when a rank is lost, run an optimizer, sort calls
that ranks make in different orders. Such a call is refused with the name of the store that can.
"""

from __future__ import annotations

import builtins
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from kvps.core.worker.calls import Sinks
from kvps.core.worker.plan import Numbers
from kvps.dtypes import Spec
from kvps.errors import ConfigError, KvpsError, Mismatch, Timeout, WorkerLost
from kvps.runtime.cuda_staging import bring_back
from kvps.runtime.open_stores import OpenStores
from kvps.runtime.ticket import Ticket
from kvps.store.allreduce.buckets import BucketPlan
from kvps.store.allreduce.cells import Cells, CollectiveTicket
from kvps.store.allreduce.group import CollectiveGroup
from kvps.store.allreduce.queue import Collective, CollectiveQueue
from kvps.store.allreduce.rendezvous import Rendezvous, ranks
from kvps.store.allreduce.unsupported import Serverless
from kvps.store.arguments import names_of, reduce, targets_for
from kvps.store.calling import Outcome
from kvps.store.contract import Straggler
from kvps.store.names import Kind
from kvps.tensors import TORCH, Array

if TYPE_CHECKING:
    from types import TracebackType

LOADS_MAX = 256
"""How many lists of keys are remembered with their buckets."""
STOP_MAX_S = 5.0


class AllreduceStore(Serverless):
    """One store of ranks that add up among themselves; make it with :func:`kvps.create`."""

    def __init__(
        self, kind: Kind, meeting: Rendezvous, endings: OpenStores, timeout_s: float
    ) -> None:
        """Connect; ``endings`` is told, so that the store ends with what it is part of."""
        super().__init__(kind, meeting.name, timeout_s)
        self._rank, self._size = meeting.rank, meeting.size
        self._stood: dict[bytes, Collective] = {}
        """Calls that all ranks make together and that have timed out: made again they are the same."""
        self._loads: dict[tuple[object, ...], BucketPlan] = {}
        meeting.gather(timeout_s)
        self._ring = CollectiveGroup(meeting)
        self._turns = CollectiveQueue(meeting.name)
        self._cells = Cells(self._turns)
        self._endings = endings
        endings.watch(self)

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self._rank

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return self._size

    @property
    def num_dead_nodes(self) -> int:
        """1 once a rank was lost, which ends the ring; else 0."""
        return int(isinstance(self._turns.over, WorkerLost))

    def version(self, key: object, *, timeout: float | None = None) -> Any:
        """Return how many pushes of a key were summed since init; for a list of keys a list."""
        self._begin()
        names, is_many = names_of(key)
        turns = self._cells.of(names)
        CollectiveTicket(names, turns, self._limit(timeout), self.wait).wait()
        found = [turn.version(name) for name, turn in zip(names, turns, strict=True)]
        return found if is_many else found[0]

    def resume(self, keys: object, *, timeout: float | None = None) -> int:
        """Return how many pushes of ``keys`` this rank has made: no rank is ever replaced."""
        self._begin()
        names, _ = names_of(keys)
        known = [name for name in names if name in self._cells]
        versions = self.version(known, timeout=timeout)
        return min(versions, default=0) if len(known) == len(names) else 0

    def barrier(self, name: str | None = None, *, timeout: float | None = None) -> None:
        """Wait until every rank stands here; their earlier pushes are summed then.

        Raises:
            Timeout: naming who is late. Mismatch: if another rank makes another call.
        """
        self._begin()
        load = self._load(f"barrier {name!r}" if name else "barrier", (), "cpu")
        limit_s = self._limit(timeout)
        self._together(load, lambda: self._stand(load, limit_s), limit_s)
        self._raise_later()

    def stragglers(self) -> list[Straggler]:
        """Return the ranks that this one waits for in a sum that it has begun."""
        self._begin()
        turn, since = self._turns.now, self._turns.since
        if turn is None:
            return []
        age_s = time.monotonic() - since
        return [
            Straggler(one, turn.words, self._ring.number, age_s) for one in self._ring.missing()
        ]

    # --- hooks --------------------------------------------------------------------------------------

    def _init(
        self, keys: tuple[tuple[str, Spec], ...], rows: tuple[torch.Tensor, ...], limit_s: float
    ) -> None:
        for name, spec in keys:
            known = self._specs.get(name)
            if known is not None and known != spec:
                raise Mismatch(
                    f"key {name!r} is {known} and cannot be initialised as {spec}; broadcast() "
                    "replaces a key"
                )
        new = [index for index, (name, _) in enumerate(keys) if name not in self._specs]
        if new:
            load = BucketPlan("init", [keys[index] for index in new], "cpu")
            given = [rows[index] for index in new]
            names = tuple(keys[index][0] for index in new)
            self._together(load, lambda: self._spread(load, names, given, limit_s), limit_s)

    def _broadcast(
        self,
        keys: tuple[tuple[str, Spec], ...],
        rows: tuple[torch.Tensor, ...],
        sinks: tuple[torch.Tensor, ...],
        limit_s: float,
    ) -> Ticket:
        self._loads.clear()  # types and shapes may change
        turn = self._spread(
            BucketPlan("broadcast", keys, "cpu"), tuple(name for name, _ in keys), rows, limit_s
        )
        self.wait(turn, limit_s, limit_s)
        _deliver(sinks, turn.rows)
        return _over()

    def _spread(
        self, load: BucketPlan, names: tuple[str, ...], rows: Sequence[torch.Tensor], limit_s: float
    ) -> Collective:
        """Have rank 0's values become those of ``names``."""
        if self._rank == 0:  # not in the type that sums are taken in, but bit by bit
            flats = [
                torch.cat([rows[index].view(-1) for index in bucket.indices])
                for bucket in load.buckets
            ]
        else:
            flats = [bucket.blank() for bucket in load.buckets]

        def make() -> list[torch.Tensor]:
            self._ring.agree(load.digest, load.words)
            self._ring.spread(flats)
            return load.rows(flats)

        return self._cells.begin(Collective(load.words, make), names, 0, limit_s)

    def _stand(self, load: BucketPlan, limit_s: float) -> Collective:
        def make() -> list[torch.Tensor]:
            self._ring.agree(load.digest, load.words)
            return []

        return self._turns.add(Collective(load.words, make), limit_s)

    def _rows_of(
        self, names: tuple[str, ...], values: list[list[Array]], limit_s: float
    ) -> tuple[torch.Tensor, ...]:
        reduced = [reduce(devices, self._kind.on_device) for devices in values]
        if len({one.device for one in reduced}) > 1:  # one collective is of one device
            reduced = [one.cpu() for one in reduced]
        return tuple(reduced)

    def _push(
        self,
        names: tuple[str, ...],
        rows: tuple[torch.Tensor, ...],
        sinks: Sinks,
        priority: Numbers,
        eager: bool,
        limit_s: float,
    ) -> Ticket:
        device = rows[0].device if rows else torch.device("cpu")
        load = self._load("push", names, device.type)
        with torch.no_grad():
            flats = [bucket.filled(rows) for bucket in load.buckets]
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

        def make() -> list[torch.Tensor]:
            if ready is not None:
                ready.synchronize()
            self._ring.agree(load.digest, load.words)
            self._ring.sum(flats)
            found = load.rows(flats)
            if ready is not None:
                torch.cuda.current_stream(device).synchronize()  # of this thread
            return found

        turn = Collective(load.words, make)
        if sinks is not None:
            self._cells.begin(turn, names, 1, limit_s)
            return CollectiveTicket(names, [turn] * len(names), limit_s, self.wait)
        turn.on_error = self._owe
        self._cells.begin(turn, names, 1, limit_s)
        return _over()  # it is copied; whether it can be summed shows later

    def _pull(
        self,
        names: tuple[str, ...],
        sinks: Sinks,
        priority: Numbers,
        least: int,
        limit_s: float,
    ) -> Ticket:
        turns = self._cells.of(names)
        found = CollectiveTicket(names, turns, limit_s, self.wait)
        if least:
            found.wait()
            for name, turn in zip(names, turns, strict=True):
                if turn.version(name) < least:
                    raise ConfigError(
                        f"key {name!r} stands at version {turn.version(name)}, and in an allreduce "
                        f"store only this rank's own pushes bring it to min_version={least}"
                    )
        return found

    def _wanted(self, names: tuple[str, ...], is_many: bool, out: object, copy: bool) -> Outcome:
        if out is not None:
            if not copy:
                raise ConfigError("copy=False returns the values where they are; remove out=")
            form = self._form(names)
            given: Any = out if is_many else [out]
            if form is not None and form.fits_as_sinks(given):
                targets, places = list(given), list(range(len(given)))
            else:  # several of one key, or such as must be looked at
                lists = targets_for(names, is_many, out, self._specs)
                targets = [target for devices in lists for target in devices]
                places = [index for index, devices in enumerate(lists) for _ in devices]

            def deliver(rows: Any) -> object:
                _deliver(targets, [rows[index] for index in places])
                return out

            return Outcome((), deliver)

        def hand(rows: Any) -> object:
            found = [one.clone() if one.device.type == "cpu" else one.cpu() for one in rows]
            return found if is_many else found[0]

        return Outcome((), hand if copy else lambda rows: rows if is_many else rows[0])

    def _allocate(self, names: tuple[str, ...], limit_s: float) -> list[torch.Tensor]:
        specs = [self._specs[name] for name in names]
        return [torch.empty(spec.shape, dtype=TORCH[spec.dtype]) for spec in specs]

    def __exit__(
        self,
        kind: builtins.type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self.abandon()  # the others wait for this rank, and are to know that it does not come

    def _close(self) -> None:
        if not self._turns.flush(self._timeout_s):
            self._later.append(self._late("close()", self._timeout_s))
        self.abandon()

    def abandon(self) -> None:
        """Let go of the other ranks without waiting for what is under way; again: nothing."""
        self._is_closed = True
        self._turns.fail(ConfigError(f"store {self._name!r} is closed; create another one"))
        self._ring.close()
        self._turns.stop(STOP_MAX_S)
        self._endings.forget(self)

    # --- small things -------------------------------------------------------------------------------

    def wait(self, turn: Collective, left_s: float, limit_s: float) -> None:
        """Wait for the end of a turn.

        Raises:
            KvpsError: if it failed, or, as Timeout, if it is not over in time.
        """
        if not turn.wait(max(0.0, left_s)):
            raise self._late(turn.words, limit_s)
        if turn.error is not None:
            with suppress(ValueError):
                self._later.remove(turn.error)  # it is told here, and not again
            raise turn.error

    def _together(self, load: BucketPlan, begin: Callable[[], Collective], limit_s: float) -> None:
        """Make a call that counts when it succeeds; after a Timeout the same call waits on."""
        turn = self._stood.pop(load.digest, None) or begin()
        try:
            self.wait(turn, limit_s, limit_s)
        except Timeout:
            self._stood[load.digest] = turn
            raise

    def _owe(self, error: KvpsError) -> None:
        """A push has failed whose caller has gone on."""
        if error not in self._later:
            self._later.append(error)

    def _late(self, words: str, limit_s: float) -> Timeout:
        missing = self._ring.missing()
        if missing:
            who = f"{ranks(missing)} {'has' if len(missing) == 1 else 'have'} not made it"
        else:
            who = "all ranks have begun it, and one of them or the network does not go on"
        return Timeout(
            f"store {self._name!r}: {words} is not over after {limit_s:g} s: this rank waits in call "
            f"{self._ring.number}, and {who}. Nothing is cancelled: the calls stand, and a pull waits "
            "for them again"
        )

    def _load(self, verb: str, names: tuple[str, ...], device: str) -> BucketPlan:
        known = self._loads.get((verb, names, device))
        if known is None:
            known = BucketPlan(verb, [(name, self._specs[name]) for name in names], device)
            if len(self._loads) >= LOADS_MAX:
                self._loads.clear()
            self._loads[verb, names, device] = known
        return known


@torch.no_grad()
def _deliver(targets: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> None:
    """Copy each row into its target, a tensor of the user's, wherever either is."""
    if all(one.is_cpu for one in targets) and all(one.is_cpu for one in rows):
        torch._foreach_copy_(list(targets), list(rows))  # all at once: there may be thousands
        return
    pairs = list(zip(targets, rows, strict=True))
    bring_back([(target, row) for target, row in pairs if row.is_cpu])
    for target, row in pairs:
        if row.is_cuda:
            target.copy_(row)
            row.record_stream(torch.cuda.current_stream(row.device))


def _over() -> Ticket:
    ticket = Ticket()
    ticket.end(None, None)
    return ticket
