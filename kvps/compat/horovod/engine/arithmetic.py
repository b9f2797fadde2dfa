"""The arithmetic of reductions: factors, means, and Adasum."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvps.torch.distributed.host_tensor import HALF, divide


@torch.no_grad()
def scale(tensor: torch.Tensor, factor: float) -> None:
    """Multiply a tensor in place: whole numbers in float64 and cut off at the point, half types in float32.

    Example:
        >>> scale(whole := torch.tensor([-3, 3]), 0.5)
        >>> whole
        tensor([-1,  1])
    """
    if factor == 1.0:
        return
    if tensor.dtype in HALF:
        tensor.copy_(tensor.float() * factor)
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double() * factor)


def finish(row: torch.Tensor, op: str, ranks: int, postscale: float) -> None:
    """Turn the sum of a reduction into its result, in place.

    Args:
        row: the sum over the ranks.
        op: ``average`` divides it by the number of ranks.
        ranks: of the process set.
        postscale: a factor of the result.
    """
    if op == "average":
        if row.dtype in HALF:
            scale(row, 1.0 / ranks)
        else:
            divide(row, ranks)
    scale(row, postscale)


def adasum(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the adaptive sum of gradients: a sum where they are orthogonal, a mean where they agree.

    Neighbours are combined in a binary tree, as in "Scaling Distributed Training with Adaptive Summation"
    (Maleki et al., https://arxiv.org/abs/2006.02924)::

        adasum(a, b) = (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b

    Example:
        >>> adasum([torch.tensor([2.0, 0.0]), torch.tensor([0.0, 3.0])])
        tensor([2., 3.])
        >>> adasum([torch.tensor([2.0, 2.0]), torch.tensor([2.0, 2.0])])
        tensor([2., 2.])
    """
    dtype = rows[0].dtype
    level = [row.double() for row in rows]
    while len(level) > 1:
        pairs = [level[index : index + 2] for index in range(0, len(level), 2)]
        level = [_pair(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0].to(dtype)


def _pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    dot, aa, bb = torch.dot(a, b), torch.dot(a, a), torch.dot(b, b)
    of_a = 1.0 - dot / (2 * aa) if aa else 1.0
    of_b = 1.0 - dot / (2 * bb) if bb else 1.0
    return of_a * a + of_b * b
