"""The KVStore that users call: one class for every kind of store.

Its methods check the user's arguments and turn them into the calls of
:mod:`kvps.core.worker.calls`. A kind of store answers these, by :meth:`KVStore._start`:
:class:`~kvps.store.server_store.DistStore` by the core of a worker, in a cluster or in this
process alone, and :class:`~kvps.store.allreduce.store.AllreduceStore` by collectives among the workers.
"""

from __future__ import annotations

import abc
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, NoReturn

import torch

from kvps.compression.policy import rules_of
from kvps.core.embedding.spec import EmbeddingSpec, recipe_of
from kvps.core.optim.from_torch import describe
from kvps.core.optim.hyperparams import HyperParams, resolve
from kvps.core.placement import Part
from kvps.core.traits import traits_of
from kvps.core.worker import calls
from kvps.errors import REFUSED, ConfigError, KeyNotFound, KvpsError, Mismatch
from kvps.runtime.ticket import Handle, Ticket, finished
from kvps.store import optimizer_state, publication, table_batch
from kvps.store.arguments import priority_of, seconds, tag_of, version_of, weight_of
from kvps.store.base import KVStoreBase
from kvps.store.catch_up import CatchUp
from kvps.store.embedding import EmbeddingTable, tables_of
from kvps.store.gradient_check import GradientCheck
from kvps.store.key_list import KeyList, KeyLists, names_of, table_name_of
from kvps.store.metrics import NAMES, SERVER_NAMES, Straggler, WaitTimes, timed
from kvps.store.names import Kind
from kvps.store.requests import PlannedCall, Requests

log = logging.getLogger("kvps")
LOAD = "kvps.load_optimizer_states"
"""The barrier behind which all ranks have the states of a file."""


class KVStore(KVStoreBase, abc.ABC):
    """A store of named tensors that workers push gradients to and pull weights from.

    Create one with :meth:`create`, not by its class. Methods have these arguments in common:

    * ``key``: a str or int, or a list of them; with a list, values, outputs and results are lists, too.
    * ``priority``: keys of a higher priority travel first; a list gives each key its own.
    * ``async_op``: return a :class:`~kvps.runtime.ticket.Handle` at once; its ``wait()`` returns the result.
    * ``timeout``: seconds until the call fails with Timeout, instead of the store's.

    All raise KeyNotFound for a key that was never initialised, Mismatch for a value or an output
    of another type or shape than its key, Timeout that names the ranks that are waited for, and
    WorkerLost or ServerLost if a process that the call needs has ended for good.

    Example:
        >>> import torch, kvps
        >>> with kvps.create("local") as kv:
        ...     kv.init("w", torch.zeros(2))
        ...     kv.push("w", [torch.ones(2), torch.ones(2)])
        ...     kv.pull("w")
        tensor([2., 2.])
    """

    CAPABILITIES: ClassVar[frozenset[str]] = frozenset({KVStoreBase.OPTIMIZER})

    create: ClassVar[Callable[..., Any]]
    """:func:`kvps.create`, which returns a store. :mod:`kvps.store.create` sets it, because it knows every
    kind of store, and each kind knows this class."""

    knows_changes: ClassVar[bool] = False
    """Whether the store can return only the changed rows of a table."""

    def __init__(self, kind: Kind, name: str, timeout_s: float) -> None:
        self._kind = kind
        self._name = name
        self._timeout_s = timeout_s
        self._keys = KeyLists()
        self._specs = self._keys.specs
        self._hyper: HyperParams | None = None
        self._requests = Requests(name, self._keys, kind.on_device, self.knows_changes)
        """How calls are made of a user's arguments; a kind of store may have its own."""
        self._tables: dict[str, EmbeddingTable] = {}
        self.catch_up: CatchUp | None = None
        """The steps that a front end passes over in the script of a replacement; None where that
        is none or over."""
        self._gradient_check: GradientCheck | None = GradientCheck()
        """Checks the first calls; None once they are over, or an optimizer is set."""
        self._is_closed = False
        self.waits = {kind: WaitTimes() for kind in ("push", "pull")}
        """The waiting times of calls, by kind."""
        self._later: list[KvpsError] = []
        """Errors of pushes whose callers did not wait; the next call raises them."""

    # --- what a kind of store does ------------------------------------------------------------------

    @abc.abstractmethod
    def _start(self, call: calls.Call, limit_s: float) -> Ticket:
        """Begin a call; its ticket ends within ``limit_s`` seconds."""

    @abc.abstractmethod
    def _embedding(self, name: str, recipe: EmbeddingSpec, limit_s: float) -> EmbeddingTable:
        """Create a table, or find it; also called for a known table, which another worker may not have."""

    @abc.abstractmethod
    def _close(self, limit_s: float) -> None:
        """Flush within ``limit_s`` seconds, and release the resources of the store."""

    @abc.abstractmethod
    def _let_go(self) -> None:
        """Release the resources of the store without waiting."""

    @property
    @abc.abstractmethod
    def num_dead_nodes(self) -> int:
        """The number of members that are lost."""

    # --- what it is -----------------------------------------------------------------------------

    @property
    def type(self) -> str:
        """The kind of store, in the spelling of the documentation."""
        return self._kind.type

    @property
    def name(self) -> str:
        """The name by which the workers' stores find each other."""
        return self._name

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Whether the store has ``capability``; the only one is ``"optimizer"``.

        Raises:
            ConfigError: for an unknown capability.
        """
        if capability not in KVStore.CAPABILITIES:
            raise ConfigError(
                f"there is no capability {capability!r}; use one of {', '.join(sorted(KVStore.CAPABILITIES))}"
            )
        return True

    @property
    def average(self) -> bool:
        """Whether a round is the mean of its pushes instead of the sum."""
        return False

    @property
    def chunk_bytes(self) -> int:
        """Size of a chunk in bytes; calls of about this size keep all links busy."""
        return 8 << 20

    @property
    def learning_rate(self) -> float:
        """The learning rate of the store's optimizer.

        Raises:
            ConfigError: if none was set here.
        """
        return self._optimizer().number("lr")

    @property
    def has_optimizer(self) -> bool:
        """Whether set_optimizer() was called here."""
        return self._hyper is not None

    @property
    def is_over(self) -> bool:
        """Whether the store is closed, or this process has left its cluster."""
        return self._is_closed

    def keys(self) -> list[str]:
        """Return the names of the keys that were initialised here."""
        return list(self._specs)

    # --- keys and values --------------------------------------------------------------------------

    def init(self, key: object, value: object, *, timeout: float | None = None) -> None:
        """Initialise keys with the value of rank 0; the other ranks wait for it.

        Args:
            key, timeout: see :class:`KVStore`.
            value: a tensor or array per key; on ranks other than 0, only its type and shape count.

        Raises:
            Mismatch: if a key exists with another type or shape, here or at rank 0.

        Example:
            >>> import torch, kvps
            >>> kv = kvps.create("local")
            >>> kv.init(["weight", "bias"], [torch.ones(3, 2), torch.zeros(3)])
        """
        self._begin()
        call = self._requests.init(key, value)
        self._call(call, timeout)
        self._keys.declare(call.keys)
        if self._gradient_check is not None:
            self._gradient_check.initialised(self._keys.of(key).names, value)

    @timed("push")
    def push(
        self,
        key: object,
        value: object,
        priority: int | Sequence[int] = 0,
        async_op: bool = False,
        *,
        weight: float = 1.0,
        timeout: float | None = None,
    ) -> Handle | None:
        """Push gradients; several values of one key, one per device, are summed first.

        Returns when the values are copied, so that the caller may reuse them; with ``async_op``, they may be
        reused after the handle's ``wait()``.

        You can push only some rows of a key of two or more dimensions: as a ``torch.sparse_coo`` tensor of
        the key's shape, or as a tuple ``(row_ids, rows)`` of one-dimensional whole numbers and as many rows.
        Duplicate rows are summed. If all workers push rows, the optimizer updates only these rows: the
        momenta and weights of the others do not decay.

        Args:
            key, priority, async_op, timeout: see :class:`KVStore`.
            value: for each key a tensor or array, or rows; or a list of either, one per device.
            weight: what this push counts in the mean of its round, such as its number of samples: a number
                above 0. Needs a store created with ``average=True``, and whole keys.

        Raises:
            ConfigError: for a weight that is not above 0, or in a store without means.

        Example:
            >>> import torch, kvps
            >>> kv = kvps.create("local")
            >>> kv.init(3, torch.zeros(2))
            >>> kv.push(3, torch.tensor([1.0, 2.0]))
            >>> kv.pull("3")
            tensor([1., 2.])
        """
        keys = self._begin_on(key, timeout)
        if self._gradient_check is not None:
            self._gradient_check.pushed(keys.names, value)
        urgency = priority if type(priority) is int else priority_of(keys.names, priority)
        limit_s = self._limit(timeout)
        if type(weight) is not float or weight != 1:
            weight = weight_of(weight, self.average, self._name)
        pushes = self._requests.pushes(keys, value, urgency, not async_op, limit_s, weight)
        tickets = [self._start(call, limit_s) for call in pushes]
        if async_op:
            return Handle(tickets[-1], lambda: None, tickets[:-1])
        for ticket in tickets:
            ticket.on_error(self._later.append)
        for ticket in tickets:
            self._wait(ticket, ticket.wait_copied)
        return None

    @timed("pull")
    def pull(
        self,
        key: object,
        out: object = None,
        priority: int | Sequence[int] = 0,
        async_op: bool = False,
        min_version: int | None = None,
        copy: bool = True,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Return the values after this rank's own pushes; always one version, never torn.

        In a synchronous store, this is exactly the version after those pushes.

        Args:
            key, priority, async_op, timeout: see :class:`KVStore`.
            out: for each key a tensor or array to write into, or a list of them, one per device;
                None returns new tensors.
            min_version: wait until the key has at least this version.
            copy: False returns views of the servers' memory if the servers are on this host. The tensors are
                read-only (writing to one ends the process), valid until this rank's next pull of the key, and
                do not change before it. Needs ``out=None``.

        Raises:
            NonFinite: if a gradient was not finite, in a store created with ``on_nonfinite="error"``.
        """
        keys = self._begin_on(key, timeout)
        if self._gradient_check is not None:
            self._check_gradients(self._gradient_check, keys.names, out)
        urgency = priority if type(priority) is int else priority_of(keys.names, priority)
        least = 0 if min_version is None else version_of(min_version)
        request = self._requests.pull(keys, out, copy, urgency, least)
        return self._answer(request, self._limit(timeout), async_op)

    @timed("pull")
    def pushpull(
        self,
        key: object,
        value: object,
        out: object = None,
        priority: int | Sequence[int] = 0,
        async_op: bool = False,
        copy: bool = True,
        *,
        weight: float = 1.0,
        timeout: float | None = None,
    ) -> Any:
        """Push, and pull the result, in one round trip; see :meth:`push`, :meth:`pull`.

        If any values are rows, this is a push and then a pull of whole keys.
        """
        keys = self._begin_on(key, timeout)
        if self._gradient_check is not None:
            self._gradient_check.pushed(keys.names, value)
            self._check_gradients(self._gradient_check, keys.names, out)
        urgency = priority if type(priority) is int else priority_of(keys.names, priority)
        limit_s = self._timeout_s if timeout is None else self._limit(timeout)
        if type(weight) is not float or weight != 1:
            weight = weight_of(weight, self.average, self._name)
        if out is not None and copy and weight == 1 and not async_op:
            call = self._requests.plain_pushpull(keys, value, out, urgency)
            if call is not None:
                ticket = self._start(call, limit_s)
                try:
                    self._wait(ticket, ticket.wait)
                except BaseException:  # an interrupted script may give its tensors other memory
                    call.forget_places()
                    raise
                return out
        request = self._requests.pushpull(keys, value, out, copy, urgency, limit_s, weight)
        return self._answer(request, limit_s, async_op)

    def empty_like(self, key: object, *, timeout: float | None = None) -> Any:
        """Return an uninitialised tensor like the key, which is pushed without a copy.

        It lies in memory that the servers of this host read. A push copies nothing, so do not change the
        tensor before the push is applied: until the next pull or pushpull of the key has returned. (A Timeout
        or a barrier is not enough, because the servers read it when the last worker has pushed.) If no server
        shares memory, it is an ordinary tensor.

        Args:
            key, timeout: see :class:`KVStore`. Tensors of one call lie in memory in the order of
                their keys on the servers, so ask for all at once.

        Example:
            >>> import torch, kvps
            >>> kv = kvps.create("local")
            >>> kv.init("w", torch.zeros(2))
            >>> gradient = kv.empty_like("w")
            >>> kv.pushpull("w", gradient.fill_(3))
            tensor([3., 3.])
        """
        keys = self._begin_on(key, timeout)
        tensors: Any = self._call(calls.Allocate(self._name, keys.names), timeout)
        return tensors if keys.is_many else tensors[0]

    def broadcast(
        self, key: object, value: object, out: object, priority: int = 0, *, timeout: float | None = None
    ) -> Any:
        """Give every worker rank 0's value of this call, and create or replace the key.

        The k-th call of a key matches the k-th call on every other worker; all workers wait for each other.
        """
        self._begin()
        call, result = self._requests.broadcast(key, value, out)
        try:
            value = self._call(call, timeout)
        except BaseException:
            self._doubt([name for name, _ in call.keys])
            raise
        self._keys.declare(call.keys)
        return result(value)

    # --- rows --------------------------------------------------------------------------------------

    @timed("pull")
    def row_sparse_pull(
        self,
        key: object,
        out: object = None,
        row_ids: object = None,
        priority: int | Sequence[int] = 0,
        async_op: bool = False,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Return some rows of a key after this rank's own pushes; only these rows travel.

        All rows of a key have the same version.

        Args:
            key, priority, async_op, timeout: see :class:`KVStore`; each key has two or more dimensions.
            out: None returns a new tensor. A tensor of the key's shape: only the pulled rows are written. A
                tensor of the rows' shape: the rows are written in the order of ``row_ids``. Or a list of
                either, one per device; for a list of keys, a list of these.
            row_ids: numbers of rows, a tensor, an array or a list, in any order and shape, repeats
                allowed; for a list of keys, a list of these.

        Returns:
            The rows in the order of ``row_ids``, as a tensor of its shape with the further
            dimensions of the key behind it; or ``out``.

        Raises:
            Mismatch: for a number outside the rows of the key. ConfigError: without ``row_ids``.
            NonFinite: as :meth:`pull`.

        Example:
            >>> import torch, kvps
            >>> kv = kvps.create("local")
            >>> kv.init("table", torch.zeros(4, 2))
            >>> kv.push("table", ([2, 0, 2], torch.ones(3, 2)))
            >>> kv.row_sparse_pull("table", row_ids=[2, 1])
            tensor([[2., 2.],
                    [0., 0.]])
        """
        keys = self._begin_on(key, timeout)
        urgency = priority_of(keys.names, priority)
        request = self._requests.pull_rows(keys, row_ids, out, urgency)
        return self._answer(request, self._limit(timeout), async_op)

    @timed("pull")
    def refresh(
        self,
        key: object,
        out: object,
        held: object = None,
        priority: int | Sequence[int] = 0,
        async_op: bool = False,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Bring ``out`` up to date after this rank's own pushes: a pull of the changes.

        If a table is pushed by rows, only the rows travel that any worker has updated since the last call. It
        is a pull of the whole key the first time; when ``out`` is another tensor, or was written to in
        between; when the key was not changed by rows; when half of the rows changed, or more than the servers
        remember; and in ``local``, ``device`` and ``allreduce`` stores. Afterwards ``out`` has the values
        that :meth:`pull` would write.

        (Writes that torch does not count, through ``out.data`` or ``out.numpy()``, are not detected: they
        stay in rows that did not change.)

        Args:
            key, priority, async_op, timeout: see :class:`KVStore`; ``out`` is written to by the
                handle's ``wait()``.
            out: a tensor of the key's shape or a list of them, one per device; for a list of keys, a list
                of these.
            held: what the last call for this key and ``out`` returned; for a list of keys, a list.

        Returns:
            What ``out`` holds, for the next call; for a list of keys, a list.

        Raises:
            NonFinite: as :meth:`pull`.

        Example:
            >>> import torch, kvps
            >>> kv = kvps.create("local")
            >>> kv.init("table", torch.zeros(4, 2))
            >>> kv.set_optimizer("sgd", lr=0.5)
            >>> table = torch.empty(4, 2)
            >>> held = kv.refresh("table", table)
            >>> kv.push("table", ([1], torch.ones(1, 2)))
            >>> held = kv.refresh("table", table, held)
            >>> table[:2]
            tensor([[ 0.0000,  0.0000],
                    [-0.5000, -0.5000]])
        """
        keys = self._begin_on(key, timeout)
        urgency = priority_of(keys.names, priority)
        request = self._requests.refresh(keys, out, held, urgency, is_direct=not async_op)
        return self._answer(request, self._limit(timeout), async_op)

    @timed("pull")
    def pull_changed(
        self,
        key: object,
        held: object = None,
        priority: int | Sequence[int] = 0,
        async_op: bool = False,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Return the rows of a key that changed since the last call, after this rank's own pushes.

        This is :meth:`refresh` for a caller that keeps no copy, or keeps it in another form than a tensor. As
        there, all rows are returned if the changes are not known. Without an optimizer, a row changes if the
        sum of a round names it, and also if the round before did, because it is 0 again.

        Args:
            key, priority, async_op, timeout: see :class:`KVStore`; each key has two or more dimensions.
            held: the ``held`` of the last call's result; for a list of keys, a list.

        Returns:
            :class:`~kvps.store.row_copies.RowChanges`: ``row_ids``, ascending, ``rows`` and ``held``; for a
            list of keys, a list.

        Raises:
            Mismatch: for a key without rows. NonFinite: as :meth:`pull`.

        Example:
            >>> import torch, kvps
            >>> kv = kvps.create("local")
            >>> kv.init("table", torch.zeros(2, 1))
            >>> row_ids, rows, held = kv.pull_changed("table")
            >>> row_ids
            tensor([0, 1])
        """
        keys = self._begin_on(key, timeout)
        urgency = priority_of(keys.names, priority)
        request = self._requests.pull_changed(keys, held, urgency)
        return self._answer(request, self._limit(timeout), async_op)

    # --- versions and workers -------------------------------------------------------------------------

    def version(self, key: object, *, timeout: float | None = None) -> Any:
        """Return the closed rounds (sync) or applied pushes (async) of a key since init.

        For a list of keys, returns a list. Waits for this rank's own pushes, as pull does.
        """
        keys = self._begin_on(key, timeout)
        versions: Any = self._call(calls.Versions(self._name, keys.names), timeout)
        return versions if keys.is_many else versions[0]

    def resume(self, keys: object, *, timeout: float | None = None) -> int:
        """Return the lowest push number that this rank owes on any part of ``keys``.

        The next pushes of these keys are numbered from it: a replacement of a lost worker calls this to learn
        where to continue. Later pushes that its predecessor delivered are acknowledged and not applied again.
        In a fresh job it is 0. Embedding tables of all stores go on at that step, too.

        Call it after init() and set_optimizer(), which every process calls at its start. The next calls of
        set_optimizer, set_learning_rate and barrier then match those of the other workers, if every step
        makes the same calls and sets the rate before it pushes. Barriers that the predecessor has passed, or
        should have, are passed at once.

        Example:
            >>> start = kv.resume(["weight", "bias"])  # doctest: +SKIP
            >>> for step in range(start, steps): ...  # doctest: +SKIP
        """
        return self.take_owed(names_of(keys)[0], timeout, tells=True)

    def take_owed(self, names: Sequence[str], timeout: float | None = None, *, tells: bool = False) -> int:
        """As :meth:`resume`, for a front end; the script begins there only if the front end ``tells`` it."""
        self._begin()
        self.catch_up = None
        take = calls.TakePlace(self._name, tuple(names), replays=False, tells=tells)
        return int(self._call(take, timeout).owed)

    def barrier(self, name: str | None = None, *, timeout: float | None = None) -> None:
        """Flush, then wait until every worker has called barrier().

        Afterwards every worker's earlier pushes are visible. Calls without a name are numbered per store; a
        replacement of a lost worker passes the barriers that were released before.
        """
        self._begin()
        self._call(calls.StandAtBarrier(self._name, name), timeout)
        self._raise_later()

    @property
    def joins(self) -> int:
        """The number of completed joins; a replacement of a lost worker knows it after :meth:`resume`."""
        return 0

    def join(self, timeout: float | None = None) -> int:
        """Declare that this worker has run out of batches; return when every worker has.

        Flushes first. From then on, rounds of this store close without this worker, and no worker waits for
        its clock. When the last worker has joined, all calls return and all workers take part again: the next
        push of a key belongs to the same round on every worker. While it waits, this worker cannot push;
        other stores are not affected.

        Returns:
            The rank that joined last, the same on every worker: it has seen every round.

        Raises:
            Timeout: naming the ranks that have not joined; call again to continue waiting.

        Example:
            >>> for x, y in batches:  # other workers may have more of them  # doctest: +SKIP
            ...     train(x, y)
            >>> last = kv.join()  # doctest: +SKIP
            >>> kv.broadcast("w", w, out=w)  # doctest: +SKIP
        """
        self._begin()
        last: int = self._call(calls.JoinStore(self._name), timeout)
        self._raise_later()
        return last

    def placement(self) -> dict[str, tuple[Part, ...]]:
        """Return the server of each element range of each key.

        In a store of one process this is server 0, its own; in an allreduce store nothing.

        Example:
            >>> kv.placement()["bias"]  # doctest: +SKIP
            (Part(server=1, start=0, size=10),)
        """
        return {}

    def staleness(self, *, timeout: float | None = None) -> dict[str, int]:
        """Return for each key how many pushes this rank is ahead of the slowest live rank."""
        return dict.fromkeys(self._specs, 0)

    def stragglers(self, *, timeout: float | None = None) -> list[Straggler]:
        """Return the ranks that open rounds wait for, one entry per rank, oldest round first."""
        return []

    def dropped_rounds(self, *, timeout: float | None = None) -> dict[str, int]:
        """Return key -> the number of rounds that were dropped because their sums were not finite.

        Where each push is applied by itself, pushes are counted. Keys without dropped rounds are omitted.
        Needs a store that was created with ``on_nonfinite="skip"`` or ``"error"``; see :func:`kvps.create`.

        Example:
            >>> kv.dropped_rounds()  # doctest: +SKIP
            {'fc.weight': 2}
        """
        return {}

    def metrics(self, *, servers: bool = False, timeout: float | None = None) -> dict[str, float]:
        """Return the numbers of this store and worker, for an experiment tracker: name -> number.

        The names are those of ``kvps.store.metrics.NAMES``, the same in every kind of store; the
        documentation of observability has them as a table. Nothing is sent: the process knows
        them, and a call takes about 0.1 ms, most of it for sorting waiting times.

        Args:
            servers: also ask the servers, in one round trip, for the numbers of
                ``kvps.store.metrics.SERVER_NAMES``: staleness, lateness, dropped and open rounds.
            timeout: see :class:`KVStore`.

        Example:
            >>> import torch, kvps
            >>> kv = kvps.create("local")
            >>> kv.init("w", torch.zeros(2))
            >>> kv.push("w", torch.ones(2))
            >>> numbers = kv.metrics()
            >>> numbers["rounds"], numbers["push_calls"], numbers["compression_ratio"]
            (1, 1, 1.0)
        """
        found: dict[str, float] = dict.fromkeys(NAMES, 0)
        found.update(rank=self.rank, workers=self.num_workers, lost_members=self.num_dead_nodes)
        found.update(compression_ratio=1.0, keys=len(self._specs))
        found.update(self._figures())
        for kind, waits in self.waits.items():
            found.update(waits.figures(kind))
        if servers:
            self._begin()
            found.update(dict.fromkeys(SERVER_NAMES, 0))
            found.update(self._server_figures(self._limit(timeout)))
        return found

    def _figures(self) -> dict[str, float]:
        """Return what this kind of store knows of itself, by name; sends nothing."""
        return {}

    def _server_figures(self, limit_s: float) -> dict[str, float]:
        """Return what the servers know, by name."""
        return {}

    # --- tables that grow ---------------------------------------------------------------------------

    def embedding(
        self,
        name: str,
        dim: int,
        *,
        init: str | tuple[str, float] = "normal",
        optimizer: str | torch.optim.Optimizer = "adagrad",
        admit: int | float = 1,
        evict: Mapping[str, float] | None = None,
        dtype: torch.dtype | str = "float32",
        pull_dtype: str | None = None,
        seed: int | None = None,
        timeout: float | None = None,
        **hyper: Any,
    ) -> EmbeddingTable:
        """Return a table of rows by 64-bit ids, which creates a row at its first push.

        Every worker calls this with the same arguments; the table exists after the first call. It has its own
        optimizer, which updates only the rows that a push names.

        Args:
            name: the name of the table; tables are not among the store's keys.
            dim: elements of a row.
            init: initial values of rows: ``"zeros"``, ``("normal", standard deviation)`` or ``("uniform",
                bound)``; without a number, the standard deviation is 0.01 and the bound 0.05.
            optimizer: a name with hyper-parameters in ``hyper`` (``lr=0.1``), or a torch optimizer. It must
                be elementwise (no ``lars``, ``lamb``, ``dcasgd``).
            admit: the push at which an id gets its row, 1 to 255; earlier gradients are dropped. A sketch of
                4 MiB on each server counts ids without a row, so some ids get a row sooner. Only recent
                pushes count, among some 500,000 other ids. A float over 0.0, to 1.0, is the probability with
                which each push of an id without a row makes the row.
            evict: the rows to drop: ``{"age": versions}`` drops rows without a push for so many versions,
                ``{"seconds": s}`` for so many seconds of a server that is updated; ``{"rows": n}`` drops the
                oldest beyond n rows, and with ``"half_life": updates`` those that were pushed to least, where
                a push counts half after so many updates. Or several of them.
            dtype: type of the rows: float32, float64, or a half type. Rows of a half type are updated in
                float32 and rounded by chance, without bias; states as long as a row are bfloat16.
            pull_dtype: with ``"int8"``, pulls of this worker travel as a scale for each row and an int8 for
                each element, off by 1/254 of the row's largest at most. Rows, gradients and exports keep
                their type. Tables of one request are pulled as int8 if all of them say so.
            seed: seed of the initial values; None derives it from the name.
            timeout: see :class:`KVStore`.

        Raises:
            ConfigError: naming the invalid argument.
            Mismatch: if the table exists with other arguments.

        Example:
            >>> import kvps
            >>> kv = kvps.create("local")
            >>> users = kv.embedding("users", 16, init=("uniform", 0.1), optimizer="adam", lr=0.001)
            >>> users.pull([2**40, 17]).shape
            torch.Size([2, 16])
        """
        self._begin()
        recipe = recipe_of(table_name_of(name), dim, init, optimizer, admit, evict, dtype, seed, **hyper)
        if pull_dtype not in (None, "int8"):
            raise ConfigError(f"pull_dtype={pull_dtype!r:.40}: give 'int8', or None for the type of the rows")
        known = self._tables.get(name)
        if known is not None:
            known.demand(recipe)
        table = self._tables.setdefault(name, self._embedding(name, recipe, self._limit(timeout)))
        table.pull_dtype = pull_dtype or ""
        return table

    def pull_tables(
        self, ids: Mapping[Any, object], *, timeout: float | None = None
    ) -> dict[Any, torch.Tensor]:
        """Return rows of several tables, in one round trip to each server.

        Args:
            ids: table -> ids, as :meth:`EmbeddingTable.pull` takes them. A table is the result of
                :meth:`embedding`, or its name.
            timeout: see :class:`KVStore`.

        Returns:
            Table -> rows of shape ``ids.shape + (dim,)``, with the keys of ``ids``.

        Raises:
            KeyNotFound: for the name of a table that was not created here.
            ConfigError: for a table of another store.
            Mismatch: if ids are not integers, or a table is named twice.

        Example:
            >>> import kvps
            >>> kv = kvps.create("local")
            >>> users, items = kv.embedding("users", 4), kv.embedding("items", 8)
            >>> rows = kv.pull_tables({users: [2**40, 17], "items": [[3], [5]]})
            >>> rows[users].shape, rows["items"].shape
            (torch.Size([2, 4]), torch.Size([2, 1, 8]))
        """
        self._begin()
        tables = tables_of(self, self._name, self._tables, ids)
        rows = table_batch.pull(tables, [*ids.values()], timeout) if tables else ()
        return dict(zip(ids, rows, strict=True))

    def push_tables(
        self,
        gradients: Mapping[Any, tuple[object, object]],
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Push gradients of rows of several tables, in one message to each server.

        It is one push of each table, also where there are no ids: see :meth:`EmbeddingTable.push`. If any
        argument is refused, nothing is pushed.

        Args:
            gradients: table -> (ids, gradients), as :meth:`EmbeddingTable.push` takes them. A table is the
                result of :meth:`embedding`, or its name.
            async_op: return a handle, whose ``wait()`` returns when the servers have the gradients.
            timeout: see :class:`KVStore`.

        Raises:
            KeyNotFound: for the name of a table that was not created here.
            ConfigError: for a table of another store.
            Mismatch: for ids or gradients of another type or shape, or if a table is named twice.

        Example:
            >>> import torch, kvps
            >>> kv = kvps.create("local")
            >>> users = kv.embedding("users", 2, init="zeros", optimizer="sgd", lr=1)
            >>> items = kv.embedding("items", 1, init="zeros", optimizer="sgd", lr=1)
            >>> kv.push_tables({users: ([7], torch.ones(1, 2)), "items": ([3, 3], torch.ones(2, 1))})
            >>> kv.pull_tables({users: [7], items: [3]})[items]
            tensor([[-2.]])
        """
        self._begin()
        tables = tables_of(self, self._name, self._tables, gradients)
        if not tables:
            return Handle(finished(), lambda: None) if async_op else None
        return table_batch.push(tables, [*gradients.values()], async_op=async_op, timeout=timeout)

    # --- the optimizer ----------------------------------------------------------------------------

    def set_optimizer(
        self, optimizer: str | torch.optim.Optimizer, *, timeout: float | None = None, **hyper: Any
    ) -> None:
        """Let the store update weights with the pushed gradients, instead of assigning their sum.

        Every rank may call; rank 0's call counts, and the other ranks compare theirs with it. A further call
        changes hyper-parameters and keeps state.

        Args:
            optimizer: a name (``"sgd"``, ``"adam"``, …) or an instance of a torch optimizer, whose class and
                hyper-parameters are used.
            timeout: see :class:`KVStore`.
            **hyper: hyper-parameters, such as ``lr``, ``momentum``, ``weight_decay``,
                ``rescale_grad``, ``clip_gradient``, ``multi_precision``, ``lr_mult={key: factor}``.
                ``clip_global_norm=c`` scales the gradients of one push call down to the norm c
                over all its keys, as ``torch.nn.utils.clip_grad_norm_`` does with the mean over
                the workers: push all keys of a step in one call, the same on every rank. For dist_sync.

        Raises:
            ConfigError: for an unknown optimizer or hyper-parameter, or a bad value.
            Mismatch: if rank 0 set another optimizer.

        Example:
            >>> import torch, kvps
            >>> kv = kvps.create("local")
            >>> kv.set_optimizer("sgd", lr=0.5)
            >>> kv.init("w", torch.ones(2))
            >>> kv.pushpull("w", torch.ones(2))
            tensor([0.5000, 0.5000])
        """
        self._begin()
        if isinstance(optimizer, torch.optim.Optimizer):
            described = describe(optimizer)
            numbers: Mapping[str, object] = {**described.to_wire(), **hyper}
            resolved = resolve(described.name, numbers)
        else:
            resolved = resolve(optimizer, hyper)
        self._call(calls.SetOptimizer(self._name, resolved), timeout)
        self._hyper, self._gradient_check = resolved, None
        is_clipped = resolved.optional("clip_global_norm") is not None
        self._requests.push_call = calls.PushStep if is_clipped else calls.PushValues

    def set_learning_rate(self, lr: float, *, timeout: float | None = None) -> None:
        """Set the optimizer's learning rate from the next round on.

        Every rank may call; rank 0's call counts.

        Raises:
            ConfigError: without an optimizer, or for a bad value.
        """
        self._begin()
        changed = self._optimizer().with_lr(lr)
        self._call(calls.SetRate(self._name, changed.number("lr")), timeout)
        self._hyper = changed

    def save_optimizer_states(self, path: str, *, timeout: float | None = None) -> None:
        """Write the optimizer's state of every key to a safetensors file.

        Raises:
            ConfigError: without an optimizer. StorageError: if the file cannot be written.
        """
        optimizer_state.save(path, self._optimizer(), self.optimizer_states(timeout=timeout))

    def optimizer_states(self, *, timeout: float | None = None) -> optimizer_state.States:
        """Return the optimizer's state of every key that was updated, on the CPU.

        Returns:
            key -> (number of updates, name of the state -> flat tensor). Names are torch.optim's, where
            torch has the optimizer.

        Raises:
            ConfigError: without an optimizer.
        """
        self._begin()
        self._optimizer()
        states: Any = self._call(calls.SaveState(self._name), timeout)
        return {key: state for key, state in states.items() if state[0]}

    def load_optimizer_states(self, path: str, *, timeout: float | None = None) -> None:
        """Load the file of :meth:`save_optimizer_states`; every rank calls, rank 0's call counts.

        Raises:
            Mismatch: if the state belongs to another optimizer, or to other keys.
            StorageError: if the file cannot be read.
        """
        self._begin()
        with self._all_fail(LOAD, self._limit(timeout)):
            states = optimizer_state.load(path, self._optimizer())
        self._load_states(states, path, timeout)

    def set_optimizer_states(self, states: optimizer_state.States, *, timeout: float | None = None) -> None:
        """Load the result of :meth:`optimizer_states`; every rank calls, rank 0's call counts.

        Raises:
            Mismatch: if a state does not fit its key or the optimizer, or is of an unknown key.
        """
        self._begin()
        self._load_states(states, "the given dict", timeout)

    def _load_states(self, states: object, source: str, timeout: float | None) -> None:
        with self._all_fail(LOAD, self._limit(timeout)):
            self._optimizer()
            if self.rank == 0:
                plain = optimizer_state.plain(states, source)
                with suppress(KeyNotFound):  # in which case they do not fit
                    self._begin_on(list(plain), timeout)  # another rank may have initialised them
                optimizer_state.demand_fit(plain, self._specs, source)
                self._call(calls.LoadState(self._name, plain), timeout)
        self.barrier(LOAD, timeout=timeout)

    # --- readers ------------------------------------------------------------------------------------

    def publish(
        self,
        name: str,
        source: object = None,
        dtype: str | torch.dtype | None = None,
        keep: int = 2,
        *,
        tables: EmbeddingTable | str | Iterable[EmbeddingTable | str] = (),
        timeout: float | None = None,
    ) -> int:
        """Give one version number to a set of tensors, for any process to read; see :func:`kvps.subscribe`.

        Returns once the values are copied, and waits for no reader. Rank 0 publishes. Another rank need not
        call; its k-th call waits for rank 0's k-th call and returns the same number.

        Args:
            name: of the publication; one store publishes it.
            source: a module, a state dict, or keys of this store, whose values do not leave the servers. In a
                sync store these are the values after this rank's pushes.
            dtype: the type in which readers get floating-point values, such as ``"bfloat16"``; None for
                that of each tensor.
            keep: how many versions stay; those that readers use stay, too.
            tables: tables of this store, by themselves or by name, for
                :meth:`kvps.subscriber.Subscription.lookup`. Rank 0 reads and copies all their rows. Where all
                ranks call after the same push of a sync store, these are the rows after that push; else each
                row has its value after some push.
            timeout: see :class:`KVStore`.

        Returns:
            The number: 1 or more, and larger than that of every earlier version.

        Raises:
            ConfigError: in a store without servers, or for a bad argument. Mismatch: if another store
                publishes ``name``. Overload: if the servers lack memory; the store is unharmed.

        Example:
            >>> with kvps.create("dist_sync") as kv:  # doctest: +SKIP
            ...     version = kv.publish("policy", model, dtype="bfloat16")
        """
        self._begin()
        given = publication.tensors_of(source)
        keys = () if given is not None or source is None else self._begin_on(source, timeout).names
        tensors = dict(given or {})
        named = [tables] if isinstance(tables, EmbeddingTable | str) else tables
        for table in tables_of(self, self._name, self._tables, named):
            for key, value in table.published().items():
                if key in tensors or key in keys:
                    raise Mismatch(
                        f"publish({name!r}): {key!r} is a part of table {table.name!r}, and a tensor"
                    )
                tensors[key] = value
        call = publication.call_of(self._name, self.rank, name, keys, tensors, dtype, keep)
        return self._publish(call, self._limit(timeout))

    def _publish(self, call: calls.Publish, limit_s: float) -> int:
        """Make the call of :meth:`publish`."""
        raise ConfigError(
            f"a {self.type} store has no servers that other processes can read from, so it cannot publish; "
            'create("dist_sync") has (without a cluster, it starts one in this process)'
        )

    # --- checkpoints --------------------------------------------------------------------------------

    def checkpoint(self, tag: str | None = None, *, timeout: float | None = None) -> int:
        """Write a checkpoint of all stores of the job; return its number.

        Every worker calls; the checkpoint has all earlier pushes of all workers. A checkpoint with a tag is
        kept until it is removed by hand; of the others, the newest two are kept. ``kvps checkpoint list``
        shows them.

        Args:
            tag: a name to find it by.
            timeout: see :class:`KVStore`.

        Raises:
            ConfigError: without a place for checkpoints (``kvps-server --checkpoint-dir``, or
                ``KVPS_CHECKPOINT_DIR`` for a local store).
            StorageError: if it could not be written; training can continue.
        """
        self._begin()
        cut: int = self._call(calls.TakeCheckpoint(self._name, tag_of(tag)), timeout)
        return cut

    def restore(self, tag: str | None = None, *, timeout: float | None = None) -> int:
        """Restore the store's keys from a checkpoint; return the checkpoint's number.

        Every worker calls. Keys, versions, the optimizer and its state are restored, and the next pushes are
        numbered from there, even if the number of servers has changed. Keys that the checkpoint does not have
        keep their values. To set the learning rate later, call ``set_optimizer`` in this process, too, before
        or after; states are kept.

        Args:
            tag: restore the newest checkpoint with this tag; None for the newest that has this
                store. A checkpoint in which the store was never pushed to counts only if there is
                no other, or if ``checkpoint()`` of this store has written it. A checkpoint that
                cannot be read is passed over, too. The log tells which one was taken, and of what
                else there is.
            timeout: see :class:`KVStore`.

        Raises:
            ConfigError: without a place for checkpoints. StorageError: if there is none, or it
                cannot be read. Mismatch: if a key has another shape or type here.
        """
        self._begin()
        self._gradient_check = None  # a checkpoint may bring an optimizer
        for table in self._tables.values():
            table.changes += 1
        done: calls.Restored = self._call(calls.RestoreCheckpoint(self._name, tag_of(tag)), timeout)
        if done.told:
            log.log(logging.WARNING if done.is_odd else logging.INFO, "%s", done.told)
        return done.cut

    # --- compression ------------------------------------------------------------------------------

    def set_gradient_compression(
        self, compression_params: str | Mapping[str, Any], *, timeout: float | None = None
    ) -> None:
        """Push fewer bytes: gradients are compressed from the next push on.

        The residual of each push is kept here and added to the next push of that key (error feedback), so
        that no gradient is lost, only delayed. Only float32 keys of at least ``min_bytes`` are compressed.
        Each rank chooses the codec of its own pushes. With ``pull``, all ranks should choose the same codec;
        otherwise values are pulled uncompressed.

        Args:
            compression_params: a dict, or the ``type`` alone:

                * ``type``: ``fp16``, ``bf16`` (half the bytes), ``int8`` (a quarter), ``2bit`` (a
                  sixteenth), ``1bit`` (a thirty-second), ``topk`` (the ``ratio`` of the elements that
                  are largest, 8 bytes each), ``randomk`` (a ``ratio`` drawn at random, 4 bytes each),
                  ``e3m0`` (an eighth: a sign and an exponent), ``topk2bit`` (the ``ratio`` of each 4,096
                  elements that are largest, 14 bits each), or ``none``;
                * ``threshold`` of ``2bit`` (each push sends +threshold, -threshold or 0 for an element)
                  and ``1bit`` (each sends +1 or -1), 0.5 if not given; ``ratio``, 0.01; ``seed``, 0;
                * ``pull``: True compresses what is pulled, too; or a dict with a ``type`` of its own. With
                  an optimizer in the store, thresholds are multiples of the learning rate there, as it
                  is the steps of the weights that come back;
                * ``decay``: the factor, 0 to 1, of the residual before each push; 1 keeps all of it;
                * ``min_bytes``: smaller keys travel as they are; 65536, or 0 for all;
                * ``rules``: a list of dicts with a ``pattern``, such as ``"embed*"``, and the
                  parameters of the keys that match it; the first that matches decides.
            timeout: see :class:`KVStore`.

        Raises:
            ConfigError: naming the unknown or invalid parameter, and the valid ones.

        Example:
            >>> import torch, kvps
            >>> kv = kvps.create("local")
            >>> kv.set_gradient_compression({"type": "2bit", "threshold": 0.5, "min_bytes": 0})
            >>> kv.init("w", torch.zeros(3))
            >>> kv.pushpull("w", torch.tensor([0.7, -0.2, 0.3]))
            tensor([0.5000, 0.0000, 0.0000])
            >>> kv.compression_state()
            {'w': tensor([ 0.2000, -0.2000,  0.3000])}
        """
        self._begin()
        rules = rules_of(compression_params)
        self._call(calls.Compress(self._name, rules), timeout)
        self._requests.compress(rules)

    def compression_state(self, *, timeout: float | None = None) -> dict[str, torch.Tensor]:
        """Return the compression residuals of this rank's pushes, by key.

        To continue a training, give them to :meth:`load_compression_state`. Each is a float32 tensor on
        the CPU, in the shape of its key. (In a local store with several values of a key, those of the
        second value on are called ``key@1`` and so on.)
        """
        self._begin()
        residuals: Any = self._call(calls.SaveResiduals(self._name), timeout)
        return {
            key: residual.view(self._specs[key].shape) if key in self._specs else residual
            for key, residual in residuals.items()
        }

    def load_compression_state(
        self, state: Mapping[str, torch.Tensor], *, timeout: float | None = None
    ) -> None:
        """Load the result of :meth:`compression_state`, replacing the present residuals.

        Raises:
            Mismatch: if a tensor does not have the shape of its key.
        """
        self._begin()
        for key, residual in state.items():
            spec = self._specs.get(key)
            if spec is not None and tuple(residual.shape) != spec.shape:
                raise Mismatch(
                    f"key {key!r} is {spec}, but its residual has shape {tuple(residual.shape)}; load "
                    f"the state of this model"
                )
        residuals = {key: residual.float().reshape(-1) for key, residual in state.items()}
        self._call(calls.LoadResiduals(self._name, residuals), timeout)

    # --- the end ----------------------------------------------------------------------------------

    def close(self, *, timeout: float | None = None) -> None:
        """Flush, and close this store; closing again does nothing.

        When every worker has closed a store of servers, or has left, the store has ended: servers
        drop its values, and a store that is created under its name begins anew. Two stores of one
        name in a process are the same, which is closed with the last of them.
        """
        if not self._is_closed:
            limit_s = self._limit(timeout)
            self._is_closed = True
            self._close(limit_s)
            self._raise_later()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.close()
        else:
            if not self._is_closed:
                self._is_closed = True
                self._let_go()  # waiting for others would hide the error for minutes

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"store {self._name!r} cannot be pickled or copied: it is the connection of process "
            f"{os.getpid()} to its job. Create a store in each process with kvps.create(), or pull in the "
            "training process, and give tensors to others, such as the workers of a DataLoader"
        )

    def __repr__(self) -> str:
        return f"<KVStore {self.type} {self._name!r} rank {self.rank} of {self.num_workers}>"

    # --- for front ends ---------------------------------------------------------------------------

    def demand_same(self, what: str, traits: Mapping[str, str]) -> None:
        """Wait for the other ranks, and compare what each is about to make.

        Args:
            what: is made, for people.
            traits: name -> value of all that must be the same.

        Raises:
            Mismatch: on every rank, naming what differs.
        """
        self._begin()
        self._call(calls.Compare(self._name, what, traits_of(traits)))

    # --- the steps that calls have in common ----------------------------------------------------------

    def _begin(self) -> None:
        if self._is_closed:
            raise ConfigError(f"store {self._name!r} is closed; create another store")
        self._raise_later()

    def _raise_later(self) -> None:
        """Raise the error of an earlier push whose caller did not wait."""
        while self._later:
            error = self._later.pop(0)
            if not error.was_raised:
                error.was_raised = True
                raise error

    @property
    def timeout_s(self) -> float:
        """Seconds that a call may take, unless it is given another ``timeout``."""
        return self._timeout_s

    def _limit(self, timeout: float | None) -> float:
        return self._timeout_s if timeout is None else seconds("timeout", timeout)

    def _call(self, call: calls.Call, timeout: float | None = None) -> Any:
        """Make a call and wait for its end; return its result."""
        ticket = self._start(call, self._limit(timeout))
        return self._wait(ticket, ticket.wait)

    def _wait(self, ticket: Ticket, wait: Callable[[], Any]) -> Any:
        """Wait for a call; one whose caller is interrupted, as by Ctrl-C, goes on as after a Timeout."""
        try:
            return wait()
        except BaseException:
            self._stop_waiting(ticket)
            raise

    def _stop_waiting(self, ticket: Ticket) -> None:
        """The caller of a call waits no more."""

    @contextmanager
    def _all_fail(self, barrier: str, limit_s: float) -> Iterator[None]:
        """If the block fails here, fail it on all ranks, which meet at a barrier after it."""
        try:
            yield
        except REFUSED as error:
            with suppress(KvpsError):  # the answer is this error, or another rank's
                self._start(calls.StandAtBarrier(self._name, barrier, error), limit_s).wait()
            raise

    def _optimizer(self) -> HyperParams:
        if self._hyper is None:
            raise ConfigError(f"store {self._name!r} has no optimizer here; call set_optimizer(...) first")
        return self._hyper

    def _check_gradients(self, check: GradientCheck, names: Sequence[str], out: object) -> None:
        """Warn if the sum of gradients is about to replace weights; only rank 0 knows that there
        is no optimizer."""
        name = check.mistaken(names, out) if self.rank == 0 else None
        if name is not None:
            warnings.warn(
                f"store {self._name!r} has no optimizer, so the sum of the gradients that were pushed for "
                f"{name!r} replaces the weight: call set_optimizer(...), or pull the sum into the gradient "
                "(out=param.grad)",
                stacklevel=4,
            )
        if name is not None or check.is_over:
            self._gradient_check = None

    def _doubt(self, names: Sequence[str]) -> None:
        """After a broadcast that failed, some keys may be as before or as it was to make them:
        look them up again."""
        self._keys.forget(names)

    def _begin_on(self, key: object, timeout: float | None) -> KeyList:
        """Begin a call on keys that exist; return their list.

        Another rank may have initialised keys that this one has not declared: it learns of them.
        """
        if self._is_closed or self._later:
            self._begin()
        keys = self._keys.of(key)
        if keys.unknown:
            specs: Any = self._call(calls.Lookup(self._name, keys.unknown), timeout)
            self._keys.declare([(name, spec) for name, spec in specs.items() if spec is not None])
            self._keys.demand(keys.names)
            keys = self._keys.of(key)
        return keys

    def _answer(self, request: PlannedCall, limit_s: float, async_op: bool) -> Any:
        """Start the calls of a request; return its result, or a handle for it."""
        before = [self._start(call, limit_s) for call in request.before] if request.before else []
        ticket = self._start(request.call, limit_s)
        if async_op:
            return Handle(ticket, lambda: request.result(ticket.value), before)
        for earlier in before:
            self._wait(earlier, earlier.wait)
        return request.result(self._wait(ticket, ticket.wait))
