"""A store whose values lie on servers, or in a server of this process: all but ``allreduce``.

Everything that decides is in the worker core; this file only turns a user's call into one of the
core's and waits for its end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvps.core.embedding.spec import EmbeddingSpec
from kvps.core.placement import Part, parts
from kvps.core.worker import calls
from kvps.errors import KvpsError, Mismatch
from kvps.protocol.stores import Open, StatusIs
from kvps.runtime import preemption
from kvps.runtime.ticket import Handle, Ticket
from kvps.runtime.worker_session import WorkerSession
from kvps.store.base import Session
from kvps.store.catch_up import CatchUp, refuse
from kvps.store.device_codec import ANSWERED, DeviceCodec
from kvps.store.embedding import EmbeddingTable
from kvps.store.kvstore import KVStore
from kvps.store.metrics import Straggler, of_servers, timed
from kvps.store.names import Kind
from kvps.store.options import StoreOptions
from kvps.store.requests import ServerRequests

log = logging.getLogger("kvps")


class DistStore(KVStore):
    """One store of a cluster; make it with :func:`kvps.create`."""

    knows_changes = True

    def __init__(
        self,
        kind: Kind,
        session: Session,
        opened: Open,
        options: StoreOptions,
        codec: DeviceCodec | None = None,
    ) -> None:
        super().__init__(kind, opened.store, options.timeout_s)
        self.options = options
        """Those that the other stores of a front end take from this one."""
        known = session.names.get(opened.store, kind.type)
        if known != kind.type:
            raise Mismatch(
                f"store {opened.store!r} is {known} in this process, so it cannot be {kind.type}; "
                "give the second store another name="
            )
        self._session = session
        self._opened = opened
        self._codec = codec
        """Compresses the values of each device, in place of their sum on its way to servers."""
        self._requests = ServerRequests(
            opened.store, self._keys, kind.on_device, codec, session.staging, self._allocate
        )
        self._step = preemption.RoundTracker(opened.store, preemption.asked)
        opening = calls.OpenStore(opened.store, opened, options.worker_grace_s, options.timeout_s)
        missed: Any = session.call(opening, options.timeout_s).wait()
        session.names[opened.store] = kind.type
        session.handles[opened.store] += 1
        if missed:
            log.warning(
                "this worker replaces a lost one: since the first store %r of this job, every worker has "
                "closed it and created it again %d times. This script has joined the present one; it must "
                "skip what came before",
                opened.store,
                missed,
            )

    @property
    def session(self) -> Session:
        """This process's place in the cluster, for front ends that make their own calls."""
        return self._session

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self._session.rank

    @property
    def average(self) -> bool:
        """Whether a round is the mean of what its workers pushed, and not the sum."""
        return self._opened.average

    @property
    def chunk_bytes(self) -> int:
        """The size of a chunk in bytes."""
        return self._opened.chunk_bytes

    @property
    def num_workers(self) -> int:
        """The number of workers of the job, now where they come and go (``N:MAX`` workers)."""
        return self._session.info.workers

    @property
    def present(self) -> list[int] | None:
        """The ranks of the workers that are there now, ascending, where they come and go; else None."""
        return sorted(self._live() | {self.rank}) if self._session.info.most else None

    def on_resize(self, callback: Callable[[int], object]) -> None:
        """Call back with the number of workers each time that it has changed, in a job of ``N:MAX`` workers.

        The callback runs in a thread of kvps, and must not make calls of a store: it may note what the
        script looks at before its next step.

        Example:
            >>> kv.on_resize(lambda workers: print(f"{workers} workers"))  # doctest: +SKIP
        """
        self._session.on_resize(callback)

    @property
    def is_over(self) -> bool:
        """Whether the store is closed, or this process has left its cluster."""
        return super().is_over or self._session.is_over

    @property
    def num_dead_nodes(self) -> int:
        """The number of workers and servers that are lost."""
        return sum(member.state in ("lost", "gone") for member in self._session.info.members)

    def take_place(self, keys: Sequence[str], unit: str = "steps") -> calls.Place:
        """Find where this process begins, for a front end each of whose steps (``unit``) pushes
        all of ``keys``.

        The script of a replacement then replays, unless :meth:`resume` follows: its calls pass at once until
        :meth:`end_replay`, and ``catch_up`` counts its steps.
        """
        place: calls.Place = self._call(calls.TakePlace(self._name, tuple(keys)))
        if place.is_replacement and place.owed > 0:
            self.catch_up = CatchUp(place, self._epoch, unit)
        return place

    def pass_over(self) -> None:
        """Count a step of a replay.

        Raises:
            ConfigError: if the steps of the predecessor cannot be counted.
        """
        assert self.catch_up is not None
        self.catch_up.step()
        self._call(calls.PassOver(self._name))

    def end_replay(self) -> None:
        """Go on where the others are.

        Raises:
            ConfigError: if the servers returned to a checkpoint meanwhile.
        """
        assert self.catch_up is not None
        if self.catch_up.epoch != self._epoch:
            refuse("the servers returned to a checkpoint meanwhile", "lose one process at a time")
        self._call(calls.EndReplay(self._name))
        self.catch_up = None

    @property
    def _epoch(self) -> int:
        return int(self._session.figures(self._name)["epoch"])

    @property
    def joins(self) -> int:
        """The number of joins that are over."""
        return self._session.info.joins.get(self._name, 0)

    def placement(self) -> dict[str, tuple[Part, ...]]:
        """Return the server of each element range of each key."""
        servers = self._session.info.servers
        bound = self._opened.bigarray_bound
        return {
            name: parts(name, spec.count, servers, bound, spec.width) for name, spec in self._specs.items()
        }

    def staleness(self, *, timeout: float | None = None) -> dict[str, int]:
        """Return for each key by how many pushes this rank is ahead of the slowest live one."""
        self._begin()
        return self._ahead(self._status(self._limit(timeout)))

    def _ahead(self, answers: list[StatusIs]) -> dict[str, int]:
        live = self._live()
        ahead: dict[str, int] = {}
        for answer in answers:
            for key, pushes in answer.clocks:
                clocks = [n for rank, n in pushes.items() if int(rank) in live and n]
                mine = pushes.get(str(self.rank), 0)
                lead = mine - min(clocks) if clocks else 0
                ahead[key] = max(ahead.get(key, 0), lead)
        return ahead

    def stragglers(self, *, timeout: float | None = None) -> list[Straggler]:
        """Return the ranks that open rounds wait for, one entry per rank, oldest round first."""
        self._begin()
        oldest: dict[int, Straggler] = {}
        for answer in self._status(self._limit(timeout)):
            for pending in answer.rounds:
                for rank in pending.missing:
                    known = oldest.get(rank)
                    if known is None or pending.age_s > known.age_s:
                        oldest[rank] = Straggler(rank, pending.key, pending.number, pending.age_s)
        return sorted(oldest.values(), key=lambda straggler: -straggler.age_s)

    def dropped_rounds(self, *, timeout: float | None = None) -> dict[str, int]:
        """Return key -> the number of rounds that were dropped because their sums were not finite."""
        self._begin()
        dropped: dict[str, int] = {}
        for answer in self._status(self._limit(timeout)):
            for key, count in answer.dropped.items():
                dropped[key] = max(dropped.get(key, 0), count)  # every server of it says the same
        return dropped

    def _figures(self) -> dict[str, float]:
        figures = self._session.figures(self._name)
        return {"servers": self._session.info.servers, **figures, "keys": len(self._specs)}

    def _server_figures(self, limit_s: float) -> dict[str, float]:
        answers = self._status(limit_s)
        return of_servers(answers, self.rank, self._ahead(answers))

    # --- for front ends -------------------------------------------------------------------------------

    def lent_like(self, names: Sequence[str]) -> list[torch.Tensor | None]:
        """Return :meth:`empty_like` of each key, or None where a push would copy it all the same."""
        keys = tuple(names)
        tensors: list[torch.Tensor] = self._call(calls.Allocate(self._name, keys, is_lent=True))
        settings = map(self._requests.setting_of, keys)
        return [
            None if setting is not None else tensor for tensor, setting in zip(tensors, settings, strict=True)
        ]

    def chunks_of(self, names: Sequence[str]) -> dict[str, Collection[tuple[int, int]]]:
        """Return the chunks that each key lies in, as (server, chunk): what one message carries."""
        chunks: list[Collection[tuple[int, int]]] = self._call(calls.Locate(self._name, tuple(names)))
        return dict(zip(names, chunks, strict=True))

    @timed("pull")
    def pushpull_held(self, names: Sequence[str], values: Sequence[torch.Tensor], priority: int) -> Handle:
        """Begin a :meth:`pushpull`; the handle returns the result as
        :class:`~kvps.core.worker.consistent_read.HeldValues`, which are to be written before the next push.
        """
        keys = self._begin_on(names, None)
        rows = self._requests.dense(keys, values, self._timeout_s, weight=1.0)
        assert rows is not None, "gradients of a bucket are dense"
        push = self._requests.push_call
        call = push(self._name, keys.names, rows, calls.Views.HELD, priority, eager=False)
        ticket = self._start(call, self._timeout_s)
        return Handle(ticket, lambda: ticket.value)

    # --- what a kind of store does --------------------------------------------------------------------

    def _start(self, call: calls.Call, limit_s: float) -> Ticket:
        if preemption.asked.is_handled and isinstance(call, calls.PushValues | calls.PushKeyRows):
            self._step.push(call.keys)
        if self._codec is not None and type(call) in ANSWERED:
            return self._codec.answer(call)
        return self._session.call(call, limit_s)

    def _stop_waiting(self, ticket: Ticket) -> None:
        if not ticket.is_over and isinstance(self._session, WorkerSession):
            self._session.stop_waiting(ticket)

    def _allocate(self, names: tuple[str, ...], limit_s: float) -> list[torch.Tensor]:
        tensors = self._start(calls.Allocate(self._name, names), limit_s).wait()
        assert isinstance(tensors, list)
        return tensors

    def _publish(self, call: calls.Publish, limit_s: float) -> int:
        published, name = self._session.published, call.publication
        if published is None:
            return super()._publish(call, limit_s)
        number: Any = self._start(replace(call, known=published.get(name, 0)), limit_s).wait()
        published[name] = number
        return int(number)

    def _close(self, limit_s: float) -> None:
        if self._session.is_over:
            return
        try:
            self._start(calls.Flush(self._name), limit_s).wait()
        except KvpsError as error:
            self._later.append(error)
        self._let_go()

    def _let_go(self) -> None:
        session, name = self._session, self._name
        session.handles[name] -= 1
        if not session.handles[name] and not session.is_over:
            del session.handles[name], session.names[name]
            session.close_store(name)

    def _embedding(self, name: str, recipe: EmbeddingSpec, limit_s: float) -> EmbeddingTable:
        table = EmbeddingTable(self, name, recipe)
        table.make(limit_s)
        return table

    # --- small things -------------------------------------------------------------------------------

    def _status(self, limit_s: float) -> list[StatusIs]:
        answers: Any = self._start(calls.AskStatus(self._name), limit_s).wait()
        return list(answers)

    def _live(self) -> set[int]:
        return {*self._session.info.workers_in("held"), *self._session.info.workers_in("added")}
