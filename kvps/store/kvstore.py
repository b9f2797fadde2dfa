"""The KVStore that users call: one face for every kind of store.

The public methods turn arguments into names, rows and sinks, check them, and hand them to the few
hooks that a kind of store implements: :class:`~kvps.store.local.LocalStore` within the process,
:class:`~kvps.store.dist.DistStore` over servers.
"""

from __future__ import annotations

import abc
import builtins
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from kvps.core.calls import Sinks, Views
from kvps.core.hyper import Hyper, resolve
from kvps.core.placement import EMBEDDING, Part
from kvps.core.plan import Numbers, alike, of_key
from kvps.core.recipe import Recipe, recipe_of
from kvps.core.torch_optim import describe
from kvps.errors import ConfigError, EpochChanged, KeyNotFound, KvpsError, Mismatch
from kvps.messages import KEY_MAX
from kvps.specs import Spec
from kvps.store.arguments import (
    Form,
    as_list,
    check_values,
    names_of,
    rows_of,
    sinks_for,
    values_of,
)
from kvps.store.base import KVStoreBase
from kvps.store.embedding import EmbeddingTable
from kvps.store.handle import Handle, Ticket
from kvps.store.names import Kind
from kvps.store.rows import Rows, are_rows, dense_of, picks_of
from kvps.store.rows import rows_of as row_values
from kvps.store.states import States
from kvps.tensors import Array, spec_of

if TYPE_CHECKING:
    from types import TracebackType

TIMEOUT_S = 300.0
LISTS_MAX = 256
"""How many lists of keys are remembered."""


VIEWS = Views.VIEWS


@dataclass(frozen=True, slots=True)
class Wanted:
    """What becomes of pulled values: where they go, and from what the call finishes with, what it
    returns."""

    rows: Sinks
    result: Callable[[Any], Any]


class Straggler(NamedTuple):
    """A rank that an open round waits for."""

    rank: int
    key: str
    """One key of that round."""
    round: int
    age_s: float
    """Seconds since the round was opened."""


class KVStore(KVStoreBase, abc.ABC):
    """A store of named tensors that workers push gradients to and pull weights from.

    Use :meth:`create`; the classes of the stores are not for calling.

    Example:
        >>> import torch, kvps
        >>> with kvps.create("local") as kv:
        ...     kv.init("w", torch.zeros(2))
        ...     kv.push("w", [torch.ones(2), torch.ones(2)])
        ...     kv.pull("w")
        tensor([2., 2.])
    """

    CAPABILITIES: ClassVar[frozenset[str]] = frozenset({KVStoreBase.OPTIMIZER})

    def __init__(self, kind: Kind, name: str, timeout_s: float) -> None:
        self._kind = kind
        self._name = name
        self._timeout_s = timeout_s
        self._specs: dict[str, Spec] = {}
        self._names: dict[tuple[object, ...], tuple[str, ...]] = {}
        """Of lists of keys that were used before."""
        self._forms: dict[tuple[str, ...], Form] = {}
        self._hyper: Hyper | None = None
        self._tables: dict[str, EmbeddingTable] = {}
        self._is_closed = False
        self._later: list[KvpsError] = []

    @staticmethod
    def create(store: str = "local", /, **options: Any) -> Any:
        """Return a store; see :func:`kvps.create`."""
        from kvps.store.create import create

        return create(store, **options)

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
        """Whether the store can do ``capability``; the one there is, is ``"optimizer"``.

        Raises:
            ConfigError: for an unknown capability.
        """
        if capability not in KVStore.CAPABILITIES:
            raise ConfigError(
                f"no capability is called {capability!r}; use one of "
                f"{', '.join(sorted(KVStore.CAPABILITIES))}"
            )
        return True

    @property
    def average(self) -> bool:
        """Whether a round is the mean of what its workers pushed, and not the sum."""
        return False

    @property
    def chunk_bytes(self) -> int:
        """How much travels at once; who sends about as much in a call keeps all links busy."""
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
        """Give keys their first value: that of rank 0, which the others wait for.

        Args:
            key: a str or int, or a list of them.
            value: a tensor or array per key; of the other ranks only its type and shape count.
            timeout: seconds to wait, instead of the store's.

        Raises:
            Mismatch: if a key exists with another type or shape, here or at rank 0.
            Timeout: if rank 0 has not given a value in time.

        Example:
            >>> import torch, kvps
            >>> kv = kvps.create("local")
            >>> kv.init(["weight", "bias"], [torch.ones(3, 2), torch.zeros(3)])
        """
        self._begin()
        names, is_many = names_of(key)
        values = values_of(names, is_many, value)
        specs = [spec_of(devices[0]) for devices in values]
        rows = rows_of([devices[:1] for devices in values], self._kind.on_device)
        self._init(tuple(zip(names, specs, strict=True)), rows, self._limit(timeout))
        self._specs.update(zip(names, specs, strict=True))
        self._forms.clear()

    def push(
        self,
        key: object,
        value: object,
        priority: int | Sequence[int] = 0,
        async_op: bool = False,
        *,
        timeout: float | None = None,
    ) -> Handle | None:
        """Push gradients; several values of one key, one per device, are summed first.

        Returns when the values are copied, so that the caller may reuse them. With ``async_op``
        returns a handle at once; the values may be reused when its ``wait()`` has returned.

        Of a key of two or more dimensions some rows can be pushed: as a ``torch.sparse_coo`` tensor
        of the key's shape, or as a tuple ``(row_ids, rows)`` of whole numbers in one dimension and
        as many rows. Rows named twice are summed. If nobody pushes more than rows, the optimizer
        updates these and no others: their momenta and weights do not decay.

        Args:
            key: a str or int, or a list of them.
            value: for each key a tensor or array, or rows; or a list of either, one per device.
            priority: keys of a higher priority travel first; a list gives each key its own.
            async_op: do not wait for the copy.
            timeout: seconds until the call fails with Timeout, instead of the store's.

        Raises:
            KeyNotFound: for a key that was never initialised.
            Mismatch: for another type or shape than the key's.

        Example:
            >>> import torch, kvps
            >>> kv = kvps.create("local")
            >>> kv.init(3, torch.zeros(2))
            >>> kv.push(3, torch.tensor([1.0, 2.0]))
            >>> kv.pull("3")
            tensor([1., 2.])
        """
        self._begin()
        names, is_many = self._names_of(key)
        tickets = self._pushes(names, is_many, value, priority, not async_op, timeout)
        if async_op:
            return Handle(tickets[-1], lambda: None, tickets[:-1])
        for ticket in tickets:
            ticket.on_error(self._later.append)
        for ticket in tickets:
            ticket.wait_copied()
        return None

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

        In a synchronous store that is exactly the version after those pushes.

        Args:
            key: a str or int, or a list of them.
            out: for each key a tensor or array to write into, or a list of them, one per device;
                None returns new tensors.
            priority: keys of a higher priority travel first; a list gives each key its own.
            async_op: return a handle, whose ``wait()`` returns the result.
            min_version: wait until the key has at least this version.
            copy: False returns the values where they are, if the servers are on this host: tensors
                to be read only (writing to one ends the process), valid until this rank's next pull
                of the key, and never changed while they are. Needs ``out=None``.
            timeout: seconds to wait, instead of the store's.

        Raises:
            KeyNotFound: for a key that was never initialised.
            Mismatch: if an output has another type or shape than its key.
            Timeout: naming who has not pushed.
            WorkerLost: if a round waits for a worker that ended.
        """
        self._begin()
        names, is_many = self._names_of(key)
        self._know(names, timeout)
        wanted = self._wanted(names, is_many, out, copy)
        least = _version_of(min_version)
        ticket = self._pull(
            names, wanted.rows, _priority_of(names, priority), least, self._limit(timeout)
        )
        return self._result(ticket, wanted, async_op)

    def pushpull(
        self,
        key: object,
        value: object,
        out: object = None,
        priority: int | Sequence[int] = 0,
        async_op: bool = False,
        copy: bool = True,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Push, and pull what comes of it, in one round trip; see :meth:`push`, :meth:`pull`.

        If some of the values are rows it is a push and then a pull, of whole keys.
        """
        self._begin()
        names, is_many = self._names_of(key)
        self._know(names, timeout)
        if self._have_rows(names, is_many, value):
            wanted = self._wanted(names, is_many, out, copy)
            pushes = self._pushes(names, is_many, value, priority, False, timeout)
            urgency = _priority_of(names, priority)
            ticket = self._pull(names, wanted.rows, urgency, 0, self._limit(timeout))
            return self._result(ticket, wanted, async_op, pushes)
        rows = self._rows(names, is_many, value, timeout)
        wanted = self._wanted(names, is_many, out, copy)
        ticket = self._push(
            names, rows, wanted.rows, _priority_of(names, priority), False, self._limit(timeout)
        )
        return self._result(ticket, wanted, async_op)

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
        """Return some rows of a key after this rank's own pushes; only they travel.

        Each row is of one version, and all of a key's are of the same.

        Args:
            key: a str or int, or a list of them, each of two or more dimensions.
            out: None returns a new tensor. One of the key's shape: those of its rows are written that
                are pulled. One of the shape of the rows: they are written in the order of
                ``row_ids``. Or a list of either, one per device; for a list of keys, a list of these.
            row_ids: numbers of rows, a tensor, an array or a list, in any order and shape, repeats
                allowed; for a list of keys, a list of these.
            priority: keys of a higher priority travel first; a list gives each key its own.
            async_op: return a handle, whose ``wait()`` returns the result.
            timeout: seconds to wait, instead of the store's.

        Returns:
            The rows in the order of ``row_ids``, as a tensor of its shape with the further
            dimensions of the key behind it; or ``out``.

        Raises:
            KeyNotFound: for a key that was never initialised.
            Mismatch: for a number that is no row of the key, or an output that does not fit.
            ConfigError: without ``row_ids``. Timeout, WorkerLost, NonFinite: as :meth:`pull`.

        Example:
            >>> import torch, kvps
            >>> kv = kvps.create("local")
            >>> kv.init("table", torch.zeros(4, 2))
            >>> kv.push("table", ([2, 0, 2], torch.ones(3, 2)))
            >>> kv.row_sparse_pull("table", row_ids=[2, 1])
            tensor([[2., 2.],
                    [0., 0.]])
        """
        self._begin()
        names, is_many = self._names_of(key)
        self._know(names, timeout)
        self._demand_known(names)
        picks = picks_of(names, is_many, self._specs, row_ids, out)
        ids = tuple([one.ids for one in picks])
        places = tuple([one.places for one in picks])
        urgency, limit_s = _priority_of(names, priority), self._limit(timeout)
        ticket = self._pull_rows(names, ids, places, urgency, limit_s)

        def deliver(found: object) -> object:
            rows = self._picked(found, names, ids, places)
            results = [pick.deliver(one) for pick, one in zip(picks, rows, strict=True)]
            return (out if out is not None else results) if is_many else results[0]

        return self._result(ticket, Wanted(None, deliver), async_op)

    def empty_like(self, key: object, *, timeout: float | None = None) -> Any:
        """Return a tensor like the key, contents undefined, that is pushed without a copy.

        It lies in memory that the servers of this host read. A push of it copies nothing, so it
        must not change before that push is applied: until the next pull or pushpull of the key has
        returned. (A Timeout, or a barrier, is not enough: the servers read it when the last worker
        has pushed.) Where no server shares memory it is an ordinary tensor.

        Args:
            key: a str or int, or a list of them, which gives tensors that are side by side in
                memory where their keys are on the servers: ask for all at once.
            timeout: seconds to wait, instead of the store's.

        Raises:
            KeyNotFound: for a key that was never initialised.

        Example:
            >>> import torch, kvps
            >>> kv = kvps.create("local")
            >>> kv.init("w", torch.zeros(2))
            >>> gradient = kv.empty_like("w")
            >>> kv.pushpull("w", gradient.fill_(3))
            tensor([3., 3.])
        """
        self._begin()
        names, is_many = self._names_of(key)
        self._know(names, timeout)
        self._demand_known(names)
        found = self._allocate(names, self._limit(timeout))
        return found if is_many else found[0]

    def broadcast(
        self,
        key: object,
        value: object,
        out: object,
        priority: int = 0,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Give every worker this call's value of rank 0, creating or replacing the key.

        The k-th call of a key pairs with the k-th on every other worker; all wait for each other.
        """
        self._begin()
        names, is_many = names_of(key)
        values = values_of(names, is_many, value)
        specs = {name: spec_of(one[0]) for name, one in zip(names, values, strict=True)}
        sinks = sinks_for(names, is_many, out, specs)
        rows = rows_of([devices[:1] for devices in values], self._kind.on_device)
        ticket = self._broadcast(tuple(specs.items()), rows, sinks.rows, self._limit(timeout))
        self._specs.update(specs)
        self._forms.clear()
        return self._result(ticket, Wanted(sinks.rows, lambda _: sinks.deliver()), async_op=False)

    # --- tables that grow ---------------------------------------------------------------------------

    def embedding(
        self,
        name: str,
        dim: int,
        *,
        init: str | tuple[str, float] = "normal",
        optimizer: str | torch.optim.Optimizer = "adagrad",
        admit: int = 1,
        evict: Mapping[str, int] | None = None,
        dtype: torch.dtype | str = "float32",
        seed: int | None = None,
        timeout: float | None = None,
        **hyper: Any,
    ) -> EmbeddingTable:
        """Return a table of rows by 64-bit ids, which makes a row when it is first pushed to.

        Every worker calls, with the same arguments; the table is there as soon as one has. It has an
        optimizer of its own, which updates the rows that a push names and leaves the others alone.

        Args:
            name: of the table, which is none of the store's keys.
            dim: elements of a row.
            init: how rows begin: ``"zeros"``, ``("normal", standard deviation)``,
                ``("uniform", bound)``; a kind alone has 0.01 and 0.05.
            optimizer: a name with its numbers in ``hyper`` (``lr=0.1``), or a torch optimizer; one
                that goes element by element (no ``lars``, ``lamb``, ``dcasgd``).
            admit: at which push an id gets its row, 1 to 255; the gradients before are dropped.
                Ids without a row are counted in 4 MiB on each server, so that some come sooner; and
                what counts is how often an id came lately, among some 500,000 others.
            evict: which rows go: ``{"age": versions}`` those without a push for so long,
                ``{"rows": n}`` the oldest where there are more than n; or both.
            dtype: of the rows: float32, float64, or a half type, whose gradients are summed in
                float32.
            seed: of the first values; None takes one from the name.
            timeout: seconds to wait, instead of the store's.

        Raises:
            ConfigError: naming the argument that cannot be.
            Mismatch: if the table exists and is another.

        Example:
            >>> import kvps
            >>> kv = kvps.create("local")
            >>> users = kv.embedding("users", 16, init=("uniform", 0.1), optimizer="adam", lr=0.001)
            >>> users.pull([2**40, 17]).shape
            torch.Size([2, 16])
        """
        self._begin()
        (title,), _ = names_of(name)
        if title != name or len(title) > KEY_MAX - len(EMBEDDING):
            raise ConfigError(
                f"a table's name is a str of 1 to {KEY_MAX - len(EMBEDDING)} characters, got "
                f"{name!r:.60}"
            )
        recipe = recipe_of(name, dim, init, optimizer, admit, evict, dtype, seed, **hyper)
        known = self._tables.get(name)
        if known is not None and (difference := known.recipe.difference(recipe)):
            raise Mismatch(
                f"table {name!r} of store {self._name!r} exists with another {difference}; give the "
                "same arguments, or the second table another name"
            )
        found = self._embedding(name, recipe, self._limit(timeout))
        return self._tables.setdefault(name, found)

    # --- the optimizer ----------------------------------------------------------------------------

    def set_optimizer(
        self, optimizer: str | torch.optim.Optimizer, *, timeout: float | None = None, **hyper: Any
    ) -> None:
        """Have the store update weights by what is pushed, instead of assigning the sum.

        Every rank may call; rank 0's counts, and the others check theirs against it. Called again
        it changes hyper-parameters and keeps state.

        Args:
            optimizer: a name (``"sgd"``, ``"adam"``, …) or an instance of a torch optimizer, of
                which the class and the numbers are taken.
            timeout: seconds to wait, instead of the store's.
            **hyper: hyper-parameters, such as ``lr``, ``momentum``, ``weight_decay``,
                ``rescale_grad``, ``clip_gradient``, ``multi_precision``, ``lr_mult={key: factor}``.

        Raises:
            ConfigError: for an unknown optimizer or hyper-parameter, or a bad value.
            Mismatch: if rank 0 set something else.

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
            given: Mapping[str, object] = {**described.to_wire(), **hyper}
            resolved = resolve(described.name, given)
        else:
            resolved = resolve(optimizer, hyper)
        self._set_optimizer(resolved, self._limit(timeout))
        self._hyper = resolved

    def set_learning_rate(self, lr: float, *, timeout: float | None = None) -> None:
        """Set the optimizer's learning rate from the next round on.

        Every rank may call; rank 0's counts.

        Raises:
            ConfigError: without an optimizer, or for a bad value.
        """
        self._begin()
        changed = self._optimizer().with_lr(lr)
        self._set_rate(changed, self._limit(timeout))
        self._hyper = changed

    def _optimizer(self) -> Hyper:
        if self._hyper is None:
            raise ConfigError(
                f"store {self._name!r} has no optimizer here; call set_optimizer(...) first"
            )
        return self._hyper

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush, and end this store; closing again does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._close()
            self._raise_later()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(
        self,
        kind: builtins.type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._is_closed = True  # waiting for others would hide the error for minutes

    def __repr__(self) -> str:
        return f"<KVStore {self.type} {self._name!r} rank {self.rank} of {self.num_workers}>"

    # --- shared steps -------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._is_closed:
            raise ConfigError(f"store {self._name!r} is closed; create another one")
        self._raise_later()

    def _raise_later(self) -> None:
        """Raise what an earlier push, whose caller had gone on, has failed with."""
        while self._later:
            error = self._later.pop(0)
            if not isinstance(error, EpochChanged):
                raise error
            if not error.was_raised:  # several calls end with one
                error.was_raised = True
                raise error

    def _limit(self, timeout: float | None) -> float:
        return self._timeout_s if timeout is None else seconds("timeout", timeout)

    def _know(self, names: tuple[str, ...], timeout: float | None) -> None:
        """Learn of keys that another rank has initialised and this one has not declared."""
        if names in self._forms:
            return
        unknown = tuple(name for name in names if name not in self._specs)
        if unknown:
            self._specs.update(self._lookup(unknown, self._limit(timeout)))

    def _demand_known(self, names: tuple[str, ...]) -> None:
        for name in names:
            if name not in self._specs:
                raise KeyNotFound(
                    f"key {name!r} was never initialised; call init({name!r}, value) on every "
                    "worker first"
                )

    def _pushes(
        self,
        names: tuple[str, ...],
        is_many: bool,
        value: object,
        priority: object,
        eager: bool,
        timeout: float | None,
    ) -> list[Ticket]:
        """Push dense values in one call, and rows, if there are any, in another."""
        urgency, limit_s = _priority_of(names, priority), self._limit(timeout)
        self._know(names, timeout)
        if not self._have_rows(names, is_many, value):
            rows = self._rows(names, is_many, value, timeout)
            return [self._push(names, rows, None, urgency, eager, limit_s)]
        given = value if is_many else [value]
        assert isinstance(given, list | tuple)
        if len(given) != len(names):
            raise ConfigError(f"{len(names)} keys need as many values, got {len(given)}")
        self._demand_known(names)
        some: list[tuple[int, Rows]] = []
        dense: list[int] = []
        for index, (name, one) in enumerate(zip(names, given, strict=True)):
            if are_rows(one, self._specs[name]):
                some.append((index, row_values(name, self._specs[name], one)))
            else:
                dense.append(index)
        tickets = []
        if dense:
            whole = tuple([names[index] for index in dense])
            values = self._rows(whole, True, [given[index] for index in dense], timeout)
            each = alike([of_key(urgency, index) for index in dense])
            tickets.append(self._push(whole, values, None, each, eager, limit_s))
        pushed = tuple([names[index] for index, _ in some])
        each = alike([of_key(urgency, index) for index, _ in some])
        found = tuple([rows for _, rows in some])
        tickets.append(self._push_rows(pushed, found, each, eager, limit_s))
        return tickets

    def _have_rows(self, names: tuple[str, ...], is_many: bool, value: object) -> bool:
        """Whether some of the values of these keys are rows; quick where they are plain tensors."""
        given = value if is_many else [value]
        form = self._form(names)
        if (form is not None and form.fits(given)) or not isinstance(given, list | tuple):
            return False
        return any(
            are_rows(one, self._specs.get(name)) for name, one in zip(names, given, strict=False)
        )

    def _rows(
        self, names: tuple[str, ...], is_many: bool, value: object, timeout: float | None
    ) -> tuple[torch.Tensor, ...]:
        self._know(names, timeout)
        form = self._form(names)
        given = value if is_many else [value]
        if form is not None and form.fits(given):
            return tuple(given)  # type: ignore[arg-type]  # it fits: it is a list
        values = values_of(names, is_many, value)
        check_values(names, values, self._specs, "push")
        return self._rows_of(names, values, self._limit(timeout))

    def _rows_of(
        self, names: tuple[str, ...], values: list[list[Array]], limit_s: float
    ) -> tuple[torch.Tensor, ...]:
        """Return one row for each key: the sum of its values, in this machine's memory."""
        return rows_of(values, self._kind.on_device)

    def _wanted(self, names: tuple[str, ...], is_many: bool, out: object, copy: bool) -> Wanted:
        """Return what becomes of pulled values."""
        if not copy:
            if out is not None:
                raise ConfigError("copy=False returns the values where they are; leave out= away")
            return Wanted(VIEWS, lambda found: found if is_many else found[0])
        form = self._form(names)
        given = out if is_many else [out]
        if form is not None and form.fits_as_sinks(given):
            return Wanted(tuple(given), lambda _: out)  # type: ignore[arg-type]  # as above
        sinks = sinks_for(names, is_many, out, self._specs)
        return Wanted(sinks.rows, lambda _: sinks.deliver())

    def _names_of(self, key: object) -> tuple[tuple[str, ...], bool]:
        """Return the names of one key or a list of keys, and whether it was a list."""
        keys = as_list(key)
        if keys is None:
            return names_of(key)
        names = self._names.get(keys)
        if names is None:
            names, _ = names_of(key)
            if len(self._names) >= LISTS_MAX:
                self._names.clear()
            self._names[keys] = names
        return names, True

    def _form(self, names: tuple[str, ...]) -> Form | None:
        form = self._forms.get(names)
        if form is None:
            form = Form.of(names, self._specs)
            if form is not None:
                if len(self._forms) >= LISTS_MAX:
                    self._forms.clear()
                self._forms[names] = form
        return form

    def _result(
        self, ticket: Ticket, wanted: Wanted, async_op: bool, before: Sequence[Ticket] = ()
    ) -> Any:
        handle = Handle(ticket, lambda: wanted.result(ticket.value), before)
        return handle if async_op else handle.wait()

    # --- hooks --------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _init(
        self, keys: tuple[tuple[str, Spec], ...], rows: tuple[torch.Tensor, ...], limit_s: float
    ) -> None: ...

    @abc.abstractmethod
    def _push(
        self,
        names: tuple[str, ...],
        rows: tuple[torch.Tensor, ...],
        sinks: Sinks,
        priority: Numbers,
        eager: bool,
        limit_s: float,
    ) -> Ticket: ...

    def _push_rows(
        self,
        names: tuple[str, ...],
        rows: tuple[Rows, ...],
        priority: Numbers,
        eager: bool,
        limit_s: float,
    ) -> Ticket:
        """Push some rows of each key; in a store that knows no rows, as dense values."""
        dense = [dense_of(self._specs[name], one) for name, one in zip(names, rows, strict=True)]
        return self._push(names, tuple(dense), None, priority, eager, limit_s)

    @abc.abstractmethod
    def _pull_rows(
        self,
        names: tuple[str, ...],
        ids: tuple[torch.Tensor, ...],
        places: tuple[torch.Tensor, ...],
        priority: Numbers,
        limit_s: float,
    ) -> Ticket:
        """Finish with something of which :meth:`_picked` makes these rows."""

    def _picked(
        self,
        found: Any,
        names: tuple[str, ...],
        ids: tuple[torch.Tensor, ...],
        places: tuple[torch.Tensor, ...],
    ) -> list[torch.Tensor]:
        """Return the rows ``ids`` of each key at their ``places`` in a tensor [k, width] on the CPU.

        ``found`` is what the pull finished with.
        """
        rows: list[torch.Tensor] = found
        return rows

    @abc.abstractmethod
    def _pull(
        self,
        names: tuple[str, ...],
        sinks: Sinks,
        priority: Numbers,
        least: int,
        limit_s: float,
    ) -> Ticket: ...

    @abc.abstractmethod
    def _broadcast(
        self,
        keys: tuple[tuple[str, Spec], ...],
        rows: tuple[torch.Tensor, ...],
        sinks: tuple[torch.Tensor, ...],
        limit_s: float,
    ) -> Ticket: ...

    @abc.abstractmethod
    def _allocate(self, names: tuple[str, ...], limit_s: float) -> list[torch.Tensor]: ...

    @abc.abstractmethod
    def _lookup(self, names: tuple[str, ...], limit_s: float) -> dict[str, Spec]: ...

    @abc.abstractmethod
    def _set_optimizer(self, hyper: Hyper, limit_s: float) -> None: ...

    @abc.abstractmethod
    def _set_rate(self, hyper: Hyper, limit_s: float) -> None: ...

    @abc.abstractmethod
    def _embedding(self, name: str, recipe: Recipe, limit_s: float) -> EmbeddingTable:
        """Make a table, or find it; called again for one that exists, which may be gone elsewhere."""

    @abc.abstractmethod
    def _close(self) -> None: ...

    # --- the rest of the contract ---------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def num_dead_nodes(self) -> int:
        """How many members are lost."""

    @abc.abstractmethod
    def version(self, key: object, *, timeout: float | None = None) -> Any:
        """Return the closed rounds (sync) or applied pushes (async) of a key since init."""

    @abc.abstractmethod
    def resume(self, keys: object, *, timeout: float | None = None) -> int:
        """Number the next pushes of ``keys`` from the lowest one that this rank still owes."""

    @abc.abstractmethod
    def barrier(self, name: str | None = None, *, timeout: float | None = None) -> None:
        """Flush, then wait until every worker stands here."""

    @property
    def joins(self) -> int:
        """How many joins are over; a replacement knows it after :meth:`resume`."""
        return 0

    @abc.abstractmethod
    def join(self, timeout: float | None = None) -> int:
        """Let the others go on without this worker until all have joined; return who was last."""

    @abc.abstractmethod
    def placement(self) -> dict[str, tuple[Part, ...]]:
        """Return which elements of each key lie on which server."""

    @abc.abstractmethod
    def staleness(self) -> dict[str, int]:
        """Return for each key by how many pushes this rank is ahead of the slowest live one."""

    @abc.abstractmethod
    def stragglers(self) -> list[Straggler]:
        """Return the ranks that open rounds wait for, oldest round first."""

    @abc.abstractmethod
    def dropped_rounds(self) -> dict[str, int]:
        """Return of how many rounds of each key nothing came, as their sums were not finite.

        Where each push is applied by itself they are pushes. Keys without any are left out; see
        ``on_nonfinite`` of :func:`kvps.create`.
        """

    @abc.abstractmethod
    def save_optimizer_states(self, path: str) -> None:
        """Write the optimizer's state of every key to a safetensors file."""

    @abc.abstractmethod
    def load_optimizer_states(self, path: str) -> None:
        """Put back what :meth:`save_optimizer_states` wrote."""

    @abc.abstractmethod
    def optimizer_states(self) -> States:
        """Return the optimizer's state of every key that was updated, on the CPU.

        Key -> (how many updates, name of the state -> flat tensor). Names are torch.optim's, where
        torch has the optimizer.
        """

    @abc.abstractmethod
    def set_optimizer_states(self, found: States) -> None:
        """Put back what :meth:`optimizer_states` gave; every rank calls, rank 0's counts."""

    @abc.abstractmethod
    def checkpoint(self, tag: str | None = None, *, timeout: float | None = None) -> int:
        """Have everything that the store holds written down; return the checkpoint's number.

        Every worker calls; all pushes of all workers are in it. One with a tag is kept until
        somebody removes it, of the others the newest two. ``kvps checkpoint list`` shows them.

        Args:
            tag: a name to find it by.
            timeout: seconds to wait, instead of the store's.

        Raises:
            ConfigError: without a place for checkpoints (``kvps-server --checkpoint-dir``, or
                ``KVPS_CHECKPOINT_DIR`` for a local store).
            StorageError: if it could not be written; training can go on.
        """

    @abc.abstractmethod
    def restore(self, tag: str | None = None, *, timeout: float | None = None) -> int:
        """Give the store's keys the values of a checkpoint; return the checkpoint's number.

        Every worker calls. Keys, versions, the optimizer and its state come back, and the next
        pushes are numbered from there, also where the number of servers has changed. Keys that the
        checkpoint does not have keep their values. Whoever sets the learning rate later calls
        ``set_optimizer`` in this process, too, before or after; states are kept.

        Args:
            tag: restore the newest with this tag; None for the newest of all.
            timeout: seconds to wait, instead of the store's.

        Raises:
            ConfigError: without a place for checkpoints. StorageError: if there is none, or it
                cannot be read. Mismatch: if a key has another shape or type here.
        """


def seconds(name: str, value: object) -> float:
    """Return a time limit.

    Raises:
        ConfigError: unless it is a number over 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ConfigError(f"{name}={value!r}: use a number of seconds over 0")
    return float(value)


def _version_of(given: int | None) -> int:
    if given is None:
        return 0
    if type(given) is not int or given < 0:
        raise ConfigError(f"min_version={given!r}: use a whole number from 0 on")
    return given


def _priority_of(names: tuple[str, ...], given: object) -> Numbers:
    if type(given) is int:
        return given
    if isinstance(given, list | tuple) and all(type(one) is int for one in given):
        if len(given) == len(names):
            return alike(given)
        raise ConfigError(f"{len(names)} keys need as many priorities, got {len(given)}")
    raise ConfigError(f"priority={given!r:.40}: use a whole number, or one for each key")
