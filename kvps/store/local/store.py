"""A store within one process: ``local`` and ``device``.

The same contract as over servers with one worker: a push of several values, one per device, is
summed (on the CPU, or on the values' own device) and assigned to the key, or handed to the
optimizer. It is also the plainest statement of what a store does.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from kvps.compression.policy import CompressionPolicy as Compression
from kvps.core.embedding.spec import EmbeddingSpec
from kvps.core.nonfinite import ACTIONS, count_nonfinite
from kvps.core.optim.hyperparams import HyperParams
from kvps.core.optim.sparse_update import assign_rows
from kvps.core.placement import Part
from kvps.core.worker.calls import Sinks, Views
from kvps.core.worker.plan import Numbers
from kvps.dtypes import Spec
from kvps.errors import ConfigError, KeyNotFound, Mismatch, NonFinite
from kvps.phrases import never_initialised
from kvps.runtime.ticket import Ticket, finished
from kvps.store.arguments import check_values, names_of, rows_of, tag_of, values_of
from kvps.store.contract import Straggler
from kvps.store.embedding.table import EmbeddingTable
from kvps.store.kvstore import KVStore
from kvps.store.local import checkpoint as keeping
from kvps.store.local.compression import LocalCoding
from kvps.store.local.embedding import LocalEmbedding
from kvps.store.local_optimizer import ServerRules
from kvps.store.names import Kind
from kvps.store.optimizer_state import States
from kvps.store.rows import Rows, taken
from kvps.tensors import Array

log = logging.getLogger("kvps")


class LocalStore(KVStore):
    """A store within this process; make it with :func:`kvps.create`."""

    def __init__(
        self, kind: Kind, name: str, timeout_s: float, on_nonfinite: str = ACTIONS[0]
    ) -> None:
        super().__init__(kind, name, timeout_s)
        self._on_nonfinite = on_nonfinite
        self._dropped: dict[str, int] = {}
        self._untold: dict[str, str] = {}
        """By key, what is to be raised by its next pull."""
        self._rows_by_key: dict[str, torch.Tensor] = {}
        self._versions: dict[str, int] = {}
        self._rules: ServerRules | None = None
        self._coding = LocalCoding()
        self._local_tables: dict[str, LocalEmbedding] = {}
        """All that there are, also of a checkpoint and not asked for yet."""

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def num_workers(self) -> int:
        """Always 1."""
        return 1

    @property
    def num_dead_nodes(self) -> int:
        """Always 0."""
        return 0

    def version(self, key: object, *, timeout: float | None = None) -> Any:
        """Return how many pushes of a key were applied since init; for a list of keys a list."""
        self._begin()
        names, is_many = names_of(key)
        found = [self._versions[self._known(name)] for name in names]
        return found if is_many else found[0]

    def resume(self, keys: object, *, timeout: float | None = None) -> int:
        """Return the lowest version of ``keys``; a local store never forgets a push."""
        self._begin()
        names, _ = names_of(keys)
        return min((self._versions.get(name, 0) for name in names), default=0)

    def barrier(self, name: str | None = None, *, timeout: float | None = None) -> None:
        """Return at once: there is one worker."""
        self._begin()

    def join(self, timeout: float | None = None) -> int:
        """Return 0 at once: there is one worker, and it was the last."""
        self._begin()
        return 0

    def placement(self) -> dict[str, tuple[Part, ...]]:
        """Return an empty map: there are no servers."""
        return {}

    def staleness(self) -> dict[str, int]:
        """Return 0 for each key."""
        return dict.fromkeys(self._specs, 0)

    def stragglers(self) -> list[Straggler]:
        """Return nobody."""
        return []

    def dropped_rounds(self) -> dict[str, int]:
        """Return of how many pushes of each key nothing came, as they were not finite."""
        self._begin()
        return dict(self._dropped)

    def save_optimizer_states(self, path: str) -> None:
        """Write the optimizer's state of every key to a safetensors file."""
        self._begin()
        self._optimizer()
        assert self._rules is not None
        self._rules.save(path)

    def optimizer_states(self) -> States:
        """Return the optimizer's state of every key that was updated."""
        self._begin()
        self._optimizer()
        assert self._rules is not None
        return self._rules.all_states()

    def set_optimizer_states(self, found: States) -> None:
        """Put back what :meth:`optimizer_states` gave."""
        self._begin()
        self._optimizer()
        assert self._rules is not None
        self._rules.put(found, self._rows_by_key)

    def load_optimizer_states(self, path: str) -> None:
        """Put back what :meth:`save_optimizer_states` wrote."""
        self._begin()
        self._optimizer()
        assert self._rules is not None
        self._rules.load(path, self._rows_by_key)

    def checkpoint(self, tag: str | None = None, *, timeout: float | None = None) -> int:
        """Write all keys, and the optimizer's state, to the directory of KVPS_CHECKPOINT_DIR."""
        self._begin()
        return keeping.keep(
            self._name,
            self._hyper,
            {name: self._kept(name) for name in self._rows_by_key},
            tag_of(tag),
            tuple([one.image() for one in self._local_tables.values()]),
        )

    def restore(self, tag: str | None = None, *, timeout: float | None = None) -> int:
        """Give the store's keys the values of a checkpoint; return the checkpoint's number."""
        self._begin()
        cut, hyper, keys, tables = keeping.read(self._name, tag_of(tag) or None)
        for name, one in keys.items():
            if name in self._specs:
                keeping.demand_same(self._name, name, self._specs[name], one.spec)
        for title, table in tables.items():
            if title in self._local_tables:
                self._local_tables[title].demand_recipe(table.recipe)
        if hyper is not None and self._hyper is not None and hyper.name != self._hyper.name:
            raise Mismatch(
                f"store {self._name!r} has optimizer {self._hyper.name!r}, and the checkpoint "
                f"{hyper.name!r}; set that one, or none, before you restore"
            )
        if hyper is not None and self._hyper is None:
            self._set_optimizer(hyper, 0.0)
            self._hyper = hyper
        for name, one in keys.items():
            self._restore(name, one)
        for title, table in tables.items():
            if title not in self._local_tables:
                self._local_tables[title] = LocalEmbedding(self, title, table.recipe)
            self._local_tables[title].restore(table)
        return cut

    def _kept(self, name: str) -> keeping.Kept:
        step, state = (0, {}) if self._rules is None else self._rules.state_of(name)
        row, version = self._rows_by_key[name], self._versions[name]
        return keeping.Kept(self._specs[name], row, version, step, state)

    def _restore(self, name: str, one: keeping.Kept) -> None:
        self._specs[name] = one.spec
        device = self._rows_by_key[name].device if name in self._rows_by_key else one.row.device
        self._rows_by_key[name] = one.row.to(device)
        self._versions[name] = one.version
        if self._rules is not None:
            state = {title: row.to(device) for title, row in one.state.items()}
            self._rules.restore(name, one.step, state)

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
        for (name, _), row in zip(keys, rows, strict=True):
            if name not in self._rows_by_key:
                self._set(name, row)

    @torch.no_grad()
    def _push(
        self,
        names: tuple[str, ...],
        rows: tuple[torch.Tensor, ...],
        sinks: Sinks,
        priority: Numbers,
        eager: bool,
        limit_s: float,
    ) -> Ticket:
        for name in names:
            self._check_update(name)
        for name, row in zip(names, rows, strict=True):
            flat = row.view(-1)
            if self._on_nonfinite == ACTIONS[0] or self._is_finite(name, flat):
                self._update(name, flat)
            self._versions[name] += 1
        if sinks is not None:
            return self._pull(names, sinks, priority, 0, limit_s)
        return finished()

    @torch.no_grad()
    def _pull(
        self,
        names: tuple[str, ...],
        sinks: Sinks,
        priority: Numbers,
        least: int,
        limit_s: float,
    ) -> Ticket:
        for name in names:
            if self._versions[self._known(name)] < least:
                raise ConfigError(
                    f"key {name!r} stands at version {self._versions[name]}; in a local store "
                    f"nobody else will bring it to min_version={least}"
                )
        found = None
        if isinstance(sinks, Views):  # a copy never changes under its reader
            found = [self._like(name).copy_(self._shaped(name)) for name in names]
        else:
            for name, sink in zip(names, sinks or (), strict=True):
                sink.copy_(self._shaped(name))
        self._raise_untold(names)
        return finished(found)

    @torch.no_grad()
    def _push_rows(
        self,
        names: tuple[str, ...],
        rows: tuple[Rows, ...],
        priority: Numbers,
        eager: bool,
        limit_s: float,
    ) -> Ticket:
        for name in names:
            self._check_update(name)
        for name, one in zip(names, rows, strict=True):
            if self._on_nonfinite == ACTIONS[0] or self._is_finite(name, one.rows.view(-1)):
                self._update_rows(name, one)
            self._versions[name] += 1
        return finished()

    @torch.no_grad()
    def _pull_rows(
        self,
        names: tuple[str, ...],
        ids: tuple[torch.Tensor, ...],
        places: tuple[torch.Tensor, ...],
        priority: Numbers,
        limit_s: float,
    ) -> Ticket:
        found = [
            taken(self._table(self._known(name)), some, at)
            for name, some, at in zip(names, ids, places, strict=True)
        ]
        self._raise_untold(names)
        return finished(found)

    def _broadcast(
        self,
        keys: tuple[tuple[str, Spec], ...],
        rows: tuple[torch.Tensor, ...],
        sinks: tuple[torch.Tensor, ...],
        limit_s: float,
    ) -> Ticket:
        for (name, _), row, sink in zip(keys, rows, sinks, strict=True):
            self._set(name, row)
            sink.copy_(row)
        return finished()

    def _allocate(self, names: tuple[str, ...], limit_s: float) -> list[torch.Tensor]:
        return [self._like(name) for name in names]

    def _lookup(self, names: tuple[str, ...], limit_s: float) -> dict[str, Spec]:
        return {}

    def _set_optimizer(self, hyper: HyperParams, limit_s: float) -> None:
        if self._rules is None:
            self._rules = ServerRules(hyper)
        else:
            self._rules.change(hyper, self._rows_by_key)

    def _set_rate(self, hyper: HyperParams, limit_s: float) -> None:
        assert self._rules is not None
        self._rules.set_rate(hyper)

    def _compress(self, rules: Compression) -> None:
        """Nothing is to be told to anybody."""

    def _rests(self) -> dict[str, torch.Tensor]:
        return self._coding.rests()

    def _set_rests(self, rests: dict[str, torch.Tensor]) -> None:
        self._coding.put(rests)

    def _rows(
        self, names: tuple[str, ...], is_many: bool, value: object, timeout: float | None
    ) -> tuple[torch.Tensor, ...]:
        if self._compression.are_off:
            return super()._rows(names, is_many, value, timeout)
        values = values_of(names, is_many, value)
        check_values(names, values, self._specs, "push")
        read = [self._read(*one) for one in zip(names, values, strict=True)]
        return rows_of(read, self._kind.on_device)

    def _read(self, name: str, devices: list[Array]) -> list[Array]:
        setting = self._compression.setting_of(name, self._specs[name])
        if setting is None:
            return devices
        return self._coding.read(name, setting, self._versions[name], devices)

    def _embedding(self, name: str, recipe: EmbeddingSpec, limit_s: float) -> EmbeddingTable:
        if self._on_nonfinite != ACTIONS[0]:
            raise ConfigError(
                f"store {self._name!r} looks whether gradients are finite, which tables do not; "
                f"create one with on_nonfinite={ACTIONS[0]!r} for table {name!r}"
            )
        known = self._local_tables.get(name)
        if known is None:
            known = self._local_tables[name] = LocalEmbedding(self, name, recipe)
        known.demand_recipe(recipe)  # one that came from a checkpoint may be another
        return known

    def _close(self) -> None:
        self._rows_by_key.clear()
        self._tables.clear()
        self._local_tables.clear()

    # --- small things -------------------------------------------------------------------------------

    def _shaped(self, name: str) -> torch.Tensor:
        return self._rows_by_key[name].view(self._specs[name].shape)

    def _table(self, name: str) -> torch.Tensor:
        """Return a key's values as rows."""
        return self._rows_by_key[name].view(-1, self._specs[name].width)

    def _raise_untold(self, names: tuple[str, ...]) -> None:
        untold = [text for name in names if (text := self._untold.pop(name, ""))]
        if untold:
            others = len(untold) - 1
            raise NonFinite(
                untold[0] + (f" (so were those of {others} more keys)" if others else "")
            )

    def _like(self, name: str) -> torch.Tensor:
        return torch.empty_like(self._shaped(name))

    def _known(self, name: str) -> str:
        if name not in self._rows_by_key:
            raise KeyNotFound(never_initialised(name))
        return name

    def _set(self, name: str, row: torch.Tensor) -> None:
        self._rows_by_key[name] = row.view(-1).clone()
        self._versions.setdefault(name, 0)
        if self._rules is not None:
            self._rules.forget(name)

    def _is_finite(self, name: str, row: torch.Tensor) -> bool:
        """Whether a gradient may be used; if not, it is counted."""
        count = count_nonfinite(row)
        if not count:
            return True
        self._dropped[name] = self._dropped.get(name, 0) + 1
        text = (
            f"store {self._name!r}: push {self._versions[name]} of key {name!r} was dropped: {count} "
            f"of its {len(row)} values are not finite. The weights and the optimizer's state are as "
            "they were before it; go on with the next push, and look at the loss and the learning "
            "rate if this comes again"
        )
        if self._on_nonfinite == "error":
            self._untold[name] = text
        elif self._dropped[name] == 1:
            log.warning("%s (told once for each key)", text)
        return False

    def _check_update(self, name: str) -> None:
        weight = self._rows_by_key[self._known(name)]
        if self._rules is not None:
            self._rules.check(name, weight)

    def _update(self, name: str, row: torch.Tensor) -> None:
        if self._rules is None:
            self._rows_by_key[name].copy_(row)
        else:
            self._rules.update(name, self._rows_by_key[name], row)

    def _update_rows(self, name: str, one: Rows) -> None:
        table = self._table(name)
        ids, rows = one.ids.to(table.device), one.inorder.to(table.device)
        if self._rules is None:
            assign_rows(table, ids, rows, before=None)
        else:
            self._rules.update_rows(name, table, ids, rows)
