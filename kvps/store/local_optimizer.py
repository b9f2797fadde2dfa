"""Optimizers that run in this process: the rules of the servers, or a torch optimizer itself.

Both update named tensors by named gradients, keep one state per name, and write that state to one
safetensors file without code in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvps.core.optim.hyperparams import HyperParams, resolve
from kvps.core.optim.sparse_update import may_be_lazy, update_rows
from kvps.core.optim.torch_rules import State, Terms, create
from kvps.errors import Mismatch, StorageError
from kvps.store import optimizer_state
from kvps.store.rows import has_rows, rows_of
from kvps.tensors import accumulator, spec_of

BLOCK_COUNT = 1 << 18
"""Elements that are updated at once."""


class ServerRules:
    """The optimizers of the servers (:mod:`kvps.core.optim.torch_rules`), one flat weight at a time."""

    def __init__(self, hyper: HyperParams) -> None:
        self.hyper = hyper
        self._updater = create(hyper)
        self._updater.demand_keys()
        self._states: dict[str, State] = {}
        self._steps: dict[str, int] = {}

    def set_rate(self, hyper: HyperParams) -> None:
        """Go on with ``hyper``, which differs in its learning rate only."""
        self.hyper, self._updater = hyper, create(hyper)

    def update(self, key: str, weight: torch.Tensor, gradient: torch.Tensor, scale: float = 1.0) -> None:
        """Update ``weight``, a flat row, in place by ``scale * gradient``, which is only read."""
        if key not in self._states:
            self._states[key] = self._updater.new_state(weight)
        state = self._states[key]
        terms = self._next_terms(key)
        ready = accumulator(gradient.to(weight.device))
        # An updater uses its gradient up: it gets a copy of a block, which stays in a core's cache.
        is_whole = self._updater.needs_norms or not weight.is_cpu
        count = len(weight) if is_whole else min(len(weight), BLOCK_COUNT)
        block = torch.empty(count, dtype=ready.dtype, device=ready.device)
        for start in range(0, len(weight), count or 1):
            part = slice(start, start + count)
            own = block[: len(ready[part])].copy_(ready[part])
            if scale != 1.0:
                own *= scale
            if self._updater.needs_norms:
                norms = self._updater.partial_norms(weight, own, state, terms)
                terms = terms._replace(norms=norms)
            piece = {name: tensor[part] for name, tensor in state.items()}
            self._updater.apply(weight[part], own, piece, terms)

    def update_rows(self, key: str, table: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Update the rows ``ids`` of ``table`` in place by ``rows``, which are only read.

        Where the rule needs norms of the whole table, the other rows count as gradients of 0.
        """
        if not may_be_lazy(self._updater):
            dense = torch.zeros_like(table, dtype=rows.dtype).index_copy_(0, ids, rows)
            self.update(key, table.view(-1), dense.view(-1))
            return
        if key not in self._states:
            self._states[key] = self._updater.new_state(table.view(-1))
        ready = accumulator(rows)
        update_rows(
            table,
            {name: state.view(table.shape) for name, state in self._states[key].items()},
            ids,
            ready.clone() if ready is rows else ready,
            self._updater,
            self._next_terms(key),
        )

    def _next_terms(self, key: str) -> Terms:
        self._steps[key] = step = self._steps.get(key, 0) + 1
        return Terms(step, *self.hyper.for_key(key))


class RulesOptimizer(ServerRules):
    """:class:`ServerRules` on the tensors of a model."""

    def __init__(self, params: Mapping[str, torch.Tensor], hyper: HyperParams) -> None:
        super().__init__(hyper)
        self._params = params

    @property
    def learning_rate(self) -> float:
        """The learning rate, without multipliers."""
        return self.hyper.number("lr")

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate; multipliers stay."""
        self.set_rate(self.hyper.with_lr(lr))

    def step(self, names: Sequence[str], scale: float) -> None:
        """Update the parameters ``names`` by ``scale`` times their ``.grad``."""
        for name in names:
            param = self._params[name]
            assert param.grad is not None
            data = param.detach()
            if has_rows(param.grad):
                self._step_rows(name, data, param.grad.detach(), scale)
                continue
            row = data.reshape(-1)  # a copy, unless contiguous
            gradient = param.grad.detach()
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            self.update(name, row, dense.reshape(-1), scale)
            if row.data_ptr() != data.data_ptr():
                data.copy_(row.view(data.shape))

    def _step_rows(self, name: str, data: torch.Tensor, gradient: torch.Tensor, scale: float) -> None:
        """Update the rows of a parameter that a sparse gradient names."""
        table = data.contiguous().view(len(data), -1)  # a copy, unless contiguous
        rows = rows_of(name, spec_of(data), gradient)
        given = (rows.inorder if scale == 1.0 else rows.inorder * scale).to(data.device)
        self.update_rows(name, table, rows.ids.to(data.device), given)
        if table.data_ptr() != data.data_ptr():
            data.copy_(table.view(data.shape))

    def forget(self) -> None:
        """Begin all states anew."""
        self._states.clear()
        self._steps.clear()

    def all_states(self) -> optimizer_state.States:
        """Return all states, on the CPU."""
        return {
            key: (step, {name: row.cpu().clone() for name, row in self._states[key].items()})
            for key, step in self._steps.items()
        }

    def put(self, found: optimizer_state.States) -> None:
        """Go on with the states that :meth:`all_states` gave, and no others."""
        self.forget()
        for key, (step, rows) in found.items():
            self._steps[key] = step
            self._states[key] = {name: row.to(self._params[key].device) for name, row in rows.items()}

    def save(self, path: str) -> None:
        """Write all states to ``path``.

        Raises:
            StorageError: if it cannot be written.
        """
        optimizer_state.save(path, self.hyper, self.all_states())

    def load(self, path: str) -> None:
        """Put back what :meth:`save` wrote, for the same parameters.

        Raises:
            StorageError: if the file cannot be read.
            Mismatch: if it holds the states of another optimizer or of other keys.
        """
        states = optimizer_state.plain(optimizer_state.load(path, self.hyper), path)
        optimizer_state.demand_fit(states, {key: spec_of(param) for key, param in self._params.items()}, path)
        self.put(states)


class TorchOptimizer:
    """A torch optimizer itself, of any class: its schedulers and groups work as always."""

    def __init__(self, params: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        self._params = params
        self.optimizer = optimizer

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the first group; the other groups keep their ratio to it."""
        wanted, old = resolve("sgd", {"lr": lr}).number("lr"), self.learning_rate
        for group in self.optimizer.param_groups:
            group["lr"] = float(group["lr"]) / old * wanted if old else wanted

    def forget(self) -> None:
        """Begin all states anew."""
        self.optimizer.state.clear()

    def step(self, names: Sequence[str], scale: float) -> None:
        """Step by ``scale`` times the ``.grad`` of ``names``, which are as before afterwards."""
        params = [self._params[name] for name in names]
        sums = [param.grad for param in params]
        try:
            if scale != 1.0:
                for param in params:
                    assert param.grad is not None
                    param.grad = param.grad * scale
            self.optimizer.step()
        finally:
            for param, gradient in zip(params, sums, strict=True):
                param.grad = gradient

    def save(self, path: str) -> None:
        """Write all states to ``path``.

        Raises:
            StorageError: if it cannot be written, or a state is neither tensor nor number.
        """
        tensors: dict[str, torch.Tensor] = {}
        table: dict[str, dict[str, Any]] = {}
        for name, param in self._params.items():
            numbers: dict[str, float | None] = {}
            for title, value in self.optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{name}/{title}"] = value.detach().cpu().contiguous()
                elif value is None or isinstance(value, int | float):
                    numbers[title] = value
                else:
                    raise StorageError(
                        f"state {title!r} of parameter {name!r} is a {type(value).__name__}, "
                        "which cannot be saved; use the optimizer's own state_dict()"
                    )
            table[name] = {"shape": list(param.shape), "numbers": numbers}
        optimizer_state.write(path, tensors, {"optimizer": self._title, "params": json.dumps(table)})

    def load(self, path: str) -> None:
        """Put back what :meth:`save` wrote.

        Raises:
            StorageError: if the file cannot be read.
            Mismatch: if it holds the states of another optimizer or of other parameters.
        """
        tensors, table = optimizer_state.read(path, self._title, "params")
        for name in table.keys() | self._params.keys():
            param = self._params.get(name)
            there = table.get(name, {}).get("shape")
            here = None if param is None else list(param.shape)
            if there != here:
                raise Mismatch(
                    f"{path} is for another model: parameter {name!r} has shape {there} there and "
                    f"{here} here (None: it does not exist); build the same model first"
                )
        found = {name: dict(entry["numbers"]) for name, entry in table.items()}
        for title, tensor in tensors.items():
            name, _, field = title.rpartition("/")
            found[name][field] = tensor
        whole = self.optimizer.state_dict()
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        number_of = {param: number for number, param in enumerate(params)}
        for name, state in found.items():
            if state:
                whole["state"][number_of[self._params[name]]] = state
        self.optimizer.load_state_dict(whole)

    @property
    def _title(self) -> str:
        return f"{type(self.optimizer).__module__}.{type(self.optimizer).__qualname__}"
