"""Collections of embedding tables: the rows of all of them in one round trip, their gradients in one push.

The inputs of a collection are named *features*, each of one table. Features of one table share its rows: an
id that several of them have is pulled once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from kvps.errors import ConfigError, Mismatch
from kvps.phrases import names_in_words
from kvps.tensors import ids_of
from kvps.torch.embedding import Embedding, EmbeddingBag, checked_op
from kvps.torch.embedding_bags import Bags, pooled
from kvps.torch.embedding_exchange import RowExchange


class EmbeddingCollection(torch.nn.Module):
    """Several embedding tables: one request to each server in forward, one push in backward.

    Forward takes a dict of features, and returns a dict of tensors; rows are pooled on the worker. What
    :class:`Embedding` says of parameters, training, and synchronous stores holds here, too.
    Each backward pushes all tables, also those without gradients. A feature that a loss does not use
    has gradients of zero if another feature of its kind is used.

    Args:
        tables: feature -> a table of :meth:`kvps.KVStore.embedding`, or an :class:`EmbeddingBag` or
            :class:`Embedding` over a table. All are tables of one store; several features may have the same.
        mode: how rows are pooled where ``tables`` has a table: ``"sum"``, ``"mean"`` or ``"max"``.
        op: as in :class:`Embedding`, for all tables.

    Raises:
        ConfigError: for an invalid argument.

    Example:
        >>> import torch, kvps, kvps.torch
        >>> kv = kvps.create("local")
        >>> user, item = kv.embedding("user", 2, init="zeros"), kv.embedding("item", 3, init="zeros")
        >>> rows = kvps.torch.EmbeddingCollection({"user": user, "seen": item, "shown": item})
        >>> pooled = rows({
        ...     "user": torch.tensor([[7], [8]]),
        ...     "seen": (torch.tensor([1, 2, 3]), torch.tensor([0, 1])),
        ...     "shown": torch.tensor([[2], [4]]),
        ... })
        >>> {name: list(tensor.shape) for name, tensor in pooled.items()}
        {'user': [2, 2], 'seen': [2, 3], 'shown': [2, 3]}
        >>> sum(tensor.sum() for tensor in pooled.values()).backward()
        >>> len(user), len(item)
        (2, 4)
    """

    def __init__(self, tables: Any, mode: str = "sum", op: str = "average") -> None:
        super().__init__()
        if not isinstance(tables, Mapping) or not tables:
            raise ConfigError(f"tables: give a dict of at least one table by name, got {tables!r:.60}")
        checked_op(op)
        lookups: dict[str, Embedding | EmbeddingBag] = {}
        for name, given in tables.items():
            is_module = isinstance(given, Embedding | EmbeddingBag)
            lookups[name] = given if is_module else EmbeddingBag(given, mode)
        distinct = list(dict.fromkeys([lookup.table for lookup in lookups.values()]))
        for table in distinct:
            if table.store is not distinct[0].store:
                raise ConfigError(
                    f"{table!r} and {distinct[0]!r} belong to two stores; make a collection for each store"
                )
        self._lookups = lookups
        self._exchange = RowExchange(distinct, op)
        self._features: list[list[str]] = [
            [name for name, lookup in lookups.items() if lookup.table is table]
            for table in self._exchange.tables.all
        ]
        """The features of each table, in the order of requests."""
        self.op = op

    def forward(self, features: Any) -> dict[str, torch.Tensor]:
        """Return the rows of each feature, pooled: [bags, dim].

        Args:
            features: feature -> ids, or a tuple of ids, offsets and, if wanted, ``per_sample_weights``, as
                :meth:`EmbeddingBag.forward` takes them. Or a ``KeyedJaggedTensor`` of TorchRec.

        Raises:
            Mismatch: naming the feature, and what does not fit. Timeout, WorkerLost: as the store's pull.
        """
        bags = self._read(features)
        ids = self._ids(bags)
        is_trained = self.training and torch.is_grad_enabled()
        device = next(iter(bags.values())).device
        batch, rows = self._exchange.rows(ids, device, is_trained=is_trained)
        inputs = {name: (self._lookups[name], some) for name, some in bags.items()}
        found: dict[str, torch.Tensor] = {}
        for at, (leaf, group) in enumerate(zip(rows, self._exchange.tables.groups, strict=True)):
            features = self._features[group.first : group.stop]
            given = [[*map(inputs.__getitem__, names)] for names in features]
            found.update(zip(chain(*features), pooled(leaf, batch, at, given), strict=True))
        return {name: found[name] for name in bags}

    def prefetch(self, features: Any) -> None:
        """Ask for the rows of a later forward, while this one is computed.

        A forward with the same ids waits for the answer instead of asking. Rows that this worker pushes
        meanwhile are asked for again; pushes of other workers since this call may be missing from the others.

        Args:
            features: as :meth:`forward` takes them.

        Raises:
            Mismatch: as :meth:`forward`.

        Example:
            >>> import torch, kvps, kvps.torch
            >>> kv = kvps.create("local")
            >>> rows = kvps.torch.EmbeddingCollection({"user": kv.embedding("user", 2, init="zeros")})
            >>> batches = [{"user": torch.tensor([[at], [7]])} for at in range(3)]
            >>> for batch, following in zip(batches, [*batches[1:], None]):
            ...     loss = rows(batch)["user"].sum()
            ...     if following is not None:
            ...         rows.prefetch(following)
            ...     loss.backward()
        """
        self._exchange.prefetch(self._ids(self._read(features)))

    def prefetching(
        self, loader: Iterable[Any], features: Callable[[Any], Any] = lambda batch: batch
    ) -> Iterator[Any]:
        """Yield the batches of a loader, and :meth:`prefetch` the rows of each one batch ahead.

        Args:
            loader: a DataLoader, or any iterable.
            features: returns the features of a batch; without it, a batch is its features.

        Example:
            >>> import torch, kvps, kvps.torch
            >>> kv = kvps.create("local")
            >>> rows = kvps.torch.EmbeddingCollection({"user": kv.embedding("user", 2, init="zeros")})
            >>> data = [({"user": torch.tensor([[at]])}, at) for at in range(3)]
            >>> loader = torch.utils.data.DataLoader(data, batch_size=None)
            >>> for features, label in rows.prefetching(loader, lambda batch: batch[0]):
            ...     rows(features)["user"].sum().backward()
        """
        held: list[Any] = []
        for following in loader:
            if held:
                self.prefetch(features(following))
                yield held.pop()
            held.append(following)
        yield from held

    def _ids(self, bags: Mapping[str, Bags]) -> list[torch.Tensor]:
        """Return the ids of each table: its features' ids, one feature after the other."""
        return [
            bags[names[0]].ids if len(names) == 1 else torch.cat([bags[name].ids for name in names])
            for names in self._features
        ]

    def extra_repr(self) -> str:
        """Return the text between the brackets of its ``repr``."""
        lines = [f"{name}: {lookup!r}" for name, lookup in self._lookups.items()]
        return "\n".join([*lines, f"op={self.op!r}"])

    def _read(self, features: Any) -> dict[str, Bags]:
        """Return the bags of each feature.

        Raises:
            Mismatch: for features that are not those of the collection, and for inputs that do not fit.
        """
        if not isinstance(features, Mapping) and all(
            hasattr(features, name) for name in ("keys", "values", "lengths", "offsets")
        ):
            features = _of_jagged(features)
        if not isinstance(features, Mapping):
            raise Mismatch(
                "features: give a dict of inputs by name, or a KeyedJaggedTensor; got "
                f"{type(features).__name__}"
            )
        if features.keys() != self._lookups.keys():
            names = map(str, features.keys() ^ self._lookups.keys())
            raise Mismatch(
                f"features: give an input for each of {names_in_words(sorted(self._lookups))}; missing or "
                f"unknown: {names_in_words(sorted(names))}"
            )
        bags: dict[str, Bags] = {}
        for name, lookup in self._lookups.items():
            given = features[name]
            given = given if isinstance(given, tuple | list) else (given,)
            most = 1 if isinstance(lookup, Embedding) else 3
            if not 1 <= len(given) <= most:
                raise Mismatch(f"feature {name!r}: give at most {most} tensors, got {len(given)}")
            bags[name] = lookup.read(f"feature {name!r}", *given)
        devices = {some.device for some in bags.values()}
        if len(devices) > 1:
            raise Mismatch(f"features lie on several devices: {', '.join(sorted(map(str, devices)))}")
        return bags


def _of_jagged(features: Any) -> dict[str, tuple[torch.Tensor, ...]]:
    """Return the features of a KeyedJaggedTensor: its values lie feature after feature, bag after bag.

    Raises:
        Mismatch: if its bags are no whole number for each feature.
    """
    names, values, offsets = list(features.keys()), features.values(), ids_of(features.offsets()).cpu()
    weights = features.weights_or_none() if hasattr(features, "weights_or_none") else None
    bags, rest = divmod(len(offsets) - 1, max(1, len(names)))
    if rest or bags < 0 or int(offsets[-1]) != len(values):
        raise Mismatch(
            f"a KeyedJaggedTensor of {len(names)} keys and {len(values)} values has {len(offsets)} offsets: "
            "each key needs the same number of bags"
        )
    found: dict[str, tuple[torch.Tensor, ...]] = {}
    for at, name in enumerate(names):
        edges = offsets[at * bags : (at + 1) * bags + 1]
        some = slice(int(edges[0]), int(edges[-1]))
        bag = (values[some], edges[:-1] - edges[0])
        found[name] = bag if weights is None else (*bag, weights[some])
    return found
