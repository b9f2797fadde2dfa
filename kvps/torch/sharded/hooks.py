"""Forward and backward hooks that unshard and reshard the weights of parameter groups.

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

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from kvps.torch.sharded.param_groups import REST, ExecutionOrder, ParamGroup
from kvps.torch.sharded.residency import Residency
from kvps.torch.sync.parameter_hooks import PassEnd, graph_task


class GroupHooks:
    """The forward and backward passes of a model whose weights come and go.

    Args:
        blocks: the model, the rest first.
        params: name -> parameter.
        weights: what brings them.
        is_done: whether the gradient of a parameter is complete in this step.
        on_forward: called when a forward pass of the model begins.
        on_end: called when backward ends.
    """

    def __init__(
        self,
        blocks: Sequence[ParamGroup],
        params: Mapping[str, torch.Tensor],
        weights: Residency,
        is_done: Callable[[str], bool],
        on_forward: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self._blocks = blocks
        self._params = params
        self._weights = weights
        self._is_done = is_done
        self._on_forward = on_forward
        self._on_end = on_end
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
        """Ask for what the next forward pass begins with."""
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
                self._on_forward()
                self._order.begin()
            coming = self._order.enter(number)
            self._weights.expect(names)
            if coming is not None:
                self._weights.expect(self._blocks[coming].names)
        self._weights.bring(names)
        self._weights.hold(names)
        has_begun = torch.is_grad_enabled() and self._weights.remember()
        self._inside.append((number, has_begun))

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
            self._weights.free([name for name in left if not self._params[name].requires_grad])
        self._reached = number
        before = self._order.before(number)
        self._weights.expect(self._open(number))
        if before is not None:
            self._weights.expect(self._open(before))
        self._weights.bring(self._open(number))

    def _open(self, number: int) -> list[str]:
        """Return what backward may still need of a block."""
        return [name for name in self._blocks[number].names if not self._is_done(name)]

    def _end(self) -> None:
        self._reached = None
        self._on_end()
        self._weights.free()
