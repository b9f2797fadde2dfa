"""Forward overlap: the next forward pass begins before the last updates are in.

Theory of operation
-------------------
Without this, ``step()`` waits for the whole model, and the network is silent while the next forward pass
computes. With it, ``step()`` takes the gradients away from their parameters and returns. A hook before
each module's ``forward()`` waits for the parameters of that module alone and updates them, in the order
in which they are needed, which is the order in which they come back (:mod:`kvps.torch.sync.buckets`)::

    backward 1            step  forward 2             backward 2
    ... fc  conv2  conv1    |   [conv1] [conv2] [fc]  ...
          gradients leave        \\______\\_______\\__ each waits for its own update

So any torch optimizer whose state is per parameter can be used: it steps a few parameters at a time, with the
rates that held when ``step()`` was called, even if a scheduler has changed them since.

The first forward pass shows which module waits for a parameter: its own module, or, if that is never called
(``MultiheadAttention`` reads the weight of its ``out_proj`` and does not call it), the nearest enclosing
module that is called. Call ``synchronize()`` before you read parameters elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch


class ForwardOverlap:
    """Parameters with a deferred update, and the modules that wait for it.

    Args:
        module: the model.
        params: name -> parameter of the model.
        update: updates these parameters when all of their gradients have arrived.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        params: Mapping[str, torch.Tensor],
        update: Callable[[list[str]], None],
    ) -> None:
        self._update = update
        self._waits = _own(module, params)
        """Module -> the parameters that it waits for."""
        self._called: set[str] = set()
        self.is_known = False
        """Whether the first forward pass has shown which modules are called."""
        self._pending: dict[str, None] = {}
        self._hooks: list[Any] = [
            one.register_forward_pre_hook(lambda *_, path=path: self._on_forward(path))
            for path, one in module.named_modules()
        ]
        root: Any = module  # torch gives this method no types
        self._hooks.append(root.register_state_dict_pre_hook(lambda *_: self.finish()))

    def learn(self) -> None:
        """A forward pass is over: let modules wait for the parameters of inner modules that are not called."""
        for path in [waiting for waiting in self._waits if waiting not in self._called]:
            around = path
            while around and around not in self._called:
                around = around.rpartition(".")[0]
            self._waits.setdefault(around, []).extend(self._waits[path])
        self.is_known = True

    def put_off(self, names: Iterable[str]) -> None:
        """Defer the update of these parameters until a module needs them. Parameters that no module waits for
        are updated now.
        """
        self._pending.update(dict.fromkeys(names))
        awaited = {name for path in self._called for name in self._waits.get(path, ())}
        self.finish([name for name in self._pending if name not in awaited])

    def finish(self, names: Iterable[str] | None = None) -> None:
        """Make the updates of these parameters now, or all deferred updates."""
        wanted = list(self._pending) if names is None else names
        due = [name for name in wanted if name in self._pending]
        for name in due:
            self._pending.pop(name, None)
        if due:
            self._update(due)

    def forget(self) -> None:
        """Drop the updates that were deferred."""
        self._pending.clear()

    def close(self) -> None:
        """Make all updates, and remove the hooks."""
        self.finish()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _on_forward(self, path: str) -> None:
        if not self.is_known:
            self._called.add(path)
        elif self._pending:
            self.finish(self._waits.get(path, ()))


def _own(module: torch.nn.Module, params: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Return the parameters that each module owns; a shared parameter belongs to each of its modules."""
    names = {id(one): name for name, one in params.items()}
    own: dict[str, list[str]] = {}
    for path, one in module.named_modules():
        found = [names[id(param)] for param in one.parameters(recurse=False) if id(param) in names]
        if found:
            own[path] = found
    return own
