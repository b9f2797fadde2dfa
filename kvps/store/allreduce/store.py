"""``allreduce``: a store without servers, whose ranks add up among themselves in a ring.

Theory of operation
-------------------
Every rank holds the value of every key. A push is a collective: the ranks add up what they push, and the
sum is the key's value at all of them. A pull copies what is there, once this rank's own pushes of the key
are summed. So the store does what ``dist_sync`` does without an optimizer, and one word in a script
compares the two::

    script:   push a, b ──────── pull a ────── push c ───
                  │ copied          ▲ waits        │
    queue:        └─► [agree|sum a,b]──────────────└─► [agree|sum c]
                           │    ▲
    other ranks: ··········▼····│··· the same calls in the same order

What servers would do is missing here: keep values when a rank is lost, run an optimizer, sort calls
that ranks make in different orders. A call in :data:`UNSUPPORTED` is refused with the name of the
store that can.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn, cast

import torch

from kvps.core.embedding.spec import EmbeddingSpec
from kvps.core.worker import calls
from kvps.dtypes import Spec
from kvps.errors import ConfigError, KvpsError, Mismatch, Timeout, WorkerLost
from kvps.phrases import ranks_in_words
from kvps.runtime.device import queued, settle
from kvps.runtime.open_stores import OpenStores
from kvps.runtime.ticket import Ticket, finished
from kvps.store.allreduce.buckets import BucketPlan
from kvps.store.allreduce.group import CollectiveGroup
from kvps.store.allreduce.latest_values import AllreduceRequests, CollectiveTicket, LatestValues, deliver
from kvps.store.allreduce.queue import Collective, CollectiveQueue
from kvps.store.allreduce.rendezvous import Rendezvous
from kvps.store.base import KVStoreBase
from kvps.store.kvstore import KVStore
from kvps.store.metrics import Straggler
from kvps.store.names import Kind
from kvps.store.rows import dense_of, rows_in, taken
from kvps.tensors import TORCH

PLANS_MAX = 256
"""The number of lists of keys that are remembered with their buckets."""
STOP_MAX_S = 5.0


UNSUPPORTED: dict[type[calls.Call], tuple[str, str]] = {
    calls.JoinStore: ("join()", "give every rank equally many batches (kvps.data_sampler does this)"),
    calls.TakeCheckpoint: ("checkpoint()", "save the model on rank 0"),
    calls.RestoreCheckpoint: ("restore()", "load the model on rank 0 and broadcast() it"),
    calls.MakeTable: ("embedding()", "keep an ordinary table, pushed by rows, in the model"),
    calls.Compress: ("set_gradient_compression()", "a ring cannot compress; use a dist store"),
    calls.LoadResiduals: ("load_compression_state()", "nothing is compressed here"),
}
"""Call that needs servers -> its name, and what to do instead."""


class AllreduceStore(KVStore):
    """One store of ranks that add up among themselves; make it with :func:`kvps.create`."""

    def __init__(self, kind: Kind, meeting: Rendezvous, endings: OpenStores, timeout_s: float) -> None:
        """Connect; ``endings`` is told, so that the store ends with what it is part of."""
        super().__init__(kind, meeting.name, timeout_s)
        self._requests = AllreduceRequests(meeting.name, self._keys, kind.on_device, False)
        self._rank, self._size = meeting.rank, meeting.size
        self._stood: dict[bytes, Collective] = {}
        """Digest -> a collective that has timed out, and that the same call made again waits for."""
        self._plans: dict[tuple[object, ...], BucketPlan] = {}
        self._push_counts: Counter[str] = Counter()
        """By key, how often it was pushed."""
        self._pushed_bytes = 0
        meeting.gather(timeout_s)
        self._ring = CollectiveGroup(meeting)
        self._queue = CollectiveQueue(meeting.name)
        self._values = LatestValues(self._queue)
        self._endings = endings
        endings.watch(self)

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self._rank

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return self._size

    @property
    def num_dead_nodes(self) -> int:
        """1 once a rank was lost, which ends the ring; else 0."""
        return int(isinstance(self._queue.over, WorkerLost))

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Whether the store can do ``capability``: there are no servers to run an optimizer."""
        return KVStore.is_capable(capability) and capability != KVStoreBase.OPTIMIZER

    def _doubt(self, names: Sequence[str]) -> None:
        """A collective that failed leaves its keys as they were: see
        :mod:`kvps.store.allreduce.latest_values`."""

    def stragglers(self, *, timeout: float | None = None) -> list[Straggler]:
        """Return the ranks that this one waits for in a sum that it has begun."""
        self._begin()
        collective, since = self._queue.now, self._queue.since
        if collective is None:
            return []
        age_s = time.monotonic() - since
        return [Straggler(rank, collective.title, self._ring.number, age_s) for rank in self._ring.missing()]

    # --- what a kind of store does --------------------------------------------------------------------

    def _start(self, call: calls.Call, limit_s: float) -> Ticket:
        match call:
            case calls.PushValues():
                return self._push(call, limit_s)
            case calls.PushKeyRows():
                return self._push(self._densified(call), limit_s)
            case calls.PullValues():
                return self._pull(call, limit_s)
            case calls.PullKeyRows():
                return self._pull_rows(call, limit_s)
            case calls.Versions():
                return self._awaited(call.keys, limit_s, lambda made, name: made.versions[name])
            case calls.TakePlace():
                return finished(self._place(call.keys, limit_s))
            case calls.Init():
                self._init(call, limit_s)
            case calls.Broadcast():
                self._broadcast(call, limit_s)
            case calls.StandAtBarrier():
                self._stand(call, limit_s)
            case calls.Compare():
                compare = Collective(call.what, lambda: self._ring.compare(call.what, call.traits))
                self.wait(self._queue.add(compare, limit_s), limit_s, limit_s)
            case calls.Allocate():
                specs = [self._specs[name] for name in call.keys]
                return finished(
                    [torch.empty(spec.shape, dtype=TORCH[spec.dtype], device="cpu") for spec in specs]
                )
            case calls.Lookup() | calls.SaveResiduals():
                return finished({})
            case calls.Compress() if call.rules.are_off:
                pass
            case calls.LoadResiduals() if not call.residuals:
                pass
            case calls.SetOptimizer() | calls.SetRate() | calls.SaveState() | calls.LoadState():
                self._optimizer()
            case _:
                self._refuse(type(call))
        return finished()

    def _refuse(self, call: type[calls.Call]) -> NoReturn:
        what, instead = UNSUPPORTED[call]
        raise ConfigError(
            f"store {self._name!r} is allreduce, which has no servers, and does not "
            f"support {what}; {instead}, or use dist_sync"
        )

    def _optimizer(self) -> NoReturn:
        raise ConfigError(
            f"store {self._name!r} is allreduce: it has no optimizer, and no servers to run one; update "
            "the weights with the sums that you pull, as kvps.Trainer(..., kvstore='allreduce') does, or "
            "use dist_sync"
        )

    def _embedding(self, name: str, recipe: EmbeddingSpec, limit_s: float) -> NoReturn:
        self._refuse(calls.MakeTable)

    def _init(self, call: calls.Init, limit_s: float) -> None:
        for name, spec in call.keys:
            known = self._specs.get(name)
            if known is not None and known != spec:
                raise Mismatch(
                    f"key {name!r} is {known} and cannot be initialised as {spec}; broadcast() replaces a key"
                )
        new = [index for index, (name, _) in enumerate(call.keys) if name not in self._specs]
        if new:
            keys = [call.keys[index] for index in new]
            plan = BucketPlan("init", keys, "cpu")
            rows = [call.rows[index] for index in new]
            self._together(plan, lambda: self._spread(plan, keys, rows, limit_s), limit_s)

    def _broadcast(self, call: calls.Broadcast, limit_s: float) -> None:
        self._plans.clear()  # types and shapes may change
        plan = BucketPlan("broadcast", call.keys, "cpu")
        collective = self._spread(plan, call.keys, call.rows, limit_s)
        self.wait(collective, limit_s, limit_s)
        deliver(call.sinks, collective.result())

    def _place(self, names: tuple[str, ...], limit_s: float) -> calls.Place:
        """Return where the pushes of these keys begin: no rank is ever replaced."""
        if not names or not all(name in self._values for name in names):
            return calls.Place(0, 0)
        versions = self._awaited(names, limit_s, lambda made, name: made.versions[name]).wait()
        found = cast("list[int]", versions)
        return calls.Place(min(found), max(found))

    def _stand(self, call: calls.StandAtBarrier, limit_s: float) -> None:
        if call.failure is not None:
            return  # it fails at every rank, before anything is sent
        plan = self._plan(f"barrier {call.name!r}" if call.name else "barrier", (), "cpu")

        def make() -> list[torch.Tensor]:
            self._ring.agree(plan.digest, plan.words)
            return []

        self._together(plan, lambda: self._queue.add(Collective(plan.words, make), limit_s), limit_s)

    def _spread(
        self, plan: BucketPlan, keys: Sequence[tuple[str, Spec]], rows: Sequence[torch.Tensor], limit_s: float
    ) -> Collective:
        """Have rank 0's rows become the values of ``keys``."""
        if self._rank == 0:  # not in the type that sums are taken in, but bit by bit
            flats = [torch.cat([rows[index].view(-1) for index in bucket.indices]) for bucket in plan.buckets]
        else:
            flats = [bucket.blank() for bucket in plan.buckets]

        def make() -> list[torch.Tensor]:
            self._ring.agree(plan.digest, plan.words)
            self._ring.spread(flats)
            return plan.rows(flats)

        names = [name for name, _ in keys]
        return self._values.begin(Collective(plan.words, make, names), 0, limit_s)

    def _figures(self) -> dict[str, float]:
        rounds = max(self._push_counts.values(), default=0)
        both = self._pushed_bytes  # a sum is as large as what each rank gives to it
        return {"rounds": rounds, "sent_bytes": both, "received_bytes": both}

    def _push(self, call: calls.PushValues, limit_s: float) -> Ticket:
        self._push_counts.update(call.keys)
        self._pushed_bytes += sum([row.nbytes for row in call.rows])
        device = call.rows[0].device if call.rows else torch.device("cpu")
        plan = self._plan("push", call.keys, device.type)
        with torch.no_grad():
            flats = [bucket.filled(call.rows) for bucket in plan.buckets]
        wait_until_filled = queued(device)

        def make() -> list[torch.Tensor]:
            wait_until_filled()
            self._ring.agree(plan.digest, plan.words)
            self._ring.sum(flats)
            rows = plan.rows(flats)
            settle(device)
            return rows

        collective = Collective(plan.words, make, call.keys)
        if call.sinks is not None:
            self._values.begin(collective, 1, limit_s)
            return CollectiveTicket(call.keys, [collective] * len(call.keys), limit_s, self.wait)
        collective.on_error = self._owe
        self._values.begin(collective, 1, limit_s)
        return finished()  # it is copied; whether it can be summed shows later

    def _densified(self, call: calls.PushKeyRows) -> calls.PushValues:
        pairs = zip(call.keys, rows_in(call.rows), strict=True)
        dense = tuple([dense_of(self._specs[name], rows) for name, rows in pairs])
        return calls.PushValues(self._name, call.keys, dense, None, call.priority, call.eager)

    def _pull(self, call: calls.PullValues, limit_s: float) -> Ticket:
        ticket = self._awaited(call.keys, limit_s)
        if call.min_version:
            collectives = self._values.of(call.keys)
            ticket = CollectiveTicket(call.keys, collectives, limit_s, self.wait)
            ticket.wait()
            for name, collective in zip(call.keys, collectives, strict=True):
                if collective.versions[name] < call.min_version:
                    raise ConfigError(
                        f"key {name!r} is at version {collective.versions[name]}, and in an "
                        "allreduce store only this rank's own pushes advance it to "
                        f"min_version={call.min_version}"
                    )
        return ticket

    def _pull_rows(self, call: calls.PullKeyRows, limit_s: float) -> Ticket:
        picks = dict(zip(call.keys, zip(call.ids, call.places, strict=True), strict=True))

        def read(collective: Collective, name: str) -> torch.Tensor:
            return taken(collective.row(name).view(-1, self._specs[name].width), *picks[name])

        return self._awaited(call.keys, limit_s, read)

    def _awaited(
        self,
        names: tuple[str, ...],
        limit_s: float,
        read: Callable[[Collective, str], object] = Collective.row,
    ) -> Ticket:
        """Return the ticket of a call that waits for the newest values of some keys."""
        return CollectiveTicket(names, self._values.of(names), limit_s, self.wait, read)

    def _close(self, limit_s: float) -> None:
        if not self._queue.flush(limit_s):
            self._later.append(self._late("close()", limit_s))
        self._let_go()

    def _let_go(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Leave the other ranks without waiting for calls in flight; a second call does nothing."""
        self._is_closed = True
        self._queue.fail(ConfigError(f"store {self._name!r} is closed; create another store"))
        self._ring.close()
        self._queue.stop(STOP_MAX_S)
        self._endings.forget(self)

    # --- small things -------------------------------------------------------------------------------

    def wait(self, collective: Collective, left_s: float, limit_s: float) -> None:
        """Wait for the end of a collective.

        Raises:
            KvpsError: if it failed, or, as Timeout, if it is not over in time.
        """
        if not collective.wait(max(0.0, left_s)):
            raise self._late(collective.title, limit_s)
        error = collective.exception()
        if error is not None:
            with suppress(ValueError):
                self._later.remove(error)  # type: ignore[arg-type]  # the queue sets no others
            raise error  # here, and not again in the next call

    def _together(self, plan: BucketPlan, begin: Callable[[], Collective], limit_s: float) -> None:
        """Make a call that counts when it succeeds; after a Timeout the same call waits on."""
        collective = self._stood.pop(plan.digest, None) or begin()
        try:
            self.wait(collective, limit_s, limit_s)
        except Timeout:
            self._stood[plan.digest] = collective
            raise

    def _owe(self, error: KvpsError) -> None:
        """Have the next call raise the error of a push whose caller has gone on."""
        if error not in self._later:
            self._later.append(error)

    def _late(self, title: str, limit_s: float) -> Timeout:
        missing = self._ring.missing()
        if missing:
            who = f"{ranks_in_words(missing)} {'has' if len(missing) == 1 else 'have'} not made this call"
        else:
            who = "all ranks have started it, but a rank or the network is stuck"
        return Timeout(
            f"store {self._name!r}: {title} is not done after {limit_s:g} s: this rank waits in call "
            f"{self._ring.number}, and {who}. Nothing is cancelled: the calls continue, and a pull waits "
            "for them again"
        )

    def _plan(self, verb: str, names: tuple[str, ...], device: str) -> BucketPlan:
        known = self._plans.get((verb, names, device))
        if known is None:
            known = BucketPlan(verb, [(name, self._specs[name]) for name in names], device)
            if len(self._plans) >= PLANS_MAX:
                self._plans.clear()
            self._plans[verb, names, device] = known
        return known
