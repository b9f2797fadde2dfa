"""Parameter groups: modules whose weights are pulled and freed together, their order, and hooks on them.

A *block* is a module whose weights are needed at the same time: those of the module, and of all inside it
that are in no block of their own. Without a list from the user, blocks are the elements of every
``ModuleList`` and ``Sequential``, of the outermost ones where they hold other modules. What is left (an
embedding, the last norm) is the *rest*: block 0, whose module is the whole model.

A parameter that two blocks share is in both.

Forward and backward hooks that unshard and reshard the weights of parameter groups.

Theory of operation
-------------------
Before a block's forward its weights are brought and the next block's asked for, in the order that the
pass before has shown; behind it they are freed. Backward goes the other way. It is noticed at the
outputs: when the gradient of one is there, the block's weights are brought, and those of the block before
are asked for. A weight is freed when its gradient is complete, as then nothing needs it any more::

    forward    bring 1, expect 2 | 1 computes | free 1 | bring 2, expect 3 | 2 computes | ...
    backward   ... | bring 2, expect 1 | gradients of 2 leave, each frees its weight | bring 1 | ...

The block that forward ends with stays, since backward begins there, and so does the rest, which both begin
and end with. What is still here when backward ends (frozen weights, such as were not used) is freed then.
Without gradients every block is freed behind its forward.

A forward pass inside backward is one that activation checkpointing repeats: it brings weights and frees none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from kvps.errors import ConfigError
from kvps.torch.sharded.gradient_sender import GradientHooks
from kvps.torch.sharded.residency import Residency
from kvps.torch.sync.parameter_hooks import PassEnd, graph_task

REST = 0
"""The number of the block of all that is in no other."""
_HOLDERS = (torch.nn.ModuleList, torch.nn.ModuleDict)


@dataclass(eq=False, slots=True)
class ParamGroup:
    """A module, and the weights that it needs to compute.

    Attributes:
        path: of the module in the model; empty for the rest.
        module: whose forward pass needs the parameters.
        names: of the parameters, each once.
        members: path and module of all modules inside, itself first, but for modules of other blocks.
    """

    path: str
    module: torch.nn.Module
    names: list[str] = field(default_factory=list)
    members: list[tuple[str, torch.nn.Module]] = field(default_factory=list)


def cut(
    module: torch.nn.Module,
    params: Mapping[str, torch.Tensor],
    chosen: Iterable[torch.nn.Module] | None = None,
) -> list[ParamGroup]:
    """Return the blocks of a model, the rest first, the others as the model lists them.

    Args:
        module: the model.
        params: name -> parameter, each parameter once.
        chosen: the modules that are blocks; None for repeated ones.

    Raises:
        ConfigError: if one of ``chosen`` is no module inside ``module``.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1))
        >>> [one.path for one in cut(net, dict(net.named_parameters()))]
        ['', '0', '2']
    """
    heads = list(_repeated(module)) if chosen is None else _checked(module, chosen)
    names = {id(param): name for name, param in params.items()}
    blocks = {id(module): ParamGroup("", module)}

    def walk(submodule: torch.nn.Module, path: str, block: ParamGroup) -> None:
        if submodule in heads and submodule is not block.module:
            if id(submodule) in blocks:  # a module that is used in two places
                return
            block = blocks[id(submodule)] = ParamGroup(path, submodule)
        block.members.append((path, submodule))
        for param in submodule.parameters(recurse=False):
            name = names[id(param)]
            if name not in block.names:
                block.names.append(name)
        for title, child in submodule.named_children():
            walk(child, f"{path}.{title}" if path else title, block)

    walk(module, "", blocks[id(module)])
    return [block for block in blocks.values() if block.names or block.module is module]


def _repeated(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the elements of lists and sequences of modules that can be called by themselves."""
    for child in module.children():
        if isinstance(child, _HOLDERS) or _is_sequence(child):
            yield from _repeated(child)
        elif (isinstance(module, _HOLDERS) or _is_sequence(module)) and _is_callable(child):
            yield child
        else:
            yield from _repeated(child)


def _is_sequence(module: torch.nn.Module) -> bool:
    """Whether it computes by calling its elements, and has nothing else."""
    is_plain = type(module).forward is torch.nn.Sequential.forward
    return isinstance(module, torch.nn.Sequential) and is_plain


def _is_callable(module: torch.nn.Module) -> bool:
    return type(module).forward is not torch.nn.Module.forward


def _checked(module: torch.nn.Module, chosen: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    inside = set(module.modules())
    heads = list(chosen)
    for number, head in enumerate(heads):
        if head not in inside:
            raise ConfigError(
                f"blocks: element {number} is a {type(head).__name__}, not a module inside the model; "
                "give modules such as [*model.layers, model.head]"
            )
        if not _is_callable(head):
            raise ConfigError(
                f"blocks: element {number} is a {type(head).__name__}, which is never called; give its "
                "elements"
            )
    return heads


class ExecutionOrder:
    """In which order blocks are computed with, as the last forward pass has shown it.

    Before there was one, that in which the model lists them.

    Example:
        >>> order = Order(3)
        >>> order.begin()
        >>> order.enter(0), order.enter(2), order.enter(1)
        (1, None, 2)
        >>> order.begin()
        >>> order.enter(0), order.before(2)
        (2, None)
    """

    def __init__(self, count: int) -> None:
        """Begin with ``count`` blocks."""
        self._known = list(range(count))
        self._seen: list[int] = []

    def begin(self) -> None:
        """A forward pass begins."""
        if self._seen:
            self._known, self._seen = self._seen, []

    def enter(self, number: int) -> int | None:
        """A block is computed with; return which is next, as far as that is known."""
        place = len(self._seen)
        self._seen.append(number)
        if self._known[place : place + 1] != [number]:
            if number not in self._known:
                return None
            place = self._known.index(number)
        return self._known[place + 1] if place + 1 < len(self._known) else None

    def is_last(self, number: int) -> bool:
        """Whether backward begins with this block, as far as that is known."""
        return self._known[-1] == number

    def before(self, number: int) -> int | None:
        """Return which block was entered before this one: backward comes to it next."""
        places = [place for place, number_seen in enumerate(self._seen) if number_seen == number]
        earlier = [seen for seen in self._seen[: places[-1]] if seen != number] if places else []
        if number == REST:
            earlier = self._seen
        return earlier[-1] if earlier and earlier[-1] != REST else None

    def first(self) -> int | None:
        """Return the block that a forward pass begins with, behind the rest."""
        known = [group for group in (self._seen or self._known) if group != REST]
        return known[0] if known else None


class GroupHooks:
    """The forward and backward passes of a model whose weights come and go.

    Args:
        blocks: the model, the rest first.
        weights: what brings them.
        gradients: those of one step.
    """

    def __init__(self, blocks: Sequence[ParamGroup], weights: Residency, gradients: GradientHooks) -> None:
        self._blocks = blocks
        self._weights = weights
        self._gradients = gradients
        self._order = ExecutionOrder(len(blocks))
        self._inside: list[tuple[int, bool]] = []
        """The blocks that compute now, outermost first, and whether each has begun to remember."""
        self._reached: int | None = None
        """The block that backward came to last."""
        self._pass_end = PassEnd()
        self._hooks: list[Any] = []
        for number, block in enumerate(blocks):
            before = partial(self._enter, number)
            after = partial(self._leave, number)
            self._hooks += [
                block.module.register_forward_pre_hook(before, prepend=True),
                block.module.register_forward_hook(after, always_call=True),
            ]

    def close(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def expect_first(self) -> None:
        """Ask for the weights that the next forward pass begins with."""
        first = self._order.first()
        self._weights.expect(self._blocks[REST].names)
        if first is not None:
            self._weights.expect(self._blocks[first].names)

    # --- forward ----------------------------------------------------------------------------------

    def _enter(self, number: int, *_: object) -> None:
        names = self._blocks[number].names
        if graph_task() != -1:
            self._pass_end.wait(self._end)
        else:
            if number == REST:
                self._begin()
                self._order.begin()
            coming = self._order.enter(number)
            self._weights.expect(names)
            if coming is not None:
                self._weights.expect(self._blocks[coming].names)
        self._weights.bring(names)
        self._weights.hold(names)
        has_begun = torch.is_grad_enabled() and self._weights.remember()
        self._inside.append((number, has_begun))

    def _begin(self) -> None:
        """A forward pass of the model begins."""
        self._gradients.hooks.watch()
        if self._gradients.is_given_up and not self._gradients.is_begun:
            self._gradients.begin()  # it was noticed when nothing was trained
            self._weights.forget()

    def _leave(self, number: int, _: object, __: object, output: object) -> None:
        if not self._inside or self._inside[-1][0] != number:
            return  # it could not be entered
        names = self._blocks[number].names
        if self._inside.pop()[1]:
            self._weights.end_remembering()
        self._weights.release(names)
        outputs = [
            leaf
            for leaf in tree_leaves(output)
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
        ]
        for tensor in outputs:
            output_hook = partial(self._on_gradient_of_output, number)
            tensor.register_hook(output_hook)  # type: ignore[no-untyped-call]  # torch has no types there
        if graph_task() != -1 or (outputs and (number == REST or self._order.is_last(number))):
            return
        self._weights.free(names)

    # --- backward ---------------------------------------------------------------------------------

    def _on_gradient_of_output(self, number: int, _: torch.Tensor) -> None:
        self._pass_end.wait(self._end)
        if self._reached is not None and self._reached not in (REST, number):
            left = self._blocks[self._reached].names
            self._weights.free([name for name in left if not self._gradients.params[name].requires_grad])
        self._reached = number
        before = self._order.before(number)
        self._weights.expect(self._open(number))
        if before is not None:
            self._weights.expect(self._open(before))
        self._weights.bring(self._open(number))

    def _open(self, number: int) -> list[str]:
        """Return what backward may still need of a block."""
        return [name for name in self._blocks[number].names if not self._gradients.is_done(name)]

    def _end(self) -> None:
        self._reached = None
        self._gradients.end_pass()
        self._weights.free()
