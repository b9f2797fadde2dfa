"""The reductions by Horovod's names, and the rule for the old argument ``average=``."""

from __future__ import annotations

from enum import Enum


class ReduceOp(Enum):
    """A reduction; its value is what the negotiation compares."""

    AVERAGE = "average"
    SUM = "sum"
    ADASUM = "adasum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


Average, Sum, Adasum = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT


def chosen(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """Return the reduction that two arguments ask for; Average if neither does.

    Raises:
        ValueError: if both are given, or ``op`` is no reduction.
    """
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if op is None:
        return Sum if average is False else Average
    if not isinstance(op, ReduceOp):
        raise ValueError(f"op={op!r}: use hvd.Average, Sum, Min, Max, Product or Adasum")
    return op
