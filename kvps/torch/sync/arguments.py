"""The checked arguments of DistributedOptimizer."""

from __future__ import annotations

import torch

from kvps.errors import ConfigError, Mismatch
from kvps.store.base import Store
from kvps.store.kvstore import KVStore


def numbered(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """Name parameters by group and place, or as their groups do."""
    found: list[tuple[str, torch.Tensor]] = []
    for number, group in enumerate(optimizer.param_groups):
        params = group["params"]
        names = group.get("param_names") or [f"{number}.{place}" for place in range(len(params))]
        found += zip(names, params, strict=True)
    return found


def check_plain(optimizer: torch.optim.Optimizer, owner: str) -> None:
    """Check that an optimizer of another front end was not given.

    Raises:
        ConfigError: if its step() exchanges gradients itself.
    """
    if hasattr(optimizer, "skip_synchronize"):
        raise ConfigError(
            f"optimizer: got a DistributedOptimizer, which exchanges gradients itself; give {owner} the "
            "torch optimizer that it wraps, and use only one of the two"
        )


def buffers_of(given: object) -> dict[str, torch.Tensor]:
    """Return the buffers of a module; of anything else there are none."""
    return dict(given.named_buffers()) if isinstance(given, torch.nn.Module) else {}


def check_norms(given: object, owner: str) -> None:
    """Check that no embedding that is trained writes to its weight in forward passes.

    Raises:
        ConfigError: if one has ``max_norm``: it rescales the rows of a worker's own batch, on that
            worker alone.
    """
    if not isinstance(given, torch.nn.Module):
        return
    for path, submodule in given.named_modules():
        is_table = isinstance(submodule, torch.nn.Embedding | torch.nn.EmbeddingBag)
        if is_table and submodule.max_norm is not None and submodule.weight.requires_grad:
            raise ConfigError(
                f"{path or 'the module'}: {type(submodule).__name__}(max_norm={submodule.max_norm:g}) "
                "rescales rows of its weight in each forward pass, other rows on each worker, so that the "
                f"weights of a {owner} would differ between workers. Create it without max_norm, and limit "
                "norms with the optimizer on the workers: after step(), call "
                f"weight.data.renorm_({submodule.norm_type:g}, 0, {submodule.max_norm:g}) on every worker"
            )


def check_clipping(max_norm: float | None, on_store: bool, overlaps: bool, here: str, option: str) -> None:
    """Check that the servers can clip gradients by their global norm, if that is wanted.

    Args:
        max_norm: the norm; None if it is not wanted.
        on_store: the optimizer runs in the store.
        overlaps: gradients leave during backward.
        here: what to do if it runs on the workers.
        option: the option by which gradients leave during backward.

    Raises:
        ConfigError: if they cannot.
    """
    if max_norm is None:
        return
    if not on_store:
        raise ConfigError(
            f"clip_global_norm={max_norm!r} is for update_on_kvstore=True. With the optimizer on "
            f"the workers {here}"
        )
    if overlaps:
        raise ConfigError(
            f"clip_global_norm={max_norm!r} needs all gradients of a step together, and with {option} they "
            f"leave one by one during backward: leave out {option}"
        )


def divisor_of(kv: Store, op: str) -> int:
    """Return by what a worker divides what comes back, as the store does not.

    Raises:
        Mismatch: if it would have to, and cannot know by what.
    """
    if is_free(str(kv.type)) or kv.num_workers == 1:
        return 1
    takes_means = isinstance(kv, KVStore) and kv.average
    if takes_means and op == "sum":
        raise Mismatch(f"op='sum', but store {kv.name!r} computes means; create it without average=True")
    if op == "sum" or takes_means:
        return 1
    if str(kv.type).startswith("dist"):
        raise Mismatch(
            f"op='average', but store {kv.name!r} computes sums; create it with average=True, or give the "
            "name of a store"
        )
    return int(kv.num_workers)


def is_free(store: str) -> bool:
    """Whether a store of this name or type applies each push by itself, so that nothing is averaged."""
    return store.startswith(("dist_async", "dist_ssp"))
