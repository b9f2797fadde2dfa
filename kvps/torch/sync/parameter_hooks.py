"""Gradient hooks: a call for each gradient, a call at the end of a backward pass, and a count of passes.

Every front end that acts during backward uses them, and no other file registers such hooks with torch.
:func:`watch` calls a method for each gradient, :class:`PassEnd` calls at the end of a backward pass.
:class:`ParameterHooks` serves the front ends that push the gradients of a whole model,
:class:`~kvps.torch.sync.gradient_sync.GradientSync` and
:class:`~kvps.torch.sharded.gradient_sender.GradientHooks`: a second gradient of a parameter in one
step would be a second push, and so another round. So several passes make up a step only where that
was asked for; then torch adds gradients up until the last pass.

A parameter does not keep the front end alive that has put a hook on it: torch's hooks are no part
of what Python's garbage collector sees, so a model and a front end that refer to each other would
never be freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

from kvps.errors import ConfigError
from kvps.phrases import names_in_words

_newest: Any = WeakIdKeyDictionary()
"""Parameter -> a weak reference to the hooks through which its gradients leave, the newest ones."""


def graph_task() -> int:
    """Return the number of the backward pass that this thread is in; -1 for none."""
    return int(torch._C._current_graph_task_id())


def when_accumulated(leaf: torch.Tensor, call: Callable[[torch.Tensor], None]) -> Any:
    """Call with a leaf each time that backward has added a gradient to its ``.grad``; return
    torch's handle."""
    return leaf.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]  # torch's


def watch(method: Callable[[Any], None], key: object, tensor: torch.Tensor) -> Any:
    """Call a bound method with ``key`` for each gradient of a tensor, while the method's object
    lives; return torch's handle.

    Example:
        >>> class Seen(list):
        ...     pass
        >>> seen, weight = Seen(), torch.ones(2, requires_grad=True)
        >>> handle = watch(seen.append, "weight", weight)
        >>> weight.sum().backward()
        >>> seen
        ['weight']
    """
    return when_accumulated(tensor, partial(_tell, weakref.WeakMethod(method), key))


def _tell(method: weakref.WeakMethod[Callable[[Any], None]], key: object, _: object) -> None:
    found = method()
    if found is not None:
        found(key)


class PassEnd:
    """The end of a backward pass, and a call there.

    A pass inside another one, as activation checkpointing makes it, belongs to the outer one if
    that is awaited. torch drops the callbacks of a pass that fails; the next pass is awaited anew.
    """

    def __init__(self) -> None:
        self._awaited: Callable[[], object] = _nothing
        """Returns the callback that torch holds; None if its pass is over, or has failed."""

    @property
    def is_missed(self) -> bool:
        """Whether the last pass that was awaited has failed."""
        return self._awaited is not _nothing and self._awaited() is None

    def wait(self, call: Callable[[], None]) -> bool:
        """Call at the end of the pass that this thread is in, once; return whether this is the
        first request."""
        if self._awaited() is not None:
            return False

        def callback() -> None:  # which torch alone holds
            self._awaited = _nothing
            call()

        self._awaited = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)
        return True


def _nothing() -> None:
    """Return None, as a weak reference does whose object is gone."""


class Trainable(Protocol):
    """A model, some of whose parameters are trained."""

    @property
    def params(self) -> Mapping[str, torch.Tensor]:
        """Name -> parameter, of all of them."""

    @property
    def trained(self) -> list[str]:
        """The names of the parameters that are trained."""


class ParameterHooks:
    """The hooks of one front end on the parameters of a model.

    Args:
        model: its parameters.
        passes: the number of backward passes that make up a step.
        on_gradient: called with the name of a parameter when torch has added a gradient to ``.grad``.

    Raises:
        ConfigError: for something else than a number of passes.
    """

    def __init__(self, model: Trainable, passes: int, on_gradient: Callable[[str], None]) -> None:
        if type(passes) is not int or passes < 1:
            raise ConfigError(f"backward_passes_per_step={passes!r}: use a whole number of passes, 1 or more")
        self._model = model
        self._passes_per_step = passes
        self._on_gradient = on_gradient
        self._passes: dict[str, int] = {}
        """Name -> the number of passes whose gradients are in ``.grad`` and have not left."""
        self._hooks: dict[str, Any] = {}
        weakref.finalize(self, _remove, self._hooks).atexit = False
        self.watch()

    def watch(self) -> None:
        """Put hooks on all parameters that are trained, except those that have one.

        A front end that was made earlier over the same parameters, and is not used any more, lets go.
        """
        for name in self._model.trained:
            if name in self._hooks:
                continue
            param = self._model.params[name]
            older = _newest[param]() if param in _newest else None
            if older is not None:
                older.close()
            _newest[param] = weakref.ref(self)
            self._hooks[name] = watch(self.tell, name, param)

    def close(self) -> None:
        """Take the hooks away: gradients stay where they are."""
        _remove(self._hooks)

    def tell(self, name: str) -> None:
        """Torch has added a gradient of a parameter."""
        self._on_gradient(name)

    @property
    def is_begun(self) -> bool:
        """Whether there are gradients of this step that have not left."""
        return bool(self._passes)

    def count(self, name: str) -> bool:
        """Count a pass; return whether it is the last of the step."""
        self._passes[name] = self._passes.get(name, 0) + 1
        return self._passes[name] >= self._passes_per_step

    def leave(self, name: str) -> None:
        """Count no more passes of a parameter: its gradient leaves."""
        self._passes.pop(name, None)

    def begin(self) -> None:
        """Begin the next step."""
        self._passes.clear()

    def missing(self, left: Container[str]) -> list[str]:
        """Return the trained parameters without a gradient, except those whose gradients have ``left``."""
        return [
            name for name in self._model.trained if name not in left and self._model.params[name].grad is None
        ]

    def no_gradient(self, missing: list[str], since: str, instead: str) -> ConfigError:
        """Return the error for parameters that no backward pass has reached.

        Args:
            missing: their names.
            since: the call that begins a step.
            instead: what to do about it.
        """
        return ConfigError(
            f"no gradient for {names_in_words(missing)}, of {len(self._model.trained)} parameters: no "
            f"backward() has reached them since {since}. {instead}"
        )


def _remove(hooks: dict[str, Any]) -> None:
    for hook in hooks.values():
        hook.remove()
    hooks.clear()


def second_gradient(name: str, instead: str) -> ConfigError:
    """Return the error for a parameter that got a gradient after its gradient of this step had left.

    Args:
        name: the parameter.
        instead: what to do about it.
    """
    return ConfigError(
        f"parameter {name!r} got another gradient after the first was pushed, and before step(): {instead}"
    )
