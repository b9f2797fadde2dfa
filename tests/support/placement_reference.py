"""The reference implementation of placement in docs/protocol.md, and models whose placement is measured."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from kvps.core.placement import Part
from tests.support.claims import ROOT

CRITEO = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306),
    *(10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
"""Rows of the 26 tables of the Criteo Kaggle data."""
Shapes = Mapping[str, tuple[int, ...]]


@cache
def reference() -> dict[str, Any]:
    """Return the names that the block in section 24 of the protocol defines."""
    text = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^## 24 .*?^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    return names


def first_rule(key: str, count: int, servers: int, bound: int, width: int = 1) -> tuple[Part, ...]:
    """Where the elements of a key that is cut lay by rule 1, that of kvps 0.1: one near-equal part each."""
    least = count // (servers * 32)
    width = width if count >= servers * width else 1
    units = [math.lcm(width, align) for align in (1024, 16)]
    unit = next((unit for unit in units if unit <= least), width if width > 1 else 16)
    if servers == 1 or count < max(bound, servers * 16):
        return (Part(sum(key.encode()) % servers, 0, count),)
    cuts = [count * at // servers // unit * unit for at in range(servers)] + [count]
    return tuple(Part(at, cuts[at], cuts[at + 1] - cuts[at]) for at in range(servers))


def resnet50() -> dict[str, tuple[int, ...]]:
    """torchvision's names of ResNet-50's 161 arrays, and their shapes."""
    arrays: dict[str, tuple[int, ...]] = {
        "conv1.weight": (64, 3, 7, 7),
        "bn1.weight": (64,),
        "bn1.bias": (64,),
    }
    inside = 64
    for layer, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for block in range(blocks):
            path, outside = f"layer{layer}.{block}", 4 * width
            shapes = [(width, inside, 1, 1), (width, width, 3, 3), (outside, width, 1, 1)]
            for number, shape in enumerate(shapes, start=1):
                arrays[f"{path}.conv{number}.weight"] = shape
                arrays |= {f"{path}.bn{number}.{name}": shape[:1] for name in ("weight", "bias")}
            if block == 0:
                arrays[f"{path}.downsample.0.weight"] = (outside, inside, 1, 1)
                arrays |= {f"{path}.downsample.1.{name}": (outside,) for name in ("weight", "bias")}
            inside = outside
    return arrays | {"fc.weight": (1000, 2048), "fc.bias": (1000,)}


def gpt2() -> dict[str, tuple[int, ...]]:
    """The names of GPT-2 small's 148 arrays in transformers, and their shapes."""
    wide = 768
    arrays: dict[str, tuple[int, ...]] = {"wte.weight": (50_257, wide), "wpe.weight": (1024, wide)}
    for block in range(12):
        path = f"h.{block}"
        arrays |= {f"{path}.ln_{norm}.{name}": (wide,) for norm in (1, 2) for name in ("weight", "bias")}
        layers = {"attn.c_attn": (wide, 3 * wide), "attn.c_proj": (wide, wide)}
        layers |= {"mlp.c_fc": (wide, 4 * wide), "mlp.c_proj": (4 * wide, wide)}
        for name, shape in layers.items():
            arrays |= {f"{path}.{name}.weight": shape, f"{path}.{name}.bias": shape[1:]}
    return arrays | {"ln_f.weight": (wide,), "ln_f.bias": (wide,)}


MODELS: dict[str, Shapes] = {
    "ResNet-50": resnet50(),
    "GPT-2 small": gpt2(),
    "26 tables": {f"tables.{at}.weight": (rows, 16) for at, rows in enumerate(CRITEO)},
    "5,000 biases": {f"layers.{at}.bias": (4096,) for at in range(5000)},
}


def loads(placed: Mapping[str, Sequence[Part]], servers: int) -> list[int]:
    """Return the elements of each server."""
    held = [0] * servers
    for parts in placed.values():
        for part in parts:
            held[part.server] += part.size
    return held


def moved(before: Sequence[Part], after: Sequence[Part]) -> int:
    """Return how many elements of a key lie on another server afterwards."""
    total = at = left = right = 0
    while left < len(before) and right < len(after):
        ends = sum(before[left][1:]), sum(after[right][1:])
        total += (min(ends) - at) * (before[left].server != after[right].server)
        at = min(ends)
        left, right = left + (ends[0] == at), right + (ends[1] == at)
    return total
