"""The KVStore that users call: one face for every kind of store.

The public methods turn arguments into names, rows and sinks (:mod:`kvps.store.calling`), and hand these to
the few hooks that a kind of store implements (:mod:`kvps.store.contract`).
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from kvps.compression.policy import rules_of
from kvps.core.embedding.spec import recipe_of
from kvps.core.optim.from_torch import describe
from kvps.core.optim.hyperparams import HyperParams, resolve
from kvps.core.placement import EMBEDDING
from kvps.errors import ConfigError, Mismatch
from kvps.protocol.envelope import KEY_MAX
from kvps.runtime.ticket import Handle
from kvps.store.arguments import (
    names_of,
    rows_of,
    sinks_for,
    values_of,
)
from kvps.store.base import KVStoreBase
from kvps.store.calling import Outcome, priority_of
from kvps.store.embedding.table import EmbeddingTable
from kvps.store.row_methods import RowMethods
from kvps.tensors import spec_of

if TYPE_CHECKING:
    from types import TracebackType


class KVStore(RowMethods):
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

    create: ClassVar[Callable[..., Any]]
    """Returns a store: :func:`kvps.create`. :mod:`kvps.store.create` puts it here, as it knows every kind
    of store, and each kind knows this class."""

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
            names, wanted.rows, priority_of(names, priority), least, self._limit(timeout)
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
            urgency = priority_of(names, priority)
            ticket = self._pull(names, wanted.rows, urgency, 0, self._limit(timeout))
            return self._result(ticket, wanted, async_op, pushes)
        rows = self._rows(names, is_many, value, timeout)
        wanted = self._wanted(names, is_many, out, copy)
        ticket = self._push(
            names, rows, wanted.rows, priority_of(names, priority), False, self._limit(timeout)
        )
        return self._result(ticket, wanted, async_op)

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
        return self._result(ticket, Outcome(sinks.rows, lambda _: sinks.deliver()), async_op=False)

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

    def _optimizer(self) -> HyperParams:
        if self._hyper is None:
            raise ConfigError(
                f"store {self._name!r} has no optimizer here; call set_optimizer(...) first"
            )
        return self._hyper

    # --- compression ------------------------------------------------------------------------------

    def set_gradient_compression(self, compression_params: str | Mapping[str, Any]) -> None:
        """Push fewer bytes: gradients are compressed from the next push on.

        What a push cannot say of a gradient is kept here, and added to the next one of that key, so
        that nothing is lost but time. Only float32 keys of at least ``min_bytes`` are compressed. Each
        rank says how its own pushes are written; with ``pull`` all should say the same, and values
        come back as they are where they do not.

        Args:
            compression_params: a dict, or the ``type`` alone:

                * ``type``: ``fp16``, ``bf16`` (half the bytes), ``int8`` (a quarter), ``2bit`` (a
                  sixteenth), ``1bit`` (a thirty-second), ``topk`` (the ``ratio`` of the elements that
                  are largest, 8 bytes each), ``randomk`` (a ``ratio`` drawn at random, 4 bytes each), or
                  ``none``;
                * ``threshold`` of ``2bit`` (each push sends +threshold, -threshold or 0 for an element)
                  and ``1bit`` (each sends +1 or -1), 0.5 if not given; ``ratio``, 0.01; ``seed``, 0;
                * ``pull``: True compresses what is pulled, too; or a dict with a ``type`` of its own. With
                  an optimizer in the store, thresholds are multiples of the learning rate there, as it
                  is the steps of the weights that come back;
                * ``min_bytes``: smaller keys travel as they are; 65536, or 0 for all;
                * ``rules``: a list of dicts with a ``pattern``, such as ``"embed*"``, and the
                  parameters of the keys that match it; the first that matches decides.

        Raises:
            ConfigError: naming what is unknown or out of its range, and what there is.

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
        self._compress(rules)
        self._compression = rules

    def compression_state(self) -> dict[str, torch.Tensor]:
        """Return what compression left out of this rank's pushes so far, by key.

        Who continues a training gives it to :meth:`load_compression_state`. Each tensor is float32, on
        the CPU, in the shape of its key. (In a local store with several values of a key, those of the
        others than the first are called ``key@1`` and so on.)
        """
        self._begin()
        return {
            key: rest.view(self._specs[key].shape) if key in self._specs else rest
            for key, rest in self._rests().items()
        }

    def load_compression_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put back what :meth:`compression_state` gave, in place of what there is.

        Raises:
            Mismatch: if a tensor does not have the shape of its key.
        """
        self._begin()
        for key, rest in state.items():
            spec = self._specs.get(key)
            if spec is not None and tuple(rest.shape) != spec.shape:
                raise Mismatch(
                    f"key {key!r} is {spec}, and what compression left out of it is of shape "
                    f"{tuple(rest.shape)}; give the state of this model"
                )
        self._set_rests({key: rest.float().reshape(-1) for key, rest in state.items()})

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


def _version_of(given: int | None) -> int:
    if given is None:
        return 0
    if type(given) is not int or given < 0:
        raise ConfigError(f"min_version={given!r}: use a whole number from 0 on")
    return given
