"""A store within one process: ``local`` and ``device``.

The same contract as over servers with one worker: a push of several values, one per device, is
summed (on the CPU, or on the values' own device) and assigned to the key, or handed to the
optimizer. It is also the plainest statement of what each call of a store does.
"""

from __future__ import annotations

import logging

import torch

from kvps.core.embedding.spec import EmbeddingSpec
from kvps.core.nonfinite import ACTIONS, count_nonfinite
from kvps.core.optim.hyperparams import HyperParams
from kvps.core.optim.sparse_update import assign_rows
from kvps.core.worker import calls
from kvps.errors import ConfigError, KeyNotFound, Mismatch, NonFinite
from kvps.phrases import never_initialised
from kvps.runtime.ticket import Ticket, finished
from kvps.store.arguments import check_values, rows_of, values_of
from kvps.store.embedding.table import EmbeddingTable
from kvps.store.kvstore import KVStore
from kvps.store.local import checkpoint
from kvps.store.local.compression import LocalCoding
from kvps.store.local.embedding import LocalEmbedding
from kvps.store.local_optimizer import ServerRules
from kvps.store.names import Kind
from kvps.store.rows import Rows, rows_in, taken
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
        """Key -> the text of the error that its next pull raises."""
        self._rows_by_key: dict[str, torch.Tensor] = {}
        self._versions: dict[str, int] = {}
        self._rules: ServerRules | None = None
        self._coding = LocalCoding()
        self._local_tables: dict[str, LocalEmbedding] = {}
        """All tables, including those of a checkpoint that were not asked for yet."""

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

    def dropped_rounds(self) -> dict[str, int]:
        """Return key -> the number of pushes that were dropped, as they were not finite."""
        self._begin()
        return dict(self._dropped)

    # --- what a kind of store does --------------------------------------------------------------------

    def _start(self, call: calls.Call, limit_s: float) -> Ticket:
        return finished(self._answer(call))

    @torch.no_grad()
    def _answer(self, call: calls.Call) -> object:
        """Carry a call out; return what it finishes with."""
        match call:
            case calls.Init():
                self._init(call)
            case calls.Broadcast():
                self._broadcast(call)
            case calls.PushValues():
                return self._push(call)
            case calls.PushKeyRows():
                self._push_rows(call)
            case calls.PullValues():
                return self._pull(call.keys, call.sinks, call.min_version)
            case calls.PullKeyRows():
                return self._pull_rows(call)
            case calls.Allocate():
                return [self._like(name) for name in call.keys]
            case calls.Versions():
                return [self._versions[self._known(name)] for name in call.keys]
            case calls.ResumeKeys():
                return min((self._versions.get(name, 0) for name in call.keys), default=0)
            case calls.Lookup():
                return {}
            case calls.SetOptimizer():
                self._set_optimizer(call.hyper)
            case calls.SetRate():
                self._require_rules().set_rate(self._optimizer().with_lr(call.lr))
            case calls.SaveState():
                return self._require_rules().all_states()
            case calls.LoadState():
                self._require_rules().put(call.states, self._rows_by_key)
            case calls.SaveResiduals():
                return self._coding.residuals()
            case calls.LoadResiduals():
                self._coding.put(call.residuals)
            case calls.TakeCheckpoint():
                return self._checkpoint(call.tag)
            case calls.RestoreCheckpoint():
                return self._restore(call.tag)
            case calls.JoinStore():
                return 0
            case calls.StandAtBarrier() | calls.Compress():
                pass  # there is nobody to wait for, or to tell
            case _:
                raise TypeError(f"a local store does not take a {type(call).__name__}")
        return None

    def _checkpoint(self, tag: str) -> int:
        """Write all keys, and the optimizer's state, to the directory of KVPS_CHECKPOINT_DIR."""
        return checkpoint.keep(
            self._name,
            self._hyper,
            {name: self._kept(name) for name in self._rows_by_key},
            tag,
            tuple([table.snapshot() for table in self._local_tables.values()]),
        )

    def _restore(self, tag: str) -> int:
        cut, hyper, keys, tables = checkpoint.read(self._name, tag or None)
        for name, kept in keys.items():
            if name in self._specs:
                checkpoint.demand_same(self._name, name, self._specs[name], kept.spec)
        for title, table in tables.items():
            if title in self._local_tables:
                self._local_tables[title].demand_recipe(table.recipe)
        if hyper is not None and self._hyper is not None and hyper.name != self._hyper.name:
            raise Mismatch(
                f"store {self._name!r} has optimizer {self._hyper.name!r}, and the checkpoint "
                f"{hyper.name!r}; set that one, or none, before you restore"
            )
        if hyper is not None and self._hyper is None:
            self._set_optimizer(hyper)
            self._hyper = hyper
        for name, kept in keys.items():
            self._put_back(name, kept)
        for title, table in tables.items():
            if title not in self._local_tables:
                self._local_tables[title] = LocalEmbedding(self, title, table.recipe)
            self._local_tables[title].restore(table)
        return cut

    def _kept(self, name: str) -> checkpoint.Kept:
        step, state = (0, {}) if self._rules is None else self._rules.state_of(name)
        row, version = self._rows_by_key[name], self._versions[name]
        return checkpoint.Kept(self._specs[name], row, version, step, state)

    def _put_back(self, name: str, kept: checkpoint.Kept) -> None:
        self._keys.declare([(name, kept.spec)])
        device = self._rows_by_key[name].device if name in self._rows_by_key else kept.row.device
        self._rows_by_key[name] = kept.row.to(device)
        self._versions[name] = kept.version
        if self._rules is not None:
            state = {title: row.to(device) for title, row in kept.state.items()}
            self._rules.restore(name, kept.step, state)

    # --- keys and values --------------------------------------------------------------------------

    def _init(self, call: calls.Init) -> None:
        for name, spec in call.keys:
            known = self._specs.get(name)
            if known is not None and known != spec:
                raise Mismatch(
                    f"key {name!r} is {known} and cannot be initialised as {spec}; broadcast() "
                    "replaces a key"
                )
        for (name, _), row in zip(call.keys, call.rows, strict=True):
            if name not in self._rows_by_key:
                self._set(name, row)

    def _broadcast(self, call: calls.Broadcast) -> None:
        for (name, _), row, sink in zip(call.keys, call.rows, call.sinks, strict=True):
            self._set(name, row)
            sink.copy_(row)

    def _push(self, call: calls.PushValues) -> object:
        for name in call.keys:
            self._check_update(name)
        for name, row in zip(call.keys, call.rows, strict=True):
            flat = row.view(-1)
            if self._on_nonfinite == ACTIONS[0] or self._is_finite(name, flat):
                self._update(name, flat)
            self._versions[name] += 1
        if call.sinks is None:
            return None
        return self._pull(call.keys, call.sinks, 0)

    def _push_rows(self, call: calls.PushKeyRows) -> None:
        for name in call.keys:
            self._check_update(name)
        for name, rows in zip(call.keys, rows_in(call.rows), strict=True):
            if self._on_nonfinite == ACTIONS[0] or self._is_finite(name, rows.rows.view(-1)):
                self._update_rows(name, rows)
            self._versions[name] += 1

    def _pull(self, names: tuple[str, ...], sinks: calls.Sinks, least: int) -> object:
        for name in names:
            if self._versions[self._known(name)] < least:
                raise ConfigError(
                    f"key {name!r} stands at version {self._versions[name]}; in a local store "
                    f"nobody else will bring it to min_version={least}"
                )
        views = None
        if isinstance(sinks, calls.Views):  # a copy never changes under its reader
            views = [self._like(name).copy_(self._shaped(name)) for name in names]
        else:
            for name, sink in zip(names, sinks or (), strict=True):
                sink.copy_(self._shaped(name))
        self._raise_untold(names)
        return views

    def _pull_rows(self, call: calls.PullKeyRows) -> object:
        pulled = [
            taken(self._table(self._known(name)), ids, places)
            for name, ids, places in zip(call.keys, call.ids, call.places, strict=True)
        ]
        self._raise_untold(call.keys)
        return pulled

    def _set_optimizer(self, hyper: HyperParams) -> None:
        if self._rules is None:
            self._rules = ServerRules(hyper)
        else:
            self._rules.change(hyper, self._rows_by_key)

    def _require_rules(self) -> ServerRules:
        self._optimizer()
        assert self._rules is not None
        return self._rules

    def _rows(
        self, names: tuple[str, ...], is_many: bool, value: object, timeout: float | None
    ) -> tuple[torch.Tensor, ...]:
        if self._compression.are_off:
            return super()._rows(names, is_many, value, timeout)
        values = values_of(names, is_many, value)
        check_values(names, values, self._specs, "push")
        decoded = [self._decoded(*pair) for pair in zip(names, values, strict=True)]
        return rows_of(decoded, self._kind.on_device)

    def _decoded(self, name: str, devices: list[Array]) -> list[Array]:
        setting = self._compression.setting_of(name, self._specs[name])
        if setting is None:
            return devices
        return self._coding.decoded(name, setting, self._versions[name], devices)

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

    def _update_rows(self, name: str, rows: Rows) -> None:
        table = self._table(name)
        ids, values = rows.ids.to(table.device), rows.inorder.to(table.device)
        if self._rules is None:
            assign_rows(table, ids, values, before=None)
        else:
            self._rules.update_rows(name, table, ids, values)
