"""The initial upload of a model's weights, group by group, so that no worker needs room for all.

A model that was built on the ``meta`` device has no values at all. Rank 0 makes those of one block at a time,
has its modules set them, as they would have in their constructors, and sends them; the others only say what
they expect. A model that was built as usual is here at first, and each block is freed once it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from kvps.errors import ConfigError
from kvps.store.server_store import DistStore
from kvps.torch.sharded.param_groups import ParamGroup
from kvps.torch.sharded.residency import Residency

Init: TypeAlias = Callable[[torch.nn.Module], object]


def check_init(blocks: Sequence[ParamGroup], init: Init | None) -> None:
    """Check that all values that are missing can be made.

    Raises:
        ConfigError: naming a module that cannot make its own, if there is no ``init``; or for an ``init``
            that nothing needs.
    """
    members = [member for block in blocks for member in block.members if _own_meta(member[1])]
    if init is not None and not members:
        raise ConfigError(
            "init= fills modules on the meta device, but this module has values; build it under "
            "torch.device('meta'), or remove init="
        )
    for path, submodule in members:
        if init is None and _reset_of(submodule) is None:
            raise ConfigError(
                f"module {path!r} ({type(submodule).__name__}) is on the meta device and has no "
                "reset_parameters(): give init=, a function that is called with each such module and fills "
                "its own parameters and buffers"
            )


def upload(
    kv: DistStore,
    blocks: Sequence[ParamGroup],
    params: Mapping[str, torch.Tensor],
    weights: Residency,
    init: Init | None,
    device: torch.device,
) -> None:
    """Give the store rank 0's values of all parameters, and let go of them here.

    Buffers of modules on the meta device are made, with rank 0's values on rank 0 only.

    Args:
        kv: the store.
        blocks: of the model.
        params: name -> parameter.
        weights: of these parameters.
        init: fills the own parameters and buffers of a module; None calls its ``reset_parameters()``.
        device: where a parameter of the meta device is to be.
    """
    sent: set[str] = set()
    for block in blocks:
        bare = [submodule for _, submodule in block.members if _own_meta(submodule)]
        if bare:
            _make_real(block, bare, params, weights, device, is_filled=kv.rank == 0)
            if kv.rank == 0:
                with torch.no_grad():
                    for submodule in reversed(bare):  # what is inside first, as constructors do
                        _fill(submodule, init)
        names = [name for name in block.names if name not in sent]
        if names:
            kv.init(names, [weights.stand_in(name) for name in names])
        sent.update(names)
        for name in block.names:
            weights.leave(name)


def _make_real(
    block: ParamGroup,
    bare: Sequence[torch.nn.Module],
    params: Mapping[str, torch.Tensor],
    weights: Residency,
    device: torch.device,
    *,
    is_filled: bool,
) -> None:
    """Take the tensors of a block from the meta device; with memory for values, if they get some."""
    for name in block.names:
        param = params[name]
        if param.is_meta:
            real = torch.nn.Parameter(
                torch.empty((), dtype=param.dtype, device=device).expand(param.shape),
                requires_grad=param.requires_grad,
            )
            torch.utils.swap_tensors(param, real)  # type: ignore[no-untyped-call]  # an optimizer may know it already
        if is_filled:
            param.data = weights.empty(name)  # also of one that another block has sent
    for submodule in bare:
        for title, buffer in submodule.named_buffers(recurse=False):
            if buffer.is_meta:
                submodule._buffers[title] = torch.empty_like(buffer, device=device)


def _fill(module: torch.nn.Module, init: Init | None) -> None:
    reset = _reset_of(module)
    if init is not None:
        init(module)
    elif reset is not None:
        reset()


def _own_meta(module: torch.nn.Module) -> bool:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(tensor.is_meta for tensor in own)


def _reset_of(module: torch.nn.Module) -> Callable[[], object] | None:
    """Return what sets the first values of a module; attention has it under a name of its own."""
    found = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return found if callable(found) else None
