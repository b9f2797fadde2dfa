"""Updates deferred into the next forward pass: their values, parameters and learning rates.

:class:`DeferredUpdates` waits for the bucket of a parameter, and takes the weights that came back; or it lets
the optimizer step those parameters alone, as if its groups had no others, with the rates that held when
``step()`` was called.

So the next forward pass begins before the last updates are in.

Theory of operation
-------------------
Without this, ``step()`` waits for the whole model, and the network is silent while the next forward pass
computes. With it, ``step()`` takes the gradients away from their parameters and returns. Each parameter is
then *pending*: its first reader waits for its update, in the order in which a forward pass needs them, which
is the order in which they come back (:mod:`kvps.torch.sync.in_flight`)::

    backward 1            step  forward 2             backward 2
    ... fc  conv2  conv1    |   [conv1] [conv2] [fc]  ...
          gradients leave        \\______\\_______\\__ each waits for its own update

So any torch optimizer whose state is per parameter can be used: it steps a few parameters at a time, with the
rates that held when ``step()`` was called, even if a scheduler has changed them since.

A pending parameter has another class, :class:`PendingParameter`, which torch asks before it hands the
parameter to any of its functions. So it does not matter who reads it: a module, another module, a hook, an
average of weights, ``state_dict()``, a copy. A hook before each ``forward()`` brings the parameters of one
module together, and those that a module gives to C++ code, which asks nobody.

Compiled code checks the class of each parameter and would be compiled again for every other class. So when
torch begins to compile, all updates are made, and no later update is deferred.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch.utils._pytree import tree_leaves

from kvps.errors import ConfigError, EpochChanged, KvpsError, Timeout
from kvps.torch.sync.in_flight import InFlight
from kvps.torch.sync.parameter_sync import ParameterSync
from kvps.torch.sync.steps import plain_step

_ATTRIBUTES = (
    "grad requires_grad is_leaf grad_fn shape ndim dtype device layout is_cpu is_cuda is_sparse is_meta "
    "_version"
)
_METHODS = "size dim numel stride element_size is_contiguous is_floating_point"
_GRAD: Any = torch.Tensor.grad
_UNREAD = frozenset(
    [
        *[getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES.split()],
        *[getattr(torch.Tensor, name) for name in _METHODS.split()],
        _GRAD.__set__,
        _GRAD.__delete__,
    ]
)
"""Functions of a tensor that do not read its elements: ``zero_grad()`` must not wait."""


class PendingParameter(torch.nn.Parameter):
    """A parameter whose update was deferred; it is an ordinary parameter again before anybody reads it."""

    _kvps_owner: ForwardOverlap
    """Makes the update."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func not in _UNREAD and _bring(tree_leaves((args, options))):
            return func(*args, **options)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **options)

    def __deepcopy__(self, memo: Any) -> Any:
        _bring([self])
        return self.__deepcopy__(memo)  # of the class that it has now

    def __reduce_ex__(self, protocol: Any) -> Any:
        _bring([self])
        return self.__reduce_ex__(protocol)


def _bring(values: Iterable[Any]) -> bool:
    """Make the updates of pending parameters among ``values``; return whether there was any."""
    pending = [value for value in values if type(value) is PendingParameter]
    for owner in {param._kvps_owner for param in pending}:  # of two optimizers, for example
        owner.finish_of([param for param in pending if vars(param).get("_kvps_owner") is owner])
    return bool(pending)


def _bring_own(module: torch.nn.Module, _: Any) -> None:
    """Make the updates of a module's own parameters."""
    _bring(module._parameters.values())


class ForwardOverlap:
    """Parameters with a deferred update, each of which waits for its first reader.

    Args:
        module: the model.
        params: name -> parameter of the model.
        update: updates these parameters when all of their gradients have arrived.

    Raises:
        ConfigError: for a scripted model, whose code reads parameters without asking.
    """

    def __init__(
        self, module: torch.nn.Module, params: Mapping[str, torch.Tensor], update: Callable[[list[str]], None]
    ) -> None:
        if any(isinstance(submodule, torch.jit.ScriptModule) for submodule in module.modules()):
            raise ConfigError(
                "overlap_forward=True: a scripted module reads its weights before their update is in; use "
                "the module that was scripted, or overlap_forward=False"
            )
        self._params = params
        self._names = {param: name for name, param in params.items()}
        self._update = update
        self._pending: set[str] = set()
        self.is_compiled = False
        """Torch has compiled something since this was made."""
        self._hooks = [
            submodule.register_forward_pre_hook(_bring_own, prepend=True)
            for submodule in module.modules()
            if any(True for _ in submodule.parameters(recurse=False))
        ]
        # As the first step of an optimizer does.
        from torch._dynamo.callback import callback_handler

        self._callbacks = callback_handler.start_callbacks
        self._on_compile = partial(_compile, weakref.ref(self))
        self._end = weakref.finalize(self, _drop, self._callbacks, self._on_compile)
        self._end.atexit = False
        self._watch()

    def _watch(self) -> None:
        """Watch compilations from now on, and after torch._dynamo.reset(), which forgets who watches."""
        if self._on_compile not in self._callbacks:
            self._callbacks.append(self._on_compile)

    def put_off(self, names: Iterable[str]) -> None:
        """Defer the update of these parameters until somebody reads them."""
        self._watch()
        self.finish(self._mark(names))

    def _mark(self, names: Iterable[str]) -> list[str]:
        """Let parameters wait for their update; return those that cannot."""
        now = []
        for name in names:
            param = self._params[name]
            self._pending.add(name)
            if type(param) is torch.nn.Parameter:
                param.__class__ = PendingParameter
                cast("PendingParameter", param)._kvps_owner = self
            else:
                now.append(name)
        return now

    def finish(self, names: Iterable[str] | None = None) -> None:
        """Make the updates of these parameters now, or all deferred updates."""
        wanted = list(self._params) if names is None else names
        due = [name for name in wanted if name in self._pending]
        self._settle(due)
        if due:
            self._update(due)

    def finish_of(self, params: Iterable[torch.Tensor]) -> None:
        """Make the updates of these parameters now."""
        self.finish([self._names[param] for param in params])

    def forget(self) -> None:
        """Drop the updates that were deferred."""
        self._settle(list(self._pending))

    def close(self) -> None:
        """Make all updates, and remove the hooks."""
        self.finish()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._end()

    def _settle(self, names: Iterable[str]) -> None:
        """Let these be ordinary parameters."""
        for name in names:
            self._pending.discard(name)
            param = self._params[name]
            if type(param) is PendingParameter:
                del vars(param)["_kvps_owner"]
                cast("torch.Tensor", param).__class__ = torch.nn.Parameter


class DeferredUpdates(ForwardOverlap):
    """The updates that are left to do of a step that has returned.

    They may be made in the middle of anything that reads a parameter: under autocast, or in inference mode,
    for example.

    Args:
        module: the model, whose parameters wait.
        model: its parameters in the store.
        optimizer: over them.
        on_store: the servers return weights.
    """

    def __init__(
        self, module: torch.nn.Module, model: ParameterSync, optimizer: torch.optim.Optimizer, on_store: bool
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._on_store = on_store
        self._buckets: dict[str, InFlight] = {}
        """Parameter -> the gradients that its update waits for."""
        self._rates: list[dict[str, Any]] = []
        """The optimizer's groups without their parameters, as they were at that step."""
        self._group_of: dict[torch.Tensor, int] = {}
        """Parameter -> the number of its group at that step."""
        # Hooks were called when the script made the step: this is one of its parts.
        self._plain_step = plain_step(optimizer)
        super().__init__(module, model.params, self._update_arrived)

    def put_off_step(self, buckets: dict[str, InFlight]) -> None:
        """Let each of these parameters be updated when its module needs it."""
        self._buckets = buckets
        self._rates = [
            {option: value for option, value in group.items() if option != "params"}
            for group in self._optimizer.param_groups
        ]
        self._group_of = {
            param: number
            for number, group in enumerate(self._optimizer.param_groups)
            for param in group["params"]
        }
        for name in buckets:
            self._params[name].grad = None  # the next gradients are of another step
        self.put_off(buckets)

    def _update_arrived(self, names: list[str]) -> None:
        """Wait for the gradients or weights of these parameters, and update them."""
        buckets = {name: self._buckets.pop(name) for name in names}
        try:
            for bucket in buckets.values():
                bucket.wait()
            device = next(iter(self._params.values())).device.type
            with torch.inference_mode(mode=False), torch.autocast(device, enabled=False):
                if self._on_store:
                    for name, bucket in buckets.items():
                        bucket.bring([name], self._params)
                    self._model.note_weights(name for bucket in buckets.values() for name in bucket.values)
                else:
                    self._step(buckets)
        except EpochChanged as error:
            self._buckets.clear()
            self.forget()
            self._model.go_on(error)
            # An optimizer here skips the next step: modules have computed with other weights.
        except BaseException as error:
            if isinstance(error, Timeout) or not (isinstance(error, KvpsError) or self._model.is_torn):
                self._buckets.update(buckets)
                self._mark(buckets)  # the next reader waits on
            raise

    def _step(self, buckets: Mapping[str, InFlight]) -> None:
        """Let the optimizer step these parameters alone."""
        groups: dict[int, list[torch.Tensor]] = {}
        before: dict[torch.Tensor, torch.Tensor | None] = {}
        for name, bucket in buckets.items():
            param = self._params[name]
            groups.setdefault(self._group_of.get(param, 0), []).append(param)
            before[param] = param.grad
            param.grad = bucket.gradient(name)
        whole = self._optimizer.param_groups
        self._optimizer.param_groups = [
            {**self._rates[number], "params": params} for number, params in groups.items()
        ]
        try:
            with self._model.written():
                self._plain_step(self._optimizer)
        finally:
            self._optimizer.param_groups = whole
            for param, gradient in before.items():
                param.grad = gradient


def _compile(reference: weakref.ref[ForwardOverlap], _: object) -> None:
    """Torch begins to compile: make all updates."""
    overlap = reference()
    if overlap is not None:
        overlap.is_compiled = True
        overlap.finish()


def _drop(callbacks: list[Any], callback: Any) -> None:
    if callback in callbacks:
        callbacks.remove(callback)
