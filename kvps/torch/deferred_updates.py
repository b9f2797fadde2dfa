"""Updates deferred into the next forward pass: their values, parameters and learning rates.

:mod:`kvps.torch.forward_overlap` says who waits for a parameter. This file says what then happens: it waits for the bucket, and takes the weights that came back; or it lets the optimizer step those
parameters alone, as if its groups had no others, with the rates that held when ``step()`` was called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvps.errors import EpochChanged
from kvps.torch.forward_overlap import ForwardOverlap
from kvps.torch.sync.in_flight import InFlight
from kvps.torch.sync.parameter_sync import ParameterSync


class DeferredUpdates:
    """The updates that are left to do of a step that has returned.

    They may be made in the middle of anything that reads a parameter: under autocast, or in inference mode, for example.

    Args:
        module: the model, whose parameters wait.
        model: its parameters in the store.
        optimizer: over them.
        on_store: what comes back are weights.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        model: ParameterSync,
        optimizer: torch.optim.Optimizer,
        on_store: bool,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._on_store = on_store
        self._buckets: dict[str, InFlight] = {}
        """Parameter -> the gradients that its update waits for."""
        self._rates: list[dict[str, Any]] = []
        """The optimizer's groups without their parameters, as they were at that step."""
        number_of = {
            param: number
            for number, group in enumerate(optimizer.param_groups)
            for param in group["params"]
        }
        self._group_of = {name: number_of.get(param, 0) for name, param in model.params.items()}
        step = type(optimizer).step
        # Hooks were called when the script made the step: this is one of its parts.
        self._plain_step: Any = getattr(step, "__wrapped__", step)
        self._ahead = ForwardOverlap(module, model.params, self._update)

    @property
    def may_defer(self) -> bool:
        """Whether updates may be deferred: not once torch has compiled something."""
        return not self._ahead.is_compiled

    def put_off(self, buckets: dict[str, InFlight]) -> None:
        """Let each of these parameters be updated when its module needs it."""
        self._buckets = buckets
        self._rates = [
            {option: value for option, value in group.items() if option != "params"}
            for group in self._optimizer.param_groups
        ]
        for name in buckets:
            self._model.params[name].grad = None  # what comes next is of another step
        self._ahead.put_off(buckets)

    def finish(self) -> None:
        """Make all updates now."""
        self._ahead.finish()

    def close(self) -> None:
        """Make all updates, and let go of the modules."""
        self._ahead.close()

    def _update(self, names: list[str]) -> None:
        """Wait for what these parameters need, and update them."""
        buckets = {name: self._buckets.pop(name) for name in names}
        try:
            for bucket in buckets.values():
                bucket.wait()
        except EpochChanged as error:
            self._buckets.clear()
            self._ahead.forget()
            self._model.go_on(error)
            return  # an optimizer here skips the next step: modules have computed with other weights
        device = next(iter(self._model.params.values())).device.type
        with torch.inference_mode(mode=False), torch.autocast(device, enabled=False):
            if self._on_store:
                for name, bucket in buckets.items():
                    bucket.bring([name], self._model.params)
            else:
                self._step(buckets)

    def _step(self, buckets: Mapping[str, InFlight]) -> None:
        """Let the optimizer step these parameters alone."""
        groups: dict[int, list[torch.Tensor]] = {}
        before: dict[torch.Tensor, torch.Tensor | None] = {}
        for name, bucket in buckets.items():
            param = self._model.params[name]
            groups.setdefault(self._group_of[name], []).append(param)
            before[param] = param.grad
            param.grad = bucket.gradient(name)
        whole = self._optimizer.param_groups
        self._optimizer.param_groups = [
            {**self._rates[number], "params": params} for number, params in groups.items()
        ]
        try:
            self._plain_step(self._optimizer)
        finally:
            self._optimizer.param_groups = whole
            for param, gradient in before.items():
                param.grad = gradient
