"""A store whose values lie on servers: ``dist_sync``, ``dist_async``, ``dist_ssp``.

Everything that decides is in the worker core; this file only turns a user's call into one of the
core's and waits for its end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from kvps.compression.policy import CompressionPolicy
from kvps.core.embedding.spec import EmbeddingSpec
from kvps.core.optim.hyperparams import HyperParams
from kvps.core.placement import Part, parts
from kvps.core.worker import calls
from kvps.core.worker.operations.refresh import Fresh
from kvps.core.worker.plan import Numbers
from kvps.dtypes import Spec
from kvps.errors import REFUSED, KeyNotFound, KvpsError, Mismatch
from kvps.phrases import never_initialised
from kvps.protocol.envelope import Role
from kvps.protocol.stores import Open, StatusIs
from kvps.runtime.cuda_staging import ready_on_device
from kvps.runtime.preemption import RoundTracker
from kvps.runtime.ticket import Ticket
from kvps.runtime.worker_session import WorkerSession
from kvps.store import optimizer_state
from kvps.store.arguments import names_of, reduce, tag_of
from kvps.store.contract import Straggler
from kvps.store.embedding.over_servers import DistEmbedding
from kvps.store.embedding.table import EmbeddingTable
from kvps.store.kvstore import KVStore
from kvps.store.names import Kind
from kvps.store.row_copies import Marks
from kvps.store.rows import Rows
from kvps.tensors import Array

log = logging.getLogger("kvps")
LOAD = "kvps.load_optimizer_states"
"""The barrier behind which all have the states of a file."""


class DistStore(KVStore):
    """One store of a cluster; make it with :func:`kvps.create`."""

    knows_changes = True

    def __init__(
        self,
        kind: Kind,
        session: WorkerSession,
        opened: Open,
        timeout_s: float,
        worker_grace_s: float,
    ) -> None:
        super().__init__(kind, opened.store, timeout_s)
        known = session.names.setdefault(opened.store, kind.type)
        if known != kind.type:
            raise Mismatch(
                f"store {opened.store!r} is {known} in this process and cannot be {kind.type} "
                "too; give the second store another name="
            )
        self._session = session
        self._opened = opened
        self._worker_grace_s = worker_grace_s
        self._step = RoundTracker(opened.store)
        session.call(calls.OpenStore(opened.store, opened, worker_grace_s), timeout_s).wait()

    @property
    def session(self) -> WorkerSession:
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
        """How much travels at once."""
        return self._opened.chunk_bytes

    @property
    def num_workers(self) -> int:
        """How many workers the job has."""
        welcome = self._session.core.member.welcome
        assert welcome is not None
        return welcome.workers

    @property
    def is_over(self) -> bool:
        """Whether the store is closed, or this process has left its cluster."""
        return super().is_over or self._session.is_over

    @property
    def num_dead_nodes(self) -> int:
        """How many workers and servers are lost."""
        view = self._session.core.member.view
        members = view.members if view is not None else ()
        return sum(one.state in ("lost", "gone") for one in members)

    def version(self, key: object, *, timeout: float | None = None) -> Any:
        """Return the closed rounds (sync) or applied pushes (async) of a key since init.

        For a list of keys a list. Waits, as pull does, for this rank's own pushes.
        """
        self._begin()
        names, is_many = names_of(key)
        self._know(names, timeout)
        self._missing(names)
        found = self._call(calls.Versions(self._name, names), self._limit(timeout))
        assert isinstance(found, list)
        return found if is_many else found[0]

    def resume(self, keys: object, *, timeout: float | None = None) -> int:
        """Return the lowest push number that this rank owes on any part of ``keys``.

        The next pushes of these keys are numbered from it: a replacement of a lost worker calls
        this to learn where to go on. What its predecessor got in beyond that number is
        acknowledged and not applied again. In a fresh job it is 0.

        Call it behind init() and set_optimizer(), which every process makes at its beginning. Its
        next calls of set_optimizer, set_learning_rate and barrier are then those of the others,
        too, if each step makes them alike, and sets the rate before it pushes. Barriers that the
        predecessor has behind it, or should have, are passed at once.

        Example:
            >>> start = kv.resume(["weight", "bias"])  # doctest: +SKIP
            >>> for step in range(start, steps): ...  # doctest: +SKIP
        """
        self._begin()
        names, _ = names_of(keys)
        owed = self._call(calls.ResumeKeys(self._name, names), self._limit(timeout))
        assert isinstance(owed, int)
        return owed

    def barrier(self, name: str | None = None, *, timeout: float | None = None) -> None:
        """Flush, then wait until every worker stands here.

        After it every worker's earlier pushes are visible. Calls without a name are numbered per
        store; a replacement of a lost worker passes those that were released before.

        Raises:
            Timeout: if others are late; WorkerLost: if one ended.
        """
        self._begin()
        self._call(calls.StandAtBarrier(self._name, name), self._limit(timeout))
        self._raise_later()

    @property
    def joins(self) -> int:
        """How many joins are over; a replacement of a lost worker knows it after :meth:`resume`."""
        return self._session.core.books[self._name].joins

    def join(self, timeout: float | None = None) -> int:
        """Say that this worker has run out of batches; return when every worker has.

        Flushes first. From then on rounds of this store close without this worker, and nobody
        waits for its clock. When the last worker has joined all calls return, and everybody takes
        part again: the next push of a key is of the same round on every worker. While it waits,
        this worker cannot push; other stores go on as they are.

        Args:
            timeout: seconds to wait, instead of the store's.

        Returns:
            The rank that joined last, the same on every worker: it has seen every round.

        Raises:
            Timeout: naming who has not joined; the call stands, and is made again to wait on.
            WorkerLost: if one of those ended, and none replaces it.

        Example:
            >>> for x, y in batches:  # other workers may have more of them  # doctest: +SKIP
            ...     train(x, y)
            >>> last = kv.join()  # doctest: +SKIP
            >>> kv.broadcast("w", w, out=w)  # doctest: +SKIP
        """
        self._begin()
        last = self._call(calls.JoinStore(self._name), self._limit(timeout))
        assert isinstance(last, int)
        self._raise_later()
        return last

    def placement(self) -> dict[str, tuple[Part, ...]]:
        """Return which elements of each key lie on which server.

        Example:
            >>> kv.placement()["bias"]  # doctest: +SKIP
            (Part(server=1, start=0, size=10),)
        """
        servers = len(self._session.core.links)
        bound = self._opened.bigarray_bound
        return {
            name: parts(name, spec.count, servers, bound, spec.width)
            for name, spec in self._specs.items()
        }

    def staleness(self) -> dict[str, int]:
        """Return for each key by how many pushes this rank is ahead of the slowest live one."""
        self._begin()
        live = self._live()
        ahead: dict[str, int] = {}
        for answer in self._status():
            for key, pushes in answer.clocks:
                clocks = [n for rank, n in pushes.items() if int(rank) in live and n]
                mine = pushes.get(str(self.rank), 0)
                lead = mine - min(clocks) if clocks else 0
                ahead[key] = max(ahead.get(key, 0), lead)
        return ahead

    def stragglers(self) -> list[Straggler]:
        """Return the ranks that open rounds wait for, one entry per rank, oldest round first."""
        self._begin()
        found: dict[int, Straggler] = {}
        for answer in self._status():
            for one in answer.rounds:
                for rank in one.missing:
                    known = found.get(rank)
                    if known is None or one.age_s > known.age_s:
                        found[rank] = Straggler(rank, one.key, one.number, one.age_s)
        return sorted(found.values(), key=lambda one: -one.age_s)

    def dropped_rounds(self) -> dict[str, int]:
        """Return of how many rounds of each key nothing came, as their sums were not finite.

        Where each push is applied by itself they are pushes. Keys without any are left out. Needs
        a store that was created with ``on_nonfinite="skip"`` or ``"error"``.

        Example:
            >>> kv.dropped_rounds()  # doctest: +SKIP
            {'fc.weight': 2}
        """
        self._begin()
        dropped: dict[str, int] = {}
        for answer in self._status():
            for key, count in answer.dropped.items():
                dropped[key] = max(dropped.get(key, 0), count)  # every server of it says the same
        return dropped

    def save_optimizer_states(self, path: str) -> None:
        """Write the optimizer's state of every key to a safetensors file.

        Raises:
            ConfigError: without an optimizer. StorageError: if the file cannot be written.
        """
        optimizer_state.save(path, self._optimizer(), self.optimizer_states())

    def optimizer_states(self) -> optimizer_state.States:
        """Return the optimizer's state of every key that was updated.

        Raises:
            ConfigError: without an optimizer.
        """
        self._begin()
        self._optimizer()
        found = self._call(calls.SaveState(self._name), self._timeout_s)
        assert isinstance(found, dict)
        return {key: state for key, state in found.items() if state[0]}

    def load_optimizer_states(self, path: str) -> None:
        """Put back what :meth:`save_optimizer_states` wrote; every rank calls, rank 0's counts.

        Raises:
            Mismatch: if it is the state of another optimizer, or of other keys.
            StorageError: if the file cannot be read.
        """
        self._begin()
        with self._all_fail(LOAD):
            found = optimizer_state.load(path, self._optimizer(), self._specs)
        self.set_optimizer_states(found)

    def set_optimizer_states(self, found: optimizer_state.States) -> None:
        """Put back what :meth:`optimizer_states` gave; every rank calls, rank 0's counts."""
        self._begin()
        with self._all_fail(LOAD):
            if self.rank == 0:
                self._call(calls.LoadState(self._name, found), self._timeout_s)
        self.barrier(LOAD)

    def checkpoint(self, tag: str | None = None, *, timeout: float | None = None) -> int:
        """Have everything that all stores hold written down; return the checkpoint's number."""
        self._begin()
        cut = self._call(calls.TakeCheckpoint(self._name, tag_of(tag)), self._limit(timeout))
        assert isinstance(cut, int)
        return cut

    def restore(self, tag: str | None = None, *, timeout: float | None = None) -> int:
        """Give the store's keys the values of a checkpoint; return the checkpoint's number."""
        self._begin()
        cut = self._call(calls.RestoreCheckpoint(self._name, tag_of(tag)), self._limit(timeout))
        assert isinstance(cut, int)
        return cut

    # --- hooks --------------------------------------------------------------------------------------

    def _init(
        self, keys: tuple[tuple[str, Spec], ...], rows: tuple[torch.Tensor, ...], limit_s: float
    ) -> None:
        self._call(calls.Init(self._name, keys, rows), limit_s)

    def _rows_of(
        self, names: tuple[str, ...], values: list[list[Array]], limit_s: float
    ) -> tuple[torch.Tensor, ...]:
        def allocate(indices: list[int]) -> list[torch.Tensor]:
            return self._allocate(tuple([names[index] for index in indices]), limit_s)

        reduced = [reduce(devices, self._kind.on_device) for devices in values]
        rows: list[torch.Tensor | None] = [
            ready_on_device(one)
            if one.is_cuda and self._compression.setting_of(name, self._specs[name])
            else None  # what is compressed leaves its device as few octets
            for name, one in zip(names, reduced, strict=True)
        ]
        left = [index for index, row in enumerate(rows) if row is None]
        brought = self._session.staging.bring(
            [reduced[index] for index in left], lambda some: allocate([left[one] for one in some])
        )
        for index, row in zip(left, brought, strict=True):
            rows[index] = row
        return tuple([row for row in rows if row is not None])

    def _push(
        self,
        names: tuple[str, ...],
        rows: tuple[torch.Tensor, ...],
        sinks: calls.Sinks,
        priority: Numbers,
        eager: bool,
        limit_s: float,
    ) -> Ticket:
        self._step.push(names)
        call = calls.PushValues(self._name, names, rows, sinks, priority, eager)
        return self._session.call(call, limit_s)

    def _pull(
        self,
        names: tuple[str, ...],
        sinks: calls.Sinks,
        priority: Numbers,
        least: int,
        limit_s: float,
    ) -> Ticket:
        call = calls.PullValues(self._name, names, sinks, priority, least)
        return self._session.call(call, limit_s)

    def _push_rows(
        self,
        names: tuple[str, ...],
        rows: tuple[Rows, ...],
        priority: Numbers,
        eager: bool,
        limit_s: float,
    ) -> Ticket:
        self._step.push(names)
        values = tuple([one for pair in rows for one in pair])
        return self._session.call(
            calls.PushKeyRows(self._name, names, values, priority, eager), limit_s
        )

    def _pull_rows(
        self,
        names: tuple[str, ...],
        ids: tuple[torch.Tensor, ...],
        places: tuple[torch.Tensor, ...],
        priority: Numbers,
        limit_s: float,
    ) -> Ticket:
        return self._session.call(
            calls.PullKeyRows(self._name, names, ids, places, priority), limit_s
        )

    def _refreshed(
        self,
        names: tuple[str, ...],
        sinks: tuple[torch.Tensor | None, ...],
        marks: Marks,
        priority: Numbers,
        limit_s: float,
    ) -> tuple[Ticket, Callable[[Any], Sequence[Fresh]]]:
        call = calls.Refresh(self._name, names, sinks, marks, priority)
        return self._session.call(call, limit_s), lambda found: found

    def _broadcast(
        self,
        keys: tuple[tuple[str, Spec], ...],
        rows: tuple[torch.Tensor, ...],
        sinks: tuple[torch.Tensor, ...],
        limit_s: float,
    ) -> Ticket:
        return self._session.call(calls.Broadcast(self._name, keys, rows, sinks), limit_s)

    def _allocate(self, names: tuple[str, ...], limit_s: float) -> list[torch.Tensor]:
        found = self._call(calls.Allocate(self._name, names), limit_s)
        assert isinstance(found, list)
        return found

    def _lookup(self, names: tuple[str, ...], limit_s: float) -> dict[str, Spec]:
        found = self._call(calls.Lookup(self._name, names), limit_s)
        assert isinstance(found, dict)
        return {name: spec for name, spec in found.items() if spec is not None}

    def _set_optimizer(self, hyper: HyperParams, limit_s: float) -> None:
        self._call(calls.SetOptimizer(self._name, hyper), limit_s)

    def _set_rate(self, hyper: HyperParams, limit_s: float) -> None:
        self._call(calls.SetRate(self._name, hyper.number("lr")), limit_s)

    def _compress(self, rules: CompressionPolicy) -> None:
        self._call(calls.Compress(self._name, rules), self._timeout_s)

    def _rests(self) -> dict[str, torch.Tensor]:
        found = self._call(calls.SaveRests(self._name), self._timeout_s)
        assert isinstance(found, dict)
        return found

    def _set_rests(self, rests: dict[str, torch.Tensor]) -> None:
        self._call(calls.LoadRests(self._name, rests), self._timeout_s)

    def _close(self) -> None:
        if self._session.is_over:
            return
        try:
            self._call(calls.Flush(self._name), self._timeout_s)
        except KvpsError as error:
            self._later.append(error)

    def _embedding(self, name: str, recipe: EmbeddingSpec, limit_s: float) -> EmbeddingTable:
        table = DistEmbedding(self, name, recipe)
        table.make(limit_s)
        return table

    # --- small things -------------------------------------------------------------------------------

    def _call(self, call: calls.Call, limit_s: float) -> object:
        return self._session.call(call, limit_s).wait()

    @contextmanager
    def _all_fail(self, barrier: str) -> Iterator[None]:
        """If what is in the block fails here, have it fail for all ranks, who meet at a barrier behind it."""
        try:
            yield
        except REFUSED as error:
            with suppress(KvpsError):  # the answer is this error, or another rank's
                self._call(calls.StandAtBarrier(self._name, barrier, error), self._timeout_s)
            raise

    def _status(self) -> list[StatusIs]:
        answers = self._call(calls.AskStatus(self._name), self._timeout_s)
        assert isinstance(answers, list)
        return answers

    def _live(self) -> set[int]:
        view = self._session.core.member.view
        members = view.members if view is not None else ()
        return {one.rank for one in members if one.role == Role.WORKER and one.state == "held"}

    def _missing(self, names: tuple[str, ...]) -> None:
        for name in names:
            if name not in self._specs:
                raise KeyNotFound(never_initialised(name))
